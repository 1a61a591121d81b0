"""What an evaluation leaves: tables in Markdown, everything in JSON, the confidence curve as CSV and PNG."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metric_training.data.comparison import DataError
from tpips_reward.files import write_atomic

#: Real sets have thousands of aspect phrases; tables show the most frequent ones, the JSON file all.
MAX_ROWS = 30
CURVE_COLUMNS = ("metric", "threshold", "examples", "share", "agreement", "standard_error", "consensus")
_TASKS = {"odd_one_out": "odd-one-out", "two_afc": "2AFC"}


def as_markdown(results: Mapping[str, Any]) -> str:
    """The results of `metric_training.evaluation.runner.evaluate` as Markdown: side by side, per aspect, per source."""
    data, metrics = results["data"], results["metrics"]
    intro = (
        f"{_TASKS[data['task']]} on {data['name']}: {data['comparisons']} comparisons, {data['examples']} examples "
        "(comparison, aspect). Agreement: share of the votes for the metric's choice; 95 % intervals from a bootstrap "
        "over comparisons."
    )
    lines = [
        intro,
        "",
        "| metric | agreement | standard error | 95 % interval | gap to consensus | ties |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in metrics.items():
        low, high = row["interval"]
        lines.append(
            f"| {_cell(name)} | {row['agreement']:.3f} | {row['standard_error']:.3f} | {low:.3f} to {high:.3f} | "
            f"{row['gap']:.3f} | {_percent(row['metric_ties'])} |"
        )
    crowd, error = f"{data['consensus']:.3f}", f"{data['consensus_standard_error']:.3f}"
    lines += [
        f"| *consensus* | {crowd} | {error} | | | {_percent(data['vote_ties'])} |",
        f"| *chance* | {data['chance']:.3f} | | | | |",
        "",
        "Ties: examples in which a metric's best choices are exactly equal; for the consensus, the voters'.",
    ]
    for key, title in (("per_aspect", "aspect"), ("per_source", "source")):
        lines += _group_table(metrics, key, title)
    left_out = [f"{count} {what}" for what, count in data["dropped"].items()]
    left_out += [f"{len(data['problems'])} problems in rows"] if data["problems"] else []
    left_out += [f"{len(data['undecodable'])} images that do not decode"] if data["undecodable"] else []
    left_out += [f"{count} examples that {name} did not answer" for name, count in data["unanswered"].items()]
    if left_out:
        lines += ["", f"Left out: {', '.join(left_out)}."]
    for name, row in metrics.items():
        if row.get("facts"):
            lines += ["", f"{_cell(name)}: {', '.join(f'{what} {value}' for what, value in row['facts'].items())}."]
    return "\n".join(lines)


def _group_table(metrics: Mapping[str, Any], key: str, title: str) -> list[str]:
    if not metrics:
        return []
    first = next(iter(metrics.values()))[key]
    if len(first) < 2:
        return []
    shown = list(first)[:MAX_ROWS]
    lines = [
        "",
        f"| {title} | {' | '.join(_cell(name) for name in metrics)} | consensus | examples |",
        f"|---|{'---|' * (len(metrics) + 2)}",
    ]
    for group in shown:
        cells = [f"{row[key][group]['agreement']:.3f}" for row in metrics.values()]
        facts = first[group]
        lines.append(f"| {_cell(group)} | {' | '.join(cells)} | {facts['consensus']:.3f} | {facts['examples']} |")
    if len(first) > len(shown):
        lines += ["", f"The {len(shown)} most frequent of {len(first)}; the JSON file has all."]
    return lines


def curve_csv(results: Mapping[str, Any]) -> str:
    """The confidence curve of every metric, one row a threshold (`statistics.threshold_curve`)."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CURVE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for name, row in results["metrics"].items():
        for point in row["thresholds"]:
            writer.writerow({"metric": name, **{k: _rounded(v) for k, v in point.items()}})
    return text.getvalue()


def curve_png(results: Mapping[str, Any]) -> bytes:
    """The confidence curve as a picture: agreement of each metric, and the consensus, by threshold (figure 13)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, row in results["metrics"].items():
        points = row["thresholds"]
        axes.errorbar(
            [p["threshold"] for p in points],
            [p["agreement"] for p in points],
            yerr=[p["standard_error"] for p in points],
            marker="o",
            markersize=3,
            capsize=2,
            label=name,
        )
    rows = list(results["metrics"].values())
    if rows:
        points = rows[0]["thresholds"]
        axes.plot(
            [p["threshold"] for p in points], [p["consensus"] for p in points], "k--", linewidth=1, label="consensus"
        )
    axes.axhline(results["data"]["chance"], color="gray", linestyle=":", linewidth=1, label="chance")
    axes.set_xlabel("least share of the votes for the top choice")
    axes.set_ylabel("agreement")
    axes.set_title(results["data"]["name"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=130)
    return target.getvalue()


def write_report(folder: str | Path, results: Mapping[str, Any]) -> list[Path]:
    """Writes report.md, report.json, thresholds.csv and thresholds.png, each whole or not at all.

    Raises:
        DataError: when the folder cannot be written.
    """
    target = Path(folder)
    files = {
        "report.md": as_markdown(results).encode() + b"\n",
        "report.json": json.dumps(results, indent=1, allow_nan=False).encode() + b"\n",
        "thresholds.csv": curve_csv(results).encode(),
        "thresholds.png": curve_png(results),
    }
    for name, content in files.items():
        write_file(target / name, content)
    return [target / name for name in files]


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically.

    Raises:
        DataError: when the disk refuses.
    """
    try:
        write_atomic(path, lambda temporary: temporary.write_bytes(content))
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}); give another path for the output.") from error


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
