"""Intervals, differences and their significance: pure functions on arrays.

Rows of one source image are not independent (one photograph, ten instructions), so every resampling draws sources and
not rows. All randomness comes from a generator that is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tpips_reward.errors import TPIPSError

#: Signs that are drawn at one time: 16 MB.
_CHUNK = 2_000_000


@dataclass(frozen=True)
class Interval:
    """A mean with its percentile interval. `low` and `high` are None where fewer than two sources have a number."""

    mean: float | None
    low: float | None
    high: float | None
    count: int


def bootstrap_weights(rng: np.random.Generator, clusters: int, resamples: int = 2000) -> np.ndarray:
    """How often each cluster is drawn in each resample, (resamples, clusters) float64; every row sums to `clusters`.

    Raises:
        TPIPSError: no clusters, or fewer than 100 resamples.
    """
    if clusters < 1:
        raise TPIPSError("There is nothing to resample: no row has a score.")
    if resamples < 100:
        raise TPIPSError(f"{resamples} bootstrap resamples give no interval worth reading; take 100 or more.")
    return rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=resamples).astype(np.float64)


def cluster_sums(values: np.ndarray, clusters: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of the values of each cluster, NaN left out.

    Args:
        values: (R,) or (R, K).
        clusters: (R,) int in [0, count).

    Returns:
        sums and numbers, (count,) or (count, K) float64.
    """
    there = ~np.isnan(values)
    sums, numbers = (np.zeros((count, *values.shape[1:])) for _ in range(2))
    np.add.at(sums, clusters, np.where(there, values, 0.0))
    np.add.at(numbers, clusters, there.astype(np.float64))
    return sums, numbers


def mean_intervals(
    values: np.ndarray, clusters: np.ndarray, weights: np.ndarray, level: float = 0.95
) -> list[Interval]:
    """Mean over rows of each column with its percentile bootstrap interval over clusters.

    Args:
        values: (R, K); NaN where a row has no number.
        clusters: (R,) int: which cluster each row belongs to.
        weights: of `bootstrap_weights`.
        level: share of resamples inside the interval.

    Returns:
        K intervals.
    """
    sums, numbers = cluster_sums(values, clusters, weights.shape[1])
    drawn, sizes = weights @ sums, weights @ numbers
    tails = [50 * (1 - level), 50 * (1 + level)]
    whole = (sizes > 0).all(axis=0)
    bounds = np.full((2, values.shape[1]), np.nan)
    if whole.any():  # all at once: one by one they are slow
        bounds[:, whole] = np.percentile(drawn[:, whole] / sizes[:, whole], tails, axis=0)
    intervals = []
    for column in range(values.shape[1]):
        total = int(numbers[:, column].sum())
        if total == 0:
            intervals.append(Interval(None, None, None, 0))
            continue
        mean = float(sums[:, column].sum() / total)
        if (numbers[:, column] > 0).sum() < 2:
            intervals.append(Interval(mean, None, None, total))
            continue
        if not whole[column]:  # a small category may be missing from a resample
            usable = sizes[:, column] > 0
            bounds[:, column] = np.percentile(drawn[usable, column] / sizes[usable, column], tails)
        low, high = bounds[:, column]
        intervals.append(Interval(mean, float(low), float(high), total))
    return intervals


@dataclass(frozen=True)
class Comparison:
    """Two models on the rows that both have.

    Attributes:
        difference: mean of first - second, with its interval.
        sources: how many different sources those rows have.
        p: two-sided, by sign flips of whole sources; None with fewer than two sources.
        wins, ties, losses: shares of rows, of the first model; a tie is a difference of at most the margin.
        rows_needed: rows for which the interval would be expected to leave 0, were the difference the true one; None
            where it is 0.
    """

    difference: Interval
    sources: int
    p: float | None
    wins: float
    ties: float
    losses: float
    rows_needed: int | None


