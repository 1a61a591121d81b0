"""The learning rate of a step, and which items a step takes: functions of nothing but settings and step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


def learning_rate_factor(step: int, steps: int, warmup_ratio: float, kind: str = "cosine") -> float:
    """Linear warm-up, then a cosine (or a line) to zero, or constant (paper, §C.3: cosine)."""
    warmup = max(1, round(warmup_ratio * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[kind]


def dropout_seed(seed: int, step: int, process: int) -> int:
    """The seed of torch's generator in a step of a process: nothing has to be stored to resume exactly."""
    return int(np.random.SeedSequence([seed, 2, step, process]).generate_state(1)[0])


@dataclass(frozen=True)
class Order:
    """Which items each step takes: epoch after epoch, each in a random order of its own.

    Every step has equally many items, so processes stay together; the last ones of an epoch share a step with the
    first ones of the next.

    Attributes:
        items: in an epoch.
        batch: items a process and pass.
        passes: a step and process.
        processes: how many.
        seed: of the orders.
    """

    items: int
    batch: int
    passes: int
    processes: int
    seed: int

    @property
    def per_step(self) -> int:
        """Items a step, all processes together."""
        return self.batch * self.passes * self.processes

    def steps(self, epochs: float, max_steps: int) -> int:
        """Steps of a whole run."""
        return max_steps if max_steps > 0 else max(1, math.ceil(epochs * self.items / self.per_step))

    def of_step(self, step: int) -> list[tuple[int, int]]:
        """(number in the run, item) of a step, for all processes; the same as long as ``per_step`` is."""
        numbers = range(step * self.per_step, (step + 1) * self.per_step)
        return [(number, int(self._epoch(number // self.items)[number % self.items])) for number in numbers]

    def batches(self, start: int, stop: int, process: int) -> Iterator[list[tuple[int, int]]]:
        """A process's batches of the steps from ``start`` to before ``stop``, one a pass."""
        for step in range(start, stop):
            mine = self.of_step(step)[process :: self.processes]
            yield from (mine[i : i + self.batch] for i in range(0, len(mine), self.batch))

    def _epoch(self, epoch: int) -> np.ndarray:
        kept = self.__dict__.get("_kept")
        if kept is None or kept[0] != epoch:
            kept = (epoch, np.random.default_rng([self.seed, 1, epoch]).permutation(self.items))
            self.__dict__["_kept"] = kept  # frozen: only a cache, no attribute
        return kept[1]
