"""Late fusion: one image and one prompt -> one unit vector; similarity is the cosine (paper, section 4 and appendix B).

The image stands before the aspect and the language tower is causal, so everything up to the image's end is the same
for all aspects. All aspects of an image therefore run in one packed sequence

    [prefix: system turn, image | suffix 1 | suffix 2 | ...]

in which a suffix sees the prefix and itself, and its positions go on right after the prefix. The numbers are those of
separate passes, at the price of one prefix, and gradients flow through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpips_reward.backbone import ImageFeatures, split_by_budget
from tpips_reward.errors import TPIPSError
from tpips_reward.fusion.base import FusionModule
from tpips_reward.prompts import SplitPrompts, normalize_aspect

# A packed sequence is cut when its suffixes alone exceed this: the mask grows with the square of the length.
MAX_SUFFIX_TOKENS = 512


@dataclass(frozen=True)
class Packed:
    """One image and some of its aspects as a single sequence of L tokens.

    Attributes:
        ids: (L,) token ids, the image placeholder repeated.
        positions: (3, L) M-RoPE positions.
        segments: (L,) 0 in the prefix, 1... in the suffixes.
        readouts: index of each suffix's last token.
    """

    ids: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    readouts: np.ndarray


class _Job(NamedTuple):
    image: int
    first_aspect: int
    packed: Packed


def mrope_positions(ids: Sequence[int], image_token_id: int, grid: tuple[int, int]) -> np.ndarray:
    """(3, L) positions of a sequence with one image of `grid` (rows, columns) merged tokens, already repeated.

    Text counts up with t = h = w. Image tokens share one t and add their row to h and their column to w; the text
    after the image goes on at max(rows, columns) past the image's start.
    """
    tokens = np.asarray(ids)
    rows, columns = grid
    start = int(np.argmax(tokens == image_token_id))
    count = rows * columns
    tail = len(tokens) - start - count
    before = np.tile(np.arange(start), (3, 1))
    image = np.stack([np.zeros(count, int), np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows)])
    after = np.tile(np.arange(tail), (3, 1)) + start + max(rows, columns)
    return np.concatenate([before, image + start, after], axis=1)


def pack(
    prefix: Sequence[int], suffixes: Sequence[Sequence[int]], image_token_id: int, grid: tuple[int, int]
) -> Packed:
    """Lay out one image (a single placeholder in `prefix`) and the suffixes of its aspects."""
    at = list(prefix).index(image_token_id)
    head = [*prefix[:at], *[image_token_id] * (grid[0] * grid[1]), *prefix[at + 1 :]]
    head_positions = mrope_positions(head, image_token_id, grid)
    following = int(head_positions.max()) + 1
    lengths = np.array([len(suffix) for suffix in suffixes])
    tail = np.concatenate([np.arange(length) for length in lengths]) + following
    return Packed(
        ids=np.concatenate([head, *suffixes]),
        positions=np.concatenate([head_positions, np.tile(tail, (3, 1))], axis=1),
        segments=np.repeat(np.arange(len(suffixes) + 1), [len(head), *lengths]),
        readouts=len(head) + np.cumsum(lengths) - 1,
    )


def block_mask(segments: Tensor) -> Tensor:
    """(B, L) segments -> (B, 1, L, L) boolean: causal, within one's own segment and the prefix (0) only.

    Every row attends to itself at least, padding (-1) too, so that no softmax is empty.
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    same = segments[:, :, None] == segments[:, None, :]
    return ((same | (segments == 0)[:, None, :]) & causal).unsqueeze(1)


class LateFusion(FusionModule):
    """Late fusion on a Qwen3-VL backbone; arguments as `FusionModule`."""

    kind = "late"
    range = (-1.0, 1.0)

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        settings: Any = None,
        chat_template: str | None = None,
        processor: Any = None,
    ) -> None:
        super().__init__(model, tokenizer, settings, chat_template, processor)
        config = self.backbone.config
        self.prompts = SplitPrompts(
            self.backbone.tokenizer, config.image_token_id, config.vision_end_token_id, self.backbone.chat_template
        )

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
        suffixes = [[self.prompts.suffix(aspect) for aspect in names] for names in aspects]
        # Features are as large as the images are many, so both towers run chunk by chunk.
        costs = [
            len(self.prompts.prefix) + self.backbone.count_tokens(*image.shape[-2:]) + sum(map(len, mine))
            for image, mine in zip(images, suffixes, strict=True)
        ]
        order = sorted(range(len(images)), key=lambda index: costs[index])
        vectors: dict[int, Tensor] = {}
        for chunk in split_by_budget([costs[index] for index in order], self.token_budget):
            members = [order[k] for k in chunk]
            features = self.backbone.encode_images([images[index] for index in members])
            found = self.embed_features(features, [suffixes[index] for index in members])
            vectors.update(zip(members, found, strict=True))
        return [vectors[index] for index in range(len(images))]

    def score_pairs(self, images: list[Tensor], pairs: Sequence[tuple[int, int, str | None]]) -> Tensor:
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
        jobs: list[_Job] = []
        for index, (feature, mine) in enumerate(zip(features, suffixes, strict=True)):
            for chunk in split_by_budget([len(suffix) for suffix in mine], MAX_SUFFIX_TOKENS):
                image_id = self.backbone.config.image_token_id
                packed = pack(self.prompts.prefix, [mine[k] for k in chunk], image_id, feature.grid)
                jobs.append(_Job(index, chunk[0], packed))
        jobs.sort(key=lambda job: len(job.packed.ids))  # neighbours of like length share a batch
        parts: list[dict[int, Tensor]] = [{} for _ in features]
        for group in split_by_budget([len(job.packed.ids) for job in jobs], self.token_budget, padded=True):
            members = [jobs[k] for k in group]
            vectors = self._run([job.packed for job in members], [features[job.image] for job in members])
            for job, rows in zip(members, vectors, strict=True):
                parts[job.image][job.first_aspect] = rows
        return [torch.cat([rows[first] for first in sorted(rows)]) for rows in parts]

    def _run(self, batch: list[Packed], features: list[ImageFeatures]) -> list[Tensor]:
        longest = max(len(item.ids) for item in batch)
        ids = np.full((len(batch), longest), self.prompts.prefix[0])
        positions = np.zeros((3, len(batch), longest), dtype=np.int64)
        segments = np.full((len(batch), longest), -1)
        for row, item in enumerate(batch):
            ids[row, : len(item.ids)] = item.ids
            positions[:, row, : len(item.ids)] = item.positions
            segments[row, : len(item.ids)] = item.segments
        device = self.backbone.device
        hidden = self.backbone.run_language(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions).to(device),
            block_mask(torch.from_numpy(segments).to(device)),
            features,
        ).last_hidden_state
        counts = [len(item.readouts) for item in batch]
        rows = torch.from_numpy(np.repeat(np.arange(len(batch)), counts)).to(device)
        columns = torch.from_numpy(np.concatenate([item.readouts for item in batch])).to(device)
        states = hidden[rows, columns]
        states = states if states.dtype == torch.float64 else states.float()
        return list(F.normalize(states, dim=-1).split(counts))
