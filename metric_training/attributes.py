"""The scenes' parameters as prediction targets: what the vision tower learns first, before any vote.

Votes alone teach a tower from scratch slowly (what differs is one bit in a triplet); the parameters say at once what can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpips_reward.scenes import PATTERNS, SHAPES, TEXTURES, Scene
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


class AttributeHead(nn.Module):
    """Predicts the parameters from an image's merged visual tokens; it is thrown away after training.

    Args:
        tokens: tokens an image; hidden: their width.
    """

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(tokens * hidden, 256), nn.GELU())
        self.continuous = nn.Linear(256, _NUM_CONTINUOUS)
        self.classes = nn.ModuleDict({name: nn.Linear(256, n) for name, n in _CLASSES.items()})

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """(N, T, D) tokens → predictions in the form of :func:`attribute_targets`."""
        features = self.body(tokens.flatten(1))
        return {"continuous": self.continuous(features), **{n: head(features) for n, head in self.classes.items()}}


def attribute_loss(predictions: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """Huber loss on what is continuous plus cross-entropy on the classes, summed over the groups."""
    error = F.smooth_l1_loss(predictions["continuous"], targets["continuous"], reduction="none", beta=0.5)
    loss = (error * targets["mask"]).mean() * 4
    return loss + torch.stack([F.cross_entropy(predictions[n], targets[n]) for n in _CLASSES]).sum()
