"""Aspects for rows that name none: from the file of corrected ones, or proposed; marked as proposed either way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from PIL import Image

from tpips_reward.aspects import (
    Entry,
    Proposal,
    ProposalError,
    Proposer,
    Request,
    RuleProposer,
    add_entries,
    aspects_mark,
    read_entries,
)
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import decode
from tpips_reward.evaluation.rows import Dataset, Problem, Row

#: A model sees the source with at most so many pixels a side.
PICTURE_SIDE = 768
#: A model's proposals are written after so many, so that an interruption costs few.
WRITE_EVERY = 20


@dataclass(frozen=True)
class Proposed:
    """A data set in which every row has aspects, where they came from (source -> number of rows), and which entries the
    file of proposals does not hold yet.

    Sources are "named" (by the data set), "edited" (a person wrote or changed the proposal), the name of a model, and
    "instruction", "category" and "nothing" (what the rules went by, see `tpips_reward.aspects.Proposal`).
    """

    dataset: Dataset
    origins: dict[str, int]
    made: dict[str, Entry]


@dataclass
class _Work:
    """What is known while the rows are gone through."""

    known: dict[str, Entry]
    make: Callable[[], Proposer]
    problems: list[Problem] = field(default_factory=list)
    made: dict[str, Entry] = field(default_factory=dict)
    unwritten: int = 0
    _proposer: Proposer | None = None

    @property
    def name(self) -> str:
        """Of the proposer, which is made only where what makes it does not know."""
        name = getattr(self.make, "name", None)
        return name if isinstance(name, str) else self.proposer.name

    @property
    def proposer(self) -> Proposer:
        """Made when the first row needs it: a model takes minutes to load."""
        if self._proposer is None:
            self._proposer = self.make()
        return self._proposer

    def write(self, path: Path) -> None:
        """What was made so far."""
        add_entries(path, self.made)
        self.made, self.unwritten = {}, 0


def propose_aspects(
    dataset: Dataset, path: Path | None = None, make: Callable[[], Proposer] = RuleProposer
) -> Proposed:
    """Fills in aspects where a row names none to keep or none to change. A model's proposals are written at once, since
    they cost much; what the rules propose is for the caller to write, once nothing else is wrong (`Proposed.made`).

    What a row does name always stays; a proposed aspect that it names on the other side is dropped.

    Args:
        dataset: any.
        path: the file of proposals: read where it exists, so that corrections count and no model is asked twice;
            None keeps none.
        make: makes the proposer, when the first row needs it (`tpips_reward.aspects.parse_proposer`).

    Raises:
        TPIPSError: the file holds something wrong, or cannot be written; the proposer does not work. A single edit for
            which a model finds nothing is no error: the rules propose, and it is listed. So is one that the rules do not
            understand: what they propose then is a guess.
    """
    entries = read_entries(path) if path is not None else {}
    work = _Work(entries, make)
    rows, used = [], set()
    origins: Counter[str] = Counter()
    try:
        for row in dataset.rows:
            if row.preserve and row.target:
                rows.append(row)
                origins["named"] += 1
                continue
            entry, origin = _entry(row, work)
            used.add(row.key)
            if entry != entries.get(row.key):
                work.made[row.key] = entry
            origins[origin] += 1
            rows.append(_filled(row, entry))
            if origin == "nothing":
                work.problems.append(_guess(rows[-1], path))
            if path is not None and work.unwritten >= WRITE_EVERY:
                work.write(path)
    finally:  # also where something stops it
        if path is not None and work.unwritten:
            work.write(path)
    keys = {row.key for row in dataset.rows}
    for key in entries:
        if key not in used:
            why = "has aspects of its own" if key in keys else "is no usable row"
            detail = f"The aspects file has an entry for {key!r}, which {why}; it is kept in the file and not used."
            work.problems.append(Problem("stale_aspects", detail, key if key in keys else "", left_out=False))
    return Proposed(dataset.with_rows(rows, work.problems), dict(origins), work.made)


def _guess(row: Row, path: Path | None) -> Problem:
    """Of a row whose aspects were proposed without anything to go by."""
    sides = (("target", "to change", row.target), ("preserve", "to keep", row.preserve))
    names = "; ".join(f"{how}: {', '.join(aspects)}" for side, how, aspects in sides if side in row.proposed)
    remedy = f"correct them in {path.name}, or name" if path is not None else "name"
    detail = (
        f"The rules did not understand the instruction {row.instruction!r} of {row.key!r}; its proposed aspects are a guess "
        f"({names}): {remedy} the row's own."
    )
    return Problem("guessed_aspects", detail, row.key, left_out=False)


def _entry(row: Row, work: _Work) -> tuple[Entry, str]:
    """A row's entry, and where it comes from."""
    known = work.known.get(row.key)
    if known is not None and known.instruction != row.instruction:
        detail = f"The aspects of {row.key!r} were for {known.instruction!r}; they are proposed anew."
        work.problems.append(Problem("stale_aspects", detail, row.key, left_out=False))
        known = None
    if known is not None and known.edited:
        return replace(known, by=""), "edited"
    rules = RuleProposer()
    ruled = rules(Request(row.instruction, row.category))
    name = work.name
    if known is not None and known.proposer == name:
        if name != rules.name:
            return known, known.proposer
        by = known.by or ruled.by  # a file of an older version does not say it
        if by != "nothing" or ruled.by == "nothing":  # else there is more to go by than there was
            return replace(known, by=by), by
    proposal = _proposal(row, work)
    if proposal is None:
        name, proposal = rules.name, ruled
    elif name != rules.name:
        work.unwritten += 1
    mark = aspects_mark(proposal.target, proposal.preserve)
    by = proposal.by if name == rules.name else ""
    return Entry(row.instruction, proposal.kind, proposal.target, proposal.preserve, name, mark, by), proposal.by


def _proposal(row: Row, work: _Work) -> Proposal | None:
    """None where the proposer finds nothing for this row, which is listed."""
    proposer = work.proposer  # a model that cannot be loaded stops everything
    try:
        image = _picture(row) if proposer.needs_image else None
    except TPIPSError:
        return None  # scoring lists the source as unreadable, and leaves the row out
    try:
        return proposer(Request(row.instruction, row.category, image))
    except ProposalError as error:
        work.problems.append(Problem("failed_proposal", f"{row.key}: {error}", row.key, left_out=False))
        return None


def _picture(row: Row) -> Image.Image:
    pixels = (decode(row.source.read(), row.source.label) * 255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels)
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
    return picture


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
