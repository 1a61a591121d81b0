"""Odd-one-out triplets from photographs under known changes, with simulated voters.

Each triplet shows one photograph three times. Five to seven of its properties are changed, each in an odd image of
its own, as in the procedural triplets of scenes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from metric_training.data.comparison import DataError
from metric_training.data.photo_changes import (
    PHOTO_PARTS,
    PHOTO_WHOLES,
    Change,
    apply_change,
    jitter,
    photo_distance,
    photo_wordings,
    sample_change,
    with_part_of,
)
from metric_training.data.votes import PAIRS, Voters

#: Photographs that come with scikit-image itself, so that nothing is downloaded.
SHIPPED = ("astronaut", "chelsea", "coffee", "rocket")
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
#: A change that moves pixels by less than this (mean, of 1) cannot be seen, whatever its parameter says.
_VISIBLE = 0.015
_STRONG = Change(0.7, 0.7, contrast=0.6, saturation=0.3, blur=0.014, noise=0.08, zoom=1.4, rotation=12.0, mirror=True)
_PROBE_SIZE = 96
_MIN_PARTS = 5
_LONGEST_SIDE = 1024


@dataclass(frozen=True, eq=False)
class Photograph:
    """A photograph, and which of its properties can be changed visibly (a gray one has no saturation to change).

    Attributes:
        name: of the file.
        image: RGB.
        parts: of `metric_training.data.photo_changes.PHOTO_PARTS`.
    """

    name: str
    image: Image.Image
    parts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PhotoTriplet:
    """One odd-one-out example with all its aspects.

    Attributes:
        photograph: its name.
        images: three (H, W, 3) uint8 arrays.
        changes: what was done to make them.
        aspects: plain names of the A aspects that were voted on.
        wordings: the phrase in which each was asked, A strings.
        votes: (A, 3) float32 vote shares.
    """

    photograph: str
    images: tuple[np.ndarray, np.ndarray, np.ndarray]
    changes: tuple[Change, Change, Change]
    aspects: tuple[str, ...]
    wordings: tuple[str, ...]
    votes: np.ndarray


def visible_parts(image: Image.Image) -> tuple[str, ...]:
    """The parts of which a strong change moves this photograph's pixels noticeably."""
    plain = Change()
    before = apply_change(image, plain, _PROBE_SIZE).astype(np.float32)
    found = []
    for part in PHOTO_PARTS:
        after = apply_change(image, with_part_of(plain, _STRONG, part), _PROBE_SIZE)
        if np.abs(after - before).mean() / 255 >= _VISIBLE:
            found.append(part)
    return tuple(found)


def photograph(name: str, image: Image.Image) -> Photograph:
    """A photograph made ready: RGB, upright, at most 1024 pixels long.

    Raises:
        DataError: when fewer than five of its properties can be changed visibly (a drawing, or nearly one color), or
            it is a strip.
    """
    image = ImageOps.exif_transpose(image).convert("RGB")
    if max(image.size) > 4 * min(image.size):
        raise DataError(f"The photograph {name} is a strip of {image.width}x{image.height}; crop it to 4:1 or less.")
    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE), Image.Resampling.LANCZOS)
    parts = visible_parts(image)
    if len(parts) < _MIN_PARTS:
        raise DataError(
            f"Of the photograph {name} only {', '.join(parts) or 'nothing'} can be changed visibly; {_MIN_PARTS} "
            "such properties are needed."
        )
    return Photograph(name, image, parts)


@cache
def shipped_photographs() -> tuple[Photograph, ...]:
    """The photographs that come with scikit-image.

    Raises:
        DataError: when scikit-image is not installed.
    """
    try:
        from skimage import data
    except ImportError as error:
        raise DataError(
            "The shipped photographs are scikit-image's; install it with pip install 'tpips-reward[data]', or give a "
            "folder of photographs (photographs:FOLDER)."
        ) from error
    return tuple(photograph(name, Image.fromarray(getattr(data, name)())) for name in SHIPPED)


