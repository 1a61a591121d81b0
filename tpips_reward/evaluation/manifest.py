"""A manifest, JSONL, CSV or Parquet: one edit a row, with the output of each model.

    {"key": "0001", "source": "in/1.png", "instruction": "make the car red", "category": "color",
     "preserve": ["background"], "target": ["car color"], "outputs": {"base": "base/1.png", "tuned": "tuned/1.png"}}

A CSV has the columns key, source, instruction, category, preserve, target (aspects parted by ";") and one column
"output:NAME" a model. A Parquet or Arrow file may have those columns or "outputs", and images themselves in place of
their paths. Paths are relative to the manifest. Outputs may also come from a folder a model, by key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import ImageRef
from tpips_reward.evaluation.pairing import Pairing, folders_by_model
from tpips_reward.evaluation.rows import Dataset, Problem, Row, check_key, check_model_name, first_of, shared_files, unique_rows
from tpips_reward.evaluation.tables import BINARY_SUFFIXES, csv_heading, csv_rows, jsonl_rows, read_table
from tpips_reward.rewards.aspects import check_disjoint, sample_aspects

FIELDS = ("key", "source", "image", "instruction", "outputs", "preserve", "target", "category")
OUTPUT_COLUMN = "output:"
CSV_COLUMNS = "source, output:NAME for each model, and optionally key, instruction, category, preserve, target"
SUFFIXES = (".jsonl", ".csv", *BINARY_SUFFIXES)


def read_manifest(
    path: str | Path, folders: Mapping[str, str | Path] | None = None, *, needs_outputs: bool = True
) -> Dataset:
    """A manifest's rows; everything that cannot be used is listed in the result's `problems`.

    Args:
        path: a file with one of :data:`SUFFIXES`.
        folders: further models by name, each with a folder that has one image a key.
        needs_outputs: False for edits that are still to be made: a manifest without any output is no error then.

    Raises:
        TPIPSError: the file or a folder cannot be read, is of another kind, or has no rows.
    """
    manifest = Path(path)
    entries = _entries(manifest)
    if not entries:
        raise TPIPSError(f"{manifest} has no rows.")
    places = folders_by_model((folders or {}).items())
    pairing = Pairing()
    problems = pairing.problems
    parsed: list[Row] = []
    keys: list[tuple[str, object]] = []
    named: dict[str, None] = {}
    seen: set[str] = set()
    mentioned: dict[str, set[str]] = {}
    for number, (place, entry) in enumerate(entries, 1):
        if isinstance(entry, TPIPSError):
            problems.append(Problem("bad_row", f"{place} is {entry}"))
            continue
        keys.append((place, entry.get("key", str(number))))
        try:
            fields = _fields(entry, number, bool(places))
        except TPIPSError as error:
            problems.append(Problem("bad_row", f"{place}: {error}", _key_of(entry, None if places else str(number))))
            continue
        mentioned.setdefault(fields["key"], set()).update(fields["outputs"])
        clash = sorted(set(fields["outputs"]) & set(places))
        if clash:
            raise TPIPSError(f"The model {clash[0]!r} is in the manifest and has a folder; name one of them otherwise.")
        named.update(dict.fromkeys(fields["outputs"]))
        seen.update(fields["unknown"])
        row = _row(fields, manifest.parent, places, pairing, place)
        if row is not None:
            parsed.append(row)
    rows, doubled = unique_rows(parsed, keys)
    models = (*named, *places)
    if not models and needs_outputs:
        raise TPIPSError(f"{manifest} names no outputs; give each row an output a model, or a folder a model.{_columns(manifest)}{first_of(problems)}")
    problems += [
        Problem(
            "unknown_field", f"The field {name!r} means nothing here; there are {', '.join(FIELDS)}.", left_out=False
        )
        for name in sorted(seen)
    ]
    problems += [*doubled, *shared_files(rows)]
    problems += [
        Problem("missing_output", f"The row {row.key!r} does not mention {model}.", row.key, model)
        for row in rows
        for model in named
        if model not in mentioned[row.key]
    ]
    for name, folder in places.items():
        pairing.list_unexpected(folder, mentioned, name)
    return Dataset(manifest.name, tuple(rows), models, tuple(problems), total_rows=len(entries), inputs=(manifest,))


def row_aspects(preserve: Sequence[str], target: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A row's aspects, stripped.

    Raises:
        TPIPSError: an empty aspect, one twice, or one both to keep and to change.
    """
    kept, changed = sample_aspects(preserve, "preserve"), sample_aspects(target, "target")
    check_disjoint([kept], [changed])
    return tuple(kept), tuple(changed)


def _entries(path: Path) -> list[tuple[str, dict[str, Any] | TPIPSError]]:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return jsonl_rows(path)
    if suffix == ".csv":
        rows = csv_rows(path)
        if not {"source", "image"} & set(csv_heading(path)):
            raise TPIPSError(f"{path} has no column for the source image.{_columns(path)}")
        return [(place, _from_csv(row)) for place, row in rows]
    if not path.exists():
        raise TPIPSError(f"{path} does not exist; give a manifest that ends in {', '.join(SUFFIXES)}.")
    if suffix in BINARY_SUFFIXES and path.is_file():
        return [(place, _from_table(row)) for place, row in read_table(path)]
    raise TPIPSError(f"{path} is no manifest; give a file that ends in {', '.join(SUFFIXES)}.")


