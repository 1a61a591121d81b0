"""What an editor is conditioned on: encoded once, then indexed, repeated and joined like a batch of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_recipes.editors.errors import EditorError

Size = tuple[int, int]  # (height, width) in pixels
# Of one sample: its number of condition tokens, and the sizes of the images that they come from.
ImageTokens = tuple[int, tuple[Size, ...]]


@dataclass(frozen=True)
class Conditions:
    """Everything that velocity needs beside latents and sigma, for a batch of B samples of one size.

    Attributes:
        prompt: text states (B, L, D) in the transformer's dtype.
        prompt_mask: (B, L) bool, True where a token is real; None when no prompt is padded.
        image_latents: packed latents of the condition images (B, S, C).
        size: (height, width) of the edited image in pixels.
        image_sizes: (height, width) of each condition image that went through the VAE.
        negative, negative_mask: the same as prompt and prompt_mask for classifier-free guidance, or None.
        pooled, negative_pooled: one vector a prompt (B, D'), for transformers that take one beside the states.
        ragged: where samples differ in number or sizes of their condition images, what each of them has; image_latents are
            then padded behind to the longest, and image_sizes is empty.
    """

    prompt: Tensor
    prompt_mask: Tensor | None
    image_latents: Tensor
    size: Size
    image_sizes: tuple[Size, ...]
    negative: Tensor | None = None
    negative_mask: Tensor | None = None
    pooled: Tensor | None = None
    negative_pooled: Tensor | None = None
    ragged: tuple[ImageTokens, ...] | None = None

    def __len__(self) -> int:
        return self.prompt.shape[0]

    @property
    def device(self) -> torch.device:
        return self.prompt.device

    def index(self, ids: Sequence[int] | Tensor) -> Conditions:
        """The conditions of the samples `ids`, in that order; an id may occur several times."""
        chosen = torch.as_tensor(ids, dtype=torch.long, device=self.device)
        picked = self._map(lambda tensor: tensor[chosen])
        if self.ragged is None:
            return picked
        entries = tuple(self.ragged[index] for index in chosen.tolist())
        if len(set(entries)) != 1:
            return replace(picked, ragged=entries)
        length, sizes = entries[0]
        return replace(picked, image_latents=picked.image_latents[:, :length], image_sizes=sizes, ragged=None)

    def repeat(self, times: int) -> Conditions:
        """Each sample `times` times in a row: a b -> a a b b."""
        return self.index([index for index in range(len(self)) for _ in range(times)])

    def to(self, device: torch.device | str) -> Conditions:
        """The same conditions on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def uniform_parts(self) -> list[tuple[list[int], Conditions]]:
        """Rows of samples with condition images of the same sizes, with their conditions; mostly one part, the whole."""
        if self.ragged is None:
            return [(list(range(len(self))), self)]
        rows: dict[ImageTokens, list[int]] = {}
        for row, entry in enumerate(self.ragged):
            rows.setdefault(entry, []).append(row)
        return [(alike, self.index(alike)) for alike in rows.values()]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Conditions:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: change(v) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **changed)

    @staticmethod
    def cat(parts: Sequence[Conditions]) -> Conditions:
        """Join batches of edits of one size; shorter prompts are padded and masked, fewer condition tokens padded.

        Raises:
            EditorError: nothing to join, sizes that differ, or guidance prompts that only some parts have.
        """
        if not parts:
            raise EditorError("There are no conditions to join; encode at least one image with its instruction.")
        sizes = sorted({part.size for part in parts})
        if len(sizes) > 1:
            listed = ", ".join(f"{height}x{width}" for height, width in sizes)
            raise EditorError(
                f"One batch holds one size, but these edits have sizes {listed} (height x width); group them with "
                "group_by_size first."
            )
        if len({part.negative is None for part in parts}) > 1:
            raise EditorError("Some conditions have a negative prompt and some have none; encode all of them alike.")
        prompt, prompt_mask = pad_prompts([(part.prompt, part.prompt_mask) for part in parts])
        negative, negative_mask = None, None
        if parts[0].negative is not None:
            negative, negative_mask = pad_prompts([(part.negative, part.negative_mask) for part in parts])
        entries = [entry for part in parts for entry in part._entries()]
        alike = len(set(entries)) == 1
        return Conditions(
            prompt=prompt,
            prompt_mask=prompt_mask,
            image_latents=_pad_tokens([part.image_latents for part in parts]),
            size=sizes[0],
            image_sizes=entries[0][1] if alike else (),
            negative=negative,
            negative_mask=negative_mask,
            pooled=_join([part.pooled for part in parts]),
            negative_pooled=_join([part.negative_pooled for part in parts]),
            ragged=None if alike else tuple(entries),
        )

    def _entries(self) -> tuple[ImageTokens, ...]:
        return self.ragged or ((self.image_latents.shape[1], self.image_sizes),) * len(self)


def pad_prompts(prompts: Sequence[tuple[Tensor | None, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Stack pairs of (B, L, D) states and (B, L) mask (None: all real) to one pair, padded on the right with zeros."""
    states = [state for state, _ in prompts if state is not None]
    longest = max(state.shape[1] for state in states)
    padded, masks = [], []
    for state, mask in prompts:
        assert state is not None
        missing = longest - state.shape[1]
        real = mask.bool() if mask is not None else state.new_ones(state.shape[:2], dtype=torch.bool)
        padded.append(F.pad(state, (0, 0, 0, missing)))
        masks.append(F.pad(real, (0, missing), value=False))
    joined = torch.cat(masks)
    return torch.cat(padded), None if bool(joined.all()) else joined


def _pad_tokens(latents: Sequence[Tensor]) -> Tensor:
    longest = max(one.shape[1] for one in latents)
    return torch.cat([F.pad(one, (0, 0, 0, longest - one.shape[1])) for one in latents])


def _join(tensors: Sequence[Tensor | None]) -> Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(given) if given else None
