"""Simulated voters: from how different three images are in an aspect to a distribution of odd-one-out votes.

The protocol is the paper's (§3.1): each voter names the image that is the most different in the aspect or says "can't tell";
"can't tell" votes are dropped and the rest normalised, and an aspect with three or more of five "can't tell" is removed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Index pairs in the order of the image left out: pair k is the two images other than k.
PAIRS: tuple[tuple[int, int], ...] = ((1, 2), (0, 2), (0, 1))


@dataclass(frozen=True)
class Voters:
    """A panel of simulated voters.

    A voter's choice of image k has the probability softmax_k(-sensitivity · d(pair without k)): the image outside the closest
    pair is the odd one. A voter answers "can't tell" when the largest of the three distances, seen with noise, stays below a
    visible step, and errs at random now and then.

    Attributes:
        count: votes for each (triplet, aspect); the paper has five.
        sensitivity: how sharply voters tell distances apart (1 / visible steps).
        lapse: share of votes at random.
        threshold: distance below which differences are not seen.
    """

    count: int = 5
    sensitivity: float = 1.1
    lapse: float = 0.02
    threshold: float = 0.5

    def choice_probabilities(self, distances: np.ndarray) -> np.ndarray:
        """Probability of each image to be called odd.

        Args:
            distances: (3,) distances of the pairs in the order of :data:`PAIRS`.

        Returns:
            (3,) float64, sums to 1.
        """
        logits = -self.sensitivity * np.minimum(distances, 6.0)
        weights = np.exp(logits - logits.max())
        return (1 - self.lapse) * weights / weights.sum() + self.lapse / 3

    def vote(self, distances: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        """Vote shares after the paper's rules, or None where the aspect is removed because most could not tell.

        Args:
            distances: (3,) distances of the pairs in the order of :data:`PAIRS`.
            rng: source of all randomness.

        Returns:
            (3,) float32 that sums to 1, or None.
        """
        seen = rng.normal(distances.max(), 0.15, self.count) >= self.threshold
        if (~seen).sum() > self.count // 2 or not seen.any():
            return None
        choices = rng.choice(3, size=int(seen.sum()), p=self.choice_probabilities(distances))
        return (np.bincount(choices, minlength=3) / len(choices)).astype(np.float32)
