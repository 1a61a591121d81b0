"""Which edits the page shows, and their small pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from torch import Tensor

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import ImageRef, decode
from tpips_reward.evaluation.rows import Row

SIDE = 224
#: Pictures on one page; with more models each of them has fewer examples.
MAX_PICTURES = 600


@dataclass
class Example:
    """One row on the page. `reasons`: such as "best of base"; `pictures`: name -> data URI or None where it is gone."""

    row: dict[str, Any]
    reasons: list[str] = field(default_factory=list)
    pictures: dict[str, str | None] = field(default_factory=dict)


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
            if (value := _value(row["outputs"].get(model))) is not None
        )
        half = min(count, (len(ranked) + 1) // 2)
        for reason, chosen in (("worst", ranked[:half]), ("best", ranked[max(half, len(ranked) - half) :][::-1])):
            for _, _, row in chosen:
                found.setdefault(row["key"], Example(row)).reasons.append(f"{reason} of {model}")
    order = {row["key"]: position for position, row in enumerate(report["rows"])}
    return sorted(found.values(), key=lambda example: order[example.row["key"]]), count


def add_pictures(examples: Sequence[Example], rows: Sequence[Row]) -> None:
    """Reads and shrinks the source and the outputs of each example; a file that is gone meanwhile has no picture."""
    known = {row.key: row for row in rows}
    for example in examples:
        row = known[example.row["key"]]
        example.pictures["source"] = _picture(row.source)
        for model, ref in row.outputs.items():
            example.pictures[f"output {model}"] = _picture(ref)


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


def _value(output: dict[str, Any] | None) -> float | None:
    if output is None:
        return None
    return output["overall"] if output["overall"] is not None else output["preservation"]
