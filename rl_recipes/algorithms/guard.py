"""GRPO-Guard: a likelihood ratio that is comparable between steps, so that one clip range fits all of them.

The plain log-ratio of a Gaussian step is eps . dmu / std - |dmu|^2 / (2 std^2), with eps the noise that was drawn and dmu
the way that the mean has moved: it is below zero on average, and its spread grows as std shrinks, so that clipping
hardly ever stops a sample of positive advantage. Without the second term and times std it becomes mean(eps . dmu),
centred and of one scale. The gradients of late steps, whose dt is small, are then brought back by dividing the loss by
-dt (arXiv 2510.22319, ratio normalisation and gradient reweighting).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from rl_recipes.algorithms.losses import PolicyLoss, clipped_policy_loss
from tpips_reward.errors import TPIPSError


def guard_log_ratio(mean: Tensor, old_mean: Tensor, sample: Tensor, *, std: float) -> Tensor:
    """mean(eps . (mu - mu_old)) over all but the batch dimension, with eps = (x' - mu_old) / std; shape (B,).

    Args:
        mean: (B, ...) mean of the step under the policy; gradients reach it.
        old_mean: (B, ...) mean that the sample was drawn from, kept by the rollout.
        sample: (B, ...) x'.
        std: the step's standard deviation, s sqrt(-dt) for the SDE rules.

    Raises:
        TPIPSError: shapes that differ, or a std that is not positive.
    """
    if not mean.shape == old_mean.shape == sample.shape:
        raise TPIPSError(
            f"Means and samples of a step must have one shape, but they have {tuple(mean.shape)}, "
            f"{tuple(old_mean.shape)} and {tuple(sample.shape)}."
        )
    if not (std > 0.0 and math.isfinite(std)):
        raise TPIPSError(f"The ratio of a step needs a positive std, but it is {std}; use stochastic steps only.")
    old_mean = old_mean.detach()
    noise = (sample.detach() - old_mean) / std
    return (noise * (mean - old_mean)).flatten(1).mean(dim=1)


def guard_policy_loss(
    mean: Tensor,
    old_mean: Tensor,
    sample: Tensor,
    advantages: Tensor,
    *,
    std: float,
    dt: float,
    clip_range: float,
) -> PolicyLoss:
    """The clipped loss of the normalised ratio exp(guard_log_ratio), divided by -dt.

    On-policy the ratio is exactly 1. `clip_range` is not that of the plain ratio: deviations are smaller by about std.

    Args:
        mean, old_mean, sample, std: as in `guard_log_ratio`.
        advantages: (B,).
        dt: sigma' - sigma of the step, negative.

    Raises:
        TPIPSError: for what `guard_log_ratio` and `clipped_policy_loss` refuse, or a dt that is not negative.
    """
    if not (dt < 0.0 and math.isfinite(dt)):
        raise TPIPSError(f"dt must be negative (noise levels fall), but it is {dt}; pass sigma' - sigma.")
    log_ratio = guard_log_ratio(mean, old_mean, sample, std=std)
    policy = clipped_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantages, clip_range=clip_range)
    return replace(policy, loss=policy.loss / -dt)
