"""What a training makes smaller: a module whose forward every wrapper sees, its examples, and their summed loss."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from metric_training.attributes import (
    AttributeHead,
    CoverageHead,
    aspect_weights,
    attribute_loss,
    attribute_targets,
    coverage_loss,
    coverage_targets,
)
from metric_training.losses import odd_one_out_losses, pair_similarities
from metric_training.training.config import TrainConfig
from metric_training.training.embeddings import EmbeddingObjective
from metric_training.training.examples import PROCEDURAL, Example, FreshScenes, Picture, VoteExamples
from tpips_reward import TPIPSError
from tpips_reward.fusion.base import FusionModule
from tpips_reward.fusion.late import LateFusion


class Objective(Protocol):
    """One way to train a fusion.

    Attributes:
        model: what is wrapped for several processes; holds the fusion as ``fusion``.
        examples: a map-style data set, (number, item) → example.
    """

    model: nn.Module
    examples: Any

    def weight(self, batch: Sequence[Any]) -> float:
        """What the loss of a batch is a sum over; a step divides by that of all its batches."""
        ...

    def loss(self, model: nn.Module, batch: Sequence[Any], progress: float) -> Tensor:
        """Summed loss of a batch; ``progress`` is the share of the run that is done."""
        ...


def build_objective(config: TrainConfig, fusion: FusionModule) -> Objective:
    """The objective that the settings ask for.

    Raises:
        TPIPSError: the settings do not fit together.
    """
    if config.objective == "scenes":
        return SceneObjective(config, fusion)
    if config.objective == "embeddings":
        return EmbeddingObjective(config, fusion)
    if config.attribute_weight == 0:
        return VoteObjective(config, fusion)
    if config.dataset_name != PROCEDURAL or not isinstance(fusion, LateFusion):
        raise TPIPSError("attribute_weight needs late fusion and dataset_name=procedural, whose parameters are known.")
    return VoteAndSceneObjective(config, fusion)


class Scorer(nn.Module):
    """A fusion whose forward scores what was asked, so that distributed wrappers see the call."""

    def __init__(self, fusion: FusionModule) -> None:
        super().__init__()
        self.fusion = fusion

    def forward(self, images: list[Tensor], asked: list[Any]) -> Tensor:
        """Similarities (N,) of (image, image, aspect); of a triplet judge, for (left, middle, right, aspect), logits (N, 3).

        In eval mode the judge's logits are those of its probabilities, the mean over all orders.
        """
        if not judges_triplets(self.fusion):
            return self.fusion.score_pairs(images, asked)  # type: ignore[operator]
        if self.training:
            return self.fusion.logits(images, asked)  # type: ignore[operator]
        return self.fusion.judge(images, asked).log()  # type: ignore[operator]


def judges_triplets(fusion: FusionModule) -> bool:
    """Whether a fusion sees all three images at once, instead of two."""
    return hasattr(fusion, "judge")


class VoteObjective:
    """Cross-entropy of softmax(s / τ) against the vote shares (paper, Eq. 1-2), every aspect an example of its own.

    All aspects of all comparisons of a batch go through in one call, which encodes each image once.

    Raises:
        TPIPSError: a triplet judge on 2AFC data, or weights of aspects that the data do not have, or that leave none.
    """

    def __init__(self, config: TrainConfig, fusion: FusionModule) -> None:
        self.model: nn.Module = Scorer(fusion)
        self.examples = VoteExamples(config)
        self.whole = judges_triplets(fusion)
        if self.whole and self.examples.source.task != "odd_one_out":
            raise TPIPSError(f"{fusion.kind} fusion needs odd-one-out triplets, but {config.dataset_name} has 2AFC.")
        self.temperature = config.temperature or (1.0 if self.whole else fusion.temperature)
        self.aspect_weights = config.aspect_weights or {}
        _check_weights(self.aspect_weights, self.examples.source.names, config.dataset_name)

    def weight(self, batch: Sequence[Example]) -> float:
        return float(self._weights(batch).sum())

    def loss(self, model: nn.Module, batch: Sequence[Example], progress: float) -> Tensor:
        images = [image for example in batch for image in example.images]
        asked: list[tuple[Any, ...]] = []
        for k, example in enumerate(batch):
            chosen = [(0, 1, 2)] if self.whole else example.pairs
            asked += [(*(3 * k + i for i in members), aspect) for aspect in example.aspects for members in chosen]
        return self._summed(model(images, asked), batch)

    def _summed(self, similarities: Tensor, batch: Sequence[Example]) -> Tensor:
        votes = torch.cat([example.votes for example in batch]).to(similarities.device)
        losses = odd_one_out_losses(similarities.view(votes.shape), votes, self.temperature)
        return (losses * self._weights(batch).to(losses.device)).sum()

    def _weights(self, batch: Sequence[Example]) -> Tensor:
        return torch.tensor([self.aspect_weights.get(name, 1.0) for example in batch for name in example.names])


def _check_weights(weights: Mapping[str, float], names: Collection[str], where: str) -> None:
    for name in weights:
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it asks of {', '.join(sorted(names)[:20])}."
            raise TPIPSError(f"aspect_weights has {name!r}, which {where} never asks of; {hint}")
    if all(weights.get(name, 1.0) == 0 for name in names):
        raise TPIPSError(f"aspect_weights gives 0 to every aspect of {where}, so that nothing would be learnt; leave one above 0.")


class ScorerWithHeads(Scorer):
    """Late fusion with two auxiliary heads that are thrown away after training."""

    fusion: LateFusion

    def __init__(self, fusion: LateFusion) -> None:
        super().__init__(fusion)
        self.vision_head = AttributeHead(fusion.backbone.hidden_size)
        self.readout_head = AttributeHead(fusion.backbone.hidden_size)

    def forward(self, images: list[Tensor], asked: list[Any]) -> Any:
        """In training, for aspects of each image: its vectors, and parameters predicted from its tokens and its read-outs.

        In eval mode similarities of pairs, as `Scorer`.
        """
        if not self.training:
            return super().forward(images, asked)
        features = self.fusion.backbone.encode_images(images)
        seen = self.vision_head(torch.stack([f.tokens.mean(0) for f in features]))
        suffixes = [[self.fusion.prompts.suffix(aspect) for aspect in names] for names in asked]
        vectors = self.fusion.embed_features(features, suffixes)
        return vectors, seen, self.readout_head(torch.cat(vectors) * self.fusion.backbone.hidden_size**0.5)


class VoteAndSceneObjective(VoteObjective):
    """Votes, and beside them the scenes' parameters: all from an image's tokens, an aspect's own from its read-out.

    Votes alone teach a model from scratch slowly. The weight of the parameters falls to zero in the first 80 % of the run.
    """

    def __init__(self, config: TrainConfig, fusion: LateFusion) -> None:
        super().__init__(config, fusion)
        self.attribute_weight = config.attribute_weight
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed + 1)
            self.model = ScorerWithHeads(fusion)

    def loss(self, model: nn.Module, batch: Sequence[Example], progress: float) -> Tensor:
        images = [image for example in batch for image in example.images]
        vectors, seen, meant = model(images, [example.aspects for example in batch for _ in range(3)])
        similarities = [pair_similarities(torch.stack(vectors[3 * k : 3 * k + 3], 1)) for k in range(len(batch))]
        loss = self._summed(torch.cat(similarities), batch)
        fade = self.attribute_weight * max(0.0, 1 - progress / 0.8)
        scenes = [scene for example in batch for scene in example.scenes]
        repeated = [scene for example in batch for scene in example.scenes for _ in example.names]
        weights = aspect_weights([name for example in batch for _ in range(3) for name in example.names])
        side = attribute_loss(seen, on(loss.device, attribute_targets(scenes))) + attribute_loss(
            meant, on(loss.device, attribute_targets(repeated)), on(loss.device, weights)
        )
        return loss + fade * self.weight(batch) * side


class VisionScorer(nn.Module):
    """A fusion's vision tower with heads that predict a scene from its tokens."""

    def __init__(self, fusion: FusionModule) -> None:
        super().__init__()
        self.fusion = fusion
        self.head = AttributeHead(fusion.backbone.hidden_size)
        self.coverage = CoverageHead(fusion.backbone.hidden_size)

    def forward(self, images: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """The parameters, from the mean of an image's tokens, and the object's coverage of each token's part."""
        tokens = torch.stack([f.tokens for f in self.fusion.backbone.encode_images(images)])
        # The mean: were the tokens told apart, a place could stay unsaid in them, and no read-out would find it.
        return self.head(tokens.mean(1)), self.coverage(tokens)


class SceneObjective:
    """The vision tower alone learns to name the parameters of procedural scenes, and to draw the object: a start from scratch."""

    #: Of the object's coverage: small beside the parameters, were it not weighted.
    COVERAGE_WEIGHT = 3.0

    def __init__(self, config: TrainConfig, fusion: FusionModule) -> None:
        self.examples = FreshScenes(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed + 1)
            self.model: nn.Module = VisionScorer(fusion)

    def weight(self, batch: Sequence[Picture]) -> float:
        return float(len(batch))

    def loss(self, model: nn.Module, batch: Sequence[Picture], progress: float) -> Tensor:
        seen, covered = model([picture.image for picture in batch])
        scenes = [picture.scene for picture in batch]
        parameters = attribute_loss(seen, on(covered.device, attribute_targets(scenes)))
        drawn = coverage_loss(covered, coverage_targets(scenes, covered.shape[1]).to(covered.device))
        return (parameters + self.COVERAGE_WEIGHT * drawn) * len(batch)


def on(device: torch.device, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on a device."""
    return {name: value.to(device) for name, value in values.items()}
