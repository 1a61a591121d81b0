"""How often a metric's preference between two outputs is people's, counted as each set of votes counts it.

| rule | people's ties | the metric's ties |
|---|---|---|
| plain (a user's votes) | left out, and counted | half right |
| editscore | there are none | wrong |
| vcreward | left out, and counted | wrong |
| tiger | pairs of two candidates: right where the metric ties too; larger rankings have none | |

In TIGER's rule the metric ties where its two scores differ by at most a threshold, which is chosen so that the
accuracy is highest (as the benchmark does it: the figure is fitted to the set by that one number). A ranking is right
where all of its pairs are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.rows import Vote
from tpips_reward.evaluation.statistics import bootstrap_weights, kendall_tau, mean_intervals

Score = Callable[[str, str, str], float | None]
"""(row's key, model, measure) -> score, None where there is none."""
#: Which measure answers which question.
MEASURE_OF = {"overall": "overall", "preservation": "preservation", "change": "change"}


@dataclass(frozen=True)
class Judged:
    """A vote with the metric's difference, score of the first - score of the second, its row's source, and the votes of
    its ranking."""

    vote: Vote
    gap: float
    source: str
    ranking_votes: int = 1


def agreement(
    votes: Sequence[Vote],
    score: Score,
    sources: Mapping[str, str],
    rule: str,
    rng: np.random.Generator,
    resamples: int = 2000,
    level: float = 0.95,
) -> list[dict[str, Any]]:
    """A dict for each dimension that was voted on: accuracy with its interval, and everything that was left out.

    Args:
        sources: row's key -> its source, of every row that has scores; the intervals draw sources.
        rule: a key of :data:`RULES`.

    Raises:
        TPIPSError: an unknown rule.
    """
    if rule not in RULES:
        raise TPIPSError(f"Votes are counted by {', '.join(RULES)}, not {rule!r}.")
    results = []
    for dimension in dict.fromkeys(vote.dimension for vote in votes):
        asked = [vote for vote in votes if vote.dimension == dimension]
        ranking = Counter(vote.group or vote.key for vote in asked)
        judged = []
        for vote in asked:
            sides = [score(vote.key, model, MEASURE_OF[dimension]) for model in (vote.first, vote.second)]
            if sides[0] is not None and sides[1] is not None:
                judged.append(Judged(vote, sides[0] - sides[1], sources[vote.key], ranking[vote.group or vote.key]))
        result: dict[str, Any] = {
            "dimension": dimension,
            "rule": rule,
            "votes": len(asked),
            "unscored": len(asked) - len(judged),
            "human_ties": sum(item.vote.label == 0 for item in judged),
            "metric_ties": sum(item.gap == 0 for item in judged),
        }
        if judged:
            result |= RULES[rule](judged, rng, resamples, level)
        results.append(result)
    return results


def _plain(judged: Sequence[Judged], rng: np.random.Generator, resamples: int, level: float) -> dict[str, Any]:
    decided = [item for item in judged if item.vote.label]
    points = [0.5 if item.gap == 0 else float(item.gap * item.vote.label > 0) for item in decided]
    return _accuracy(points, [item.source for item in decided], rng, resamples, level)


def _strict(judged: Sequence[Judged], rng: np.random.Generator, resamples: int, level: float) -> dict[str, Any]:
    decided = [item for item in judged if item.vote.label]
    points = [float(item.gap * item.vote.label > 0) for item in decided]
    return _accuracy(points, [item.source for item in decided], rng, resamples, level)


def _tiger(judged: Sequence[Judged], rng: np.random.Generator, resamples: int, level: float) -> dict[str, Any]:
    threshold = best_tie_threshold([item.vote.label for item in judged], [item.gap for item in judged])
    result = _accuracy(_three_way(judged, threshold), [item.source for item in judged], rng, resamples, level)
    decided = [item for item in judged if item.vote.label]
    without = _accuracy(
        [float(item.gap * item.vote.label > 0) for item in decided],
        [item.source for item in decided],
        rng,
        resamples,
        level,
    )
    groups: dict[str, list[Judged]] = {}
    for item in judged:
        groups.setdefault(item.vote.group or item.vote.key, []).append(item)
    sizes: dict[int, list[list[Judged]]] = {}
    for members in groups.values():
        if (
            len(members) == members[0].ranking_votes
        ):  # a ranking with an unscored candidate can be neither right nor wrong
            sizes.setdefault(len(members), []).append(members)
    rankings = []
    for pairs, found in sorted(sizes.items()):
        flat = [item for members in found for item in members]
        # only sets of one pair hold ties; larger rankings are strict
        limit = best_tie_threshold([i.vote.label for i in flat], [i.gap for i in flat]) if pairs == 1 else -1.0
        right = [all(_three_way(members, limit)) for members in found]
        rankings.append(
            {
                "pairs": pairs,
                "rankings": len(found),
                "all_right": float(np.mean(right)),
                "pair_accuracy": float(np.mean(_three_way(flat, limit))),
                "tie_threshold": limit if pairs == 1 else None,
            }
        )
    return result | {"tie_threshold": threshold, "without_ties": without["accuracy"], "rankings": rankings}


def _three_way(judged: Sequence[Judged], threshold: float) -> list[float]:
    """1 where better, worse or tied is what people said, else 0."""
    return [float((0 if abs(item.gap) <= threshold else np.sign(item.gap)) == item.vote.label) for item in judged]


def best_tie_threshold(labels: Sequence[int], gaps: Sequence[float]) -> float:
    """The difference up to which two scores are called a tie so that most votes are met; the smallest of equals.

    Only 0 and the differences that occur have to be tried (Deutsch et al., 2023, "Ties Matter").
    """
    human, gap = np.asarray(labels), np.asarray(gaps, float)
    order = np.argsort(np.abs(gap), kind="stable")
    size = np.abs(gap)[order]
    # with the threshold at the n-th difference the first n are ties: right where people tied
    tied = np.concatenate([[0], np.cumsum(human[order] == 0)])
    right = np.concatenate([[0], np.cumsum((human * np.sign(gap) > 0)[order])])
    best, chosen = -1, 0.0
    for threshold in np.unique(np.concatenate([[0.0], size])):
        count = int(np.searchsorted(size, threshold, side="right"))
        hits = int(tied[count] + right[-1] - right[count])
        if hits > best:
            best, chosen = hits, float(threshold)
    return chosen


def _accuracy(
    points: Sequence[float], sources: Sequence[str], rng: np.random.Generator, resamples: int, level: float
) -> dict[str, Any]:
    if not points:
        return {"accuracy": None, "low": None, "high": None, "counted": 0}
    names = {source: index for index, source in enumerate(dict.fromkeys(sources))}
    clusters = np.array([names[source] for source in sources])
    weights = bootstrap_weights(rng, len(names), resamples)
    interval = mean_intervals(np.asarray(points)[:, None], clusters, weights, level)[0]
    return {"accuracy": interval.mean, "low": interval.low, "high": interval.high, "counted": len(points)}


RULES: dict[str, Callable[[Sequence[Judged], np.random.Generator, int, float], dict[str, Any]]] = {
    "plain": _plain,
    "editscore": _strict,
    "vcreward": _strict,
    "tiger": _tiger,
}


def ranking_agreement(votes: Sequence[Vote], models: Sequence[str], means: Sequence[float | None]) -> float | None:
    """Kendall's tau-b between the models' means and the shares of votes that they won (ties half); None below three
    models that have both."""
    won: dict[str, list[float]] = {}
    for vote in votes:
        won.setdefault(vote.first, []).append((1 + vote.label) / 2)
        won.setdefault(vote.second, []).append((1 - vote.label) / 2)
    both = [
        (mean, float(np.mean(won[m]))) for m, mean in zip(models, means, strict=True) if mean is not None and m in won
    ]
    return kendall_tau(*zip(*both, strict=True)) if len(both) >= 3 else None
