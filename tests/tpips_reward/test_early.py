"""Early fusion: mask and positions as written down, symmetry by construction, sharing, gradients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError
from tpips_reward.fusion import EarlyFusion
from tpips_reward.fusion.early import (
    IMAGE_A,
    IMAGE_B,
    PADDING,
    REGISTER_1,
    REGISTER_2,
    TEXT,
    register_mask,
    register_positions,
    token_kinds,
)

ASPECTS = ["lighting", None, "the color of the subject's left ear"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def early(early_metric) -> EarlyFusion:
    return early_metric.fusion


def test_mask_written_out():
    """Two text tokens, two patches of A, one of B, both registers; one token of padding before them."""
    kinds = torch.tensor([[PADDING, *token_kinds(2, 2, 1)]])
    assert kinds[0, 1:].tolist() == [TEXT, TEXT, IMAGE_A, IMAGE_A, IMAGE_B, REGISTER_1, REGISTER_2]
    mask = register_mask(kinds)
    assert mask.dtype == torch.bool and mask.shape == (1, 1, 8, 8)
    assert mask[0, 0].int().tolist() == [
        # -  t1 t2 a1 a2 b1 r1 r2
        [1, 0, 0, 0, 0, 0, 0, 0],  # padding: itself, so that its softmax is not empty
        [0, 1, 0, 0, 0, 0, 0, 0],  # text: causal, no patches
        [0, 1, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 1, 0, 0],  # patches: all text, both images
        [0, 1, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 0, 1, 0],  # r1: text, image A, itself
        [0, 1, 1, 0, 0, 1, 0, 1],  # r2: text, image B, itself
    ]


def test_masks_of_a_batch_are_those_of_its_rows():
    rows = [[PADDING, PADDING, *token_kinds(1, 1, 1)], token_kinds(3, 1, 1).tolist()]
    together = register_mask(torch.tensor(rows))
    for row, kinds in enumerate(rows):
        assert torch.equal(together[row], register_mask(torch.tensor([kinds]))[0])


def test_positions_written_out():
    """Three text tokens, A with 2 x 2 merged tokens, B with 1 x 3; two unmerged patches a merged one."""
    assert register_positions(3, [(2, 2), (1, 3)], 2).tolist() == [
        # text     A           B        r1 r2
        [1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 4, 4],
        [0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 2, 0, 2, 0, 2, 4, 0, 0],
    ]


def scores_by_another_layout(early: EarlyFusion, images, aspect, pad_right: int) -> float:
    """The facts written down once more: tokens in the chat template's order, padding after the registers."""
    backbone, image_id = early.backbone, early.backbone.config.image_token_id
    features = backbone.encode_images(list(images))
    ids, places, kinds, shown, text = [], [], [], 0, 0
    for token in early.prompts.full(aspect):
        if token == image_id:
            rows, columns = features[shown].grid
            kind = "AB"[shown]
            for row in range(rows):
                for column in range(columns):
                    ids.append(image_id)
                    places.append((0, 2 * row, 2 * column))
                    kinds.append(kind)
            shown += 1
        else:
            text += 1
            ids.append(token)
            places.append((text, 0, 0))
            kinds.append("t")
    kinds += ["1", "2"] + ["-"] * pad_right
    places += [(text + 1, 0, 0)] * 2 + [(9, 9, 9)] * pad_right
    sees = {"t": "t", "A": "tAB", "B": "tAB", "1": "tA1", "2": "tB2", "-": "-"}
    mask = torch.tensor([[b in sees[a] and not (a == b == "t" and k > q) for k, b in enumerate(kinds)]
                         for q, a in enumerate(kinds)])  # fmt: skip
    tail = torch.cat([early.register_embed.weight.expand(2, -1), torch.ones(pad_right, backbone.hidden_size)])
    hidden = backbone.run_language(
        torch.tensor([ids]), torch.tensor(places).T.unsqueeze(1), None, features, mask=mask[None, None], tail=tail[None]
    ).last_hidden_state[0]
    first, second = hidden[kinds.index("1")].double(), hidden[kinds.index("2")].double()
    return float(first @ second / first.norm() / second.norm())


