"""Edits with a known ideal: an instruction, the source scene, the scene it should become, and what should stay."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np

from tpips_reward.errors import TPIPSError
from tpips_reward.scenes.scene import (
    BACKGROUND_COLORS,
    MIN_CONTRAST,
    OBJECT_COLORS,
    RGB,
    SHAPES,
    Scene,
    color_distance,
    pick,
    sample_scene,
)

#: What the user did not ask to change, by name; an edit's own target is taken out of it.
_PRESERVABLE = ("object color", "shape", "size", "position", "texture", "background color", "background pattern", "lighting")

_TARGETS: dict[str, tuple[str, ...]] = {
    "color": ("object color",),
    "shape": ("shape",),
    "size": ("size",),
    "position": ("position",),
    "background_color": ("background color",),
    "background_brightness": ("background color",),
}
EDIT_KINDS: tuple[str, ...] = tuple(_TARGETS)

_TEMPLATES: dict[str, tuple[str, ...]] = {
    "color": ("make the {shape} {value}", "change the color of the {shape} to {value}", "paint the {shape} {value}"),
    "shape": ("turn the {shape} into {a} {value}", "replace the {shape} with {a} {value}", "make the {shape} {a} {value}"),
    "size": ("make the {shape} {value}", "resize the {shape} to be {value}"),
    "position": ("move the {shape} {value}", "shift the {shape} {value}"),
    "background_color": ("make the background {value}", "change the background color to {value}"),
    "background_brightness": ("make the background {value}", "turn the background {value}"),
}

#: A quarter of the image: a whole number of an editor's tokens, so that a small one can learn to carry the object over.
_SHIFT = 0.25
_SCALE = 1.55
_MARGIN = 0.24  # the object's center stays this far from the border after a move


#: What drifts, and how often relative to the others.
_DRIFTS = {"object color": 1.0, "background color": 1.0, "brightness": 2.0, "warmth": 2.0}


@dataclass(frozen=True)
class Edit:
    """One edit of a procedural scene.

    Attributes:
        kind: one of :data:`EDIT_KINDS`.
        value: what the instruction asks for ("red", "left", "larger" …).
        instruction: the sentence given to the editor.
        source, ideal: the scene before, and as it should be after the edit.
        target: aspects that must change.
        preserve: aspects that must stay.
    """

    kind: str
    value: str
    instruction: str
    source: Scene
    ideal: Scene
    target: tuple[str, ...]
    preserve: tuple[str, ...]


def _clip(color: np.ndarray) -> RGB:
    r, g, b = np.clip(color, 0.0, 1.0)
    return (float(r), float(g), float(b))


def _options(scene: Scene, kind: str) -> dict[str, Scene]:
    """Every value that an edit of this kind could take on this scene, with the ideal scene of each."""
    if kind == "color":
        return {
            name: replace(scene, color=rgb)
            for name, rgb in OBJECT_COLORS.items()
            if color_distance(rgb, scene.color) > MIN_CONTRAST
            and color_distance(rgb, scene.background_color) > MIN_CONTRAST
        }
    if kind == "shape":
        return {name: replace(scene, shape=name) for name in SHAPES if name != scene.shape}
    if kind == "size":
        out = {}
        if scene.size * _SCALE <= 0.31:
            out["larger"] = replace(scene, size=scene.size * _SCALE)
        if scene.size / _SCALE >= 0.12:
            out["smaller"] = replace(scene, size=scene.size / _SCALE)
        return out
    if kind == "position":
        moves = {"left": (-_SHIFT, 0.0), "right": (_SHIFT, 0.0), "up": (0.0, -_SHIFT), "down": (0.0, _SHIFT)}
        return {
            name: replace(scene, x=scene.x + dx, y=scene.y + dy)
            for name, (dx, dy) in moves.items()
            if _MARGIN <= scene.x + dx <= 1 - _MARGIN and _MARGIN <= scene.y + dy <= 1 - _MARGIN
        }
    if kind == "background_color":
        return {
            name: replace(scene, background_color=rgb)
            for name, rgb in BACKGROUND_COLORS.items()
            if color_distance(rgb, scene.background_color) > 0.14 and color_distance(rgb, scene.color) > MIN_CONTRAST
        }
    if kind == "background_brightness":
        base = np.asarray(scene.background_color)
        shades = {"darker": _clip(base * 0.5), "lighter": _clip(base + 0.55 * (1 - base))}
        return {
            name: replace(scene, background_color=rgb)
            for name, rgb in shades.items()
            if color_distance(rgb, scene.color) > MIN_CONTRAST and color_distance(rgb, scene.background_color) > 0.08
        }
    raise TPIPSError(f"No procedural edit is called {kind!r}; there are {', '.join(EDIT_KINDS)}.")


def _is_test(kind: str, shape: str, value: str) -> bool:
    """One in five combinations of what, on what, and to what is held out of training."""
    return zlib.crc32(f"{kind}/{shape}/{value}".encode()) % 5 == 0


def sample_edit(rng: np.random.Generator, split: str = "train", kind: str | None = None) -> Edit:
    """A random edit on a random scene.

    Args:
        rng: source of all randomness.
        split: "train" or "test"; test edits combine a kind, a shape and a value that never meet in training.
        kind: one of :data:`EDIT_KINDS`, or None for a random one.

    Raises:
        TPIPSError: for an unknown split or kind.
    """
    if split not in ("train", "test"):
        raise TPIPSError(f"Edits have the splits 'train' and 'test', not {split!r}.")
    wanted = kind or pick(rng, EDIT_KINDS)
    while True:
        scene = sample_scene(rng, single=True, upright=True)
        options = {
            value: ideal
            for value, ideal in _options(scene, wanted).items()
            if _is_test(wanted, scene.shape, value) == (split == "test")
        }
        if options:
            break
    value = pick(rng, list(options))
    return Edit(
        kind=wanted,
        value=value,
        instruction=pick(rng, _TEMPLATES[wanted]).format(
            shape=scene.shape, value=value, a="an" if value[0] in "aeiou" else "a"
        ),
        source=scene,
        ideal=options[value],
        target=_TARGETS[wanted],
        preserve=tuple(a for a in _PRESERVABLE if a not in _TARGETS[wanted]),
    )


def with_drift(edit: Edit, rng: np.random.Generator, probability: float = 0.5) -> Scene:
    """The ideal scene, with ``probability`` drifted in one or two aspects that the instruction did not ask to change.

    This is what the built-in editor is pre-trained on: like real editors it learns the edit, and to let other things slip.
    Colors slip to any side, the light mostly to one: warmer and darker, as the tint that editors are known for.
    """
    scene = edit.ideal
    if rng.random() >= probability:
        return scene
    kinds = [kind for kind in _DRIFTS if kind not in edit.target]
    share = np.array([_DRIFTS[kind] for kind in kinds])
    for kind in rng.choice(kinds, size=int(rng.integers(1, 3)), replace=False, p=share / share.sum()):
        scene = _drifted(scene, str(kind), rng)
    return scene


def _drifted(scene: Scene, kind: str, rng: np.random.Generator) -> Scene:
    sign = float(rng.choice([-1.0, 1.0], p=[0.1, 0.9]))
    if kind == "object color":
        return replace(scene, color=_clip(np.asarray(scene.color) + rng.choice([-1.0, 1.0], 3) * rng.uniform(0.1, 0.25, 3)))
    if kind == "background color":
        shift = rng.choice([-1.0, 1.0], 3) * rng.uniform(0.08, 0.22, 3)
        return replace(scene, background_color=_clip(np.asarray(scene.background_color) + shift))
    if kind == "brightness":
        return replace(scene, brightness=scene.brightness * float(np.exp(-sign * rng.uniform(0.15, 0.35))))
    return replace(scene, warmth=float(np.clip(scene.warmth + sign * rng.uniform(0.5, 1.0), -1.2, 1.2)))
