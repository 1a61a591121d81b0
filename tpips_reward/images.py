"""Every accepted image -> float tensors (3, H, W) in [0, 1].

Accepted: PIL images of any mode; arrays (H, W), (H, W, C), (C, H, W) or a batch of them; tensors (C, H, W) or
(B, C, H, W); lists and tuples that mix these and their sizes. Paths are not: opening a file is the caller's business.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from tpips_reward.errors import TPIPSError
from tpips_reward.preprocess import check_aspect_ratio

MAX_PIXELS = 100_000_000
RANGE_TOLERANCE = 1e-3
_CHANNELS = (1, 2, 3, 4)


def to_tensors(
    images: Any, *, value_range: tuple[float, float] = (0.0, 1.0), alpha: str = "white", name: str = "images"
) -> list[Tensor]:
    """Convert an image, a batch or a list to (3, H, W) float tensors in [0, 1], one per image.

    Float tensors keep their graph, their device and (float32 or float64) their dtype. The same object given several
    times gives one tensor object several times, so that it can be encoded once.

    Args:
        images: see the module's docstring.
        value_range: lowest and highest value of float images. Integer images have their dtype's own range.
        alpha: "white" composites transparent images on white, "drop" ignores the alpha channel.
        name: what an error calls the argument, or the image where it is only one.

    Raises:
        TPIPSError: an unknown type, shape or dtype; no images; NaN or infinite values; values more than 1e-3 of the
            range outside it; a side more than 200 times the other; more than 100 million pixels; an unreadable file.
    """
    lowest, highest = _checked_range(value_range)
    if alpha not in ("white", "drop"):
        raise TPIPSError(f"alpha must be 'white' (composite on white) or 'drop' (ignore it), got {alpha!r}.")
    items = _items(images, name)
    if not items:
        raise TPIPSError(f"{name} holds no image; give at least one.")
    converted: dict[int, Tensor] = {}
    results = []
    for index, item in enumerate(items):
        if id(item) not in converted:
            label = name if is_single(images) else f"{name}[{index}]"
            pixels = _planes(item, label)
            converted[id(item)] = _rgb(_scaled(pixels, lowest, highest, label), alpha)
        results.append(converted[id(item)])
    return results


def is_single(images: Any) -> bool:
    """Whether `images` is one image and not a batch or a list."""
    return isinstance(images, Image.Image) or (isinstance(images, np.ndarray | Tensor) and images.ndim in (2, 3))


def distinct_images(images: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Images without repetitions, and for each given one its position among them.

    Equal pixels are one image. Where a gradient is wanted only the very same tensor object is, since equal pixels may
    come from different graphs.
    """
    unique: list[Tensor] = []
    position: list[int] = []
    seen: dict[int, int] = {}
    alike: dict[tuple[Any, ...], list[int]] = {}
    for image in images:
        found = seen.get(id(image))
        if found is None and not image.requires_grad:
            # rounded: the sum of equal pixels differs in its last digits between memory layouts
            key = (image.shape, image.dtype, image.device, round(float(image.sum(dtype=torch.float64)), 3))
            found = next((index for index in alike.get(key, []) if torch.equal(unique[index], image)), None)
            if found is None:
                alike.setdefault(key, []).append(len(unique))
        if found is None:
            found = len(unique)
            unique.append(image)
        seen[id(image)] = found
        position.append(found)
    return unique, position


def _checked_range(value_range: Any) -> tuple[float, float]:
    try:
        lowest, highest = (float(value) for value in value_range)
    except (TypeError, ValueError):
        raise TPIPSError(f"value_range must be two numbers such as (0, 1) or (-1, 1), got {value_range!r}.") from None
    if not (np.isfinite(lowest) and np.isfinite(highest) and lowest < highest):
        raise TPIPSError(f"value_range must be finite and rising, such as (0, 1) or (-1, 1), got {value_range!r}.")
    return lowest, highest


