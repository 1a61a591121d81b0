"""Edits of an editor and its checkpoints, for an evaluation: the same sources and the same noise for each.

An image depends on the checkpoint, the row and its key, its batch and the settings. Batches are made of all rows, whatever
is done already and however many processes share them, so that a run that was interrupted ends with the same pixels. (On a
CPU the number of threads of a process rounds otherwise too.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from rl_recipes.collecting import decode, encode, same_size_batches
from rl_recipes.editor_checkpoints import Checkpoint, apply_checkpoint
from rl_recipes.editors import Editor
from rl_recipes.editors.base import Size
from rl_recipes.prompts import Prompt
from rl_recipes.rendering_folder import edit_path
from rl_recipes.rollout import sample_ode
from rl_recipes.runs import to_image, write_image
from rl_recipes.seeds import EVALUATION, generator
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import Row
from tpips_reward.evaluation.image_files import decode as decode_image
from tpips_reward.stopping import StopSignal


@dataclass(frozen=True)
class Sampling:
    """How edits are sampled: denoising steps, guidance, the seed of the initial noise, edits in one batch."""

    steps: int
    guidance_scale: float
    seed: int
    batch_size: int

    def __post_init__(self) -> None:
        for name, lowest in (("steps", 1), ("seed", 0), ("batch_size", 1), ("guidance_scale", 0)):
            value = getattr(self, name)
            if not lowest <= value < float("inf"):
                raise TPIPSError(f"{name} is {value}; give a number of at least {lowest}.")


@torch.no_grad()
def render_checkpoint(
    editor: Editor,
    checkpoint: Checkpoint,
    rows: Sequence[Row],
    sizes: dict[str, Size],
    folder: Path,
    sampling: Sampling,
    accelerator: Accelerator,
    stop: StopSignal,
    progress: Callable[[int], None] = lambda edits: None,
) -> int:
    """Renders what is not there yet of one checkpoint, this process's share of it.

    Args:
        rows: with sources of `write_sources`.
        sizes: of `check_rows`.
        progress: called with the number of edits of each batch that is done, or was already.

    Returns:
        the number of edits that were rendered.

    Raises:
        TPIPSError: the editor gives pixels that are not finite, or the disk refuses.
        Interrupted: the user asked to stop; whole files are left.
    """
    batches = list(same_size_batches(rows, lambda row: sizes[row.key], sampling.batch_size))
    rendered, applied = 0, False
    for batch in batches[accelerator.process_index :: accelerator.num_processes]:
        stop.check()
        if not all(edit_path(folder, checkpoint, row.key).exists() for row in batch):
            if not applied:  # a checkpoint that is done is not put on
                apply_checkpoint(editor, checkpoint)
                applied = True
            for row, image in zip(batch, _edits(editor, batch, sampling, checkpoint.name), strict=True):
                write_image(edit_path(folder, checkpoint, row.key), to_image(image))
            rendered += len(batch)
        progress(len(batch))
    return rendered


def _edits(editor: Editor, batch: Sequence[Row], sampling: Sampling, name: str) -> list[Tensor]:
    prompts = [
        Prompt(decode_image(row.source.read(), row.source.label), row.instruction, (), (), row.key) for row in batch
    ]
    conditions = encode(editor, prompts, sampling.guidance_scale)
    generators = [generator(sampling.seed, EVALUATION, _number(row.key)) for row in batch]
    latents = sample_ode(editor, conditions, generators, sampling.steps, sampling.guidance_scale)
    return decode(editor, latents, conditions, f"{name}, {batch[0].key} to {batch[-1].key}")


def _number(key: str) -> int:
    """A row's noise goes by its key, so that rows may come and go around it."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
