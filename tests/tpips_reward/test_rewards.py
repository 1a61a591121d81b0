"""TPIPSReward as a caller meets it: shapes, sharing, gradients, and bad input."""

import pytest
import torch
from fake_metrics import ChannelMetric, ConstantMetric, flat

from tpips_reward.errors import NotFinite, TPIPSError
from tpips_reward.rewards import TPIPSReward

SOURCE = flat(0.5, 0.5, 0.5)
EDITS = [flat(0.6, 0.7, 0.4), flat(0.5, 0.5, 0.9), flat(0.1, 0.5, 0.5)]
KEEP, CHANGE = [["red", "green"]] * 3, [["blue"]] * 3


def make(name="tpips:preserve", metric=None, **options):
    return TPIPSReward(name, metric or ChannelMetric(), **options)


# --- one metric call, everything in it once


def test_all_modes_share_one_metric_call_and_each_pair_is_measured_once():
    metric = ChannelMetric()
    make("tpips:preserve,tpips:target,tpips:edit", metric)(EDITS, SOURCE, KEEP, CHANGE, target_images=flat(0, 0, 1))
    assert len(metric.calls) == 1
    images, references, pairs = metric.calls[0]
    assert len(images) == 3 and len(references) == 2
    assert len(pairs) == len(set(pairs)) == 3 * (2 + 1 + 1)


def test_one_source_object_is_one_reference():
    metric = ChannelMetric()
    make(metric=metric)(EDITS, [SOURCE, flat(0.5, 0.5, 0.4), SOURCE], KEEP)
    assert len(metric.calls[0][1]) == 2
    assert [pair[1] for pair in metric.calls[0][2]] == [0, 0, 1, 1, 0, 0]


def test_a_target_image_that_is_the_source_is_not_measured_twice():
    metric = ChannelMetric()
    out = make("tpips:target", metric)(EDITS[:1], SOURCE, target="blue", target_images=[SOURCE])
    assert len(metric.calls[0][2]) == 1
    torch.testing.assert_close(out.scores, torch.tensor([0.8]))


def test_the_value_range_reaches_the_metric():
    metric = ChannelMetric()
    make(metric=metric, value_range=(-1.0, 1.0))(EDITS, SOURCE, KEEP)
    assert metric.value_range == (-1.0, 1.0)


# --- forms of input


@pytest.mark.parametrize("images", [EDITS, tuple(EDITS), torch.stack(EDITS)])
@pytest.mark.parametrize("references", [SOURCE, [SOURCE], [SOURCE] * 3, torch.stack([SOURCE] * 3), SOURCE[None]])
def test_batches_lists_and_one_source_for_all_score_alike(images, references):
    expected = make()(EDITS, [SOURCE] * 3, KEEP, CHANGE).scores
    torch.testing.assert_close(make()(images, references, KEEP, CHANGE).scores, expected)


@pytest.mark.parametrize(
    "preserve", [["red", "green"], ("red", "green"), [["red", "green"]], [["red", "green"]] * 3, [" red ", "green\n"]]
)
def test_one_list_of_aspects_serves_all_samples(preserve):
    expected = make()(EDITS, SOURCE, KEEP, CHANGE).scores
    torch.testing.assert_close(make()(EDITS, SOURCE, preserve, "blue").scores, expected)


def test_one_image_and_one_aspect():
    out = make()(EDITS[0], SOURCE, "red")
    assert out.scores.shape == (1,) and out.per_aspect[0]["preserve"] == pytest.approx({"red": 0.8})
    assert make()(EDITS[0], SOURCE, ["red"]).per_aspect == out.per_aspect


def test_a_flat_list_as_long_as_the_batch_is_ambiguous():
    with pytest.raises(TPIPSError, match="two ways") as caught:
        make()(EDITS, SOURCE, ["red", "green", "blue"])
    assert "[['red', 'green', 'blue']]" in str(caught.value) and "[['red'], ['green'], ['blue']]" in str(caught.value)


