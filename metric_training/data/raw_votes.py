"""Single votes → vote distributions by the paper's rules (§3.1, §3.2), with a report of what was dropped and why.

A table has one row a vote:

    triplet,aspect,worker,session,choice,p0_path,p1_path,p2_path
    t1,lighting,w7,s12,p1,a/0.png,a/1.png,a/2.png
    t1,hair color,w7,s12,can't tell,a/0.png,a/1.png,a/2.png

The rules: the votes of a session that failed a sentinel (a triplet with two equal images, where the third must be
chosen) are left out; "can't tell" votes are dropped and the rest normalised; in test sets an aspect with three or more
"can't tell" is removed; in 2AFC exact ties are removed. "overall" is an aspect like any other.

    python -m metric_training.data.raw_votes votes.csv --output triplets.jsonl
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from metric_training.data.comparison import IMAGE_NAMES, DataError, Problems, Task, image_source, text_field
from metric_training.data.odd_one_out import odd_one_out_row, write_rows
from metric_training.data.rows import read_rows
from tpips_reward.arguments import HelpFormatter
from tpips_reward.errors import exit_on_errors

CANT_TELL = "can't tell"
#: So many "can't tell" of five remove an aspect from a test set.
REMOVE_AT = 3
_CHOICES: dict[Task, tuple[tuple[str, ...], ...]] = {
    "odd_one_out": (("p0", "0"), ("p1", "1"), ("p2", "2")),
    "two_afc": (("p0", "0", "left", "candidate 0"), ("p1", "1", "right", "candidate 1")),
}
_IMAGES: dict[Task, tuple[str, str, str]] = {
    "odd_one_out": ("p0_path", "p1_path", "p2_path"),
    "two_afc": ("reference", "p0_path", "p1_path"),
}
_REQUIRED = ("triplet", "aspect", "worker", "choice")


@dataclass(frozen=True)
class Vote:
    """One vote.

    Attributes:
        line: in the table.
        choice: index of the image (or candidate) that was chosen, None for "can't tell".
        images: the triplet's images as the table names them; empty where it does not.
        sentinel: the right choice, where the table says that this is a sentinel.
    """

    line: int
    triplet: str
    aspect: str
    worker: str
    session: str
    choice: int | None
    images: tuple[str, ...] = ()
    sentinel: int | None = None


@dataclass
class VoteReport:
    """What became of the votes.

    Attributes:
        votes: usable rows of the table.
        used: votes in the distributions.
        sentinel_votes: votes on sentinels; they only test their session.
        failed_sessions: session → its votes (sentinels not counted), all left out.
        cant_tell: "can't tell" votes that were dropped from aspects that stay.
        removed: (triplet, aspect, reason) of what was removed, with ``removed_votes`` votes in all.
        lost_triplets: triplets of which no aspect is left.
        unseen: triplets whose image files are not there, so that equal files could not make them sentinels.
        problems: bad rows.
    """

    votes: int = 0
    used: int = 0
    sentinel_votes: int = 0
    failed_sessions: dict[str, int] = field(default_factory=dict)
    cant_tell: int = 0
    removed: list[tuple[str, str, str]] = field(default_factory=list)
    removed_votes: int = 0
    lost_triplets: list[str] = field(default_factory=list)
    unseen: int = 0
    problems: Problems = field(default_factory=lambda: Problems("votes"))

    def describe(self, limit: int = 20) -> str:
        """Several lines: counts first, then names, at most ``limit`` of each kind."""
        lines = [
            f"{self.votes} votes, {len(self.problems.found)} bad rows.",
            f"used: {self.used}",
            f"on sentinels: {self.sentinel_votes}",
            f"in {len(self.failed_sessions)} sessions that failed a sentinel: {sum(self.failed_sessions.values())}",
            f"{CANT_TELL}, dropped: {self.cant_tell}",
            f"on {len(self.removed)} aspects that were removed: {self.removed_votes}",
            f"triplets without any aspect left: {len(self.lost_triplets)}",
        ]
        if self.unseen:
            lines.append(f"triplets whose images are not there, so that equal files could not be found: {self.unseen}")
        named = [f"session {name} left out ({count} votes)" for name, count in self.failed_sessions.items()]
        gone = [f"{triplet}, {aspect!r} removed: {reason}" for triplet, aspect, reason in self.removed]
        for group in (named, gone, [self.problems.describe(limit)] if self.problems.found else []):
            lines += group[:limit]
            if len(group) > limit:
                lines.append(f"... and {len(group) - limit} more.")
        return "\n".join(lines)


@dataclass(frozen=True)
class VotedTriplet:
    """A triplet with the vote shares of its aspects.

    Attributes:
        name: as in the table.
        images: as the table names them; empty where it does not.
        votes: aspect → (3,) or (2,) float32 shares, sum 1.
    """

    name: str
    images: tuple[str, ...]
    votes: dict[str, np.ndarray]


def distributions(
    votes: Iterable[Vote],
    *,
    task: Task = "odd_one_out",
    test_set: bool = True,
    image_root: Path | None = None,
    problems: Problems | None = None,
) -> tuple[list[VotedTriplet], VoteReport]:
    """Applies the rules.

    Args:
        votes: of any order.
        task: three images to choose from, or two candidates (ties are removed then).
        test_set: remove aspects with three or more "can't tell"; otherwise only those on which nobody could tell.
        image_root: where relative image paths start, to find sentinels by equal files; None: only equal paths are
            sentinels.
        problems: where votes that cannot be used are listed.

    Returns:
        The triplets in the order of their first vote, and the report.
    """
    report = VoteReport(problems=problems or Problems("votes"))
    by_triplet: dict[str, list[Vote]] = {}
    for vote in votes:
        by_triplet.setdefault(vote.triplet, []).append(vote)
        report.votes += 1
    sentinels = _sentinels(by_triplet, task, image_root)
    report.unseen = sum(_is_unseen(name_votes, image_root) for name_votes in by_triplet.values())
    failed = {vote.session for name, answer in sentinels.items() for vote in by_triplet[name] if vote.choice != answer}
    report.sentinel_votes = sum(len(by_triplet[name]) for name in sentinels)
    found = []
    for name, cast in by_triplet.items():
        if name in sentinels:
            continue
        kept = []
        for vote in _first_votes(cast, report):
            if vote.session in failed:
                report.failed_sessions[vote.session] = report.failed_sessions.get(vote.session, 0) + 1
            else:
                kept.append(vote)
        shares = _shares(name, kept, task, test_set, report)
        if shares:
            images = next((vote.images for vote in cast if vote.images), ())
            found.append(VotedTriplet(name, images, shares))
        else:
            report.lost_triplets.append(name)
    for session in sorted(failed - set(report.failed_sessions)):
        report.failed_sessions[session] = 0
    return found, report


def _shares(name: str, votes: list[Vote], task: Task, test_set: bool, report: VoteReport) -> dict[str, np.ndarray]:
    """Vote shares by aspect of one triplet."""
    by_aspect: dict[str, list[Vote]] = defaultdict(list)
    for vote in votes:
        by_aspect[vote.aspect].append(vote)
    shares = {}
    for aspect, cast in by_aspect.items():
        told = [vote.choice for vote in cast if vote.choice is not None]
        silent = len(cast) - len(told)
        counts = np.bincount(told, minlength=len(_CHOICES[task])) if told else None
        reason = ""
        if counts is None or (test_set and silent >= REMOVE_AT):
            reason = f"{silent} of {len(cast)} {CANT_TELL}"
        elif task == "two_afc" and counts[0] == counts[1]:
            reason = f"a tie, {counts[0]} to {counts[1]}"
        if reason or counts is None:
            report.removed.append((name, aspect, reason))
            report.removed_votes += len(cast)
            continue
        shares[aspect] = (counts / counts.sum()).astype(np.float32)
        report.cant_tell += silent
        report.used += len(told)
    return shares


def _first_votes(votes: list[Vote], report: VoteReport) -> Iterable[Vote]:
    """Votes without a worker's second ones on the same aspect, which are listed."""
    seen: dict[tuple[str, str], int] = {}
    for vote in votes:
        earlier = seen.setdefault((vote.aspect, vote.worker), vote.line)
        if earlier == vote.line:
            yield vote
        else:
            report.votes -= 1
            report.problems.add(
                vote.line, f"worker {vote.worker} voted on {vote.triplet}, {vote.aspect!r} before (line {earlier})."
            )


