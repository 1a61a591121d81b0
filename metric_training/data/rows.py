"""Rows of a data set: a JSONL, JSON, CSV or Parquet file, a folder of them, or a Hub id.

JSONL, JSON and CSV are read here, so that problems have line numbers. Parquet files and what `save_to_disk` wrote go
through the package `datasets` (extra "data"); images inside them stay encoded until they are needed.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from metric_training.data.comparison import DataError, ImageSource, Problems, as_json

#: Row files in the order of preference, where a folder has several kinds.
_SUFFIXES = (".jsonl", ".parquet", ".csv", ".json")
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_NO_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_ACCEPTED = "a .jsonl, .json, .csv or .parquet file, a folder with such files, or a Hub id (owner/name)"


@dataclass
class Rows:
    """Rows with their numbers.

    Attributes:
        name: of the source, for messages.
        rows: (line number from 1, columns); may be read only once.
        root: where relative image paths start.
        problems: lines that hold no row are listed here; whoever checks the rows adds theirs.
    """

    name: str
    rows: Iterable[tuple[int, dict[str, Any]]]
    root: Path | None
    problems: Problems


def read_rows(
    source: str | Path,
    *,
    split: str | None = None,
    image_root: str | Path | None = None,
    strict: bool = False,
    revision: str | None = None,
) -> Rows:
    """Finds and opens a data set.

    Args:
        source: a file, a folder, or a Hub id (a local folder of that name wins).
        split: "train", "validation" or "test", where the source has several; a source without named splits is taken
            whole.
        image_root: where relative image paths start; None: the file's folder, or the folder that was given or fetched.
        strict: stop at the first bad row, a line that is none among them, when it is its turn.
        revision: branch, tag or commit of a Hub repository.

    Raises:
        DataError: nothing is there, nothing in it is a data file, or it lacks the split.
    """
    if not str(source).strip():
        raise DataError(f"No data is named; give {_ACCEPTED}.")
    path = Path(source).expanduser()
    root = None if image_root is None else Path(image_root).expanduser()
    if root is not None and not root.is_dir():
        raise DataError(f"The image root {image_root} is no folder.")
    if path.is_file():
        return _open([path], str(source), root or path.parent, strict)
    if path.is_dir():
        return _open_folder(path, str(source), split, root or path, strict)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and path.suffix not in (*_SUFFIXES, ".ndjson", ".tsv"):
        return _open_hub(str(source), split, root, strict, revision)
    raise DataError(f"There is no data {str(source)!r}; give {_ACCEPTED}.")


def split_of(path: Path, root: Path) -> str | None:
    """The split that a file's name or folders name: "test-00000-of-00001.parquet" → "test"."""
    words = re.split(r"[^a-z0-9]+", str(path.relative_to(root).with_suffix("")).casefold())
    found = {_SPLITS[word] for word in words if word in _SPLITS}
    return found.pop() if len(found) == 1 else None


def _open_folder(folder: Path, name: str, split: str | None, root: Path, strict: bool) -> Rows:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        stored = _through_datasets(name, lambda datasets: datasets.load_from_disk(str(folder)))
        return _from_arrow(_pick_split(stored, name, split), name, root, strict)
    groups = _row_files(folder)
    named = sorted(key for key in groups if key)
    if not groups:
        raise DataError(f"{name} holds no data file; give {_ACCEPTED}.")
    wanted = _SPLITS.get(split or "", split)
    if wanted not in groups and None in groups and not named:
        wanted = None
    if wanted is None and len(groups) == 1:
        (wanted,) = groups
    if wanted not in groups or (wanted is None and named):
        raise DataError(f"{name} has the splits {', '.join(named)}, not {split!r}; choose one of them with --split.")
    suffix = min((path.suffix.casefold() for path in groups[wanted]), key=_SUFFIXES.index)
    return _open([path for path in groups[wanted] if path.suffix.casefold() == suffix], name, root, strict)


def _row_files(folder: Path) -> dict[str | None, list[Path]]:
    """Data files in a folder, by the split that their names say."""
    groups: dict[str | None, list[Path]] = defaultdict(list)
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.casefold() in _SUFFIXES and path.name not in _NO_ROWS and not hidden and path.is_file():
            groups[split_of(path, folder)].append(path)
    return groups


