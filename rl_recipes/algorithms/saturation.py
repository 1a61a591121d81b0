"""Prompts that have nothing left to teach: all edits of their groups get the top reward, visit after visit.

Their advantages are zero, or noise; time is better spent on the others. A visit is one group of a prompt, kept as its
lowest and highest reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tpips_reward.errors import TPIPSError

#: (lowest, highest) reward of one group.
Visit = tuple[float, float]


def visits(rewards: Tensor, keys: Sequence[str]) -> dict[str, Visit]:
    """The visits of an iteration; edits of one prompt count as one group.

    Args:
        rewards: (B,) finite rewards of all processes.
        keys: B names of prompts.

    Raises:
        TPIPSError: lengths that differ, or rewards that are not finite.
    """
    if rewards.ndim != 1 or len(rewards) != len(keys):
        raise TPIPSError(
            f"There must be one reward for each prompt, but there are {len(keys)} prompts and rewards of shape "
            f"{tuple(rewards.shape)}."
        )
    if not bool(torch.isfinite(rewards).all()):
        raise TPIPSError("Rewards are NaN or infinite; whether a prompt is saturated cannot be said.")
    found: dict[str, Visit] = {}
    for key, reward in zip(keys, rewards.tolist(), strict=True):
        low, high = found.get(key, (reward, reward))
        found[key] = min(low, reward), max(high, reward)
    return found


def with_visits(
    history: Mapping[str, Sequence[Visit]], new: Mapping[str, Visit], *, last: int
) -> dict[str, list[Visit]]:
    """The history with an iteration's visits added, of which the latest `last` of each prompt are kept."""
    out = {key: list(seen) for key, seen in history.items()}
    for key, visit in new.items():
        out[key] = [*out.get(key, []), visit][-last:]
    return out


def saturated(
    history: Mapping[str, Sequence[Visit]], *, top: float, spread: float = 0.01, last: int = 3
) -> frozenset[str]:
    """Prompts whose latest `last` groups all had rewards of `top` or more, at most `spread` apart.

    Equal rewards alone are not enough: a prompt where all edits fail alike has everything left to learn. The policy
    changes, so a prompt that is skipped should be visited again now and then.

    Args:
        history: visits of each prompt, oldest first.
        top: lowest reward that counts as the top, on the reward's own scale.
        last: prompts with fewer visits are never saturated.

    Raises:
        TPIPSError: for settings out of range.
    """
    if last < 1 or not spread >= 0.0 or not math.isfinite(top):
        raise TPIPSError(
            f"Saturation needs last >= 1, spread >= 0 and a finite top, but they are {last}, {spread} and {top}."
        )
    return frozenset(
        key
        for key, seen in history.items()
        if len(seen) >= last and all(low >= top and high - low <= spread for low, high in seen[-last:])
    )
