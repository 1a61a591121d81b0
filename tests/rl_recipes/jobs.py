"""Jobs of a tiny editor and a reward whose answer is known, shared by the tests of the recipes' parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator

from rl_recipes.collecting import Draw, draw_edits
from rl_recipes.config import Algorithm, Arguments, GRPOArguments
from rl_recipes.drawing import PromptQueue
from rl_recipes.editors import Editor
from rl_recipes.job import Iteration, Job
from rl_recipes.parsing import parse_arguments
from rl_recipes.progress import PhaseTimer
from rl_recipes.prompts import ProceduralPrompts, Prompt
from rl_recipes.rewards import Asked, Rewards, Source
from rl_recipes.runs import RunFolder
from tpips_reward.rewards import RewardOutput
from tpips_reward.stopping import StopSignal


def settings(algorithm: type[Algorithm] = GRPOArguments, **changes: Any) -> Arguments:
    """Settings of a small iteration; those that the algorithm does not have are left out."""
    small = {"resolution": 32, "prompts_per_iteration": 2, "num_generations": 2, "num_inference_steps": 3, "sde_window": 2,
             "train_steps": 1, "threads": 1, **changes}  # fmt: skip
    known = parse_arguments([], algorithm).to_dict()
    return parse_arguments([f"--{name}={value}" for name, value in small.items() if name in known], algorithm)


class PixelSource:
    """The mean of one color channel is good, times a scale; differentiable."""

    def __init__(self, channel: int = 0, scale: float = 1.0) -> None:
        self.channel, self.scale = channel, scale

    def __call__(self, edits: list[torch.Tensor], sources: Any, prompts: Sequence[Prompt]) -> RewardOutput:
        scores = torch.stack([self.scale * image[self.channel].mean() for image in edits])
        aspects = [{"preserve": {"color": float(s)}, "target": {}} for s in scores.detach()]
        return RewardOutput(scores, aspects, {"preserve": scores.detach()})


def rewards_of(sources: Mapping[str, Source]) -> Rewards:
    """Sources of weight 1, by name."""
    return Rewards(",".join(sources), [Asked(source, {name: 1.0}) for name, source in sources.items()])


def job_of(args: Arguments, editor: Editor, folder: Path, sources: Mapping[str, Source] | None = None) -> Job:
    """A job without optimizer."""
    reward = rewards_of(sources or {"red": PixelSource()})
    accelerator: Any = Accelerator(cpu=True)
    return Job(args, accelerator, RunFolder(folder), editor, None, reward, StopSignal())  # type: ignore[arg-type]


def step(number: int = 1) -> Iteration:
    return Iteration(number, PhaseTimer())


def draws(job: Job, number: int = 1, rank: int = 0, world: int = 1) -> list[Draw]:
    """What a process of several draws in an iteration."""
    source = ProceduralPrompts(0, "train", 32)
    process: Any = SimpleNamespace(args=job.args, accelerator=SimpleNamespace(process_index=rank, num_processes=world))
    return draw_edits(process, source, PromptQueue(source).take(number, job.args.run.prompts_per_iteration))
