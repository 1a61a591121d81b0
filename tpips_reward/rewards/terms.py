"""What each reward mode means, as pure formulas on per-sample means. docs/rewards.md states and motivates them.

f(edit, source | c) is the metric's similarity in aspect c. A metric states its range: (-1, 1) for the cosine of late
and early fusion, (-inf, 0] for the minus distance of mid fusion. The formulas below read the range and work for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tpips_reward.errors import TPIPSError


@dataclass(frozen=True)
class Scale:
    """What a metric's numbers mean: its range, and the change in an aspect from which on an image counts as edited."""

    lowest: float
    highest: float
    change_scale: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.highest) and self.lowest < self.highest):
            raise TPIPSError(
                f"The metric's range ({self.lowest}, {self.highest}) has no finite upper end above its lower end; "
                "a reward needs to know the similarity of two equal images."
            )
        if not (math.isfinite(self.change_scale) and self.change_scale > 0):
            raise TPIPSError(
                f"The change scale {self.change_scale!r} is not a positive number; pass gate_threshold=<a "
                "third of the median change of good edits> or a metric that states change_scale."
            )

    def change(self, similarity: Tensor) -> Tensor:
        """How far an aspect moved: highest - f, so 1 - f for cosines and -f for minus distances; 0 for equal images."""
        return self.highest - similarity

    def unit(self, similarity: Tensor) -> Tensor:
        """A similarity on [0, 1]: 1 for equal images. Bounded ranges are clamped to [0, highest] and divided by it;
        unbounded ones fall as exp(-change / change_scale)."""
        if math.isinf(self.lowest) or self.highest <= 0:
            return torch.exp(-self.change(similarity).clamp(min=0) / self.change_scale)
        return (similarity / self.highest).clamp(0, 1)


@dataclass(frozen=True)
class SampleMeans:
    """Means over the aspects of each sample, all (B,) float32. Where a mask is False the value is 0 and not used.

    preserve: mean f(edit, source | c) over the preserve aspects.
    change: mean change from the source over the target aspects; gate: how far it opens the gate, in [0, 1].
    closeness: mean f(edit, target image | c) over the target aspects, where has_target_image.
    """

    preserve: Tensor
    change: Tensor
    gate: Tensor
    closeness: Tensor
    has_target: Tensor
    has_target_image: Tensor


def preserve_term(means: SampleMeans, scale: Scale, gate_weight: float) -> Tensor:
    """p - gate_weight * (1 - g); without the penalty for samples without target aspects; plain p with gate_weight 0.

    Beside a penalty a minus distance is brought to [0, 1] first: its size says nothing beside a weight of about one.
    """
    penalty = gate_weight * (1 - means.gate)
    kept = scale.unit(means.preserve) if gate_weight and math.isinf(scale.lowest) else means.preserve
    return kept - torch.where(means.has_target, penalty, torch.zeros_like(penalty))


def target_term(means: SampleMeans, scale: Scale, gate_weight: float) -> Tensor:
    """Mean change from the source, or mean similarity to the target image where there is one."""
    return torch.where(means.has_target_image, means.closeness, means.change)


def edit_term(means: SampleMeans, scale: Scale, gate_weight: float) -> Tensor:
    """unit(p) * g, times unit(closeness) where there is a target image: in [0, 1], 0 for a copy of the source."""
    closeness = torch.where(means.has_target_image, scale.unit(means.closeness), torch.ones_like(means.closeness))
    return scale.unit(means.preserve) * means.gate * closeness


@dataclass(frozen=True)
class Mode:
    """One reward mode: its formula and the aspects that every sample must have for it."""

    term: Callable[[SampleMeans, Scale, float], Tensor]
    needs: frozenset[str]


MODES: dict[str, Mode] = {
    "preserve": Mode(preserve_term, frozenset({"preserve"})),
    "target": Mode(target_term, frozenset({"target"})),
    "edit": Mode(edit_term, frozenset({"preserve", "target"})),
}
