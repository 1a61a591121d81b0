"""Aspects for rows that name none: from the file of corrected ones, or by rules; marked as proposed either way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from tpips_reward.aspects import Entry, propose, read_entries, write_entries
from tpips_reward.evaluation.rows import Dataset, Problem, Row


@dataclass(frozen=True)
class Proposed:
    """A data set in which every row has aspects, and where they came from: source -> number of rows.

    Sources are "named" (by the data set), "edited" (a person changed the proposal), and "instruction", "category" and
    "nothing" (what the rules went by, see `tpips_reward.aspects.Proposal`).
    """

    dataset: Dataset
    origins: dict[str, int]


def propose_aspects(dataset: Dataset, path: Path | None = None) -> Proposed:
    """Fills in aspects where a row names none to keep or none to change, and writes the proposals.

    What a row does name always stays; a proposed aspect that it names on the other side is dropped.

    Args:
        dataset: any.
        path: the file of proposals: read where it exists, so that corrections count, then written; None keeps none.

    Raises:
        TPIPSError: the file holds something wrong, or cannot be written.
    """
    entries = read_entries(path) if path is not None else {}
    rows, used, problems = [], {}, []
    origins: Counter[str] = Counter()
    for row in dataset.rows:
        if row.preserve and row.target:
            rows.append(row)
            origins["named"] += 1
            continue
        proposal = propose(row.instruction, row.category)
        entry = Entry(row.instruction, proposal.kind, proposal.target, proposal.preserve)
        origin = proposal.by
        known = entries.get(row.key)
        if known is not None and known.instruction == row.instruction:
            if (known.target, known.preserve) != (entry.target, entry.preserve):
                origin = "edited"
            entry = known
        elif known is not None:
            detail = f"The aspects of {row.key!r} were for {known.instruction!r}; they are proposed anew."
            problems.append(Problem("stale_aspects", detail, row.key, left_out=False))
        used[row.key] = entry
        origins[origin] += 1
        rows.append(_filled(row, entry))
    keys = {row.key for row in dataset.rows}
    for key, entry in entries.items():
        if key not in used:
            why = "has aspects of its own" if key in keys else "is no usable row"
            detail = f"The aspects file has an entry for {key!r}, which {why}; it is kept in the file and not used."
            problems.append(Problem("stale_aspects", detail, key if key in keys else "", left_out=False))
            used[key] = entry
    if path is not None and used:
        write_entries(path, used)
    return Proposed(dataset.with_rows(rows, problems), dict(origins))


def _filled(row: Row, entry: Entry) -> Row:
    named = {aspect.casefold() for aspect in row.aspects}
    proposed = []
    preserve, target = row.preserve, row.target
    if not preserve:
        preserve = tuple(aspect for aspect in entry.preserve if aspect.casefold() not in named)
        proposed.append("preserve")
    if not target:
        target = tuple(aspect for aspect in entry.target if aspect.casefold() not in named)
        proposed.append("target")
    return replace(row, preserve=preserve, target=target, proposed=frozenset(proposed))


def without_aspects(dataset: Dataset) -> list[Problem]:
    """Rows that still have no aspects of one kind."""
    problems = []
    for row in dataset.rows:
        for role, names in (("to keep", row.preserve), ("to change", row.target)):
            if not names:
                detail = f"The row {row.key!r} has no aspects {role}; it has no overall score."
                problems.append(Problem("no_aspects", detail, row.key, left_out=True))
    return problems
