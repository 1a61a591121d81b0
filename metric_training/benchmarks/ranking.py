"""Retrieval measures. Ties count as if they were broken at random, so that a constant metric scores chance."""

from __future__ import annotations

import numpy as np


def expected_recall(scores: np.ndarray, relevant: np.ndarray, cutoff: int) -> float:
    """Probability that one of the relevant candidates is among the first ``cutoff``.

    Args:
        scores: (N,), the larger the better.
        relevant: (N,) bool, at least one True.
        cutoff: at least 1.
    """
    best = scores[relevant].max()
    before = int((scores > best).sum())
    tied = scores == best
    hits, misses = int((tied & relevant).sum()), int((tied & ~relevant).sum())
    missed = 1.0  # that the places which are left go to irrelevant candidates only
    for taken in range(min(max(cutoff - before, 0), hits + misses)):
        missed *= max(misses - taken, 0) / (hits + misses - taken)
    return 1 - missed


def average_precision(scores: np.ndarray, relevant: np.ndarray) -> float:
    """Mean over the relevant candidates of the precision at their rank (expected, where scores are equal).

    Of t candidates with the same score, r of them relevant, n before them with k relevant, the relevant one at place j
    of the t has expected precision (k + 1 + (j − 1)·(r − 1)/(t − 1)) / (n + j).

    Args:
        scores: (N,), the larger the better.
        relevant: (N,) bool, at least one True.
    """
    total, before, found = 0.0, 0, 0
    for value in np.unique(scores)[::-1]:
        tied = scores == value
        size, hits = int(tied.sum()), int((tied & relevant).sum())
        if hits:
            places = np.arange(size)
            beside = places * ((hits - 1) / (size - 1)) if size > 1 else np.zeros(1)
            total += hits / size * float(((found + 1 + beside) / (before + places + 1)).sum())
        before, found = before + size, found + hits
    return total / int(relevant.sum())


def area_under_curve(positive: np.ndarray, negative: np.ndarray) -> float:
    """Probability that a value of the first group exceeds one of the second, ties counted half (Mann-Whitney).

    Args:
        positive, negative: (P,) and (N,), neither empty.
    """
    everything = np.sort(negative)
    below = np.searchsorted(everything, positive, side="left")
    upto = np.searchsorted(everything, positive, side="right")
    return float((below + upto).mean() / (2 * len(negative)))
