"""Pieces of the page: escaped text, tables that can be sorted and filtered, bars. Nothing here knows what it shows."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def esc(value: object) -> str:
    """Text as it is, in an element or in a quoted attribute; what no HTML file may hold becomes U+FFFD."""
    return html.escape(_CONTROL.sub("\ufffd", str(value)), quote=True)


@dataclass(frozen=True)
class Cell:
    """A table's cell.

    Attributes:
        content: HTML; from text by `text`.
        key: what it is sorted by, a number or a text; None sorts last.
        heat: 0 to 1, its shade; None for none.
        title: what pointing at it shows.
    """

    content: str
    key: float | str | None
    heat: float | None = None
    title: str = ""


def text(value: object, title: str = "") -> Cell:
    """A cell of plain text."""
    return Cell(esc(value), str(value), title=title)


def p_value(value: float | None) -> str:
    """A p value as it is shown; one that four digits cannot hold is not shown as 0."""
    if value is None:
        return "–"
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def number(value: float | None, digits: int = 3, *, heat: float | None = None, title: str = "") -> Cell:
    """A cell of a number, or a dash where there is none."""
    shown = "–" if value is None else f"{value:.{digits}f}"
    return Cell(shown, value, heat if value is not None else None, title)


def interval(entry: dict[str, float | None], digits: int = 3) -> Cell:
    """A cell of a mean with its interval."""
    mean, low, high = entry["mean"], entry["low"], entry["high"]
    if mean is None:
        return Cell("–", None)
    around = f" <small>[{low:.{digits}f}, {high:.{digits}f}]</small>" if low is not None and high is not None else ""
    return Cell(f"{mean:.{digits}f}{around}", mean)


def table(
    name: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    classes: Sequence[str] = (),
    choices: Sequence[int] = (),
) -> str:
    """A table with a search field; its headings sort.

    Args:
        name: its id, unique on the page.
        headings: plain text.
        rows: cells, as many a row as headings.
        classes: of the rows, "" for none; as many as rows, or none at all.
        choices: columns, of plain text, with a list each from which one value is chosen; the first one is to begin with.
    """
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{esc(heading)}</button></th>' for heading in headings
    )
    body = []
    for index, row in enumerate(rows):
        kind = f' class="{esc(classes[index])}"' if classes and classes[index] else ""
        body.append(f"<tr{kind}>{''.join(_cell(cell) for cell in row)}</tr>")
    lines = "\n".join(body)
    content = f"<thead><tr>{head}</tr></thead><tbody>\n{lines}\n</tbody>"
    lists = "".join(_choice(name, column, headings[column], [row[column] for row in rows]) for column in choices)
    return f'{search_field(name, lists)}<div class="scroll"><table id="{esc(name)}">{content}</table></div>'


def _choice(name: str, column: int, heading: str, cells: Sequence[Cell]) -> str:
    values = list(dict.fromkeys(str(cell.key) for cell in cells))
    options = "".join(f'<option value="{esc(value)}">{esc(value)}</option>' for value in values)
    chosen = f'<select data-choice="{esc(name)}" data-column="{column}">{options}<option value="">all</option></select>'
    return f"<label>{esc(heading)} {chosen}</label> "


def search_field(name: str, before: str = "") -> str:
    """A field that filters the table's rows, or the element's children, with this id. `before`: HTML on the same line."""
    field = f'<input type="search" data-filter="{esc(name)}" placeholder="words, all of which occur">'
    return (
        f'<div class="tools">{before}<label>Filter {field}</label> <span class="shown" data-shown="{esc(name)}"></span></div>'
    )


def _cell(cell: Cell) -> str:
    attributes = ""
    if isinstance(cell.key, str):
        attributes += f' data-text="{esc(cell.key)}"' if cell.content != esc(cell.key) else ""
    else:
        attributes += ' class="number"' + (
            f' data-number="{cell.key!r}"' if cell.key is not None else ' data-number=""'
        )
    if cell.heat is not None:
        attributes += f' style="--heat:{min(1.0, max(0.0, cell.heat)):.3f}"'
    if cell.title:
        attributes += f' title="{esc(cell.title)}"'
    return f"<td{attributes}>{cell.content}</td>"


def histogram(values: np.ndarray, label: str, bins: int = 20) -> str:
    """Bars of values in [0, 1] as SVG; NaN is left out."""
    known = values[~np.isnan(values)]
    counts, _ = np.histogram(np.clip(known, 0, 1), bins=bins, range=(0, 1))
    top = max(1, int(counts.max()))
    bars = "".join(
        f'<rect x="{index * 10 + 1}" y="{60 - 58 * count / top:.1f}" width="8" height="{58 * count / top:.1f}"/>'
        for index, count in enumerate(counts)
        if count
    )
    named = f"{label}: {len(known)} values from 0 to 1, at most {top} in a bar"
    return (
        f'<svg viewBox="0 0 {bins * 10} 62" role="img" aria-label="{esc(named)}"><title>{esc(named)}</title>'
        f'<line x1="0" y1="60.5" x2="{bins * 10}" y2="60.5"/>{bars}</svg>'
    )


def fill(template: str, parts: dict[str, str]) -> str:
    """Replaces each {{name}} once, in one pass: what is filled in is never looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
