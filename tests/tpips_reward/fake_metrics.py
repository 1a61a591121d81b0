"""Small metrics with known answers, shared by the tests of tpips_reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CHANNELS = {"red": 0, "green": 1, "blue": 2}


class PairMetric(ABC):
    """A metric that asks `_similarity` for each pair. Calls are recorded, so that tests can see what was asked, and how often."""

    range: tuple[float, float] = (-1.0, 1.0)

    def __init__(self, change_scale: float) -> None:
        self.change_scale = change_scale
        self.calls: list[tuple[list[Any], list[Any], list[tuple[int, int, str]]]] = []

    @abstractmethod
    def _similarity(self, image: Tensor, reference: Tensor, aspect: str) -> Tensor:
        """A number without dimensions."""

    def similarity_pairs(
        self,
        images: Sequence[Any],
        references: Sequence[Any],
        pairs: Sequence[tuple[int, int, str]],
        *,
        value_range: tuple[float, float] = (0.0, 1.0),
    ) -> Tensor:
        self.value_range = value_range
        self.calls.append((list(images), list(references), list(pairs)))
        values = [self._similarity(images[a], references[b], aspect) for a, b, aspect in pairs]
        return torch.stack(values) if values else torch.zeros(0)


class ChannelMetric(PairMetric):
    """f(a, b | c) = 1 - 2 * mean |a - b| in channel c (range (-1, 1)), or minus that mean (range (-inf, 0]).

    Images are tensors (3, H, W) in [0, 1].
    """

    def __init__(self, unbounded: bool = False, change_scale: float = 0.5) -> None:
        super().__init__(change_scale)
        self.unbounded = unbounded
        if unbounded:
            self.range = (float("-inf"), 0.0)

    def _similarity(self, image: Tensor, reference: Tensor, aspect: str) -> Tensor:
        channel = CHANNELS[aspect]
        gap = (image[channel].float() - reference[channel].float()).abs().mean()
        return -gap if self.unbounded else 1 - 2 * gap


class ConstantMetric:
    """Answers one number for every pair, or whatever tensor it was given."""

    range = (-1.0, 1.0)
    change_scale = 0.5

    def __init__(self, answer: float | Tensor) -> None:
        self.answer = answer

    def similarity_pairs(self, images: Any, references: Any, pairs: Any, **options: Any) -> Tensor:
        return self.answer if isinstance(self.answer, Tensor) else torch.full((len(pairs),), self.answer)


class RegionMetric(PairMetric):
    """A cheap metric that looks at pixels, for evaluations: any aspect, any image size, range (-1, 1).

    Aspects with "background" compare the mean color of the image's border, "lighting" its mean brightness, all others
    the image averaged to 8x8: f = 1 - 4 * mean absolute difference, at least -1.
    """

    def __init__(self, change_scale: float = 0.02) -> None:
        super().__init__(change_scale)

    @torch.no_grad()
    def _similarity(self, image: Tensor, reference: Tensor, aspect: str) -> Tensor:
        gap = (self._feature(image, aspect) - self._feature(reference, aspect)).abs().mean()
        return (1 - 4 * gap).clamp(-1, 1).float()

    def _feature(self, image: Tensor, aspect: str) -> Tensor:
        if "background" in aspect or aspect == "lighting":
            border = torch.cat([image[:, :2].flatten(1), image[:, -2:].flatten(1), image[:, :, :2].flatten(1)], dim=1)
            return border.mean(dim=1) if "background" in aspect else border.mean().view(1)
        return torch.nn.functional.adaptive_avg_pool2d(image, 8)


def flat(red: float, green: float, blue: float, size: int = 4) -> Tensor:
    """An image of one colour, (3, size, size)."""
    return torch.tensor([red, green, blue]).view(3, 1, 1).expand(3, size, size).clone()
