"""Stochastic steps against the formulas, written out in float64, and their special cases."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from rl_recipes.algorithms import sde
from tpips_reward.errors import TPIPSError

SIGMAS = [1.0, 0.9, 0.7, 0.4, 0.15, 0.0]


def _tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, 5, 4, generator=generator).unbind(0)


def _reference(kind, x, v, sigma, sigma_next, second, eta):
    """Mean and std as the papers write them, in float64."""
    x, v = x.double(), v.double()
    dt = sigma_next - sigma
    if kind == "cps":
        s = sigma_next * math.sin(eta * math.pi / 2)
        clean, noise = x - sigma * v, x + (1 - sigma) * v
        return clean * (1 - sigma_next) + noise * math.sqrt(max(sigma_next**2 - s**2, 0.0)), s
    s = eta if kind == "dance" else eta * math.sqrt(sigma / (1 - (second if sigma == 1 else sigma)))
    mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, s * math.sqrt(-dt)


# The last step of CPS is deterministic and has a test of its own.
@pytest.mark.parametrize(
    "kind, index", [(k, i) for k in sde.KINDS for i in range(len(SIGMAS) - 1) if (k, i) != ("cps", len(SIGMAS) - 2)]
)
def test_step_against_the_formula(kind, index):
    x, v, noise = _tensors()
    sigma, sigma_next = SIGMAS[index : index + 2]
    result = sde.step(v, x, sigma, sigma_next, sigma_second=SIGMAS[1], eta=0.7, kind=kind, noise=noise)
    mean, std = _reference(kind, x, v, sigma, sigma_next, SIGMAS[1], 0.7)
    assert result.std == pytest.approx(std, rel=1e-12)
    assert torch.allclose(result.mean.double(), mean, atol=2e-6)
    assert torch.allclose(result.sample.double(), mean + std * noise.double(), atol=2e-6)
    sample = result.sample.double()
    if kind == "cps":
        expected = -(sample - mean).square().flatten(1).mean(1)
    else:
        expected = Normal(mean, std).log_prob(sample).flatten(1).mean(1)
    assert torch.allclose(result.log_prob.double(), expected, atol=1e-5)
    assert result.log_prob.dtype == result.sample.dtype == torch.float32


@pytest.mark.parametrize("kind", sde.KINDS)
def test_without_noise_every_rule_is_euler(kind):
    x, v, noise = _tensors()
    result = sde.step(v, x, 0.7, 0.4, sigma_second=0.9, eta=0.0, kind=kind, noise=noise)
    assert torch.allclose(result.sample, x + v * (0.4 - 0.7), atol=1e-6)
    assert result.log_prob is None and result.std == 0.0


@pytest.mark.parametrize("kind", sde.KINDS)
def test_small_noise_tends_to_euler(kind):
    a, b, std = sde.coefficients(kind, 0.7, 0.4, sigma_second=0.9, eta=1e-6)
    assert (a, b) == pytest.approx((1.0, -0.3), abs=1e-9)
    assert 0 < std < 1e-5


def test_dance_is_flow_sde_with_another_noise_level():
    flow = sde.coefficients("flow_sde", 0.7, 0.4, sigma_second=0.9, eta=0.7)
    dance = sde.coefficients("dance", 0.7, 0.4, sigma_second=0.9, eta=0.7 * math.sqrt(0.7 / 0.3))
    assert flow == pytest.approx(dance)


@pytest.mark.parametrize("kind", ["flow_sde", "dance"])
def test_the_step_keeps_the_marginal_of_a_known_flow(kind):
    """Data and noise are N(0, 1): x has variance (1 - t)^2 + t^2 at every level, and the exact v is known.

    A small stochastic step must change that variance as the ODE does, up to terms of second order.
    """
    sigma, dt = 0.6, -1e-4
    variance = (1 - sigma) ** 2 + sigma**2
    slope = (sigma - (1 - sigma)) / variance  # E[noise - data | x] = slope * x
    a, b, std = sde.coefficients(kind, sigma, sigma + dt, sigma_second=0.9, eta=0.7)
    after = (a + b * slope) ** 2 * variance + std**2
    expected = (1 - sigma - dt) ** 2 + (sigma + dt) ** 2
    assert after == pytest.approx(expected, abs=5e-7)
    assert abs(variance - expected) > 2e-5  # the step does change it


def test_cps_keeps_the_marginal_exactly_where_data_and_noise_are_known():
    """x = (1 - t) d + t n with v = n - d: the next sample must have weight 1 - t' on d and variance t'^2 of noise."""
    sigma, sigma_next, d, n = 0.7, 0.4, 2.0, -1.0
    a, b, std = sde.coefficients("cps", sigma, sigma_next, sigma_second=0.9, eta=0.5)
    mean = a * ((1 - sigma) * d + sigma * n) + b * (n - d)
    kept = mean - (1 - sigma_next) * d
    assert (kept / n) ** 2 + std**2 == pytest.approx(sigma_next**2)


@pytest.mark.parametrize("kind", sde.KINDS)
def test_replay_gives_the_same_bits_and_a_gradient(kind):
    x, v, noise = _tensors()
    options = {"sigma_second": 0.9, "eta": 0.7, "kind": kind}
    sampled = sde.step(v, x, 0.7, 0.4, noise=noise, **options)
    replayed_v = v.clone().requires_grad_()
    replayed = sde.step(replayed_v, x, 0.7, 0.4, sample=sampled.sample, **options)
    assert torch.equal(sampled.log_prob, replayed.log_prob.detach())
    replayed.log_prob.sum().backward()
    _, b, std = sde.coefficients(kind, 0.7, 0.4, sigma_second=0.9, eta=0.7)
    scale = 2.0 if kind == "cps" else 1.0 / std**2
    expected = scale * (sampled.sample - sampled.mean) * b / x[0].numel()
    assert torch.allclose(replayed_v.grad, expected, atol=1e-5)


def test_the_first_step_uses_the_second_noise_level():
    _, _, first = sde.coefficients("flow_sde", 1.0, 0.9, sigma_second=0.9, eta=0.7)
    assert first == pytest.approx(0.7 * math.sqrt(1.0 / 0.1) * math.sqrt(0.1))


def test_bad_arguments_are_named():
    x, v, noise = _tensors()
    good = {"sigma_second": 0.9, "eta": 0.7}
    with pytest.raises(TPIPSError, match="flow_sde, dance, cps"):
        sde.step(v, x, 0.7, 0.4, noise=noise, kind="ode", **good)
    with pytest.raises(TPIPSError, match="0.4 to 0.7"):
        sde.step(v, x, 0.4, 0.7, noise=noise, **good)
    with pytest.raises(TPIPSError, match="either noise"):
        sde.step(v, x, 0.7, 0.4, **good)
    with pytest.raises(TPIPSError, match="either noise"):
        sde.step(v, x, 0.7, 0.4, noise=noise, sample=x, **good)
    with pytest.raises(TPIPSError, match="bfloat16"):
        sde.step(v, x.bfloat16(), 0.7, 0.4, noise=noise, **good)
    with pytest.raises(TPIPSError, match="deterministic"):
        sde.step(v, x, 0.7, 0.4, sample=x, sigma_second=0.9, eta=0.0)
    with pytest.raises(TPIPSError, match="between 0 and 1"):
        sde.coefficients("cps", 0.7, 0.4, sigma_second=0.9, eta=1.5)
    with pytest.raises(TPIPSError, match="eta"):
        sde.coefficients("flow_sde", 0.7, 0.4, sigma_second=0.9, eta=float("nan"))


def test_the_last_step_of_cps_is_deterministic():
    x, v, noise = _tensors()
    result = sde.step(v, x, 0.15, 0.0, sigma_second=0.9, eta=0.7, kind="cps", noise=noise)
    assert result.log_prob is None
    assert torch.allclose(result.sample, x - 0.15 * v, atol=1e-6)