def _items(images: Any, name: str) -> list[Any]:
    if is_single(images):
        return [images]
    if isinstance(images, Tensor | np.ndarray):
        if images.ndim == 4:
            return list(images)
        raise TPIPSError(f"{name} has shape {tuple(images.shape)}; give (C, H, W), or a batch with one dimension more.")
    if isinstance(images, list | tuple):
        for index, item in enumerate(images):
            if isinstance(item, Tensor | np.ndarray) and item.ndim not in (2, 3):
                raise TPIPSError(f"{name}[{index}] has shape {tuple(item.shape)}; give (C, H, W), (H, W, C) or (H, W).")
        return list(images)
    raise TPIPSError(
        f"{name} is of type {type(images).__name__}; give PIL images, arrays, tensors or a list of them"
        + _path_hint(images)
    )


def _path_hint(item: Any) -> str:
    is_path = isinstance(item, str) or hasattr(item, "__fspath__")
    return "; open the file first, with PIL.Image.open." if is_path else "."


def _planes(item: Any, label: str) -> Tensor:
    """Any single image -> (C, H, W) tensor of its own dtype, C in 1...4, size checked."""
    if isinstance(item, Image.Image):
        check_size(item.height, item.width, label)
        item = _pil_array(item, label)
    if isinstance(item, np.ndarray):
        if isinstance(item, np.ma.MaskedArray):
            raise TPIPSError(f"{label} is a masked array; give its hidden pixels a value first, with .filled(...).")
        if item.dtype.kind not in "buif" or item.dtype.itemsize > 8:
            raise TPIPSError(f"{label} is an array of dtype {item.dtype}; give uint8, uint16 or floats.")
        planes = _channels_first(item, label)
        native = planes.astype(planes.dtype.newbyteorder("="), copy=False)
        item = torch.from_numpy(np.require(native, requirements=["C", "W"]))  # torch warns of read-only memory
    elif not isinstance(item, Tensor):
        raise TPIPSError(
            f"{label} is of type {type(item).__name__}; give a PIL image, an array or a tensor{_path_hint(item)}"
        )
    elif item.is_meta or item.is_nested or item.layout != torch.strided:
        what = "on the meta device" if item.is_meta else "that is nested" if item.is_nested else f"of layout {item.layout}"
        raise TPIPSError(f"{label} is a tensor {what}; give a dense tensor that holds pixels.")
    pixels = item.unsqueeze(0) if item.ndim == 2 else item
    if pixels.shape[0] not in _CHANNELS:
        raise TPIPSError(
            f"{label} is a tensor of shape {tuple(item.shape)}; tensors are (C, H, W) with 1 to 4 channels "
            "(permute(2, 0, 1) turns (H, W, C) into that)."
        )
    check_size(pixels.shape[1], pixels.shape[2], label)
    return pixels


def check_size(height: int, width: int, label: str) -> None:
    """Refuses a size that no metric takes.

    Raises:
        TPIPSError: no pixels, more than 100 million, or a side more than 200 times the other; it names image, size, limit
            and remedy.
    """
    if height < 1 or width < 1:
        raise TPIPSError(f"{label} is empty: {width}x{height} pixels.")
    if height * width > MAX_PIXELS:
        raise TPIPSError(
            f"{label} has {width}x{height} pixels, over the limit of {MAX_PIXELS // 10**6} million; make it smaller."
        )
    check_aspect_ratio(height, width, label)


def _channels_first(array: np.ndarray, label: str) -> np.ndarray:
    """(H, W), (H, W, C) or (C, H, W) -> (C, H, W); where both readings are possible, channels come last."""
    if array.ndim == 2:
        return array[None]
    if array.shape[2] in _CHANNELS:
        return array.transpose(2, 0, 1)
    if array.shape[0] in _CHANNELS:
        return array
    raise TPIPSError(
        f"{label} is an array of shape {array.shape}; give (H, W), (H, W, C) or (C, H, W) with 1 to 4 channels."
    )


