"""Grids of pictures, for a look at what the numbers say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rl_recipes.runs import to_image, write_image


def save_grid(path: Path, rows: Sequence[Sequence[torch.Tensor]], columns: int = 16) -> None:
    """Writes rows of equally many images under each other, broken into bands of ``columns`` images.

    Args:
        path: a PNG.
        rows: for instance originals and reconstructions; images (3, H, W) float in [0, 1], all of one size.
        columns: images in a band's row.
    """
    bands = []
    for start in range(0, len(rows[0]), columns):
        for row in rows:
            images = list(row[start : start + columns])
            images += [torch.ones_like(images[0])] * (columns - len(images))
            bands.append(torch.cat(images, dim=2))
    write_image(path, to_image(torch.cat(bands, dim=1)))