def test_requires():
    assert make("tpips:preserve").requires("preserve") and not make("tpips:preserve").requires("target")
    assert make("tpips:target").requires("target") and not make("tpips:target").requires("preserve")
    assert make("tpips:edit").requires("target") and make("tpips:edit").requires("preserve")
    assert make("tpips:preserve,tpips:target").requires("target")
    with pytest.raises(TPIPSError, match="'goal'"):
        make().requires("goal")


def test_attributes():
    metric = ChannelMetric(change_scale=0.3)
    reward = make("tpips:edit", metric)
    assert reward.metric is metric and str(reward.spec) == "tpips:edit" and reward.gate.threshold == 0.3


# --- gradients


@pytest.mark.parametrize(
    "name", ["tpips:preserve", "tpips:target", "tpips:edit", "tpips:preserve=0.7,tpips:target=0.3"]
)
@pytest.mark.parametrize("unbounded", [False, True])
def test_gradients_match_finite_differences(name, unbounded):
    reward = make(name, ChannelMetric(unbounded, change_scale=0.9))
    image = flat(0.6, 0.7, 0.4, size=2).requires_grad_()
    source = flat(0.5, 0.5, 0.5, size=2)
    reward([image], source, [["red", "green"]], [["blue"]]).scores.sum().backward()
    assert image.grad is not None
    for channel in range(3):
        step = torch.zeros(3, 2, 2)
        step[channel, 0, 0] = 1e-2
        up, down = (
            reward([image.detach() + sign * step], source, [["red", "green"]], [["blue"]]).scores for sign in (1, -1)
        )
        assert float(image.grad[channel, 0, 0]) == pytest.approx(float(up - down) / 2e-2, abs=2e-4)


def test_a_batch_that_requires_grad_gets_its_gradient_and_finite_ones_where_no_aspect_is():
    batch = torch.stack(EDITS).requires_grad_()
    out = make()(batch, SOURCE, KEEP, [["blue"], None, ["blue"]])
    out.scores.sum().backward()
    assert batch.grad is not None and bool(torch.isfinite(batch.grad).all())
    assert bool((batch.grad[1, 2] == 0).all()) and bool((batch.grad[0, 2] != 0).all())
    assert not any(term.requires_grad for term in out.terms.values())


def test_no_graph_without_need():
    weights = torch.ones((), requires_grad=True)

    class Weighted(ChannelMetric):
        def similarity_pairs(self, images, references, pairs, **options):
            return super().similarity_pairs(images, references, pairs, **options) * weights

    assert not make(metric=Weighted())(EDITS, SOURCE, KEEP).scores.requires_grad
    with torch.no_grad():
        assert not make()([image.clone().requires_grad_() for image in EDITS], SOURCE, KEEP).scores.requires_grad


