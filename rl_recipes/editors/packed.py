"""What editors whose tokens are 2 x 2 latents share: schedule, noise, guidance, decoding in chunks.

The Qwen-Image and FLUX families differ in their text encoders, position ids and VAEs. All of them concatenate the condition
images' tokens behind those of the edit, and predict the velocity of the edit's tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from rl_recipes.editors.attention import takes_masks
from rl_recipes.editors.base import Conditions, Editor, Images, Size, last_image
from rl_recipes.editors.chunks import CPU_CHUNK, equal_length_chunks
from rl_recipes.editors.errors import EditorError
from rl_recipes.editors.workers import map_chunks

Grid = tuple[int, int, int]  # (frames, rows, columns) of tokens
# Images are decoded in chunks of at most this many pixels, which bounds memory at real sizes.
MAX_DECODED_PIXELS = 4 * 1024 * 1024


class Text(NamedTuple):
    """Encoded prompts: states (B, L, D), mask (B, L) or None, pooled vectors (B, D') or None. Without states: no prompts."""

    states: Tensor | None
    mask: Tensor | None = None
    pooled: Tensor | None = None

    def part(self, rows: slice, length: int | None) -> Text:
        """Those rows, without padding where they have one known length."""
        assert self.states is not None
        pooled = None if self.pooled is None else self.pooled[rows]
        mask = None if self.mask is None or length is not None else self.mask[rows]
        return Text(self.states[rows, :length], mask, pooled)


class PackedEditor(Editor):
    """An editor of packed tokens. Families implement the encoders, `_predict`, `_decode` and, where needed, the rest."""

    @property
    def size_multiple(self) -> int:
        return int(self.pipe.vae_scale_factor) * 2

    # Encoding --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, images: Images, instructions: Sequence[str], *, negative_prompt: str | None = None) -> Conditions:
        self._check_batch(images, instructions)
        sources = self._fit_batch(images)
        size = (sources.shape[-2], sources.shape[-1])
        text = self._encode_text(list(instructions), sources)
        negative = Text(None)
        if negative_prompt is not None and self._uses_negative:
            negative = self._encode_text([negative_prompt] * len(sources), sources)
        image_sizes: tuple[Size, ...] = (size,) if self.sees_image else ()
        if self.sees_image:
            latents = self._encode_images(sources)
        else:
            latents = torch.empty((len(sources), 0, 4 * self._latent_channels), device=self.device, dtype=self.dtype)
        return self._conditions(text, negative, latents, size, image_sizes)

    @staticmethod
    def _conditions(
        text: Text, negative: Text, image_latents: Tensor, size: Size, image_sizes: tuple[Size, ...]
    ) -> Conditions:
        assert text.states is not None
        return Conditions(
            prompt=text.states,
            prompt_mask=text.mask,
            image_latents=image_latents,
            size=size,
            image_sizes=image_sizes,
            negative=negative.states,
            negative_mask=negative.mask,
            pooled=text.pooled,
            negative_pooled=negative.pooled,
        )

    @abstractmethod
    def _encode_text(self, prompts: list[str], sources: Tensor) -> Text:
        """Prompts, with the source images (B, 3, H, W) where the text encoder sees them."""

    @abstractmethod
    def _encode_images(self, images: Tensor) -> Tensor:
        """Normalised, packed latents (B, S, C) of images (B, 3, H, W) in [0, 1]: the posterior's mode, as the pipeline's."""

    @property
    def _uses_negative(self) -> bool:
        """Whether a negative prompt can have an effect; it stays unencoded otherwise."""
        return True

    def _check_batch(self, images: Images, instructions: Sequence[str]) -> None:
        if isinstance(instructions, str) or len(images) != len(instructions):
            found = "one string" if isinstance(instructions, str) else str(len(instructions))
            raise EditorError(f"Each image needs one instruction, but there are {len(images)} images and {found}.")
        if not images:
            raise EditorError("There is nothing to encode; give at least one image with its instruction.")
        for instruction in instructions:
            self.check_instruction(instruction)

    def _fit_batch(self, images: Images) -> Tensor:
        """The one condition image of each sample at its output size, (B, 3, H, W) in [0, 1]."""
        fitted = [self.fit(self._only(image)) for image in images]
        self._one_size([(image.shape[-2], image.shape[-1]) for image in fitted])
        return torch.stack(fitted)

    def _only(self, image: Tensor | Sequence[Tensor]) -> Tensor:
        """The one condition image of a sample."""
        if isinstance(image, (list, tuple)) and len(image) != 1:
            raise EditorError(
                f"{self.pipeline_class.removesuffix('Pipeline')} takes one condition image a sample, but got {len(image)}; "
                "use an editor of several, such as Qwen-Image-Edit-2509 or FLUX.2."
            )
        return last_image(image)

    @staticmethod
    def _one_size(sizes: Sequence[Size]) -> Size:
        if len(set(sizes)) > 1:
            listed = ", ".join(f"{height}x{width}" for height, width in sorted(set(sizes)))
            raise EditorError(
                f"One batch holds one size, but these edits have sizes {listed}; use group_by_size first."
            )
        return sizes[0]

    def _refuse_control_tokens(self, tokenizer: Any, instruction: str) -> list[int]:
        """The instruction's tokens; control tokens among them would end the prompt's turn or stand for an image."""
        tokens = tokenizer(instruction, add_special_tokens=False)["input_ids"]
        special = set(tokens) & set(tokenizer.added_tokens_decoder)
        if special:
            named = tokenizer.convert_ids_to_tokens(min(special))
            raise EditorError(f"The instruction {instruction[:80]!r} contains the control token {named!r}; remove it.")
        return tokens

    def _refuse_long(self, instruction: str, count: int, most: int) -> None:
        if count > most:
            raise EditorError(
                f"The instruction {instruction[:40]!r}... has {count} tokens, but this editor takes at most {most}; "
                "shorten it."
            )

    # Sampling --------------------------------------------------------------------------------------------------------

    def sigmas(self, num_steps: int, conditions: Conditions) -> Tensor:
        if num_steps < 1:
            raise EditorError(f"Sampling needs at least one step, but num_steps is {num_steps}.")
        # A scheduler of our own: set_timesteps changes the scheduler's state.
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.pipe.scheduler.config)
        mu = self._shift(num_steps, self._num_tokens(conditions.size))
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / num_steps, num_steps), device="cpu", mu=mu)
        levels = scheduler.sigmas.float()
        if not bool(torch.isfinite(levels).all()):  # Qwen's is stretched to its last value, which a single step is at once
            raise EditorError(
                f"This editor's schedule has no noise levels for {num_steps} step (they are {levels.tolist()}); give a larger "
                "num_inference_steps."
            )
        return levels

    def _shift(self, num_steps: int, num_tokens: int) -> float:
        """mu of the dynamic shift: linear in the number of tokens, by the scheduler's config."""
        config = self.pipe.scheduler.config
        shortest, longest = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        # Slope and intercept apart, as the pipelines compute them: another order rounds differently.
        slope = (high - low) / (longest - shortest)
        intercept = low - slope * shortest
        return num_tokens * slope + intercept

    def noise(self, conditions: Conditions, generators: Sequence[torch.Generator]) -> Tensor:
        if len(generators) != len(conditions):
            raise EditorError(f"{len(conditions)} samples need a generator each, but {len(generators)} were given.")
        if len({id(generator) for generator in generators}) != len(generators):
            raise EditorError("Samples share a generator; give each its own, or a group's samples depend on the batch.")
        scale = self.pipe.vae_scale_factor
        height, width = conditions.size
        shape = self._noise_shape(height // scale, width // scale)
        drawn = [
            torch.randn((1, *shape), generator=generator, device=generator.device, dtype=torch.float32).to(self.device)
            for generator in generators
        ]
        return self._pack_noise(torch.cat(drawn))

    def _noise_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """The shape in which the pipeline draws a sample's noise, given the size in latents."""
        return self._latent_channels, height, width

    def _pack_noise(self, noise: Tensor) -> Tensor:
        return pack(noise)

    def velocity(
        self, latents: Tensor, sigma: float | Tensor, conditions: Conditions, guidance_scale: float = 1.0
    ) -> Tensor:
        self._check_latents(latents, conditions)
        sigma = torch.as_tensor(sigma, dtype=torch.float32, device=latents.device).expand(len(latents))
        parts = conditions.uniform_parts()
        if len(parts) == 1:
            return self._velocity(latents, sigma, parts[0][1], guidance_scale)
        outputs = [self._velocity(latents[rows], sigma[rows], part, guidance_scale) for rows, part in parts]
        order = torch.tensor([row for rows, _ in parts for row in rows], device=latents.device)
        return torch.cat(outputs)[order.argsort()]

    def _velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance_scale: float) -> Tensor:
        inputs = torch.cat([latents.to(self.dtype), conditions.image_latents], dim=1)
        # The pipelines pass sigma * 1000 in the latents' dtype, divided by 1000 again; the rounding belongs to the model.
        timestep = (sigma * 1000.0).to(self.dtype) / 1000.0
        tokens = latents.shape[1]

        def predict(text: Text) -> Tensor:
            def predict_chunk(chunk: tuple[slice, int | None]) -> Tensor:
                rows, length = chunk
                return self._predict(inputs[rows], timestep[rows], text.part(rows, length), conditions, guidance_scale)

            chunks = list(self._chunks(text.mask, len(inputs)))
            workers = torch.get_num_threads() if self.device.type == "cpu" else 1
            return torch.cat(map_chunks(predict_chunk, chunks, workers))[:, :tokens].float()

        conditional = predict(Text(conditions.prompt, conditions.prompt_mask, conditions.pooled))
        scale = self._cfg_scale(guidance_scale)
        if scale <= 1.0:
            return conditional
        if conditions.negative is None:
            raise EditorError(
                f"Classifier-free guidance of {scale} is asked for (guidance_scale is {guidance_scale}), but the conditions "
                'have no negative prompt; encode with negative_prompt=" ".'
            )
        negative = predict(Text(conditions.negative, conditions.negative_mask, conditions.negative_pooled))
        return self._guide(conditional, negative, scale)

    def _chunks(self, mask: Tensor | None, batch: int) -> Iterator[tuple[slice, int | None]]:
        if self.device.type == "cpu":
            return equal_length_chunks(mask, batch, CPU_CHUNK)
        if not takes_masks(self.attention_backend):
            return equal_length_chunks(mask, batch, batch)
        return iter([(slice(None), None)])

    def _cfg_scale(self, guidance_scale: float) -> float:
        """Scale of classifier-free guidance with a second prediction; at most 1 for none."""
        return guidance_scale

    def _guide(self, conditional: Tensor, negative: Tensor, scale: float) -> Tensor:
        """n + g (p - n)."""
        return negative + scale * (conditional - negative)

    @abstractmethod
    def _predict(
        self, inputs: Tensor, timestep: Tensor, text: Text, conditions: Conditions, guidance_scale: float
    ) -> Tensor:
        """The transformer's output for some rows of a batch; of `conditions` only the sizes may be used."""

    def _grids(self, conditions: Conditions) -> list[Grid]:
        """The grid of the edit's tokens, and those of the condition images behind them."""
        return [self._grid(size) for size in (conditions.size, *conditions.image_sizes)]

    # Decoding --------------------------------------------------------------------------------------------------------

    def decode(self, latents: Tensor, conditions: Conditions) -> list[Tensor]:
        self._check_latents(latents, conditions)
        height, width = conditions.size
        chunks = latents.split(max(1, MAX_DECODED_PIXELS // (height * width)))
        decoded = torch.cat([self._decode(chunk.to(self.dtype), conditions.size) for chunk in chunks])
        return list((decoded.float() / 2.0 + 0.5).clamp(0.0, 1.0))

    @abstractmethod
    def _decode(self, tokens: Tensor, size: Size) -> Tensor:
        """Images (B, 3, H, W), about in [-1, 1]."""

    # Shapes ----------------------------------------------------------------------------------------------------------

    @property
    def _latent_channels(self) -> int:
        return int(self.transformer.config.in_channels) // 4

    def _check_latents(self, latents: Tensor, conditions: Conditions) -> None:
        expected = (len(conditions), self._num_tokens(conditions.size), 4 * self._latent_channels)
        if tuple(latents.shape) != expected:
            raise EditorError(f"Latents of shape {tuple(latents.shape)} do not fit conditions that need {expected}.")

    def _grid(self, size: Size) -> Grid:
        return 1, size[0] // self.size_multiple, size[1] // self.size_multiple

    def _num_tokens(self, size: Size) -> int:
        _, rows, columns = self._grid(size)
        return rows * columns

    def _unpack(self, tokens: Tensor, size: Size) -> Tensor:
        """(B, T, 4 C) tokens as latents (B, C, H, W) of an image of `size`."""
        scale = self.pipe.vae_scale_factor
        return unpack(tokens, size[0] // scale, size[1] // scale)


def pack(latents: Tensor) -> Tensor:
    """(B, C, H, W) latents as tokens (B, H/2 * W/2, 4 C): channel first, then the row and column within the token."""
    batch, channels, height, width = latents.shape
    grid = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return grid.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack`, for latents of height x width."""
    batch, _, channels = tokens.shape
    grid = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return grid.reshape(batch, channels // 4, height, width)
