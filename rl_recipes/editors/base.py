"""What every image editor offers: the `Editor` base class, and its sizes.

An editor is built from the parts of a diffusers pipeline and samples at its own sizes. Latents are packed tokens
(B, T, C) in float32 whatever the dtype of the weights, since a sample rounded to bfloat16 would shift log-probabilities.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from torch import Tensor, nn

from rl_recipes.editors import attention, lora
from rl_recipes.editors.conditions import Conditions, Size
from rl_recipes.editors.errors import EditorError
from rl_recipes.editors.full import FullWeights, load_weights
from tpips_reward.prompts import is_text

__all__ = ["Conditions", "Editor", "EditorError", "Images", "Size", "group_by_size"]

Images = Sequence[Tensor | Sequence[Tensor]]


class Editor(ABC):
    """An image editor made of a pipeline's own parts. Parts are frozen and in eval mode; `add_lora` adds what trains.

    Args:
        pipe: a loaded diffusers pipeline of the class named by `pipeline_class`.
        device: where the parts go.
        dtype: dtype of the frozen weights.
        resolution: edits have about `resolution` x `resolution` pixels in area, at the source's own aspect ratio; None:
            `default_resolution`.
        attention_backend: the transformer's attention kernel, a name of diffusers such as "native", "flash" or "xformers";
            None: diffusers' choice.
        offload_text_encoders: their weights stay in the CPU's memory, and each layer's are on `device` while it runs.
    """

    pipeline_class: ClassVar[str]
    lora_targets: ClassVar[tuple[str, ...]]
    default_resolution: ClassVar[int] = 1024
    # False for text-to-image families: the image of a sample is the reward's reference and gives the size, nothing more.
    sees_image: ClassVar[bool] = True
    # Whether a sample may have several condition images.
    takes_several: ClassVar[bool] = False

    def __init__(
        self,
        pipe: Any,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        resolution: int | None = None,
        attention_backend: str | None = None,
        offload_text_encoders: bool = False,
    ) -> None:
        self.pipe = pipe
        self.device = torch.device(device)
        self.dtype = dtype
        self.resolution = self.default_resolution if resolution is None else resolution
        if self.resolution < self.size_multiple:
            raise EditorError(
                f"resolution is {self.resolution}, but this editor's smallest image is {self.size_multiple} pixels wide; "
                "give a larger resolution."
            )
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module):
                waits = offload_text_encoders and name.startswith("text_encoder")
                part.to("cpu" if waits else self.device).requires_grad_(False).eval()
                if any(p.is_floating_point() and p.dtype != dtype for p in part.parameters()):
                    part.to(dtype)
                if waits:
                    cpu_offload(part, self.device)
        self._full: FullWeights | None = None
        self.has_own_weights = True  # False after load_all
        self._wrapper: nn.Module | None = None
        self.attention_backend = attention_backend
        if attention_backend is not None:
            attention.set_backend(self.transformer, attention_backend, self.device, dtype)

    @classmethod
    def from_pretrained(cls, source: str | Path, device: Any = None, dtype: Any = None, **options: Any) -> Editor:
        """`load_editor`, for those who look for it here: the class is chosen by the pipeline's own name."""
        from rl_recipes.editors.registry import load_editor

        return load_editor(source, device=device, dtype=dtype, **options)

    @property
    def transformer(self) -> Any:
        """The module that predicts velocity; LoRA goes here."""
        return self.pipe.transformer

    def call_through(self, wrapper: nn.Module) -> None:
        """Call the transformer through `wrapper` from here on: DeepSpeed's engine around it."""
        self._wrapper = wrapper

    def _call_transformer(self, **inputs: Any) -> Any:
        return (self.transformer if self._wrapper is None else self._wrapper)(**inputs)

    @property
    @abstractmethod
    def size_multiple(self) -> int:
        """Sides of edited images are multiples of this many pixels."""

    # Sizes -----------------------------------------------------------------------------------------------------------

    def main_image(self, image: Tensor | Sequence[Tensor]) -> Tensor:
        """The image that gives the edit its size and that it is compared with: of several condition images the last one."""
        return last_image(image)

    def output_size(self, image: Tensor | Sequence[Tensor]) -> Size:
        """(height, width) of the edit of `image` (3, H, W), or of several condition images.

        The aspect ratio is the main image's own, up to rounding both sides to multiples of `size_multiple`.
        """
        height, width = self.main_image(image).shape[-2:]
        return fit_size(height, width, self.resolution**2, self.size_multiple)

    def fit(self, image: Tensor) -> Tensor:
        """`image` (3, H, W) at its output size, float32 in [0, 1]: what the editor sees and what an edit compares with."""
        return resize(check_image(image), self.output_size(image))

    def check_instruction(self, instruction: str) -> None:
        """Refuse an instruction that `encode` would refuse.

        Raises:
            EditorError: it is empty or no text; families add their own limits.
        """
        if not isinstance(instruction, str) or not instruction.strip():
            raise EditorError(f"An instruction must be a sentence, but it is {instruction!r}.")
        if not is_text(instruction):
            raise EditorError(f"The instruction {instruction[:80]!r} holds a lone surrogate, which is no character.")

    # What a pipeline family implements --------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, images: Images, instructions: Sequence[str], *, negative_prompt: str | None = None) -> Conditions:
        """Encode each (source, instruction) once, without gradients.

        Args:
            images: B images (3, H, W), floats in [0, 1]; editors of several images take a list of them for each sample.
            instructions: B instructions.
            negative_prompt: text for classifier-free guidance (" " is usual); None leaves guidance out. Editors whose
                guidance needs no second prediction (distilled ones) leave it unencoded.

        Raises:
            EditorError: images that are no such tensors, counts that differ, empty instructions, or sizes that differ.
        """

    @abstractmethod
    def sigmas(self, num_steps: int, conditions: Conditions) -> Tensor:
        """The pipeline's own noise levels for these conditions: (num_steps + 1,) float32 on the CPU, ending with 0."""

    @abstractmethod
    def noise(self, conditions: Conditions, generators: Sequence[torch.Generator]) -> Tensor:
        """Initial latents (B, T, C) float32: sample i depends on generators[i] alone, as in the pipeline."""

    @abstractmethod
    def velocity(
        self, latents: Tensor, sigma: float | Tensor, conditions: Conditions, guidance_scale: float = 1.0
    ) -> Tensor:
        """The velocity (noise - data) at `latents` (B, T, C), float32; sigma is one number or one a sample."""

    @abstractmethod
    def decode(self, latents: Tensor, conditions: Conditions) -> list[Tensor]:
        """Images (3, H, W) float32 in [0, 1] for latents (B, T, C); gradients flow unless the caller stops them."""

    # What trains -----------------------------------------------------------------------------------------------------

    def add_lora(self, rank: int, alpha: float, *, generator: torch.Generator) -> list[nn.Parameter]:
        """Add a float32 adapter to `lora_targets` and return its parameters, the only ones that train.

        The adapter changes nothing until it is trained: B is zero. `generator` (CPU) draws A.
        """
        if self._full is not None:
            raise EditorError("All weights train already; load the editor anew to train an adapter.")
        return lora.add(self.transformer, self.lora_targets, rank, alpha, generator)

    def train_all(self) -> list[nn.Parameter]:
        """Train all of the transformer's weights instead of an adapter, and return them.

        The methods below then act on these weights: the reference policy is a copy of those they began with, and `save_lora`
        writes a folder `transformer` for `from_pretrained` of the transformer's class.
        """
        self._full = FullWeights(self.transformer)
        return self._full.parameters()

    def load_all(self, folder: Path) -> None:
        """Put what `save_lora` wrote after `train_all`, a folder `transformer`, in the place of the transformer's weights.

        Raises:
            EditorError: they cannot be read, or are not those of this transformer.
        """
        load_weights(self.transformer, folder)
        self.has_own_weights = False

    def lora_parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of the transformer's modules."""
        return lora.parameters(self.transformer) if self._full is None else self._full.parameters()

    @contextmanager
    def disable_lora(self) -> Iterator[None]:
        """Switch the adapter off for the block: the reference policy."""
        with lora.disabled(self.transformer) if self._full is None else self._full.disabled():
            yield

    def save_lora(self, folder: str | Path) -> Path:
        """Write `pytorch_lora_weights.safetensors` to `folder`; `pipe.load_lora_weights(folder)` takes it."""
        return lora.save(self.pipe, Path(folder)) if self._full is None else self._full.save(Path(folder))


