"""GRPO-Guard's ratio against the plain one of torch.distributions, and what it is for."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from rl_recipes.algorithms import sde
from rl_recipes.algorithms.guard import guard_log_ratio, guard_policy_loss
from tpips_reward.errors import TPIPSError


def _step(seed=0, std=0.3, shift=0.05, shape=(4, 6, 5)):
    generator = torch.Generator().manual_seed(seed)
    old_mean, noise, move = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    return old_mean + shift * move, old_mean, old_mean + std * noise, noise, shift * move


def test_ratio_by_hand():
    # eps = (2 - 1) / 0.5 = 2 and (0 - 1) / 0.5 = -2; dmu = 0.1 and 0.3; mean of 0.2 and -0.6.
    mean, old_mean = torch.tensor([[1.1, 1.3]]), torch.tensor([[1.0, 1.0]])
    sample = torch.tensor([[2.0, 0.0]])
    assert guard_log_ratio(mean, old_mean, sample, std=0.5).item() == pytest.approx(-0.2, abs=1e-6)


def test_ratio_is_the_plain_one_without_its_bias_and_times_std():
    std = 0.3
    mean, old_mean, sample, noise, move = _step(std=std)
    plain = (Normal(mean, std).log_prob(sample) - Normal(old_mean, std).log_prob(sample)).flatten(1).mean(1)
    bias = move.square().flatten(1).mean(1) / (2 * std**2)
    ours = guard_log_ratio(mean, old_mean, sample, std=std)
    assert torch.allclose(ours, (plain + bias) * std, atol=1e-12)
    assert torch.allclose(ours, (noise * move).flatten(1).mean(1), atol=1e-12)
    assert not torch.allclose(ours, plain * std, atol=1e-4)


def test_it_is_centred_and_of_one_scale_for_all_stds():
    """What the plain log-ratio is not: its mean is below zero, and its spread goes as 1 / std."""
    for std in (0.05, 0.8):
        mean, old_mean, sample, _, _ = _step(std=std, shift=0.1, shape=(4000, 16))
        ours = guard_log_ratio(mean, old_mean, sample, std=std)
        plain = (Normal(mean, std).log_prob(sample) - Normal(old_mean, std).log_prob(sample)).mean(1)
        # shift / sqrt(16 elements) = 0.025, so the mean of 4000 has a standard error of 4e-4.
        assert abs(ours.mean()) < 2e-3
        assert ours.std().item() == pytest.approx(0.025, rel=0.1)
        assert plain.mean().item() == pytest.approx(-(0.1**2) / (2 * std**2), rel=0.5)
        assert plain.std().item() > 0.9 * 0.025 / std


@pytest.mark.parametrize("kind", sde.KINDS)
def test_first_ratio_is_exactly_one_in_float32(kind):
    generator = torch.Generator().manual_seed(2)
    x, v, noise = torch.randn(3, 3, 8, 4, generator=generator)
    options = {"sigma_second": 0.9, "eta": 0.7, "kind": kind}
    drawn = sde.step(v, x, 0.7, 0.4, noise=noise, **options)
    again = sde.step(v.clone().requires_grad_(), x, 0.7, 0.4, sample=drawn.sample, **options)
    result = guard_policy_loss(
        again.mean, drawn.mean, drawn.sample, torch.tensor([1.0, -2.0, 0.5]), std=again.std, dt=-0.3, clip_range=1e-5
    )
    assert result.ratio.tolist() == [1.0, 1.0, 1.0]
    assert result.clip_fraction == 0.0


def test_loss_against_the_formula_and_its_gradient():
    std, dt = 0.3, -0.05
    mean, old_mean, sample, noise, move = _step(std=std)
    advantages = torch.tensor([1.5, -0.5, 2.0, -1.0], dtype=torch.float64)
    mean = mean.requires_grad_()
    result = guard_policy_loss(mean, old_mean, sample, advantages, std=std, dt=dt, clip_range=10.0)
    ratio = (noise * move).flatten(1).mean(1).exp()
    assert torch.allclose(result.ratio, ratio, atol=1e-12)
    assert result.loss.item() == pytest.approx(-(advantages * ratio).mean().item() / 0.05, rel=1e-9)
    result.loss.backward()
    expected = -(advantages * ratio)[:, None, None] * noise / (30 * 4 * 0.05)
    assert torch.allclose(mean.grad, expected, atol=1e-12)


def test_a_clipped_ratio_stops_the_gradient():
    mean = torch.tensor([[2.0]], requires_grad=True)
    sample = torch.tensor([[1.0]])
    old_mean = torch.zeros(1, 1)
    result = guard_policy_loss(mean, old_mean, sample, torch.ones(1), std=1.0, dt=-0.5, clip_range=0.2)
    assert result.ratio.item() == pytest.approx(math.exp(2.0), rel=1e-6)
    assert result.loss.item() == pytest.approx(-1.2 / 0.5, rel=1e-6)
    assert result.clip_fraction == 1.0
    result.loss.backward()
    assert mean.grad.item() == 0.0


def test_nothing_but_the_new_mean_gets_a_gradient():
    mean, old_mean, sample = (torch.ones(2, 3, requires_grad=True) for _ in range(3))
    guard_policy_loss(mean, old_mean, sample, torch.ones(2), std=0.5, dt=-0.1, clip_range=0.1).loss.backward()
    assert mean.grad is not None and old_mean.grad is None and sample.grad is None


def test_bad_arguments_are_named():
    good = torch.zeros(2, 3)
    with pytest.raises(TPIPSError, match="positive std, but it is 0.0"):
        guard_log_ratio(good, good, good, std=0.0)
    with pytest.raises(TPIPSError, match=r"one shape.*\(2, 4\)"):
        guard_log_ratio(good, torch.zeros(2, 4), good, std=0.1)
    for dt in (0.1, 0.0, float("nan")):
        with pytest.raises(TPIPSError, match="dt must be negative"):
            guard_policy_loss(good, good, good, torch.zeros(2), std=0.1, dt=dt, clip_range=0.1)
    with pytest.raises(TPIPSError, match="clip_range"):
        guard_policy_loss(good, good, good, torch.zeros(2), std=0.1, dt=-0.1, clip_range=0.0)