# --- bad input: an error, never a score


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("tpips:preserve", {}, "Sample 0 has no preserve aspects, which tpips:preserve needs"),
        ("tpips:preserve", {"preserve": []}, "preserve has 0 entries for 3 images"),
        ("tpips:preserve", {"preserve": [["red"], [], ["red"]]}, "Sample 1 has no preserve aspects"),
        ("tpips:preserve", {"preserve": [["red"], None, ["red"]]}, "Sample 1 has no preserve aspects"),
        ("tpips:preserve", {"preserve": [["red"], ["red"]]}, "preserve has 2 entries for 3 images"),
        ("tpips:preserve", {"preserve": [["red"], [" "], ["red"]]}, "preserve[1] holds an empty aspect"),
        ("tpips:preserve", {"preserve": ""}, "preserve holds an empty aspect"),
        ("tpips:preserve", {"preserve": ["red", ""]}, "preserve holds an empty aspect"),
        ("tpips:preserve", {"preserve": [["red", "Red "], ["red"], ["red"]]}, "preserve[0] names 'Red' twice"),
        ("tpips:preserve", {"preserve": [["red", 3], ["red"], ["red"]]}, "preserve[0] holds 3"),
        ("tpips:preserve", {"preserve": [["red"], 3, ["red"]]}, "preserve[1] is a int"),
        ("tpips:preserve", {"preserve": {"red"}}, "preserve is a set"),
        ("tpips:preserve", {"preserve": "red", "target": [["blue"], ["RED"], ["blue"]]}, "Sample 1 has 'red' both"),
        ("tpips:target", {"preserve": "red"}, "Sample 0 has no target aspects, which tpips:target needs"),
        ("tpips:edit", {"preserve": "red", "target": [["blue"], [], ["blue"]]}, "Sample 1 has no target aspects"),
        ("tpips:edit", {"target": "blue"}, "Sample 0 has no preserve aspects"),
        ("tpips:preserve", {"preserve": "red", "references": [SOURCE] * 2}, "references has 2 images for 3 edits"),
        ("tpips:preserve", {"preserve": "red", "references": []}, "references has 0 images for 3 edits"),
        ("tpips:preserve", {"preserve": "red", "images": []}, "images is empty"),
        ("tpips:target", {"target": "red", "target_images": [SOURCE] * 2}, "target_images has 2 images for 3 edits"),
        (
            "tpips:preserve",
            {"preserve": "red", "target_images": [None, SOURCE, None]},
            "Sample 1 has a target image and no",
        ),
    ],
)
def test_mistakes_are_named(name, arguments, message):
    call = {"images": EDITS, "references": SOURCE, **arguments}
    with pytest.raises(TPIPSError) as caught:
        make(name)(**call)
    assert message in str(caught.value)


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), float("-inf")])
def test_a_metric_that_is_not_finite_is_an_error(answer):
    with pytest.raises(NotFinite, match="no finite number for sample 0 in 'red': weights hold NaN"):
        make(metric=ConstantMetric(answer))(EDITS, SOURCE, KEEP)
    with pytest.raises(NotFinite, match="no finite number for the sample in 'red'"):
        make(metric=ConstantMetric(answer))(EDITS[:1], SOURCE, KEEP[:1])


def test_one_nan_among_many_names_its_sample_and_aspect():
    answer = torch.ones(6)
    answer[3] = float("nan")
    with pytest.raises(NotFinite, match="for sample 1 in 'green'") as caught:
        make(metric=ConstantMetric(answer))(EDITS, SOURCE, KEEP)
    assert caught.value.position == 3


def test_what_a_metric_says_itself_is_said_of_the_sample():
    class Own(ConstantMetric):
        def similarity_pairs(self, *given, **options):
            raise NotFinite("images[1] and references[0] are bad", 3)

    with pytest.raises(NotFinite) as other:
        make(metric=ConstantMetric(torch.tensor([0, 0, 0, float("nan"), 0, 0])))(EDITS, SOURCE, KEEP)
    with pytest.raises(NotFinite, match="for sample 1 in 'green'") as own:
        make(metric=Own(0.0))(EDITS, SOURCE, KEEP)
    assert str(own.value) == str(other.value) and own.value.position == other.value.position


def test_a_metric_that_answers_the_wrong_number_of_pairs():
    with pytest.raises(TPIPSError, match=r"answered \(5,\) for 6 pairs"):
        make(metric=ConstantMetric(torch.ones(5)))(EDITS, SOURCE, KEEP)


def test_a_typo_in_the_reward_is_found_before_the_metric_is_loaded():
    with pytest.raises(TPIPSError, match="Unknown mode 'presrve'"):
        TPIPSReward("tpips:presrve", "no/such/metric")


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": "bfloat16"}])
def test_device_and_dtype_go_with_a_metric_name(options):
    with pytest.raises(TPIPSError, match="move the metric object"):
        TPIPSReward("tpips:preserve", ChannelMetric(), **options)
