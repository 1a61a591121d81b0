"""Signs that a reward is being fooled, or teaches nothing, looked for in every iteration: said once each, and reason to stop if asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rl_recipes.algorithms.trends import parting
from tpips_reward.errors import TPIPSError

#: Iterations that a sign must last.
LASTS = 5
#: Iterations of reward and judge that are compared.
WINDOW = 40
#: Shares of an iteration's edits.
MOST_COPIES, MOST_DEGENERATE = 0.5, 0.1
#: Edges of edits by those of their sources, against the same ratio when the run began: blur, and grids or noise.
FEWEST_EDGES, MOST_EDGES = 0.5, 2.0
#: Signs that nothing is learnt; they are no reason to stop.
IDLE = ("flat", "saturated")


class Watch:
    """Keeps the history that the signs need, and names those that are there.

    Attributes:
        found: a sentence for each sign that has been there, by its name.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._recent: dict[str, list[float | None]] = {}
        self._first_edges: float | None = None

    def look(self, line: dict[str, Any]) -> list[str]:
        """Adds an iteration's line of ``metrics.jsonl``; returns the sentences of signs that are new.

        Args:
            line: with ``saturated``, 1 where every prompt is.
        """
        if line.get("edge_density_source"):
            ratio = line["edge_density"] / line["edge_density_source"]
            self._first_edges = self._first_edges or ratio
            line = {**line, "edges": ratio / self._first_edges if self._first_edges else None}
        line = {**line, "no_gradient": float(line.get("grad_norm") == 0.0)}
        for name in ("reward_mean", "judge", "copy_rate", "degenerate", "edges", "zero_std_share", "no_gradient", "saturated"):
            self._recent[name] = [*self._recent.get(name, []), line.get(name)][-WINDOW:]
        new = []
        for name, sign in _SIGNS.items():
            sentence = None if name in self.found else sign(self)
            if sentence is not None:
                self.found[name] = sentence
                new.append(sentence)
        return new

    @property
    def fooled(self) -> bool:
        """Whether one of the signs that were found is that of a fooled reward."""
        return any(name not in IDLE for name in self.found)

    def saturated(self) -> bool:
        """Whether every prompt was saturated in the last iteration."""
        return self._recent["saturated"][-1] == 1.0

    def lasting(self, name: str, low: float, high: float = float("inf")) -> float | None:
        """The mean of the last few iterations, where each of them lies above ``low`` and below ``high``."""
        values = [v for v in self._recent[name][-LASTS:] if v is not None and low < v < high]
        return float(np.mean(values)) if len(values) == LASTS else None

    def parted(self) -> str | None:
        """Whether the reward rises while the judge falls, in words."""
        found = parting(self._recent["reward_mean"], self._recent["judge"], window=WINDOW)
        return found.sentence() if found is not None and found.parted else None

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"found": self.found, "recent": self._recent, "first_edges": self._first_edges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave.

        Raises:
            TPIPSError: when it is something else.
        """
        try:
            self.found, self._recent = dict(state["found"]), {k: list(v) for k, v in state["recent"].items()}
            self._first_edges = state["first_edges"]
        except (KeyError, TypeError, AttributeError) as error:
            raise TPIPSError(f"The checkpoint's history of signs is damaged ({error}); start anew.") from error


def _copies(watch: Watch) -> str | None:
    share = watch.lasting("copy_rate", MOST_COPIES)
    if share is None:
        return None
    return f"{share:.0%} of the edits of the last {LASTS} iterations are copies of their sources."


def _degenerate(watch: Watch) -> str | None:
    share = watch.lasting("degenerate", MOST_DEGENERATE)
    if share is None:
        return None
    return f"{share:.0%} of the edits of the last {LASTS} iterations are black, flat or noise."


def _edges(watch: Watch) -> str | None:
    few, many = watch.lasting("edges", -1.0, FEWEST_EDGES), watch.lasting("edges", MOST_EDGES)
    ratio = many if few is None else few
    if ratio is None:
        return None
    what = "blur or a vanishing background" if ratio < 1 else "grids or noise"
    return f"The edits have {ratio:.2f} times the edges that they had when the run began, a sign of {what}."


def _flat(watch: Watch) -> str | None:
    if watch.lasting("zero_std_share", 0.999) is not None:
        what = "all edits of each group earned the same"
    elif watch.lasting("no_gradient", 0.5) is not None:
        what = "the gradient was zero"
    else:
        return None
    return f"The reward taught nothing in the last {LASTS} iterations: {what}."


def _saturated(watch: Watch) -> str | None:
    if not watch.saturated():
        return None
    return (
        "Every prompt is saturated (--saturated_at): all of its edits earn the top reward, visit after visit. Little is left to "
        "learn, and training goes on with all of them."
    )


_SIGNS: dict[str, Callable[[Watch], str | None]] = {
    "copies": _copies, "degenerate": _degenerate, "edges": _edges, "judge": Watch.parted, "flat": _flat,
    "saturated": _saturated,
}  # fmt: skip
