"""What images are ranked by, as formulas on unit vectors (paper, section 5: aspect-conditioned and compositional retrieval).

For queries i with image q_i, aspect c_i and weight w_i, an image x has

    score(x) = sum_i w_i * (f(q_i, x | c_i) - o * f(q_i, x | overall)),   f(q, x | c) = z(q, c) . z(x, c)

which is linear in the vectors of x: one vector an aspect says all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tpips_reward.errors import TPIPSError

OVERALL = "overall"
#: The paper's, for one query; compositional queries add similarities as they are.
OVERALL_WEIGHT = 0.3


@dataclass(frozen=True)
class Query:
    """One image to be like, in one aspect.

    Attributes:
        aspect: one of the index.
        vector: (D,) of the image under the aspect; overall: under "overall".
        weight: in the sum; negative for unlike.
    """

    aspect: str
    vector: np.ndarray
    overall: np.ndarray
    weight: float = 1.0


def default_overall_weight(queries: int) -> float:
    """0.3 with one query, 0 with several, as in the paper."""
    return OVERALL_WEIGHT if queries == 1 else 0.0


def combine(queries: Sequence[Query], overall_weight: float | None = None) -> dict[str, np.ndarray]:
    """The queries as one vector (D,) an aspect, float32; the score of an image is the sum of dot products with them.

    Args:
        overall_weight: o above; None is `default_overall_weight`.

    Raises:
        TPIPSError: no query, or a weight that is not finite or zero.
    """
    if not queries:
        raise TPIPSError("A search needs at least one query.")
    share = default_overall_weight(len(queries)) if overall_weight is None else overall_weight
    if not math.isfinite(share):
        raise TPIPSError(f"The weight of the overall similarity is {share!r}; give a number.")
    total: dict[str, np.ndarray] = {}
    for query in queries:
        if not math.isfinite(query.weight) or query.weight == 0:
            raise TPIPSError(f"The weight of the query in {query.aspect!r} is {query.weight!r}; give a number but 0.")
        parts = {query.aspect: query.weight * query.vector}
        if share:
            parts[OVERALL] = parts.get(OVERALL, 0.0) - query.weight * share * query.overall
        for aspect, vector in parts.items():
            total[aspect] = (total.get(aspect, 0.0) + vector).astype(np.float32)
    return total


def scores(combined: Mapping[str, np.ndarray], vectors: Mapping[str, np.ndarray]) -> np.ndarray:
    """(N,) scores of images with `vectors` (N, D) an aspect: what the index must find the largest of."""
    return np.sum([vectors[aspect] @ query for aspect, query in combined.items()], axis=0)
