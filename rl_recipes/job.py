"""What a run is made of: the parts that every step of a recipe works with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import Accelerator

from rl_recipes.config import Arguments
from rl_recipes.editors import Editor
from rl_recipes.progress import PhaseTimer
from rl_recipes.rewards import Rewards
from rl_recipes.runs import RunFolder
from rl_recipes.weights import MovingAverage
from rl_recipes.zero import ZeroOptimizer
from tpips_reward.stopping import StopSignal


@dataclass
class Job:
    """The parts of a run.

    Attributes:
        args: all settings.
        accelerator: devices and processes.
        folder: the run's output folder.
        editor: with its fresh or restored trained weights.
        optimizer: of `editor.lora_parameters()`.
        reward: what is optimised.
        stop: whether the run was asked to stop.
        average: the moving average of the trained weights, or None.
        weights_are_between: the weights are between two iterations, where no checkpoint may be taken.
    """

    args: Arguments
    accelerator: Accelerator
    folder: RunFolder
    editor: Editor
    optimizer: torch.optim.Optimizer | ZeroOptimizer
    reward: Rewards
    stop: StopSignal
    average: MovingAverage | None = None
    weights_are_between: bool = False


@dataclass(frozen=True)
class Iteration:
    """One iteration: its number (from 1), and the seconds of its phases."""

    number: int
    timer: PhaseTimer


def any_process(accelerator: Accelerator, *flags: bool) -> tuple[bool, ...]:
    """Whether each flag is set in any process; all processes must ask, and all get the same answer."""
    if accelerator.num_processes == 1:
        return flags
    mine = torch.tensor([float(flag) for flag in flags], device=accelerator.device)
    return tuple(bool(total > 0) for total in accelerator.reduce(mine, reduction="sum"))
