"""Known changes of a photograph: their parameters, how visible they are, their names, and the pixels."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from PIL import Image, ImageFilter

from tpips_reward import TPIPSError
from tpips_reward.scenes import ASPECTS, wordings

#: Rotations stay within it, so that one framing serves all of them and no corner shows.
MAX_ROTATION = 20.0
MAX_ZOOM = 1.6
_SUPERSAMPLE = 2
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True)
class Change:
    """What was done to a photograph; the default is only its framing.

    Attributes:
        brightness: factor on all pixels.
        warmth: -1 (bluish) to 1 (reddish), as of a scene.
        contrast: factor on the differences from the mean luminance.
        saturation: factor on the differences from gray.
        blur: standard deviation of a Gaussian, as a share of the shorter side.
        noise: standard deviation of Gaussian noise, in units of the pixel range.
        noise_seed: of the noise.
        zoom: at least 1: how much smaller the part is that is shown, a crop around the center.
        rotation: degrees within :data:`MAX_ROTATION`, counter-clockwise.
        mirror: left and right exchanged.
    """

    brightness: float = 1.0
    warmth: float = 0.0
    contrast: float = 1.0
    saturation: float = 1.0
    blur: float = 0.0
    noise: float = 0.0
    noise_seed: int = 0
    zoom: float = 1.0
    rotation: float = 0.0
    mirror: bool = False

    def __post_init__(self) -> None:
        positive = min(self.brightness, self.contrast) > 0 and min(self.saturation, self.blur, self.noise) >= 0
        if not positive or not 1 <= self.zoom <= 2 * MAX_ZOOM or abs(self.rotation) > MAX_ROTATION:
            raise TPIPSError(
                f"{self} cannot be applied: brightness and contrast must be above 0, saturation, blur and noise at "
                f"least 0, zoom 1 to {2 * MAX_ZOOM:g}, rotation within {MAX_ROTATION:g} degrees."
            )


def sample_change(rng: np.random.Generator) -> Change:
    """A random change in everything."""
    return Change(
        brightness=math.exp(rng.uniform(math.log(0.6), math.log(1.3))),
        warmth=float(rng.uniform(-1, 1)),
        contrast=math.exp(rng.uniform(math.log(0.5), math.log(1.5))),
        saturation=float(rng.uniform(0.1, 1.7)),
        blur=float(rng.choice([0.0, 1.0]) * rng.uniform(0.006, 0.02)),
        noise=float(rng.choice([0.0, 1.0]) * rng.uniform(0.04, 0.1)),
        noise_seed=int(rng.integers(2**31)),
        zoom=math.exp(rng.uniform(0.0, math.log(MAX_ZOOM))),
        rotation=float(rng.uniform(-MAX_ROTATION, MAX_ROTATION)),
        mirror=bool(rng.random() < 0.5),
    )


def jitter(change: Change, rng: np.random.Generator) -> Change:
    """Differences too small to count, so that no two images of a triplet are equal."""
    rotation = float(np.clip(change.rotation + rng.normal(0, 0.6), -MAX_ROTATION, MAX_ROTATION))
    return replace(
        change,
        brightness=change.brightness * math.exp(rng.normal(0, 0.012)),
        warmth=change.warmth + float(rng.normal(0, 0.03)),
        contrast=change.contrast * math.exp(rng.normal(0, 0.015)),
        saturation=max(0.0, change.saturation + float(rng.normal(0, 0.015))),
        noise_seed=int(rng.integers(2**31)),
        zoom=max(1.0, change.zoom * math.exp(rng.normal(0, 0.008))),
        rotation=rotation,
    )


def _log_ratio(name: str, step: float) -> Callable[[Change, Change], float]:
    return lambda a, b: abs(math.log(getattr(a, name) / getattr(b, name))) / step


def _difference(name: str, step: float) -> Callable[[Change, Change], float]:
    return lambda a, b: abs(getattr(a, name) - getattr(b, name)) / step


_PARTS: dict[str, tuple[Callable[[Change, Change], float], str]] = {
    "brightness": (_log_ratio("brightness", 0.18), "brightness"),
    "warmth": (_difference("warmth", 0.5), "warmth"),
    "contrast": (_log_ratio("contrast", 0.25), "contrast"),
    "saturation": (_difference("saturation", 0.4), "saturation"),
    "sharpness": (_difference("blur", 0.005), "blur"),
    "noise": (_difference("noise", 0.03), "noise"),
    "zoom": (_log_ratio("zoom", 0.17), "zoom"),
    "tilt": (_difference("rotation", 7.0), "rotation"),
    "mirroring": (lambda a, b: 2.0 * (a.mirror != b.mirror), "mirror"),
}
#: Aspects that people name as one thing although several parameters make it.
_WHOLES: dict[str, tuple[str, ...]] = {
    "lighting": ("brightness", "warmth"),
    "image quality": ("sharpness", "noise"),
    "composition": ("zoom", "tilt", "mirroring"),
    "overall": tuple(_PARTS),
}
PHOTO_PARTS: tuple[str, ...] = tuple(_PARTS)
PHOTO_WHOLES: tuple[str, ...] = tuple(_WHOLES)
PHOTO_ASPECTS: tuple[str, ...] = (*PHOTO_PARTS, *PHOTO_WHOLES)


def photo_distance(name: str, a: Change, b: Change) -> float:
    """How different two changes of one photograph are in an aspect, in visible steps.

    Raises:
        TPIPSError: when the aspect is not one of :data:`PHOTO_ASPECTS`.
    """
    if name in _PARTS:
        return float(_PARTS[name][0](a, b))
    if name in _WHOLES:
        return math.sqrt(sum(min(photo_distance(part, a, b), 3.0) ** 2 for part in _WHOLES[name]))
    raise TPIPSError(f"No aspect of photographs is called {name!r}; there are {', '.join(PHOTO_ASPECTS)}.")


def with_part_of(change: Change, donor: Change, part: str) -> Change:
    """``change`` with one part's parameter taken from ``donor``."""
    parameter = _PARTS[part][1]
    return replace(change, **{parameter: getattr(donor, parameter)})


