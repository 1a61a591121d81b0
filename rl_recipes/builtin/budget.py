"""How long a training lasts, how its learning rate moves, and how it survives an interruption."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_recipes.runs import write_atomic
from tpips_reward.errors import TPIPSError


@dataclass
class Budget:
    """A training's length, in steps or in minutes of work; one of the two.

    Steps give the same weights on every run; minutes fit the training to the machine. Time before a checkpoint counts.
    """

    steps: int | None = None
    minutes: float | None = None
    elapsed: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise TPIPSError("Say how long to train: give either --steps or --minutes, not both and not neither.")
        if (self.steps is not None and self.steps < 1) or (self.minutes is not None and not self.minutes > 0):
            raise TPIPSError(f"A training needs a positive length, not --steps {self.steps} --minutes {self.minutes}.")

    def seconds(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return self.elapsed + time.monotonic() - self._started

    def progress(self, step: int) -> float:
        """How much of the training is done after ``step`` steps, from 0 to 1."""
        done = step / self.steps if self.steps is not None else self.seconds() / (60.0 * (self.minutes or 1.0))
        return min(1.0, done)


def learning_rate(peak: float, step: int, progress: float, warmup: int = 100) -> float:
    """Linear warm-up over ``warmup`` steps, then half a cosine to zero at ``progress`` 1."""
    return peak * min(1.0, (step + 1) / warmup) * 0.5 * (1.0 + math.cos(math.pi * progress))


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint of tensors, numbers and texts atomically."""
    write_atomic(path, lambda p: torch.save(state, p))


def load_state(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Reads a checkpoint.

    Raises:
        TPIPSError: when it is missing, damaged, or made with other settings.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise TPIPSError(f"There is no checkpoint {path} to resume from; start without --resume.") from error
    except Exception as error:  # torch raises many kinds for a damaged file
        raise TPIPSError(f"The checkpoint {path} cannot be read ({error}); start without --resume.") from error
    different = [k for k, v in settings.items() if state["settings"].get(k) != v]
    if different:
        was = ", ".join(f"{k}={state['settings'].get(k)!r}" for k in different)
        raise TPIPSError(f"The checkpoint {path} was made with {was}; resume with the same settings, or start anew.")
    return state
