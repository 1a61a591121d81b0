"""A scene: one object (or a few equal ones) on a background under a light, as plain parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tpips_reward.errors import TPIPSError

RGB = tuple[float, float, float]

#: Rotational period of each shape in degrees; 0 where a rotation cannot be seen.
ROTATION_PERIOD: dict[str, float] = {
    "circle": 0.0,
    "square": 90.0,
    "triangle": 120.0,
    "star": 72.0,
    "cross": 90.0,
    "arrow": 360.0,
}
SHAPES: tuple[str, ...] = tuple(ROTATION_PERIOD)
TEXTURES: tuple[str, ...] = ("plain", "stripes", "dots", "checker")
PATTERNS: tuple[str, ...] = ("plain", "stripes", "dots", "checker", "gradient")

OBJECT_COLORS: dict[str, RGB] = {
    "red": (0.85, 0.13, 0.13),
    "orange": (0.95, 0.52, 0.08),
    "yellow": (0.95, 0.87, 0.20),
    "green": (0.13, 0.65, 0.22),
    "blue": (0.13, 0.28, 0.88),
    "purple": (0.52, 0.16, 0.74),
    "pink": (0.96, 0.50, 0.72),
    "white": (0.96, 0.96, 0.96),
}
BACKGROUND_COLORS: dict[str, RGB] = {
    "gray": (0.50, 0.50, 0.50),
    "beige": (0.80, 0.72, 0.58),
    "navy": (0.11, 0.14, 0.34),
    "brown": (0.40, 0.26, 0.16),
    "teal": (0.14, 0.50, 0.50),
    "olive": (0.45, 0.47, 0.18),
    "lavender": (0.70, 0.64, 0.86),
    "sky": (0.58, 0.77, 0.92),
}

SIZE_RANGE = (0.15, 0.27)
POSITION_RANGE = (0.30, 0.70)
BRIGHTNESS_RANGE = (0.60, 1.15)
WARMTH_RANGE = (-1.0, 1.0)
BLUR_RANGE = (0.0, 0.03)
MAX_COUNT = 3
#: Share of scenes at any angle; the others stand upright, as most things in pictures do.
TURNED = 0.35


@dataclass(frozen=True)
class Scene:
    """The parameters of one image; lengths are shares of the image's side, angles degrees, colors RGB in [0, 1].

    Attributes:
        shape: one of :data:`SHAPES`.
        color: the object's RGB before texture and light.
        size: radius of a circle with the object's area.
        x, y: the object's center (the group's, for several); x to the right, y down.
        count: 1 to 3 equal objects.
        rotation: counter-clockwise angle in degrees.
        texture: one of :data:`TEXTURES`, on the object.
        background_color: the background's RGB before pattern and light.
        background_pattern: one of :data:`PATTERNS`.
        brightness: factor on all pixels.
        warmth: -1 (bluish light) to 1 (reddish light).
        blur: standard deviation of the final Gaussian blur.
    """

    shape: str = "circle"
    color: RGB = OBJECT_COLORS["red"]
    size: float = 0.2
    x: float = 0.5
    y: float = 0.5
    count: int = 1
    rotation: float = 0.0
    texture: str = "plain"
    background_color: RGB = BACKGROUND_COLORS["gray"]
    background_pattern: str = "plain"
    brightness: float = 1.0
    warmth: float = 0.0
    blur: float = 0.0

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("shape", self.shape, SHAPES),
            ("texture", self.texture, TEXTURES),
            ("background_pattern", self.background_pattern, PATTERNS),
        ):
            if value not in allowed:
                raise TPIPSError(f"Scene {name} is {value!r}; choose one of {', '.join(allowed)}.")
        if not 1 <= self.count <= MAX_COUNT:
            raise TPIPSError(f"Scene count is {self.count}; it must be 1 to {MAX_COUNT}.")
        if not 0 < self.size < 1:
            raise TPIPSError(f"Scene size is {self.size}; it is a share of the image's side, between 0 and 1.")


def color_distance(a: RGB, b: RGB) -> float:
    """Distance of two RGB colors, green weighted a little more, as the eye does.

    Returns:
        sqrt of the mean of squared differences with weights (0.9, 1.2, 0.9); 0 to about 1.
    """
    weights = (0.9, 1.2, 0.9)
    return float(np.sqrt(sum(w * (p - q) ** 2 for w, p, q in zip(weights, a, b, strict=True)) / 3.0))


def jitter_color(rng: np.random.Generator, color: RGB, amount: float = 0.03) -> RGB:
    """``color`` with a uniform change of at most ``amount`` a channel, kept in [0, 1]."""
    r, g, b = np.clip(np.asarray(color) + rng.uniform(-amount, amount, 3), 0.0, 1.0)
    return (float(r), float(g), float(b))


def pick(rng: np.random.Generator, options: tuple[str, ...] | list[str]) -> str:
    """One of ``options``, uniformly."""
    return options[int(rng.integers(len(options)))]


#: Object and background closer than this (in :func:`color_distance`) are not drawn together: the object must be seen.
MIN_CONTRAST = 0.22


def sample_color(rng: np.random.Generator, palette: dict[str, RGB], away_from: RGB | None = None) -> tuple[str, RGB]:
    """A palette color's name and its jittered RGB, at least :data:`MIN_CONTRAST` away from ``away_from``."""
    names = [n for n, c in palette.items() if away_from is None or color_distance(c, away_from) > MIN_CONTRAST]
    name = pick(rng, names)
    return name, jitter_color(rng, palette[name])


def sample_scene(
    rng: np.random.Generator, *, single: bool = False, upright: bool = False, turned: float = TURNED
) -> Scene:
    """A random scene.

    Args:
        rng: source of all randomness.
        single: one object only.
        upright: a rotation within 12 degrees, neutral light, no blur, plain surfaces (the editor's sources).
        turned: share of scenes at any angle; the others are within 12 degrees, as all are with ``upright``.
    """
    _, background = sample_color(rng, BACKGROUND_COLORS)
    _, color = sample_color(rng, OBJECT_COLORS, away_from=background)
    return Scene(
        shape=pick(rng, SHAPES),
        color=color,
        size=float(rng.uniform(*SIZE_RANGE)),
        x=float(rng.uniform(*POSITION_RANGE)),
        y=float(rng.uniform(*POSITION_RANGE)),
        count=1 if single else int(rng.choice([1, 2, 3], p=[0.7, 0.15, 0.15])),
        rotation=float(rng.uniform(-180, 180) if not upright and rng.random() < turned else rng.uniform(-12, 12)),
        texture="plain" if upright else pick(rng, TEXTURES),
        background_color=background,
        background_pattern=pick(rng, ("plain", "plain", "gradient") if upright else PATTERNS),
        brightness=float(rng.uniform(0.85, 1.05) if upright else rng.uniform(*BRIGHTNESS_RANGE)),
        warmth=float(rng.uniform(-0.3, 0.3) if upright else rng.uniform(*WARMTH_RANGE)),
        blur=0.0 if upright else float(rng.choice([0.0, 1.0]) * rng.uniform(*BLUR_RANGE)),
    )