def _open_hub(repo: str, split: str | None, root: Path | None, strict: bool, revision: str | None) -> Rows:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, repo_type="dataset", revision=revision))
    except (OSError, ValueError) as error:  # what huggingface_hub raises derives from these
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"The data set {repo!r} could not be had from the Hub ({type(error).__name__}: {reason}); check the id and "
            "the connection, or give a local copy."
        ) from error
    if _row_files(folder) or (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _open_folder(folder, repo, split, root or folder, strict)
    # in another format than those read here: `datasets` may know it
    stored = _through_datasets(repo, lambda datasets: datasets.load_dataset(repo, revision=revision))
    return _from_arrow(_pick_split(stored, repo, split), repo, root or folder, strict)


def _open(paths: list[Path], name: str, root: Path, strict: bool) -> Rows:
    suffix = paths[0].suffix.casefold()
    if suffix == ".parquet":
        files = [str(path) for path in paths]
        table = _through_datasets(name, lambda datasets: datasets.load_dataset("parquet", data_files=files, split="train"))
        return _from_arrow(table, name, root, strict)
    readers = {".jsonl": json_lines, ".ndjson": json_lines, ".json": _json_list, ".csv": csv_rows, ".tsv": csv_rows}
    if suffix not in readers:
        raise DataError(f"{paths[0]} is no data file; give {_ACCEPTED}.")
    unit = "row" if suffix == ".json" else "line"
    # one number must find a row again, so lines of several files are counted through
    problems = Problems(name if len(paths) == 1 else f"{name} ({len(paths)} files, counted through)", strict, unit)
    rows: list[tuple[int, dict[str, Any]]] = []
    before = 0
    for path in paths:
        own = Problems(str(path), unit=unit)
        try:
            found = readers[suffix](path, own)
            length = len(found) + len(own.found) if suffix == ".json" else _count_lines(path)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} cannot be read ({error}).") from error
        rows += [(before + number, row) for number, row in found]
        problems.found += [(before + number, message) for number, message in own.found]
        before += length
    return Rows(name, _up_to_problem(rows, problems) if strict and problems.found else rows, root, problems)


def _up_to_problem(rows: list[tuple[int, dict[str, Any]]], problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows before the first line that is none, then its error: one of these rows may be bad, and is the first then."""
    number, message = problems.found[0]
    problems.found = []
    for line, row in rows:
        if line < number:
            yield line, row
    problems.add(number, message)


def _count_lines(path: Path) -> int:
    content = path.read_bytes()
    return content.count(b"\n") + (not content.endswith(b"\n"))


def json_lines(path: Path, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    """Rows of a JSONL file with their line numbers; lines that are no JSON object are listed."""
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = as_json(line)
        except DataError as error:
            problems.add(number, str(error))
            continue
        if isinstance(row, dict):
            rows.append((number, row))
        else:
            problems.add(number, f"a row must be an object with columns, not {type(row).__name__}.")
    return rows


def csv_rows(path: Path, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    """Rows of a CSV (or .tsv) file with a head line; lines with other than the head's columns are listed."""
    rows = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.casefold() == ".tsv" else ",")
        for row in reader:
            if None in row or None in row.values():
                problems.add(
                    reader.line_num, f"this line has not the head line's {len(reader.fieldnames or [])} columns."
                )
            else:
                rows.append((reader.line_num, dict(row)))
    return rows


def _json_list(path: Path, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    try:
        rows = as_json(path.read_bytes())
    except DataError as error:
        raise DataError(f"{path} is {str(error).removesuffix('.')}; for one object a line call it .jsonl.") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} must hold a list of rows, not {type(rows).__name__}.")
    good = []
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            good.append((number, row))
        else:
            problems.add(number, f"a row must be an object with columns, not {type(row).__name__}.")
    return good


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"Reading {what} needs the package datasets; install it with pip install 'tpips-reward[data]', or give a "
            "JSONL file."
        ) from error
    return datasets


def _through_datasets(name: str, load: Callable[[Any], Any]) -> Any:
    """What the package `datasets` makes of a source.

    Raises:
        DataError: it is not installed, or the source is damaged or of a kind that it does not know.
    """
    package = _datasets(name)
    try:
        return load(package)
    except Exception as error:  # pyarrow's, fsspec's and its own kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{name} cannot be read by the package datasets ({reason}); is it whole?") from error


def _pick_split(stored: Any, name: str, split: str | None) -> Any:
    """One split of a DatasetDict; a Dataset is taken as it is."""
    if not isinstance(stored, dict):
        return stored
    known = {_SPLITS.get(key, key): key for key in stored}
    wanted = _SPLITS.get(split or "", split)
    if len(known) == 1 and (wanted is None or not set(known) & set(_SPLITS.values())):
        return next(iter(stored.values()))
    if wanted not in known:
        raise DataError(f"{name} has the splits {', '.join(stored)}, not {split!r}; choose one of them with --split.")
    return stored[known[wanted]]


def _from_arrow(table: Any, name: str, root: Path, strict: bool) -> Rows:
    """Rows of a `datasets.Dataset`; images in it stay encoded."""
    kind = _datasets(name).Image
    columns = [column for column, feature in table.features.items() if isinstance(feature, kind)]
    for column in columns:
        table = table.cast_column(column, kind(decode=False))
    return Rows(name, _arrow_rows(table, columns), root, Problems(name, strict, unit="row"))


def _arrow_rows(table: Any, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, row in enumerate(table):
        for column in columns:
            row[column] = _stored_image(table, index, column, row[column])
        yield index + 1, row


def _stored_image(table: Any, index: int, column: str, cell: Any) -> Any:
    if not isinstance(cell, dict):
        return cell
    if cell.get("bytes") is None:
        return cell.get("path")
    # the same picture has the same key wherever it stands, and its bytes stay in the memory-mapped table
    key = f"{cell.get('path') or column}@{hashlib.sha1(cell['bytes']).hexdigest()}"
    return ImageSource(key, partial(_cell_bytes, table, index, column))


def _cell_bytes(table: Any, index: int, column: str) -> bytes:
    return table[index][column]["bytes"]
