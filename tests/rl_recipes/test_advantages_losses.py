"""Advantages and losses against plain formulas, and the cases that break trainers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl_recipes.algorithms.advantages import group_advantages
from rl_recipes.algorithms.losses import clipped_policy_loss
from tpips_reward.errors import TPIPSError

REWARDS = torch.tensor([0.1, 0.5, 0.9, 0.2, 0.2, 0.8])
GROUPS = torch.tensor([7, 7, 7, 2, 2, 2])


@pytest.mark.parametrize("std_from", ["group", "batch", "none"])
def test_advantages_against_numpy(std_from):
    rewards, groups = REWARDS.double().numpy(), GROUPS.numpy()
    expected = np.empty(6)
    for group in (7, 2):
        own = groups == group
        centred = rewards[own] - rewards[own].mean()
        std = {"group": rewards[own].std(), "batch": rewards.std(), "none": None}[std_from]
        expected[own] = centred if std is None else centred / (std + 1e-4)
    ours = group_advantages(REWARDS, GROUPS, std_from=std_from)
    assert ours.dtype == torch.float32
    assert np.allclose(ours.numpy(), expected, atol=1e-6)


def test_interleaved_groups_are_told_apart():
    order = torch.tensor([3, 0, 4, 1, 5, 2])
    assert torch.equal(group_advantages(REWARDS[order], GROUPS[order]), group_advantages(REWARDS, GROUPS)[order])


@pytest.mark.parametrize("std_from", ["group", "batch", "none"])
def test_equal_rewards_give_zero_and_nothing_explodes(std_from):
    rewards = torch.tensor([0.3, 0.3 + 1e-7, 0.3 - 1e-7, 0.1, 0.9])
    advantages = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1]), std_from=std_from)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[3] < 0 < advantages[4]


def test_a_group_of_one_gets_zero():
    assert group_advantages(torch.tensor([0.7]), torch.tensor([0])).tolist() == [0.0]


def test_outliers_are_clipped():
    rewards = torch.zeros(100)
    rewards[0] = 1.0
    advantages = group_advantages(rewards, torch.zeros(100, dtype=torch.long))
    assert advantages[0] == 5.0
    assert group_advantages(rewards, torch.zeros(100, dtype=torch.long), clip=20.0)[0] > 9.0


def test_large_group_ids_do_not_merge():
    groups = torch.tensor([2**53, 2**53, 2**53 + 1, 2**53 + 1])
    advantages = group_advantages(torch.tensor([0.0, 1.0, 10.0, 11.0]), groups)
    assert torch.allclose(advantages, torch.tensor([-1.0, 1.0, -1.0, 1.0]), atol=1e-3)


def test_bad_rewards_are_refused():
    with pytest.raises(TPIPSError, match="1 of 2 rewards"):
        group_advantages(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(TPIPSError, match="float32"):
        group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0]))
    with pytest.raises(TPIPSError, match="one length"):
        group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([0]))
    with pytest.raises(TPIPSError, match="group, batch, none"):
        group_advantages(REWARDS, GROUPS, std_from="world")


def test_on_policy_ratio_is_exactly_one_and_the_gradient_is_plain():
    old = torch.tensor([-1.234567, -0.7654321])
    log_prob = old.clone().requires_grad_()
    advantages = torch.tensor([2.0, -1.0])
    result = clipped_policy_loss(log_prob, old, advantages, clip_range=1e-4)
    assert result.ratio.tolist() == [1.0, 1.0]
    assert result.clip_fraction == 0.0
    result.loss.backward()
    assert torch.allclose(log_prob.grad, -advantages / 2)


@pytest.mark.parametrize(
    "shift, advantage, flows",
    [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False), (0.05, 1.0, True)],
)
def test_clipping_stops_the_gradient_where_ppo_does(shift, advantage, flows):
    log_prob = torch.tensor([shift], requires_grad=True)
    result = clipped_policy_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), clip_range=0.2)
    ratio = math.exp(shift)
    expected = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    result.loss.backward()
    assert bool(log_prob.grad.abs() > 0) == flows
    assert result.clip_fraction == float(abs(ratio - 1) > 0.2)


def test_loss_carries_no_gradient_into_old_values():
    old = torch.zeros(2, requires_grad=True)
    advantages = torch.ones(2, requires_grad=True)
    log_prob = torch.zeros(2, requires_grad=True)
    clipped_policy_loss(log_prob, old, advantages, clip_range=0.1).loss.backward()
    assert old.grad is None and advantages.grad is None and log_prob.grad is not None


def test_bad_loss_arguments_are_refused():
    with pytest.raises(TPIPSError, match="one shape"):
        clipped_policy_loss(torch.zeros(2), torch.zeros(3), torch.zeros(2), clip_range=0.1)
    with pytest.raises(TPIPSError, match="clip_range"):
        clipped_policy_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), clip_range=0.0)
