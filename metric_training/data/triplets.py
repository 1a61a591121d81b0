"""Procedural odd-one-out triplets: three scenes that differ in several aspects, each with an odd image of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from metric_training.data.votes import PAIRS, Voters
from tpips_reward.scenes import ASPECTS, Scene, aspect_distance, render, sample_scene, wordings

_WHOLE = ("background", "lighting", "object", "overall")
_PARTS = tuple(name for name in ASPECTS if name not in _WHOLE)


@dataclass(frozen=True)
class Triplet:
    """One odd-one-out example with all its aspects.

    Attributes:
        images: three (S, S, 3) uint8 arrays.
        scenes: the parameters behind them.
        aspects: plain names of the A aspects that were voted on.
        wordings: the phrase in which each was asked, A strings.
        votes: (A, 3) float32 vote shares.
    """

    images: tuple[np.ndarray, np.ndarray, np.ndarray]
    scenes: tuple[Scene, Scene, Scene]
    aspects: tuple[str, ...]
    wordings: tuple[str, ...]
    votes: np.ndarray


def _jitter(scene: Scene, rng: np.random.Generator) -> Scene:
    """Differences too small to count: no two images of a triplet are equal in a continuous parameter."""

    def wobble(color: tuple[float, float, float]) -> tuple[float, float, float]:
        r, g, b = np.clip(np.asarray(color) + rng.normal(0, 0.012, 3), 0, 1)
        return (float(r), float(g), float(b))

    return replace(
        scene,
        color=wobble(scene.color),
        background_color=wobble(scene.background_color),
        size=float(np.clip(scene.size * np.exp(rng.normal(0, 0.02)), 0.1, 0.3)),
        x=scene.x + float(rng.normal(0, 0.008)),
        y=scene.y + float(rng.normal(0, 0.008)),
        rotation=scene.rotation + float(rng.normal(0, 2.0)),
        brightness=scene.brightness * float(np.exp(rng.normal(0, 0.015))),
        warmth=scene.warmth + float(rng.normal(0, 0.04)),
    )


def _with_aspect_of(scene: Scene, donor: Scene, aspect: str) -> Scene:
    """``scene`` with the parameters of one aspect taken from ``donor``."""
    return replace(scene, **{p: getattr(donor, p) for p in ASPECTS[aspect].parameters})


def _vary(scenes: list[Scene], aspect: str, odd: int, rng: np.random.Generator) -> None:
    """Makes image ``odd`` differ visibly in one aspect, and now and then a second image a little."""
    base = scenes[(odd + 1) % 3]
    for _ in range(20):
        donor = sample_scene(rng)
        changed = _with_aspect_of(base, donor, aspect)
        if aspect_distance(aspect, base, changed) > 1.0:
            break
    scenes[odd] = _with_aspect_of(scenes[odd], donor, aspect)
    if rng.random() < 0.15:
        other = (odd + int(rng.integers(1, 3))) % 3
        scenes[other] = _with_aspect_of(scenes[other], sample_scene(rng), aspect)


def _distances(aspect: str, scenes: list[Scene]) -> np.ndarray:
    return np.array([aspect_distance(aspect, scenes[i], scenes[j]) for i, j in PAIRS])


def sample_triplet(
    rng: np.random.Generator,
    *,
    split: str = "train",
    voters: Voters | None = None,
    max_aspects: int = 7,
    size: int = 64,
) -> Triplet:
    """A random triplet with five to seven varied aspects, each with its own odd image.

    Args:
        rng: source of all randomness.
        split: "train" or "test": which wordings name the aspects.
        voters: the panel; five voters by default.
        max_aspects: at most so many aspects are asked.
        size: side of the images in pixels.
    """
    voters = voters or Voters()
    while True:
        base = sample_scene(rng)
        varied = [str(a) for a in rng.permutation(_PARTS)[: int(rng.integers(5, 8))]]
        if "shape" in varied and "rotation" in varied:
            varied.remove("rotation")  # an angle can be compared between equal shapes only
        scenes = [base, base, base]
        # Odd roles are dealt like cards, so that no image is odd in most aspects.
        roles = [k for _ in range(3) for k in rng.permutation(3)]
        for aspect, odd in zip(varied, roles, strict=False):
            _vary(scenes, aspect, int(odd), rng)
        scenes = [_jitter(s, rng) for s in scenes]
        wholes = [str(w) for w in rng.permutation(_WHOLE)[: int(rng.integers(0, 3))]]
        asked: list[str] = []
        votes: list[np.ndarray] = []
        for aspect in rng.permutation([*varied, *wholes]):
            shares = voters.vote(_distances(str(aspect), scenes), rng)
            if shares is not None and len(asked) < max_aspects:
                asked.append(str(aspect))
                votes.append(shares)
        if len(asked) >= min(3, max_aspects):
            break
    phrases = [_wording(aspect, split, rng) for aspect in asked]
    images = (render(scenes[0], size), render(scenes[1], size), render(scenes[2], size))
    return Triplet(images, (scenes[0], scenes[1], scenes[2]), tuple(asked), tuple(phrases), np.stack(votes))


def _wording(aspect: str, split: str, rng: np.random.Generator) -> str:
    """A phrase for the aspect: in training its plain name half of the time, so that it is learnt first."""
    phrases = wordings(aspect, split) or wordings(aspect, "train")
    if split == "train" and rng.random() < 0.5:
        return phrases[0]
    return phrases[int(rng.integers(len(phrases)))]
