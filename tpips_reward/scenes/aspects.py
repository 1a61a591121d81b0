"""The aspects of a scene: how different two scenes are in each, and in which words people name it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tpips_reward.errors import TPIPSError
from tpips_reward.scenes.scene import ROTATION_PERIOD, Scene, color_distance


@dataclass(frozen=True)
class Aspect:
    """One aspect.

    Attributes:
        name: its plain name, also its first wording.
        distance: how different two scenes are in it, in units of one clearly visible step; 0 when equal.
        parameters: the scene parameters it depends on.
    """

    name: str
    distance: Callable[[Scene, Scene], float]
    parameters: tuple[str, ...]


def _rotation(a: Scene, b: Scene) -> float:
    period = ROTATION_PERIOD[a.shape]
    if a.shape != b.shape or period == 0:
        return 0.0
    delta = abs(a.rotation - b.rotation) % period
    # A quarter period of a square is its largest visible turn; an arrow's is half a turn.
    return min(delta, period - delta) / min(20.0, period / 4)


def _differs(a: str | int, b: str | int) -> float:
    return 0.0 if a == b else 2.0


def _color(a: Scene, b: Scene) -> float:
    return color_distance(a.color, b.color) / 0.14


def _size(a: Scene, b: Scene) -> float:
    return abs(math.log(a.size / b.size)) / 0.22


def _position(a: Scene, b: Scene) -> float:
    return math.hypot(a.x - b.x, a.y - b.y) / 0.12


def _background_color(a: Scene, b: Scene) -> float:
    return color_distance(a.background_color, b.background_color) / 0.12


def _brightness(a: Scene, b: Scene) -> float:
    return abs(math.log(a.brightness / b.brightness)) / 0.2


def _warmth(a: Scene, b: Scene) -> float:
    return abs(a.warmth - b.warmth) / 0.55


def _sharpness(a: Scene, b: Scene) -> float:
    return abs(a.blur - b.blur) / 0.009


_PARTS: dict[str, tuple[Callable[[Scene, Scene], float], tuple[str, ...]]] = {
    "shape": (lambda a, b: _differs(a.shape, b.shape), ("shape",)),
    "object color": (_color, ("color",)),
    "size": (_size, ("size",)),
    "position": (_position, ("x", "y")),
    "count": (lambda a, b: 1.5 * abs(a.count - b.count), ("count",)),
    "rotation": (_rotation, ("rotation",)),
    "texture": (lambda a, b: _differs(a.texture, b.texture), ("texture",)),
    "background color": (_background_color, ("background_color",)),
    "background pattern": (lambda a, b: _differs(a.background_pattern, b.background_pattern), ("background_pattern",)),
    "brightness": (_brightness, ("brightness",)),
    "warmth": (_warmth, ("warmth",)),
    "sharpness": (_sharpness, ("blur",)),
}
#: Aspects that people name as one thing although several parameters make it.
_WHOLES: dict[str, tuple[str, ...]] = {
    "background": ("background color", "background pattern"),
    "lighting": ("brightness", "warmth"),
    "object": ("shape", "object color", "size", "texture"),
    "overall": tuple(_PARTS),
}


def _combined(names: tuple[str, ...]) -> Callable[[Scene, Scene], float]:
    # A single part never outweighs the rest without bound: people stop counting beyond "very different".
    return lambda a, b: math.sqrt(sum(min(_PARTS[n][0](a, b), 3.0) ** 2 for n in names))


ASPECTS: dict[str, Aspect] = {
    **{name: Aspect(name, fn, parameters) for name, (fn, parameters) in _PARTS.items()},
    **{
        name: Aspect(name, _combined(parts), tuple(p for part in parts for p in _PARTS[part][1]))
        for name, parts in _WHOLES.items()
    },
}


def aspect_distance(name: str, a: Scene, b: Scene) -> float:
    """How different two scenes are in an aspect, in visible steps (0 when equal, about 2 when clearly different).

    Raises:
        TPIPSError: when the aspect is not one of :data:`ASPECTS`.
    """
    if name not in ASPECTS:
        raise TPIPSError(f"No procedural aspect is called {name!r}; there are {', '.join(ASPECTS)}.")
    return ASPECTS[name].distance(a, b)


_NOUNS = (
    "object", "subject", "item", "figure", "foreground", "main object", "car", "cat", "dog", "shirt", "cup", "flower",
    "house", "person", "chair", "toy",
)  # fmt: skip
_OBJECT_FRAMES = ("{n} {a}", "{a} of the {n}", "the {n}'s {a}", "the {a} of the {n}")
_BACKGROUND_FRAMES = ("background {a}", "{a} of the background", "the background's {a}", "backdrop {a}",
                      "the {a} of the background", "{a} of the backdrop", "the {a} behind the object",
                      "wall {a}", "{a} of the wall", "ground {a}", "{a} of the ground")  # fmt: skip
_LIGHT_FRAMES = ("{a}", "{a} of the image", "the image's {a}", "overall {a}", "scene {a}", "{a} of the scene",
                 "{a} of the light", "picture {a}", "{a} of the picture", "the {a}")  # fmt: skip

_WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # aspect: (attribute words, frames)
    "shape": (("shape", "form", "outline", "silhouette", "geometry", "contour"), ("{a}", *_OBJECT_FRAMES)),
    "object color": (("color", "colour", "hue", "paint", "tint"), _OBJECT_FRAMES),
    "size": (("size", "scale", "dimensions", "area", "extent"), ("{a}", *_OBJECT_FRAMES)),
    "position": (("position", "location", "placement", "place", "layout"), ("{a}", *_OBJECT_FRAMES)),
    "rotation": (("rotation", "orientation", "angle", "direction", "pose", "tilt"), ("{a}", *_OBJECT_FRAMES)),
    "texture": (("texture", "material", "surface", "surface pattern", "pattern"), _OBJECT_FRAMES),
    "count": (("count", "number", "quantity", "amount"),
              ("object {a}", "{a} of objects", "the {a} of objects", "{a} of items", "item {a}", "the {a} of items",
               "{a} of figures", "subject {a}")),
    "background color": (("color", "colour", "hue", "tint", "paint"), _BACKGROUND_FRAMES),
    "background pattern": (("pattern", "texture", "design", "print", "motif"), _BACKGROUND_FRAMES),
    "brightness": (("brightness", "exposure", "luminance", "darkness", "lightness", "light level"), _LIGHT_FRAMES),
    "warmth": (("warmth", "color temperature", "white balance", "color cast", "temperature"), _LIGHT_FRAMES),
    "sharpness": (("sharpness", "blur", "focus", "blurriness", "clarity"), _LIGHT_FRAMES),
    "lighting": (("lighting", "illumination", "light", "light conditions", "lighting conditions"),
                 ("{a}", "the {a}", "scene {a}", "{a} of the scene", "overall {a}", "{a} of the image", "picture {a}")),
    "background": (("background", "backdrop", "background appearance", "scenery"),
                   ("{a}", "the {a}", "{a} behind the object", "image {a}", "{a} of the image", "scene {a}",
                    "{a} of the scene")),
    "object": (("appearance", "identity", "look"), _OBJECT_FRAMES),
    "overall": (("overall",), ("{a}",)),
}  # fmt: skip


@cache
def wordings(name: str, split: str = "train") -> tuple[str, ...]:
    """The phrases in which an aspect is named.

    The ``test`` phrases never occur in ``train``: they are new combinations of words that occur there. The aspect's plain
    name (and, for "overall", its only name) is always in ``train``.

    Args:
        name: a key of :data:`ASPECTS`.
        split: "train" or "test".
    """
    if name not in ASPECTS:
        raise TPIPSError(f"No procedural aspect is called {name!r}; there are {', '.join(ASPECTS)}.")
    if split not in ("train", "test"):
        raise TPIPSError(f"Wordings have the splits 'train' and 'test', not {split!r}.")
    words, frames = _WORDS[name]
    phrases = dict.fromkeys(f.format(n=n, a=w) for w in words for f in frames for n in _NOUNS)
    # The plain words alone (frame "{a}") stay in training: nothing else would introduce a word.
    plain = set(words) | {name}
    held_out = {p for p in phrases if zlib.crc32(p.encode()) % 4 == 0 and p not in plain}
    if split == "test":
        return tuple(p for p in phrases if p in held_out)
    return (name, *(p for p in phrases if p not in held_out and p != name))
