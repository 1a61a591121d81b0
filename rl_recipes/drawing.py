"""Which prompts an iteration gets: the next ones of the source, those that have nothing left to teach left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_recipes.algorithms.saturation import Visit, saturated, visits, with_visits
from rl_recipes.prompts import PromptSource

#: Visits of a prompt that must all have had the top reward.
LAST_VISITS = 3
#: Every so many epochs all prompts are visited, saturated ones too: the policy changes.
REVISIT = 4


class PromptQueue:
    """Deals out positions of a source, the same in every process.

    Args:
        source: the prompts.
        skip: whether saturated prompts are left out; without it an iteration's positions follow from its number alone.
        top: the lowest reward that counts as the top.
    """

    def __init__(self, source: PromptSource, *, skip: bool = False, top: float = 0.95) -> None:
        self.source, self._skip, self._top = source, skip, top
        self._next = 0
        self._history: dict[str, list[Visit]] = {}

    def take(self, iteration: int, count: int) -> list[int]:
        """Positions of the prompts of an iteration (from 1)."""
        if not self._skip:
            return [(iteration - 1) * count + group for group in range(count)]
        done = self.saturated()
        return [self._take_one(done) for _ in range(count)]

    def saturated(self) -> frozenset[str]:
        """Keys of the prompts that have nothing left to teach."""
        return saturated(self._history, top=self._top, last=LAST_VISITS)

    def exhausted(self) -> bool:
        """Whether every prompt that was dealt out is saturated; it takes three epochs, in which all of them were."""
        return bool(self._history) and self._history.keys() <= self.saturated()

    def note(self, keys: Sequence[str], rewards: Sequence[float]) -> None:
        """Adds an iteration's rewards, those of all processes in the same order in each."""
        if self._skip:
            new = visits(torch.tensor(rewards, dtype=torch.float64), keys)
            self._history = with_visits(self._history, new, last=LAST_VISITS)

    def _take_one(self, done: frozenset[str]) -> int:
        period = self.source.period or 1
        first = self._next
        for position in range(first, first + period):
            if (position // period) % REVISIT == REVISIT - 1 or self.source.key_at(position) not in done:
                self._next = position + 1
                return position
        self._next = first + 1  # all of them are saturated
        return first

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        history = [[key, [list(visit) for visit in seen]] for key, seen in self._history.items()]
        return {"next": self._next, "history": history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave."""
        self._next = int(state["next"])
        self._history = {key: [(float(low), float(high)) for low, high in seen] for key, seen in state["history"]}
