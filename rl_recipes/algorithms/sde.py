"""Stochastic steps of a flow sampler with their log-probabilities: Flow-SDE, Dance-SDE and CPS.

A flow model moves from noise (sigma = 1) to data (sigma = 0) along v = noise - data. The ODE has no likelihood to train
on; each rule here turns one step into a Gaussian x' ~ N(mean, std^2) whose mean depends on v. With eta = 0 every rule is
the Euler step x + v dt. Notation: s the noise level, dt = sigma' - sigma < 0.

- flow_sde (Flow-GRPO): s = eta sqrt(sigma / (1 - sigma~)), where sigma~ is sigma, but the schedule's second value at
  sigma = 1; mean = x (1 + s^2 dt / (2 sigma)) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt; std = s sqrt(-dt).
- dance (DanceGRPO): the same with s = eta.
- cps (coefficients-preserving sampling): s = sigma' sin(eta pi / 2);
  mean = (x - sigma v)(1 - sigma') + (x + (1 - sigma) v) sqrt(sigma'^2 - s^2); std = s. Its "log-probability" is the
  plain -mean (x' - mean)^2, so clip ranges cannot be compared with those of the other two.

Coefficients are Python floats (float64); tensors are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tpips_reward.errors import TPIPSError

KINDS = ("flow_sde", "dance", "cps")


@dataclass(frozen=True)
class StepResult:
    """One step of a batch.

    Attributes:
        sample: x' (B, ...), float32, without gradient.
        mean: the Gaussian's mean (B, ...), float32; gradients reach the velocity through it.
        std: its standard deviation, the same for all elements; 0 for a deterministic step.
        log_prob: (B,) float32, averaged over elements, or None for a deterministic step.
    """

    sample: Tensor
    mean: Tensor
    std: float
    log_prob: Tensor | None


def step(
    velocity: Tensor,
    latents: Tensor,
    sigma: float,
    sigma_next: float,
    *,
    sigma_second: float,
    eta: float,
    kind: str = "flow_sde",
    noise: Tensor | None = None,
    sample: Tensor | None = None,
) -> StepResult:
    """One step from `sigma` to `sigma_next`; sampling passes `noise`, replay passes the `sample` that was drawn.

    Args:
        velocity: model output (B, ...) at `latents`.
        latents: x (B, ...), float32.
        sigma_second: the schedule's second value, which stands in for sigma where sigma = 1 (flow_sde).
        eta: noise strength; 0 gives the Euler step.
        noise: standard normal, shaped like `latents`.
        sample: x' of an earlier call with equal arguments.

    Raises:
        TPIPSError: latents that are not float32, neither or both of noise and sample for a stochastic step, or an
            unknown kind, bad eta or sigmas.
    """
    if latents.dtype not in (torch.float32, torch.float64):
        raise TPIPSError(f"Latents must be float32, but they are {latents.dtype}: rounding them shifts the ratio.")
    velocity = velocity.to(latents.dtype)
    on_x, on_v, std = coefficients(kind, sigma, sigma_next, sigma_second=sigma_second, eta=eta)
    mean = latents * on_x + velocity * on_v
    if std == 0.0:
        if sample is not None:
            raise TPIPSError(
                "A deterministic step (eta = 0) has no likelihood to replay; replay stochastic steps only."
            )
        return StepResult(mean.detach(), mean, 0.0, None)
    if (noise is None) == (sample is None):
        raise TPIPSError(
            "A stochastic step needs either noise (sampling) or the earlier sample (replay), and not both."
        )
    if sample is None:
        assert noise is not None
        sample = mean + std * noise
    sample = sample.detach()
    return StepResult(sample, mean, std, log_prob(kind, sample, mean, std))


def coefficients(
    kind: str, sigma: float, sigma_next: float, *, sigma_second: float, eta: float
) -> tuple[float, float, float]:
    """(a, b, std) of the Gaussian with mean a x + b v; formulas in the module's docstring."""
    if kind not in KINDS:
        raise TPIPSError(f"Unknown SDE kind {kind!r}; use one of {', '.join(KINDS)}.")
    if not 0.0 <= sigma_next < sigma <= 1.0:
        raise TPIPSError(f"Noise levels must fall within [0, 1], but a step goes from {sigma} to {sigma_next}.")
    if not math.isfinite(eta) or eta < 0.0 or (kind == "cps" and eta > 1.0):
        bound = "between 0 and 1" if kind == "cps" else "0 or more"
        raise TPIPSError(f"eta must be {bound} for {kind}, but it is {eta}.")
    dt = sigma_next - sigma
    if eta == 0.0:
        return 1.0, dt, 0.0
    if kind == "cps":
        s = sigma_next * math.sin(eta * math.pi / 2.0)
        kept = math.sqrt(max(sigma_next**2 - s**2, 0.0))
        return (1.0 - sigma_next) + kept, -sigma * (1.0 - sigma_next) + (1.0 - sigma) * kept, s
    s = eta
    if kind == "flow_sde":
        reference = sigma_second if sigma == 1.0 else sigma
        if not 0.0 <= reference < 1.0:
            raise TPIPSError(f"The schedule's second noise level must be below 1, but it is {reference}.")
        s = eta * math.sqrt(sigma / (1.0 - reference))
    drift = s**2 / (2.0 * sigma)
    return 1.0 + drift * dt, (1.0 + drift * (1.0 - sigma)) * dt, s * math.sqrt(-dt)


def log_prob(kind: str, sample: Tensor, mean: Tensor, std: float) -> Tensor:
    """(B,) log-density of `sample`, averaged over all other dimensions (cps: minus the mean squared distance)."""
    squared = (sample.detach() - mean).square().flatten(1).mean(dim=1)
    if kind == "cps":
        return -squared
    return -squared / (2.0 * std**2) - math.log(std) - 0.5 * math.log(2.0 * math.pi)