def load_photographs(folder: str | Path) -> tuple[Photograph, ...]:
    """All photographs of a folder and its subfolders, by name.

    Raises:
        DataError: when there is none, or one does not open or cannot be changed visibly.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise DataError(f"{folder} is no folder; give one with photographs (photographs:FOLDER).")
    paths = sorted(p for p in root.rglob("*") if p.suffix.casefold() in _SUFFIXES)
    if not paths:
        raise DataError(f"{folder} holds no photograph ({', '.join(sorted(_SUFFIXES))}).")
    loaded = []
    for path in paths:
        try:
            with Image.open(path) as image:
                upright = ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:  # Pillow's decoders raise many kinds
            raise DataError(f"The photograph {path} does not open ({error}); take it out of the folder.") from error
        loaded.append(photograph(str(path.relative_to(root)), upright))
    return tuple(loaded)


def sample_photo_triplet(
    rng: np.random.Generator,
    photographs: Sequence[Photograph],
    *,
    split: str = "train",
    voters: Voters | None = None,
    max_aspects: int = 7,
    size: int = 128,
) -> PhotoTriplet:
    """A random triplet of one photograph, five to seven of its properties changed, each in its own odd image.

    Args:
        rng: source of all randomness.
        photographs: one of them is drawn.
        split: "train" or "test": which wordings name the aspects.
        voters: the panel; five voters by default.
        max_aspects: at most so many aspects are asked.
        size: shorter side of the images in pixels.
    """
    voters = voters or Voters()
    while True:
        chosen = photographs[int(rng.integers(len(photographs)))]
        varied = [str(p) for p in rng.permutation(chosen.parts)[: int(rng.integers(_MIN_PARTS, 8))]]
        base = sample_change(rng)
        changes = [base, base, base]
        # Odd roles are dealt like cards, so that no image is odd in most aspects.
        roles = [int(k) for _ in range(3) for k in rng.permutation(3)]
        for part, odd in zip(varied, roles, strict=False):
            _vary(changes, part, odd, rng)
        changes = [jitter(change, rng) for change in changes]
        wholes = [str(w) for w in rng.permutation(PHOTO_WHOLES)[: int(rng.integers(0, 3))]]
        asked: list[str] = []
        votes: list[np.ndarray] = []
        for name in rng.permutation([*varied, *wholes]):
            distances = np.array([photo_distance(str(name), changes[i], changes[j]) for i, j in PAIRS])
            shares = voters.vote(distances, rng)
            if shares is not None and len(asked) < max_aspects:
                asked.append(str(name))
                votes.append(shares)
        if len(asked) >= min(3, max_aspects):
            break
    phrases = tuple(_wording(name, split, rng) for name in asked)
    first, second, third = changes
    images = tuple(apply_change(chosen.image, change, size) for change in changes)
    return PhotoTriplet(
        chosen.name, (images[0], images[1], images[2]), (first, second, third), tuple(asked), phrases, np.stack(votes)
    )


def _vary(changes: list[Change], part: str, odd: int, rng: np.random.Generator) -> None:
    """Makes image ``odd`` differ visibly in one part, and now and then a second image too."""
    base = changes[(odd + 1) % 3]
    for _ in range(20):
        donor = sample_change(rng)
        if photo_distance(part, base, donor) > 1.0:
            break
    changes[odd] = with_part_of(changes[odd], donor, part)
    if rng.random() < 0.15:
        other = (odd + int(rng.integers(1, 3))) % 3
        changes[other] = with_part_of(changes[other], sample_change(rng), part)


def _wording(name: str, split: str, rng: np.random.Generator) -> str:
    """A phrase for the aspect: in training its plain name half of the time, so that it is learnt first."""
    phrases = photo_wordings(name, split) or photo_wordings(name, "train")
    if split == "train" and rng.random() < 0.5:
        return phrases[0]
    return phrases[int(rng.integers(len(phrases)))]
