"""Pictures of a run: grids source | before | after, and curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from rl_recipes.runs import to_image, write_atomic, write_image

_GAP = 8
_LABEL = 18
_LINE = 13
_BACKGROUND = (255, 255, 255)
_INK = (30, 30, 30)


def sample_grid(
    rows: Sequence[Sequence[torch.Tensor]],
    columns: Sequence[str],
    labels: Sequence[str],
    side: int = 160,
    captions: Sequence[Sequence[Sequence[str]]] = (),
) -> Image.Image:
    """Draws one row of images an edit, with its instruction above.

    Args:
        rows: for each edit its images, (3, H, W) float in [0, 1]; a row may be shorter than ``columns``.
        columns: a heading for each column.
        labels: a text for each row.
        side: the longer side of each drawn image in pixels; small images are enlarged without smoothing.
        captions: for each row the lines below each image, if any.
    """
    small = ImageFont.load_default(10)
    font = ImageFont.load_default(13)
    width = _GAP + len(columns) * (side + _GAP)
    drawn = [[_fit(to_image(image), side) for image in row] for row in rows]
    below = [list(row) for row in captions] or [[] for _ in rows]
    deepest = [_LINE * max((len(lines) for lines in row), default=0) for row in below]
    heights = [max(image.height for image in row) + _LABEL + _GAP + d for row, d in zip(drawn, deepest, strict=True)]
    canvas = Image.new("RGB", (width, _LABEL + _GAP + sum(heights)), _BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for index, name in enumerate(columns):
        draw.text((_GAP + index * (side + _GAP), 4), name, _INK, font)
    top = _LABEL + _GAP
    for row, label, height, texts in zip(drawn, labels, heights, below, strict=True):
        draw.text((_GAP, top), _shorten(label, draw, font, width - 2 * _GAP), _INK, font)
        for index, image in enumerate(row):
            canvas.paste(image, (_GAP + index * (side + _GAP), top + _LABEL))
        foot = top + _LABEL + max(image.height for image in row)
        for index, lines in enumerate(texts):
            for number, line in enumerate(lines):
                text = _shorten(line, draw, small, side)
                draw.text((_GAP + index * (side + _GAP), foot + number * _LINE), text, _INK, small)
        top += height
    return canvas


def save_sample_grids(
    folder: Path,
    sources: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    ideals: Sequence[torch.Tensor | None],
    labels: Sequence[str],
    scores: Sequence[Sequence[Sequence[str]]] = (),
    rows_per_grid: int = 8,
) -> list[Path]:
    """Writes ``grid_00.png`` …: source | before | after, and the ideal edit where it is known.

    Args:
        scores: for each row the lines below "before" and those below "after".
    """
    columns = ["source", "before", "after"] + (["ideal"] if any(i is not None for i in ideals) else [])
    paths = []
    for start in range(0, len(sources), rows_per_grid):
        part = range(start, min(start + rows_per_grid, len(sources)))
        rows = []
        for i in part:
            ideal = ideals[i]
            rows.append([sources[i], before[i], after[i]] + ([ideal] if ideal is not None else []))
        path = folder / f"grid_{start // rows_per_grid:02d}.png"
        captions = [[[], *scores[i]] for i in part] if scores else []
        write_image(path, sample_grid(rows, columns, [labels[i] for i in part], captions=captions))
        paths.append(path)
    return paths


def save_curves(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Draws reward, its parts, signs of a fooled reward, and the policy's movement over the lines of ``metrics.jsonl``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # Agg alone: no display, no global state
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels: dict[str, tuple[str, ...]] = {
        "reward": ("reward_mean",),
        "parts of the reward": ("term_preserve", "term_change", "term_gate", *_several(lines, "reward/")),
        "spread of rewards": ("reward_std", "group_std"),
        "judge, which is not optimised": ("judge", "edit_success"),
        "looks of the edits": ("copy_rate", "degenerate", "pixel_change", "edge_density", "edge_density_source"),
        "distance to the start": ("kl", "distance"),
        "known scenes": ("drift", "object_lost", "l1_to_ideal"),
        "gradient norm": ("grad_norm",),
    }
    figure = Figure(figsize=(15, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, names) in zip(figure.subplots(2, 4).flat, panels.items(), strict=True):
        for name in names:
            points = [(line["iteration"], line[name]) for line in lines if line.get(name) is not None]
            if not points:
                continue
            x, y = zip(*points, strict=True)
            (drawn,) = axes.plot(x, y, alpha=0.35, linewidth=1)
            axes.plot(x, _smooth(y), color=drawn.get_color(), linewidth=2, label=name)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("iteration", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=8)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    write_atomic(path, lambda p: figure.savefig(p, format="png", dpi=110))


def _several(lines: Sequence[dict[str, Any]], prefix: str) -> list[str]:
    return sorted({name for line in lines for name in line if name.startswith(prefix)})


def _smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """An exponential mean that starts without bias."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def _fit(image: Image.Image, side: int) -> Image.Image:
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)


def _shorten(text: str, draw: ImageDraw.ImageDraw, font: Any, width: int) -> str:
    text = " ".join(text.split())
    if draw.textlength(text, font) <= width:
        return text
    while text and draw.textlength(text + "…", font) > width:
        text = text[:-1]
    return text + "…"
