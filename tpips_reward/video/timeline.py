"""Similarity of each frame to one of them, in several aspects; as a table and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpips_reward.answers import check_finite, name_comparison, named
from tpips_reward.errors import TPIPSError
from tpips_reward.files import write_atomic, write_text
from tpips_reward.video.frames import Frame


@dataclass(frozen=True)
class Timeline:
    """aspects: K names; frames, seconds: one a frame; similarities: (N, K)."""

    aspects: list[str]
    frames: list[int]
    seconds: list[float]
    similarities: Tensor


def measure(
    frames: Iterable[Frame], reference: Tensor, aspects: Sequence[str], metric: Any, batch: int = 32
) -> Timeline:
    """f(frame, reference | aspect) for every frame and aspect.

    Args:
        frames: read one after the other; `batch` of them are held.
        reference: (3, H, W) in [0, 1].
        metric: anything with `similarity`, as `Metric` has it.

    Raises:
        TPIPSError: no aspects, an aspect twice, no frames.
        NotFinite: a similarity that is NaN or infinite; it names the frame.
    """
    names = [" ".join(aspect.split()) for aspect in ([aspects] if isinstance(aspects, str) else aspects)]
    if not names or not all(names) or len({name.casefold() for name in names}) < len(names):
        raise TPIPSError(f"The aspects {list(aspects)!r} must be at least one, none of them empty or there twice.")
    if batch < 1:
        raise TPIPSError(f"batch is {batch}; give at least 1.")
    numbers: list[int] = []
    seconds: list[float] = []
    rows: list[Tensor] = []
    for part in _batches(frames, batch):
        labels = [name_comparison(name, f"frame {frame.number}", "the reference") for frame in part for name in names]
        with torch.no_grad(), named(labels.__getitem__):
            found = metric.similarity([frame.pixels for frame in part], reference, names).float().cpu()
        check_finite(found.flatten(), labels.__getitem__)
        rows.append(found)
        numbers += [frame.number for frame in part]
        seconds += [frame.seconds for frame in part]
    if not rows:
        raise TPIPSError("There are no frames.")
    return Timeline(names, numbers, seconds, torch.cat(rows))


def write_csv(timeline: Timeline, path: Path) -> None:
    """frame, seconds and a column an aspect; six decimals."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["frame", "seconds", *timeline.aspects])
    for number, second, row in zip(timeline.frames, timeline.seconds, timeline.similarities.tolist(), strict=True):
        writer.writerow([number, f"{second:.6f}", *(f"{value:.6f}" for value in row)])
    write_text(path, buffer.getvalue())


def write_plot(timeline: Timeline, path: Path, title: str) -> None:
    """A line an aspect over the seconds, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    for k, aspect in enumerate(timeline.aspects):
        axes.plot(timeline.seconds, timeline.similarities[:, k].tolist(), label=aspect, linewidth=1.5)
    axes.set_xlabel("seconds")
    axes.set_ylabel("similarity to the reference frame")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=120))


def _batches(frames: Iterable[Frame], size: int) -> Iterable[list[Frame]]:
    rest = iter(frames)
    while part := list(islice(rest, size)):
        yield part
