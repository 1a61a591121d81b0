"""DDPO's advantages in a run: statistics of each prompt that outlive the iteration, one set for each reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor

from rl_recipes.algorithms.ddpo import PromptStatistics, prompt_advantages
from rl_recipes.collecting import Batch
from rl_recipes.grpo import assign_advantages
from rl_recipes.job import Job


class Statistics:
    """The latest rewards of each prompt, by the reward's name; the same in all processes.

    Args:
        buffer_size: rewards that are kept of a prompt.
    """

    def __init__(self, buffer_size: int) -> None:
        self._size = buffer_size
        self._by_name: dict[str, PromptStatistics] = {}

    def of(self, name: str) -> PromptStatistics:
        """The statistics of one reward."""
        return self._by_name.setdefault(name, PromptStatistics(self._size))

    def state_dict(self) -> dict[str, Any]:
        """Plain lists, for a checkpoint."""
        return {name: statistics.state_dict() for name, statistics in self._by_name.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave, to the bit."""
        self._by_name = {}
        for name, part in state.items():
            self.of(name).load_state_dict(part)


def assign_prompt_advantages(batches: Sequence[Batch], job: Job, statistics: Statistics) -> None:
    """Adds the rewards of all processes to the statistics, and gives each edit its advantage against its prompt's."""
    a = job.args.algorithm
    keys: list[str] = gather_object([prompt.key for batch in batches for prompt in batch.prompts])

    def compare(name: str, rewards: Tensor) -> Tensor:
        own = statistics.of(name)
        own.add(keys, rewards)
        return prompt_advantages(
            rewards, keys, own, min_count=a.min_count, std_from=a.advantage_std, clip=a.adv_clip
        )

    assign_advantages(batches, job, compare)
