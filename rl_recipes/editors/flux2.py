"""FLUX.2 dev and klein, built from the parts of diffusers' `Flux2Pipeline` and `Flux2KleinPipeline`.

The tokens of several condition images follow those of the edit; the first of their four coordinates tells them apart. Latents
are normalised by the statistics of a batch norm over tokens. dev is distilled, its guidance scale an input of the transformer;
klein is either distilled to a few steps without guidance, or a base model with classifier-free guidance.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from diffusers.pipelines.flux2 import pipeline_flux2
from torch import Tensor

from rl_recipes.editors.base import Conditions, Images, Size
from rl_recipes.editors.errors import EditorError
from rl_recipes.editors.flux_family import ATTENTION_TARGETS, FluxFamily
from rl_recipes.editors.packed import Text, pack

# First coordinate of the first condition image, and the distance to the next one's.
IMAGE_SPACING = 10


class _Flux2(FluxFamily):
    """What dev and klein share. Each sample has one or several condition images; the first gives the edit its size."""

    takes_several: ClassVar[bool] = True
    lora_targets: ClassVar[tuple[str, ...]] = (
        *ATTENTION_TARGETS,
        # Blocks of one stream, most of the model, have one projection for all of queries, keys, values and MLP.
        "to_qkv_mlp_proj",
    )

    def main_image(self, image: Tensor | Sequence[Tensor]) -> Tensor:
        """The image that gives the edit its size: of several condition images the first one."""
        return super().main_image(image if isinstance(image, Tensor) else image[:1])

    # Encoding --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, images: Images, instructions: Sequence[str], *, negative_prompt: str | None = None) -> Conditions:
        self._check_batch(images, instructions)
        samples = [[sample] if isinstance(sample, Tensor) else list(sample) for sample in images]
        fitted = [[self.fit(image) for image in sample] for sample in samples]
        self._one_size([self.output_size(sample) for sample in samples])
        negative = Text(None)
        if negative_prompt is not None and self._uses_negative:
            negative = self._encode_text([negative_prompt], fitted[0][0])
        parts = []
        for sample, instruction in zip(fitted, instructions, strict=True):
            sizes = tuple((image.shape[-2], image.shape[-1]) for image in sample)
            latents = torch.cat([self._encode_images(image[None]) for image in sample], dim=1)
            text = self._encode_text([instruction], sample[0])
            parts.append(self._conditions(text, negative, latents, sizes[0], sizes))
        return Conditions.cat(parts)

    def check_instruction(self, instruction: str) -> None:
        super().check_instruction(instruction)
        tokenizer = getattr(self.pipe.tokenizer, "tokenizer", self.pipe.tokenizer)  # dev has a processor around it
        self._refuse_control_tokens(tokenizer, instruction)
        self._refuse_long(instruction, self._prompt_length(instruction), self.max_sequence_length)

    @abstractmethod
    def _prompt_length(self, instruction: str) -> int:
        """Tokens of the whole prompt, the template's included."""

    def _encode_text(self, prompts: list[str], sources: Tensor) -> Text:
        states, _ = self.pipe.encode_prompt(prompts, device=self.device, max_sequence_length=self.max_sequence_length)
        return Text(states.to(self.dtype))

    def _encode_images(self, images: Tensor) -> Tensor:
        pixels = (2.0 * images - 1.0).to(self.device, self.dtype)
        tokens = pack(self.pipe.vae.encode(pixels).latent_dist.mode())
        mean, std = self._statistics()
        return (tokens - mean) / std

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of tokens, (4 C,) each."""
        vae = self.pipe.vae
        return vae.bn.running_mean, (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()

    # Sampling --------------------------------------------------------------------------------------------------------

    def _shift(self, num_steps: int, num_tokens: int) -> float:
        return pipeline_flux2.compute_empirical_mu(num_tokens, num_steps)

    def _noise_shape(self, height: int, width: int) -> tuple[int, int, int]:
        return 4 * self._latent_channels, height // 2, width // 2

    def _pack_noise(self, noise: Tensor) -> Tensor:
        return noise.flatten(2).transpose(1, 2)

    def _text_ids(self, length: int) -> Tensor:
        return _coordinates(0, 1, 1, length)

    def _ids(self, conditions: Conditions) -> Tensor:
        grids = self._grids(conditions)
        return torch.cat(
            [_coordinates(IMAGE_SPACING * i, rows, columns, 1) for i, (_, rows, columns) in enumerate(grids)]
        )

    def _decode(self, tokens: Tensor, size: Size) -> Tensor:
        mean, std = self._statistics()
        return self.pipe.vae.decode(self._unpack(tokens * std + mean, size), return_dict=False)[0]


class Flux2(_Flux2):
    """FLUX.2-dev: the guidance scale is an input of the transformer. See `Editor` for the methods."""

    pipeline_class: ClassVar[str] = "Flux2Pipeline"

    @property
    def _uses_negative(self) -> bool:
        return False

    def _cfg_scale(self, guidance_scale: float) -> float:
        return 1.0

    def _takes_guidance(self, scale: float) -> bool:
        return True

    def _prompt_length(self, instruction: str) -> int:
        messages = pipeline_flux2.format_input([instruction], system_message=self.pipe.system_message)
        inputs = self.pipe.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        return len(inputs["input_ids"][0])


class Flux2Klein(_Flux2):
    """FLUX.2-klein: classifier-free guidance, or none for the distilled models. See `Editor` for the methods."""

    pipeline_class: ClassVar[str] = "Flux2KleinPipeline"

    @property
    def _uses_negative(self) -> bool:
        return not self.pipe.config.is_distilled

    def _takes_guidance(self, scale: float) -> bool:
        return False

    def _cfg_scale(self, guidance_scale: float) -> float:
        if guidance_scale > 1.0 and self.pipe.config.is_distilled:
            raise EditorError(
                f"guidance_scale is {guidance_scale}, but this FLUX.2-klein is distilled to sample without guidance; set it "
                "to 1, or use a klein base model."
            )
        return guidance_scale

    def _prompt_length(self, instruction: str) -> int:
        messages = [{"role": "user", "content": instruction}]
        text = self.pipe.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return len(self.pipe.tokenizer(text)["input_ids"])


def _coordinates(image: int, rows: int, columns: int, positions: int) -> Tensor:
    return torch.cartesian_prod(
        torch.tensor([image]), torch.arange(rows), torch.arange(columns), torch.arange(positions)
    )
