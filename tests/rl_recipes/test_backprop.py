"""Direct backpropagation: which steps carry the gradient, and the loss, on a sampler whose gradient is known."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from rl_recipes.algorithms import sde
from rl_recipes.algorithms.backprop import GradientPlan, gradient_plan, predict_clean, reward_loss
from tpips_reward.errors import TPIPSError


def test_draft_takes_the_last_steps():
    assert gradient_plan(1, kind="draft", num_steps=8, last=1) == GradientPlan((7,), jump=False)
    assert gradient_plan(9, kind="draft", num_steps=8, last=3) == GradientPlan((5, 6, 7), jump=False)
    assert gradient_plan(9, kind="draft", num_steps=4, last=4) == GradientPlan((0, 1, 2, 3), jump=False)


def test_refl_takes_one_of_the_last_steps_and_jumps():
    plans = [gradient_plan(i, kind="refl", num_steps=10, last=4, seed=5) for i in range(1, 401)]
    assert all(plan.jump and len(plan.steps) == 1 for plan in plans)
    # 100 each of 400 draws, with a standard deviation of 8.7.
    counts = Counter(plan.steps[0] for plan in plans)
    assert set(counts) == {6, 7, 8, 9}
    assert all(60 < count < 140 for count in counts.values())


def test_alignprop_takes_a_random_number_of_the_last_steps():
    plans = [gradient_plan(i, kind="alignprop", num_steps=6, last=3) for i in range(1, 301)]
    assert {plan.steps for plan in plans} == {(5,), (4, 5), (3, 4, 5)}
    assert not any(plan.jump for plan in plans)


@pytest.mark.parametrize("kind", ["alignprop", "refl"])
def test_what_is_drawn_is_a_function_of_seed_and_iteration(kind):
    def draw(iterations, seed):
        return [gradient_plan(i, kind=kind, num_steps=20, last=20, seed=seed) for i in iterations]

    assert draw(range(1, 41), 1) == draw(range(1, 41), 1)
    assert draw(range(1, 41), 1)[20:] == draw(range(21, 41), 1)
    assert draw(range(1, 41), 1) != draw(range(1, 41), 2)


def test_predict_clean_inverts_the_straight_line():
    clean, noise = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 4.0]])
    for sigma in (1.0, 0.25):
        x = (1 - sigma) * clean + sigma * noise
        assert torch.allclose(predict_clean(x, noise - clean, sigma), clean, atol=1e-6)


def test_the_last_euler_step_and_a_jump_from_it_are_the_same():
    x, v = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).unbind(0)
    step = sde.step(v, x, 0.2, 0.0, sigma_second=0.9, eta=0.0)
    assert torch.allclose(step.mean, predict_clean(x, v, 0.2), atol=1e-7)


@pytest.mark.parametrize("last", [1, 2, 4])
def test_gradient_of_a_known_sampler_against_the_chain_rule(last):
    """v = w x at every step: x_final = x prod(1 + w dt). Only the factors of the plan's steps are differentiated."""
    sigmas, w = [1.0, 0.7, 0.5, 0.2, 0.0], torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    plan = gradient_plan(1, kind="draft", num_steps=4, last=last)
    x = torch.tensor([[2.0], [4.0]], dtype=torch.float64)
    for k in range(4):
        velocity = (w if k in plan.steps else w.detach()) * x
        x = sde.step(velocity, x, sigmas[k], sigmas[k + 1], sigma_second=0.7, eta=0.0).mean
    reward_loss(x.sum(1)).backward()
    factors = [1 + 0.3 * (sigmas[k + 1] - sigmas[k]) for k in range(4)]
    final = 3.0 * torch.tensor(factors, dtype=torch.float64).prod().item()
    expected = -sum(final / factors[k] * (sigmas[k + 1] - sigmas[k]) for k in plan.steps)
    assert w.grad.item() == pytest.approx(expected, rel=1e-12)


def test_loss_by_hand_and_its_gradient():
    scores = torch.tensor([0.5, 0.7, 0.3], requires_grad=True)
    distance = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    loss = reward_loss(scores, distance=distance, kl_weight=0.1)
    assert loss.item() == pytest.approx(-0.5 + 0.1 * 3.0)
    loss.backward()
    assert torch.allclose(scores.grad, torch.full((3,), -1 / 3))
    assert torch.allclose(distance.grad, torch.full((3,), 0.1 / 3))


def test_without_a_weight_the_distance_is_left_alone():
    scores = torch.tensor([0.5], requires_grad=True)
    assert reward_loss(scores, distance=torch.tensor([7.0])).item() == -0.5


def test_bad_arguments_are_named():
    with pytest.raises(TPIPSError, match="draft, alignprop, refl"):
        gradient_plan(1, kind="full", num_steps=4, last=1)
    for last in (0, 5):
        with pytest.raises(TPIPSError, match=f"1 to 4 of 4 steps, but {last}"):
            gradient_plan(1, kind="draft", num_steps=4, last=last)
    with pytest.raises(TPIPSError, match="count from 1"):
        gradient_plan(0, kind="draft", num_steps=4, last=1)
    with pytest.raises(TPIPSError, match="noise level"):
        predict_clean(torch.zeros(1), torch.zeros(1), 0.0)
    scores = torch.zeros(2, requires_grad=True)
    with pytest.raises(TPIPSError, match="carry no gradient"):
        reward_loss(torch.zeros(2))
    with pytest.raises(TPIPSError, match="1 of 2 scores are NaN"):
        reward_loss(torch.tensor([0.0, float("nan")], requires_grad=True))
    with pytest.raises(TPIPSError, match="one length"):
        reward_loss(scores, distance=torch.zeros(3), kl_weight=0.1)
    with pytest.raises(TPIPSError, match="no distance"):
        reward_loss(scores, kl_weight=0.1)
    with pytest.raises(TPIPSError, match="kl_weight must"):
        reward_loss(scores, kl_weight=-1.0)