def compare(
    gaps: np.ndarray,
    clusters: np.ndarray,
    weights: np.ndarray,
    flips: Iterable[np.ndarray],
    margin: float = 0.01,
    level: float = 0.95,
) -> list[Comparison | None]:
    """Paired comparisons of K pairs of models.

    A p value is the share of sign flips whose mean difference is at least as far from 0 as the observed one, with the
    observed one counted: (1 + k) / (1 + n). It is exact under the hypothesis that the two models are exchangeable, where
    the flips are all that there are; where they are drawn, it is so up to their number.

    Args:
        gaps: (R, K) first - second; NaN where a row lacks one of the two.
        clusters: (R,) int: which cluster each row belongs to.
        weights: of `bootstrap_weights`.
        flips: arrays (n, clusters) of -1 and 1, see `sign_flips`.
        margin: of a tie.
        level: of the intervals.

    Returns:
        K comparisons; None where no row has both models.
    """
    differences = mean_intervals(gaps, clusters, weights, level)
    sums, numbers = cluster_sums(gaps, clusters, weights.shape[1])
    # sums of floats in another order differ in their last digits
    observed = np.abs(sums.sum(axis=0)) * (1 - 1e-9) - 1e-12
    beyond, count = np.zeros(gaps.shape[1]), 0
    for signs in flips:
        beyond += (np.abs(signs @ sums) >= observed).sum(axis=0)
        count += len(signs)
    found: list[Comparison | None] = []
    for column, difference in enumerate(differences):
        known = gaps[:, column][~np.isnan(gaps[:, column])]
        present = numbers[:, column] > 0
        if not len(known):
            found.append(None)
            continue
        found.append(
            Comparison(
                difference,
                int(present.sum()),
                float((1 + beyond[column]) / (1 + count)) if present.sum() >= 2 else None,
                wins=float((known > margin).mean()),
                ties=float((np.abs(known) <= margin).mean()),
                losses=float((known < -margin).mean()),
                rows_needed=_rows_needed(sums[present, column], numbers[present, column], level),
            )
        )
    return found


def sign_flips(rng: np.random.Generator, clusters: int, count: int = 2000) -> Iterator[np.ndarray]:
    """`count` rows of -1 and 1 for each cluster, float64, in arrays of at most `_CHUNK` numbers.

    Where there are no more than `count` different ones it is each of them once, but for the one that flips nothing, which
    `compare` counts as the observed one: p is exact then.
    """
    step = max(1, _CHUNK // max(1, clusters))
    if 2**clusters <= count:
        for begin in range(1, 2**clusters, step):
            numbers = np.arange(begin, min(begin + step, 2**clusters))[:, None]
            yield 1.0 - 2.0 * (numbers >> np.arange(clusters) & 1)
        return
    for begin in range(0, count, step):
        yield rng.integers(0, 2, size=(min(step, count - begin), clusters)).astype(np.float64) * 2 - 1


def _rows_needed(sums: np.ndarray, numbers: np.ndarray, level: float) -> int | None:
    """n with z * standard error = |mean|, z the normal quantile of the level (1.96 at 0.95), from the spread between clusters, in rows."""
    mean = sums.sum() / numbers.sum()
    if len(sums) < 2 or abs(mean) < 1e-12:
        return None
    residuals = sums - mean * numbers
    variance = float((residuals**2).sum() / (len(sums) - 1) / numbers.mean() ** 2)
    quantile = NormalDist().inv_cdf((1 + level) / 2)
    return max(2, int(np.ceil(quantile**2 * variance / mean**2 * numbers.mean())))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjustment of several p values: the chance of any false difference stays at the level. None stays None."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, index) in enumerate(order):
        running = max(running, min(1.0, p * (len(order) - rank)))
        adjusted[index] = running
    return adjusted


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau-b of two rankings; None where one of them is constant or there are fewer than two entries."""
    first, second = np.asarray(a, float), np.asarray(b, float)
    upper = np.triu_indices(len(first), 1)
    x = np.sign(first[:, None] - first[None])[upper]
    y = np.sign(second[:, None] - second[None])[upper]
    scale = np.sqrt((x**2).sum() * (y**2).sum())
    return float((x * y).sum() / scale) if scale > 0 else None
