"""DDPO's advantages: a reward against the earlier rewards of the same prompt, instead of against a group.

The likelihood ratio and the clipped loss are those of GRPO. Each prompt has a buffer of its latest rewards
(arXiv 2305.13301, per-prompt running mean and standard deviation); until it holds enough of them, the rewards of the
whole batch stand in. Samples of a prompt need not be drawn together then, and one sample an iteration is enough.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpips_reward.errors import TPIPSError

STD_SOURCES = ("prompt", "batch")


class PromptStatistics:
    """The latest rewards of each prompt.

    All processes must add the same rewards in the same order (those gathered from all), so that they agree.

    Args:
        buffer_size: so many of the latest rewards of a prompt are kept.
        max_prompts: beyond so many prompts, the one not seen for longest is forgotten: an endless source of prompts must
            not fill memory and checkpoints.

    Raises:
        TPIPSError: for sizes below 1.
    """

    def __init__(self, buffer_size: int = 32, max_prompts: int = 100_000) -> None:
        for name, value in {"buffer_size": buffer_size, "max_prompts": max_prompts}.items():
            if value < 1:
                raise TPIPSError(f"{name} must be at least 1, but it is {value}.")
        self.buffer_size, self.max_prompts = buffer_size, max_prompts
        self._rewards: dict[str, deque[float]] = {}

    def __len__(self) -> int:
        return len(self._rewards)

    def rewards(self, key: str) -> list[float]:
        """The rewards that are kept of a prompt, oldest first."""
        return list(self._rewards.get(key, ()))

    def add(self, keys: Sequence[str], rewards: Tensor) -> None:
        """Adds the rewards (B,) of the prompts named by `keys`.

        Raises:
            TPIPSError: lengths that differ, or rewards that are not finite; nothing is added then.
        """
        for key, reward in zip(keys, _checked(keys, rewards).tolist(), strict=True):
            # Taken out and put back at the end: the order of the dict is that of the latest visits.
            buffer = self._rewards.pop(key, None) or deque(maxlen=self.buffer_size)
            buffer.append(reward)
            self._rewards[key] = buffer
        while len(self._rewards) > self.max_prompts:
            del self._rewards[next(iter(self._rewards))]

    def state_dict(self) -> dict[str, Any]:
        """Plain lists of floats, for a checkpoint; `load_state_dict` gives back the same bits."""
        return {"rewards": [[key, list(buffer)] for key, buffer in self._rewards.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave, in place of what is here.

        Raises:
            TPIPSError: when it is something else; nothing is changed then.
        """
        try:
            loaded = {
                str(key): deque((float(r) for r in rewards), maxlen=self.buffer_size)
                for key, rewards in state["rewards"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise TPIPSError(
                f"These are no per-prompt statistics ({type(error).__name__}: {error}); the checkpoint is of another "
                "algorithm, or damaged."
            ) from error
        if not all(buffer and all(map(math.isfinite, buffer)) for buffer in loaded.values()):
            raise TPIPSError(
                "The per-prompt statistics hold an empty buffer or a reward that is not finite; start anew."
            )
        self._rewards = loaded


def prompt_advantages(
    rewards: Tensor,
    keys: Sequence[str],
    statistics: PromptStatistics,
    *,
    min_count: int = 16,
    std_from: str = "prompt",
    eps: float = 1e-4,
    min_std: float = 1e-6,
    clip: float = 5.0,
) -> Tensor:
    """(r - mean) / (std + eps) with mean and std of the prompt's own buffer, clipped; float32 of shape (B,).

    Call `statistics.add` first: the buffer is to hold the rewards themselves too, as in DDPO.

    Args:
        rewards: (B,) finite rewards of all processes.
        keys: B names of prompts.
        min_count: a prompt with fewer rewards is compared with the batch instead.
        std_from: "prompt", or "batch" to divide by the standard deviation of the batch.
        min_std: where the rewards compared with differ by less than this (as a standard deviation), advantages are
            exactly zero: a difference in the last bits must not be blown up.
        clip: advantages are limited to plus and minus this.

    Raises:
        TPIPSError: lengths that differ, rewards that are not finite, an unknown `std_from`, or a `min_count` that
            `buffer_size` can never reach.
    """
    if std_from not in STD_SOURCES:
        raise TPIPSError(f"Unknown std_from {std_from!r}; use one of {', '.join(STD_SOURCES)}.")
    if not 1 <= min_count <= statistics.buffer_size:
        raise TPIPSError(
            f"min_count must be between 1 and the buffer's size ({statistics.buffer_size}), but it is {min_count}."
        )
    values = _checked(keys, rewards).numpy()
    batch_mean, batch_std = float(values.mean()), float(values.std())
    moments: dict[str, tuple[float, float]] = {}
    for key in dict.fromkeys(keys):
        own = statistics.rewards(key)
        moments[key] = (float(np.mean(own)), float(np.std(own))) if len(own) >= min_count else (batch_mean, batch_std)
    mean = np.array([moments[key][0] for key in keys])
    own_std = np.array([moments[key][1] for key in keys])
    std = own_std if std_from == "prompt" else np.full_like(own_std, batch_std)
    advantages = np.where(np.minimum(own_std, std) < min_std, 0.0, (values - mean) / (std + eps))
    return torch.from_numpy(advantages.clip(-clip, clip)).float().to(rewards.device)


def _checked(keys: Sequence[str], rewards: Tensor) -> Tensor:
    """The rewards as float64 on the CPU."""
    if rewards.ndim != 1 or not len(rewards) or len(rewards) != len(keys):
        raise TPIPSError(
            f"There must be one reward for each prompt, but there are {len(keys)} prompts and rewards of shape "
            f"{tuple(rewards.shape)}."
        )
    if not bool(torch.isfinite(rewards).all()):
        bad = int((~torch.isfinite(rewards)).sum())
        raise TPIPSError(f"{bad} of {len(rewards)} rewards are NaN or infinite; an advantage cannot be made from them.")
    return rewards.detach().double().cpu()
