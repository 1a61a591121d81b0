"""What every layout is read into: rows, the votes of people where there are any, and what was wrong with the input."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import ImageFile, ImageRef
from tpips_reward.prompts import is_text

#: Names of the controls start with this, so no model's may.
CONTROL_PREFIX = "control: "

#: What can be wrong with the input, and what it means. report.md counts them; report.html, report.json and problems.csv list every one.
PROBLEMS: dict[str, str] = {
    "bad_row": "a row of the manifest or of the benchmark's table that cannot be used",
    "doubled_key": "a key that several rows have; which outputs belong to which cannot be known",
    "bad_aspects": "aspects that are empty, twice there, both to keep and to change, or that the metric refuses",
    "no_aspects": "a row without aspects to keep or without aspects to change; its overall score does not exist",
    "unknown_field": "a field that means nothing here",
    "missing_source": "a source image that does not exist",
    "missing_output": "a model without an output for this row",
    "doubled_file": "several files of one key, such as 7.png and 7.jpg; which is meant cannot be known",
    "wrong_case": "a file whose name differs from the expected one in upper and lower case only",
    "other_suffix": "a file of the right name with another suffix",
    "unexpected_file": "an image file that belongs to no row",
    "shared_file": "one file that serves as the output of several rows or models, or as source and output",
    "unreadable_source": "a source that is no readable image, or of a size that no metric takes",
    "unreadable_output": "an output that is no readable image, or of a size that no metric takes",
    "other_size": "an output of another size than its source, of the same proportions",
    "other_shape": "an output of other proportions than its source",
    "bad_vote": "a vote that names no row or model of the set, or that cannot be read",
    "unreadable_cache": "a file of cached scores that cannot be read; it was scored anew",
    "failed_proposal": "an edit for which the model proposed no usable aspects; the rules proposed them instead",
    "guessed_aspects": "a row that the rules did not understand; its proposed aspects are a guess, to be corrected in the aspects file",
    "stale_aspects": "an entry of the aspects file that belongs to no row, or to another instruction",
}


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the input.

    Attributes:
        kind: a key of :data:`PROBLEMS`.
        detail: a sentence that names the thing.
        key, model: the row and the model that it is about; "" where it is about none.
        left_out: whether something was not scored because of it; False for what is only worth knowing.
    """

    kind: str
    detail: str
    key: str = ""
    model: str = ""
    left_out: bool = True

    def __post_init__(self) -> None:
        if self.kind not in PROBLEMS:
            raise TPIPSError(f"No problem is called {self.kind!r}; there are {', '.join(PROBLEMS)}.")


@dataclass(frozen=True)
class Row:
    """One edit that was asked for, with every model's answer to it.

    Attributes:
        key: what pairs the outputs with the source; unique in a data set.
        source: the image that was to be edited.
        instruction: what was asked.
        outputs: the edited image of each model that has one.
        preserve, target: aspects to keep and to change; empty where the data set names none.
        category: the kind of edit.
        proposed: which of "preserve" and "target" were proposed and not named by the data set.
    """

    key: str
    source: ImageRef
    instruction: str
    outputs: Mapping[str, ImageRef]
    preserve: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    category: str = "uncategorized"
    proposed: frozenset[str] = frozenset()

    @property
    def aspects(self) -> tuple[str, ...]:
        """All aspects, each once."""
        return tuple(dict.fromkeys((*self.preserve, *self.target)))

    def without(self, model: str) -> Row:
        """The same row without a model's output."""
        return replace(self, outputs={name: ref for name, ref in self.outputs.items() if name != model})


@dataclass(frozen=True)
class Vote:
    """People's choice between two outputs of one row.

    Attributes:
        key: the row.
        first, second: models (or candidates) of that row.
        label: 1 where the first was preferred, -1 where the second was, 0 for a tie.
        dimension: what was asked: "overall", "preservation" or "change".
        group: votes of one ranking share it, such as the six pairs of four candidates; "" where there is none.
    """

    key: str
    first: str
    second: str
    label: int
    dimension: str = "overall"
    group: str = ""


