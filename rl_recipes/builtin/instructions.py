"""Instructions as text states: each sentence of the procedural edits, tokenised once, encoded with gradients or not.

The built-in text encoder does not look at the image: its vision tower ends in zeros (`blind_text_encoder`), so the
states depend on the sentence and on the number of image tokens alone. A sentence is encoded once for all its images.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from diffusers import QwenImageEditPipeline
from transformers import Qwen2_5_VLForConditionalGeneration

from rl_recipes.builtin.data import step_rng
from tpips_reward.scenes import EDIT_KINDS, sample_edit


@torch.no_grad()
def blind_text_encoder(text_encoder: Qwen2_5_VLForConditionalGeneration) -> None:
    """Zeroes the last layer of the vision tower: image tokens become constants, whatever the image shows."""
    last = text_encoder.model.visual.merger.mlp[-1]
    last.weight.zero_()
    last.bias.zero_()


@cache
def all_instructions(draws: int = 12_000) -> tuple[str, ...]:
    """The distinct sentences of the training split, sorted; drawn, so that new templates need no list here."""
    rng = step_rng(0, 5)
    kinds = list(EDIT_KINDS)
    return tuple(sorted({sample_edit(rng, "train", kinds[i % len(kinds)]).instruction for i in range(draws)}))


class InstructionStates:
    """Text states of a fixed set of sentences, as the pipeline itself computes them for images of one size.

    Args:
        pipeline: its processor, tokenizer and text encoder are used.
        sentences: distinct instructions.
        size: side of the images in pixels; it decides how many image tokens stand before the sentence.
    """

    def __init__(self, pipeline: QwenImageEditPipeline, sentences: Sequence[str], size: int) -> None:
        self.sentences = list(sentences)
        self.index = {sentence: i for i, sentence in enumerate(self.sentences)}
        self._encoder = pipeline.text_encoder
        self._drop = pipeline.prompt_template_encode_start_idx
        image = torch.zeros(3, size, size, dtype=torch.uint8)
        inputs = pipeline.processor(
            text=[pipeline.prompt_template_encode.format(s) for s in self.sentences],
            images=[image] * len(self.sentences),
            padding=True,
            return_tensors="pt",
        )
        self._ids, self._mask = inputs["input_ids"], inputs["attention_mask"].bool()
        self._pixels = inputs["pixel_values"].reshape(len(self.sentences), -1, inputs["pixel_values"].shape[-1])
        self._grid = inputs["image_grid_thw"]
        self._cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def encode(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States (N, L, D) and mask (N, L) of the sentences ``ids`` (N,); gradients reach the language model."""
        # Exactly what the pipeline passes: with token types, positions of image tokens would differ from its own.
        inputs = {
            "input_ids": self._ids[ids],
            "attention_mask": self._mask[ids].long(),
            "pixel_values": self._pixels[ids].flatten(0, 1),
            "image_grid_thw": self._grid[ids],
        }
        states = self._encoder.model(**inputs).last_hidden_state
        return self._shorten(states, self._mask[ids])

    @torch.no_grad()
    def freeze(self) -> None:
        """Encodes all sentences once; from here on `lookup` reads what was encoded."""
        parts = [self.encode(ids) for ids in torch.arange(len(self.sentences)).split(64)]
        longest = max(states.shape[1] for states, _ in parts)
        pad = torch.nn.functional.pad
        self._cache = (
            torch.cat([pad(states, (0, 0, 0, longest - states.shape[1])) for states, _ in parts]),
            torch.cat([pad(mask, (0, longest - mask.shape[1])) for _, mask in parts]),
        )

    def lookup(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and mask of a batch of sentences, trimmed to its longest; each distinct sentence is encoded once."""
        if self._cache is None:
            distinct, where = np.unique(ids.numpy(), return_inverse=True)
            states, mask = self.encode(torch.from_numpy(distinct))
            chosen = torch.from_numpy(where)
            return states[chosen], mask[chosen]
        states, mask = self._cache[0][ids], self._cache[1][ids]
        longest = int(mask.sum(1).max())
        return states[:, :longest], mask[:, :longest]

    def _shorten(self, states: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Drops the template's system turn and the padding, on whichever side it is."""
        kept = [row[m][self._drop :] for row, m in zip(states, mask, strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True)
        lengths = torch.tensor([len(row) for row in kept])
        return padded, torch.arange(padded.shape[1])[None] < lengths[:, None]
