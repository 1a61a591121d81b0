"""FLUX.1, text to image, built from the parts of diffusers' `FluxPipeline`; FLUX.1-Kontext builds on it.

FLUX.1-dev and Kontext are distilled: the guidance scale is an input of the transformer, and one prediction a step is enough.
Classifier-free guidance with a negative prompt comes on top only where `true_cfg_scale` is above 1. T5 gives the states of the
prompt, CLIP one pooled vector of it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_recipes.editors.base import Conditions, Size
from rl_recipes.editors.errors import EditorError
from rl_recipes.editors.flux_family import ATTENTION_TARGETS, FluxFamily
from rl_recipes.editors.packed import Text, pack


class Flux(FluxFamily):
    """FLUX.1-dev and -schnell: the image of a sample is a reference for the reward; the transformer does not see it.

    Args:
        pipe: a `FluxPipeline`.
        true_cfg_scale: scale of classifier-free guidance beside the distilled guidance; up to 1 for none, and negative
            prompts are then left unencoded.
        options: see `FluxFamily` and `Editor`.
    """

    pipeline_class: ClassVar[str] = "FluxPipeline"
    sees_image: ClassVar[bool] = False
    lora_targets: ClassVar[tuple[str, ...]] = (
        *ATTENTION_TARGETS,
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )

    def __init__(self, pipe: Any, *, true_cfg_scale: float = 1.0, **options: Any) -> None:
        super().__init__(pipe, **options)
        self.true_cfg_scale = true_cfg_scale

    # Encoding --------------------------------------------------------------------------------------------------------

    def check_instruction(self, instruction: str) -> None:
        """Refuse what T5 would cut off. CLIP reads the beginning of a long instruction only, as in the pipeline."""
        super().check_instruction(instruction)
        tokens = self.pipe.tokenizer_2(instruction)["input_ids"]
        self._refuse_long(instruction, len(tokens), self.max_sequence_length)

    def _encode_text(self, prompts: list[str], sources: Tensor) -> Text:
        states, pooled, _ = self.pipe.encode_prompt(
            prompts, prompt_2=None, device=self.device, max_sequence_length=self.max_sequence_length
        )
        return Text(states.to(self.dtype), pooled=pooled.to(self.dtype))

    def _encode_images(self, images: Tensor) -> Tensor:
        vae = self.pipe.vae
        latents = vae.encode((2.0 * images - 1.0).to(self.device, self.dtype)).latent_dist.mode()
        return pack((latents - vae.config.shift_factor) * vae.config.scaling_factor)

    @property
    def _uses_negative(self) -> bool:
        return self.true_cfg_scale > 1.0

    # Sampling --------------------------------------------------------------------------------------------------------

    def _cfg_scale(self, guidance_scale: float) -> float:
        return self.true_cfg_scale

    def _takes_guidance(self, scale: float) -> bool:
        if self.transformer.config.guidance_embeds:
            return True
        if scale > 1.0 >= self.true_cfg_scale:
            raise EditorError(
                f"guidance_scale is {scale}, but this transformer has no guidance embedding (FLUX.1-schnell has none); "
                "set guidance_scale to 1."
            )
        return False

    def _text_ids(self, length: int) -> Tensor:
        # Text has no place in the image; the rotary embedding takes it at the origin.
        return torch.zeros((length, 3), dtype=self.dtype)

    def _ids(self, conditions: Conditions) -> Tensor:
        grids = [
            torch.cartesian_prod(torch.tensor([index]), torch.arange(rows), torch.arange(columns))
            for index, (_, rows, columns) in enumerate(self._grids(conditions))
        ]
        return torch.cat(grids).to(self.dtype)

    def _decode(self, tokens: Tensor, size: Size) -> Tensor:
        config = self.pipe.vae.config
        latents = self._unpack(tokens, size) / config.scaling_factor + config.shift_factor
        return self.pipe.vae.decode(latents, return_dict=False)[0]
