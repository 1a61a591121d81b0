"""What late fusion and the triplet judge share: an image before its aspects, read out at the last token of each.

The image stands before the aspect and the language tower is causal, so everything up to the image's end is the same
for all aspects. All aspects of an image therefore run in one packed sequence

    [prefix: system turn, image | suffix 1 | suffix 2 | ...]

in which a suffix sees the prefix and itself, and its positions go on right after the prefix. The numbers are those of
separate passes, at the price of one prefix, and gradients flow through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpips_reward.attention import Section
from tpips_reward.backbone import ImageFeatures, split_by_budget
from tpips_reward.fusion.base import FusionModule, accumulation_dtype
from tpips_reward.prompts import SplitPrompts

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


def block_mask(segments: Tensor, start: int = 0) -> Tensor:
    """(B, L) segments -> (B, 1, L - start, L) boolean: causal, within one's own segment and the prefix (0) only.

    The rows are the queries from `start` on. Every one sees itself at least, padding (-1) too, so that no softmax is
    empty.
    """
    queries, length = segments[:, start:], segments.shape[1]
    causal = torch.ones(length - start, length, dtype=torch.bool, device=segments.device).tril(start)
    same = queries[:, :, None] == segments[:, None, :]
    return ((same | (segments == 0)[:, None, :]) & causal).unsqueeze(1)


class ImageFirstFusion(FusionModule):
    """A fusion whose prompt has the image first; arguments as `FusionModule`."""

    def build(self) -> None:
        config = self.backbone.config
        self.prompts = SplitPrompts(
            self.backbone.tokenizer,
            self.kind,
            config.image_token_id,
            config.vision_end_token_id,
            self.backbone.chat_template,
        )

    def read_states(
        self,
        sizes: Sequence[tuple[int, int]],
        pixels: Callable[[int], Tensor],
        aspects: Sequence[Sequence[str | None]],
    ) -> list[Tensor]:
        """The final hidden state at the last token of each image under each of its aspects.

        Args:
            sizes: (height, width) of each image.
            pixels: index -> that image, (3, H, W) floats in [0, 1]; asked once, when its turn has come.
            aspects: at least one an image, possibly of different numbers.

        Returns:
            One (K_i, D) float32 tensor (float64 for a float64 model) per image.
        """
        suffixes = [[self.prompts.suffix(aspect) for aspect in names] for names in aspects]
        # Features are as large as the images are many, so both towers run chunk by chunk.
        costs = [
            len(self.prompts.prefix) + self.backbone.count_tokens(*size) + sum(map(len, mine))
            for size, mine in zip(sizes, suffixes, strict=True)
        ]
        order = sorted(range(len(sizes)), key=lambda index: costs[index])
        states: dict[int, Tensor] = {}
        for chunk in split_by_budget([costs[index] for index in order], self.token_budget):
            members = [order[k] for k in chunk]
            features = self.backbone.encode_images([pixels(index) for index in members])
            found = self.read_features(features, [suffixes[index] for index in members])
            states.update(zip(members, found, strict=True))
        return [states[index] for index in range(len(sizes))]

    def read_features(self, features: list[ImageFeatures], suffixes: Sequence[Sequence[tuple[int, ...]]]) -> list[Tensor]:
        """The language part of `read_states`: features of each image, and token ids of each of its suffixes."""
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
            found = self._run([job.packed for job in members], [features[job.image] for job in members])
            for job, rows in zip(members, found, strict=True):
                parts[job.image][job.first_aspect] = rows
        return [torch.cat([rows[first] for first in sorted(rows)]) for rows in parts]

    def _run(self, batch: list[Packed], features: list[ImageFeatures]) -> list[Tensor]:
        # prefixes and suffixes are padded apart, so that both are sections of the whole batch
        heads = [int((item.segments == 0).sum()) for item in batch]
        start = max(heads)
        length = start + max(len(item.ids) - head for item, head in zip(batch, heads, strict=True))
        ids = np.full((len(batch), length), self.prompts.prefix[0])
        positions = np.zeros((3, len(batch), length), dtype=np.int64)
        segments = np.full((len(batch), length), -1)
        for row, (item, head) in enumerate(zip(batch, heads, strict=True)):
            places = np.concatenate([np.arange(head), start + np.arange(len(item.ids) - head)])
            ids[row, places] = item.ids
            positions[:, row, places] = item.positions
            segments[row, places] = item.segments
        device = self.backbone.device
        mask = block_mask(torch.from_numpy(segments).to(device), start)
        hidden = self.backbone.run_language(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions).to(device),
            (Section(0, start, start, causal=True), Section(start, length, length, mask=mask)),
            features,
        ).last_hidden_state
        counts = [len(item.readouts) for item in batch]
        rows = torch.from_numpy(np.repeat(np.arange(len(batch)), counts)).to(device)
        readouts = [item.readouts - head + start for item, head in zip(batch, heads, strict=True)]
        columns = torch.from_numpy(np.concatenate(readouts)).to(device)
        states = hidden[rows, columns]
        return list(states.to(accumulation_dtype(states.dtype)).split(counts))