_FRAMES = ("{a}", "the {a}", "{a} of the image", "the image's {a}", "{a} of the photo", "photo {a}", "image {a}",
           "picture {a}", "{a} of the picture", "overall {a}")  # fmt: skip
_WORDS: dict[str, tuple[str, ...]] = {
    "contrast": ("contrast", "tonal range", "contrast level", "tonal contrast"),
    "saturation": ("saturation", "color saturation", "colorfulness", "color intensity", "vividness"),
    "noise": ("noise", "grain", "graininess", "film grain", "noise level"),
    "zoom": ("zoom", "crop", "framing", "zoom level", "framing tightness", "camera distance"),
    "tilt": ("tilt", "rotation", "camera tilt", "horizon tilt", "camera roll", "orientation"),
    "mirroring": ("mirroring", "left right orientation", "horizontal flip", "mirror flip", "facing direction"),
    "image quality": ("image quality", "quality", "technical quality", "fidelity"),
    "composition": ("composition", "framing and orientation", "camera viewpoint", "camera view"),
}


@cache
def photo_wordings(name: str, split: str = "train") -> tuple[str, ...]:
    """The phrases in which an aspect of photographs is named, as `tpips_reward.scenes.wordings`: those of "test"
    never occur in "train", whose first is the plain name."""
    if name in ASPECTS:
        return wordings(name, split)
    if name not in _WORDS:
        raise TPIPSError(f"No aspect of photographs is called {name!r}; there are {', '.join(PHOTO_ASPECTS)}.")
    if split not in ("train", "test"):
        raise TPIPSError(f"Wordings have the splits 'train' and 'test', not {split!r}.")
    phrases = dict.fromkeys(frame.format(a=word) for word in _WORDS[name] for frame in _FRAMES)
    held_out = {p for p in phrases if zlib.crc32(p.encode()) % 4 == 0 and p not in _WORDS[name]}
    if split == "test":
        return tuple(p for p in phrases if p in held_out)
    return (name, *(p for p in phrases if p not in held_out and p != name))


def framing_scale(width: int, height: int) -> float:
    """Share of a photograph's sides that fits into it at every angle up to :data:`MAX_ROTATION`."""
    angle = math.radians(MAX_ROTATION)
    return 1 / (max(width, height) / min(width, height) * math.sin(angle) + math.cos(angle))


def apply_change(photo: Image.Image, change: Change, size: int = 128) -> np.ndarray:
    """The changed photograph, in its own aspect ratio.

    Args:
        photo: RGB.
        change: what to do.
        size: the shorter side in pixels.

    Returns:
        (H, W, 3) uint8; the same for the same arguments.
    """
    pixels = _framed(photo, change, size)
    if change.blur * size > 0.05:
        pixels = pixels.filter(ImageFilter.GaussianBlur(change.blur * size))
    image = np.asarray(pixels, np.float32) / np.float32(255)
    gray = (image @ _LUMA)[..., None]
    image = gray + np.float32(change.saturation) * (image - gray)
    middle = gray.mean(dtype=np.float64).astype(np.float32)
    image = middle + np.float32(change.contrast) * (image - middle)
    light = np.array([1 + 0.16 * change.warmth, 1.0, 1 - 0.22 * change.warmth], np.float32)
    image = image * (change.brightness * light)
    if change.noise > 0:
        noise = np.random.default_rng(change.noise_seed).normal(0, change.noise, image.shape)
        image = np.clip(image, 0, 1) + noise.astype(np.float32)
    return np.clip(np.rint(np.clip(image, 0, 1) * 255), 0, 255).astype(np.uint8)


def _framed(photo: Image.Image, change: Change, size: int) -> Image.Image:
    """Crop, rotation and mirroring in one resampling at twice the size, then averaged down."""
    scale = size / min(photo.size)
    width, height = (max(1, round(side * scale)) for side in photo.size)
    canvas = (_SUPERSAMPLE * width, _SUPERSAMPLE * height)
    share = framing_scale(*photo.size) / change.zoom
    # Source pixels a canvas pixel; above 1 the photograph is averaged first, since the resampling would skip pixels.
    step = photo.width * share / canvas[0]
    if step >= 2:
        photo = photo.reduce(int(step))
    across, down = photo.width * share / canvas[0], photo.height * share / canvas[1]
    angle = math.radians(change.rotation)
    flip = -1.0 if change.mirror else 1.0
    a, b = flip * math.cos(angle) * across, -flip * math.sin(angle) * down
    d, e = math.sin(angle) * across, math.cos(angle) * down
    middle = (canvas[0] / 2, canvas[1] / 2)
    c = photo.width / 2 - a * middle[0] - b * middle[1]
    f = photo.height / 2 - d * middle[0] - e * middle[1]
    turned = photo.transform(canvas, Image.Transform.AFFINE, (a, b, c, d, e, f), resample=Image.Resampling.BICUBIC)
    return turned.reduce(_SUPERSAMPLE)
