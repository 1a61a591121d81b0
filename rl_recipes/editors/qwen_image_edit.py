"""Qwen-Image-Edit, built from the parts of diffusers' `QwenImageEditPipeline`.

The pipeline's own call resizes every source to about 1024 x 1024 pixels; this editor keeps its own sizes. All else
follows the pipeline: prompt with image, packed latents of the source behind those of the edit, schedule, guidance.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_recipes.editors import packed
from rl_recipes.editors.base import Conditions, Size
from rl_recipes.editors.packed import PackedEditor, Text
from rl_recipes.editors.single_frame import enable_single_frame


class QwenImageEdit(PackedEditor):
    """Qwen-Image-Edit: one condition image. See `Editor` for the methods."""

    pipeline_class: ClassVar[str] = "QwenImageEditPipeline"
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )

    def __init__(self, pipe: Any, **options: Any) -> None:
        super().__init__(pipe, **options)
        enable_single_frame(pipe.vae)

    # Encoding --------------------------------------------------------------------------------------------------------

    def check_instruction(self, instruction: str) -> None:
        super().check_instruction(instruction)
        tokens = self._refuse_control_tokens(self.pipe.tokenizer, instruction)
        self._refuse_long(instruction, len(tokens), self.pipe.tokenizer_max_length)

    def _encode_text(self, prompts: list[str], sources: Tensor) -> Text:
        return self._states(prompts, image=[to_uint8(source) for source in sources])

    def _states(self, prompts: list[str], **images: Any) -> Text:
        states, mask = self.pipe.encode_prompt(prompts, device=self.device, **images)
        return Text(states.to(self.dtype), None if mask is None else mask.bool())

    def _encode_images(self, images: Tensor) -> Tensor:
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

    def _predict(
        self, inputs: Tensor, timestep: Tensor, text: Text, conditions: Conditions, guidance_scale: float
    ) -> Tensor:
        shapes = [self._grids(conditions)] * len(inputs)
        return self._call_transformer(
            hidden_states=inputs,
            timestep=timestep,
            encoder_hidden_states=text.states,
            encoder_hidden_states_mask=text.mask,
            img_shapes=shapes,
            return_dict=False,
        )[0]

    def _guide(self, conditional: Tensor, negative: Tensor, scale: float) -> Tensor:
        return guide(conditional, negative, scale)

    def _decode(self, tokens: Tensor, size: Size) -> Tensor:
        latents = self._unpack(tokens, size).unsqueeze(2)
        mean, std = self._statistics(latents)
        return self.pipe.vae.decode(latents * std + mean, return_dict=False)[0][:, :, 0]


def guide(conditional: Tensor, negative: Tensor, scale: float) -> Tensor:
    """True classifier-free guidance n + g (p - n), rescaled to the norm of p over the last dimension."""
    combined = negative + scale * (conditional - negative)
    norms = [torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in (conditional, combined)]
    return combined * (norms[0] / norms[1])


def pack(latents: Tensor) -> Tensor:
    """(B, C, 1, H, W) latents of single frames as tokens (B, H/2 * W/2, 4 C), see `packed.pack`."""
    return packed.pack(latents.squeeze(2))


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack`, for latents of height x width."""
    return packed.unpack(tokens, height, width).unsqueeze(2)


def to_uint8(image: Tensor) -> Tensor:
    """(3, H, W) in [0, 1] as uint8: the processor rescales by 1/255, so floats in [0, 1] would be rescaled twice."""
    return (image.detach().cpu() * 255.0).round().to(torch.uint8)
