"""Per-prompt running statistics and DDPO's advantages against numpy, and their exact resume."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from rl_recipes.algorithms.ddpo import PromptStatistics, prompt_advantages
from tpips_reward.errors import TPIPSError


def _visit(statistics, keys, rewards, **options):
    rewards = torch.tensor(rewards)
    statistics.add(keys, rewards)
    return prompt_advantages(rewards, keys, statistics, **options)


def test_advantages_by_hand():
    statistics = PromptStatistics(buffer_size=4)
    statistics.add(["a", "a"], torch.tensor([0.0, 2.0]))
    # a: 0, 2, 1, 5 has mean 2 and variance (4 + 0 + 1 + 9) / 4; b has one reward and takes the batch's mean 3.
    advantages = _visit(statistics, ["a", "b", "a"], [1.0, 3.0, 5.0], min_count=2, eps=0.0)
    std = np.sqrt(14 / 4)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([-1 / std, 0.0, 3 / std], abs=1e-6)


@pytest.mark.parametrize("std_from", ["prompt", "batch"])
def test_advantages_against_numpy_over_many_iterations(std_from):
    rng = np.random.default_rng(0)
    statistics = PromptStatistics(buffer_size=6)
    kept: dict[str, list[float]] = {}
    fell_back = used_own = 0
    for _ in range(12):
        keys = [f"p{i}" for i in rng.integers(0, 7, 5)]
        rewards = rng.normal(size=5)
        for key, reward in zip(keys, rewards, strict=True):
            kept[key] = [*kept.get(key, []), float(reward)][-6:]
        expected = []
        for key, reward in zip(keys, rewards, strict=True):
            enough = len(kept[key]) >= 4
            used_own, fell_back = used_own + enough, fell_back + (not enough)
            own = np.array(kept[key]) if enough else rewards
            std = own.std() if std_from == "prompt" else rewards.std()
            expected.append(np.clip((reward - own.mean()) / (std + 1e-4), -5, 5))
        ours = _visit(statistics, keys, rewards.tolist(), min_count=4, std_from=std_from)
        # float32 rewards, so that the tolerance is theirs.
        assert np.allclose(ours.numpy(), expected, atol=2e-5)
    assert fell_back and used_own


def test_the_buffer_is_bounded_and_keeps_the_latest():
    statistics = PromptStatistics(buffer_size=3)
    statistics.add(["a"] * 5, torch.arange(5.0))
    assert statistics.rewards("a") == [2.0, 3.0, 4.0]
    assert statistics.rewards("never seen") == []


def test_the_prompt_not_seen_for_longest_is_forgotten():
    statistics = PromptStatistics(buffer_size=2, max_prompts=2)
    statistics.add(["a", "b"], torch.tensor([1.0, 2.0]))
    statistics.add(["a", "c"], torch.tensor([3.0, 4.0]))
    assert len(statistics) == 2
    assert statistics.rewards("a") == [1.0, 3.0]
    assert statistics.rewards("b") == []


def test_equal_rewards_give_exactly_zero():
    statistics = PromptStatistics()
    equal = [0.3, 0.3 + 5e-8, 0.3 - 5e-8]
    for std_from in ("prompt", "batch"):
        assert _visit(statistics, ["a"] * 3, equal, min_count=2, std_from=std_from).tolist() == [0.0] * 3
    # The same where the batch, and not the buffer, is what they are compared with.
    assert _visit(PromptStatistics(), ["a", "b", "c"], equal).tolist() == [0.0] * 3


def test_unlike_a_group_a_prompt_that_got_better_is_rewarded():
    statistics = PromptStatistics()
    statistics.add(["a"] * 16, torch.linspace(0.0, 0.2, 16))
    assert (_visit(statistics, ["a", "a"], [0.5, 0.5]) > 1.0).all()


def test_outliers_are_clipped():
    statistics = PromptStatistics(buffer_size=200)
    statistics.add(["a"] * 199, torch.zeros(199))
    assert _visit(statistics, ["a"], [1.0]).tolist() == [5.0]


def test_resume_goes_on_with_the_same_bits_through_a_file():
    rng = np.random.default_rng(1)
    first = PromptStatistics(buffer_size=5, max_prompts=6)
    for _ in range(10):
        first.add([f"p{i}" for i in rng.integers(0, 9, 4)], torch.tensor(rng.normal(size=4)))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = PromptStatistics(buffer_size=5, max_prompts=6)
    second.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(5):
        keys, rewards = [f"p{i}" for i in rng.integers(0, 9, 4)], rng.normal(size=4).tolist()
        assert torch.equal(_visit(first, keys, rewards, min_count=3), _visit(second, keys, rewards, min_count=3))
        # The order of forgetting is part of the state.
        assert first.state_dict() == second.state_dict()


def test_the_state_is_a_copy():
    statistics = PromptStatistics()
    statistics.add(["a"], torch.tensor([1.0]))
    state = statistics.state_dict()
    statistics.add(["a"], torch.tensor([2.0]))
    assert state == {"rewards": [["a", [1.0]]]}


@pytest.mark.parametrize(
    "state",
    [{}, {"rewards": 3}, {"rewards": [["a", ["x"]]]}, {"rewards": [["a", [float("nan")]]]}, {"rewards": [["a", []]]}],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(state):
    statistics = PromptStatistics()
    statistics.add(["a"], torch.tensor([1.0]))
    with pytest.raises(TPIPSError, match="statistics"):
        statistics.load_state_dict(state)
    assert statistics.rewards("a") == [1.0]


def test_bad_arguments_are_named():
    statistics = PromptStatistics(buffer_size=8)
    with pytest.raises(TPIPSError, match="1 of 2 rewards are NaN"):
        statistics.add(["a", "b"], torch.tensor([1.0, float("nan")]))
    assert len(statistics) == 0
    with pytest.raises(TPIPSError, match="3 prompts"):
        statistics.add(["a", "b", "c"], torch.tensor([1.0, 2.0]))
    with pytest.raises(TPIPSError, match="between 1 and the buffer's size"):
        prompt_advantages(torch.ones(1), ["a"], statistics, min_count=9)
    with pytest.raises(TPIPSError, match="prompt, batch"):
        prompt_advantages(torch.ones(1), ["a"], statistics, min_count=1, std_from="group")
    with pytest.raises(TPIPSError, match="buffer_size"):
        PromptStatistics(buffer_size=0)
    with pytest.raises(TPIPSError, match="max_prompts"):
        PromptStatistics(max_prompts=0)
