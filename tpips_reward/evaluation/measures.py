"""Similarities -> what a row's output is worth: how much it kept, how far it changed, and both in one number.

For a row with the aspects to keep P and to change T, and with f from the metric:

    preservation = unit(mean over P of f(output, source | c))              in [0, 1], 1 for a copy
    change       = min(1, mean over T of (top - f(output, source | c)) / s)   in [0, 1], 0 for a copy
    overall      = sqrt(preservation * change)                             their geometric mean

"top" is the similarity of equal images, s the metric's change_scale (which also opens the rewards' gate), and unit(.)
maps similarities to [0, 1] as in the rewards (docs/rewards.md): so `overall` is the square root of `tpips:edit`. A row
without aspects of one kind has no number of that kind, and none overall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tpips_reward.evaluation.rows import Row
from tpips_reward.rewards.gate import Gate
from tpips_reward.rewards.terms import Scale

MEASURES = ("preservation", "change", "overall")
FORMULA = (
    "preservation = unit(mean similarity to the source over the aspects to keep); change = min(1, mean distance "
    "from the source over the aspects to change / change_scale); overall = sqrt(preservation x change), the geometric "
    "mean."
)


@dataclass(frozen=True)
class Measured:
    """Arrays over rows and models, NaN where there is no number; `columns` names the models and controls.

    Attributes:
        rows: as they index the first axis.
        columns: as they index the second.
        values: measure -> (R, M) float64.
        aspects: role ("preserve", "target") -> aspect -> (R, M) float64: f for preserve, top - f for target.
        change_scale: the metric's.
    """

    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    values: dict[str, np.ndarray]
    aspects: dict[str, dict[str, np.ndarray]]
    change_scale: float

    def column(self, model: str) -> int:
        """Position of a model or control."""
        return self.columns.index(model)


def measure(
    rows: Sequence[Row], columns: Sequence[str], scores: Mapping[str, Mapping[str, Mapping[str, float]]], scale: Scale
) -> Measured:
    """Every row's measures for every model and control.

    Args:
        rows: any; what has no scores is NaN.
        columns: models and controls.
        scores: `Scores.values`.
        scale: of the metric: its range and change_scale.
    """
    shape = (len(rows), len(columns))
    means = {role: np.full(shape, np.nan) for role in ("preserve", "target")}
    aspects: dict[str, dict[str, np.ndarray]] = {"preserve": {}, "target": {}}
    for index, row in enumerate(rows):
        for column, model in enumerate(columns):
            found = scores.get(row.key, {}).get(model)
            if found is None:
                continue
            for role, names in (("preserve", row.preserve), ("target", row.target)):
                for aspect in names:
                    table = aspects[role].setdefault(aspect, np.full(shape, np.nan))
                    table[index, column] = found[aspect] if role == "preserve" else scale.highest - found[aspect]
                if names:
                    means[role][index, column] = np.mean([found[aspect] for aspect in names])
    preservation = _mapped(means["preserve"], scale.unit)
    gate = Gate("change", scale.change_scale, 1.0)
    change = _mapped(means["target"], lambda f: gate.openness(scale.change(f)))
    values = {"preservation": preservation, "change": change, "overall": np.sqrt(preservation * change)}
    return Measured(tuple(rows), tuple(columns), values, aspects, scale.change_scale)


def _mapped(means: np.ndarray, formula: object) -> np.ndarray:
    """A reward's formula on an array; NaN stays NaN."""
    result = np.full_like(means, np.nan)
    there = ~np.isnan(means)
    if there.any():
        result[there] = formula(torch.from_numpy(means[there])).numpy()  # type: ignore[operator]
    return result
