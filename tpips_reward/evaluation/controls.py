"""Outputs whose worth is known without looking, so that a reader of a report sees the scale.

| control | what it is | a good metric gives |
|---|---|---|
| copy of the source | the source itself | all preserved, nothing changed |
| another image | the next row's source, of the same size | little preserved, all changed |
| noise | uniform noise | nothing preserved, all changed |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tpips_reward.evaluation.rows import CONTROL_PREFIX, Row

COPY = CONTROL_PREFIX + "copy of the source"
OTHER = CONTROL_PREFIX + "another image"
NOISE = CONTROL_PREFIX + "noise"
CONTROLS = (COPY, OTHER, NOISE)


def is_control(model: str) -> bool:
    """Whether this is a control and no model."""
    return model.startswith(CONTROL_PREFIX)


def noise_image(size: tuple[int, int], key: str, seed: int) -> Tensor:
    """Uniform noise of a row, (3, height, width) in [0, 1]; the same for the same row and seed."""
    number = int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:7], "big")
    return torch.rand(3, *size, generator=torch.Generator().manual_seed(number))


def other_sources(rows: Sequence[Row], digests: Mapping[str, str]) -> dict[str, Row]:
    """For each row's key a row with another source image; none where all rows have the same one.

    Args:
        rows: in the order in which they are scored: neighbours meet in one batch, so that a source serves both.
        digests: of the sources, by key. Different files of equal content are one image.
    """
    first_of: dict[str, Row] = {}
    for row in rows:
        first_of.setdefault(digests[row.key], row)
    distinct = list(first_of)
    if len(distinct) < 2:
        return {}
    following = dict(zip(distinct, [*distinct[1:], distinct[0]], strict=True))
    return {row.key: first_of[following[digests[row.key]]] for row in rows}
