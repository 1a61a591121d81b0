"""Tables of benchmarks: JSON, JSONL, CSV, Parquet and Arrow files as rows, with the images that stand in them.

Images inside Parquet and Arrow files are read when they are opened, a row group at a time: a benchmark's images
together are larger than memory.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import ImageFile, ImageRef

BINARY_SUFFIXES = (".parquet", ".arrow")
TABLE_SUFFIXES = (".jsonl", ".json", ".csv", *BINARY_SUFFIXES)


def read_table(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(where it stands, row) of a table, or of all Parquet and Arrow files in a folder, in the order of their names.

    Args:
        path: a file with one of :data:`TABLE_SUFFIXES`, or a folder of Parquet or Arrow files, or one that holds a
            single JSONL, JSON or CSV file.

    Raises:
        TPIPSError: missing, unreadable, of another kind, or without rows.
    """
    rows = [item for file in table_files(path) for item in _read_file(file)]
    if not rows:
        raise TPIPSError(f"{path} has no rows.")
    return rows


def table_files(path: Path) -> list[Path]:
    """The files that make up a table."""
    if path.is_file():
        if path.suffix.lower() not in TABLE_SUFFIXES:
            raise TPIPSError(f"{path} is no table; give a file that ends in {', '.join(TABLE_SUFFIXES)}.")
        return [path]
    if not path.is_dir():
        raise TPIPSError(f"{path} does not exist; give the benchmark's table or its folder.")
    for suffixes in ((".parquet",), (".arrow",), (".jsonl", ".json", ".csv")):
        found = sorted(file for suffix in suffixes for file in path.rglob(f"*{suffix}") if file.is_file())
        found = [file for file in found if not file.name.startswith(".")]
        if len(found) > 1 and suffixes[0] == ".jsonl":
            names = ", ".join(file.name for file in found[:4])
            raise TPIPSError(f"{path} has several tables ({names}); name the one that is meant.")
        if found:
            return found
    raise TPIPSError(f"{path} holds no table; give a file that ends in {', '.join(TABLE_SUFFIXES)}.")


def table_folder(path: Path) -> Path:
    """What paths in a table are relative to."""
    return path if path.is_dir() else path.parent


def read_text(path: Path) -> str:
    """A text file in UTF-8, with or without a byte order mark.

    Raises:
        TPIPSError: missing, unreadable, or in another encoding.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TPIPSError(f"{path} does not exist.") from None
    except UnicodeDecodeError as error:
        raise TPIPSError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8.") from None
    except OSError as error:
        raise TPIPSError(f"{path} cannot be read: {error.strerror or error}.") from error


def parse_object(text: str) -> dict[str, Any]:
    """One JSON object, of which no name stands twice.

    Raises:
        TPIPSError: no JSON, no object, or a name twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise TPIPSError(f"no JSON ({error.msg} at character {error.pos}).") from None
    except RecursionError:
        raise TPIPSError("no JSON that can be read: it is nested too deeply.") from None
    if not isinstance(value, dict):
        raise TPIPSError(f"a JSON {type(value).__name__}; each row is an object, {{...}}.")
    return value


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise TPIPSError(f"the name {name!r} stands twice in one object.")
        result[name] = value
    return result