def _columns(path: Path) -> str:
    """What an error adds for a CSV: its columns, and those that a manifest has."""
    if path.suffix.lower() != ".csv":
        return ""
    found = ", ".join(repr(name) for name in csv_heading(path))
    return f" Its columns are {found}; expected {CSV_COLUMNS}, parted by commas."


def _from_csv(row: dict[str, str | None]) -> dict[str, Any] | TPIPSError:
    """A CSV row in the form of a JSON row; empty cells name nothing."""
    if "" in row or None in row.values():
        return TPIPSError("of another length than the heading; quote cells that hold commas.")
    entry: dict[str, Any] = {"outputs": {}}
    for name, cell in row.items():
        text = (cell or "").strip()
        if name.startswith(OUTPUT_COLUMN):
            entry["outputs"][name.removeprefix(OUTPUT_COLUMN)] = text or None
        elif name in ("preserve", "target"):
            entry[name] = [part.strip() for part in text.split(";")] if text else []
        elif text:
            entry[name] = text
    return entry


def _from_table(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a Parquet or Arrow file in the form of a JSON row; what is null there names nothing."""
    nested = row.get("outputs")
    entry: dict[str, Any] = {"outputs": dict(nested) if isinstance(nested, dict) else nested or {}}
    for name, cell in row.items():
        if name.startswith(OUTPUT_COLUMN) and isinstance(entry["outputs"], dict):
            entry["outputs"][name.removeprefix(OUTPUT_COLUMN)] = cell
        elif name != "outputs" and cell is not None:
            entry[name] = cell
    return entry


def _names_an_image(value: object) -> bool:
    """A path, or an image that stands in the table."""
    return bool(value.strip()) if isinstance(value, str) else hasattr(value, "read")


def _key_of(entry: dict[str, Any], otherwise: str | None) -> str:
    """The key of a row that cannot be used; "" where it has none."""
    try:
        return check_key(entry.get("key", otherwise))
    except TPIPSError:
        return ""


def _fields(entry: dict[str, Any], number: int, needs_key: bool) -> dict[str, Any]:
    """A row's fields, checked.

    Raises:
        TPIPSError: a field is missing or of the wrong kind.
    """
    if "key" not in entry and needs_key:
        raise TPIPSError('no "key"; outputs in folders are found by it.')
    key = check_key(entry.get("key", str(number)))
    sources = [entry[name] for name in ("source", "image") if name in entry]
    if len(sources) != 1 or not _names_an_image(sources[0]):
        raise TPIPSError('give the source image as "source", a path.')
    outputs = entry.get("outputs") or {}
    if not isinstance(outputs, dict):
        raise TPIPSError('"outputs" is an object: {"name of a model": "path of its image"}.')
    names = [check_model_name(model) for model in outputs]
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise TPIPSError(f"the model {doubled[0]!r} has two outputs, under names that differ in blanks only; rename one.")
    # an empty text is what an empty cell of a CSV is: no output
    outputs = {model: None if isinstance(value, str) and not value.strip() else value for model, value in outputs.items()}
    for model, value in outputs.items():
        if value is not None and not _names_an_image(value):
            raise TPIPSError(f"the output of {model!r} is {value!r}; give a path, or null where there is none.")
    for name in ("instruction", "category"):
        if not isinstance(entry.get(name, ""), str):
            raise TPIPSError(f'"{name}" is {entry[name]!r}; give text.')
    return {
        "key": key,
        "source": sources[0],
        "instruction": entry.get("instruction", "").strip(),
        "category": entry.get("category", "").strip() or "uncategorized",
        "outputs": dict(zip(names, outputs.values(), strict=True)),
        "preserve": _aspect_field(entry, "preserve"),
        "target": _aspect_field(entry, "target"),
        "unknown": [name for name in entry if name not in FIELDS],
    }


def _aspect_field(entry: dict[str, Any], name: str) -> list[Any]:
    value = entry.get(name)
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return value
    raise TPIPSError(f'"{name}" is {value!r}; give a list of aspects.')


def _row(fields: dict[str, Any], home: Path, folders: Mapping[str, Path], pairing: Pairing, place: str) -> Row | None:
    key = fields["key"]
    try:
        preserve, target = row_aspects(fields["preserve"], fields["target"])
    except TPIPSError as error:
        pairing.problems.append(Problem("bad_aspects", f"{place}: {error}", key))
        return None
    source = pairing.source(fields["source"], home, key)
    outputs: dict[str, ImageRef | None] = {}
    for model, value in fields["outputs"].items():
        if value is None:
            pairing.problems.append(Problem("missing_output", f"{place} names no output of {model}.", key, model))
        else:
            outputs[model] = pairing.output(value, home, key, model)
    for model, folder in folders.items():
        outputs[model] = pairing.output_in(folder, key, model)
    if source is None:
        return None
    found = {model: ref for model, ref in outputs.items() if ref is not None}
    return Row(key, source, fields["instruction"], found, preserve, target, fields["category"])
