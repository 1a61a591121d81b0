"""Pictures and judges for the tests of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from metric_training.evaluation.judges import PairwiseJudge


def save(path: Path, color: int | tuple[int, int, int], size: tuple[int, int] = (16, 12)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color if isinstance(color, tuple) else (color, color, color)).save(path)


def gray() -> PairwiseJudge:
    """Nearer in mean brightness is more similar."""

    def score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        return torch.tensor([-abs(float(images[i].mean()) - float(images[j].mean())) for i, j, _ in pairs])

    return PairwiseJudge("gray", score)


def constant() -> PairwiseJudge:
    return PairwiseJudge("constant", lambda images, pairs: torch.zeros(len(pairs)))
