"""The scenes' parameters as prediction targets beside the votes.

Votes alone teach a model from scratch slowly (what differs is one bit in a triplet). The parameters say at once what can be
seen, to the vision tower, and which of it an aspect's wording means, to the read-out. Where the object is, part by part,
teaches a vision tower from scratch its outline, and so shape and rotation, which single numbers teach it late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpips_reward.scenes import ASPECTS, PATTERNS, SHAPES, TEXTURES, Scene, object_mask
from tpips_reward.scenes.scene import MAX_COUNT, ROTATION_PERIOD

_CLASSES: dict[str, int] = {
    "shape": len(SHAPES),
    "texture": len(TEXTURES),
    "pattern": len(PATTERNS),
    "count": MAX_COUNT,
}
_NUM_CONTINUOUS = 14


def attribute_targets(scenes: Sequence[Scene]) -> dict[str, Tensor]:
    """Targets of N scenes.

    Returns:
        "continuous": (N, 14) float32 of about unit scale; "mask": the same shape, 0 where a value cannot be seen (a circle's
        rotation); and a (N,) int64 class index for shape, texture, pattern and count.
    """
    rows, masks = [], []
    for s in scenes:
        period = ROTATION_PERIOD[s.shape]
        angle = 2 * math.pi * s.rotation / period if period else 0.0
        rows.append(
            [
                *(4 * (c - 0.5) for c in s.color),
                *(4 * (c - 0.5) for c in s.background_color),
                math.log(s.size / 0.2) / 0.15,
                (s.x - 0.5) / 0.12,
                (s.y - 0.5) / 0.12,
                math.log(s.brightness) / 0.2,
                s.warmth / 0.6,
                s.blur / 0.01,
                1.5 * math.cos(angle),
                1.5 * math.sin(angle),
            ]
        )
        masks.append([1.0] * (_NUM_CONTINUOUS - 2) + [float(period > 0)] * 2)
    return {
        "continuous": torch.tensor(rows),
        "mask": torch.tensor(masks),
        "shape": torch.tensor([SHAPES.index(s.shape) for s in scenes]),
        "texture": torch.tensor([TEXTURES.index(s.texture) for s in scenes]),
        "pattern": torch.tensor([PATTERNS.index(s.background_pattern) for s in scenes]),
        "count": torch.tensor([s.count - 1 for s in scenes]),
    }


#: Which outputs belong to each parameter of a scene: slices of "continuous", or a class.
_OUTPUTS: dict[str, slice | str] = {
    "color": slice(0, 3),
    "background_color": slice(3, 6),
    "size": slice(6, 7),
    "x": slice(7, 8),
    "y": slice(8, 9),
    "brightness": slice(9, 10),
    "warmth": slice(10, 11),
    "blur": slice(11, 12),
    "rotation": slice(12, 14),
    "shape": "shape",
    "texture": "texture",
    "background_pattern": "pattern",
    "count": "count",
}


def aspect_weights(aspects: Sequence[str]) -> dict[str, Tensor]:
    """Weights that keep, of each row's targets, only the parameters of its aspect.

    Args:
        aspects: N plain names.

    Returns:
        "continuous" (N, 14) and one (N,) for each class, 1 where the aspect depends on it and else 0.
    """
    weights = {"continuous": torch.zeros(len(aspects), _NUM_CONTINUOUS)}
    weights |= {name: torch.zeros(len(aspects)) for name in _CLASSES}
    for row, aspect in enumerate(aspects):
        for parameter in ASPECTS[aspect].parameters:
            where = _OUTPUTS[parameter]
            if isinstance(where, str):
                weights[where][row] = 1.0
            else:
                weights["continuous"][row, where] = 1.0
    return weights


class AttributeHead(nn.Module):
    """Predicts the parameters from features of an image; it is thrown away after training.

    Args:
        features: numbers an image.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 256), nn.GELU())
        self.continuous = nn.Linear(256, _NUM_CONTINUOUS)
        self.classes = nn.ModuleDict({name: nn.Linear(256, n) for name, n in _CLASSES.items()})

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        """(N, ...) features → predictions in the form of :func:`attribute_targets`."""
        hidden = self.body(features.flatten(1))
        return {"continuous": self.continuous(hidden), **{n: head(hidden) for n, head in self.classes.items()}}


def attribute_loss(
    predictions: dict[str, Tensor], targets: dict[str, Tensor], weights: dict[str, Tensor] | None = None
) -> Tensor:
    """Huber loss on what is continuous plus cross-entropy on the classes, each a mean over what counts, summed.

    Args:
        predictions, targets: see :func:`attribute_targets`.
        weights: see :func:`aspect_weights`; None counts everything.
    """
    mask = targets["mask"] if weights is None else targets["mask"] * weights["continuous"]
    error = F.smooth_l1_loss(predictions["continuous"], targets["continuous"], reduction="none", beta=0.5)
    loss = 4 * (error * mask).sum() / mask.sum().clamp(min=1)
    for name in _CLASSES:
        entropy = F.cross_entropy(predictions[name], targets[name], reduction="none")
        counted = torch.ones_like(entropy) if weights is None else weights[name]
        loss = loss + (entropy * counted).sum() / counted.sum().clamp(min=1)
    return loss


#: A token's part of the image is told in so many parts a side.
_PARTS = 8


def coverage_targets(scenes: Sequence[Scene], tokens: int) -> Tensor:
    """How much of each part of the image the object covers, by the token whose part it is.

    Args:
        scenes: N of them.
        tokens: of an image; they lie in a square, row by row.

    Returns:
        (N, tokens, 64) float32 in [0, 1]: 8 x 8 parts a token, row by row.
    """
    side = round(tokens**0.5)
    masks = torch.from_numpy(np.stack([object_mask(scene, side * _PARTS) for scene in scenes]))
    return masks.view(-1, side, _PARTS, side, _PARTS).transpose(2, 3).reshape(-1, tokens, _PARTS**2)


class CoverageHead(nn.Linear):
    """Predicts from each token how much of its part of the image the object covers, as logits; thrown away after training.

    Args:
        features: numbers a token.
    """

    def __init__(self, features: int) -> None:
        super().__init__(features, _PARTS**2)


def coverage_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean binary cross-entropy of two (N, tokens, 64), see :func:`coverage_targets`."""
    return F.binary_cross_entropy_with_logits(logits, targets)