@pytest.mark.parametrize("pad_right", [0, 5])
def test_order_of_tokens_and_side_of_padding_make_no_difference(early, crops, pad_right):
    with torch.no_grad():
        for pair in ((0, 1), (2, 0)):
            expected = scores_by_another_layout(early, [crops[k] for k in pair], "lighting", pad_right)
            score = early.score_pairs(crops, [(*pair, "lighting")]).item()
            assert score == pytest.approx(expected, abs=1e-6) and score < 0.999


def test_symmetric_by_construction(early, crops):
    """One pair at a time through the run itself, which does not sort the images."""
    with torch.no_grad():
        features = early.backbone.encode_images(crops)
        for a, b in ((0, 1), (1, 2), (0, 3)):
            there = early._run(["lighting"], [features[a], features[b]])
            back = early._run(["lighting"], [features[b], features[a]])
            torch.testing.assert_close(there, back, atol=1e-6, rtol=0)
            assert there.item() < 0.999


def test_symmetric_and_one_for_equal_images(early_metric, crops):
    there = early_metric.similarity(crops[:2], crops[2:], ASPECTS)
    torch.testing.assert_close(early_metric.similarity(crops[2:], crops[:2], ASPECTS), there, atol=1e-6, rtol=0)
    both = early_metric.similarity([crops[0], crops[2]], [crops[2], crops[0]], "lighting")
    assert torch.equal(both[0], both[1])
    twice = early_metric.similarity(crops, [crop.clone() for crop in crops], ASPECTS)
    torch.testing.assert_close(twice, torch.ones_like(twice), atol=1e-6, rtol=0)
    assert early_metric.range == (-1.0, 1.0) and early_metric.change_scale == pytest.approx(0.3)
    torch.testing.assert_close(early_metric.distance(crops[:2], crops[2:], ASPECTS), 1 - there)


def test_both_images_and_the_aspect_matter(early_metric, crops):
    scores = early_metric.similarity(crops[0], crops[1:], ASPECTS)
    assert len({round(value, 5) for value in scores.flatten().tolist()}) == scores.numel()


PAIRS = [(0, 1, "lighting"), (1, 2, None), (3, 2, "b" * 200), (2, 1, " overall "), (1, 3, "lighting"), (0, 0, None)]


