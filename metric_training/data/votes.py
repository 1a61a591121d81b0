"""Simulated voters: from how different three images are in an aspect to a distribution of odd-one-out votes.

The protocol is the paper's (§3.1): each voter names the image that is the most different in the aspect or says "can't
tell"; "can't tell" votes are dropped and the rest normalised, and an aspect with three or more of five "can't tell"
is removed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Index pairs in the order of the image left out: pair k is the two images other than k.
PAIRS: tuple[tuple[int, int], ...] = ((1, 2), (0, 2), (0, 1))


@dataclass(frozen=True)
class Voters:
    """A panel of simulated voters.

    A voter's choice of image k has the probability softmax_k(-sensitivity · d(pair without k)): the image outside the
    closest pair is the odd one. A voter answers "can't tell" when the largest of the three distances, seen with
    noise, stays below a visible step, and errs at random now and then.

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
        """Probability of each choice.

        Args:
            distances: (n,) one a choice, the smallest speaks for it: those of the pairs in the order of :data:`PAIRS`
                where the odd image is asked for, those of the candidates to the reference in 2AFC.

        Returns:
            (n,) float64, sums to 1.
        """
        logits = -self.sensitivity * np.minimum(distances, 6.0)
        weights = np.exp(logits - logits.max())
        return (1 - self.lapse) * weights / weights.sum() + self.lapse / len(weights)

    def vote(self, distances: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        """Vote shares after the paper's rules, or None where the aspect is removed because most could not tell.

        Args:
            distances: (3,) distances of the pairs in the order of :data:`PAIRS`.
            rng: source of all randomness.

        Returns:
            (3,) float32 that sums to 1, or None.
        """
        return self._shares(float(distances.max()), distances, rng)

    def vote_two_afc(self, distances: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        """Vote shares of two candidates after the paper's rules (§3.2), or None where most could not tell or for ties.

        Which of two is nearer cannot be told when they are equally near: a voter answers "can't tell" when the
        difference of the two distances, seen with noise, stays below a visible step.

        Args:
            distances: (2,) distances of the candidates to the reference.
            rng: source of all randomness.

        Returns:
            (2,) float32 that sums to 1, or None.
        """
        shares = self._shares(float(abs(distances[0] - distances[1])), distances, rng)
        return None if shares is None or shares[0] == shares[1] else shares

    def _shares(self, visible: float, distances: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        seen = rng.normal(visible, 0.15, self.count) >= self.threshold
        if (~seen).sum() > self.count // 2 or not seen.any():
            return None
        choices = rng.choice(len(distances), size=int(seen.sum()), p=self.choice_probabilities(distances))
        return (np.bincount(choices, minlength=len(distances)) / len(choices)).astype(np.float32)
