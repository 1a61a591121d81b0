"""What is to be rendered: rows that the editor takes, and their sources as it sees them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from rl_recipes.editors import Editor
from rl_recipes.editors.base import Size
from rl_recipes.rendering_folder import source_path
from rl_recipes.runs import to_image, write_image
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import Dataset, Problem, Row
from tpips_reward.evaluation.image_files import ImageFile, decode, image_size
from tpips_reward.stopping import StopSignal


def check_rows(editor: Editor, dataset: Dataset) -> tuple[Dataset, dict[str, Size]]:
    """Leaves out what the editor would refuse, before anything is rendered; and each row's (height, width) of its edit."""
    rows, problems, sizes = [], [], {}
    for row in dataset.rows:
        kind = "unreadable_source"
        try:
            width, height = image_size(row.source)
            kind = "bad_row"
            sizes[row.key] = editor.output_size(torch.empty((3, height, width), device="meta"))
            editor.check_instruction(row.instruction)
        except TPIPSError as error:
            problems.append(Problem(kind, f"The row {row.key!r} cannot be edited: {error}", row.key))
            continue
        rows.append(row)
    return dataset.with_rows(rows, problems), sizes


def write_sources(editor: Editor, dataset: Dataset, folder: Path, accelerator: Accelerator, stop: StopSignal) -> Dataset:
    """Writes what the editor sees, at the size of the edit, and leaves out rows whose images do not decode.

    The processes share the work; each gets all of the result.
    """
    found: list[Problem] = []
    for row in dataset.rows[accelerator.process_index :: accelerator.num_processes]:
        stop.check()
        path = source_path(folder, row.key)
        if path.exists():
            continue
        try:
            image = decode(row.source.read(), row.source.label)
        except TPIPSError as error:
            found.append(Problem("unreadable_source", str(error), row.key))
            continue
        write_image(path, to_image(editor.fit(image)))
    problems: list[Problem] = gather_object(found)
    broken = {problem.key for problem in problems}
    rows = [replace(row, source=ImageFile(source_path(folder, row.key))) for row in dataset.rows if row.key not in broken]
    order = {row.key: position for position, row in enumerate(dataset.rows)}
    return dataset.with_rows(rows, sorted(problems, key=lambda problem: order[problem.key]))


def rows_digest(rows: Sequence[Row]) -> str:
    """What tells two sets of edits apart: keys, instructions, and the sources' sizes in bytes."""
    digest = hashlib.sha256()
    for row in rows:
        size = row.source.path.stat().st_size if isinstance(row.source, ImageFile) else len(row.source.read())
        digest.update(json.dumps([row.key, row.instruction, size]).encode())
    return digest.hexdigest()[:32]
