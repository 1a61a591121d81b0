"""The gate of `tpips:preserve`: an edit that did not move what it was told to move earns nothing by keeping the rest.

    g = clamp(t / threshold, 0, 1)        t: mean change from the source over the target aspects
    score = p - weight * (1 - g)          p: mean similarity over the preserve aspects

A copy of the source has p = 1 and g = 0, so 0 with weight 1; a true edit has g = 1 and keeps its p. The penalty is
added, not multiplied: p * g would turn round where p < 0 (a cosine can be, a minus distance always is), and there a
closed gate, i.e. copying, would raise the score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from tpips_reward.errors import TPIPSError

GATES = ("change", "none")


@dataclass(frozen=True)
class Gate:
    """kind: "change" or "none"; threshold: the mean change that opens it fully; weight: what a closed one costs."""

    kind: str
    threshold: float
    weight: float

    def __post_init__(self) -> None:
        if self.kind not in GATES:
            raise TPIPSError(f"Unknown gate {self.kind!r}; gates are: {', '.join(GATES)}.")
        for name, value in (("gate_threshold", self.threshold), ("gate_weight", self.weight)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TPIPSError(f"{name}={value!r} is not a number; give a positive one.")
            if not (math.isfinite(value) and value > 0):
                raise TPIPSError(f'{name}={value!r} must be positive and finite; gate="none" switches the gate off.')

    @property
    def penalty(self) -> float:
        """What a fully closed gate costs: weight, or 0 when the gate is off."""
        return float(self.weight) if self.kind == "change" else 0.0

    def openness(self, change: Tensor) -> Tensor:
        """Mean target change (B,) -> g (B,) in [0, 1], with the gradient 1/threshold while it is opening."""
        return (change / self.threshold).clamp(0, 1)
