"""DiffusionNFT's loss against its formula in float64, what it pulls and pushes, and the old policy that follows."""

from __future__ import annotations

import pytest
import torch

from rl_recipes.algorithms.nft import (
    draw_times,
    follow,
    nft_loss,
    noised,
    old_policy_decay,
    weights_from_advantages,
)
from tpips_reward.errors import TPIPSError

SIGMAS = (1.0, 0.8, 0.5, 0.2, 0.0)


def _batch(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    clean, noise, v, old, reference = torch.randn(5, 3, 4, 2, generator=generator, dtype=dtype)
    times = torch.tensor([0.9, 0.5, 0.1], dtype=dtype)
    return clean, noised(clean, noise, times), v, old, reference, times, torch.tensor([1.0, 0.5, 0.2], dtype=dtype)


def _reference(clean, x, v, old, reference, times, weights, beta, kl_weight):
    """The formula as the paper's authors write it, one sample after another."""
    total = 0.0
    for i in range(len(x)):
        errors = []
        for velocity in (beta * v[i] + (1 - beta) * old[i], (1 + beta) * old[i] - beta * v[i]):
            difference = x[i] - times[i] * velocity - clean[i]
            errors.append((difference**2 / max(difference.abs().mean().item(), 1e-5)).mean())
        policy = weights[i] * errors[0] / beta + (1 - weights[i]) * errors[1] / beta
        total = total + policy + kl_weight * ((v[i] - reference[i]) ** 2).mean()
    return total / len(x)


def test_loss_by_hand():
    # One number: x0 = 0, t = 0.5, x = 1; v = 3 and v_old = 1 with beta = 0.5 give v+ = 2 and v- = 0.
    # x - t v+ = 0: error 0. x - t v- = 1: error 1 / 1. With w = 0.25: 0.75 / 0.5 = 1.5; distance to v_ref = 2: 1.
    one = torch.ones(1, 1)
    result = nft_loss(
        3 * one, one, one, 0 * one, torch.tensor([0.5]), torch.tensor([0.25]),
        beta=0.5, reference_velocity=2 * one, kl_weight=0.1,
    )  # fmt: skip
    assert (result.positive.item(), result.negative.item(), result.distance.item()) == (0.0, 1.0, 1.0)
    assert result.loss.item() == pytest.approx(1.6)


@pytest.mark.parametrize("beta, kl_weight", [(1.0, 0.0), (0.3, 0.02)])
def test_loss_and_gradient_against_the_formula(beta, kl_weight):
    clean, x, v, old, reference, times, weights = _batch()
    ours_v, plain_v = v.clone().requires_grad_(), v.clone().requires_grad_()
    ours = nft_loss(
        ours_v, old, x, clean, times, weights, beta=beta, reference_velocity=reference, kl_weight=kl_weight
    ).loss
    plain = _reference(clean, x, plain_v, old, reference, times, weights, beta, kl_weight)
    assert ours.item() == pytest.approx(plain.item(), rel=1e-12)
    ours.backward()
    plain.backward()
    assert torch.allclose(ours_v.grad, plain_v.grad, atol=1e-12)
    single = nft_loss(
        *(t.float() for t in (v, old, x, clean, times, weights)),
        beta=beta,
        reference_velocity=reference,
        kl_weight=kl_weight,
    ).loss
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(plain.item(), rel=1e-5)


def test_on_policy_good_edits_pull_bad_ones_push_and_the_rest_does_nothing():
    clean, x, v, _, _, times, _ = _batch(dtype=torch.float32)
    # Toward the edit means toward the velocity (x - x0) / t that leads to it.
    toward = (x - clean) / times[:, None, None] - v

    def gradient(weight):
        velocity = v.clone().requires_grad_()
        nft_loss(velocity, v, x, clean, times, torch.full((3,), weight)).loss.backward()
        return velocity.grad

    assert gradient(0.5).abs().max() == 0.0
    for i in range(3):
        assert (gradient(1.0)[i] * toward[i]).sum() < 0  # a descent step moves along `toward`
    assert torch.allclose(gradient(0.0), -gradient(1.0))
    assert torch.allclose(gradient(0.75), 0.5 * gradient(1.0), atol=1e-7)


def test_the_gradient_reaches_the_policy_alone():
    clean, x, v, old, reference, times, weights = (t.requires_grad_() for t in _batch(dtype=torch.float32))
    nft_loss(
        v, old, x.detach(), clean.detach(), times.detach(), weights, reference_velocity=reference, kl_weight=1.0
    ).loss.backward()
    assert v.grad is not None
    assert old.grad is None and reference.grad is None and weights.grad is None


def test_a_perfect_prediction_is_no_division_by_zero():
    clean, x, _, _, _, times, weights = _batch(dtype=torch.float32)
    exact = ((x - clean) / times[:, None, None]).requires_grad_()
    result = nft_loss(exact, exact.detach(), x, clean, times, weights)
    result.loss.backward()
    assert result.loss.item() < 1e-6
    assert torch.isfinite(exact.grad).all()


def test_weights_by_hand():
    advantages = torch.tensor([-9.0, -5.0, -2.5, 0.0, 1.0, 5.0, 7.0], requires_grad=True)
    weights = weights_from_advantages(advantages)
    assert weights.tolist() == pytest.approx([0.0, 0.0, 0.25, 0.5, 0.6, 1.0, 1.0])
    assert not weights.requires_grad
    assert weights_from_advantages(torch.tensor([1.0]), clip=1.0).tolist() == [1.0]


def test_noised_is_the_straight_line_from_edit_to_noise():
    clean, noise = torch.full((2, 3, 2), 4.0), torch.full((2, 3, 2), -2.0)
    assert noised(clean, noise, torch.tensor([0.0, 1.0]))[:, 0, 0].tolist() == [4.0, -2.0]
    assert noised(clean, noise, torch.tensor([0.5, 0.25]))[:, 0, 0].tolist() == [1.0, 2.5]


def _generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_times_of_the_schedule_are_a_shuffle_of_its_noise_levels():
    times = draw_times(_generators(*range(40)), 4, sigmas=SIGMAS)
    assert times.shape == (40, 4) and times.dtype == torch.float32
    assert torch.equal(times.sort(dim=1, descending=True).values, torch.tensor(SIGMAS[:4]).expand(40, 4))
    assert {row[0].item() for row in times} == set(torch.tensor(SIGMAS[:4]).tolist())
    assert all(len(set(row.tolist())) == 2 for row in draw_times(_generators(*range(9)), 2, sigmas=SIGMAS))


def test_uniform_times_take_one_of_each_part():
    times = draw_times(_generators(*range(50)), 5, kind="uniform")
    assert ((times > 0) & (times <= 1)).all()
    parts = (times * 5).ceil().sort(dim=1).values
    assert torch.equal(parts, torch.arange(1.0, 6.0).expand(50, 5))
    assert times[:, 0].std() > 0.2  # in random order


def test_logit_normal_times_favour_the_middle():
    times = draw_times(_generators(*range(20)), 100, kind="logit_normal").flatten()
    assert ((times > 0) & (times < 1)).all()
    # P(|z| < 1) = 0.683, and sigmoid(1) = 0.7311; 2000 draws have a standard error of 0.0104.
    assert ((times > 0.2689) & (times < 0.7311)).float().mean().item() == pytest.approx(0.683, abs=0.045)


@pytest.mark.parametrize("kind", ["schedule", "uniform", "logit_normal"])
def test_times_depend_on_the_sample_alone(kind):
    both = draw_times(_generators(1, 2), 3, kind=kind, sigmas=SIGMAS)
    assert torch.equal(both[1:], draw_times(_generators(2), 3, kind=kind, sigmas=SIGMAS))


def test_decay_of_the_old_policy():
    assert [old_policy_decay(step) for step in (0, 1, 100, 500, 9000)] == [0.0, 0.001, 0.1, 0.5, 0.5]
    assert old_policy_decay(10, rate=0.1, most=0.9) == 0.9


def test_the_old_policy_follows():
    old, current = [torch.tensor([1.0, 2.0]), torch.tensor([[0.1]])], [torch.tensor([3.0, 6.0]), torch.tensor([[0.7]])]
    follow(old, current, 0.25)
    assert old[0].tolist() == [2.5, 5.0]
    assert old[1].item() == pytest.approx(0.25 * 0.1 + 0.75 * 0.7)
    follow(old, current, 0.0)
    assert all(torch.equal(o, c) and o is not c for o, c in zip(old, current, strict=True))
    parameter = torch.nn.Parameter(torch.ones(2))
    follow([parameter], [torch.nn.Parameter(torch.zeros(2))], 0.5)
    assert parameter.tolist() == [0.5, 0.5]


def test_bad_arguments_are_named():
    clean, x, v, old, _, times, weights = _batch(dtype=torch.float32)
    with pytest.raises(TPIPSError, match="one shape"):
        nft_loss(v[:2], old, x, clean, times, weights)
    with pytest.raises(TPIPSError, match="bfloat16"):
        nft_loss(v, old, x.bfloat16(), clean, times, weights)
    with pytest.raises(TPIPSError, match="one time and one weight"):
        nft_loss(v, old, x, clean, times[:2], weights)
    with pytest.raises(TPIPSError, match="Times must"):
        nft_loss(v, old, x, clean, times * 0, weights)
    with pytest.raises(TPIPSError, match="Weights must"):
        nft_loss(v, old, x, clean, times, weights + 0.5)
    with pytest.raises(TPIPSError, match="Weights must"):
        nft_loss(v, old, x, clean, times, weights * float("nan"))
    with pytest.raises(TPIPSError, match="beta"):
        nft_loss(v, old, x, clean, times, weights, beta=0.0)
    with pytest.raises(TPIPSError, match="no reference_velocity"):
        nft_loss(v, old, x, clean, times, weights, kl_weight=0.1)
    with pytest.raises(TPIPSError, match="Advantages"):
        weights_from_advantages(torch.tensor([float("nan")]))
    with pytest.raises(TPIPSError, match="clip"):
        weights_from_advantages(torch.zeros(1), clip=0.0)
    with pytest.raises(TPIPSError, match="schedule, uniform, logit_normal"):
        draw_times(_generators(0), 1, kind="cosine")
    with pytest.raises(TPIPSError, match="only 4 noise levels"):
        draw_times(_generators(0), 5, sigmas=SIGMAS)
    with pytest.raises(TPIPSError, match="at least 1"):
        draw_times(_generators(0), 0, kind="uniform")
    with pytest.raises(TPIPSError, match="updates"):
        old_policy_decay(-1)
    with pytest.raises(TPIPSError, match="limit below 1"):
        old_policy_decay(1, most=1.0)
    with pytest.raises(TPIPSError, match="same adapter"):
        follow([torch.zeros(2)], [torch.zeros(3)], 0.5)
    with pytest.raises(TPIPSError, match="same adapter"):
        follow([torch.zeros(2)], [], 0.5)
