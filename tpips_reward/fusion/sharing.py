"""What several pairs need is made once, and forgotten after its last use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Shared(Generic[Key, Value]):
    """Values by key: made when first asked for, all missing ones of a request together, and dropped when used up.

    Args:
        make: keys -> their values, in order. Called at most once for each key that `uses` counts.
        uses: how often each key will be released.
    """

    def __init__(self, make: Callable[[list[Key]], Iterable[Value]], uses: Mapping[Key, int]) -> None:
        self._make = make
        self._left = Counter(uses)
        self._values: dict[Key, Value] = {}

    def get(self, keys: Sequence[Key]) -> list[Value]:
        """The values of `keys`."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._values]
        if missing:
            self._values.update(zip(missing, self._make(missing), strict=True))
        return [self._values[key] for key in keys]

    def release(self, keys: Iterable[Key]) -> None:
        """Count one use of each of `keys`; those without further uses are forgotten."""
        for key in keys:
            self._left[key] -= 1
            if self._left[key] <= 0:
                self._values.pop(key, None)

    def __len__(self) -> int:
        return len(self._values)


def windows(pairs: Sequence[tuple[Key, Key]], sizes: Mapping[Key, int], budget: int) -> list[list[int]]:
    """Cut `pairs` into runs of neighbours (indices) whose distinct members together are at most `budget` large.

    A single larger pair is a run of its own. Sorting inside a run keeps what must be held at one time bounded.
    """
    runs: list[list[int]] = []
    seen: set[Key] = set()
    total = 0
    for index, pair in enumerate(pairs):
        fresh = sum(sizes[key] for key in set(pair) - seen)
        if not runs or total + fresh > budget:
            runs.append([])
            seen, total, fresh = set(), 0, sum(sizes[key] for key in set(pair))
        runs[-1].append(index)
        seen |= set(pair)
        total += fresh
    return runs