def _pil_array(image: Image.Image, label: str) -> np.ndarray:
    """A PIL image, turned upright -> an array with 1 to 4 channels, alpha last where there is any."""
    file = " ".join(filter(None, ("the file", str(getattr(image, "filename", "")))))
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # convert("RGB") would clip these to 255
            return np.asarray(image).astype(np.uint16)
        if image.mode == "I":
            values = np.asarray(image)
            if values.min() < 0 or values.max() > 65535:
                raise TPIPSError(f"{label} has mode 'I' and values outside 0...65535; convert it to 16 bits first.")
            return values.astype(np.uint16)
        if image.mode == "F":
            return np.asarray(image)
        transparent = image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info
        if image.mode in ("La", "PA"):  # Pillow has no direct way from these to RGBA in every version
            image = image.convert("LA" if image.mode == "La" else "RGBA")
        return np.asarray(image.convert("RGBA" if transparent else "RGB"))
    except TPIPSError:
        raise
    except Exception as error:  # EXIF alone has struct.error, TypeError, AttributeError ...
        raise TPIPSError(f"{label} cannot be read ({error}); {file} may be truncated or no image.") from error


def _scaled(pixels: Tensor, lowest: float, highest: float, label: str) -> Tensor:
    """Values of any dtype -> floats in [0, 1]."""
    full = {torch.uint8: 255.0, torch.uint16: 65535.0, torch.bool: 1.0}.get(pixels.dtype)
    if full is not None:
        return pixels.to(torch.float32) / full
    if not pixels.dtype.is_floating_point:
        raise TPIPSError(f"{label} has dtype {pixels.dtype}; give uint8, uint16 or floats.")
    values = pixels if pixels.dtype in (torch.float32, torch.float64) else pixels.to(torch.float32)
    smallest, largest = (float(value) for value in torch.aminmax(values.detach()))
    if not (np.isfinite(smallest) and np.isfinite(largest)):
        raise TPIPSError(f"{label} holds NaN or infinite pixels; no score can be made of it.")
    slack = RANGE_TOLERANCE * (highest - lowest)
    if smallest < lowest - slack or largest > highest + slack:
        raise TPIPSError(
            f"{label} has values from {smallest:.4g} to {largest:.4g}, outside value_range=({lowest:g}, {highest:g}); "
            f"{_range_remedy(smallest, largest, lowest, highest)}"
        )
    if (lowest, highest) != (0.0, 1.0):
        values = (values - lowest) / (highest - lowest)
    return values.clamp(0, 1) if smallest < lowest or largest > highest else values


def _range_remedy(smallest: float, largest: float, lowest: float, highest: float) -> str:
    """A range is only named where the values leave little doubt: read in a wrong one they would give a wrong score."""
    near = 0.1 * (highest - lowest)
    if (lowest, highest) != (-1, 1) and -1.1 <= smallest < -0.1 and largest <= 1.1:
        return "pass value_range=(-1, 1) if that is what they mean, or clamp them."
    if smallest >= lowest - near and largest <= highest + near:
        return "they are nearly inside it: clamp them."
    if smallest >= 0 and 16 < largest <= 256:
        return "pass value_range=(0, 255), or give uint8."
    return "rescale them, or pass the value_range that they are in; clamp what lies outside it."


def _rgb(channels: Tensor, alpha: str) -> Tensor:
    """(1, 2, 3 or 4, H, W) in [0, 1] -> (3, H, W): gray expanded, alpha on white or dropped."""
    count = channels.shape[0]
    color, opacity = (channels[:-1], channels[-1:]) if count in (2, 4) else (channels, None)
    if opacity is not None and alpha == "white":
        color = color * opacity + (1 - opacity)
    return color if color.shape[0] == 3 else color.expand(3, -1, -1)
