"""Odd-one-out triplets from files: the layout of the paper's set (`sywang/tpips-odd-one-out`).

A row has three images and a list of factors, "overall" among them:

    {"p0_path": "a/0.png", "p1_path": "a/1.png", "p2_path": "a/2.png",
     "factors": [{"name": "lighting", "label": "p1", "probs": [0.2, 0.6, 0.2]}]}

`probs` are the vote shares after "can't tell" was dropped, `label` is the image with the most votes. A factor whose
label is none of the three images carries no target and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from metric_training.data.comparison import (
    Comparison,
    Data,
    DataError,
    Problems,
    as_json,
    checked_images,
    shortened,
    text_field,
    vote_shares,
)
from metric_training.data.rows import Rows, read_rows
from tpips_reward import TPIPSError
from tpips_reward.files import write_text
from tpips_reward.prompts import normalize_aspect

HUB_ID = "sywang/tpips-odd-one-out"
IMAGE_COLUMNS = ("p0_path", "p1_path", "p2_path")
COLUMNS = (*IMAGE_COLUMNS, "factors")
LABELS = ("p0", "p1", "p2")
NO_TARGET = "factors without a target (their label is none of p0, p1, p2)"
_SOURCES = ("source", "category", "task", "domain")
_KEYS = ("key", "id", "triplet", "triplet_id")


def load_odd_one_out(
    source: str | Path = HUB_ID,
    *,
    split: str | None = None,
    image_root: str | Path | None = None,
    strict: bool = False,
    revision: str | None = None,
) -> Data:
    """Triplets from a JSONL file, a folder or the Hub; arguments as `metric_training.data.rows.read_rows`.

    Args:
        strict: stop at the first bad row; otherwise bad rows are listed in the result's ``problems``.

    Raises:
        DataError: nothing usable is there, or a row is bad and ``strict``.
    """
    rows = read_rows(source, split=split, image_root=image_root, strict=strict, revision=revision)
    return odd_one_out_from_rows(rows).require_any()


def odd_one_out_from_rows(rows: Rows) -> Data:
    """Checked comparisons of the rows; bad rows and bad factors are listed in ``rows.problems``.

    A row is bad that lacks a column, an image, or has two equal images. A factor is bad (its row's others stay) that
    has no name, the name of an earlier one of the same images (in any order, in this row or an earlier one), a label that
    is not among the most-voted images, or probs that are no distribution.
    """
    data = Data(rows.name, "odd_one_out", [], rows.problems, {NO_TARGET: 0, "triplets without a target": 0})
    asked: dict[frozenset[str], dict[str, int]] = {}
    for line, row in rows.rows:
        try:
            missing = [column for column in COLUMNS if column not in row]
            if missing:
                raise DataError(f"{', '.join(map(repr, missing))} missing; the row has {', '.join(map(repr, row))}.")
            factors = as_list(row["factors"], "factors")
            images = checked_images([row[column] for column in IMAGE_COLUMNS], "odd_one_out", rows.root)
        except DataError as error:
            rows.problems.add(line, str(error))
            continue
        earlier = asked.setdefault(frozenset(image.key for image in images), {})
        problems = len(rows.problems.found)
        targets, without = factor_targets(factors, LABELS, line, rows.problems, earlier)
        data.dropped[NO_TARGET] += without
        if not targets:
            data.dropped["triplets without a target"] += len(rows.problems.found) == problems  # else listed there
            continue
        data.comparisons.append(
            Comparison(
                key=text_field(row, _KEYS) or f"{rows.problems.unit} {line}",
                task="odd_one_out",
                images=images,
                aspects=tuple(targets),
                votes=np.stack(list(targets.values())),
                source=text_field(row, _SOURCES) or rows.name,
            )
        )
    return data


def factor_targets(
    factors: Iterable[Any], labels: tuple[str, ...], line: int, problems: Problems, asked: dict[str, int]
) -> tuple[dict[str, np.ndarray], int]:
    """Vote shares by aspect.

    Args:
        factors: dicts with ``name``, ``label`` and ``probs``.
        labels: the labels that name a choice, in the order of ``probs``.
        line, problems: where bad factors are listed.
        asked: line by aspect of what earlier rows asked of the same images; these targets are added.

    Returns:
        The targets, and how many factors carry none.
    """
    targets: dict[str, np.ndarray] = {}
    without = 0
    for position, factor in enumerate(factors):
        try:
            name = factor_name(factor, position)
            if name.casefold() in asked:
                first = f"{problems.unit} {asked[name.casefold()]}"
                raise DataError(f"the aspect {name!r} is there twice for the same images; the first, in {first}, is kept.")
            label = factor.get("label")
            if label is not None and not isinstance(label, str):
                raise DataError(f"the label of {name!r} must be one of {', '.join(labels)}, not {label!r}.")
            if label not in labels:
                without += 1
                continue
            targets[name] = labelled_shares(name, label, factor.get("probs"), labels)
            asked[name.casefold()] = line
        except DataError as error:
            problems.add(line, str(error))
    return targets, without


def labelled_shares(name: str, label: str, probs: Any, labels: tuple[str, ...]) -> np.ndarray:
    """The vote shares of a factor, after checking that its label has the most votes.

    Raises:
        DataError: no distribution, or a wrong label.
    """
    try:
        shares = vote_shares(probs, len(labels))
    except DataError as error:
        raise DataError(f"{name!r}: {error}") from error
    if shares[labels.index(label)] < shares.max() - 1e-6:
        most = labels[int(shares.argmax())]
        raise DataError(f"{name!r}: the label {label!r} is wrong, since by probs {probs!r} most voted for {most!r}.")
    return shares


def factor_name(factor: Any, position: int) -> str:
    """The stripped name of a factor.

    Raises:
        DataError: when there is none.
    """
    if not isinstance(factor, Mapping):
        raise DataError(f"factor {position} must be an object with name, label and probs, not {factor!r}.")
    name = factor.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"factor {position} must have a name such as 'lighting', not {name!r}.")
    try:
        normalize_aspect(name)  # what no metric could be asked is a bad factor, and must not end an evaluation later
    except TPIPSError as error:
        raise DataError(f"factor {position}: {error}") from error
    return name.strip()


def as_list(value: Any, column: str) -> list[Any]:
    """A column of objects as a list: as it is, from a JSON text (CSV), or from a dict of lists (older `datasets`).

    Raises:
        DataError: when it is none of these.
    """
    if isinstance(value, str):
        try:
            value = as_json(value)
        except DataError as error:
            raise DataError(f"{column!r} must be a list of objects; this text is {error}") from error
    if isinstance(value, Mapping) and all(isinstance(part, list) for part in value.values()):
        return [dict(zip(value, cells, strict=False)) for cells in zip(*value.values(), strict=False)]
    if not isinstance(value, list):
        raise DataError(f"{column!r} must be a list of objects, not {shortened(repr(value))}.")
    return value


def odd_one_out_row(images: tuple[str, str, str], votes: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A row of the layout from image paths and vote shares by aspect."""
    factors = [
        {"name": name, "label": LABELS[int(shares.argmax())], "probs": [round(float(share), 6) for share in shares]}
        for name, shares in votes.items()
    ]
    return {**dict(zip(IMAGE_COLUMNS, images, strict=True)), "factors": factors}


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a JSONL file, whole or not at all.

    Raises:
        DataError: when the folder cannot be written.
    """
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        write_text(Path(path), text)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}); give another path for the output.") from error
