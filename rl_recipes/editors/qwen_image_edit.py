"""Qwen-Image-Edit, built from the parts of diffusers' `QwenImageEditPipeline`.

The pipeline's own call resizes every source to about 1024 x 1024 pixels; this editor keeps its own sizes. All else
follows the pipeline: prompt with image, packed latents of the source behind those of the edit, schedule, guidance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_shift
from torch import Tensor

from rl_recipes.editors.base import Conditions, Editor, Images, Size
from rl_recipes.editors.chunks import CPU_CHUNK, equal_length_chunks
from rl_recipes.editors.errors import EditorError
from rl_recipes.editors.single_frame import enable_single_frame

Grid = tuple[int, int, int]  # (frames, rows, columns) of tokens
# Images are decoded in chunks of at most this many pixels, which bounds memory at real sizes.
MAX_DECODED_PIXELS = 4 * 1024 * 1024


class QwenImageEdit(Editor):
    """Qwen-Image-Edit: one condition image. See `Editor` for the methods."""

    pipeline_class: ClassVar[str] = "QwenImageEditPipeline"
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )

    def __init__(self, pipe: Any, **options: Any) -> None:
        super().__init__(pipe, **options)
        enable_single_frame(pipe.vae)

    @property
    def size_multiple(self) -> int:
        # Tokens are 2 x 2 latents.
        return int(self.pipe.vae_scale_factor) * 2

    # Encoding --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, images: Images, instructions: Sequence[str], *, negative_prompt: str | None = None) -> Conditions:
        self._check_batch(images, instructions)
        sources = [self.fit(_only(image)) for image in images]
        sizes = sorted({tuple(source.shape[-2:]) for source in sources})
        if len(sizes) > 1:
            listed = ", ".join(f"{height}x{width}" for height, width in sizes)
            raise EditorError(
                f"One batch holds one size, but these edits have sizes {listed}; use group_by_size first."
            )
        height, width = sizes[0]
        prompt, prompt_mask = self._encode_prompts(sources, list(instructions))
        negative, negative_mask = None, None
        if negative_prompt is not None:
            negative, negative_mask = self._encode_prompts(sources, [negative_prompt] * len(sources))
        latents = self._encode_images(torch.stack(sources))
        return Conditions(prompt, prompt_mask, latents, (height, width), ((height, width),), negative, negative_mask)

    def _check_batch(self, images: Images, instructions: Sequence[str]) -> None:
        if isinstance(instructions, str) or len(images) != len(instructions):
            found = "one string" if isinstance(instructions, str) else str(len(instructions))
            raise EditorError(f"Each image needs one instruction, but there are {len(images)} images and {found}.")
        if not images:
            raise EditorError("There is nothing to encode; give at least one image with its instruction.")
        tokenizer = self.pipe.tokenizer
        for instruction in instructions:
            if not isinstance(instruction, str) or not instruction.strip():
                raise EditorError(f"An instruction must be a sentence, but it is {instruction!r}.")
            tokens = tokenizer(instruction)["input_ids"]
            special = set(tokens) & set(tokenizer.added_tokens_decoder)
            if special:
                named = tokenizer.convert_ids_to_tokens(min(special))
                raise EditorError(
                    f"The instruction {instruction[:80]!r} contains the control token {named!r}; remove it."
                )
            if len(tokens) > self.pipe.tokenizer_max_length:
                raise EditorError(
                    f"The instruction {instruction[:40]!r}... has {len(tokens)} tokens, but this editor takes at most "
                    f"{self.pipe.tokenizer_max_length}; shorten it."
                )

    def _encode_prompts(self, sources: Sequence[Tensor], prompts: list[str]) -> tuple[Tensor, Tensor | None]:
        """Text states of prompts with their images, (B, L, D) and mask."""
        return self._states(prompts, [to_uint8(source) for source in sources])

    def _states(self, prompts: list[str], images: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        states, mask = self.pipe.encode_prompt(prompts, image=images, device=self.device)
        return states.to(self.dtype), None if mask is None else mask.bool()

    def _encode_images(self, images: Tensor) -> Tensor:
        """Normalised, packed latents (B, S, C) of images (B, 3, H, W) in [0, 1]: the posterior's mode, as the pipeline's."""
        vae = self.pipe.vae
        pixels = (2.0 * images - 1.0).unsqueeze(2).to(self.device, self.dtype)
        latents = vae.encode(pixels).latent_dist.mode()
        mean, std = self._statistics(latents)
        return pack((latents - mean) / std)

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        config = self.pipe.vae.config
        shape = (1, -1, 1, 1, 1)
        return tuple(  # type: ignore[return-value]
            torch.tensor(values, device=like.device, dtype=like.dtype).view(shape)
            for values in (config.latents_mean, config.latents_std)
        )

    # Sampling --------------------------------------------------------------------------------------------------------

    def sigmas(self, num_steps: int, conditions: Conditions) -> Tensor:
        if num_steps < 1:
            raise EditorError(f"Sampling needs at least one step, but num_steps is {num_steps}.")
        # A scheduler of our own: set_timesteps changes the scheduler's state.
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.pipe.scheduler.config)
        config = scheduler.config
        mu = calculate_shift(
            self._num_tokens(conditions.size),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / num_steps, num_steps), device="cpu", mu=mu)
        return scheduler.sigmas.float()

    def noise(self, conditions: Conditions, generators: Sequence[torch.Generator]) -> Tensor:
        if len(generators) != len(conditions):
            raise EditorError(f"{len(conditions)} samples need a generator each, but {len(generators)} were given.")
        if len({id(generator) for generator in generators}) != len(generators):
            raise EditorError("Samples share a generator; give each its own, or a group's samples depend on the batch.")
        scale = self.pipe.vae_scale_factor
        height, width = conditions.size
        shape = (1, 1, self.pipe.latent_channels, height // scale, width // scale)
        drawn = [
            torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).to(self.device)
            for generator in generators
        ]
        return pack(torch.cat(drawn).transpose(1, 2))

    def velocity(
        self, latents: Tensor, sigma: float | Tensor, conditions: Conditions, guidance_scale: float = 1.0
    ) -> Tensor:
        self._check_latents(latents, conditions)
        inputs = torch.cat([latents.to(self.dtype), conditions.image_latents], dim=1)
        sigma = torch.as_tensor(sigma, dtype=torch.float32, device=latents.device).expand(len(latents))
        # The pipeline passes sigma * 1000 in the latents' dtype, divided by 1000 again; the rounding belongs to the model.
        timestep = (sigma * 1000.0).to(self.dtype) / 1000.0
        shapes = [[self._grid(conditions.size), *map(self._grid, conditions.image_sizes)]] * len(latents)

        def predict(states: Tensor, mask: Tensor | None) -> Tensor:
            if self.device.type != "cpu":
                return self._predict(inputs, timestep, states, mask, shapes)
            outputs = []
            for part, length in equal_length_chunks(mask, len(inputs), CPU_CHUNK):
                chunk = inputs[part], timestep[part], states[part, :length]
                outputs.append(self._predict(*chunk, None, shapes[part]))
            return torch.cat(outputs)

        tokens = latents.shape[1]
        conditional = predict(conditions.prompt, conditions.prompt_mask)[:, :tokens].float()
        if guidance_scale <= 1.0:
            return conditional
        if conditions.negative is None:
            raise EditorError(
                f"guidance_scale is {guidance_scale}, but the conditions have no negative prompt; encode with "
                'negative_prompt=" ".'
            )
        negative = predict(conditions.negative, conditions.negative_mask)[:, :tokens].float()
        return guide(conditional, negative, guidance_scale)

    def _predict(
        self, inputs: Tensor, timestep: Tensor, states: Tensor, mask: Tensor | None, shapes: list[list[Grid]]
    ) -> Tensor:
        return self.transformer(
            hidden_states=inputs,
            timestep=timestep,
            encoder_hidden_states=states,
            encoder_hidden_states_mask=mask,
            img_shapes=shapes,
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor, conditions: Conditions) -> list[Tensor]:
        self._check_latents(latents, conditions)
        scale = self.pipe.vae_scale_factor
        height, width = conditions.size
        unpacked = unpack(latents, height // scale, width // scale).to(self.dtype)
        mean, std = self._statistics(unpacked)
        chunks = (unpacked * std + mean).split(max(1, MAX_DECODED_PIXELS // (height * width)))
        decoded = torch.cat([self.pipe.vae.decode(chunk, return_dict=False)[0][:, :, 0] for chunk in chunks])
        return list((decoded.float() / 2.0 + 0.5).clamp(0.0, 1.0))

    def _check_latents(self, latents: Tensor, conditions: Conditions) -> None:
        expected = (len(conditions), self._num_tokens(conditions.size), 4 * self.pipe.latent_channels)
        if tuple(latents.shape) != expected:
            raise EditorError(f"Latents of shape {tuple(latents.shape)} do not fit conditions that need {expected}.")

    def _grid(self, size: Size) -> Grid:
        return 1, size[0] // self.size_multiple, size[1] // self.size_multiple

    def _num_tokens(self, size: Size) -> int:
        _, rows, columns = self._grid(size)
        return rows * columns


def _only(image: Tensor | Sequence[Tensor]) -> Tensor:
    """The one condition image of a sample."""
    if isinstance(image, (list, tuple)):
        if len(image) != 1:
            raise EditorError(
                f"Qwen-Image-Edit takes one condition image a sample, but got {len(image)}; use Qwen-Image-Edit-2509 or later."
            )
        image = image[0]
    return cast(Tensor, image)


def guide(conditional: Tensor, negative: Tensor, scale: float) -> Tensor:
    """True classifier-free guidance n + g (p - n), rescaled to the norm of p over the last dimension."""
    combined = negative + scale * (conditional - negative)
    norms = [torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in (conditional, combined)]
    return combined * (norms[0] / norms[1])


def pack(latents: Tensor) -> Tensor:
    """(B, C, 1, H, W) latents as tokens (B, H/2 * W/2, 4 C): channel first, then the row and column within the token."""
    batch, channels, _, height, width = latents.shape
    grid = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return grid.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack`, for latents of height x width."""
    batch, _, channels = tokens.shape
    grid = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return grid.reshape(batch, channels // 4, 1, height, width)


def to_uint8(image: Tensor) -> Tensor:
    """(3, H, W) in [0, 1] as uint8: the processor rescales by 1/255, so floats in [0, 1] would be rescaled twice."""
    return (image.detach().cpu() * 255.0).round().to(torch.uint8)
