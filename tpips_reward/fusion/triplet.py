"""The triplet judge: three images side by side in one picture, and which of them is the odd one ("Ours-Triplet").

A generative Qwen3-VL reads the three images, concatenated horizontally, and the question which is the most different;
a linear head on the final state of the last token gives a logit for left, middle and right (paper, appendices B and C).
The probabilities of all six orders are mapped back to the images and averaged, so that the position has no say. The
judge decides triplets only: there is no score of two images in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor, nn

from tpips_reward.fusion.base import Triplet, accumulation_dtype, check_triplets
from tpips_reward.fusion.image_first import ImageFirstFusion
from tpips_reward.preprocess import resize
from tpips_reward.prompts import normalize_aspect

ORDERS = tuple(permutations(range(3)))


def side_by_side_size(sizes: Sequence[tuple[int, int]]) -> tuple[int, list[int]]:
    """The common height of images of these (height, width), the smallest of theirs, and the width of each at it."""
    height = min(rows for rows, _ in sizes)
    return height, [max(1, round(columns * height / rows)) for rows, columns in sizes]


def side_by_side(images: Sequence[Tensor]) -> Tensor:
    """Images (3, H_i, W_i) in [0, 1] -> one (3, H, W) from left to right; taller ones are shrunk to the lowest's height.

    Differentiable; values that a bicubic resize brings outside [0, 1] stay as they are.
    """
    height, widths = side_by_side_size([(int(image.shape[-2]), int(image.shape[-1])) for image in images])
    parts = []
    for image, width in zip(images, widths, strict=True):
        wide = image.to(accumulation_dtype(image.dtype))
        parts.append(wide if image.shape[-2] == height else resize(wide.unsqueeze(0), (height, width))[0])
    return torch.cat(parts, dim=-1)


class TripletJudge(ImageFirstFusion):
    """An odd-one-out judge on a Qwen3-VL backbone, with a linear three-way head; arguments as `FusionModule`."""

    kind = "triplet"
    range = None

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(self.backbone.hidden_size, 3)

    def forward(self, images: list[Tensor], triplets: Sequence[Triplet]) -> Tensor:
        """Same as `logits`, so that distributed wrappers work and training sees one order at a time."""
        return self.logits(images, triplets)

    def logits(self, images: list[Tensor], triplets: Sequence[Triplet]) -> Tensor:
        """One pass in the given order: how much speaks for left, middle and right being the odd one.

        Training permutes the indices of every triplet (and its votes) at random and takes the cross-entropy of these
        (paper, appendix C.3). Triplets of the same images in the same order share one pass over the images, whatever
        their aspects.

        Args:
            images: distinct (3, H, W) floats in [0, 1], of any sizes; may require grad.
            triplets: (left, middle, right, aspect), at least one.

        Returns:
            (N, 3) float32 (float64 for a float64 model).

        Raises:
            TPIPSError: a bad aspect, an index out of range, no triplets.
        """
        check_triplets(triplets, len(images))
        wanted: dict[tuple[int, ...], dict[str | None, int]] = {}  # three images -> aspect -> its row in the states
        for *members, aspect in triplets:
            rows = wanted.setdefault(tuple(members), {})
            rows.setdefault(normalize_aspect(aspect), len(rows))
        used = list(wanted)
        shapes = [(int(image.shape[-2]), int(image.shape[-1])) for image in images]
        sizes = []
        for picture in used:
            height, widths = side_by_side_size([shapes[index] for index in picture])
            sizes.append((height, sum(widths)))
        states = self.read_states(
            sizes,
            lambda job: side_by_side([images[index].to(self.backbone.device) for index in used[job]]),
            [list(wanted[picture]) for picture in used],
        )
        found = {picture: self.head(rows) for picture, rows in zip(used, states, strict=True)}
        return torch.stack(
            [found[tuple(members)][wanted[tuple(members)][normalize_aspect(aspect)]] for *members, aspect in triplets]
        )

    def judge(self, images: list[Tensor], triplets: Sequence[Triplet]) -> Tensor:
        """Probability of each image of a triplet of being the odd one: the mean over the six orders.

        The order of a triplet's images permutes the columns and changes nothing else.

        Args:
            images, triplets: as `logits`.

        Returns:
            (N, 3) float32 (float64 for a float64 model), rows that sum to 1.

        Raises:
            TPIPSError: as `logits`.
        """
        check_triplets(triplets, len(images))
        asked: list[Triplet] = [
            (members[i], members[j], members[k], aspect) for *members, aspect in triplets for i, j, k in ORDERS
        ]
        odds = self.logits(images, asked).softmax(-1).view(len(triplets), len(ORDERS), 3)
        places = torch.tensor(ORDERS, device=odds.device)
        back = torch.argsort(places, dim=1).expand(len(triplets), -1, -1)  # where each image stood
        return odds.gather(2, back).mean(dim=1)
