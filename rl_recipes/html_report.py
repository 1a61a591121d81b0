"""``report.html``: a run on one page that needs no other file and no network."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rl_recipes.evaluation import Evaluation, measures
from rl_recipes.runs import write_atomic

#: So many bad rows are listed.
_MAX_BAD = 5
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 76rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; } img { max-width: 100%; height: auto; }
.better { color: #17692b; } .worse { color: #a01818; } .warning { background: #fff3cd; padding: .4rem .8rem; }
details { margin: .4rem 0; } code { font-size: .9em; }
"""


def write(
    path: Path,
    summary: dict[str, Any],
    settings: dict[str, Any],
    before: Evaluation,
    after: Evaluation,
    lines: Sequence[dict[str, Any]],
    grids: Sequence[Path],
) -> None:
    """Writes the page: measures, warnings, bad rows, curves, grids, scores by aspect, settings.

    Args:
        summary: content of ``summary.json``.
        settings: all settings.
        lines: of ``metrics.jsonl``.
        grids: pictures that are put into the page; ``curves.png`` beside ``path`` too.

    Raises:
        RunError: when the disk refuses.
    """
    title = f"{summary['recipe']}: {summary['editor']} with {summary['reward']}"
    curves = path.parent / "curves.png"
    edits = "held-out edits" if summary["held_out"] else "edits of --data, which were trained on"
    ran = f"{summary['iterations']} iterations in {summary['seconds'] / 60:.1f} minutes, seed {summary['seed']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{ran}; {summary['evaluated']} {edits}, with the same noise before and after.</p>",
        *(f'<p class="warning">{escape(warning)}</p>' for warning in summary["warnings"]),
        *_bad_rows(summary["bad_rows"]),
        "<h2>Before and after</h2>",
        _measures(summary, measures(before, after)),
        "<h2>Training</h2>",
        _image(curves, "curves of the training") if lines and curves.is_file() else "<p>No iterations.</p>",
        "<h2>Scores by aspect</h2>",
        _aspects(before, after),
        "<h2>Edits</h2>",
        *(_image(grid, "source, before and after") for grid in grids),
        "<h2>Settings</h2>",
        "<details><summary>All settings; a YAML file of them goes in with --config</summary>",
        _table(("setting", "value"), ([f"<code>{escape(k)}</code>", escape(str(v))] for k, v in settings.items())),
        "</details>",
    ]
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    write_atomic(path, lambda p: p.write_text(page, encoding="utf-8"))


def _measures(summary: dict[str, Any], directions: dict[str, int]) -> str:
    rows = []
    for name, direction in directions.items():
        b, a, d = summary["before"].get(name), summary["after"].get(name), summary["difference"][name]
        if b is None or a is None or d["difference"] is None:
            continue
        error = d["standard_error"]
        change = f"{d['difference']:+.4f}"
        if error is not None and abs(d["difference"]) > 2 * error:
            change = f'<span class="{"better" if d["difference"] * direction > 0 else "worse"}">{change}</span>'
        interval = "" if error is None else f"{d['low']:+.4f} to {d['high']:+.4f}"
        rows.append([f"{escape(name)} {'↑' if direction > 0 else '↓'}", f"{b:.4f}", f"{a:.4f}", change, interval])
    if not rows:
        return "<p>Nothing was evaluated.</p>"
    return _table(("measure", "before", "after", "difference", "95 % interval"), rows)


def _bad_rows(bad: Sequence[dict[str, Any]]) -> list[str]:
    """What was skipped of the user's files; nothing where nothing was."""
    if not bad:
        return []
    said = f"{len(bad)} bad {'row was' if len(bad) == 1 else 'rows were'} skipped"
    said += f"; the first {_MAX_BAD}, all are in summary.json:" if len(bad) > _MAX_BAD else ":"
    rows = [[escape(row["file"]), str(row["line"]), escape(row["reason"])] for row in bad[:_MAX_BAD]]
    return [f'<p class="warning">{said}</p>', _table(("file", "line", "reason"), rows)]


def _aspects(before: Evaluation, after: Evaluation) -> str:
    means = [_aspect_means(evaluation) for evaluation in (before, after)]
    rows = [
        [escape(f"{role}: {name}"), *(f"{m[role, name][0]:.4f}" if (role, name) in m else "–" for m in means),
         str(means[-1].get((role, name), means[0].get((role, name), (0.0, 0)))[1])]
        for role, name in sorted(means[0].keys() | means[1].keys())
    ]  # fmt: skip
    if not rows:
        return "<p>The reward has no aspects.</p>"
    return _table(("aspect (preserve: similarity, target: change)", "before", "after", "edits"), rows)


def _aspect_means(evaluation: Evaluation) -> dict[tuple[str, str], tuple[float, int]]:
    found: dict[tuple[str, str], list[float]] = {}
    for row in evaluation.rows:
        for role, values in row["aspects"].items():
            for name, value in values.items():
                found.setdefault((role, name), []).append(value)
    return {key: (float(np.mean(values)), len(values)) for key, values in found.items()}


def _table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _image(path: Path, text: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<p><img alt="{escape(text)}" src="data:image/png;base64,{data}"></p>'