def last_image(image: Tensor | Sequence[Tensor]) -> Tensor:
    """The image itself, or the last of several condition images."""
    if isinstance(image, Tensor):
        return image
    if not image:
        raise EditorError("A sample has no condition image; give at least one image to edit.")
    return image[-1]


def fit_size(height: int, width: int, area: int, multiple: int) -> Size:
    """The size of about `area` pixels with the aspect ratio of height x width and sides that are multiples of `multiple`."""
    scale = math.sqrt(area / (height * width))
    fitted = (round(height * scale / multiple) * multiple, round(width * scale / multiple) * multiple)
    if min(fitted) < multiple:
        raise EditorError(
            f"An image of {height}x{width} pixels (height x width) is too elongated: at an area of {area} pixels its shorter "
            f"side would have less than {multiple} pixels; crop it or raise the resolution."
        )
    return fitted


def resize(image: Tensor, size: Size) -> Tensor:
    """Bicubic, antialiased resize of (3, H, W) floats in [0, 1]; the result stays in that range."""
    if tuple(image.shape[-2:]) == size:
        return image
    resized = F.interpolate(image[None], size=size, mode="bicubic", antialias=True, align_corners=False)
    return resized[0].clamp(0.0, 1.0)


def check_image(image: Any) -> Tensor:
    """`image` as float32; an EditorError says what is wrong with anything but finite (3, H, W) floats in [0, 1]."""
    if not isinstance(image, Tensor) or image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        found = f"a tensor of shape {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
        raise EditorError(f"An image to edit must be a tensor of shape (3, height, width), but it is {found}.")
    if not image.is_floating_point():
        raise EditorError(
            f"An image to edit must hold floats in [0, 1], but its dtype is {image.dtype}; divide by 255."
        )
    low, high = image.aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise EditorError("An image to edit has NaN or infinite pixels; check how it was loaded.")
    if low < -1e-3 or high > 1 + 1e-3:
        raise EditorError(
            f"An image to edit must lie in [0, 1], but it ranges from {low.item():.3g} to {high.item():.3g}; rescale it."
        )
    return image.float().clamp(0.0, 1.0)


def group_by_size(editor: Editor, images: Images) -> list[list[int]]:
    """Indices of `images` in groups of equal output sizes, each of which can be encoded and sampled as one batch."""
    groups: dict[Size, list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(editor.output_size(image), []).append(index)
    return list(groups.values())
