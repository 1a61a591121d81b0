"""Differentiable preprocessing: float images in [0, 1] -> the flat patches that a Qwen3-VL vision tower reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpips_reward.errors import TPIPSError

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class ImageSettings:
    """What of a processor's config decides the pixels that the vision tower sees.

    `min_pixels` and `max_pixels` are the config's `size.shortest_edge` and `size.longest_edge`.
    """

    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @classmethod
    def from_processor(cls, processor: Any) -> ImageSettings:
        """Read from a transformers processor, an image processor, or the dict of its config file.

        Raises:
            TPIPSError: a field is missing.
        """
        if isinstance(processor, ImageSettings):
            return processor
        config = processor
        if hasattr(config, "image_processor"):
            config = config.image_processor
        if not isinstance(config, Mapping):
            config = config.to_dict()
        config = config.get("image_processor", config)
        try:
            size = config.get("size") or {}
            size = {  # the older names win where a file has them, as in transformers
                "shortest_edge": config.get("min_pixels") or size.get("shortest_edge"),
                "longest_edge": config.get("max_pixels") or size.get("longest_edge"),
            }
            return cls(
                patch_size=int(config["patch_size"]),
                merge_size=int(config["merge_size"]),
                temporal_patch_size=int(config["temporal_patch_size"]),
                min_pixels=int(size["shortest_edge"]),
                max_pixels=int(size["longest_edge"]),
                mean=tuple(float(v) for v in config["image_mean"]),  # type: ignore[arg-type]
                std=tuple(float(v) for v in config["image_std"]),  # type: ignore[arg-type]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TPIPSError(
                f"The processor's config lacks {error} or has no number there: patch_size, merge_size, temporal_patch_size, image_mean, "
                "image_std, size.shortest_edge and size.longest_edge are needed."
            ) from error

    def __post_init__(self) -> None:
        whole = (self.patch_size, self.merge_size, self.temporal_patch_size, self.min_pixels, self.max_pixels)
        if min(whole) < 1 or self.max_pixels < self.min_pixels:
            raise TPIPSError(
                f"The processor's sizes are patch {whole[0]}, merge {whole[1]}, temporal patch {whole[2]} and "
                f"{whole[3]} to {whole[4]} pixels; they must be positive, and the limits in order."
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise TPIPSError(
                f"The processor's image_mean {self.mean} and image_std {self.std} need three numbers each, the latter "
                "above 0."
            )

    def to_config(self) -> dict[str, Any]:
        """The fields in the form of a preprocessor_config.json."""
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "temporal_patch_size": self.temporal_patch_size,
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }

    @property
    def factor(self) -> int:
        """Both sides of a resized image are multiples of this."""
        return self.patch_size * self.merge_size


def check_aspect_ratio(height: int, width: int, label: str = "an image") -> None:
    """Refuse what the processor refuses, with a message that names the image."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise TPIPSError(
            f"{label} has {width}x{height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other; crop it."
        )


def target_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """The size an image is resized to: multiples of patch x merge, pixel count inside the limits, shape nearly kept.

    Raises:
        TPIPSError: one side is more than 200 times the other.
    """
    check_aspect_ratio(height, width)
    factor, area = settings.factor, height * width
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > settings.max_pixels:
        shrink = math.sqrt(area / settings.max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / area)
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    if min(rows, columns) < factor:
        # only possible where min_pixels is tiny: rounding gave a side of zero
        rows, columns = max(rows, factor), max(columns, factor)
    return rows, columns


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic with antialiasing on floats, (B, 3, H, W) -> (B, 3, *size); not clamped, so gradients are never cut."""
    if tuple(images.shape[-2:]) == size:
        return images
    return F.interpolate(images, size=size, mode="bicubic", antialias=True, align_corners=False)


def patchify(images: Tensor, settings: ImageSettings) -> Tensor:
    """(B, 3, H, W) -> (B, patches, 3 * temporal * patch * patch); the patches of a merge block follow one another."""
    batch, channels, height, width = images.shape
    patch, merge = settings.patch_size, settings.merge_size
    rows, columns = height // (patch * merge), width // (patch * merge)
    blocks = images.reshape(batch, channels, rows, merge, patch, columns, merge, patch)
    blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
    # a still image is a clip whose frames are all equal
    frames = blocks.expand(*blocks.shape[:6], settings.temporal_patch_size, patch, patch)
    return frames.reshape(batch, rows * columns * merge * merge, -1)


def to_patches(images: list[Tensor], settings: ImageSettings) -> list[tuple[Tensor, tuple[int, int]]]:
    """Each (3, H, W) float image in [0, 1] -> (its patches, its patch grid (rows, columns)).

    Images of equal size go through together. bfloat16 input is computed in float32; float64 stays float64.
    """
    results: dict[int, tuple[Tensor, tuple[int, int]]] = {}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault((image.shape, image.dtype, image.device), []).append(index)
    for (shape, dtype, device), members in groups.items():
        size = target_size(shape[-2], shape[-1], settings)
        work = dtype if dtype == torch.float64 else torch.float32
        batch = resize(torch.stack([images[index] for index in members]).to(work), size)
        mean = torch.tensor(settings.mean, dtype=work, device=device).view(1, 3, 1, 1)
        std = torch.tensor(settings.std, dtype=work, device=device).view(1, 3, 1, 1)
        patches = patchify((batch - mean) / std, settings)
        grid = (size[0] // settings.patch_size, size[1] // settings.patch_size)
        results.update({index: (patches[row], grid) for row, index in enumerate(members)})
    return [results[index] for index in range(len(images))]
