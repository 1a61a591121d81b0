"""The report's files: one page, and the same as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.examples import add_pictures, choose
from tpips_reward.evaluation.measures import MEASURES
from tpips_reward.evaluation.page import coverage, render_page
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
    add_pictures(chosen, [row for row in rows if row.key in {example.row["key"] for example in chosen}])
    contents = {
        "report.html": render_page(clean, chosen, count),
        "report.md": markdown(clean),
        "summary.csv": _csv(_summary_table(clean)),
        "rows.csv": _csv(_row_table(clean)),
        "aspects.csv": _csv(_aspect_table(clean)),
        "problems.csv": _csv(_problem_table(clean)),
        "report.json": json.dumps(clean, indent=1, allow_nan=False) + "\n",
    }
    for name, content in contents.items():
        try:
            write_text(folder / name, content)
        except OSError as error:
            raise TPIPSError(f"{folder / name} cannot be written: {error.strerror or error}.") from error


def markdown(report: dict[str, Any]) -> str:
    """The summary, the differences, the votes and the problems' counts, as GitHub shows them."""
    counts = report["counts"]
    parts = [
        f"# Edits of {_md(report['name'])}",
        f"{coverage(report)} Metric: {_md(report['metric']['name'])}.",
        report["formula"],
        "## Summary",
        _md_table(
            ("model", "outputs", *MEASURES, f"overall, the {counts['rows_all_models_have']} rows all have"),
            [
                (
                    entry["model"],
                    "" if entry["control"] else f"{entry['scored']} of {entry['expected']}",
                    *[_around(entry[name]) for name in MEASURES],
                    _around(entry["overall_common"]),
                )
                for entry in report["models"]
            ],
        ),
    ]
    rows: list[tuple[object, ...]]
    if report["comparisons"]:
        rows = [
            (e["first"], e["second"], e["measure"], _around(e["difference"]), _short(e["p"]), _short(e["p_holm"]),
             f"{e['wins']:.2f} / {e['ties']:.2f} / {e['losses']:.2f}", e["difference"]["count"],
             e["rows_needed"] or "–")
            for e in report["comparisons"]
        ]  # fmt: skip
        headings = (
            "first",
            "second",
            "measure",
            "difference",
            "p",
            "p (Holm)",
            "wins / ties / losses",
            "rows",
            "rows needed",
        )
        parts += ["## Differences", _md_table(headings, rows)]
    if report["votes"]:
        voted = [
            (e["dimension"], _around({"mean": e.get("accuracy"), "low": e.get("low"), "high": e.get("high")}),
             e.get("counted", 0), e["human_ties"], e["unscored"])
            for e in report["votes"]["agreement"]
        ]  # fmt: skip
        asked = ("question", f"agreement ({report['votes']['rule']})", "votes", "people's ties", "not scored")
        parts += ["## Agreement with people", _md_table(asked, voted)]
    rows = [
        (entry["category"], model, entry["rows"], *[_around(cells[name]) for name in MEASURES])
        for entry in report["categories"]
        for model, cells in entry["cells"].items()
        if cells["preservation"]["count"] or cells["change"]["count"]
    ]
    parts += ["## Categories", _md_table(("category", "model", "rows", *MEASURES), rows)]
    if report["problems"]["list"]:
        rows = [
            (kind, count, report["problems"]["meaning"][kind]) for kind, count in report["problems"]["counts"].items()
        ]
        parts += ["## Problems with the input", _md_table(("problem", "count", "what it is"), rows)]
    return "\n\n".join(parts) + "\n"


def _md(value: object) -> str:
    """Text that neither ends a cell nor becomes markup."""
    plain = " ".join(str(value).split())
    for sign in ("\\", "|", "`", "*", "_", "[", "]", "<", ">", "#"):
        plain = plain.replace(sign, "\\" + sign)
    return plain


def _md_table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    heads = [_md(heading) for heading in headings]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(_md(value) for value in row)} |" for row in rows]
    return "\n".join(lines)


def _around(entry: dict[str, float | None]) -> str:
    if entry["mean"] is None:
        return "–"
    around = "" if entry["low"] is None else f" ({entry['low']:.3f} to {entry['high']:.3f})"
    return f"{entry['mean']:.3f}{around}"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


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


def _problem_table(report: dict[str, Any]) -> Iterable[Sequence[object]]:
    yield ("problem", "key", "model", "left_out", "detail")
    for item in report["problems"]["list"]:
        yield (item["kind"], item["key"], item["model"], int(item["left_out"]), item["detail"])


def _csv(rows: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _clean(value: Any) -> Any:
    """Plain values, with what UTF-8 cannot hold (names of files in another encoding) replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
