"""One name → one data set, whatever its kind: what `--data` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import get_args

from metric_training.data.comparison import Data, DataError, Task
from metric_training.data.odd_one_out import COLUMNS, IMAGE_COLUMNS, odd_one_out_from_rows
from metric_training.data.procedural import KINDS, TEST_SEED, procedural_data
from metric_training.data.rows import read_rows
from metric_training.data.two_afc import two_afc_from_rows


@dataclass(frozen=True)
class DataOptions:
    """How a source is read.

    Attributes:
        count: comparisons of a procedural set.
        seed: of a procedural set.
        wordings: of a procedural set: "train", or "test" for phrases never trained on.
        split: of a set from files or the Hub.
        image_root: where relative image paths start.
        strict: stop at the first bad row.
        revision: of a Hub repository.
        task: what a set from files is; None: found by its columns.
        columns: names of 2AFC columns by role.
        limit: at most so many comparisons of a set from files; None: all.
    """

    count: int = 1000
    seed: int = TEST_SEED
    wordings: str = "train"
    split: str | None = "test"
    image_root: str | None = None
    strict: bool = False
    revision: str | None = None
    task: Task | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None


def load_data(source: str, options: DataOptions | None = None) -> Data:
    """A data set by name.

    Args:
        source: "procedural", "procedural-2afc", "photographs" or "photographs-2afc" (both may name a folder,
            "photographs:FOLDER"), a file, a folder, or a Hub id.
        options: see :class:`DataOptions`.

    Raises:
        DataError: nothing usable is there.
    """
    options = options or DataOptions()
    kind, _, folder = source.partition(":")
    for known in KINDS:
        if kind == known:
            if folder and not known.startswith("photographs"):
                raise DataError(f"The set {known} takes no folder; leave out {folder!r}.")
            return procedural_data(
                known, options.count, seed=options.seed, split=options.wordings, folder=folder or None
            )
    rows = read_rows(
        source,
        split=options.split,
        image_root=options.image_root,
        strict=options.strict,
        revision=options.revision,
    )
    iterator = iter(rows.rows)
    first = next(iterator, None)
    if first is None:
        raise DataError(f"{source} has no row. {rows.problems.describe(3)}".strip())
    rows.rows = chain([first], iterator)
    task = options.task or guess_task(first[1], options.columns)
    if task not in get_args(Task):
        raise DataError(f"The task {task!r} is unknown; choose one of {', '.join(get_args(Task))}.")
    data = odd_one_out_from_rows(rows) if task == "odd_one_out" else two_afc_from_rows(rows, options.columns)
    data.require_any()
    if options.limit is not None and options.limit < len(data.comparisons):
        data.dropped["comparisons beyond the limit"] = len(data.comparisons) - options.limit
        data.comparisons = data.comparisons[: options.limit]
    return data


def guess_task(row: Mapping[str, object], columns: Mapping[str, str]) -> Task:
    """Odd-one-out where a row has (nearly) the columns of that layout, else 2AFC."""
    is_odd_one_out = set(IMAGE_COLUMNS) <= set(row) or len(set(COLUMNS) & set(row)) == len(COLUMNS) - 1
    has_reference = any("ref" in column.casefold() for column in row)
    return "odd_one_out" if is_odd_one_out and not has_reference and not columns else "two_afc"