def csv_rows(path: Path) -> list[tuple[str, dict[str, str | None]]]:
    """("line N", row) of a CSV file with a heading. A row with more or fewer cells than the heading has None in it.

    Raises:
        TPIPSError: unreadable, no heading, or a column twice.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    try:
        heading = [name.strip() for name in next(reader, [])]
        if not heading:
            raise TPIPSError(f"{path} is empty; its first line names the columns.")
        doubled = sorted({name for name in heading if heading.count(name) > 1})
        if doubled:
            raise TPIPSError(f"{path} has the column {doubled[0]!r} twice; give each its own name.")
        rows: list[tuple[str, dict[str, str | None]]] = []
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            row: dict[str, str | None] = dict(zip(heading, [*cells, *[None] * len(heading)], strict=False))
            if len(cells) > len(heading):
                row[""] = None
            rows.append((f"line {reader.line_num}", row))
        return rows
    except csv.Error as error:
        raise TPIPSError(f"{path}, line {reader.line_num}, is no CSV: {error}.") from None


def csv_heading(path: Path) -> list[str]:
    """The columns of a CSV file that `csv_rows` takes.

    Raises:
        TPIPSError: unreadable.
    """
    return [name.strip() for name in next(csv.reader(io.StringIO(read_text(path), newline="")), [])]


def jsonl_rows(path: Path) -> list[tuple[str, dict[str, Any] | TPIPSError]]:
    """("line N", row) of a JSONL file; the error in place of a row that is no JSON object."""
    rows: list[tuple[str, dict[str, Any] | TPIPSError]] = []
    # not splitlines: a JSON string may hold U+2028
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                rows.append((f"line {number}", parse_object(line)))
            except TPIPSError as error:
                rows.append((f"line {number}", error))
    return rows


def _read_file(path: Path) -> list[tuple[str, dict[str, Any]]]:
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return [(f"{path.name}, {place}", dict(row)) for place, row in csv_rows(path)]
    if suffix == ".jsonl":
        lines = enumerate(read_text(path).split("\n"), 1)
        return [(f"{path.name}, line {n}", _located(line, path, n)) for n, line in lines if line.strip()]
    if suffix == ".json":
        return _json_rows(path)
    return _arrow_rows(path)


def _located(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        return parse_object(line)
    except TPIPSError as error:
        raise TPIPSError(f"{path}, line {number}, is {error}") from None


def _json_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """A list of objects, or an object of objects by key (ImgEdit): the key is added as "key"."""
    try:
        content = json.loads(read_text(path), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise TPIPSError(f"{path} is no JSON: {error}.") from None
    except TPIPSError as error:
        raise TPIPSError(f"{path}: {error}") from None
    items = content.items() if isinstance(content, dict) else enumerate(content if isinstance(content, list) else [])
    rows = []
    for key, row in items:
        if not isinstance(row, dict):
            raise TPIPSError(f"{path}, entry {key}, is no object; rows are objects, in a list or by their keys.")
        rows.append((f"{path.name}, entry {key}", {"key": key, **row} if isinstance(content, dict) else row))
    return rows


# --- Parquet and Arrow


@dataclass
class _Table:
    """One file. The row group read last is kept of each column, as long as no other file is read: rows are read in
    their order, all columns of one before the next."""

    path: Path
    groups: list[int]
    reader: Any
    _kept: dict[str, tuple[int, Any]] = field(default_factory=dict)
    _active: ClassVar[_Table | None] = None

    def image(self, column: str, row: int, item: int | None) -> bytes:
        group = 0
        while row >= self.groups[group]:
            row -= self.groups[group]
            group += 1
        if _Table._active is not None and _Table._active is not self:
            _Table._active._kept.clear()
        _Table._active = self
        if column not in self._kept or self._kept[column][0] != group:
            self._kept[column] = (group, self.column(column, group))
        value = self._kept[column][1][row]
        value = (value if item is None else value[item]).as_py()
        return value["bytes"] if isinstance(value, dict) else value

    def column(self, name: str, group: int) -> Any:
        """A column's row group; an Arrow file, which is mapped, has one."""
        if self.path.suffix.lower() == ".arrow":
            return self.reader.column(name)
        return self.reader.read_row_group(group, columns=[name]).column(name)


@dataclass(frozen=True, eq=False)
class TableImage:
    """An image that stands in a Parquet or Arrow file."""

    table: _Table
    column: str
    row: int
    item: int | None

    @property
    def label(self) -> str:
        entry = "" if self.item is None else f"[{self.item}]"
        return f"{self.table.path}, row {self.row}, {self.column}{entry}"

    def read(self) -> bytes:
        return self.table.image(self.column, self.row, self.item)


def _arrow_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise TPIPSError(f"{path} needs the package pyarrow: pip install 'tpips-reward[parquet]'.") from None
    try:
        if path.suffix.lower() == ".arrow":
            whole = _open_arrow(path, pa)
            table, schema = _Table(path, [whole.num_rows], whole), whole.schema
        else:
            file = pq.ParquetFile(path)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            table, schema = _Table(path, sizes, file), file.schema_arrow
        images = [field.name for field in schema if _holds_images(field.type, pa)]
        plain = [name for name in schema.names if name not in images]
        text = whole.select(plain) if path.suffix.lower() == ".arrow" else file.read(columns=plain)
        shapes = {name: _image_shape(table, name, path) for name in images}
    except (pa.ArrowException, OSError) as error:
        raise TPIPSError(f"{path} cannot be read: {error}.") from None
    rows = text.to_pylist() if plain else [{} for _ in range(sum(table.groups))]
    for name, refs in shapes.items():
        for row, value in zip(rows, refs, strict=True):
            row[name] = value
    return [(f"{path.name}, row {number}", row) for number, row in enumerate(rows)]


def _open_arrow(path: Path, pa: Any) -> Any:
    """A stream (as `datasets` writes them) or a file, mapped and not read."""
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _holds_images(kind: Any, pa: Any) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_images(kind.value_type, pa)
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _image_shape(table: _Table, column: str, path: Path) -> list[Any]:
    """For each row a reference, a list of them, or None, found without keeping the pixels."""
    found: list[Any] = []
    for group in range(len(table.groups)):
        for value in table.column(column, group):
            found.append(_reference(table, column, len(found), value, path))
    return found


def _reference(table: _Table, column: str, row: int, value: Any, path: Path) -> Any:
    import pyarrow as pa

    if not value.is_valid:
        return None
    if pa.types.is_list(value.type) or pa.types.is_large_list(value.type):
        return [_one(table, column, row, item, entry, path) for item, entry in enumerate(value)]
    return _one(table, column, row, None, value, path)


def _one(table: _Table, column: str, row: int, item: int | None, value: Any, path: Path) -> ImageRef | None:
    """An embedded image, or the file that a struct names in place of its bytes."""
    if not value.is_valid:
        return None
    if hasattr(value, "keys") and not value["bytes"].is_valid:
        name = value["path"].as_py() if "path" in value else None
        return ImageFile(path.parent / name) if name else None
    return TableImage(table, column, row, item)
