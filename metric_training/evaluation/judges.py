"""Judges: what can be evaluated. A judge says, for each aspect of a comparison, how much speaks for each choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from metric_training.data.comparison import CHOICE_PAIRS, Comparison
from tpips_reward import Metric, TPIPSError
from tpips_reward.errors import NotFinite

#: (images, [(index, index, aspect)]) → (N,) similarities of the pairs, symmetric in the two images.
PairScore = Callable[[list[Tensor], Sequence[tuple[int, int, str]]], Tensor]
#: (images, K aspects) → (B, K, D) vectors whose cosines are the similarities.
Embed = Callable[[list[Tensor], list[str]], Tensor]


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


@runtime_checkable
class ReportingJudge(Judge, Protocol):
    """A judge that asks something outside, which may not answer.

    Attributes:
        may_abstain: a row with NaN means that there was no answer; for other judges it is an error.
    """

    may_abstain: bool

    def facts(self) -> dict[str, Any]:
        """What a report should say about it besides its figures, such as counts of answers; JSON values."""
        ...


class PairwiseJudge:
    """A judge from similarities of two images: of each choice it takes the pair that speaks for it.

    Every distinct image goes to the score once, and every pair of images is asked once an aspect.

    Args:
        name: in reports.
        score: see :data:`PairScore`.
        embed: see :data:`Embed`; None where two images are compared at once.
        may_abstain: NaN means that there was no answer (a language model's that cannot be parsed); otherwise it is an
            error.
        facts: what else a report should say about the judge once it has judged (counts of answers).
        metric: behind it, where there is one.
    """

    def __init__(
        self,
        name: str,
        score: PairScore,
        *,
        embed: Embed | None = None,
        may_abstain: bool = False,
        facts: Callable[[], dict[str, Any]] | None = None,
        metric: Metric | None = None,
    ) -> None:
        self.name, self.may_abstain, self.metric = name, may_abstain, metric
        self._score, self._embed, self._facts = score, embed, facts

    @property
    def has_embedding(self) -> bool:
        """Whether `embeddings` works."""
        return self._embed is not None

    def facts(self) -> dict[str, Any]:
        """What else a report should say."""
        return self._facts() if self._facts else {}

    @torch.no_grad()
    def similarities(self, images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        """Checked similarities of pairs.

        Args:
            images: distinct, (3, H, W) floats in [0, 1].
            pairs: (index, index, aspect).

        Returns:
            (N,) float on the CPU; NaN only for a judge that may abstain.

        Raises:
            TPIPSError: a number of scores that is not N, or one that is not finite; the message names the pair.
        """
        scores = self._score(images, pairs).detach().cpu()
        if scores.shape != (len(pairs),):
            raise TPIPSError(f"{self.name} gave scores of shape {tuple(scores.shape)} for {len(pairs)} pairs of images.")
        bad = scores.isinf() if self.may_abstain else ~scores.isfinite()
        if bool(bad.any()):
            position = int(bad.nonzero()[0])
            raise NotFinite(
                f"{self.name} gave a similarity that is not finite ({float(scores[position])}) for "
                f"{pairs[position][2]!r}; nothing was scored.",
                position,
            )
        return scores

    @torch.no_grad()
    def embeddings(self, images: list[Tensor], aspects: list[str]) -> Tensor:
        """Checked unit vectors whose dot products are the similarities.

        Returns:
            (B, K, D) float64 on the CPU.

        Raises:
            TPIPSError: this judge has no embedding, or one is not finite.
        """
        if self._embed is None:
            raise TPIPSError(f"{self.name} compares two images at once and has no embedding; give a late-fusion metric.")
        vectors = self._embed(images, aspects).detach().double().cpu()
        if not bool(vectors.isfinite().all()):
            raise TPIPSError(f"{self.name} gave an embedding that is not finite; nothing was scored.")
        return torch.nn.functional.normalize(vectors, dim=-1)

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
        try:
            scores = self.similarities([images[key] for key in position], list(asked))
        except NotFinite as error:
            bad = next(c.key for c, t in zip(comparisons, tables, strict=True) if bool((t == error.position).any()))
            raise TPIPSError(f"{self.name} gave a similarity that is not finite on {bad}; nothing was scored.") from None
        return [scores[table] for table in tables]


def metric_judge(name: str, metric: Metric) -> PairwiseJudge:
    """A judge from a metric, whatever its fusion."""

    def score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        return metric.similarity_pairs(images, images, pairs, differentiable=False)

    def embed(images: list[Tensor], aspects: list[str]) -> Tensor:
        return metric.embed(images, aspects, differentiable=False)

    return PairwiseJudge(name, score, embed=embed if hasattr(metric.fusion, "embed") else None, metric=metric)


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

    def vectors_of(images: list[Tensor]) -> Tensor:
        vectors = torch.stack([embed(image).flatten().double().cpu() for image in images])
        return torch.nn.functional.normalize(vectors, dim=-1)

    def score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        vectors = vectors_of(images)
        first, second = (torch.tensor([pair[side] for pair in pairs]) for side in (0, 1))
        return (vectors[first] * vectors[second]).sum(-1)

    def same_for_all(images: list[Tensor], aspects: list[str]) -> Tensor:
        return vectors_of(images)[:, None].expand(-1, len(aspects), -1)

    return PairwiseJudge(name, score, embed=same_for_all)
