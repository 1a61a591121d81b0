"""Does the reward rise while an independent judge falls? The sign of a reward that is being fooled.

Both are noisy from iteration to iteration, so the question is asked of the slopes of straight lines, against their
standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpips_reward.errors import TPIPSError


@dataclass(frozen=True)
class Trend:
    """A least-squares line.

    Attributes:
        slope: its rise from one position to the next.
        standard_error: of the slope.
        freedom: degrees of freedom of that error.
        start, end: the line's values at the first and the last position.
    """

    slope: float
    standard_error: float
    freedom: float
    start: float
    end: float

    def sigmas(self) -> float:
        """How far the slope is from level, in standard deviations of a normal distribution.

        The slope in standard errors follows Student's distribution, whose tails are long with few points; this is the
        normal deviate of (almost) the same probability, by Wallace's formula.
        """
        squared = (self.slope / self.standard_error) ** 2
        size = math.sqrt(self.freedom * math.log1p(squared / self.freedom))
        return math.copysign(size * (8 * self.freedom + 1) / (8 * self.freedom + 3), self.slope)


@dataclass(frozen=True)
class Parting:
    """The trends of reward and judge over the same `points` iterations; `parted`: one rises while the other falls."""

    reward: Trend
    judge: Trend
    points: int
    parted: bool

    def sentence(self, judge: str = "the judge") -> str:
        """For a warning."""
        return (
            f"Over the last {self.points} points the reward went from {self.reward.start:.4f} to {self.reward.end:.4f} "
            f"({self.reward.sigmas():+.1f} sigma), and {judge} from {self.judge.start:.4f} to "
            f"{self.judge.end:.4f} ({self.judge.sigmas():+.1f})."
        )


def trend(positions: Sequence[float], values: Sequence[float]) -> Trend:
    """The least-squares line through at least six points at ascending positions.

    Neighbouring iterations are often alike, and then n points say less than n. The standard error counts
    n (1 - r) / (1 + r) of them, where r is the correlation of each residual with the next, corrected for being too low
    in short series, (n r + 1) / (n - 4), and kept within 0 and 0.9.

    Raises:
        TPIPSError: fewer than six points, lengths that differ, or values that are not finite or not ascending.
    """
    x, y = np.asarray(positions, np.float64), np.asarray(values, np.float64)
    if x.ndim != 1 or x.shape != y.shape or len(x) < 6:
        raise TPIPSError(f"A trend needs six points or more, but positions and values are {x.shape} and {y.shape}.")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (np.diff(x) > 0).all()):
        raise TPIPSError("A trend needs finite values at ascending positions.")
    centred = x - x.mean()
    extent = float((centred**2).sum())
    slope = float((centred * (y - y.mean())).sum()) / extent
    residuals = y - y.mean() - slope * centred
    total = float((residuals**2).sum())
    alike = float((residuals[1:] * residuals[:-1]).sum()) / total if total > 0 else 0.0
    alike = min(max((len(x) * alike + 1) / (len(x) - 4), 0.0), 0.9)
    freedom = max(len(x) * (1 - alike) / (1 + alike) - 2.0, 1.0)
    # Rounding leaves constant values with a slope; it must not count as one without noise.
    rounding = 8.0 * np.finfo(np.float64).eps * max(float(np.abs(y).max()), 1e-300) / math.sqrt(extent)
    error = max(math.sqrt(total / freedom / extent), rounding)
    middle = float(y.mean())
    return Trend(slope, error, freedom, middle + slope * float(centred[0]), middle + slope * float(centred[-1]))


def parting(
    rewards: Sequence[float | None],
    judgements: Sequence[float | None],
    *,
    window: int = 40,
    least: int = 12,
    sigmas: float = 3.5,
) -> Parting | None:
    """Compares the trends of reward and judge over the latest points at which both are known.

    Args:
        rewards: one an iteration; None or NaN where it is not known.
        judgements: the judge's, higher is better (negate what is better lower); of the same iterations.
        window: so many points are looked at, those known at most.
        least: with fewer there is no answer yet.
        sigmas: a trend counts when it is so far from level (`Trend.sigmas`). The question is asked again in every
            iteration, so 2 would raise false alarms in most long runs.

    Returns:
        the trends, or None while there are too few points.

    Raises:
        TPIPSError: histories of different lengths, infinite values, or bad settings.
    """
    if len(rewards) != len(judgements):
        raise TPIPSError(
            f"Reward and judge must have a value for each iteration, but there are {len(rewards)} and {len(judgements)}."
        )
    if not (6 <= least <= window and sigmas > 0):
        raise TPIPSError(
            f"The comparison needs least >= 6, window >= least and sigmas > 0, but they are {least}, {window} and {sigmas}."
        )
    pairs = [
        (position, reward, judgement)
        for position, (reward, judgement) in enumerate(zip(rewards, judgements, strict=True))
        if reward is not None and judgement is not None and not math.isnan(reward) and not math.isnan(judgement)
    ][-window:]
    if len(pairs) < least:
        return None
    positions, known_rewards, known_judgements = zip(*pairs, strict=True)
    reward, judge = trend(positions, known_rewards), trend(positions, known_judgements)
    return Parting(reward, judge, len(pairs), reward.sigmas() > sigmas and judge.sigmas() < -sigmas)
