"""Late fusion: one image and one prompt -> one unit vector; similarity is the cosine (paper, section 4 and appendix B)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpips_reward.backbone import ImageFeatures
from tpips_reward.errors import TPIPSError
from tpips_reward.fusion.base import Pair
from tpips_reward.fusion.image_first import ImageFirstFusion
from tpips_reward.prompts import normalize_aspect


class LateFusion(ImageFirstFusion):
    """Late fusion on a Qwen3-VL backbone; arguments as `FusionModule`."""

    kind = "late"
    range = (-1.0, 1.0)

    def forward(self, images: list[Tensor], aspects: Sequence[Sequence[str | None]]) -> list[Tensor]:
        """Same as `embed`, so that distributed wrappers work."""
        return self.embed(images, aspects)

    def embed(self, images: list[Tensor], aspects: Sequence[Sequence[str | None]]) -> list[Tensor]:
        """Unit vectors of each image under each of its aspects.

        Args:
            images: (3, H, W) float tensors in [0, 1], of any sizes; may require grad.
            aspects: one list per image, possibly of different lengths.

        Returns:
            One (K_i, D) float32 tensor (float64 for a float64 model) per image, rows of norm 1.

        Raises:
            TPIPSError: a bad aspect, an image without aspects, or lists of different lengths.
        """
        if len(images) != len(aspects):
            raise TPIPSError(f"embed got {len(images)} images and {len(aspects)} lists of aspects; give one an image.")
        for index, names in enumerate(aspects):
            if not names:
                raise TPIPSError(f"Image {index} has an empty list of aspects; give at least one, or 'overall'.")
        states = self.read_states([(int(image.shape[-2]), int(image.shape[-1])) for image in images], lambda index: images[index], aspects)
        return [F.normalize(rows, dim=-1) for rows in states]

    def score_pairs(self, images: list[Tensor], pairs: Sequence[Pair]) -> Tensor:
        """Cosines f(image a, image b | aspect), each image encoded once for all its aspects.

        Args:
            images: distinct (3, H, W) floats in [0, 1].
            pairs: (index a, index b, aspect), at least one.

        Returns:
            (N,) float32 (float64 for a float64 model).
        """
        wanted: dict[int, dict[str | None, int]] = {}  # image -> aspect -> its row in the image's vectors
        for left, right, aspect in pairs:
            for index in (left, right):
                rows = wanted.setdefault(index, {})
                rows.setdefault(normalize_aspect(aspect), len(rows))
        used = list(wanted)
        vectors = self.embed([images[index] for index in used], [list(wanted[index]) for index in used])
        starts = np.cumsum([0, *(len(rows) for rows in vectors)])
        offset = {index: int(start) for index, start in zip(used, starts, strict=False)}
        table = torch.cat(vectors)

        def rows_of(sides: list[tuple[int, str | None]]) -> Tensor:
            rows = [offset[index] + wanted[index][normalize_aspect(aspect)] for index, aspect in sides]
            return table[torch.tensor(rows, device=table.device)]

        first = rows_of([(left, aspect) for left, _, aspect in pairs])
        return (first * rows_of([(right, aspect) for _, right, aspect in pairs])).sum(dim=-1)

    def embed_features(
        self, features: list[ImageFeatures], suffixes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[Tensor]:
        """The language part of `embed`: features of each image, and token ids of each of its suffixes."""
        return [F.normalize(rows, dim=-1) for rows in self.read_features(features, suffixes)]
