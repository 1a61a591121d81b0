"""The triplet judge: three images side by side, all six orders, one head, and no score of two images."""

from __future__ import annotations

import copy
from itertools import permutations

import pytest
import torch

from tpips_reward import TPIPSReward
from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError
from tpips_reward.fusion import TripletJudge
from tpips_reward.fusion.triplet import side_by_side
from tpips_reward.metric import Metric
from tpips_reward.preprocess import resize, to_patches

ASPECTS = ["lighting", None, "the color of the subject's left ear"]


@pytest.fixture(scope="module")
def judge(metric) -> TripletJudge:
    """On the tiny random backbone; a head that is large enough for answers that differ."""
    torch.manual_seed(0)
    found = TripletJudge(metric.backbone).requires_grad_(False)
    torch.nn.init.normal_(found.head.weight)
    return found


@pytest.fixture(scope="module")
def triplet_metric(judge) -> Metric:
    return Metric(judge)


def plain_logits(judge: TripletJudge, images, aspect):
    """Transformers' own forward on the picture of three, one prompt, and the head written out."""
    model = judge.backbone.model
    patches, (rows, columns) = to_patches([torch.cat(images, dim=-1)], judge.backbone.settings)[0]
    ids = list(judge.prompts.full(aspect))
    at = ids.index(model.config.image_token_id)
    ids[at : at + 1] = [model.config.image_token_id] * (rows * columns // 4)
    tokens = torch.tensor([ids])
    hidden = model(
        input_ids=tokens,
        pixel_values=patches,
        image_grid_thw=torch.tensor([[1, rows, columns]]),
        mm_token_type_ids=(tokens == model.config.image_token_id).int(),
    ).last_hidden_state[0, -1]
    return judge.head.weight @ hidden + judge.head.bias


def test_logits_are_the_head_on_transformers_own_last_state(judge, crops):
    images = [resize(crop[None], (64, 40 + 8 * k))[0].clamp(0, 1) for k, crop in enumerate(crops[:3])]
    with torch.no_grad():
        found = judge.logits(images, [(0, 2, 1, name) for name in ASPECTS])
        for row, name in zip(found, ASPECTS, strict=True):
            expected = plain_logits(judge, [images[0], images[2], images[1]], name)
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_the_six_orders_are_mapped_back_and_averaged(judge, crops):
    with torch.no_grad():
        expected = torch.zeros(3)
        for order in permutations(range(3)):
            odds = judge.logits(crops, [(*order, "lighting")])[0].softmax(0)
            for place, image in enumerate(order):
                expected[image] += odds[place] / 6
        found = judge.judge(crops, [(0, 1, 2, "lighting")])[0]
        one_order = judge.logits(crops, [(0, 1, 2, "lighting")])[0].softmax(0)
    torch.testing.assert_close(found, expected)
    assert found.sum().item() == pytest.approx(1) and (found - one_order).abs().max() > 1e-3


def test_the_order_of_a_triplet_permutes_the_answer_and_nothing_else(triplet_metric, crops):
    base = triplet_metric.odd_one_out(crops, [(0, 1, 2, "lighting")])[0]
    assert base.max() - base.min() > 1e-3
    for order in permutations(range(3)):
        found = triplet_metric.odd_one_out(crops, [(*order, "lighting")])[0]
        torch.testing.assert_close(found, base[list(order)], atol=1e-6, rtol=0)


def test_a_batch_equals_single_calls_and_shares_the_pictures(triplet_metric, crops, monkeypatch):
    triplets = [(0, 1, 2, name) for name in ASPECTS] + [(3, 1, 0, "lighting"), (2, 1, 0, "b" * 200)]
    single = torch.cat([triplet_metric.odd_one_out(crops, [triplet]) for triplet in triplets])
    encoded = []
    encode = triplet_metric.backbone.encode_images
    monkeypatch.setattr(triplet_metric.backbone, "encode_images", lambda images: encoded.extend(images) or encode(images))
    together = triplet_metric.odd_one_out(crops, triplets)
    torch.testing.assert_close(together, single, atol=1e-5, rtol=0)
    assert len(encoded) == 2 * 6  # two sets of images in six orders, whatever the aspects
    monkeypatch.setattr(triplet_metric.fusion, "token_budget", 60)
    torch.testing.assert_close(triplet_metric.odd_one_out(crops, triplets), single, atol=1e-5, rtol=0)


def test_equal_images_share_the_odds(triplet_metric, crops):
    """What a sentinel looks like: two equal images and another one."""
    odds = triplet_metric.odd_one_out([crops[0], crops[1], crops[0].clone()], [(0, 1, 2, "lighting")])[0]
    assert odds[0] == pytest.approx(odds[2].item(), abs=1e-6) and odds.sum().item() == pytest.approx(1)


def test_side_by_side():
    low, tall = torch.zeros(3, 2, 3), torch.ones(3, 4, 6)
    joined = side_by_side([tall, low, tall])
    assert joined.shape == (3, 2, 9)
    assert joined[0, 0].tolist() == pytest.approx([1, 1, 1, 0, 0, 0, 1, 1, 1])
    assert torch.equal(side_by_side([tall, tall]), torch.cat([tall, tall], -1))
    assert side_by_side([torch.zeros(3, 100, 1), torch.zeros(3, 10, 10)]).shape == (3, 10, 11)


def test_no_score_of_two_images(triplet_metric, crops):
    for call in (triplet_metric.similarity, triplet_metric.distance):
        with pytest.raises(TPIPSError, match="triplet judge sees three images at once and has no score of two"):
            call(crops[0], crops[1])
    with pytest.raises(TPIPSError, match="has no score of two"):
        triplet_metric.similarity_pairs(crops, crops, [(0, 1, "lighting")])
    with pytest.raises(TPIPSError, match="has no score of two"):
        triplet_metric.embed(crops)
    with pytest.raises(TPIPSError, match="has no score of two"):
        triplet_metric.range  # noqa: B018
    with pytest.raises(TPIPSError, match="has no score of two"):
        TPIPSReward("tpips:preserve", triplet_metric)


def test_every_parameter_and_pixel_gets_its_gradient(judge, crops):
    own = copy.deepcopy(judge).requires_grad_(True)
    images = [crop.clone().requires_grad_() for crop in crops[:3]]
    votes = torch.tensor([[0.2, 0.0, 0.8]])
    loss = -(votes * own(images, [(1, 0, 2, "lighting")]).log_softmax(-1)).sum()
    names, weights = zip(*own.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, [*images, *weights], allow_unused=True)
    for name, gradient in zip(["0", "1", "2", *names], found, strict=True):
        assert gradient is not None and gradient.isfinite().all(), name
        if int(name) < 3 if name.isdigit() else name.startswith("head"):
            assert gradient.abs().max() > 0, name


def test_a_judge_whose_numbers_are_not_finite_answers_nothing(judge, crops):
    broken = copy.deepcopy(judge)
    broken.head.bias[0] = float("inf")
    with pytest.raises(TPIPSError, match=r"no finite number for images\[0\] and images\[1\] and images\[3\] in 'shape'"):
        Metric(broken).odd_one_out(crops, [(0, 1, 3, "shape")])


def test_gradients_reach_pixels_through_the_metric(triplet_metric, crops):
    image = crops[0].clone().requires_grad_()
    triplet_metric.odd_one_out([image, *crops[1:3]], [(0, 1, 2, "lighting")])[0, 0].backward()
    assert image.grad.isfinite().all() and image.grad.abs().max() > 0
    assert not triplet_metric.odd_one_out(crops, [(0, 1, 2, "lighting")]).requires_grad
    with pytest.raises(TPIPSError, match="no gradient can flow"):
        triplet_metric.odd_one_out(crops, [(0, 1, 2, "lighting")], differentiable=True)


def test_saved_and_loaded_again(triplet_metric, crops, tmp_path):
    expected = triplet_metric.odd_one_out(crops, [(0, 1, 2, name) for name in ASPECTS])
    triplet_metric.save_pretrained(tmp_path)
    loaded = load_metric(tmp_path, device="cpu")
    assert loaded.fusion.kind == "triplet" and not loaded.is_pairwise
    torch.testing.assert_close(loaded.odd_one_out(crops, [(0, 1, 2, name) for name in ASPECTS]), expected)
    half = load_metric(tmp_path, device="cpu", dtype="bfloat16")
    assert half.fusion.head.weight.dtype == torch.float32 and half.dtype == torch.bfloat16
    torch.testing.assert_close(half.odd_one_out(crops, [(0, 1, 2, "lighting")]), expected[:1], atol=0.1, rtol=0)


def test_similarities_choose_by_the_papers_softmax(metric, mid_metric, crops):
    triplets = [(0, 1, 2, "lighting"), (3, 0, 1, None)]
    images = [resize(crop[None], (64, 64))[0].clamp(0, 1) for crop in crops]
    for chosen, temperature in ((metric, 0.05), (mid_metric, 0.0025)):
        found = chosen.odd_one_out(images, triplets)
        for row, (i, j, k, aspect) in zip(found, triplets, strict=True):
            pairs = [(j, k, aspect), (i, k, aspect), (i, j, aspect)]
            expected = (chosen.similarity_pairs(images, images, pairs) / temperature).softmax(0)
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
    assert metric.odd_one_out(crops, []).shape == (0, 3)


@pytest.mark.parametrize("members", [(0, 1, 4), (-1, 0, 1)])
def test_bad_triplets(metric, triplet_metric, crops, members):
    for chosen in (metric, triplet_metric):
        with pytest.raises(TPIPSError, match=r"triplets\[0\] names images\[-?\d\], but there are only 4"):
            chosen.odd_one_out(crops, [(*members, "lighting")])
    with pytest.raises(TPIPSError, match="There are no triplets"):
        triplet_metric.fusion.logits(crops, [])


def test_the_question(judge):
    text = judge.prompts.tokenizer.decode(judge.prompts.full("lighting"))
    assert "Which image is the most different among the three in terms of lighting? You need to choose" in text
    assert "the most different among the three? You need" in judge.prompts.tokenizer.decode(judge.prompts.full("overall"))
