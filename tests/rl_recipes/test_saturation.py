"""Saturated prompts: equal rewards at the top, visit after visit."""

from __future__ import annotations

import pytest
import torch

from rl_recipes.algorithms.saturation import saturated, visits, with_visits
from tpips_reward.errors import TPIPSError

TOP = (0.95, 0.952)


def test_visits_are_the_lowest_and_highest_reward_of_each_prompt():
    rewards = torch.tensor([0.5, 0.25, 0.75, 1.0])
    assert visits(rewards, ["a", "b", "a", "a"]) == {"a": (0.5, 1.0), "b": (0.25, 0.25)}


@pytest.mark.parametrize(
    "seen, expected",
    [
        ([TOP, TOP, TOP], True),
        ([(0.1, 0.9), TOP, TOP, TOP], True),
        ([TOP, TOP], False),  # too few visits
        ([TOP, TOP, TOP, (0.94, 0.999)], False),  # the last visit still differs
        ([TOP, (0.2, 0.95), TOP], False),
        ([(0.1, 0.1)] * 3, False),  # all fail alike: there is everything to learn
        ([(0.899, 0.905)] * 3, False),  # one edit is below the top
        ([], False),
    ],
)
def test_saturated_means_equal_and_at_the_top_in_all_of_the_last_visits(seen, expected):
    assert saturated({"a": seen, "other": []}, top=0.9, spread=0.01, last=3) == ({"a"} if expected else set())


def test_a_history_keeps_the_last_visits_and_leaves_its_input_alone():
    history = {"a": [(0.1, 0.2), (0.2, 0.3)]}
    new = with_visits(history, {"a": (0.3, 0.4), "b": (0.5, 0.5)}, last=2)
    assert new == {"a": [(0.2, 0.3), (0.3, 0.4)], "b": [(0.5, 0.5)]}
    assert history == {"a": [(0.1, 0.2), (0.2, 0.3)]}


def test_a_prompt_becomes_saturated_and_comes_back():
    history = {}
    answers = []
    for rewards in ([0.2, 0.9], [0.95, 0.95], [0.95, 0.951], [0.96, 0.96], [0.5, 0.96]):
        history = with_visits(history, visits(torch.tensor(rewards), ["a", "a"]), last=3)
        answers.append("a" in saturated(history, top=0.9))
    assert answers == [False, False, False, True, False]


def test_bad_arguments_are_named():
    with pytest.raises(TPIPSError, match="1 prompts"):
        visits(torch.zeros(2), ["a"])
    with pytest.raises(TPIPSError, match="NaN"):
        visits(torch.tensor([float("nan")]), ["a"])
    for options in ({"last": 0}, {"spread": -1.0}, {"spread": float("nan")}, {"top": float("inf")}):
        with pytest.raises(TPIPSError, match="Saturation needs"):
            saturated({}, **{"top": 0.9, **options})
