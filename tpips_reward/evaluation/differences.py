"""Paired differences between models: over all rows, within each category, and within each aspect.

Each table is tested as a whole. Holm's adjustment is over a family: the pairs of models in one measure over all rows; the
pairs in one measure in all categories; the pairs in all aspects to keep, and those in all aspects to change. A category or
an aspect with fewer than six sources is in no family: with five, flipping all signs never gives a p below 2 / 2^5 = 0.06,
whatever the difference, so that testing it would only blunt the others. It has its difference and its p all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from tpips_reward.evaluation.measures import MEASURES, Measured
from tpips_reward.evaluation.statistics import compare, holm, sign_flips

#: Sources that a category or an aspect needs for a place in its family.
FEWEST_SOURCES = 6
#: The smallest p that flips can give is 1 / (flips + 1), which the adjustment multiplies by the family's size: so many
#: flips a test leave room below 0.01.
_FLIPS_A_TEST = 100
#: Time and memory go by the flips: a family of more than 1,000 tests gets no more, and its smallest p (Holm) is its size /
#: 100,000.
_MOST_FLIPS = 100_000


@dataclass(frozen=True)
class Resampling:
    """How intervals and p values are made: resamples (and sign flips, at least), the level, a tie's margin, the seed."""

    resamples: int = 2000
    level: float = 0.95
    tie_margin: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class _Part:
    """Rows that are compared by themselves. `values`: (R, M), one column a model."""

    name: str
    values: np.ndarray
    clusters: np.ndarray


def overall_differences(
    measured: Measured, models: Sequence[str], clusters: np.ndarray, weights: np.ndarray, how: Resampling
) -> list[dict[str, Any]]:
    """Each pair of models in each measure, over all rows.

    Args:
        measured: with a column for each model.
        models: in the order in which they are paired; no controls.
        clusters: (R,) which source each row has.
        weights: of `bootstrap_weights`, one column a source.
        how: the settings.

    Returns:
        dicts of "measure", "first", "second", "difference" (first - second), "sources", "p", "p_holm", "wins", "ties",
        "losses" and "rows_needed".
    """
    columns = [measured.column(model) for model in models]
    rows: list[dict[str, Any]] = []
    for name in MEASURES:
        part = _Part(name, measured.values[name][:, columns], clusters)
        found = _family([part], models, weights, how, how.tie_margin, tested=2, listed=1)
        rows += [{"measure": entry.pop("name"), **entry} for entry in found]
    return rows


def differences_within(
    measured: Measured, models: Sequence[str], clusters: np.ndarray, weights: np.ndarray, how: Resampling
) -> list[dict[str, Any]]:
    """Each pair of models in each measure within each category, and in each aspect; the most frequent ones first.

    An aspect's values are similarities to the source for what is to stay, and distances from it for what is to change.
    A tie there is a difference of at most the margin times the metric's change_scale, as it is in the measure "change".

    Args:
        measured, models, clusters, weights, how: as for `overall_differences`.

    Returns:
        dicts as those of `overall_differences`, with "by" ("category", "preserve" or "target") and "name" before them; the
        measure of an aspect is "similarity" or "distance". Parts in which no two models share two sources are left out.
    """
    columns = [measured.column(model) for model in models]
    rows: list[dict[str, Any]] = []
    members: dict[str, list[int]] = {}
    for index, row in enumerate(measured.rows):
        members.setdefault(row.category, []).append(index)
    for name in MEASURES:
        values = measured.values[name][:, columns]
        parts = [_Part(category, values[inside], clusters[inside]) for category, inside in members.items()]
        found = _family(parts, models, weights, how, how.tie_margin)
        rows += [{"by": "category", "name": entry.pop("name"), "measure": name, **entry} for entry in found]
    for role, measure in (("preserve", "similarity"), ("target", "distance")):
        parts = [_Part(aspect, table[:, columns], clusters) for aspect, table in measured.aspects[role].items()]
        found = _family(parts, models, weights, how, how.tie_margin * measured.change_scale)
        rows += [{"by": role, "name": entry.pop("name"), "measure": measure, **entry} for entry in found]
    return rows


def _family(
    parts: Sequence[_Part],
    models: Sequence[str],
    weights: np.ndarray,
    how: Resampling,
    margin: float,
    *,
    tested: int = FEWEST_SOURCES,
    listed: int = 2,
) -> list[dict[str, Any]]:
    """All pairs of models in all parts, adjusted together.

    Args:
        tested, listed: sources that a pair must share to be in the family, and to be there at all.
    """
    pairs = list(combinations(range(len(models)), 2))
    if not pairs:
        return []
    chosen: list[tuple[str, np.ndarray, np.ndarray]] = []
    tests = 0
    for part in sorted(parts, key=lambda part: (-int((~np.isnan(part.values)).any(axis=1).sum()), part.name)):
        gaps = np.stack([part.values[:, a] - part.values[:, b] for a, b in pairs], axis=1)
        known = ~np.isnan(gaps).all(axis=1)  # an aspect is in few of the rows
        gaps, clusters = gaps[known], part.clusters[known]
        sources = [len(np.unique(clusters[~np.isnan(column)])) for column in gaps.T]
        tests += sum(count >= tested for count in sources)
        if max(sources) >= listed:
            chosen.append((part.name, gaps, clusters))
    flips = min(_MOST_FLIPS, max(how.resamples, _FLIPS_A_TEST * tests))
    rows: list[dict[str, Any]] = []
    for name, gaps, clusters in chosen:
        present, index = np.unique(clusters, return_inverse=True)
        signs = sign_flips(np.random.default_rng(how.seed), len(present), flips)  # whatever other parts there are
        found = compare(gaps, index, weights[:, present], signs, margin, how.level)
        for (a, b), comparison in zip(pairs, found, strict=True):
            if comparison is not None and comparison.sources >= listed:
                rows.append({"name": name, "first": models[a], "second": models[b], **asdict(comparison)})
    in_family = [row["p"] if row["sources"] >= tested else None for row in rows]
    for row, adjusted in zip(rows, holm(in_family), strict=True):
        row["p_holm"] = adjusted
    return rows
