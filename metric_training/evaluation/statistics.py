"""Pure functions from choices and votes to figures (paper, §5 "Metrics" and §B.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from metric_training.losses import agreement, consensus

#: Figures are rounded float32 shares: 3/5 from two roads must be one threshold.
_DECIMALS = 4


@dataclass(frozen=True, eq=False)
class Examples:
    """What was asked, one entry for each of N (comparison, aspect).

    Attributes:
        votes: (N, n) vote shares; n is 3 (odd-one-out) or 2 (2AFC).
        names: N aspect names.
        sources: N sources.
        clusters: (N,) int64, the number of each example's comparison.
    """

    votes: np.ndarray
    names: tuple[str, ...]
    sources: tuple[str, ...]
    clusters: np.ndarray

    def __len__(self) -> int:
        return len(self.votes)


def tie_rows(values: np.ndarray) -> np.ndarray:
    """(N, n) → (N,) bool: whether the largest value is there more than once."""
    return (values == values.max(axis=1, keepdims=True)).sum(axis=1) > 1


def agreement_of(similarities: np.ndarray, votes: np.ndarray) -> np.ndarray:
    """Vote share of the choice with the largest similarity, (N,) float64; tied choices share theirs equally.

    Args:
        similarities: (N, n), the larger the more it speaks for the choice.
        votes: (N, n).
    """
    # similarities in their own precision: float32 would make ties that are none
    return agreement(torch.from_numpy(similarities), torch.from_numpy(votes.astype(np.float64))).numpy()


def consensus_of(votes: np.ndarray) -> np.ndarray:
    """Probability that two voters agree, Σ y², (N,) float64."""
    return consensus(torch.from_numpy(votes.astype(np.float64))).numpy()


def standard_error(values: np.ndarray) -> float:
    """Of the mean, over examples as in the paper's table 6; 0 for a single one."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def bootstrap_interval(
    values: np.ndarray, clusters: np.ndarray, *, draws: int = 1000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean when whole comparisons are drawn again with replacement.

    The aspects of one comparison share its images, so that examples are not independent; this interval knows, the
    standard error over examples does not.

    Args:
        values: (N,).
        clusters: (N,) which of them belong together.
        draws: resamples.
        level: share of the resampled means inside.
        seed: of the resampling.
    """
    _, cluster = np.unique(clusters, return_inverse=True)
    sums, counts = np.bincount(cluster, weights=values), np.bincount(cluster)
    rng = np.random.default_rng(seed)
    means = np.empty(draws)
    for start in range(0, draws, 64):  # in parts: a large set's table of draws would not fit
        rows = slice(start, min(start + 64, draws))
        drawn = rng.integers(len(sums), size=(rows.stop - start, len(sums)))
        means[rows] = sums[drawn].sum(1) / counts[drawn].sum(1)
    lowest, highest = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(lowest), float(highest)


def threshold_curve(agreed: np.ndarray, votes: np.ndarray) -> list[dict[str, float]]:
    """Agreement on the examples whose top choice has at least a share τ of the votes, for every τ there is (figure 13).

    Args:
        agreed: (N,) agreement of each example.
        votes: (N, n).

    Returns:
        A dict for each τ, rising: "threshold", "examples", "share" of all, "agreement", "standard_error", "consensus".
    """
    confidence = votes.max(axis=1).astype(np.float64).round(_DECIMALS)
    crowd = consensus_of(votes)
    curve = []
    for threshold in np.unique(confidence):
        kept = confidence >= threshold
        curve.append(
            {
                "threshold": float(threshold),
                "examples": int(kept.sum()),
                "share": float(kept.mean()),
                "agreement": float(agreed[kept].mean()),
                "standard_error": standard_error(agreed[kept]),
                "consensus": float(crowd[kept].mean()),
            }
        )
    return curve


def groups(agreed: np.ndarray, crowd: np.ndarray, labels: Sequence[str]) -> dict[str, dict[str, float]]:
    """Agreement, its standard error, consensus and count by label, the most frequent first."""
    names, index, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    result = {}
    for position in sorted(range(len(names)), key=lambda k: (-counts[k], names[k])):
        rows = index == position
        result[str(names[position])] = {
            "agreement": float(agreed[rows].mean()),
            "standard_error": standard_error(agreed[rows]),
            "consensus": float(crowd[rows].mean()),
            "examples": int(counts[position]),
        }
    return result


def describe_examples(examples: Examples) -> dict[str, Any]:
    """What does not depend on a metric: sizes, consensus, chance, and the share of examples with tied votes."""
    crowd = consensus_of(examples.votes)
    return {
        "comparisons": len(np.unique(examples.clusters)),
        "examples": len(examples),
        "consensus": float(crowd.mean()),
        "consensus_standard_error": standard_error(crowd),
        "chance": 1 / examples.votes.shape[1],
        "vote_ties": float(tie_rows(examples.votes).mean()),
    }


def figures(similarities: np.ndarray, examples: Examples, *, draws: int = 1000, seed: int = 0) -> dict[str, Any]:
    """All figures of one metric.

    Args:
        similarities: (N, n), the larger the more it speaks for the choice.
        examples: what was asked.
        draws, seed: of the bootstrap.

    Returns:
        "agreement", "standard_error", "interval" (95 %), "gap" to the consensus, "metric_ties" (share of examples in
        which the metric's best choices are exactly equal), "per_aspect", "per_source", "thresholds".
    """
    agreed = agreement_of(similarities, examples.votes)
    crowd = consensus_of(examples.votes)
    return {
        "agreement": float(agreed.mean()),
        "standard_error": standard_error(agreed),
        "interval": list(bootstrap_interval(agreed, examples.clusters, draws=draws, seed=seed)),
        "gap": float(crowd.mean() - agreed.mean()),
        "metric_ties": float(tie_rows(similarities).mean()),
        "per_aspect": groups(agreed, crowd, examples.names),
        "per_source": groups(agreed, crowd, examples.sources),
        "thresholds": threshold_curve(agreed, examples.votes),
    }
