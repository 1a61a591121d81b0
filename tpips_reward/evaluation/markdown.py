"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tpips_reward.evaluation.examples import Example
from tpips_reward.evaluation.html import p_value
from tpips_reward.evaluation.measures import MEASURES
from tpips_reward.evaluation.page import (
    FAMILIES,
    MAX_ASPECTS,
    facts_of,
    left_out,
    part_name,
    rankings,
    shown_differences,
)

#: Differences by category and aspect; differences.csv has all.
_MAX_DIFFERENCES = 200


def markdown(report: dict[str, Any], examples: Sequence[Example] = ()) -> str:
    """The report as GitHub shows it: all of the page but the distributions, the pictures and the single rows.

    Args:
        report: the content of report.json.
        examples: with their files.
    """
    counts = report["counts"]
    parts = [
        f"# Edits of {_md(report['name'])}",
        *map(_md, facts_of(report)),
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
            (e["first"], e["second"], e["measure"], _around(e["difference"]), p_value(e["p"]), p_value(e["p_holm"]),
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
    parts += _md_differences(report)
    if report["votes"]:
        voted = [
            (e["dimension"], _around({"mean": e.get("accuracy"), "low": e.get("low"), "high": e.get("high")}),
             e.get("counted", 0), e["human_ties"], e["metric_ties"], e["unscored"], rankings(e))
            for e in report["votes"]["agreement"]
        ]  # fmt: skip
        asked = ("question", f"agreement ({report['votes']['rule']})", "votes", "people's ties", "metric's ties", "not scored",
                 "whole rankings")  # fmt: skip
        parts += ["## Agreement with people", _md_table(asked, voted)]
        tau = report["votes"]["kendall_tau_of_models"]
        if tau is not None:
            parts.append(f"Kendall's tau between the models' overall scores and the votes they won: {tau:.2f}.")
    rows = [
        (entry["category"], model, entry["rows"], *[_around(cells[name]) for name in MEASURES])
        for entry in report["categories"]
        for model, cells in entry["cells"].items()
        if cells["preservation"]["count"] or cells["change"]["count"]
    ]
    parts += ["## Categories", _md_table(("category", "model", "rows", *MEASURES), rows)]
    parts += [*_md_aspects(report), *_md_examples(examples)]
    if report["problems"]["list"]:
        rows = [
            (kind, count, report["problems"]["meaning"][kind]) for kind, count in report["problems"]["counts"].items()
        ]
        parts += ["## Problems with the input", _md_table(("problem", "count", "what it is"), rows)]
    return "\n\n".join(parts) + "\n"


def _md_differences(report: dict[str, Any]) -> list[str]:
    entries = shown_differences(report, _MAX_DIFFERENCES)
    if not entries:
        return []
    rows = [
        (part_name(e), e["name"], f"{e['first']} − {e['second']}", _around(e["difference"]), p_value(e["p"]),
         p_value(e["p_holm"]), f"{e['wins']:.2f} / {e['ties']:.2f} / {e['losses']:.2f}", e["difference"]["count"])
        for e in entries
    ]  # fmt: skip
    headings = ("by", "name", "models", "difference", "p", "p (Holm)", "wins / ties / losses", "rows")
    parts = ["## Differences by category and by aspect", FAMILIES, _md_table(headings, rows), left_out(report, len(entries))]
    return [part for part in parts if part]


def _md_aspects(report: dict[str, Any]) -> list[str]:
    names = [entry["model"] for entry in report["models"]]
    parts = []
    for role, title in (("preserve", "to keep: similarity to the source"), ("target", "to change: distance from the source")):
        entries = [entry for entry in report["aspects"] if entry["role"] == role]
        if not entries:
            continue
        rows = [
            (entry["aspect"], entry["rows"], *[_around(entry["cells"][name]) for name in names])
            for entry in entries[:MAX_ASPECTS]
        ]
        parts += [f"## Aspects {title}", _md_table(("aspect", "rows", *names), rows)]
        if len(entries) > MAX_ASPECTS:
            parts.append(f"The {MAX_ASPECTS} most frequent of {len(entries)} aspects; aspects.csv has all.")
    return parts


def _md_examples(examples: Sequence[Example]) -> list[str]:
    if not examples:
        return []
    parts = ["## Best and worst"]
    for example in examples:
        row = example.row
        marks = {role: "*" if role in row["proposed"] else "" for role in ("preserve", "target")}
        columns = [("preserve", "keeps", aspect) for aspect in row["preserve"]]
        columns += [("target", "changes", aspect) for aspect in row["target"]]
        rows = [
            (model, *[_figure(output[name]) for name in reversed(MEASURES)],
             *[_figure(output[role].get(aspect)) for role, _, aspect in columns], example.files[f"output {model}"])
            for model, output in row["outputs"].items()
            if output["file"] is not None
        ]  # fmt: skip
        headings = ("model", *reversed(MEASURES), *[f"{word} {aspect}{marks[role]}" for role, word, aspect in columns], "file")
        parts += [
            f"### {_md(row['key'])}: {', '.join(map(_md, example.reasons))}",
            f"{_md(row['instruction'])}" if row["instruction"] else "No instruction.",
            f"Category {_md(row['category'])}, source {_md(example.files['source'])}",
            _md_table(headings, rows),
        ]
    return parts


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


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
