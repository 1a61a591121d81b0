"""2AFC sets from files: a reference, two candidates, and which of them people found nearer to it in each aspect.

Sets name their columns in many ways (`sywang/tpips-2afc` among them), so the columns are found by their names: see
:func:`find_columns`. What does not fit can be named: ``columns={"reference": "photo", "candidate_0": "left_output",
...}``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from metric_training.data.comparison import (
    Comparison,
    Data,
    DataError,
    ImageSource,
    as_float,
    as_json,
    checked_images,
    shortened,
    text_field,
    vote_shares,
)
from metric_training.data.odd_one_out import as_list, factor_name
from metric_training.data.rows import Rows, read_rows

HUB_ID = "sywang/tpips-2afc"
ROLES = ("reference", "candidate_0", "candidate_1", "factors", "aspect", "probs", "votes_0", "votes_1", "source")
TIES = "ties"
_REFERENCES = ("reference", "ref", "anchor", "query")
_CANDIDATES = (
    ("p 0", "p 1"), ("0", "1"), ("candidate 0", "candidate 1"), ("cand 0", "cand 1"), ("option 0", "option 1"),
    ("output 0", "output 1"), ("left", "right"), ("a", "b"), ("candidate a", "candidate b"), ("cand a", "cand b"),
    ("candidate left", "candidate right"), ("candidate 1", "candidate 2"), ("cand 1", "cand 2"), ("p 1", "p 2"),
    ("1", "2"),
)  # fmt: skip
_FACTORS = ("factors", "aspects", "judgments", "judgements")
_ASPECTS = ("aspect", "condition", "factor", "attribute", "name", "c")
_PROBS = ("probs", "probabilities", "distribution", "shares", "vote shares", "y", "judge", "vote", "votes")
_COUNTS = (("left vote", "right vote"), ("left votes", "right votes"), ("votes 0", "votes 1"), ("votes a", "votes b"),
           ("p 0 votes", "p 1 votes"))  # fmt: skip
_SOURCES = ("source", "category", "task", "domain", "dataset")
#: Words in a column's name that say only that it is an image.
_FILLERS = {"path", "paths", "image", "images", "img", "im", "file", "filename", "x"}
_EXPECTED = (
    "a reference image (a column such as reference, ref or ref_path), two candidates (p0_path and p1_path, left and "
    "right, a and b, candidate_0 and candidate_1 ...), and the votes: either factors (a list of {name, probs: [2 "
    "numbers]}), or an aspect column with probs ([2 numbers]), y (the share that prefers the second candidate), or "
    "left_vote and right_vote"
)


@dataclass(frozen=True)
class Columns:
    """Which column has which role; None where there is none.

    Attributes:
        reference, candidate_0, candidate_1: images.
        factors: a list of objects with a name and shares, or
        aspect: a phrase a row (None: "overall"), with
        probs: the two shares, or the share of the second candidate, or
        votes_0, votes_1: two columns of counts or shares.
        source: group for figures by source.
    """

    reference: str
    candidate_0: str
    candidate_1: str
    factors: str | None = None
    aspect: str | None = None
    probs: str | None = None
    votes_0: str | None = None
    votes_1: str | None = None
    source: str | None = None


def load_two_afc(
    source: str | Path = HUB_ID,
    *,
    split: str | None = None,
    image_root: str | Path | None = None,
    strict: bool = False,
    revision: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Data:
    """A 2AFC set from a file, a folder or the Hub; arguments as `metric_training.data.rows.read_rows`.

    Args:
        columns: names of columns by role (:data:`ROLES`), where they cannot be found by their names.

    Raises:
        DataError: nothing usable is there, the columns do not fit, or a row is bad and ``strict``.
    """
    rows = read_rows(source, split=split, image_root=image_root, strict=strict, revision=revision)
    return two_afc_from_rows(rows, columns).require_any()


def find_columns(row: Mapping[str, Any], where: str, given: Mapping[str, str] | None = None) -> Columns:
    """The role of each column, by names without case, and without words such as "path" and "image".

    Args:
        row: a row of the set.
        where: the set, for messages.
        given: names of columns by role; they win.

    Raises:
        DataError: a role is missing, has several columns, or a given name or role does not exist. It says what was
            expected.
    """
    chosen: dict[str, str] = dict(given or {})
    for role, column in chosen.items():
        if role not in ROLES or column not in row:
            known = f"the roles are {', '.join(ROLES)}" if role not in ROLES else f"the columns are {', '.join(row)}"
            raise DataError(f"{where}: {role}={column} does not fit; {known}.")
    by_name: dict[str, list[str]] = {}
    for column in row:
        by_name.setdefault(_plain(column), []).append(column)
    images = {name: [c for c in columns if _is_image(row[c])] for name, columns in by_name.items()}

    def one(role: str, names: Sequence[str], among: Mapping[str, list[str]]) -> None:
        # chosen columns are taken: a name may speak for two roles
        found = [c for name in names for c in among.get(name, []) if c not in chosen.values()]
        if role not in chosen and found:
            if len(found) > 1 and role == "reference":
                raise DataError(
                    f"{where}: several columns could be the {role}: {', '.join(found)}. Name it: {role}=..."
                )
            chosen[role] = found[0]

    def pair(roles: tuple[str, str], names: Sequence[tuple[str, str]], among: Mapping[str, list[str]]) -> None:
        if any(role in chosen for role in roles):
            return
        for both in names:
            found = [c for name in both for c in among.get(name, []) if c not in chosen.values()]
            if len(found) == 2:
                chosen.update(zip(roles, found, strict=True))
                return

    one("reference", _REFERENCES, images)
    pair(("candidate_0", "candidate_1"), _CANDIDATES, images)
    lists = {name: [c for c in columns if _is_listing(row[c])] for name, columns in by_name.items()}
    one("factors", _FACTORS, lists)
    if "factors" not in chosen:
        one("aspect", _ASPECTS, by_name)
        pair(("votes_0", "votes_1"), _COUNTS, by_name)
        if "votes_0" not in chosen:
            one("probs", _PROBS, by_name)
    # by the whole name: "source_image" is no group
    one("source", _SOURCES, {column.casefold(): [column] for column in row})
    has_votes = "factors" in chosen or "probs" in chosen or {"votes_0", "votes_1"} <= set(chosen)
    missing = [role for role in ("reference", "candidate_0", "candidate_1") if role not in chosen]
    if missing or not has_votes:
        lacking = ", ".join([*missing, *([] if has_votes else ["votes"])])
        raise DataError(
            f"{where} is no 2AFC set as far as its columns tell ({', '.join(row)}): {lacking} not found. "
            f"Expected: {_EXPECTED}. Name columns that are called otherwise by their role (--columns "
            "reference=photo,candidate_0=...)."
        )
    return Columns(**chosen)


@dataclass
class _Group:
    """What was asked about the same three images, over one row or several."""

    key: str
    images: tuple[ImageSource, ImageSource, ImageSource]
    source: str
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)


def two_afc_from_rows(rows: Rows, columns: Mapping[str, str] | None = None) -> Data:
    """Checked comparisons; rows about the same three images are one comparison. Exact ties are dropped (§3.2)."""
    data = Data(rows.name, "two_afc", [], rows.problems, {TIES: 0})
    iterator = iter(rows.rows)
    first = next(iterator, None)
    if first is None:
        return data
    roles = find_columns(first[1], rows.name, columns)
    groups: dict[tuple[str, str, str], _Group] = {}
    for line, row in chain([first], iterator):
        try:
            values = [_cell(row, name) for name in (roles.reference, roles.candidate_0, roles.candidate_1)]
            images = checked_images(values, "two_afc", rows.root)
            factors = _factors(row, roles)
        except DataError as error:
            rows.problems.add(line, str(error))
            continue
        keys = (images[0].key, images[1].key, images[2].key)
        source = text_field(row, [roles.source] if roles.source else []) or rows.name
        group = groups.setdefault(keys, _Group(f"{rows.problems.unit} {line}", images, source))
        for position, factor in enumerate(factors):
            try:
                data.dropped[TIES] += not _add(group, factor, position)
            except DataError as error:
                rows.problems.add(line, str(error))
    data.comparisons += [
        Comparison(g.key, "two_afc", g.images, tuple(g.targets), np.stack(list(g.targets.values())), source=g.source)
        for g in groups.values()
        if g.targets
    ]
    return data


def two_afc_shares(value: Any) -> np.ndarray:
    """Votes as a cell has them → shares of both candidates.

    Args:
        value: two shares or counts, or one number in [0, 1], the share that prefers the second candidate.

    Returns:
        (2,) float32 that sums to 1.

    Raises:
        DataError: when it is neither.
    """
    if isinstance(value, str):
        try:
            value = as_json(value)
        except DataError:
            raise DataError(f"votes must be two numbers or a share in [0, 1], not {shortened(repr(value))}.") from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value <= 1:
            raise DataError(f"a single vote number must be a share in [0, 1], not {shortened(repr(value))}.")
        return np.array([1 - value, value], np.float32)
    if isinstance(value, list | tuple | np.ndarray) and len(value) == 2 and all(isinstance(v, int) for v in value):
        total = sum(value)
        if min(value) >= 0 and total > 1:  # counts; (1, 0) is the same read either way
            value = [v / total for v in value]
    return vote_shares(value, 2)


def _add(group: _Group, factor: Any, position: int) -> bool:
    """Adds a factor's target; False for a tie."""
    name = factor_name(factor, position)
    if name.casefold() in group.seen:
        raise DataError(f"the aspect {name!r} is there twice for the same images; the first is kept.")
    group.seen.add(name.casefold())
    value = next((factor[key] for key in ("probs", "y", "votes", "judge", "vote") if factor.get(key) is not None), None)
    try:
        shares = two_afc_shares(value)
    except DataError as error:
        raise DataError(f"{name!r}: {error}") from error
    if abs(shares[0] - shares[1]) < 1e-6:
        return False
    group.targets[name] = shares
    return True


