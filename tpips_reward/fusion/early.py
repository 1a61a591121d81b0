"""Early fusion: both images and the prompt in one sequence; similarity is the cosine of two register tokens.

The sequence is [text | image A | image B | r1 | r2] (paper, section 4 and appendix C.2). Patches see the text and both
images, register r1 sees the text and image A, r2 the text and image B. Both registers are one learned vector at one
position, and both images' patches have the same positions. Hence f(a, b) = f(b, a) and f(a, a) = 1 by construction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpips_reward.attention import Section
from tpips_reward.backbone import ImageFeatures, split_by_budget
from tpips_reward.fusion.base import Pair, TextFirstFusion, accumulation_dtype, check_pairs
from tpips_reward.fusion.sharing import Shared, windows
from tpips_reward.prompts import normalize_aspect

PADDING, TEXT, IMAGE_A, IMAGE_B, REGISTER_1, REGISTER_2 = range(6)
_SEES = {
    TEXT: (TEXT,),  # causally
    IMAGE_A: (TEXT, IMAGE_A, IMAGE_B),
    IMAGE_B: (TEXT, IMAGE_A, IMAGE_B),
    REGISTER_1: (TEXT, IMAGE_A),
    REGISTER_2: (TEXT, IMAGE_B),
}
REGISTERS = 2


class _Job(NamedTuple):
    """One (image, image, aspect); the order of the two makes no difference, so they are sorted."""

    first: int
    second: int
    aspect: str | None


def token_kinds(text: int, first: int, second: int) -> np.ndarray:
    """(L,) kind of every token of a sequence with so many text tokens and patches, the registers included."""
    kinds = [TEXT, IMAGE_A, IMAGE_B, REGISTER_1, REGISTER_2]
    return np.repeat(kinds, [text, first, second, 1, 1])


def register_positions(text: int, grids: Sequence[tuple[int, int]], merge_size: int) -> np.ndarray:
    """(3, L) M-RoPE positions (t, h, w).

    Patches have t = 0 and their place in their own image's grid, counted in unmerged patches; text has t = 1, 2, ...;
    both registers come one after the text.

    Args:
        text: number of text tokens.
        grids: (rows, columns) in merged tokens of each image.
        merge_size: unmerged patches along a side of a merged one.
    """
    parts = [np.stack([np.arange(1, text + 1), np.zeros(text, int), np.zeros(text, int)])]
    for rows, columns in grids:
        height, width = np.divmod(np.arange(rows * columns), columns)
        parts.append(np.stack([np.zeros(rows * columns, int), height * merge_size, width * merge_size]))
    parts.append(np.repeat([[text + 1], [0], [0]], REGISTERS, axis=1))
    return np.concatenate(parts, axis=1)


def register_mask(kinds: Tensor, start: int = 0) -> Tensor:
    """(B, L) kinds -> (B, 1, L - start, L) boolean, True where the row's token may attend to the column's.

    The rows are the tokens from `start` on. Text is causal among itself. Nobody attends to padding; every token attends
    to itself, padding too, so that no softmax is empty.
    """
    table = torch.zeros(len(_SEES) + 1, len(_SEES) + 1, dtype=torch.bool)
    for kind, seen in _SEES.items():
        table[kind, list(seen)] = True
    queries, length = kinds[:, start:], kinds.shape[1]
    allowed = table.to(kinds.device)[queries[:, :, None], kinds[:, None, :]]
    places = torch.arange(length, device=kinds.device)
    later = places[None, :] > places[start:, None]
    allowed &= ~(later & (queries == TEXT)[:, :, None] & (kinds == TEXT)[:, None, :])
    allowed |= places[None, :] == places[start:, None]
    return allowed.unsqueeze(1)


class EarlyFusion(TextFirstFusion):
    """Early fusion on a Qwen3-VL backbone, with one learned register vector; arguments as `FusionModule`."""

    kind = "early"
    range = (-1.0, 1.0)

    def build(self) -> None:
        super().build()
        self.register_embed = nn.Embedding(1, self.backbone.hidden_size)

    def score_pairs(self, images: list[Tensor], pairs: Sequence[Pair]) -> Tensor:
        """Cosines f(image a, image b | aspect); the vision tower sees each image once.

        Args:
            images: distinct (3, H, W) floats in [0, 1], of any sizes; may require grad.
            pairs: (index a, index b, aspect), at least one. A pair that occurs again, in either order, is computed
                once.

        Returns:
            (N,) float32 (float64 for a float64 model).

        Raises:
            TPIPSError: a bad aspect, an index out of range, no pairs.
        """
        check_pairs(pairs, len(images))
        wanted = [_Job(min(a, b), max(a, b), normalize_aspect(aspect)) for a, b, aspect in pairs]
        jobs = list(dict.fromkeys(wanted))
        tokens = {k: self.backbone.count_tokens(*images[k].shape[-2:]) for job in jobs for k in job[:2]}
        lengths = [
            len(self.prompts.text(job.aspect)) + tokens[job.first] + tokens[job.second] + REGISTERS for job in jobs
        ]
        features = Shared(
            lambda keys: self.backbone.encode_images([images[key] for key in keys]),
            Counter(key for job in jobs for key in job[:2]),
        )
        scores: dict[_Job, Tensor] = {}
        for window in windows([job[:2] for job in jobs], tokens, self.feature_budget):
            ordered = sorted(window, key=lambda index: lengths[index])  # neighbours of like length share a batch
            for group in split_by_budget([lengths[index] for index in ordered], self.token_budget, padded=True):
                members = [jobs[ordered[index]] for index in group]
                needed = [key for job in members for key in job[:2]]
                cosines = self._run([job.aspect for job in members], features.get(needed))
                features.release(needed)
                scores.update(zip(members, cosines.unbind(), strict=True))
        return torch.stack([scores[job] for job in wanted])

    def _run(self, aspects: list[str | None], features: list[ImageFeatures]) -> Tensor:
        """Cosines (B,) of aspects (B,) and twice as many images, A and B of each pair in turn."""
        texts = [self.prompts.text(aspect) for aspect in aspects]
        grids = [[feature.grid for feature in features[2 * row : 2 * row + 2]] for row in range(len(texts))]
        counts = [[rows * columns for rows, columns in pair] for pair in grids]
        image_id = self.backbone.config.image_token_id
        # text and patches are padded apart, so that each is a section of the whole batch, and the registers come last
        start, stop = max(map(len, texts)), max(map(len, texts)) + max(map(sum, counts))
        length = stop + REGISTERS
        ids = np.full((len(texts), stop), texts[0][0])
        positions = np.zeros((3, len(texts), length), dtype=np.int64)
        kinds = np.full((len(texts), length), PADDING)
        for row, (text, count, pair) in enumerate(zip(texts, counts, grids, strict=True)):
            patches = start + np.arange(sum(count))
            places = np.concatenate([np.arange(len(text)), patches, [stop, stop + 1]])
            ids[row, : len(text)] = text
            ids[row, patches] = image_id
            positions[:, row, places] = register_positions(len(text), pair, self.backbone.settings.merge_size)
            kinds[row, places] = token_kinds(len(text), *count)
        device = self.backbone.device
        seen = torch.from_numpy(kinds).to(device)
        # patches see all text and all patches: only padding needs a mask, and one row of it serves all of them
        real = None if (kinds[:, :stop] != PADDING).all() else (seen[:, None, None, :stop] != PADDING)
        hidden = self.backbone.run_language(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions).to(device),
            (
                Section(0, start, start, causal=True),
                Section(start, stop, stop, mask=real),
                Section(stop, length, length, mask=register_mask(seen, stop)),
            ),
            features,
            tail=self.register_embed.weight.expand(len(texts), REGISTERS, -1),
        ).last_hidden_state
        registers = hidden[:, -REGISTERS:].to(accumulation_dtype(hidden.dtype))
        first, second = F.normalize(registers, dim=-1).unbind(dim=1)
        return (first * second).sum(dim=-1)
