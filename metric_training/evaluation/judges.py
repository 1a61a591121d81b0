"""Judges: what can be evaluated. A judge says, for each aspect of a comparison, how much speaks for each choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from metric_training.data.comparison import CHOICE_PAIRS, Comparison
from tpips_reward import Metric, TPIPSError

#: (images, [(index, index, aspect)]) → (N,) similarities of the pairs, symmetric in the two images.
PairScore = Callable[[list[Tensor], Sequence[tuple[int, int, str]]], Tensor]


class Judge(Protocol):
    """What an evaluation needs: scores of a batch of comparisons.

    A judge of another kind than pairwise similarity (one that sees all three images at once) implements this directly.
    """

    name: str

    def __call__(self, comparisons: Sequence[Comparison], images: Mapping[str, Tensor]) -> list[Tensor]:
        """Scores.

        Args:
            comparisons: a batch; some may share images.
            images: decoded, (3, H, W) floats in [0, 1], by the key of their source.

        Returns:
            (A, n) for each comparison: for each of its aspects and choices, larger is more in favour.
        """
        ...


class PairwiseJudge:
    """A judge from similarities of two images: of each choice it takes the pair that speaks for it.

    Every distinct image goes to the score once, and every pair of images is asked once an aspect.

    Args:
        name: in reports.
        score: see :data:`PairScore`.
    """

    def __init__(self, name: str, score: PairScore) -> None:
        self.name, self.score = name, score

    @torch.no_grad()
    def __call__(self, comparisons: Sequence[Comparison], images: Mapping[str, Tensor]) -> list[Tensor]:
        position: dict[str, int] = {}
        asked: dict[tuple[int, int, str], int] = {}
        tables = []
        for comparison in comparisons:
            own = [position.setdefault(image.key, len(position)) for image in comparison.images]
            rows = []
            for aspect in comparison.aspects:
                pairs = [sorted((own[i], own[j])) for i, j in CHOICE_PAIRS[comparison.task]]
                rows.append([asked.setdefault((i, j, aspect), len(asked)) for i, j in pairs])
            tables.append(torch.tensor(rows))
        scores = self.score([images[key] for key in position], list(asked)).detach().cpu()
        if scores.shape != (len(asked),) or not bool(torch.isfinite(scores).all()):
            bad = next((c.key for c, t in zip(comparisons, tables, strict=True) if not _finite(scores, t)), "a batch")
            raise TPIPSError(f"{self.name} gave a similarity that is not finite on {bad}; nothing was scored.")
        return [scores[table] for table in tables]


def _finite(scores: Tensor, table: Tensor) -> bool:
    return int(table.max()) < len(scores) and bool(torch.isfinite(scores[table]).all())


def metric_judge(name: str, metric: Metric) -> PairwiseJudge:
    """A judge from a metric, whatever its fusion."""

    def score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        return metric.similarity_pairs(images, images, pairs, differentiable=False)

    return PairwiseJudge(name, score)


def blind_judge(name: str, similarity: Callable[[Tensor, Tensor], float]) -> PairwiseJudge:
    """A judge that does not know aspects: each pair of images is compared once and counts for all of them.

    Args:
        name: in reports.
        similarity: of two (3, H, W) floats in [0, 1].
    """

    def score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        found = {(i, j): similarity(images[i], images[j]) for i, j in dict.fromkeys(pair[:2] for pair in pairs)}
        return torch.tensor([found[i, j] for i, j, _ in pairs], dtype=torch.float64)

    return PairwiseJudge(name, score)


def embedding_judge(name: str, embed: Callable[[Tensor], Tensor]) -> PairwiseJudge:
    """A judge that does not know aspects, by the cosine of embeddings: each image is embedded once.

    Args:
        name: in reports.
        embed: (3, H, W) float in [0, 1] → a vector.
    """

    def score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        vectors = torch.stack([embed(image).flatten().double().cpu() for image in images])
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
        first, second = (torch.tensor([pair[side] for pair in pairs]) for side in (0, 1))
        return (vectors[first] * vectors[second]).sum(-1)

    return PairwiseJudge(name, score)
