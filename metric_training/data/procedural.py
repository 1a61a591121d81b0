"""Procedural test sets: scenes and photographs, as odd-one-out triplets and as 2AFC, from the same simulated voters.

Every example is drawn from a stream of its own, [seed, kind of set, number]: seeds make sets exact, and training, whose
streams are shorter or start otherwise, never draws from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from metric_training.data.comparison import Comparison, Data, DataError, ImageSource, Problems
from metric_training.data.photo_changes import photo_distance
from metric_training.data.photographs import (
    Photograph,
    PhotoTriplet,
    load_photographs,
    sample_photo_triplet,
    shipped_photographs,
)
from metric_training.data.triplets import Triplet, sample_triplet
from metric_training.data.votes import Voters
from tpips_reward import TPIPSError
from tpips_reward.scenes import aspect_distance

#: The seed of the test sets; training data come from other streams, whatever their seed.
TEST_SEED = 2607
Kind = Literal["procedural", "procedural-2afc", "photographs", "photographs-2afc"]
_STREAMS: dict[Kind, int] = {"procedural": 7, "procedural-2afc": 8, "photographs": 9, "photographs-2afc": 10}
KINDS: tuple[Kind, ...] = tuple(_STREAMS)


def held_out_triplets(count: int, *, seed: int = TEST_SEED, split: str = "train", size: int = 64) -> list[Triplet]:
    """Fresh triplets, from a stream that training never draws from.

    Args:
        count: how many.
        seed: of the set.
        split: whether aspects are named in wordings of training ("train") or in ones never trained on ("test").
        size: side in pixels.
    """
    if count < 1:
        raise TPIPSError(f"A test set needs at least one triplet, not {count}.")
    streams = (np.random.default_rng([seed, _STREAMS["procedural"], i]) for i in range(count))
    return [sample_triplet(rng, split=split, voters=Voters(), size=size) for rng in streams]


def procedural_data(
    kind: Kind,
    count: int,
    *,
    seed: int = TEST_SEED,
    split: str = "train",
    size: int | None = None,
    folder: str | None = None,
) -> Data:
    """A test set of ``count`` comparisons.

    Args:
        kind: one of :data:`KINDS`.
        count: how many.
        seed: of the set.
        split: wordings of training ("train"), or ones never trained on ("test").
        size: (shorter) side of the images in pixels; None: 64 for scenes, 128 for photographs.
        folder: photographs; None: those of scikit-image. The changes are fresh; whether the photographs are is up to
            the folder.

    Raises:
        TPIPSError: an unknown kind or split, no comparison wanted, a negative seed, photographs that are not there.
    """
    if kind not in _STREAMS:
        raise DataError(f"There is no procedural set {kind!r}; there are {', '.join(KINDS)}.")
    if count < 1:
        raise TPIPSError(f"A test set needs at least one comparison, not {count}.")
    if seed < 0:
        raise TPIPSError(f"The seed of a test set must be at least 0, not {seed}.")
    photographs: Sequence[Photograph] = ()
    if kind.startswith("photographs"):
        photographs = shipped_photographs() if folder is None else load_photographs(folder)
    is_two_afc = kind.endswith("2afc")
    size = size or (128 if photographs else 64)
    comparisons = []
    for index in range(count):
        rng = np.random.default_rng([seed, _STREAMS[kind], index])
        key = f"{kind}-{index}"
        while True:
            triplet: Triplet | PhotoTriplet = (
                sample_photo_triplet(rng, photographs, split=split, size=size)
                if photographs
                else sample_triplet(rng, split=split, size=size)
            )
            made = two_afc(triplet, Voters(), rng, key) if is_two_afc else odd_one_out(triplet, key)
            if made is not None:
                break
        comparisons.append(made)
    return Data(kind, "two_afc" if is_two_afc else "odd_one_out", comparisons, Problems(kind))


def odd_one_out(triplet: Triplet | PhotoTriplet, key: str) -> Comparison:
    """A procedural triplet as a comparison; its source is the photograph, or "scenes"."""
    return Comparison(
        key, "odd_one_out", _images(triplet, key), triplet.wordings, triplet.votes, triplet.aspects, _source(triplet)
    )


def two_afc(triplet: Triplet | PhotoTriplet, voters: Voters, rng: np.random.Generator, key: str) -> Comparison | None:
    """The same images as a 2AFC question: the first is the reference, the voters say which of the others is nearer.

    Returns:
        None where fewer than two aspects are left after the paper's rules ("can't tell", ties).
    """
    distance = distance_between(triplet)
    kept: list[tuple[str, str, np.ndarray]] = []
    for name, phrase in zip(triplet.aspects, triplet.wordings, strict=True):
        shares = voters.vote_two_afc(np.array([distance(name, 0, 1), distance(name, 0, 2)]), rng)
        if shares is not None:
            kept.append((name, phrase, shares))
    if len(kept) < 2:
        return None
    names, phrases, votes = zip(*kept, strict=True)
    return Comparison(key, "two_afc", _images(triplet, key), phrases, np.stack(votes), names, _source(triplet))


def distance_between(triplet: Triplet | PhotoTriplet) -> Callable[[str, int, int], float]:
    """(aspect, image, image) → how different the two are in it, in visible steps."""
    if isinstance(triplet, PhotoTriplet):
        changes = triplet.changes
        return lambda name, i, j: photo_distance(name, changes[i], changes[j])
    scenes = triplet.scenes
    return lambda name, i, j: aspect_distance(name, scenes[i], scenes[j])


def _images(triplet: Triplet | PhotoTriplet, key: str) -> tuple[ImageSource, ImageSource, ImageSource]:
    # with a digest, since sets of other seeds and sizes have the same numbers
    digests = [hashlib.sha1(image.tobytes()).hexdigest()[:16] for image in triplet.images]
    first, second, third = (
        ImageSource(f"{key}/{n}@{digest}", image)
        for n, (image, digest) in enumerate(zip(triplet.images, digests, strict=True))
    )
    return first, second, third


def _source(triplet: Triplet | PhotoTriplet) -> str:
    return triplet.photograph if isinstance(triplet, PhotoTriplet) else "scenes"
