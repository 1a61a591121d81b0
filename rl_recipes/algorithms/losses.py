"""Losses of policy-gradient training as pure functions of log-probabilities and advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpips_reward.errors import TPIPSError


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped loss (a scalar with gradient) and what one watches: ratio (B,) and the share of clipped samples."""

    loss: Tensor
    ratio: Tensor
    clip_fraction: Tensor


def clipped_policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, *, clip_range: float) -> PolicyLoss:
    """PPO: mean of max(-A r, -A clip(r, 1 - c, 1 + c)) with r = exp(log_prob - old_log_prob); all inputs (B,).

    On-policy r is exactly 1, and the gradient is that of -A log_prob.
    """
    if not log_prob.shape == old_log_prob.shape == advantages.shape:
        raise TPIPSError(
            f"Log-probabilities and advantages must have one shape, but they have {tuple(log_prob.shape)}, "
            f"{tuple(old_log_prob.shape)} and {tuple(advantages.shape)}."
        )
    if not clip_range > 0.0:
        raise TPIPSError(f"clip_range must be positive, but it is {clip_range}.")
    advantages = advantages.detach()
    ratio = torch.exp(log_prob - old_log_prob.detach())
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
    outside = ((ratio - 1.0).abs() > clip_range).float().mean()
    return PolicyLoss(loss, ratio.detach(), outside.detach())
