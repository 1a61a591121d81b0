"""How good an edit is, from the known scenes alone: an independent judge of runs that optimise the metric."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from tpips_reward.errors import TPIPSError
from tpips_reward.scenes.edits import Edit
from tpips_reward.scenes.render import object_mask, render

#: A pixel was to change where source and ideal differ by more than this in any channel (0 to 1).
_CHANGED = 0.03
#: A region smaller than this (pixels) says nothing about drift.
_MIN_REGION = 12
#: The object is lost when fewer than this share of its ideal pixels look like it.
_FOUND = 0.3
#: An output is a copy when it went less than this share of the way from the source to the ideal.
_COPIED = 0.2


@dataclass(frozen=True)
class EditMeasures:
    """The measures of one edited image.

    Attributes:
        success: the target attribute came out nearer to the instructed value than to the source's.
        drift: mean absolute difference to the ideal outside what was to change, object and background weighted equally
            (0 to 1; NaN where an edit changes both everywhere).
        object_lost: the object cannot be found where the ideal edit has it.
        l1_to_ideal: mean absolute difference to the ideal over the whole image (0 to 1).
        copied: what was to change still looks like the source.
    """

    success: bool
    drift: float
    object_lost: bool
    l1_to_ideal: float
    copied: bool


def _as_array(image: torch.Tensor | np.ndarray) -> np.ndarray:
    array = image.detach().cpu().float().numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    if array.dtype == np.uint8:
        array = array.transpose(2, 0, 1).astype(np.float32) / 255.0
    if array.ndim != 3 or array.shape[0] != 3 or array.shape[1] != array.shape[2]:
        raise TPIPSError(
            f"measure_edit needs one square image, (3, S, S) float in [0, 1] or (S, S, 3) uint8; got shape {array.shape}."
        )
    if not np.isfinite(array).all():
        raise TPIPSError("measure_edit got an image with NaN or infinite pixels.")
    return array.astype(np.float32)


def _rendered(edit: Edit, size: int, which: str) -> np.ndarray:
    return render(getattr(edit, which), size).transpose(2, 0, 1).astype(np.float32) / 255.0


def _object_pixels(edit: Edit, image: np.ndarray, source: np.ndarray, ideal: np.ndarray) -> np.ndarray:
    """Where the image looks like the object: nearer to its old or new look than to the background's; (S, S) bool."""
    size = image.shape[-1]
    masks = {name: object_mask(getattr(edit, name), size) > 0.6 for name in ("source", "ideal")}
    looks = [ref[:, m].reshape(3, -1).mean(1) for ref, m in ((source, masks["source"]), (ideal, masks["ideal"])) if m.any()]
    # Textured objects have two tones; both count as the object.
    tones = [t for look in looks for t in (look, look * 1.25, look * 0.75)]
    to_object = np.min([np.abs(image - t[:, None, None]).mean(0) for t in tones], 0)
    to_background = np.min([np.abs(image - b).mean(0) for b in _backgrounds(edit, size)], 0)
    return to_object < to_background


def _backgrounds(edit: Edit, size: int) -> list[np.ndarray]:
    """The old and the new background without the object, as images (3, S, S)."""
    # A speck in a corner stands for "no object": scenes always have one.
    empty = [replace(s, size=1e-3, x=0.0, y=0.0) for s in (edit.source, edit.ideal)]
    return [render(s, size).transpose(2, 0, 1).astype(np.float32) / 255.0 for s in empty]


def _iou(a: np.ndarray, b: np.ndarray) -> float:
    union = np.logical_or(a, b).sum()
    return float(np.logical_and(a, b).sum() / union) if union else 0.0


def _succeeded(edit: Edit, image: np.ndarray, source: np.ndarray, ideal: np.ndarray, found: np.ndarray) -> bool:
    size = image.shape[-1]
    mask = object_mask(edit.ideal, size)
    if edit.kind in ("shape", "size", "position"):
        new, old = mask > 0.5, object_mask(edit.source, size) > 0.5
        return _iou(found, new) > _iou(found, old)
    region = mask > 0.9 if edit.kind == "color" else mask < 0.1
    mean = image[:, region].mean(1)
    return bool(np.abs(mean - ideal[:, region].mean(1)).mean() < np.abs(mean - source[:, region].mean(1)).mean())


def measure_edit(edit: Edit, image: torch.Tensor | np.ndarray) -> EditMeasures:
    """Measures one edited image against the known scenes of its edit.

    Args:
        edit: the edit that was asked for.
        image: (3, S, S) float in [0, 1], or (S, S, 3) uint8.

    Raises:
        TPIPSError: when the image is not one square image of finite pixels.
    """
    array = _as_array(image)
    size = array.shape[-1]
    source, ideal = _rendered(edit, size, "source"), _rendered(edit, size, "ideal")
    difference = np.abs(array - ideal).mean(0)
    changed = np.abs(ideal - source).max(0) > _CHANGED
    is_object = object_mask(edit.ideal, size) > 0.5
    regions = [r for r in (is_object & ~changed, ~is_object & ~changed) if r.sum() >= _MIN_REGION]
    drift = float(np.mean([difference[r].mean() for r in regions])) if regions else float("nan")
    found = _object_pixels(edit, array, source, ideal)
    way = np.abs(ideal - source).mean(0)[changed].mean() if changed.any() else 0.0
    moved = np.abs(array - source).mean(0)[changed].mean() if changed.any() else 0.0
    return EditMeasures(
        success=_succeeded(edit, array, source, ideal, found),
        drift=drift,
        object_lost=bool(found[is_object].mean() < _FOUND),
        l1_to_ideal=float(difference.mean()),
        copied=bool(moved < _COPIED * way),
    )
