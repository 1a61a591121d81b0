"""Pairs of image files to be scored: as arguments, or in a CSV or JSONL file.

    a,b,aspects
    in/1.png,out/1.png,lighting;car color
    {"a": "in/1.png", "b": "out/1.png", "aspects": ["lighting", "car color"]}

Paths are relative to the file. A row without aspects gets those of the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tpips_reward.answers import checked_similarities, name_comparison
from tpips_reward.errors import NotFinite, TPIPSError
from tpips_reward.evaluation.image_files import ImageFile, decode, image_size
from tpips_reward.evaluation.tables import csv_rows, jsonl_rows
from tpips_reward.prompts import normalize_aspect
from tpips_reward.rewards.aspects import aspect_lists

SUFFIXES = (".csv", ".jsonl")
COLUMNS = ("a", "b", "aspects")
#: Distinct images that are decoded at one time.
BATCH_IMAGES = 64
_LISTED = 20


@dataclass(frozen=True)
class PairRow:
    """Two images and what to compare.

    Attributes:
        place: where the row stands, such as "line 2"; empty for arguments.
        a, b: paths as they were given.
        first, second: where the files are.
        aspects: at least one.
    """

    place: str
    a: str
    b: str
    first: Path
    second: Path
    aspects: tuple[str, ...]


def is_pair_file(paths: Sequence[str]) -> bool:
    """Whether the arguments are one file of pairs and no images."""
    return len(paths) == 1 and Path(paths[0]).suffix.lower() in SUFFIXES


def pairs_of_arguments(paths: Sequence[str], aspects: Sequence[str]) -> list[PairRow]:
    """A1 B1 A2 B2 ... as rows.

    Raises:
        TPIPSError: an odd number, files that are no images, or an aspect that no metric takes or that is there twice.
    """
    check_aspects(aspects)
    if len(paths) % 2:
        raise TPIPSError(
            f"score takes pairs of images, got {len(paths)} files: {', '.join(paths)}. Give two files, several pairs, or "
            "one file that ends in .csv or .jsonl."
        )
    rows = [
        PairRow("", a, b, Path(a), Path(b), tuple(aspects)) for a, b in zip(paths[::2], paths[1::2], strict=True)
    ]
    _raise(_file_faults([file for row in rows for file in (row.first, row.second)], {}), len(rows), "")
    return rows


def read_pairs(path: Path, aspects: Sequence[str]) -> list[PairRow]:
    """A file's rows, all of them usable.

    Args:
        path: ends in .csv or .jsonl.
        aspects: of rows that name none.

    Raises:
        TPIPSError: no rows, or rows that cannot be used: the first twenty faults are listed with their lines, missing files
            too, and the others counted.
    """
    check_aspects(aspects)
    entries: list[tuple[str, dict[str, Any] | TPIPSError]]
    if path.suffix.lower() == ".jsonl":
        entries, hint = jsonl_rows(path), ""
    else:
        entries, hint = [(place, _whole(row)) for place, row in csv_rows(path)], " below the first line, which names the columns: a,b,aspects"
    if not entries:
        raise TPIPSError(f"{path} has no rows{hint}.")
    rows, problems = [], []
    known: dict[Path, str | None] = {}
    for place, entry in entries:
        row, faults = _row(place, entry, path.parent, aspects, known)
        rows.append(row)
        problems += [f"{place}: {fault}" for fault in faults]
    _raise(problems, len(entries), str(path))
    return [row for row in rows if row is not None]


def score_rows(
    rows: Sequence[PairRow], metric: Any, progress: Callable[[int], object] = lambda done: None
) -> Iterator[list[float]]:
    """Similarities of each row in its aspects, batch by batch; in a batch every image is encoded once.

    Args:
        rows: see `read_pairs`.
        metric: a `tpips_reward.Metric`.
        progress: called with the number of rows that were finished since it was last called.

    Raises:
        TPIPSError: an image that is damaged, an aspect that cannot be scored, a score that is not finite; it names the row.
    """
    for batch in _batches(rows):
        images: dict[Path, Tensor] = {}
        pairs: list[tuple[int, int, str]] = []
        owners: list[PairRow] = []
        for row in batch:
            for file in (row.first, row.second):
                if file not in images:
                    images[file] = _at(row.place, lambda file=file: decode(ImageFile(file).read(), str(file)))  # type: ignore[misc]
        index = {file: position for position, file in enumerate(images)}
        for row in batch:
            for aspect in row.aspects:
                _at(row.place, lambda aspect=aspect: metric.check_aspect(aspect))  # type: ignore[misc]
                pairs.append((index[row.first], index[row.second], aspect))
                owners.append(row)
        scores = iter(_similarities(metric, list(images.values()), pairs, owners))
        for row in batch:
            yield [next(scores) for _ in row.aspects]
        progress(len(batch))


def _similarities(
    metric: Any, pixels: list[Tensor], pairs: Sequence[tuple[int, int, str]], owners: Sequence[PairRow]
) -> list[float]:
    def label(position: int) -> str:
        return name_comparison(pairs[position][2], str(owners[position].first), str(owners[position].second))

    try:
        return checked_similarities(metric, pixels, pixels, pairs, label, differentiable=False).tolist()
    except NotFinite as error:
        raise _placed(owners[error.position].place, error) from error


def check_aspects(aspects: Sequence[str]) -> None:
    """Refuse what no metric takes; a control token is only known to a model's tokenizer.

    Raises:
        TPIPSError: an aspect is empty, too long, no text, or there twice.
    """
    for aspect in aspects:
        normalize_aspect(aspect)
    aspect_lists(aspects, 1, "aspects")


def _whole(row: dict[str, str | None]) -> dict[str, Any] | TPIPSError:
    """A CSV's row; the error in place of one that has more or fewer cells than the heading."""
    if "" in row or any(value is None for name, value in row.items() if name != "aspects"):
        return TPIPSError("of another length than the heading; quote cells that hold commas.")
    return dict(row)


