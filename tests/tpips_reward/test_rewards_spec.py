"""Reward names and weights: what parses, and what each mistake is told."""

import pytest

from tpips_reward.errors import TPIPSError
from tpips_reward.rewards import RewardItem, RewardSpec, known_rewards, parse_reward


def test_one_name_has_weight_one():
    assert parse_reward("tpips:preserve") == RewardSpec((RewardItem("tpips", "preserve", 1.0),))


def test_several_with_weights_and_blanks():
    spec = parse_reward(" tpips:preserve = 0.7 , tpips:target=3e-1,tpips:edit")
    assert [(item.name, item.weight) for item in spec.items] == [
        ("tpips:preserve", 0.7),
        ("tpips:target", 0.3),
        ("tpips:edit", 1.0),
    ]


@pytest.mark.parametrize(
    "text", ["tpips:edit", "tpips:preserve=0.7,tpips:target=0.30000000000000004", "tpips:target=2.0"]
)
def test_str_parses_back_to_the_same(text):
    spec = parse_reward(text)
    assert str(spec) == text
    assert parse_reward(str(spec)) == spec
    assert parse_reward(spec) is spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("tpips:preserve,", "empty entry"),
        (",tpips:preserve", "empty entry"),
        ("lpips", "Unknown reward 'lpips'; rewards are: tpips:preserve, tpips:target, tpips:edit"),
        ("TPIPS:preserve", "Unknown reward"),
        ("preserve", "Unknown reward"),
        ("tpips", "needs a mode; write one of: tpips:preserve"),
        ("tpips:", "Unknown mode ''"),
        ("tpips:keep", "Unknown mode 'keep' of reward 'tpips'; write one of: tpips:preserve, tpips:target, tpips:edit"),
        ("tpips:preserve:x", "Unknown mode 'preserve:x'"),
        ("tpips:preserve=", "weight '' of 'tpips:preserve' is not a number"),
        ("tpips:preserve=much", "not a number"),
        ("tpips:preserve=0.5=1", "not a number"),
        ("tpips:preserve=nan", "positive and finite"),
        ("tpips:preserve=inf", "positive and finite"),
        ("tpips:preserve=0", "positive and finite"),
        ("tpips:preserve=-1", "positive and finite"),
        ("tpips:preserve=0.5,tpips:preserve=0.5", "stands twice"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(TPIPSError) as caught:
        parse_reward(text)
    assert message in str(caught.value)


def test_a_name_that_is_not_text():
    with pytest.raises(TPIPSError, match="not by a list"):
        parse_reward(["tpips:preserve"])  # type: ignore[arg-type]


def test_every_known_reward_parses():
    for name in known_rewards().split(", "):
        assert parse_reward(name).items[0].name == name
