"""The folder of rendered edits: what lies where, whose it is, and what may be removed.

    FOLDER/sources/KEY.png          what the editor saw, at the size of its edit
    FOLDER/edits/CHECKPOINT/KEY.png
    FOLDER/rendering.json           with which settings; a run that goes on must have the same
    FOLDER/manifest.jsonl           all of it, for `tpips-reward evaluate`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_recipes.editor_checkpoints import Checkpoint
from rl_recipes.runs import RunError, disk_errors, read_json, write_atomic, write_json
from tpips_reward.evaluation import Dataset, Problem, Row
from tpips_reward.evaluation.image_files import ImageFile
from tpips_reward.files import TEMPORARY

SETTINGS_NAME, MANIFEST_NAME, TRUTH_NAME = "rendering.json", "manifest.jsonl", "truth.json"


def source_path(folder: Path, key: str) -> Path:
    return folder / "sources" / f"{key}.png"


def edit_path(folder: Path, checkpoint: Checkpoint, key: str) -> Path:
    return folder / "edits" / checkpoint.name / f"{key}.png"


def text_files(folder: Path) -> list[Path]:
    """The files beside the images, which a rendering replaces where they exist."""
    return [folder / name for name in (SETTINGS_NAME, MANIFEST_NAME, TRUTH_NAME)]


def claim(
    folder: Path, facts: dict[str, Any], checkpoints: Sequence[Checkpoint], rows: Sequence[Row], *, resume: bool
) -> None:
    """Writes `rendering.json`, or checks that the one that is there says the same.

    Args:
        facts: settings on which the pixels depend.
        rows: their keys are written, by which `clear` knows what is the rendering's.
        resume: whether a rendering may be there. More checkpoints than it had are welcome.

    Raises:
        RunError: another setting, or a checkpoint of that name with other content.
    """
    path = folder / SETTINGS_NAME
    digests = {checkpoint.name: checkpoint.digest() for checkpoint in checkpoints}
    if resume and path.exists():
        known = read_json(path)
        for name, value in facts.items():
            if known.get(name) != value:
                raise RunError(
                    f"{folder} was rendered with {name} = {known.get(name)!r}, and now it is {value!r}; give what it was, "
                    "or start anew with --overwrite."
                )
        before = known.get("checkpoints", {})
        changed = [name for name, digest in digests.items() if before.get(name, digest) != digest]
        if changed:
            raise RunError(
                f"The checkpoint {changed[0]!r} is another one than {folder} was rendered with; give it another name "
                "(NAME=PATH), or start anew with --overwrite."
            )
        digests = {**before, **digests}
    write_json(path, {**facts, "checkpoints": digests, "keys": [row.key for row in rows]})


def rendered_checkpoints(folder: Path) -> list[Checkpoint]:
    """Every checkpoint that `rendering.json` knows, this run's and those of the runs before it, by name alone."""
    return [Checkpoint(name) for name in read_json(folder / SETTINGS_NAME)["checkpoints"]]


def with_edits(dataset: Dataset, folder: Path, checkpoints: Sequence[Checkpoint]) -> Dataset:
    """The rows with the rendered edits as outputs, also written to `manifest.jsonl`.

    An edit that an earlier run was stopped before is listed as missing.

    Raises:
        RunError: the disk refuses.
    """
    names = tuple(checkpoint.name for checkpoint in checkpoints)
    rows, lines, problems = [], [], []
    for row in dataset.rows:
        paths = {}
        for checkpoint in checkpoints:
            path = edit_path(folder, checkpoint, row.key)
            if path.exists():
                paths[checkpoint.name] = path
                continue
            detail = f"{checkpoint.name} was stopped before it edited {row.key!r}; give it again with --resume."
            problems.append(Problem("missing_output", detail, row.key, checkpoint.name))
        rows.append(replace(row, outputs={name: ImageFile(path) for name, path in paths.items()}))
        line: dict[str, Any] = {"key": row.key, "source": source_path(folder, row.key).relative_to(folder).as_posix(),
                "instruction": row.instruction, "category": row.category}  # fmt: skip
        line |= {name: list(aspects) for name, aspects in (("preserve", row.preserve), ("target", row.target)) if aspects}
        line["outputs"] = {name: path.relative_to(folder).as_posix() for name, path in paths.items()}
        lines.append(json.dumps(line, ensure_ascii=False))
    text = "\n".join(lines) + "\n"
    write_atomic(folder / MANIFEST_NAME, lambda path: path.write_text(text, encoding="utf-8"))
    return replace(dataset.with_rows(rows, problems), models=names)


def files_to_clear(folder: Path) -> list[Path]:
    """What `clear` would remove: the files that `rendering.json` names, and none where there is no such file.

    Raises:
        RunError: where a rendering would write there are files of someone else, or `rendering.json` is damaged.
    """
    pictures = [path for name in ("sources", "edits") for path in sorted((folder / name).rglob("*")) if _is_file(path)]
    texts = [path for name in (MANIFEST_NAME, TRUTH_NAME) if _is_file(path := folder / name)]
    settings = folder / SETTINGS_NAME
    ours: set[Path] = set()
    if settings.exists():
        known = read_json(settings)
        names, keys = (known.get(name) if isinstance(known, dict) else None for name in ("checkpoints", "keys"))
        if not isinstance(names, dict) or not isinstance(keys, list) or "editor" not in known:
            raise RunError(f"{settings} is of no rendering of this version; give another --output_dir, or empty {folder}.")
        ours = {source_path(folder, key) for key in keys} | {settings, *texts}
        ours |= {edit_path(folder, Checkpoint(name), key) for name in names for key in keys}
    else:
        texts += [path for path in sorted((folder / "report").rglob("*")) if _is_file(path)]  # `evaluate` would replace it
    foreign = [path for path in (*pictures, *texts) if path not in ours and not path.name.startswith(TEMPORARY)]
    if foreign:
        raise RunError(
            f"--overwrite would write where no rendering of this command has written {foreign[0].relative_to(folder)}; give "
            "another --output_dir, or move it."
        )
    return [path for path in (*pictures, *texts, settings) if _is_file(path)]


def clear(folder: Path, rows: Sequence[Row] = ()) -> None:
    """Removes what a rendering wrote, and nothing else.

    Args:
        rows: that are to be edited next; their sources must not be among it.

    Raises:
        RunError: as `files_to_clear`, a row's source would go, or the disk refuses.
    """
    files = files_to_clear(folder)
    gone = {file.resolve() for file in files}
    for row in rows:
        if isinstance(row.source, ImageFile) and row.source.path.resolve() in gone:
            raise RunError(f"--overwrite would delete {row.source.label}, the source of {row.key!r}; give another --output_dir.")
    with disk_errors(folder):
        for file in files:
            file.unlink(missing_ok=True)
        homes = [path for name in ("sources", "edits") for path in ((folder / name), *(folder / name).rglob("*"))]
        for home in sorted(homes, reverse=True):  # the innermost first
            if home.is_dir() and not home.is_symlink() and not any(home.iterdir()):
                home.rmdir()


def _is_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()
