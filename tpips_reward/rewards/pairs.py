"""The one metric call behind a reward: which image meets which reference in which aspect, each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpips_reward.errors import TPIPSError
from tpips_reward.images import is_single

Pair = tuple[int, int, str]


def image_list(given: Any) -> list[Any]:
    """Single image, batch or list -> list of images; entries stay what they are (PIL, array, tensor).

    Slices of a tensor that requires grad keep their graph.
    """
    if isinstance(given, (list, tuple)) or (isinstance(given, (Tensor, np.ndarray)) and not is_single(given)):
        return list(given)
    return [given]


def one_each(images: list[Any], count: int, name: str) -> list[Any]:
    """One image for all samples, or one each -> one each (the same object where it is one for all)."""
    if len(images) == count:
        return images
    if len(images) == 1:
        return images * count
    raise TPIPSError(f"{name} has {len(images)} images for {count} edits; give one for all, or one each.")


@dataclass
class PairTable:
    """Collects (edit, reference, aspect) pairs: a reference object and a pair get one entry each.

    `references` and `pairs` are what `metric.similarity_pairs` takes; `add` answers with the index of the result. Equal
    images in different objects are the metric's business: it encodes equal pixels once.
    """

    references: list[Any] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    _reference_index: dict[int, int] = field(default_factory=dict)
    _pair_index: dict[Pair, int] = field(default_factory=dict)

    def reference(self, image: Any) -> int:
        """Index of this reference image; the same object is listed once."""
        if id(image) not in self._reference_index:
            self._reference_index[id(image)] = len(self.references)
            self.references.append(image)
        return self._reference_index[id(image)]

    def add(self, image_index: int, reference_index: int, aspect: str) -> int:
        """Index, in the metric's result, of the similarity of this pair in this aspect."""
        pair = (image_index, reference_index, aspect)
        if pair not in self._pair_index:
            self._pair_index[pair] = len(self.pairs)
            self.pairs.append(pair)
        return self._pair_index[pair]


def segment_mean(values: Tensor, segments: Sequence[int], count: int) -> Tensor:
    """Mean of `values` (N,) by sample -> (count,) float32; a sample without values gets 0 (mask it by its lists)."""
    index = torch.tensor(segments, dtype=torch.long, device=values.device)
    sums = torch.zeros(count, dtype=torch.float32, device=values.device).index_add(0, index, values.float())
    numbers = torch.bincount(index, minlength=count).clamp(min=1)
    return sums / numbers
