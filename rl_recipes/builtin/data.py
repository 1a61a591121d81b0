"""Training images of the built-in editor: procedural scenes for edits, and some of everything for its autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from tpips_reward.scenes import EDIT_KINDS, Edit, render, sample_edit, sample_scene, with_drift

#: Shares of the autoencoder's images: edits' own, arbitrary scenes, and smooth noise that stands for photographs.
_EDIT_SHARE, _SCENE_SHARE = 0.55, 0.3
#: A pixel is to change where source and ideal differ by more than this (of 255).
_CHANGED = 8


def step_rng(seed: int, *stream: int) -> np.random.Generator:
    """A generator of its own for each step: what a step draws does not depend on how often a run was interrupted."""
    return np.random.default_rng([seed, *stream])


def autoencoder_batch(rng: np.random.Generator, count: int, size: int = 64) -> torch.Tensor:
    """Images that the autoencoder must be able to show, of the training split.

    Returns:
        (count, 3, size, size) float32 in [-1, 1].
    """
    images = np.stack([_autoencoder_image(rng, size) for _ in range(count)])
    return to_signed(torch.from_numpy(images))


def to_signed(images: torch.Tensor) -> torch.Tensor:
    """(B, H, W, 3) uint8 → (B, 3, H, W) float32 in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def _autoencoder_image(rng: np.random.Generator, size: int) -> np.ndarray:
    kind = rng.random()
    if kind < _EDIT_SHARE:
        edit = sample_edit(rng, "train")
        return render(edit.source if rng.random() < 0.4 else with_drift(edit, rng, 0.6), size)
    if kind < _EDIT_SHARE + _SCENE_SHARE:
        return render(sample_scene(rng), size)
    return noise_image(rng, size)


def noise_image(rng: np.random.Generator, size: int = 64) -> np.ndarray:
    """Colored noise at several scales: as photographs, mostly smooth, with edges and fine structure here and there.

    Returns:
        (size, size, 3) uint8.
    """
    falloff = rng.uniform(0.35, 0.8)
    image = np.zeros((size, size, 3), np.float32)
    for octave in range(int(np.log2(size))):
        cells = 2 ** (octave + 1)
        gray = rng.normal(size=(cells, cells, 1))
        colored = 0.7 * gray + 0.5 * rng.normal(size=(cells, cells, 3)) * rng.uniform(0.2, 1.0)
        image += falloff**octave * _resized(colored.astype(np.float32), size)
    if rng.random() < 0.5:
        # Steep contrast turns smooth hills into areas with edges.
        image = np.tanh(image * rng.uniform(1.0, 4.0))
    image = rng.uniform(0.25, 0.75, 3) + image * rng.uniform(0.08, 0.3)
    return np.clip(np.rint(255.0 * image), 0, 255).astype(np.uint8)


def _resized(image: np.ndarray, size: int) -> np.ndarray:
    planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(image, -1, 0)]
    return np.stack([np.asarray(p.resize((size, size), Image.Resampling.BICUBIC)) for p in planes], -1)


@dataclass
class EditPairs:
    """Rendered edits.

    Attributes:
        sources, targets: (N, size, size, 3) uint8; a target is the ideal scene, drifted now and then.
        changed: (N, size, size) bool, where source and ideal differ: what the instruction is about.
        instructions: N sentences.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    changed: torch.Tensor
    instructions: list[str]


def edit_pairs(
    seed: int,
    indices: Sequence[int],
    *,
    drift_probability: float,
    weights: dict[str, float] | None = None,
    size: int = 64,
) -> EditPairs:
    """Training pairs of the editor; pair i depends on the seed and on i alone.

    Args:
        seed: all randomness comes from it.
        indices: which pairs.
        drift_probability: how often a target has drifted in an aspect that the instruction does not name.
        weights: how often each kind of edit is drawn, relative to 1 for those that are not named.
        size: side in pixels.
    """
    share = np.array([(weights or {}).get(kind, 1.0) for kind in EDIT_KINDS])
    share = share / share.sum()
    sources, targets, changed, instructions = [], [], [], []
    for index in indices:
        rng = step_rng(seed, 1, index)
        edit = sample_edit(rng, "train", EDIT_KINDS[int(rng.choice(len(EDIT_KINDS), p=share))])
        source, ideal = render(edit.source, size), render(edit.ideal, size)
        sources.append(source)
        targets.append(render(with_drift(edit, rng, drift_probability), size))
        changed.append(np.abs(source.astype(np.int16) - ideal).max(-1) > _CHANGED)
        instructions.append(edit.instruction)
    before, after, where = (torch.from_numpy(np.stack(x)) for x in (sources, targets, changed))
    return EditPairs(before, after, where, instructions)


def held_out_edits(seed: int, count: int, split: str = "test", kinds: Sequence[str] = EDIT_KINDS) -> list[Edit]:
    """``count`` edits of a split, the kinds in turn."""
    rng = step_rng(seed, 2)
    return [sample_edit(rng, split, kinds[i % len(kinds)]) for i in range(count)]
