"""What FLUX.1 and FLUX.2 share: the call of the transformer, with the guidance scale as an input where it is distilled."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_recipes.editors.base import Conditions
from rl_recipes.editors.packed import PackedEditor, Text

ATTENTION_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class FluxFamily(PackedEditor):
    """An editor whose transformer takes coordinates of text and image tokens.

    Args:
        pipe: the pipeline.
        max_sequence_length: tokens that each prompt is padded to; the pipelines' own is 512.
        options: see `Editor`.
    """

    default_text_length: ClassVar[int] = 512

    def __init__(self, pipe: Any, *, max_sequence_length: int = default_text_length, **options: Any) -> None:
        super().__init__(pipe, **options)
        self.max_sequence_length = max_sequence_length

    def _predict(
        self, inputs: Tensor, timestep: Tensor, text: Text, conditions: Conditions, guidance_scale: float
    ) -> Tensor:
        assert text.states is not None
        pooled = {} if text.pooled is None else {"pooled_projections": text.pooled}
        return self._call_transformer(
            hidden_states=inputs,
            timestep=timestep,
            guidance=self._guidance(guidance_scale, len(inputs)),
            encoder_hidden_states=text.states,
            txt_ids=self._text_ids(text.states.shape[1]).to(self.device),
            img_ids=self._ids(conditions).to(self.device),
            return_dict=False,
            **pooled,
        )[0]

    def _guidance(self, scale: float, batch: int) -> Tensor | None:
        """The guidance scale as the transformer's input, where it has one."""
        if not self._takes_guidance(scale):
            return None
        return torch.full((batch,), scale, device=self.device, dtype=torch.float32)

    @abstractmethod
    def _takes_guidance(self, scale: float) -> bool:
        """Whether the scale is an input of the transformer; refuses one that would have no effect."""

    @abstractmethod
    def _text_ids(self, length: int) -> Tensor:
        """(length, D) coordinates of the prompt's tokens, in the dtype that the pipeline has them in."""

    @abstractmethod
    def _ids(self, conditions: Conditions) -> Tensor:
        """(T + S, D) coordinates of the image tokens: image (0 is the edit), row, column, ..."""
