"""The rewards' formulas against numbers worked out by hand, on a metric with known answers."""

import math

import pytest
import torch
from fake_metrics import ChannelMetric, flat

from tpips_reward.errors import TPIPSError
from tpips_reward.rewards import TPIPSReward
from tpips_reward.rewards.gate import Gate
from tpips_reward.rewards.terms import Scale

SOURCE = flat(0.5, 0.5, 0.5)
# Cosine-like f: red 1 - 2*0.1 = 0.8, green 1 - 2*0.2 = 0.6, blue 1 - 2*0.1 = 0.8, so a change of 0.2 in blue.
EDIT = flat(0.6, 0.7, 0.4)
KEEP, CHANGE = [["red", "green"]], [["blue"]]


def score(name, image=EDIT, *, metric=None, preserve=KEEP, target=CHANGE, target_images=None, **options):
    reward = TPIPSReward(name, metric or ChannelMetric(), **options)
    return reward([image], SOURCE, preserve=preserve, target=target, target_images=target_images)


def test_preserve_without_gate_is_the_plain_mean():
    out = score("tpips:preserve", gate="none")
    assert out.scores.dtype == torch.float32
    torch.testing.assert_close(out.scores, torch.tensor([0.7]))


def test_preserve_is_gated_by_the_target_change():
    # g = 0.2 / 0.5 = 0.4
    torch.testing.assert_close(score("tpips:preserve").scores, torch.tensor([0.7 - 0.6]))
    torch.testing.assert_close(score("tpips:preserve", gate_threshold=0.25).scores, torch.tensor([0.7 - 0.2]))
    torch.testing.assert_close(score("tpips:preserve", gate_threshold=0.2).scores, torch.tensor([0.7]))
    torch.testing.assert_close(score("tpips:preserve", gate_weight=0.5).scores, torch.tensor([0.7 - 0.3]))


def test_preserve_without_target_aspects_is_not_gated():
    out = score("tpips:preserve", target=None)
    torch.testing.assert_close(out.scores, torch.tensor([0.7]))
    assert math.isnan(float(out.terms["gate"])) and math.isnan(float(out.terms["target"]))


def test_target_is_the_change_from_the_source():
    torch.testing.assert_close(score("tpips:target").scores, torch.tensor([0.2]))
    two = score("tpips:target", preserve=None, target=[["blue", "green"]])
    torch.testing.assert_close(two.scores, torch.tensor([(0.2 + 0.4) / 2]))


def test_target_with_a_target_image_is_the_closeness_to_it():
    out = score("tpips:target", target_images=[flat(0, 0, 0.3)])
    torch.testing.assert_close(out.scores, torch.tensor([0.8]))
    torch.testing.assert_close(out.terms["target"], torch.tensor([0.8]))
    torch.testing.assert_close(out.terms["change"], torch.tensor([0.2]))


def test_edit_multiplies_what_was_kept_with_the_gate():
    torch.testing.assert_close(score("tpips:edit").scores, torch.tensor([0.7 * 0.4]))
    out = score("tpips:edit", target_images=[flat(0, 0, 0.3)])
    torch.testing.assert_close(out.scores, torch.tensor([0.7 * 0.4 * 0.8]))


def test_several_rewards_are_added_with_their_weights():
    together = score("tpips:preserve=0.7,tpips:target=0.3,tpips:edit=2").scores
    apart = [0.7 * score("tpips:preserve").scores, 0.3 * score("tpips:target").scores, 2 * score("tpips:edit").scores]
    torch.testing.assert_close(together, sum(apart))


def test_minus_distances_use_the_same_formulas_on_their_range():
    metric = ChannelMetric(unbounded=True, change_scale=0.2)  # f: red -0.1, green -0.2, blue -0.1; g = 0.1 / 0.2
    torch.testing.assert_close(score("tpips:preserve", metric=metric).scores, torch.tensor([math.exp(-0.75) - 0.5]))
    torch.testing.assert_close(score("tpips:target", metric=metric).scores, torch.tensor([0.1]))
    torch.testing.assert_close(score("tpips:edit", metric=metric).scores, torch.tensor([math.exp(-0.75) * 0.5]))


@pytest.mark.parametrize("unbounded", [False, True])
def test_copying_and_destroying_pay_less_than_the_edit(unbounded):
    metric = ChannelMetric(unbounded=unbounded, change_scale=0.2)
    edit, copy, black = flat(0.5, 0.5, 0.9), SOURCE, flat(0, 0, 0)
    for name in ("tpips:preserve", "tpips:edit"):
        scores = TPIPSReward(name, metric)([edit, copy, black], SOURCE, preserve=KEEP * 3, target=CHANGE * 3).scores
        assert scores[0] > scores[1] and scores[0] > scores[2]
        assert float(scores[1]) == 0.0


