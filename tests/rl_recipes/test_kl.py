"""Distances to the reference policy against torch.distributions and against each other."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from rl_recipes.algorithms import sde
from rl_recipes.algorithms.kl import gaussian_kl, velocity_distance
from tpips_reward.errors import TPIPSError


def test_kl_against_torch_distributions():
    generator = torch.Generator().manual_seed(0)
    mean, reference = torch.randn(2, 3, 4, 5, generator=generator)
    std = 0.37
    expected = kl_divergence(Normal(mean.double(), std), Normal(reference.double(), std)).flatten(1).mean(1)
    assert torch.allclose(gaussian_kl(mean, reference, std).double(), expected, atol=1e-5)


def test_kl_has_a_gradient_for_the_policy_only():
    mean = torch.ones(1, 4, requires_grad=True)
    reference = torch.zeros(1, 4, requires_grad=True)
    gaussian_kl(mean, reference, 0.5).sum().backward()
    assert torch.allclose(mean.grad, torch.full((1, 4), 1.0 / 0.25 / 4))
    assert reference.grad is None


def test_velocity_distance_by_hand():
    velocity = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 0.0], [0.0, 1.0]]], requires_grad=True)
    reference = torch.tensor([[[1.0, 0.0], [3.0, 3.0]], [[0.0, 0.0], [0.0, 1.0]]], requires_grad=True)
    distance = velocity_distance(velocity, reference)
    assert distance.tolist() == [5.0 / 4.0, 0.0]
    distance.sum().backward()
    assert velocity.grad[0].tolist() == [[0.0, 1.0], [0.0, 0.5]]
    assert reference.grad is None


@pytest.mark.parametrize("kind", sde.KINDS)
def test_the_kl_of_a_step_is_the_velocity_distance_times_its_factor(kind):
    generator = torch.Generator().manual_seed(1)
    x, v, v_ref, noise = torch.randn(4, 2, 6, 3, generator=generator, dtype=torch.float64)
    options = {"sigma_second": 0.9, "eta": 0.6, "kind": kind}
    step = sde.step(v, x, 0.7, 0.4, noise=noise, **options)
    reference = sde.step(v_ref, x, 0.7, 0.4, noise=noise, **options)
    _, b, std = sde.coefficients(kind, 0.7, 0.4, sigma_second=0.9, eta=0.6)
    expected = velocity_distance(v, v_ref) * b**2 / (2 * std**2)
    assert torch.allclose(gaussian_kl(step.mean, reference.mean, step.std), expected, rtol=1e-9)


def test_bad_arguments_are_refused():
    with pytest.raises(TPIPSError, match="positive std"):
        gaussian_kl(torch.zeros(1, 2), torch.zeros(1, 2), 0.0)
    with pytest.raises(TPIPSError, match=r"\(1, 2\) and \(2, 2\)"):
        gaussian_kl(torch.zeros(1, 2), torch.zeros(2, 2), 0.5)
    with pytest.raises(TPIPSError, match=r"\(1, 2\) and \(2, 2\)"):
        velocity_distance(torch.zeros(1, 2), torch.zeros(2, 2))