def _sentinels(by_triplet: Mapping[str, list[Vote]], task: Task, root: Path | None) -> dict[str, int]:
    """Sentinel triplets and their right choice: said by the table, or found by two equal images."""
    answers = {}
    for name, votes in by_triplet.items():
        said = next((vote.sentinel for vote in votes if vote.sentinel is not None), None)
        images = next((vote.images for vote in votes if vote.images), ())
        answer = said if said is not None else _odd_of_equal(images, task, root)
        if answer is not None:
            answers[name] = answer
    return answers


def _odd_of_equal(images: tuple[str, ...], task: Task, root: Path | None) -> int | None:
    """The only right choice where two images are equal, else None (two equal candidates have none)."""
    if len(images) != 3:
        return None
    # in 2AFC the candidate that equals the reference is the right one
    answer = {(1, 2): 0, (0, 2): 1, (0, 1): 2} if task == "odd_one_out" else {(0, 1): 0, (0, 2): 1}
    for (i, j), right in answer.items():
        if images[i] == images[j]:
            return right
        if root is not None:
            first, second = (image_source(images[k], root) for k in (i, j))
            if first.is_file and second.is_file and first.same_as(second):
                return right
    return None


def _is_unseen(votes: list[Vote], root: Path | None) -> bool:
    images = next((vote.images for vote in votes if vote.images), ())
    if root is None or not images:
        return False
    return not all(image_source(name, root).is_file for name in images)


