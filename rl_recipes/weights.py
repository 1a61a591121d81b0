"""A second set of the trained weights, which follows the first: the policy that samples, or a moving average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from rl_recipes.algorithms.nft import follow
from rl_recipes.shares import gathered, own, put
from rl_recipes.swapping import swapped
from tpips_reward.errors import TPIPSError


class ShadowWeights:
    """A copy of ``parameters``, made now, that `follow` moves towards them.

    Attributes:
        tensors: the copy, in the order of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.tensors = [p.detach().clone() for p in self._parameters]

    def follow(self, decay: float) -> None:
        """shadow <- decay shadow + (1 - decay) weights; with decay 0 the same bits."""
        follow([own(t) for t in self.tensors], [own(p.detach()) for p in self._parameters], decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The shadow in place of the weights, for the block; no graph may be open that the weights are part of."""
        with swapped(self._parameters, self.tensors):
            yield

    def state_dict(self) -> dict[str, Any]:
        """CPU copies of the tensors, for a checkpoint; shared ones whole, for which all processes must ask."""
        return {"tensors": [gathered(t).cpu().clone() for t in self.tensors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave, to the bit.

        Raises:
            TPIPSError: when it is of other weights.
        """
        saved = state.get("tensors", [])
        if [t.shape for t in saved] != [t.shape for t in self.tensors]:
            raise TPIPSError("The checkpoint's second set of weights is of another editor or adapter; start anew.")
        for mine, theirs in zip(self.tensors, saved, strict=True):
            put(mine, theirs)


class MovingAverage(ShadowWeights):
    """sum over i of d^(n - i) w_i / sum over i of d^(n - i), of the weights after each of n steps.

    The weights before the first step have no part in it, so that a short run hands out what it has trained.

    Args:
        decay: d, at least 0 and below 1.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        super().__init__(parameters)
        self._decay, self._count = decay, 0

    def update(self) -> None:
        """Takes up the weights after a step."""
        self._count += 1
        self.follow(self._decay * (1 - self._decay ** (self._count - 1)) / (1 - self._decay**self._count))

    def state_dict(self) -> dict[str, Any]:
        """CPU copies of the tensors and the number of steps, for a checkpoint."""
        return {**super().state_dict(), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave, to the bit.

        Raises:
            TPIPSError: when it is of other weights, or of another version.
        """
        if not isinstance(state.get("count"), int):
            raise TPIPSError("The checkpoint's moving average is of another version; start anew.")
        super().load_state_dict(state)
        self._count = state["count"]
