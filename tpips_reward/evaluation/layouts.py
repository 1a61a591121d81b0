"""Folders of results as the benchmarks lay them out -> the same rows as a manifest's.

| benchmark | table | results |
|---|---|---|
| GEdit-Bench | key, task_type, instruction, instruction_language, input_image | MODEL/fullset/TASK/LANGUAGE/KEY.png |
| GEditBench v2 | key, task, instruction, source_image | metadata.jsonl: {"key", "candidates": [{"model", "image"}]} |
| ImgEdit | basic_edit.json: {KEY: {"id", "prompt", "edit_type"}} | MODEL/KEY.png |

None of the three names aspects; they are proposed from the instruction (`tpips_reward.aspects`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import ImageRef
from tpips_reward.evaluation.pairing import Pairing, check_folder, folders_by_model
from tpips_reward.evaluation.rows import Dataset, Problem, Row, check_key, check_model_name, first_of, shared_files, unique_rows
from tpips_reward.evaluation.tables import read_table, table_files, table_folder

LANGUAGES = ("en", "cn")


def model_folders(results: Path, given: Mapping[str, str | Path] | None = None) -> dict[str, Path]:
    """The folder of each model: those that were named, or every folder in `results`.

    Raises:
        TPIPSError: a folder does not exist, or there is none.
    """
    if given:
        return folders_by_model(given.items())
    check_folder(results, "of results")
    found = sorted(entry for entry in results.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise TPIPSError(f"{results} has no folders; each model's results lie in a folder of its name.")
    return folders_by_model((entry.name, entry) for entry in found)


def read_gedit(
    results: str | Path,
    benchmark: str | Path,
    *,
    models: Mapping[str, str | Path] | None = None,
    language: str = "en",
) -> Dataset:
    """GEdit-Bench: `results/MODEL/fullset/TASK/LANGUAGE/KEY.png`.

    Args:
        results: the folder that holds a folder a model.
        benchmark: the benchmark's table (a file, or its folder of Parquet or Arrow files).
        models: folders of models by name, in place of all in `results`.
        language: "en" or "cn": which instructions; the two are answered by different images.

    Raises:
        TPIPSError: the table or a folder is missing, or no row has the language.
    """
    if language not in LANGUAGES:
        raise TPIPSError(f"GEdit-Bench has instructions in {' and '.join(LANGUAGES)}, not in {language!r}.")
    folders = model_folders(Path(results), models)
    table = _table(Path(benchmark), ("key", "task_type", "instruction", "instruction_language", "input_image"))
    chosen = [(place, entry) for place, entry in table if entry["instruction_language"] == language]
    if not chosen:
        raise TPIPSError(f"{benchmark} has no instruction in the language {language!r}.")

    builder = _Builder(f"GEdit-Bench ({language})", tuple(folders), table_files(Path(benchmark)))
    expected: dict[Path, list[str]] = {}
    for place, entry in chosen:
        with builder.row(place, entry) as row:
            key, task = check_key(entry["key"]), _text(entry, "task_type")
            row.start(key, _text(entry, "instruction"), task)
            row.source(entry["input_image"], table_folder(Path(benchmark)))
            for model, folder in folders.items():
                home = folder / "fullset" / task / language
                expected.setdefault(home, []).append(key)
                row.outputs[model] = builder.output_in(home, key, model, ".png")
    for model, folder in folders.items():
        for home in sorted(folder.glob(f"fullset/*/{language}")):
            builder.list_unexpected(home, expected.get(home, []), model)
    return builder.dataset(len(chosen))


def read_gedit_v2(results: str | Path, benchmark: str | Path) -> Dataset:
    """GEditBench v2: candidates listed in `metadata.jsonl`, images relative to it.

    Args:
        results: the folder of `metadata.jsonl`, or that file.
        benchmark: the table with the sources (Parquet, or a folder of it).

    Raises:
        TPIPSError: a table is missing or has other columns.
    """
    listed = Path(results) / "metadata.jsonl" if Path(results).is_dir() else Path(results)
    candidates: dict[str, list[tuple[str, str]]] = {}
    extra: list[Problem] = []
    for place, entry in _table(listed, ("key", "candidates")):
        key, found = "", []
        try:
            key = check_key(entry["key"])
            found = _candidates(entry)
        except TPIPSError as error:
            extra.append(Problem("bad_row", f"{place}: {error}", key))
            if not key:
                continue
        if key in candidates:
            detail = f"{listed.name} has the key {key!r} twice; none of its candidates is used."
            extra.append(Problem("doubled_key", detail, key))
            found = []
        candidates[key] = found
    names = tuple(dict.fromkeys(model for found in candidates.values() for model, _ in found))
    if not names:
        raise TPIPSError(f"{listed} names no candidates.{first_of(extra)}")

    builder = _Builder("GEditBench v2", names, [*table_files(listed), *table_files(Path(benchmark))])
    builder.problems += extra
    table = _table(Path(benchmark), ("key", "instruction", "source_image", "task"))
    for place, entry in table:
        with builder.row(place, entry) as row:
            key = check_key(entry["key"])
            row.start(key, _text(entry, "instruction"), _text(entry, "task"))
            row.source(entry["source_image"], table_folder(Path(benchmark)))
            for model in names:
                images = [image for name, image in candidates.get(key, []) if name == model]
                if len(images) == 1:
                    row.outputs[model] = builder.output(images[0], listed.parent, key, model)
                elif images:
                    detail = f"{listed.name} has {len(images)} images of {model} for the key {key!r}."
                    builder.problems.append(Problem("doubled_file", detail, key, model))
                else:
                    detail = f"{listed.name} names no image of {model} for the key {key!r}."
                    builder.problems.append(Problem("missing_output", detail, key, model))
    known = {str(entry["key"]).strip() for _, entry in table}
    builder.problems += [
        Problem("unexpected_file", f"{listed.name} has the key {key!r}, which the benchmark has not.", left_out=False)
        for key in candidates
        if key not in known
    ]
    return builder.dataset(len(table))


def read_imgedit(
    results: str | Path,
    benchmark: str | Path,
    sources: str | Path,
    *,
    models: Mapping[str, str | Path] | None = None,
) -> Dataset:
    """ImgEdit's basic set: `results/MODEL/KEY.png`.

    Args:
        results: the folder that holds a folder a model.
        benchmark: `basic_edit.json`.
        sources: the folder with the original images, in which each "id" is a path.
        models: folders of models by name, in place of all in `results`.

    Raises:
        TPIPSError: the table or a folder is missing.
    """
    folders = model_folders(Path(results), models)
    check_folder(Path(sources), "of original images")
    builder = _Builder("ImgEdit", tuple(folders), table_files(Path(benchmark)))
    table = _table(Path(benchmark), ("key", "id", "prompt", "edit_type"))
    for place, entry in table:
        with builder.row(place, entry) as row:
            key = check_key(entry["key"])
            row.start(key, _text(entry, "prompt"), _text(entry, "edit_type"))
            row.source(_text(entry, "id"), Path(sources))
            for model, folder in folders.items():
                row.outputs[model] = builder.output_in(folder, key, model, ".png")
    keys = [str(entry["key"]) for _, entry in table]
    for model, folder in folders.items():
        builder.list_unexpected(folder, keys, model)
    return builder.dataset(len(table))


# --- shared by the layouts


class _Builder(Pairing):
    """Collects rows beside what is wrong with them."""

    def __init__(self, name: str, models: tuple[str, ...], inputs: Sequence[Path]) -> None:
        super().__init__()
        self.name, self.models, self.inputs = name, models, tuple(inputs)
        self.rows: list[Row] = []
        self.keys: list[tuple[str, object]] = []

    def row(self, place: str, entry: dict[str, Any]) -> _RowBuilder:
        self.keys.append((place, entry["key"]))
        return _RowBuilder(self, place)

    def dataset(self, total: int) -> Dataset:
        rows, doubled = unique_rows(self.rows, self.keys)
        problems = (*self.problems, *doubled, *shared_files(rows))
        return Dataset(self.name, tuple(rows), self.models, problems, total_rows=total, inputs=self.inputs)


class _RowBuilder:
    """One row; an error inside its `with` block becomes a problem of that row alone."""

    def __init__(self, builder: _Builder, place: str) -> None:
        self.builder, self.place = builder, place
        self.outputs: dict[str, ImageRef | None] = {}
        self.ref: ImageRef | None = None
        self.key = self.instruction = self.category = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, TPIPSError):
            self.builder.problems.append(Problem("bad_row", f"{self.place}: {error}", self.key))
            return True
        if error is None and self.ref is not None:
            outputs = {model: ref for model, ref in self.outputs.items() if ref is not None}
            row = Row(self.key, self.ref, self.instruction, outputs, category=self.category or "uncategorized")
            self.builder.rows.append(row)
        return False

    def start(self, key: str, instruction: str, category: str) -> None:
        self.key, self.instruction, self.category = key, instruction, category

    def source(self, value: Any, home: Path) -> None:
        """An image in the table, or a path relative to `home`."""
        if value is None or isinstance(value, list) or (isinstance(value, str) and not value.strip()):
            self.builder.problems.append(Problem("missing_source", f"{self.place} has no source image.", self.key))
        else:
            self.ref = self.builder.source(value, home, self.key)


def _table(path: Path, columns: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    rows = read_table(path)
    present = set(rows[0][1])
    missing = [column for column in columns if column not in present]
    if missing:
        raise TPIPSError(
            f"{path} has no column {missing[0]!r}; expected {', '.join(columns)}, found {', '.join(sorted(present))}."
        )
    return [(place, {column: row.get(column) for column in columns}) for place, row in rows]


def _text(entry: dict[str, Any], name: str) -> str:
    value = entry[name]
    if not isinstance(value, str):
        raise TPIPSError(f"{name!r} is {value!r}; expected text.")
    return value.strip()


def _candidates(entry: dict[str, Any]) -> list[tuple[str, str]]:
    value = entry["candidates"]
    if not isinstance(value, list):
        raise TPIPSError(f"'candidates' is {value!r}; expected a list of {{'model', 'image'}}.")
    found = []
    for item in value:
        if not isinstance(item, dict) or not isinstance(item.get("image"), str):
            raise TPIPSError(f"a candidate is {item!r}; expected {{'model', 'image'}}.")
        found.append((check_model_name(item.get("model")), item["image"]))
    return found