def read_votes(
    source: str | Path, *, task: Task = "odd_one_out", strict: bool = False
) -> tuple[list[Vote], Problems, Path | None]:
    """Votes of a CSV or JSONL table.

    Columns: triplet, aspect, worker, choice; optional: session (else each worker is one), sentinel (the right choice)
    and the three image paths. A choice is p0, p1, p2 (or 0, 1, 2), in 2AFC p0, p1 (or left, right), or "can't tell" in
    any spelling.

    Returns:
        The votes, the bad rows, and the folder that relative image paths start from.

    Raises:
        DataError: the table cannot be read, or a row is bad and ``strict``.
    """
    rows = read_rows(source, strict=strict)
    votes = []
    for line, row in rows.rows:
        try:
            votes.append(_vote(line, row, task))
        except DataError as error:
            rows.problems.add(line, str(error))
    return votes, rows.problems, rows.root


def _vote(line: int, row: Mapping[str, Any], task: Task) -> Vote:
    absent = [name for name in _REQUIRED if not text_field(row, [name])]
    if absent:
        raise DataError(f"{', '.join(absent)} missing or empty; a vote needs {', '.join(_REQUIRED)}.")
    worker = text_field(row, ["worker"])
    sentinel = text_field(row, ["sentinel"])
    images = tuple(text_field(row, [name]) for name in _IMAGES[task])
    return Vote(
        line=line,
        triplet=text_field(row, ["triplet"]),
        aspect=text_field(row, ["aspect"]),
        worker=worker,
        session=text_field(row, ["session"]) or f"worker {worker}",
        choice=parse_choice(text_field(row, ["choice"]), task),
        images=images if all(images) else (),
        sentinel=parse_choice(sentinel, task) if sentinel else None,
    )


def parse_choice(text: str, task: Task = "odd_one_out") -> int | None:
    """The index of a choice, None for "can't tell".

    Raises:
        DataError: for anything else.
    """
    plain = re.sub(r"[^a-z0-9]+", " ", text.casefold().replace("'", "").replace("\u2019", "")).strip()
    if plain in ("cant tell", "can not tell", "cannot tell", "canttell"):
        return None
    for index, names in enumerate(_CHOICES[task]):
        if plain in names:
            return index
    known = ", ".join(names[0] for names in _CHOICES[task])
    raise DataError(f"the choice {text!r} is none of {known} or {CANT_TELL!r}.")


def as_rows(triplets: Iterable[VotedTriplet], task: Task = "odd_one_out") -> list[dict[str, Any]]:
    """Rows that `metric_training.data.odd_one_out` (or `two_afc`) reads.

    Raises:
        DataError: a triplet whose images the table does not name.
    """
    rows: list[dict[str, Any]] = []
    for triplet in triplets:
        if len(triplet.images) != 3:
            raise DataError(f"The table does not name the images of {triplet.name}; add {', '.join(_IMAGES[task])}.")
        first, second, third = triplet.images
        if task == "odd_one_out":
            rows.append({"triplet": triplet.name, **odd_one_out_row((first, second, third), triplet.votes)})
        else:
            factors = [{"name": name, "probs": [float(s) for s in shares]} for name, shares in triplet.votes.items()]
            images = dict(zip(IMAGE_NAMES[task], (first, second, third), strict=True))
            rows.append({"triplet": triplet.name, **images, "factors": factors})
    return rows


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Turn single votes into vote distributions by the paper's rules.", formatter_class=HelpFormatter)
    parser.add_argument("votes", help="CSV or JSONL, one row a vote")
    parser.add_argument("--output", type=Path, required=True, help="JSONL to write; image paths stay as they are")
    parser.add_argument("--task", choices=list(_CHOICES), default="odd_one_out", help="what was asked")
    parser.add_argument(
        "--training_set", action="store_true", help=f"keep aspects with {REMOVE_AT} or more {CANT_TELL} of which some could tell"
    )
    parser.add_argument("--image_root", type=Path, help="where image paths start (default: the table's folder)")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad row")
    options = parser.parse_args(arguments)
    if options.image_root is not None and not options.image_root.is_dir():
        raise DataError(f"The image root {options.image_root} is no folder.")
    votes, problems, folder = read_votes(options.votes, task=options.task, strict=options.strict)
    triplets, report = distributions(
        votes,
        task=options.task,
        test_set=not options.training_set,
        image_root=options.image_root or folder,
        problems=problems,
    )
    if not triplets:
        reason = report.describe(3) if votes or problems.found else "it has no votes"
        raise DataError(f"{options.votes} leaves no triplet: {reason}")
    write_rows(options.output, as_rows(triplets, options.task))
    print(report.describe())
    print(f"{len(triplets)} triplets written to {options.output}")


if __name__ == "__main__":
    main()