def _row(
    place: str, entry: dict[str, Any] | TPIPSError, home: Path, aspects: Sequence[str], known: dict[Path, str | None]
) -> tuple[PairRow | None, list[str]]:
    """A row, or all of its faults; `known` are the faults of files."""
    if isinstance(entry, TPIPSError):
        return None, [str(entry)]
    faults = [f"the field {name!r} means nothing here; there are {', '.join(COLUMNS)}." for name in sorted(set(entry) - set(COLUMNS))]
    files = []
    for name in ("a", "b"):
        given = entry.get(name)
        if isinstance(given, str) and given.strip():
            files.append(given.strip())
        else:
            faults.append(f"give the image {name!r} as a path, not {given!r}.")
    own: tuple[str, ...] = ()
    try:
        own = _row_aspects(entry.get("aspects"))
    except TPIPSError as error:
        faults.append(str(error))
    faults += _file_faults([home / file for file in files], known)
    if faults:
        return None, faults
    a, b = files
    return PairRow(place, a, b, home / a, home / b, own or tuple(aspects)), []


def _row_aspects(given: Any) -> tuple[str, ...]:
    """Aspects of a cell ("a;b") or of a JSON list; none where there is nothing."""
    if given is None or given == "" or given == []:
        return ()
    parts = given.split(";") if isinstance(given, str) else given
    if not isinstance(parts, list) or not all(isinstance(part, str) and part.strip() for part in parts):
        raise TPIPSError(f"aspects is {given!r}; give a list of texts, in a CSV parted by ';'.")
    check_aspects(parts)
    return tuple(part.strip() for part in parts)


def _file_faults(files: Sequence[Path], known: dict[Path, str | None]) -> list[str]:
    """Faults of files, each once: all are looked at before the model, for a typo must not cost the loading of a large metric.

    Args:
        files: of one row, or of the command.
        known: faults that were found, which are added to.
    """
    for file in files:
        if file not in known:
            known[file] = _fault(file)
    return list(dict.fromkeys(fault for file in files if (fault := known[file]) is not None))


def _fault(file: Path) -> str | None:
    try:
        image_size(ImageFile(file))
    except TPIPSError as error:
        return str(error)
    return None


def _raise(problems: list[str], count: int, where: str) -> None:
    if not problems:
        return
    more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    listed = " ".join(problems[:_LISTED]) + more
    raise TPIPSError(f"{where} has {len(problems)} fault{'s' if len(problems) > 1 else ''} in {count} rows: {listed}" if where else listed)


def _at(place: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except TPIPSError as error:
        raise _placed(place, error) from error


def _placed(place: str, error: TPIPSError) -> TPIPSError:
    return TPIPSError(f"{place}: {error}" if place else str(error))


def _batches(rows: Sequence[PairRow]) -> Iterator[list[PairRow]]:
    batch: list[PairRow] = []
    files: set[Path] = set()
    for row in rows:
        if batch and len(files | {row.first, row.second}) > BATCH_IMAGES:
            yield batch
            batch, files = [], set()
        batch.append(row)
        files |= {row.first, row.second}
    if batch:
        yield batch
