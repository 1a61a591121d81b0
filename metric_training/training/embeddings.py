"""Mid fusion's image tokens learn a late metric's embeddings: a start from which votes are learnt quickly.

A distance token by token says nothing until tokens mean what an aspect asks for, and votes alone teach that slowly. A late
metric's embedding of (image, aspect) says it already, so every image token is drawn to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metric_training.training.config import TrainConfig
from metric_training.training.examples import Example, VoteExamples
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.fusion.base import FusionModule
from tpips_reward.fusion.late import LateFusion
from tpips_reward.fusion.mid import MidFusion

#: Examples whose images say what an aspect's embeddings have in common.
_REFERENCES = 16


class TokenReader(nn.Module):
    """Mid fusion whose forward gives image tokens, so that distributed wrappers see the call."""

    def __init__(self, fusion: MidFusion) -> None:
        super().__init__()
        self.fusion = fusion

    def forward(self, images: list[Tensor], asked: Sequence[Sequence[str]]) -> list[Tensor]:
        """For each image and each of its aspects in turn: (N, D) unit vectors, its tokens at the last probe layer."""
        features = self.fusion.backbone.encode_images(images)
        pairs = [(aspect, one) for one, names in zip(features, asked, strict=True) for aspect in names]
        found = self.fusion.activations([aspect for aspect, _ in pairs], [one for _, one in pairs])
        return [F.normalize(each.tokens[-1].float(), dim=-1) for each in found]


class EmbeddingObjective:
    """1 - cosine of each image token to the teacher's embedding, less what the embeddings of its aspect have in common.

    Without that mean left out, all embeddings lie in a narrow cone, and tokens would learn its axis and little else.

    Raises:
        TPIPSError: no mid fusion, a teacher that is not late fusion, or one of another width.
    """

    def __init__(self, config: TrainConfig, fusion: FusionModule) -> None:
        if not isinstance(fusion, MidFusion):
            raise TPIPSError(f"objective embeddings teaches mid fusion; fusion is {fusion.kind}.")
        self.teacher = late_teacher(str(config.teacher), fusion.backbone.hidden_size)
        self.model: nn.Module = TokenReader(fusion)
        self.examples = VoteExamples(config)
        count = min(_REFERENCES, len(self.examples))
        self.references = [image for k in range(count) for image in self.examples.source[k].images]
        self.means: dict[str, Tensor] = {}

    def weight(self, batch: Sequence[Example]) -> float:
        return float(sum(len(example.aspects) * len(example.images) for example in batch))

    def loss(self, model: nn.Module, batch: Sequence[Example], progress: float) -> Tensor:
        images = [image for example in batch for image in example.images]
        tokens = model(images, [example.aspects for example in batch for _ in example.images])
        wanted = self.targets(batch, tokens[0].device)
        return torch.stack([(1 - rows @ target).mean() for rows, target in zip(tokens, wanted, strict=True)]).sum()

    @torch.no_grad()
    def targets(self, batch: Sequence[Example], device: torch.device) -> list[Tensor]:
        """(D,) unit vectors, for each image of each example and each of its aspects in turn."""
        teacher = self.teacher.to(device)
        found = []
        for example in batch:
            vectors = teacher.embed(list(example.images), list(example.aspects))  # (3, K, D)
            found.append(F.normalize(vectors - torch.stack([self._mean(name) for name in example.names]), dim=-1).flatten(0, 1))
        return list(torch.cat(found))

    def _mean(self, name: str) -> Tensor:
        """The mean embedding of the reference images; of a name, since its wordings are many and mean the same."""
        if name not in self.means:
            self.means[name] = self.teacher.embed(self.references, name).mean(0)
        return self.means[name]


def late_teacher(source: str, width: int) -> Metric:
    """A late metric in float32 on the CPU, whose embeddings have `width` numbers.

    Raises:
        TPIPSError: another fusion, or another width.
    """
    teacher = load_metric(source, device="cpu", dtype=torch.float32)
    if not isinstance(teacher.fusion, LateFusion):
        raise TPIPSError(f"The teacher {source} is {teacher.fusion.kind} fusion; embeddings are what late fusion has.")
    if teacher.backbone.hidden_size != width:
        raise TPIPSError(
            f"The teacher {source} embeds in {teacher.backbone.hidden_size} numbers, the tokens to be taught have {width}; "
            "use a teacher of the same width."
        )
    return teacher
