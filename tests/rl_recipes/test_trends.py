"""The trends of reward and judge against numpy's least squares, and how often the comparison is right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rl_recipes.algorithms.trends import parting, trend
from tpips_reward.errors import TPIPSError


def _run(seed, length=60, reward_slope=0.05, judge_slope=0.0, noise=0.2):
    rng = np.random.default_rng(seed)
    rewards = reward_slope * np.arange(length) + noise * rng.normal(size=length)
    judge = 1.0 + judge_slope * np.arange(length) + noise * rng.normal(size=length)
    return rewards.tolist(), judge.tolist()


def test_slope_and_ends_against_numpy():
    rng = np.random.default_rng(0)
    x = np.sort(rng.choice(100, 25, replace=False))
    y = 3.0 - 0.2 * x + rng.normal(size=25)
    slope, level = np.polyfit(x, y, 1)
    line = trend(x.tolist(), y.tolist())
    assert line.slope == pytest.approx(slope, rel=1e-9)
    assert line.start == pytest.approx(level + slope * x[0], rel=1e-9)
    assert line.end == pytest.approx(level + slope * x[-1], rel=1e-9)


def test_standard_error_by_hand():
    # y = x + (1, -1, -1, 1, 1, -1, -1, 1) / 10: the residuals' mean is 0, and they add nothing to the slope.
    x, residuals = np.arange(8.0), np.array([1, -1, -1, 1, 1, -1, -1, 1]) / 10
    line = trend(x, x + residuals)
    assert line.slope == pytest.approx(1.0)
    # Neighbours: -1 + 1 - 1 + 1 - 1 + 1 - 1 of 8, so r = -1/8, and (8 r + 1) / 4 = 0: all eight points count.
    assert line.freedom == pytest.approx(6.0)
    assert line.standard_error == pytest.approx(math.sqrt(0.08 / 6 / 42))


def test_alike_neighbours_widen_the_standard_error():
    x = np.arange(40.0)
    waves, zigzag = np.sin(x / 4), np.where(x % 2 == 0, 0.7, -0.7)
    assert trend(x, waves).freedom < 8
    assert trend(x, zigzag).freedom == pytest.approx(38.0)
    assert trend(x, waves).standard_error > 2 * trend(x, zigzag).standard_error


@pytest.mark.parametrize("t, freedom, expected", [(4.0, 10.0, 3.021), (2.0, 38.0, 1.937), (-3.5, 28.0, -3.160)])
def test_sigmas_have_the_probability_of_student(t, freedom, expected):
    """Expected: the normal deviates of Student's tail probabilities (scipy.stats)."""
    line = trend(range(6), [0.0, 1.0, 0.0, 1.0, 0.0, 2.0])
    line = type(line)(slope=t, standard_error=1.0, freedom=freedom, start=0.0, end=0.0)
    assert line.sigmas() == pytest.approx(expected, abs=0.01)


def test_constant_values_have_no_trend():
    for value in (0.1, 0.3, 1e-9, 0.0, 1e6):
        line = trend(range(37), [value] * 37)
        assert abs(line.sigmas()) < 2, value
        assert line.end == pytest.approx(value)


def test_a_line_without_noise_is_a_trend():
    assert trend(range(10), [0.1 * i for i in range(10)]).sigmas() > 5
    assert trend(range(10), [-0.1 * i for i in range(10)]).sigmas() < -5


@pytest.mark.parametrize(
    "reward_slope, judge_slope, parted",
    [(0.05, -0.05, True), (0.05, 0.05, False), (-0.05, -0.05, False), (-0.05, 0.05, False)],
)
def test_only_a_rising_reward_with_a_falling_judge_is_a_parting(reward_slope, judge_slope, parted):
    found = parting(*_run(0, reward_slope=reward_slope, judge_slope=judge_slope))
    assert found.parted == parted
    assert math.copysign(1, found.reward.slope) == math.copysign(1, reward_slope)


def test_a_level_judge_raises_few_alarms_in_a_long_run_and_a_falling_one_is_found_soon():
    alarms = 0
    for seed in range(10):
        rewards, judge = _run(seed, length=90)
        alarms += any(parting(rewards[:n], judge[:n]).parted for n in range(12, 90, 2))
    assert alarms <= 1
    for seed in range(10):
        rewards, judge = _run(seed, length=60, judge_slope=-0.02)  # a tenth of the noise an iteration
        assert any(parting(rewards[:n], judge[:n]).parted for n in range(12, 61, 4)), seed


def test_a_fall_before_the_window_is_forgotten():
    rewards, judge = _run(1, length=40, judge_slope=-0.05)
    later_rewards, later_judge = _run(2, length=40, judge_slope=0.0)
    assert parting(rewards, judge).parted
    assert not parting(rewards + later_rewards, judge + [v + judge[-1] for v in later_judge]).parted


def test_unknown_values_are_left_out_and_time_is_kept():
    rewards, judge = _run(3, judge_slope=-0.05)
    sparse = [value if i % 4 == 0 else (None if i % 4 == 1 else float("nan")) for i, value in enumerate(judge)]
    found = parting(rewards, sparse)
    assert found.points == 15
    assert found.judge.slope == pytest.approx(np.polyfit(range(0, 60, 4), judge[::4], 1)[0])
    assert parting(rewards[:40], sparse[:40]) is None  # ten points are too few for an answer


def test_the_sentence_names_what_happened():
    rewards = [0.1 * i + 0.01 * (-1) ** i for i in range(20)]
    judge = [0.9 - 0.01 * i + 0.001 * (-1) ** i for i in range(20)]
    text = parting(rewards, judge).sentence("edit_success")
    assert (
        "last 20 points the reward went from 0.0014 to 1.8986 (+" in text
        and "edit_success from 0.9001 to 0.7099 (-" in text
    )


def test_bad_arguments_are_named():
    with pytest.raises(TPIPSError, match="3 and 2"):
        parting([1.0] * 3, [1.0] * 2)
    for options in ({"least": 5}, {"least": 50, "window": 40}, {"sigmas": 0.0}):
        with pytest.raises(TPIPSError, match="least >= 6"):
            parting([], [], **options)
    with pytest.raises(TPIPSError, match="finite"):
        parting([float("inf")] + [1.0] * 20, [1.0] * 21)
    with pytest.raises(TPIPSError, match="six points"):
        trend([0, 1, 2], [0.0, 1.0, 2.0])
    with pytest.raises(TPIPSError, match="ascending"):
        trend([0, 1, 2, 2, 3, 4], [0.0] * 6)
