"""The report as one self-contained HTML page. Every text from outside goes through `esc`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from tpips_reward.evaluation.examples import Example, score_of
from tpips_reward.evaluation.html import (
    Cell,
    esc,
    fill,
    histogram,
    interval,
    number,
    p_value,
    search_field,
    table,
    text,
)
from tpips_reward.evaluation.measures import MEASURES

#: Aspects in the heat map, and differences by category and aspect; the others are in the CSV files and report.json.
MAX_ASPECTS = 80
MAX_DIFFERENCES = 2000
#: What the parts are called of which there are differences.
PARTS = {"category": "category", "preserve": "aspect to keep", "target": "aspect to change"}


def render_page(report: dict[str, Any], examples: Sequence[Example], count: int) -> str:
    """The page's HTML.

    Args:
        report: the content of report.json.
        examples: with their pictures.
        count: how many best and worst each model has.
    """
    template = files("tpips_reward.evaluation").joinpath("report_template.html").read_text(encoding="utf-8")
    parts = {
        "title": esc(f"Edits of {report['name']}"),
        "overview": _overview(report),
        "summary": _summary(report),
        "comparisons": _comparisons(report),
        "differences": _differences(report),
        "votes": _votes(report),
        "categories": _categories(report),
        "aspects": _aspects(report),
        "distributions": _distributions(report),
        "examples": _examples(report, examples, count),
        "rows": _rows(report, {example.row["key"] for example in examples}),
        "problems": _problems(report),
        "settings": _settings(report),
    }
    return fill(template, parts)


def coverage(report: dict[str, Any]) -> str:
    """How much of the input was scored, as a sentence."""
    counts = report["counts"]
    return (
        f"{counts['rows_scored']} of {counts['rows']} rows scored, {counts['outputs_scored']} of "
        f"{counts['outputs_expected']} outputs, {counts['sources']} different sources."
    )


FAMILIES = (
    "p (Holm) is adjusted for all pairs of models in all categories together, and for those in all aspects to keep and in "
    "all aspects to change; parts of fewer than six sources, which can reach no p below 0.05, have none. In an aspect to "
    "keep, a difference is one of similarities to the source; in one to change, of distances from it."
)


def part_name(entry: dict[str, Any]) -> str:
    """What a difference is of, such as "category: overall" or "aspect to keep: similarity"."""
    return f"{PARTS[entry['by']]}: {entry['measure']}"


def left_out(report: dict[str, Any], shown: int) -> str:
    """A sentence about the differences that are not shown; empty where all are."""
    count = len(report["differences"])
    return "" if shown == count else f"{shown} of {count} differences, of each kind those with the most rows; differences.csv has all."


def shown_differences(report: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    """The differences by category and aspect, or where they are too many, of each kind those with the most rows."""
    entries = report["differences"]
    if len(entries) <= limit:
        return entries
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in entries:  # of each kind in the order of their rows
        kinds.setdefault((entry["by"], entry["measure"]), []).append(entry)
    shown: list[dict[str, Any]] = []
    for position, kind in enumerate(sorted(kinds.values(), key=len)):  # what short kinds leave goes to the long ones
        share = (limit - len(shown)) // (len(kinds) - position)
        shown += kind[:share]
    order = {id(entry): position for position, entry in enumerate(entries)}
    return sorted(shown, key=lambda entry: order[id(entry)])


def example_id(key: str) -> str:
    """An id that no key can break."""
    return "example-" + key.encode("utf-8", "replace").hex()


def facts_of(report: dict[str, Any]) -> list[str]:
    """Sentences that a reader must know before any figure."""
    counts = report["counts"]
    facts = [coverage(report), f"Metric: {report['metric']['name']}."]
    if counts["problems"]:
        facts.append(f"{counts['problems']} problems with the input, all of them in problems.csv.")
    if counts["rows_with_proposed_aspects"]:
        proposed = counts["rows_with_proposed_aspects"]
        facts.append(f"{proposed} rows have aspects that were proposed and not named by the data set (marked *).")
    if not report["metric"]["change_scale_measured"]:
        facts.append("The metric's change scale is a rough value and not measured: compare changes, do not read them.")
    if report["anonymous"]:
        facts.append("The columns are candidates, another one in each row: only the votes compare them.")
    return facts


def rankings(entry: dict[str, Any]) -> str:
    """How many whole rankings of a question are right, by the number of their pairs."""
    ranked = entry.get("rankings", [])
    return "; ".join(f"{item['pairs']} pairs: {item['all_right']:.3f} of {item['rankings']}" for item in ranked)


def _overview(report: dict[str, Any]) -> str:
    return "".join(f"<p>{esc(fact)}</p>" for fact in facts_of(report))


def _summary(report: dict[str, Any]) -> str:
    rows, classes = [], []
    for entry in report["models"]:
        scored = text(f"{entry['scored']} of {entry['expected']}") if not entry["control"] else text("")
        cells = [text(entry["model"]), scored]
        cells += [interval(entry[name]) for name in MEASURES] + [interval(entry["overall_common"])]
        rows.append(cells)
        classes.append("control" if entry["control"] else "incomplete" if entry["missing"] else "")
    common = report["counts"]["rows_all_models_have"]
    headings = ("model", "outputs", "preservation", "change", "overall", f"overall, the {common} rows all have")
    return table("summary-table", headings, rows, classes)


def _comparisons(report: dict[str, Any]) -> str:
    if not report["comparisons"]:
        return "<p>There are no two models with scores for the same row.</p>"
    rows = []
    for entry in report["comparisons"]:
        rows.append(
            [
                text(entry["first"]),
                text(entry["second"]),
                text(entry["measure"]),
                interval(entry["difference"]),
                Cell(esc(p_value(entry["p"])), entry["p"]),
                Cell(esc(p_value(entry["p_holm"])), entry["p_holm"], title="adjusted for the number of pairs of models"),
                number(entry["wins"], 2),
                number(entry["ties"], 2),
                number(entry["losses"], 2),
                number(entry["difference"]["count"], 0),
                number(entry["rows_needed"], 0),
            ]
        )
    headings = (
        "first",
        "second",
        "measure",
        "first − second",
        "p",
        "p (Holm)",
        "wins",
        "ties",
        "losses",
        "rows",
        "rows needed",
    )
    return table("comparison-table", headings, rows)


def _differences(report: dict[str, Any]) -> str:
    entries = shown_differences(report, MAX_DIFFERENCES)
    if not entries:
        return "<p>No two models share two sources in a category or an aspect.</p>"
    rows = []
    for entry in entries:
        shares = f"{entry['wins']:.2f} / {entry['ties']:.2f} / {entry['losses']:.2f}"
        rows.append(
            [
                text(part_name(entry)),
                text(entry["name"]),
                text(f"{entry['first']} − {entry['second']}"),
                interval(entry["difference"]),
                Cell(esc(p_value(entry["p"])), entry["p"]),
                Cell(esc(p_value(entry["p_holm"])), entry["p_holm"]),
                Cell(shares, entry["wins"]),
                number(entry["difference"]["count"], 0),
            ]
        )
    headings = ("by", "name", "models", "first − second", "p", "p (Holm)", "wins / ties / losses", "rows")
    shown = table("difference-table", headings, rows, choices=(0, 2))
    return f"<p>{FAMILIES}</p>{shown}<p>{left_out(report, len(entries))}</p>"


def _votes(report: dict[str, Any]) -> str:
    votes = report["votes"]
    if votes is None:
        return ""
    rows = []
    for entry in votes["agreement"]:
        rows.append(
            [
                text(entry["dimension"]),
                interval({"mean": entry.get("accuracy"), "low": entry.get("low"), "high": entry.get("high")}),
                number(entry.get("counted"), 0),
                number(entry["human_ties"], 0),
                number(entry["metric_ties"], 0),
                number(entry["unscored"], 0),
                number(entry.get("without_ties")),
                text(rankings(entry)),
            ]
        )
    headings = (
        "question",
        "agreement",
        "votes",
        "people's ties",
        "metric's ties",
        "not scored",
        "without ties",
        "whole rankings",
    )
    tau = votes["kendall_tau_of_models"]
    parts = [
        '<section id="votes"><h2>Agreement with people</h2>',
        f"<p>How often the metric prefers what people prefer (rule: {esc(votes['rule'])}).</p>",
        table("votes-table", headings, rows),
    ]
    if tau is not None:
        parts.append(f"<p>Kendall's tau between the models' overall scores and the votes they won: {tau:.2f}.</p>")
    return "".join([*parts, "</section>"])


def _categories(report: dict[str, Any]) -> str:
    rows, classes = [], []
    for entry in report["categories"]:
        for model in _columns(report):
            cells = entry["cells"][model["model"]]
            if cells["preservation"]["count"] or cells["change"]["count"]:
                rows.append([text(entry["category"]), text(model["model"]), number(entry["rows"], 0),
                             *[interval(cells[name]) for name in MEASURES]])  # fmt: skip
                classes.append("control" if model["control"] else "")
    return table("category-table", ("category", "model", "rows", *MEASURES), rows, classes)


def _aspects(report: dict[str, Any]) -> str:
    parts = []
    for role, title in (
        ("preserve", "To keep: similarity to the source"),
        ("target", "To change: distance from the source"),
    ):
        entries = [entry for entry in report["aspects"] if entry["role"] == role]
        if not entries:
            continue
        shown = entries[:MAX_ASPECTS]
        means = [cell["mean"] for entry in shown for cell in entry["cells"].values() if cell["mean"] is not None]
        low, spread = min(means), (max(means) - min(means)) or 1.0
        rows = []
        for entry in shown:
            cells = [text(entry["aspect"]), number(entry["rows"], 0)]
            for model in _columns(report):
                cell = entry["cells"][model["model"]]
                around = "" if cell["low"] is None else f", {cell['low']:.3f} to {cell['high']:.3f}"
                shade = None if cell["mean"] is None else (cell["mean"] - low) / spread
                cells.append(number(cell["mean"], heat=shade, title=f"{cell['count']} rows{around}"))
            rows.append(cells)
        headings = ("aspect", "rows", *[model["model"] for model in _columns(report)])
        parts.append(f"<h3>{title}</h3>" + table(f"aspect-{role}-table", headings, rows))
        if len(entries) > len(shown):
            parts.append(f"<p>The {len(shown)} most frequent of {len(entries)} aspects; aspects.csv has all.</p>")
        parts.append(f"<p>Shades run from {low:.3f} to {low + spread:.3f}.</p>")
    return "".join(parts)


def _distributions(report: dict[str, Any]) -> str:
    rows = []
    for model in _columns(report):
        plots = []
        for name in MEASURES:
            values = [row["outputs"].get(model["model"], {}).get(name) for row in report["rows"]]
            array = np.array([np.nan if value is None else value for value in values], dtype=float)
            plots.append(f"<td>{histogram(array, model['model'] + ', ' + name)}</td>")
        kind = ' class="control"' if model["control"] else ""
        rows.append(f'<tr{kind}><th scope="row">{esc(model["model"])}</th>{"".join(plots)}</tr>')
    head = "".join(f'<th scope="col">{name}, 0 to 1</th>' for name in MEASURES)
    content = f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="plots">{content}</table></div>'


def _examples(report: dict[str, Any], examples: Sequence[Example], count: int) -> str:
    if not examples:
        return "<p>No examples were asked for.</p>"
    models = [model["model"] for model in _columns(report) if not model["control"]]
    orders = "".join(
        f'<option value="{index} {sign}">{esc(model)}, {word} first</option>'
        for index, model in enumerate(models)
        for sign, word in ((-1, "best"), (1, "worst"))
    )
    order = f'<label>Order <select data-order="example-list"><option value="">as in the data</option>{orders}</select></label> '
    blocks = "\n".join(_example(example, models, place) for place, example in enumerate(examples))
    intro = f"<p>The {count} best and worst of each model.</p>"
    return f'{intro}{search_field("example-list", order)}<div id="example-list">{blocks}</div>'


def _example(example: Example, models: Sequence[str], place: int) -> str:
    row = example.row
    ranks = [score_of(row["outputs"].get(model)) for model in models]
    keys = " ".join("-" if score is None else f"{score!r}" for score in ranks)
    tags = "".join(f'<span class="tag">{esc(reason)}</span>' for reason in example.reasons)
    marks = {role: "*" if role in row["proposed"] else "" for role in ("preserve", "target")}
    figures = [_figure("source", example.pictures.get("source"), "")]
    for model, output in row["outputs"].items():
        if output["file"] is None:
            continue
        scores = "".join(f"<dt>{name}</dt><dd>{_plain(output[name])}</dd>" for name in MEASURES)
        for role, word in (("preserve", "keeps"), ("target", "changes")):
            scores += "".join(
                f'<dt class="{role}">{word} {esc(aspect)}{marks[role]}</dt><dd>{_plain(value)}</dd>'
                for aspect, value in output[role].items()
            )
        figures.append(_figure(model, example.pictures.get(f"output {model}"), f"<dl>{scores}</dl>"))
    about = f'<b>{esc(row["key"])}</b> {esc(row["instruction"])} <span class="tag">{esc(row["category"])}</span>{tags}'
    return (
        f'<details class="example" data-place="{place}" data-scores="{keys}" id="{example_id(row["key"])}"><summary>{about}</summary>'
        f'<div class="figures">{"".join(figures)}</div></details>'
    )


def _figure(name: str, uri: str | None, below: str) -> str:
    picture = (
        f'<img src="{esc(uri)}" alt="{esc(name)}" loading="lazy">' if uri else '<div class="gone">no picture</div>'
    )
    return f"<figure>{picture}<figcaption>{esc(name)}</figcaption>{below}</figure>"


def _rows(report: dict[str, Any], shown: set[str]) -> str:
    rows = []
    for row in report["rows"]:
        key = text(row["key"])
        if row["key"] in shown:
            key = Cell(f'<a href="#{example_id(row["key"])}">{esc(row["key"])}</a>', row["key"])
        for model, output in row["outputs"].items():
            if output["file"] is not None:
                cells = [key, text(row["category"]), text(model), *[number(output[name]) for name in MEASURES]]
                rows.append([*cells, text(row["instruction"])])
    return table("row-table", ("key", "category", "model", *MEASURES, "instruction"), rows)


def _problems(report: dict[str, Any]) -> str:
    problems = report["problems"]
    if not problems["list"]:
        return "<p>None.</p>"
    kinds = "".join(
        f"<li><b>{count}</b> {esc(kind.replace('_', ' '))}: {esc(problems['meaning'][kind])}</li>"
        for kind, count in sorted(problems["counts"].items())
    )
    rows = [
        [text(item["kind"].replace("_", " ")), text(item["key"]), text(item["model"]),
         text("left out" if item["left_out"] else "used"), text(item["detail"])]
        for item in problems["list"]
    ]  # fmt: skip
    return f"<ul>{kinds}</ul>" + table("problem-table", ("problem", "key", "model", "effect", "what"), rows)


def _settings(report: dict[str, Any]) -> str:
    facts = {**{f"metric: {k}": v for k, v in report["metric"].items()}, **report["settings"], **report["work"]}
    facts |= {f"rows with aspects by {name}": count for name, count in report["aspect_origins"].items()}
    items = "".join(f"<dt>{esc(key.replace('_', ' '))}</dt><dd>{esc(value)}</dd>" for key, value in facts.items())
    return f'<p>{esc(report["formula"])}</p><dl class="facts">{items}</dl>'


def _columns(report: dict[str, Any]) -> list[dict[str, Any]]:
    return report["models"]


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
