"""Scene → pixels: polygons drawn at four times the size, then texture, pattern, light and blur in float32."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from PIL import Image, ImageDraw

from tpips_reward.scenes.scene import Scene

_SUPERSAMPLE = 4
#: How far the members of a group stand from its center, and how much smaller each is, by count.
_GROUP_LAYOUT: dict[int, tuple[list[tuple[float, float]], float]] = {
    1: ([(0.0, 0.0)], 1.0),
    2: ([(-1.05, 0.0), (1.05, 0.0)], 0.68),
    3: ([(-1.0, 0.75), (1.0, 0.75), (0.0, -0.95)], 0.58),
}


def _unit_polygon(shape: str) -> np.ndarray:
    """Outline of a shape around the origin, upright, scaled to the area of the unit circle; (N, 2), y down."""
    if shape == "circle":
        angles = np.linspace(0, 2 * math.pi, 64, endpoint=False)
        points = np.stack([np.cos(angles), np.sin(angles)], 1)
    elif shape == "square":
        points = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], float)
    elif shape == "triangle":
        angles = np.deg2rad([-90, 30, 150])
        points = np.stack([np.cos(angles), np.sin(angles)], 1)
    elif shape == "star":
        angles = np.deg2rad(-90 + 36 * np.arange(10))
        radius = np.where(np.arange(10) % 2 == 0, 1.0, 0.45)
        points = radius[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
    elif shape == "cross":
        w = 0.36
        points = np.array(
            [[-w, -1], [w, -1], [w, -w], [1, -w], [1, w], [w, w], [w, 1], [-w, 1], [-w, w], [-1, w], [-1, -w], [-w, -w]]
        )
    else:  # arrow, pointing up
        points = np.array([[0, -1], [0.85, -0.05], [0.36, -0.05], [0.36, 1], [-0.36, 1], [-0.36, -0.05], [-0.85, -0.05]])
    x, y = points[:, 0], points[:, 1]
    area = 0.5 * abs(float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))))
    return points * math.sqrt(math.pi / area)


_POLYGONS = {shape: _unit_polygon(shape) for shape in ("circle", "square", "triangle", "star", "cross", "arrow")}


@lru_cache(maxsize=32)
def _pattern(name: str, size: int, periods: float) -> np.ndarray:
    """A pattern in [-1, 1] over the image, (size, size) float32, with ``periods`` repetitions along a side."""
    v, u = np.meshgrid(*(2 * [(np.arange(size) + 0.5) / size]), indexing="ij")
    if name == "stripes":
        out = np.sin(2 * math.pi * periods * (u + v) / 1.4142)
    elif name == "dots":
        out = 1.6 * np.cos(2 * math.pi * periods * u) * np.cos(2 * math.pi * periods * v) - 0.6
        out = np.clip(3 * out, -1, 1)
        return out.astype(np.float32)
    elif name == "checker":
        out = np.sin(math.pi * periods * u) * np.sin(math.pi * periods * v)
    elif name == "gradient":
        return (2 * v - 1).astype(np.float32)
    else:
        return np.zeros((size, size), np.float32)
    # A soft square wave: hard edges would alias at small sizes.
    return np.clip(4 * out, -1, 1).astype(np.float32)


def object_mask(scene: Scene, size: int = 64) -> np.ndarray:
    """Coverage of each pixel by the object(s), before blur.

    Returns:
        (size, size) float32 in [0, 1].
    """
    big = size * _SUPERSAMPLE
    canvas = Image.new("L", (big, big), 0)
    draw = ImageDraw.Draw(canvas)
    offsets, scale = _GROUP_LAYOUT[scene.count]
    angle = -math.radians(scene.rotation)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    radius = scene.size * scale
    outline = _POLYGONS[scene.shape] @ turn.T * radius
    for dx, dy in offsets:
        points = (outline + [scene.x + dx * radius, scene.y + dy * radius]) * big
        draw.polygon([(float(px), float(py)) for px, py in points], fill=255)
    small = np.asarray(canvas, np.float32).reshape(size, _SUPERSAMPLE, size, _SUPERSAMPLE)
    return small.mean((1, 3)) / np.float32(255.0)


def _blur(image: np.ndarray, sigma: float) -> np.ndarray:
    """Separable Gaussian blur with ``sigma`` in pixels, weights renormalised at the edges; (S, S, 3) float32."""
    pixels = np.arange(image.shape[0])
    taps = np.exp(-0.5 * ((pixels[:, None] - pixels[None]) / sigma) ** 2)
    taps = (taps / taps.sum(1, keepdims=True)).astype(np.float32)
    rows = np.tensordot(taps, image, axes=(1, 0))
    return np.tensordot(taps, rows, axes=(1, 1)).transpose(1, 0, 2)


def render(scene: Scene, size: int = 64) -> np.ndarray:
    """The scene as an image.

    Args:
        scene: what to draw.
        size: side in pixels.

    Returns:
        (size, size, 3) uint8.
    """
    background = np.asarray(scene.background_color, np.float32) + 0.13 * _pattern(
        scene.background_pattern, size, 5.0
    )[..., None] * np.ones(3, np.float32)
    # The object's pattern is multiplicative and finer, so that it stays visible on any color.
    texture = 1.0 - 0.28 * (1.0 - _pattern(scene.texture, size, 9.0)) * (scene.texture != "plain")
    obj = np.asarray(scene.color, np.float32) * texture[..., None]
    mask = object_mask(scene, size)[..., None]
    image = background * (1 - mask) + obj * mask
    light = scene.brightness * np.array([1 + 0.16 * scene.warmth, 1.0, 1 - 0.22 * scene.warmth], np.float32)
    image = np.clip(image * light, 0.0, 1.0).astype(np.float32)
    if scene.blur * size > 0.05:
        image = _blur(image, scene.blur * size)
    return np.clip(np.rint(image * 255.0), 0, 255).astype(np.uint8)


def to_tensor(image: np.ndarray) -> torch.Tensor:
    """(H, W, 3) uint8 → (3, H, W) float32 in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).float() / 255.0
