"""How far a run is: after each step it validates, logs and saves, and before an error it keeps what is done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from metric_training.training.config import TrainConfig
from metric_training.training.log import Log
from metric_training.training.state import BEST, STATE, UNVALIDATED, training_state, write_checkpoint
from tpips_reward import TPIPSError

_LESS = "Give --gradient_checkpointing or a lower --token_budget"
_SMALLER = "a smaller --per_device_train_batch_size and more --gradient_accumulation_steps"


def out_of_memory(where: str, resumable: bool, less: str = _LESS, other: str = _SMALLER) -> TPIPSError:
    """What to do when the memory of a device was full.

    Args:
        where: it was.
        resumable: whether there is a checkpoint of this run.
        less: what needs less and may change on a resume; other: what may not.
    """
    go_on = "go on with --resume" if resumable else "start again with --overwrite"
    return TPIPSError(f"The memory of the device was full {where}. {less} and {go_on}, or start anew with {other}.")


class Progress:
    """What is done, in a run's checkpoints and its log.

    Args:
        config: of the run.
        accelerator, model, optimizers: of the run; `prepare` has been called.
        validate: the model → figures, "validation_agreement" among them; None where no votes are learnt.
        origin: what the run is the continuation of (see `state.check_same_origin`).
        steps: of the whole run.
        saved: the checkpoint that it goes on from.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        validate: Callable[[nn.Module], dict[str, float]] | None,
        origin: Mapping[str, Any],
        steps: int,
        saved: Mapping[str, Any] | None,
    ) -> None:
        self.config, self.accelerator, self.model, self.optimizers = config, accelerator, model, optimizers
        self.validate, self.origin, self.steps = validate, origin, steps
        self.folder = Path(config.output_dir)
        self.start = 0 if saved is None else int(saved["step"])
        self._best = -math.inf if saved is None else saved["best"]
        self._clock = time.monotonic() - (0.0 if saved is None else saved["seconds"])
        self._unvalidated = None if saved is None else saved.get(UNVALIDATED)
        self._log = Log(accelerator, self.folder, self.start - (self._unvalidated is not None), steps)

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint of this run."""
        return (self.folder / STATE).exists()

    def catch_up(self) -> None:
        """Does what was left undone after the step of the checkpoint: its validation."""
        if self._unvalidated is not None:
            self._conclude(self._unvalidated)  # a run that is killed after it makes up for it once more

    def stepped(self, done: int, loss: float, learning_rate: float) -> None:
        """Validates, logs and saves after a step, as far as that is due.

        Args:
            done: steps so far; loss, learning_rate: of the last of them.
        """
        seconds = time.monotonic() - self._clock
        self._conclude({"step": done, "loss": loss, "learning_rate": learning_rate, "seconds": seconds})

    def leave(self, done: int, **more: Any) -> None:
        """Keeps what is done, before an error ends the run; ``more`` goes into the checkpoint."""
        if done > self.start and self.accelerator.num_processes == 1:  # others would wait for this one
            self.save(done, **more)
        self.close()

    def save(self, done: int, name: str = STATE, **more: Any) -> None:
        """Writes a checkpoint of so many steps; every process has to call this."""
        content = training_state(self.model, self.optimizers) | dict(self.origin) | more
        content |= {"step": done, "seconds": time.monotonic() - self._clock, "best": self._best, "config": asdict(self.config)}
        if self.accelerator.is_main_process:
            write_checkpoint(self.folder / name, content)

    def close(self) -> None:
        """Ends the log."""
        self._log.close()

    def _conclude(self, record: Mapping[str, Any]) -> None:
        done, record = record["step"], dict(record)
        last = done == self.steps
        if self.validate is not None and (done % self.config.eval_steps == 0 or last):
            try:
                record |= self.validate(self.model)
            except torch.OutOfMemoryError as error:
                self.leave(done, **{UNVALIDATED: record})
                where = f"in the validation after step {done}"
                raise out_of_memory(where, self.resumable, "Give a lower --token_budget") from error
            if record["validation_agreement"] > self._best:
                self._best = record["validation_agreement"]
                self.save(done, BEST)
        # before the checkpoint: lines of later steps are dropped on a resume, and one that is missing would stay so
        self._log.step(record, write=done % self.config.logging_steps == 0 or "validation_agreement" in record or last)
        if done % self.config.save_steps == 0 or last:
            self.save(done)
