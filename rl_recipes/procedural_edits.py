"""Held-out procedural edits to be rendered, and what is known of them without any metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rl_recipes.editor_checkpoints import Checkpoint
from rl_recipes.prompts import ProceduralPrompts
from rl_recipes.rendering_folder import edit_path, source_path
from rl_recipes.runs import to_image, write_image
from tpips_reward.evaluation import Dataset, Row
from tpips_reward.evaluation.image_files import ImageFile, decode
from tpips_reward.scenes import measure_edit


def procedural_rows(folder: Path, count: int, seed: int, size: int, write: bool) -> Dataset:
    """Held-out procedural edits, their sources in `folder/sources`.

    Args:
        write: whether this process writes the sources.
    """
    prompts, rows = ProceduralPrompts(seed, "test", size), []
    for index in range(count):
        prompt = prompts[index]
        path = source_path(folder, prompt.key)
        if write and not path.exists():
            assert isinstance(prompt.image, Tensor)  # procedural edits have one image
            write_image(path, to_image(prompt.image))
        assert prompt.edit is not None
        rows.append(Row(prompt.key, ImageFile(path), prompt.instruction, {}, prompt.preserve, prompt.target,
                        prompt.edit.kind))  # fmt: skip
    return Dataset(f"{count} procedural edits", tuple(rows), ())


def known_truth(
    folder: Path, checkpoints: Sequence[Checkpoint], count: int, seed: int, size: int
) -> dict[str, dict[str, float | None]]:
    """Means of what is known of procedural edits without any metric (`measure_edit`), by checkpoint; of one whose edits
    are not all there nothing is said, and None is what cannot be known.

    The reader sees by it whether the report's order is the true one.
    """
    prompts, result = ProceduralPrompts(seed, "test", size), dict[str, dict[str, float | None]]()
    for checkpoint in checkpoints:
        if not all(edit_path(folder, checkpoint, prompts[index].key).exists() for index in range(count)):
            continue
        measures = []
        for index in range(count):
            prompt = prompts[index]
            assert prompt.edit is not None
            ref = ImageFile(edit_path(folder, checkpoint, prompt.key))
            measures.append(measure_edit(prompt.edit, decode(ref.read(), ref.label)))
        drifts = [m.drift for m in measures if m.drift == m.drift]  # NaN where an edit changes everything
        result[checkpoint.name] = {
            "edit_success": sum(m.success for m in measures) / count,
            "drift": sum(drifts) / len(drifts) if drifts else None,
            "object_lost": sum(m.object_lost for m in measures) / count,
            "l1_to_ideal": sum(m.l1_to_ideal for m in measures) / count,
            "copy_rate": sum(m.copied for m in measures) / count,
        }
    return result