@pytest.mark.parametrize("unbounded", [False, True])
def test_a_copy_with_a_target_image_earns_nothing_from_edit(unbounded):
    metric = ChannelMetric(unbounded=unbounded)
    assert float(score("tpips:edit", SOURCE, metric=metric, target_images=[flat(0.5, 0.5, 0.6)]).scores) == 0.0


def test_copy_scores_zero_in_preserve():
    assert float(score("tpips:preserve", SOURCE).scores) == 0.0


@pytest.mark.parametrize("unbounded", [False, True])
def test_preserve_rises_with_what_was_kept_whatever_its_sign(unbounded):
    metric = ChannelMetric(unbounded=unbounded)
    worse_and_worse = [flat(0.5 + step, 0.5, 0.6) for step in (0.0, 0.1, 0.3, 0.5)]
    scores = TPIPSReward("tpips:preserve", metric)(worse_and_worse, SOURCE, [["red"]], [["blue"]]).scores
    assert bool((scores.diff() < 0).all())


@pytest.mark.parametrize("kept", [0.0, 0.5])
@pytest.mark.parametrize("unbounded", [False, True])
def test_preserve_rises_with_the_change_until_the_gate_is_open(unbounded, kept):
    # kept=0.5 moves red by 0.5, where f is negative or zero: a product p * g would fall here.
    metric = ChannelMetric(unbounded=unbounded, change_scale=0.4)
    images = [flat(0.5 + kept, 0.5, 0.5 + step) for step in (0.0, 0.05, 0.1, 0.4, 0.5)]
    scores = TPIPSReward("tpips:preserve", metric)(images, SOURCE, [["red"]], [["blue"]]).scores
    assert bool((scores[:3].diff() > 0).all())
    torch.testing.assert_close(scores[3], scores[4])


def test_per_aspect_and_terms():
    out = score("tpips:preserve", target_images=[flat(0, 0, 0.3)])
    kept, changed, closeness = (out.per_aspect[0][key] for key in ("preserve", "target", "target_image"))
    assert kept == pytest.approx({"red": 0.8, "green": 0.6})
    assert changed == pytest.approx({"blue": 0.2})
    assert closeness == pytest.approx({"blue": 0.8})
    assert {name: float(value) for name, value in out.terms.items()} == pytest.approx(
        {"preserve": 0.7, "target": 0.8, "change": 0.2, "gate": 0.4}
    )
    assert set(score("tpips:preserve").per_aspect[0]) == {"preserve", "target"}


def test_samples_with_different_aspects_do_not_mix():
    images = [EDIT, flat(0.5, 0.9, 0.5), EDIT]
    reward = TPIPSReward("tpips:preserve", ChannelMetric())
    together = reward(
        images, SOURCE, preserve=[["red"], ["green", "blue"], "blue"], target=[["blue"], None, ["red", "green"]]
    )
    alone = [
        reward([images[0]], SOURCE, [["red"]], [["blue"]]),
        reward([images[1]], SOURCE, [["green", "blue"]]),
        reward([images[2]], SOURCE, [["blue"]], [["red", "green"]]),
    ]
    torch.testing.assert_close(together.scores, torch.cat([out.scores for out in alone]))
    assert together.per_aspect == [out.per_aspect[0] for out in alone]


def test_scale_unit_of_a_bounded_range_with_another_top():
    scale = Scale(0.0, 2.0, 0.5)
    torch.testing.assert_close(scale.unit(torch.tensor([-1.0, 1.0, 3.0])), torch.tensor([0.0, 0.5, 1.0]))
    torch.testing.assert_close(scale.change(torch.tensor([0.5])), torch.tensor([1.5]))


@pytest.mark.parametrize("lowest, highest", [(0.0, float("inf")), (1.0, 1.0), (float("nan"), 1.0)])
def test_scale_refuses_ranges_without_a_top(lowest, highest):
    with pytest.raises(TPIPSError, match="range"):
        Scale(lowest, highest, 0.5)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "0.5", True])
def test_gate_numbers_must_be_positive(value):
    with pytest.raises(TPIPSError, match="gate_threshold"):
        Gate("change", value, 1.0)
    with pytest.raises(TPIPSError, match="gate_weight"):
        Gate("change", 0.5, value)


def test_unknown_gate_lists_what_exists():
    with pytest.raises(TPIPSError, match="Unknown gate 'chnage'; gates are: change, none"):
        TPIPSReward("tpips:preserve", ChannelMetric(), gate="chnage")
