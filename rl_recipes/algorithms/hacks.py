"""Signs in the edits themselves that a reward is being fooled: copies, black, flat or noisy images, grids and blur.

Images are (B, 3, H, W), or a list of (3, H, W) whose sizes may differ; floats in [0, 1]. Nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpips_reward.errors import TPIPSError

#: Rec. 601 luma.
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Degenerate:
    """Which images are no images any more, (B,) bool each.

    Attributes:
        black: the mean luminance is nearly zero.
        flat: hardly any pixel differs from the mean, whatever its color; most black images are flat too.
        noise: neighbouring pixels have as little in common as distant ones.
    """

    black: Tensor
    flat: Tensor
    noise: Tensor

    def any(self) -> Tensor:
        """(B,) bool: one of the three."""
        return self.black | self.flat | self.noise


def edge_density(images: Tensor | Sequence[Tensor], *, threshold: float = 0.1) -> Tensor:
    """Share of pixels where the luminance rises or falls by more than `threshold` to the next pixel; (B,) float32.

    sqrt(dx^2 + dy^2) of forward differences: unlike central ones they see a grid that alternates at every pixel. A mean
    that grows over a run means grid artefacts or noise, one that falls means blur or a vanishing background.
    """

    def one(image: Tensor) -> Tensor:
        luma = _luma(image)
        corner = luma[:-1, :-1]
        return (
            ((luma[:-1, 1:] - corner).square() + (luma[1:, :-1] - corner).square()).sqrt().gt(threshold).float().mean()
        )

    return _each(one, images)


def degenerate(
    images: Tensor | Sequence[Tensor], *, black: float = 0.03, flat: float = 0.02, noise: float = 0.5
) -> Degenerate:
    """Finds black, flat and noisy images.

    Args:
        black: highest mean luminance of a black image.
        flat: highest standard deviation over the pixels, in the channel where it is largest, of a flat image.
        noise: lowest ratio of noise: the mean squared difference of neighbouring pixels by twice the variance. It is 1
            for white noise (von Neumann) and far lower for pictures. Noise that a decoder has smoothed to blotches is
            not found by it.
    """
    mean = _each(lambda image: _luma(image).mean(), images)
    spread = _each(lambda image: image.flatten(1).std(dim=1, correction=0).max(), images)
    ratio = _each(_neighbour_ratio, images)
    is_flat = spread < flat
    return Degenerate(mean < black, is_flat, (ratio > noise) & ~is_flat)


def largest_change(edits: Tensor | Sequence[Tensor], sources: Tensor | Sequence[Tensor], *, cells: int = 8) -> Tensor:
    """Mean absolute difference of edit and source in the cell where it is largest; (B,) float32.

    The image is cut into `cells` x `cells` cells: a small object that changes shows in its own cell, where the mean over
    the whole image would drown it among the errors of an autoencoder.
    """
    if len(edits) != len(sources):
        raise TPIPSError(f"There must be one source for each edit, but there are {len(edits)} and {len(sources)}.")
    if not len(edits):
        raise TPIPSError("There are no images to look at.")
    if cells < 1:
        raise TPIPSError(f"The number of cells must be at least 1, but it is {cells}.")
    changes = []
    for edit, source in zip(edits, sources, strict=True):
        if edit.shape != source.shape:
            raise TPIPSError(
                f"An edit of shape {tuple(edit.shape)} cannot be compared with a source of shape {tuple(source.shape)}; "
                "bring the source to the edit's size first."
            )
        difference = (_checked(edit) - _checked(source).to(edit.device)).abs().mean(dim=0)
        changes.append(F.adaptive_avg_pool2d(difference[None, None], cells).max())
    return torch.stack(changes)


def copies(
    edits: Tensor | Sequence[Tensor], sources: Tensor | Sequence[Tensor], *, threshold: float = 0.05, cells: int = 8
) -> Tensor:
    """Which edits are copies of their sources: no cell has changed by more than `threshold`; (B,) bool.

    `copies(...).float().mean()` is the copy rate. The default lies between what the built-in autoencoder does to held-out
    sources (at most 0.047 in 48 of them) and what the smallest of 200 true edits does (0.060).
    """
    return largest_change(edits, sources, cells=cells) < threshold


def _neighbour_ratio(image: Tensor) -> Tensor:
    luma = _luma(image)
    squared = torch.cat([luma.diff(dim=0).flatten(), luma.diff(dim=1).flatten()]).square().mean()
    return squared / (2.0 * luma.var(correction=0)).clamp(min=1e-12)


def _luma(image: Tensor) -> Tensor:
    return torch.einsum("chw,c->hw", image, image.new_tensor(_LUMA))


@torch.no_grad()
def _each(measure: Callable[[Tensor], Tensor], images: Tensor | Sequence[Tensor]) -> Tensor:
    if not len(images):
        raise TPIPSError("There are no images to look at.")
    return torch.stack([measure(_checked(image)) for image in images])


def _checked(image: Tensor) -> Tensor:
    if image.ndim != 3 or image.shape[0] != 3 or min(image.shape[1:]) < 2 or not image.is_floating_point():
        raise TPIPSError(
            f"An image must be a float tensor (3, H, W) of 2 pixels or more a side, but one is {image.dtype} "
            f"{tuple(image.shape)}."
        )
    if not bool(torch.isfinite(image).all()):
        raise TPIPSError("An image has NaN or infinite pixels.")
    return image.detach().float()