@dataclass(frozen=True)
class Dataset:
    """Rows of one source, of whatever layout.

    Attributes:
        name: where it came from, for the report.
        rows: the usable rows; keys are unique.
        models: names in the order of the columns.
        problems: what was wrong so far.
        votes, vote_rule: people's votes, and which set's rule counts them (a key of `agreement.RULES`).
        anonymous: the "models" are candidates whose order means nothing from row to row; only the votes compare them.
        total_rows: rows there were, with those left out.
        inputs: the files that it was read from: manifest, tables, votes. An evaluation replaces none of them.
    """

    name: str
    rows: tuple[Row, ...]
    models: tuple[str, ...]
    problems: tuple[Problem, ...] = ()
    votes: tuple[Vote, ...] = ()
    vote_rule: str = "plain"
    anonymous: bool = False
    total_rows: int = field(default=-1)
    inputs: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.total_rows < 0:
            object.__setattr__(self, "total_rows", len(self.rows))
        keys = [row.key for row in self.rows]
        if len(set(keys)) != len(keys):
            raise TPIPSError(f"The rows of {self.name} have a key twice; keys pair outputs with sources.")

    def files(self) -> Iterator[Path]:
        """Every file that scoring the set reads or has read: `inputs`, and the images that are files of their own."""
        yield from self.inputs
        for row in self.rows:
            yield from (ref.path for ref in (row.source, *row.outputs.values()) if isinstance(ref, ImageFile))

    def with_rows(self, rows: Iterable[Row], problems: Sequence[Problem]) -> Dataset:
        """The same set with other rows, and with more problems."""
        return replace(self, rows=tuple(rows), problems=(*self.problems, *problems))


def first_of(problems: Sequence[Problem]) -> str:
    """What an error adds where the input has problems, which may be its reason: " The first of N problems: ..."."""
    return f" The first of {len(problems)} problems: {problems[0].detail}" if problems else ""


def check_model_name(name: object) -> str:
    """A model's name, stripped.

    Raises:
        TPIPSError: it is no text, empty, no Unicode, or looks like a control's.
    """
    if not isinstance(name, str) or not name.strip():
        raise TPIPSError(f"A model's name is {name!r}; give it a short name.")
    if not is_text(name):  # a folder's name in another encoding
        raise TPIPSError(f"The model's name {name!r} holds half a character; rename it.")
    if name.strip().lower().startswith(CONTROL_PREFIX.strip()):
        raise TPIPSError(f"A model is called {name!r}, which is how the report names its controls; rename it.")
    return name.strip()


def check_key(key: object) -> str:
    """A key as text.

    Raises:
        TPIPSError: it is no text or whole number, empty, no Unicode, or leads out of the folder of results.
    """
    if isinstance(key, bool) or not isinstance(key, str | int) or not str(key).strip():
        raise TPIPSError(f"The key is {key!r}; give a short text or a number.")
    text = str(key).strip()
    if not is_text(text):
        raise TPIPSError(f"The key {text!r} holds half a character; give a short text or a number.")
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or "\\" in text or "\0" in text:
        raise TPIPSError(
            f"The key {text!r} leads out of the folder of results; keys are names such as 0001 or animal/7."
        )
    return text


def unique_rows(rows: Sequence[Row], keys: Sequence[tuple[str, object]]) -> tuple[list[Row], list[Problem]]:
    """Rows whose key no other entry has, be that one usable or not; the rest are listed.

    Args:
        rows: the usable ones.
        keys: (where it stands, such as "line 3"; key as it was read) of every entry. What is no key is passed over.
    """
    places: dict[str, list[str]] = {}
    for place, key in keys:
        with suppress(TPIPSError):
            places.setdefault(check_key(key), []).append(place)
    kept = [row for row in rows if len(places[row.key]) == 1]
    problems = [
        Problem("doubled_key", f"The key {key!r} stands in {', '.join(where)}; give each row its own.", key)
        for key, where in places.items()
        if len(where) > 1
    ]
    return kept, problems


def _identity(ref: ImageRef) -> str:
    """One text for all the ways to write a file's path."""
    return os.path.realpath(ref.path) if isinstance(ref, ImageFile) else ref.label


def shared_files(rows: Sequence[Row]) -> list[Problem]:
    """Outputs that serve several rows or models, and outputs that are their own source."""
    users: dict[str, list[tuple[str, str]]] = {}
    problems = []
    same: dict[str, str] = {}
    for row in rows:
        source = _identity(row.source)
        for model, ref in row.outputs.items():
            identity = _identity(ref)
            same.setdefault(identity, ref.label)
            users.setdefault(identity, []).append((row.key, model))
            if identity == source:
                detail = f"{ref.label} is the source and the output of {model}; it is scored as a copy."
                problems.append(Problem("shared_file", detail, row.key, model, left_out=False))
    for identity, cells in users.items():
        if len(cells) > 1:
            label = same[identity]
            names = ", ".join(f"{key} ({model})" for key, model in cells[:4]) + (" …" if len(cells) > 4 else "")
            detail = f"{label} is the output of {len(cells)}: {names}."
            problems.append(Problem("shared_file", detail, *cells[0], left_out=False))
    return problems
