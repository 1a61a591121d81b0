"""Which edits the report shows, where they are, and their small pictures."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import ImageFile, ImageRef, decode
from tpips_reward.evaluation.rows import Row

SIDE = 224
#: Pictures on one page; with more models each of them has fewer examples.
MAX_PICTURES = 600


@dataclass
class Example:
    """One row on the page.

    Attributes:
        row: of report.json.
        reasons: such as "best of base".
        pictures: "source" or "output MODEL" -> data URI, or None where it is gone.
        files: the same names -> path from the report's folder, or where in a table the image stands.
    """

    row: dict[str, Any]
    reasons: list[str] = field(default_factory=list)
    pictures: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def choose(report: dict[str, Any], count: int) -> tuple[list[Example], int]:
    """The best and the worst rows of each model by overall score (by preservation where there is none).

    Returns:
        the examples in the rows' order, and how many best and worst each model has.
    """
    models = [entry["model"] for entry in report["models"] if not entry["control"]]
    limit = max(1, MAX_PICTURES // max(1, 2 * len(models) * (len(models) + 1)))
    count = min(count, limit)
    found: dict[str, Example] = {}
    for model in models:
        ranked = sorted(
            (value, position, row)
            for position, row in enumerate(report["rows"])
            if (value := score_of(row["outputs"].get(model))) is not None
        )
        half = min(count, (len(ranked) + 1) // 2)
        for reason, chosen in (("worst", ranked[:half]), ("best", ranked[max(half, len(ranked) - half) :][::-1])):
            for _, _, row in chosen:
                found.setdefault(row["key"], Example(row)).reasons.append(f"{reason} of {model}")
    order = {row["key"]: position for position, row in enumerate(report["rows"])}
    return sorted(found.values(), key=lambda example: order[example.row["key"]]), count


def add_pictures(examples: Sequence[Example], rows: Sequence[Row]) -> None:
    """Reads and shrinks the source and the outputs of each example; a file that is gone meanwhile has no picture."""
    for example, images in _images(examples, rows):
        example.pictures = {name: _picture(ref) for name, ref in images.items()}


def add_files(examples: Sequence[Example], rows: Sequence[Row], folder: Path) -> None:
    """Where the source and the outputs of each example are, seen from `folder`."""
    for example, images in _images(examples, rows):
        example.files = {name: _relative(ref, folder) for name, ref in images.items()}


def _images(examples: Sequence[Example], rows: Sequence[Row]) -> Iterator[tuple[Example, dict[str, ImageRef]]]:
    known = {plain(row.key): row for row in rows}
    for example in examples:
        row = known[example.row["key"]]
        yield example, {"source": row.source, **{f"output {model}": ref for model, ref in row.outputs.items()}}


def _relative(ref: ImageRef, folder: Path) -> str:
    if not isinstance(ref, ImageFile):
        return plain(ref.label)
    try:
        return plain(Path(os.path.relpath(ref.path, folder)).as_posix())
    except ValueError:  # another drive of Windows
        return plain(str(ref.path))


def plain(text: str) -> str:
    """Text with what UTF-8 cannot hold (names of files in another encoding) replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def data_uri(image: Tensor, side: int = SIDE) -> str:
    """(3, H, W) in [0, 1] -> a JPEG of at most `side` pixels a side, as a data URI."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels)
    if max(picture.size) > side:
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _picture(ref: ImageRef) -> str | None:
    try:
        return data_uri(decode(ref.read(), ref.label))
    except TPIPSError:
        return None


def score_of(output: dict[str, Any] | None) -> float | None:
    """What an output of report.json is ranked by: its overall score, or preservation where it has none."""
    if output is None:
        return None
    return output["overall"] if output["overall"] is not None else output["preservation"]
