"""Direct backpropagation of the reward: which steps carry the gradient, and the loss.

The reward is differentiable, so its gradient can go through the decoder into the sampler itself. Through all steps that
is too much memory, and gradients explode, so it stops early:

- draft (DRaFT-K, arXiv 2309.17400): through the last K steps.
- alignprop (arXiv 2310.03739): through the last k steps, k drawn from 1 to K anew in each iteration, so that early steps
  are trained without all of them being kept each time.
- refl (arXiv 2304.05977): through one step, drawn from the last K; from there the clean latents are predicted at once.

What is drawn is a function of (seed, iteration) alone: all processes and a resumed run agree on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_recipes.seeds import WINDOW, generator
from tpips_reward.errors import TPIPSError

KINDS = ("draft", "alignprop", "refl")


@dataclass(frozen=True)
class GradientPlan:
    """What an iteration does with its steps.

    Attributes:
        steps: those whose velocity is computed with gradient, ascending and without gaps; the ones before them have none.
        jump: the last of them predicts the clean latents (`predict_clean`), and no further step is run. Otherwise it is
            the last step of the schedule.
    """

    steps: tuple[int, ...]
    jump: bool


def gradient_plan(iteration: int, *, kind: str, num_steps: int, last: int, seed: int = 0) -> GradientPlan:
    """The plan of an iteration (from 1).

    Args:
        last: K, at most num_steps.
        seed: seed of the run (alignprop, refl).

    >>> gradient_plan(1, kind="draft", num_steps=8, last=2)
    GradientPlan(steps=(6, 7), jump=False)

    Raises:
        TPIPSError: for an unknown kind, or an iteration or K out of range.
    """
    if kind not in KINDS:
        raise TPIPSError(f"Unknown kind of backpropagation {kind!r}; use one of {', '.join(KINDS)}.")
    if iteration < 1:
        raise TPIPSError(f"Iterations count from 1, but the iteration is {iteration}.")
    if not 1 <= last <= num_steps:
        raise TPIPSError(
            f"The gradient can go through 1 to {num_steps} of {num_steps} steps, but {last} were asked for."
        )
    if kind == "draft":
        return GradientPlan(tuple(range(num_steps - last, num_steps)), jump=False)
    drawn = 1 + int(torch.randint(last, (), generator=generator(seed, WINDOW, iteration)))
    if kind == "refl":
        return GradientPlan((num_steps - drawn,), jump=True)
    return GradientPlan(tuple(range(num_steps - drawn, num_steps)), jump=False)


def predict_clean(latents: Tensor, velocity: Tensor, sigma: float) -> Tensor:
    """x0 = x - sigma v, the clean latents that a velocity (noise - data) at noise level sigma points to; (B, ...)."""
    if not 0.0 < sigma <= 1.0:
        raise TPIPSError(f"The noise level must be above 0 and at most 1, but it is {sigma}.")
    return latents - sigma * velocity


def reward_loss(scores: Tensor, *, distance: Tensor | None = None, kl_weight: float = 0.0) -> Tensor:
    """mean(-score) + kl_weight mean(distance), a scalar with gradient.

    Args:
        scores: (B,) of the reward, with gradient.
        distance: (B,) to the reference, `velocity_distance` averaged over the steps with gradient.

    Raises:
        TPIPSError: scores without gradient or not finite, shapes that differ, or a `kl_weight` without distance.
    """
    if scores.ndim != 1 or not len(scores) or (distance is not None and distance.shape != scores.shape):
        shapes = [tuple(t.shape) for t in (scores, distance) if t is not None]
        raise TPIPSError(f"Scores and distances must be vectors of one length, but their shapes are {shapes}.")
    if not bool(torch.isfinite(scores).all()):
        bad = int((~torch.isfinite(scores)).sum())
        raise TPIPSError(f"{bad} of {len(scores)} scores are NaN or infinite; their gradient would spoil the weights.")
    if not scores.requires_grad:
        raise TPIPSError(
            "The scores carry no gradient; hand the reward edits that do, as float tensors, outside torch.no_grad, and use "
            "a reward that is differentiable."
        )
    if not (kl_weight >= 0.0 and math.isfinite(kl_weight)):
        raise TPIPSError(f"kl_weight must be 0 or more, but it is {kl_weight}.")
    loss = -scores.mean()
    if kl_weight:
        if distance is None:
            raise TPIPSError(f"kl_weight is {kl_weight}, but there is no distance to the reference to weigh.")
        loss = loss + kl_weight * distance.mean()
    return loss
