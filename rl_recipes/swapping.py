"""Other values in the place of weights, for a while: a reference policy, an old policy, a moving average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def swapped(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """``values`` in the place of the parameters' own, for the block; within autocast too."""
    own = [p.data for p in parameters]
    _put(parameters, values)
    try:
        yield
    finally:
        _put(parameters, own)


def _put(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    torch.clear_autocast_cache()  # which goes by the parameter, and would give the values cast before
