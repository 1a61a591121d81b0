"""Other values in the place of weights, for a while: a reference policy, an old policy, a moving average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rl_recipes.shares import are_shared, own


@contextmanager
def swapped(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """``values`` in the place of the parameters' own, for the block; within autocast too.

    Where FSDP2 shares out the parameters, ``values`` hold the parameters' own for as long.
    """
    if are_shared(parameters):
        _exchange(parameters, values)
        try:
            yield
        finally:
            _exchange(parameters, values)
        return
    kept = [p.data for p in parameters]
    _put(parameters, values)
    try:
        yield
    finally:
        _put(parameters, kept)


def _put(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    torch.clear_autocast_cache()  # which goes by the parameter, and would give the values cast before


@torch.no_grad()
def _exchange(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """In place, for FSDP2 gathers from the memory that it has laid out, whatever the parameter's data are."""
    for parameter, value in zip(parameters, values, strict=True):
        mine, other = own(parameter), own(value)
        kept = mine.clone()
        mine.copy_(other)
        other.copy_(kept)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # a backward pass gathers in a stream of its own, which does not wait for this one
    torch.clear_autocast_cache()
