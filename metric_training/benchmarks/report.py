"""What a benchmark leaves: tables in Markdown, everything in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metric_training.evaluation.report import MAX_ROWS, write_file


def as_markdown(results: Mapping[str, Any]) -> str:
    """The results of `metric_training.benchmark.run` as Markdown: figures side by side, then by group."""
    metrics = results["metrics"]
    size = ", ".join(f"{count} {what}" for what, count in results["size"].items())
    query = f" Query: {results['query']}." if "query" in results else ""
    lines = [f"{results['title']}: {size}. {results['about']}{query}", ""]
    measures = list(dict.fromkeys(name for row in metrics.values() for name in row["figures"]))
    lines += [f"| metric | {' | '.join(measures)} |", f"|---|{'---|' * len(measures)}"]
    for name, row in metrics.items():
        lines.append(f"| {_cell(name)} | {' | '.join(_figure(row, measure) for measure in measures)} |")
    lines += ["", "± is the standard error over the examples."]
    for kind in dict.fromkeys(kind for row in metrics.values() for kind in row["groups"]):
        lines += _group_table(metrics, kind)
    if results["problems"]:
        lines += ["", f"Left out: {len(results['problems'])} bad rows; the JSON file lists them."]
    return "\n".join(lines)


def _group_table(metrics: Mapping[str, Any], kind: str) -> list[str]:
    groups = list(dict.fromkeys(group for row in metrics.values() for group in row["groups"].get(kind, {})))
    if len(groups) < 2:
        return []
    columns = [
        (name, measure)
        for name, row in metrics.items()
        for measure in dict.fromkeys(
            m for part in row["groups"].get(kind, {}).values() for m in part if m != "examples"
        )
    ]
    heads = [_cell(f"{name}: {measure}") for name, measure in columns]
    lines = ["", f"| {kind} | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for group in groups[:MAX_ROWS]:
        values = [metrics[name]["groups"].get(kind, {}).get(group, {}).get(measure) for name, measure in columns]
        lines.append(f"| {_cell(group)} | {' | '.join('–' if v is None else f'{v:.3f}' for v in values)} |")
    if len(groups) > MAX_ROWS:
        lines += ["", f"The {MAX_ROWS} most frequent of {len(groups)}; the JSON file has all."]
    return lines


def write_report(folder: Path, results: Mapping[str, Any]) -> None:
    """Writes report.md and report.json, each whole or not at all.

    Raises:
        DataError: when the folder cannot be written.
    """
    write_file(folder / "report.md", as_markdown(results).encode() + b"\n")
    write_file(folder / "report.json", json.dumps(results, indent=1, allow_nan=False).encode() + b"\n")


def _figure(row: Mapping[str, Any], measure: str) -> str:
    if measure not in row["figures"]:
        return "–"
    error = f" ± {row['errors'][measure]:.3f}" if measure in row["errors"] else ""
    return f"{row['figures'][measure]:.3f}{error}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