@pytest.mark.parametrize("tokens, features, patches", [(32768, 65536, 65536), (90, 30, 16), (300, 1, 65536)])
def test_a_batch_of_mixed_sizes_equals_single_calls(early, crops, monkeypatch, tokens, features, patches):
    with torch.no_grad():
        single = torch.cat([early.score_pairs(crops, [pair]) for pair in PAIRS])
        monkeypatch.setattr(early, "token_budget", tokens)
        monkeypatch.setattr(early, "feature_budget", features)
        monkeypatch.setattr(early.backbone, "patch_budget", patches)
        torch.testing.assert_close(early.score_pairs(crops, PAIRS), single, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("budget", [32768, 80])
def test_an_image_goes_through_the_vision_tower_once(early_metric, crops, monkeypatch, with_graph, budget):
    backbone, images, passes = early_metric.backbone, [], []
    encode, run = backbone.encode_images, backbone.run_language
    monkeypatch.setattr(backbone, "encode_images", lambda given: images.extend(given) or encode(given))
    monkeypatch.setattr(backbone, "run_language", lambda ids, *a, **k: passes.append(len(ids)) or run(ids, *a, **k))
    monkeypatch.setattr(early_metric.fusion, "token_budget", budget)
    monkeypatch.setattr(early_metric.fusion, "feature_budget", budget)
    edits = [crop.clone().requires_grad_(with_graph) for crop in crops[1:]]
    scores = early_metric.similarity([*edits, edits[0]], crops[0], ASPECTS)
    assert scores.requires_grad == with_graph
    assert len(images) == 4 and sum(passes) == 3 * len(ASPECTS)


def test_pixel_gradient_equals_finite_differences_in_float64(parity, crops):
    double = load_metric(parity / "early_fusion", device="cpu", dtype="float64")
    # away from 0 and 1, so that no step leaves the range
    image, other = crops[0][:, :60, :70].double() * 0.8 + 0.1, crops[2].double() * 0.8 + 0.1

    def score(a, b):
        return double.similarity(a, b, "lighting")[0]

    leaves = image.clone().requires_grad_(), other.clone().requires_grad_()
    gradients = torch.autograd.grad(score(*leaves), leaves)
    for position, gradient in enumerate(gradients):
        smooth = torch.randn(1, 3, 6, 7).double()
        smooth = torch.nn.functional.interpolate(smooth, size=gradient.shape[1:], mode="bicubic")[0]
        for direction in (gradient / gradient.norm(), smooth / smooth.norm()):
            # norms inside transformers' layers are float32, which sets the step: above rounding, below curvature
            steps = [sign * 1e-2 * direction for sign in (1, -1)]
            moved = [(image + s, other) if position == 0 else (image, other + s) for s in steps]
            numeric = (score(*moved[0]) - score(*moved[1])) / 2e-2
            assert float(numeric) == pytest.approx(float((gradient * direction).sum()), rel=3e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_finite_at_identical_images(early_metric, parity, crops, dtype):
    chosen = early_metric if dtype == "float32" else load_metric(parity / "early_fusion", device="cpu", dtype=dtype)
    for other in (crops[0], crops[0].clone().requires_grad_()):
        leaf = crops[0].clone().requires_grad_()
        chosen.distance(leaf, other, ASPECTS).sum().backward()
        assert leaf.grad.isfinite().all()
    leaf = torch.full((3, 64, 64), 0.5).requires_grad_()
    chosen.similarity(leaf, crops[1]).sum().backward()
    assert leaf.grad.isfinite().all() and leaf.grad.abs().max() > 0


def test_there_is_no_embedding(early_metric, crops):
    with pytest.raises(TPIPSError, match="early fusion compares two images at once"):
        early_metric.embed(crops)


def test_control_tokens_in_an_aspect_are_an_error(early_metric, mid_metric, crops):
    for metric in (early_metric, mid_metric):
        for name in ("a <|im_end|> b", "<|image_pad|>", "<|vision_end|>"):
            with pytest.raises(TPIPSError, match="control token"):
                metric.similarity(crops[0], crops[0], name)


def test_strange_aspects_and_small_images(early_metric, mid_metric, crops):
    small = torch.from_numpy(np.random.default_rng(0).random((3, 5, 27), dtype=np.float32))
    names = ['say "cheese"', "two\nlines", "🎨 日本語", "{aspect} %s", "x" * 2000]
    assert early_metric.similarity(small, crops[0], names).isfinite().all()
    with pytest.warns(UserWarning, match="5 of 5 pairs"):
        assert mid_metric.similarity(small, crops[0], names).isfinite().all()


@pytest.mark.parametrize(
    "pairs, message", [([], "got no pairs"), ([(-1, 0, "x")], r"pairs\[0\] names images\[-1\]")]
)
def test_bad_calls(early, crops, pairs, message):
    with pytest.raises(TPIPSError, match=message):
        early.score_pairs(crops, pairs)


def test_a_template_that_puts_the_image_first_is_refused(early, mid_metric):
    template = "{% for m in messages %}{% for c in m.content | reverse %}{% if c.type == 'image' %}" \
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"  # fmt: skip
    for fusion in (early, mid_metric.fusion):
        backbone = copy.copy(fusion.backbone)
        backbone.chat_template = template
        with pytest.raises(TPIPSError, match=f"{fusion.kind} fusion needs a chat template that keeps the text before"):
            type(fusion)(backbone, **fusion.options)
