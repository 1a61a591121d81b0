"""The report's files: one page, and the same as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.examples import add_files, add_pictures, choose, plain
from tpips_reward.evaluation.markdown import markdown
from tpips_reward.evaluation.measures import MEASURES
from tpips_reward.evaluation.page import render_page
from tpips_reward.evaluation.rows import Row
from tpips_reward.files import write_text


def write_report(folder: Path, report: dict[str, Any], rows: Sequence[Row], examples: int) -> None:
    """Writes every file of the report; report.json last, so that a folder with it is complete.

    Args:
        folder: exists.
        report: plain values (`summarize`, with the metric's facts and the settings).
        rows: the scored rows, for the pictures.
        examples: best and worst edits of each model on the page.

    Raises:
        TPIPSError: the disk refuses.
    """
    clean = _clean(report)
    chosen, count = choose(clean, examples)
    add_files(chosen, rows, folder)
    add_pictures(chosen, rows)
    contents = {
        "report.html": render_page(clean, chosen, count),
        "report.md": markdown(clean, chosen),
        "summary.csv": _csv(_summary_table(clean)),
        "rows.csv": _csv(_row_table(clean)),
        "aspects.csv": _csv(_aspect_table(clean)),
        "differences.csv": _csv(_difference_table(clean)),
        "problems.csv": _csv(_problem_table(clean)),
        "report.json": json.dumps(clean, indent=1, allow_nan=False) + "\n",
    }
    for name, content in contents.items():
        try:
            write_text(folder / name, content)
        except OSError as error:
            raise TPIPSError(f"{folder / name} cannot be written: {error.strerror or error}.") from error


def _summary_table(report: dict[str, Any]) -> Iterable[Sequence[object]]:
    fields = ("mean", "low", "high", "count")
    names = [name for measure in MEASURES for name in (measure, f"{measure}_common")]
    yield ("model", "control", "expected", "scored", *[f"{name}_{field}" for name in names for field in fields])
    for entry in report["models"]:
        numbers = [entry[name][field] for name in names for field in fields]
        yield (entry["model"], int(entry["control"]), entry.get("expected"), entry.get("scored"), *numbers)


def _row_table(report: dict[str, Any]) -> Iterable[Sequence[object]]:
    yield ("key", "model", "category", *MEASURES, "instruction", "source", "output", "proposed")
    for row in report["rows"]:
        for model, output in row["outputs"].items():
            numbers = [output[name] for name in MEASURES]
            yield (row["key"], model, row["category"], *numbers, row["instruction"], row["source"], output["file"],
                   " ".join(row["proposed"]))  # fmt: skip


def _aspect_table(report: dict[str, Any]) -> Iterable[Sequence[object]]:
    yield ("key", "model", "category", "role", "aspect", "value", "proposed")
    for row in report["rows"]:
        for model, output in row["outputs"].items():
            for role in ("preserve", "target"):
                for aspect, value in output[role].items():
                    yield (row["key"], model, row["category"], role, aspect, value, int(role in row["proposed"]))


def _difference_table(report: dict[str, Any]) -> Iterable[Sequence[object]]:
    names = ("first", "second", "measure", "sources", "p", "p_holm", "wins", "ties", "losses", "rows_needed")
    fields = ("mean", "low", "high", "count")
    yield ("by", "name", *names[:3], *[f"difference_{field}" for field in fields], *names[3:])
    whole = [{"by": "all", "name": "", **entry} for entry in report["comparisons"]]
    for entry in [*whole, *report["differences"]]:
        values = [entry[name] for name in names]
        yield (entry["by"], entry["name"], *values[:3], *[entry["difference"][field] for field in fields], *values[3:])


def _problem_table(report: dict[str, Any]) -> Iterable[Sequence[object]]:
    yield ("problem", "key", "model", "left_out", "detail")
    for item in report["problems"]["list"]:
        yield (item["kind"], item["key"], item["model"], int(item["left_out"]), item["detail"])


def _csv(rows: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _clean(value: Any) -> Any:
    """Plain values, with texts that a file can hold."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
