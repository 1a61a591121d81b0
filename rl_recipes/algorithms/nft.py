"""DiffusionNFT: reinforcement on the forward process, without likelihoods or stochastic sampling (arXiv 2509.16117).

Edits x0 are sampled with the ODE by the old policy. Each is noised again, x_t = (1 - t) x0 + t noise, and the velocity is
trained so that a good edit pulls it, and a bad one pushes it:

    w   = clip(A / 5, -1, 1) / 2 + 1/2
    v+  = v_old + beta (v - v_old)          v- = v_old - beta (v - v_old)
    L+- = mean (x_t - t v+- - x0)^2 / max(mean |x_t - t v+- - x0|, 1e-5), the divisor without gradient
    loss = mean [(w L+ + (1 - w) L-) / beta] + kl_weight mean (v - v_ref)^2

The old policy follows: theta_old <- d theta_old + (1 - d) theta with d = min(0.001 step, 0.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_recipes.algorithms.kl import velocity_distance
from tpips_reward.errors import TPIPSError

TIMES = ("schedule", "uniform", "logit_normal")
_SMALLEST_ERROR = 1e-5


@dataclass(frozen=True)
class NFTLoss:
    """The loss (a scalar with gradient) and what one watches, detached and of shape (B,): both errors and the distance
    to the reference, which is zero where none was given."""

    loss: Tensor
    positive: Tensor
    negative: Tensor
    distance: Tensor


def weights_from_advantages(advantages: Tensor, *, clip: float = 5.0) -> Tensor:
    """w = clip(A / clip, -1, 1) / 2 + 1/2: 1 for the best, 0 for the worst, 1/2 for advantage zero; shape (B,)."""
    if not clip > 0.0:
        raise TPIPSError(f"clip must be positive, but it is {clip}.")
    if not bool(torch.isfinite(advantages).all()):
        raise TPIPSError("Advantages are NaN or infinite; a weight cannot be made from them.")
    return (advantages.detach() / clip).clamp(-1.0, 1.0) / 2.0 + 0.5


def draw_times(
    generators: Sequence[torch.Generator],
    count: int,
    *,
    kind: str = "schedule",
    sigmas: Sequence[float] = (),
) -> Tensor:
    """`count` noise levels for each sample, (B, count) float32 on the CPU, in random order.

    - schedule: noise levels of the sampler's own schedule, none twice.
    - uniform: one from each of `count` equal parts of (0, 1).
    - logit_normal: sigmoid of a standard normal, which favours the middle.

    Args:
        generators: one for each sample; row i depends on generators[i] alone.
        sigmas: the schedule, from 1 to 0 (schedule).

    Raises:
        TPIPSError: an unknown kind, a count below 1, or more times than the schedule has.
    """
    if kind not in TIMES:
        raise TPIPSError(f"Unknown kind of times {kind!r}; use one of {', '.join(TIMES)}.")
    if count < 1:
        raise TPIPSError(f"The number of times must be at least 1, but it is {count}.")
    levels = torch.tensor([s for s in sigmas if s > 0.0], dtype=torch.float32)
    if kind == "schedule" and count > len(levels):
        raise TPIPSError(
            f"{count} times were asked for, but the schedule has only {len(levels)} noise levels above zero; "
            "ask for fewer or sample with more steps."
        )
    rows = []
    for generator in generators:
        if kind == "schedule":
            row = levels[torch.randperm(len(levels), generator=generator)[:count]]
        elif kind == "uniform":
            # 1 - rand is above zero: at t = 0 there is nothing to predict.
            parts = torch.randperm(count, generator=generator)
            row = (parts + 1.0 - torch.rand(count, generator=generator)) / count
        else:
            row = torch.randn(count, generator=generator).sigmoid()
        rows.append(row)
    return torch.stack(rows)


def noised(clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """x_t = (1 - t) x0 + t noise, (B, ...), for times (B,)."""
    t = _broadcast(times, clean)
    return (1.0 - t) * clean + t * noise


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    latents: Tensor,
    clean: Tensor,
    times: Tensor,
    weights: Tensor,
    *,
    beta: float = 1.0,
    reference_velocity: Tensor | None = None,
    kl_weight: float = 0.0,
) -> NFTLoss:
    """The loss of one noise level a sample; the formula is in the module's docstring.

    Args:
        velocity: v (B, ...) of the policy at `latents`; gradients reach it alone.
        old_velocity: v_old (B, ...), of the policy that sampled.
        latents: x_t (B, ...), float32.
        clean: x0 (B, ...), float32.
        times: t (B,), above 0 and at most 1.
        weights: w (B,) in [0, 1], from `weights_from_advantages`.
        beta: strength of the implicit guidance, positive; smaller is stronger.
        reference_velocity: v_ref (B, ...), without the adapter.

    Raises:
        TPIPSError: shapes that differ, latents that are not float32, times, weights or beta out of range, or a
            `kl_weight` without reference.
    """
    if not velocity.shape == old_velocity.shape == latents.shape == clean.shape:
        raise TPIPSError(
            f"Velocities and latents must have one shape, but they have {tuple(velocity.shape)}, "
            f"{tuple(old_velocity.shape)}, {tuple(latents.shape)} and {tuple(clean.shape)}."
        )
    if latents.dtype not in (torch.float32, torch.float64) or clean.dtype != latents.dtype:
        raise TPIPSError(f"Latents must be float32, but they are {latents.dtype} and {clean.dtype}.")
    if times.shape != weights.shape or times.shape != latents.shape[:1]:
        raise TPIPSError(
            f"There must be one time and one weight for each of {len(latents)} samples, but their shapes are "
            f"{tuple(times.shape)} and {tuple(weights.shape)}."
        )
    if not bool(((times > 0.0) & (times <= 1.0)).all()):
        raise TPIPSError(f"Times must be above 0 and at most 1, but they are {times.tolist()}.")
    if not bool(((weights >= 0.0) & (weights <= 1.0)).all()):
        raise TPIPSError(f"Weights must be between 0 and 1, but they are {weights.tolist()}.")
    if not (beta > 0.0 and math.isfinite(beta)):
        raise TPIPSError(f"beta must be a number above 0, but it is {beta}.")
    if reference_velocity is None and kl_weight:
        raise TPIPSError(
            f"kl_weight is {kl_weight}, but there is no reference_velocity; compute it without the adapter."
        )
    velocity, old = velocity.to(latents.dtype), old_velocity.detach().to(latents.dtype)
    step = beta * (velocity - old)
    positive = _normalised_error(old + step, latents, clean, times)
    negative = _normalised_error(old - step, latents, clean, times)
    w = weights.detach().to(latents)
    loss = ((w * positive + (1.0 - w) * negative) / beta).mean()
    distance = torch.zeros_like(positive)
    if reference_velocity is not None:
        distance = velocity_distance(velocity, reference_velocity.to(latents.dtype))
        loss = loss + kl_weight * distance.mean()
    return NFTLoss(loss, positive.detach(), negative.detach(), distance.detach())


def old_policy_decay(step: int, *, rate: float = 0.001, most: float = 0.5) -> float:
    """d = min(rate step, most), the share of itself that the old policy keeps after `step` updates (from 0).

    At step 0 the old policy becomes the policy itself, later it follows it more slowly.
    """
    if step < 0:
        raise TPIPSError(f"The number of updates must be 0 or more, but it is {step}.")
    if not (rate >= 0.0 and 0.0 <= most < 1.0):
        raise TPIPSError(f"The decay needs a rate of 0 or more and a limit below 1, but they are {rate} and {most}.")
    return min(rate * step, most)


@torch.no_grad()
def follow(old: Sequence[Tensor], current: Sequence[Tensor], decay: float) -> None:
    """theta_old <- decay theta_old + (1 - decay) theta, in place; with decay 0 the same bits as `current`."""
    if len(old) != len(current) or any(o.shape != c.shape for o, c in zip(old, current, strict=False)):
        raise TPIPSError(
            f"The old policy has {len(old)} tensors and the policy {len(current)}, or their shapes differ; both must be "
            "the same adapter."
        )
    for o, c in zip(old, current, strict=True):
        o.copy_(torch.lerp(c.to(o), o, decay))


def _normalised_error(velocity: Tensor, latents: Tensor, clean: Tensor, times: Tensor) -> Tensor:
    difference = latents - _broadcast(times, latents) * velocity - clean
    scale = difference.detach().abs().flatten(1).mean(dim=1).clamp(min=_SMALLEST_ERROR)
    return difference.square().flatten(1).mean(dim=1) / scale


def _broadcast(times: Tensor, like: Tensor) -> Tensor:
    return times.to(like).reshape(-1, *[1] * (like.ndim - 1))
