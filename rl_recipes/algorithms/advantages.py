"""Group-relative advantages: how much better a sample is than the other edits of the same source and instruction."""

from __future__ import annotations

import torch
from torch import Tensor

from tpips_reward.errors import TPIPSError

STD_SOURCES = ("group", "batch", "none")


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    std_from: str = "group",
    eps: float = 1e-4,
    min_std: float = 1e-6,
    clip: float = 5.0,
) -> Tensor:
    """(r - mean of the group) / (std + eps), clipped; float32 of shape (B,).

    Args:
        rewards: (B,) finite rewards.
        groups: (B,) integer ids; samples of one id were made from one source and instruction.
        std_from: "group" divides by the group's own standard deviation, "batch" by that of all rewards of the batch,
            and "none" does not divide.
        min_std: below this the rewards of a group count as equal, and their advantages are exactly zero: a difference in
            the last bits must not be blown up to full size.
        clip: advantages are limited to plus and minus this.

    Raises:
        TPIPSError: shapes that differ, group ids that are no integers, rewards that are not finite, unknown `std_from`.
    """
    if std_from not in STD_SOURCES:
        raise TPIPSError(f"Unknown std_from {std_from!r}; use one of {', '.join(STD_SOURCES)}.")
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise TPIPSError(
            f"Rewards and groups must be two vectors of one length, but their shapes are {tuple(rewards.shape)} and "
            f"{tuple(groups.shape)}."
        )
    if groups.is_floating_point() or groups.is_complex():
        raise TPIPSError(f"Group ids must be integers, but their dtype is {groups.dtype}: large ids would merge.")
    if not bool(torch.isfinite(rewards).all()):
        bad = int((~torch.isfinite(rewards)).sum())
        raise TPIPSError(f"{bad} of {len(rewards)} rewards are NaN or infinite; an advantage cannot be made from them.")
    rewards = rewards.detach().double()
    _, position = torch.unique(groups, return_inverse=True)
    count = torch.bincount(position).double()
    mean = torch.zeros_like(count).index_add_(0, position, rewards) / count
    centred = rewards - mean[position]
    variance = torch.zeros_like(count).index_add_(0, position, centred.square()) / count
    group_std = variance.sqrt()[position]
    advantages = centred
    if std_from != "none":
        advantages = centred / ((group_std if std_from == "group" else rewards.std(correction=0)) + eps)
    advantages = torch.where(group_std < min_std, torch.zeros_like(advantages), advantages)
    return advantages.clamp(-clip, clip).float()