def _factors(row: Mapping[str, Any], roles: Columns) -> list[Any]:
    """The row's factors; a row of one aspect has one."""
    if roles.factors:
        return as_list(_cell(row, roles.factors), roles.factors)
    name = _cell(row, roles.aspect) if roles.aspect else "overall"
    if roles.votes_0 and roles.votes_1:
        counts = [_number(_cell(row, column), column) for column in (roles.votes_0, roles.votes_1)]
        total = sum(counts)
        if not 0 < total < math.inf or min(counts) < 0:
            raise DataError(f"{roles.votes_0} and {roles.votes_1} must be counts of votes, not {counts}.")
        return [{"name": name, "probs": [count / total for count in counts]}]
    return [{"name": name, "probs": _cell(row, roles.probs or "")}]


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise DataError(f"{column!r} missing; the row has {', '.join(map(repr, row))}.")
    return row[column]


def _number(value: Any, column: str) -> float:
    try:
        return as_float(value)
    except (TypeError, ValueError):
        raise DataError(f"{column!r} must be a number, not {shortened(repr(value))}.") from None


def _plain(column: str) -> str:
    """A column's name in the form of the tables above: "Image_A" → "a", "p0_path" → "p 0"."""
    words = re.findall(r"[a-z]+|\d+", column.casefold())
    return " ".join(word for word in words if word not in _FILLERS) or " ".join(words)


def _is_image(cell: Any) -> bool:
    return isinstance(cell, ImageSource) or (isinstance(cell, str) and bool(cell.strip()))


def _is_listing(cell: Any) -> bool:
    return isinstance(cell, list | dict) or (isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"))
