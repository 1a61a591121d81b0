"""Agreement on comparisons that are never trained on, during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from metric_training.data.comparison import Comparison
from metric_training.evaluation.judges import Judge, PairwiseJudge
from metric_training.evaluation.runner import DEFAULT_IMAGES_PER_CALL, ImageCache, score
from metric_training.losses import agreement, consensus
from metric_training.training.config import TrainConfig
from metric_training.training.examples import validation_comparisons
from metric_training.training.objectives import judges_triplets
from tpips_reward import TPIPSError
from tpips_reward.fusion.base import FusionModule


class Validation:
    """Scores a model on held-out comparisons; each process takes its share of them.

    Args:
        comparisons: all of them, the same in every process.
        accelerator: of the run.
        whole: whether the model judges three images at once.
    """

    def __init__(self, comparisons: Sequence[Comparison], accelerator: Accelerator, whole: bool = False) -> None:
        # Sharded weights are gathered in every call, so all processes must make the same calls.
        self.shares = accelerator.distributed_type != DistributedType.FSDP
        step = accelerator.num_processes if self.shares else 1
        self.mine = list(comparisons[accelerator.process_index if self.shares else 0 :: step])
        self.accelerator, self.whole = accelerator, whole
        self.cache = ImageCache()

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Agreement, its standard error and the consensus; the model's mode is restored.

        Args:
            model: the wrapped module (see `objectives.Scorer`).
        """
        training = model.training
        if self.shares:  # a wrapper would wait for the other processes in every call
            model = self.accelerator.unwrap_model(model)
        model.eval()
        try:
            tables = score(_judge(model, self.whole), self.mine, self.cache, DEFAULT_IMAGES_PER_CALL) if self.mine else []
        finally:
            model.train(training)
        agreed, crowd = [torch.zeros(0)], [torch.zeros(0)]
        for comparison, table in zip(self.mine, tables, strict=True):
            if table is not None:  # an image that does not decode
                votes = torch.from_numpy(comparison.votes)
                agreed.append(agreement(table, votes))
                crowd.append(consensus(votes))
        values, crowds = torch.cat(agreed).double(), torch.cat(crowd).double()
        sums = torch.stack([values.sum(), values.square().sum(), crowds.sum(), torch.tensor(float(len(values)))])
        total, squares, crowd_sum, count = self._added(sums).tolist()
        mean = total / count
        variance = max(0.0, squares / count - mean**2) * count / max(1.0, count - 1)
        return {
            "validation_agreement": mean,
            "validation_standard_error": (variance / count) ** 0.5,
            "validation_consensus": crowd_sum / count,
        }

    def _added(self, sums: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1 or not self.shares:
            return sums
        return self.accelerator.reduce(sums.float().to(self.accelerator.device), reduction="sum").cpu().double()


def build_validation(config: TrainConfig, accelerator: Accelerator, fusion: FusionModule) -> Validation | None:
    """The validation that the settings ask for; None where no votes are learnt.

    Raises:
        TPIPSError: no such data, or of a task that the fusion cannot judge.
    """
    if config.objective != "votes":
        return None
    comparisons = validation_comparisons(config)
    whole = judges_triplets(fusion)
    if whole and comparisons[0].task != "odd_one_out":
        raise TPIPSError(f"{fusion.kind} fusion is validated on odd-one-out triplets, not on 2AFC.")
    return Validation(comparisons, accelerator, whole)


def _judge(model: nn.Module, whole: bool) -> Judge:
    name = "the metric in training"
    return TripletModel(name, model) if whole else PairwiseJudge(name, lambda images, pairs: model(images, list(pairs)))


class TripletModel:
    """A judge whose model sees all three images of a comparison at once.

    Args:
        name: in messages.
        model: (images, [(left, middle, right, aspect)]) → (N, 3), larger for what is more likely the odd one.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model

    @torch.no_grad()
    def __call__(self, comparisons: Sequence[Comparison], images: Mapping[str, Tensor]) -> list[Tensor]:
        place: dict[str, int] = {}
        asked = []
        for comparison in comparisons:
            own = [place.setdefault(image.key, len(place)) for image in comparison.images]
            asked += [(*own, aspect) for aspect in comparison.aspects]
        scores = self.model([images[key] for key in place], asked).float().cpu()
        return list(scores.split([len(comparison.aspects) for comparison in comparisons]))
