"""Mid fusion: the distance as its formula says, equal grids, sharing, gradients."""

from __future__ import annotations

import copy
import gc
import warnings

import numpy as np
import pytest
import torch

from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError
from tpips_reward.fusion import MidFusion
from tpips_reward.fusion.distance import Activations, DistanceHead, check_layers, spread_layers, token_gap
from tpips_reward.fusion.mid import View, views
from tpips_reward.preprocess import ImageSettings, resize, to_patches
from tpips_reward.rewards import TPIPSReward

ASPECTS = ["lighting", None, "the color of the subject's left ear"]
TOLERANCE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:.*pairs have images of different sizes")


@pytest.fixture(scope="module")
def mid(mid_metric) -> MidFusion:
    return mid_metric.fusion


@pytest.fixture(scope="module")
def alike(photos):
    """Three images of one size."""
    return [
        torch.from_numpy(np.array(photos[f"{name}_1"])).permute(2, 0, 1) / 255 for name in ("cat", "coffee", "rocket")
    ]


def plain_states(mid: MidFusion, image, aspect):
    """Hidden states (L, D) at the probe layers by transformers' own forward, and which tokens are the image's."""
    model = mid.backbone.model
    patches, (rows, columns) = to_patches([image], mid.backbone.settings)[0]
    ids = list(mid.prompts.full(aspect))
    at = ids.index(model.config.image_token_id)
    ids[at : at + 1] = [model.config.image_token_id] * (rows * columns // 4)
    tokens = torch.tensor([ids])
    visual = tokens == model.config.image_token_id
    output = model(
        input_ids=tokens,
        pixel_values=patches,
        image_grid_thw=torch.tensor([[1, rows, columns]]),
        mm_token_type_ids=visual.int(),
        output_hidden_states=True,
    )
    return [output.hidden_states[layer][0] for layer in mid.probe_layers], visual[0]


@pytest.mark.parametrize("text_pool", ["mean", "last"])
def test_equals_the_formula_on_transformers_own_hidden_states(mid, alike, text_pool, monkeypatch):
    monkeypatch.setattr(mid, "text_pool", text_pool)
    state = {name: value.double().numpy() for name, value in mid.own_state().items()}
    shares = np.exp(state["head.layer_logits"]) / np.exp(state["head.layer_logits"]).sum()
    with torch.no_grad():
        (first, visual), (second, _) = (plain_states(mid, image, "lighting") for image in alike[:2])
        score = mid.score_pairs(alike, [(0, 1, "lighting")]).item()
    expected = 0.0
    for layer, (a, b) in enumerate(zip(first, second, strict=True)):
        texts = [s[~visual].mean(0) if text_pool == "mean" else s[~visual][-1] for s in (a, b)]
        text = ((texts[0] + texts[1]) / 2).double().numpy()
        w = {
            key: state[f"head.layer_heads.{layer}.channel_mlp.{key}"]
            for key in ("0.weight", "0.bias", "2.weight", "2.bias")
        }
        inner = torch.nn.functional.gelu(torch.from_numpy(w["0.weight"] @ text + w["0.bias"])).numpy()
        weight = 1 / (1 + np.exp(-(w["2.weight"] @ inner + w["2.bias"])))
        unit = [s[visual].double().numpy() for s in (a, b)]
        unit = [tokens / np.linalg.norm(tokens, axis=1, keepdims=True) for tokens in unit]
        expected -= shares[layer] * ((unit[0] - unit[1]) ** 2 * weight).sum(1).mean()
    assert score == pytest.approx(expected, abs=1e-5) and expected < -0.01


def test_token_gap_written_out():
    first = torch.tensor([[3.0, 0.0], [0.0, 5.0]])
    second = torch.tensor([[2.0, 0.0], [7.0, 0.0]])
    # unit vectors: (1,0)-(1,0) and (0,1)-(1,0): weighted squares 0 and 0.25*1 + 0.5*1
    assert token_gap(first, second, torch.tensor([0.25, 0.5])).item() == pytest.approx(0.75 / 2)


def test_the_head_mixes_layers_by_softmax():
    head = DistanceHead(2, 2).requires_grad_(False)
    head.layer_logits.copy_(torch.tensor([0.0, np.log(3.0)]))
    for layer in head.layer_heads:
        for parameter in layer.parameters():
            parameter.zero_()  # every channel weight is then sigmoid(0) = 1/2
    same, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    text = torch.zeros(2, 2)
    first = Activations(torch.stack([same, same]), text)
    second = Activations(torch.stack([same, other]), text)
    torch.testing.assert_close(head([(first, second), (first, first)]), torch.tensor([0.75 * (1 + 1) / 2, 0.0]))


def test_probe_layers():
    assert spread_layers(4, 6) == [1, 3, 4, 6]
    assert spread_layers(1, 6) == [1]
    assert spread_layers(6, 6) == [1, 2, 3, 4, 5, 6]
    many = spread_layers(20, 36)
    assert len(set(many)) == 20 and many[0] == 1 and many[-1] == 36 and set(np.diff(many)) == {1, 2}
    assert check_layers([6, 1], 6) == [6, 1]


@pytest.mark.parametrize("count", [0, 7, 2.0, "4", True])
def test_probe_counts_that_do_not_fit(count):
    with pytest.raises(TPIPSError, match="do not fit a backbone of 6 layers"):
        spread_layers(count, 6)


@pytest.mark.parametrize(
    "layers, message",
    [
        ([0, 3], r"\[0\] do not exist; this backbone has the layers 1 to 6"),
        ([3, 7], r"\[7\] do not exist"),
        ([-1], r"\[-1\] do not exist"),
        ([2, 2], "name a layer twice"),
        ([], "must be a list of whole numbers"),
        ("12", "must be a list of whole numbers"),
        ([1.0], "must be a list of whole numbers"),
        (3, "must be a list of whole numbers"),
    ],
)
def test_probe_layers_that_do_not_exist(layers, message):
    with pytest.raises(TPIPSError, match=message):
        check_layers(layers, 6)


SETTINGS = ImageSettings(min_pixels=4096)


@pytest.mark.parametrize(
    "shapes, expected",
    [
        ([(64, 64), (66, 62)], (View(0, None), View(1, None))),  # one grid, as they are
        ([(64, 64), (128, 64)], (View(0, None), View(1, (64, 64)))),
        ([(128, 64), (64, 64)], (View(1, None), View(0, (64, 64)))),
        ([(128, 64), (64, 128)], (View(1, None), View(0, (64, 128)))),  # equally large
    ],
)
def test_the_larger_image_is_resized(shapes, expected):
    assert views((0, 1), shapes, SETTINGS) == views((1, 0), shapes, SETTINGS) == expected
    assert views((1, 1), shapes, SETTINGS) == (View(1, None), View(1, None))


@pytest.mark.filterwarnings("error")
def test_pairs_of_different_sizes_warn_and_equal_a_resize_before(mid_metric, crops, alike):
    large, small = crops[1], crops[0]
    assert large.shape[1] * large.shape[2] > small.shape[1] * small.shape[2]
    before = resize(large[None], tuple(small.shape[1:]))[0]
    expected = mid_metric.fusion.score_pairs([before, small], [(0, 1, "lighting")])
    with pytest.warns(UserWarning, match="1 of 2 pairs have images of different sizes") as caught:
        scores = mid_metric.similarity([large, small], [small, small], "lighting")
    assert caught[0].filename == __file__
    torch.testing.assert_close(scores[:1], expected, atol=1e-6, rtol=0)
    mid_metric.similarity(alike[0], alike[1:], ASPECTS)  # no warning


def test_symmetric_and_zero_for_equal_images(mid_metric, crops):
    there = mid_metric.similarity(crops[:2], crops[2:], ASPECTS)
    torch.testing.assert_close(mid_metric.similarity(crops[2:], crops[:2], ASPECTS), there, atol=1e-6, rtol=0)
    assert (there < -0.01).all() and mid_metric.range == (float("-inf"), 0.0)
    assert (mid_metric.similarity(crops, [crop.clone() for crop in crops], ASPECTS) == 0).all()
    torch.testing.assert_close(mid_metric.distance(crops[:2], crops[2:], ASPECTS), -there)


PAIRS = [(0, 1, "lighting"), (1, 2, None), (3, 2, "b" * 200), (2, 1, " overall "), (1, 3, "lighting"), (0, 0, None)]


@pytest.mark.parametrize("tokens, features, patches", [(32768, 65536, 65536), (40, 30, 16), (150, 1, 65536)])
def test_a_batch_of_mixed_sizes_equals_single_calls(mid, crops, monkeypatch, tokens, features, patches):
    with torch.no_grad():
        single = torch.cat([mid.score_pairs(crops, [pair]) for pair in PAIRS])
        monkeypatch.setattr(mid, "token_budget", tokens)
        monkeypatch.setattr(mid, "feature_budget", features)
        monkeypatch.setattr(mid.backbone, "patch_budget", patches)
        torch.testing.assert_close(mid.score_pairs(crops, PAIRS), single, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("budget", [32768, 60])
def test_towers_run_once_for_each_image_and_aspect(mid_metric, alike, monkeypatch, with_graph, budget):
    backbone, images, passes = mid_metric.backbone, [], []
    encode, run = backbone.encode_images, backbone.run_language
    monkeypatch.setattr(backbone, "encode_images", lambda given: images.extend(given) or encode(given))
    monkeypatch.setattr(backbone, "run_language", lambda ids, *a, **k: passes.append(len(ids)) or run(ids, *a, **k))
    monkeypatch.setattr(mid_metric.fusion, "token_budget", budget)
    monkeypatch.setattr(mid_metric.fusion, "feature_budget", budget)
    edits = [image.clone().requires_grad_(with_graph) for image in alike[1:]]
    scores = mid_metric.similarity([*edits, edits[0]], alike[0], ASPECTS)
    assert scores.requires_grad == with_graph
    assert len(images) == 3 and sum(passes) == 3 * len(ASPECTS)


def test_a_resized_copy_is_made_once_for_all_its_pairs(mid_metric, crops, alike, monkeypatch):
    images = []
    encode = mid_metric.backbone.encode_images
    monkeypatch.setattr(mid_metric.backbone, "encode_images", lambda given: images.extend(given) or encode(given))
    mid_metric.similarity(alike[:2], crops[0], ASPECTS)
    assert sorted(tuple(image.shape) for image in images) == [tuple(crops[0].shape)] * 3


def test_nothing_is_held_after_its_last_use(mid, crops, monkeypatch):
    held = []
    from tpips_reward.fusion.sharing import Shared

    class Watched(Shared):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            held.append(self)

    monkeypatch.setattr("tpips_reward.fusion.mid.Shared", Watched)
    monkeypatch.setattr(mid, "token_budget", 60)
    with torch.no_grad():
        mid.score_pairs(crops, PAIRS)
    assert len(held) == 2 and all(len(shared) == 0 for shared in held)


def test_pixel_gradient_equals_finite_differences_in_float64(parity, crops):
    double = load_metric(parity / "activation_dist", device="cpu", dtype="float64")
    # away from 0 and 1, so that no step leaves the range; the other image is larger, so it is the one that is resized
    image, other = crops[0][:, :60, :70].double() * 0.8 + 0.1, crops[2].double() * 0.8 + 0.1

    def score(a, b):
        return double.similarity(a, b, "lighting", differentiable=a.requires_grad or None)[0]

    pixels, larger = image.clone().requires_grad_(), other.clone().requires_grad_()
    gradients = torch.autograd.grad(score(pixels, larger), (pixels, larger))
    for position, gradient in enumerate(gradients):
        smooth = torch.randn(1, 3, 6, 7).double()
        smooth = torch.nn.functional.interpolate(smooth, size=gradient.shape[1:], mode="bicubic")[0]
        for direction in (gradient / gradient.norm(), smooth / smooth.norm()):
            # norms inside transformers' layers are float32, which sets the step: above rounding, below curvature
            steps = [sign * 2e-2 * direction for sign in (1, -1)]
            moved = [(image + s, other) if position == 0 else (image, other + s) for s in steps]
            numeric = (score(*moved[0]) - score(*moved[1])) / 4e-2
            assert float(numeric) == pytest.approx(float((gradient * direction).sum()), rel=3e-3)


def test_gradients_are_finite_at_identical_images(mid_metric, crops):
    for other in (crops[0], crops[0].clone().requires_grad_()):
        leaf = crops[0].clone().requires_grad_()
        mid_metric.distance(leaf, other, ASPECTS).sum().backward()
        assert (leaf.grad.abs() < 1e-6).all()  # the distance has its minimum there
    leaf = torch.full((3, 64, 64), 0.5).requires_grad_()
    mid_metric.distance(leaf, alike_size(crops[1])).sum().backward()
    assert leaf.grad.isfinite().all() and leaf.grad.abs().max() > 0


def alike_size(image):
    return resize(image[None], (64, 64))[0].clamp(0, 1)


def test_the_head_stays_float32_beside_bfloat16_towers(parity, alike):
    metric = load_metric(parity / "activation_dist", device="cpu", dtype="float64")
    assert {value.dtype for value in metric.fusion.own_state().values()} == {torch.float64}
    metric.to(dtype="bfloat16")
    assert metric.dtype == torch.bfloat16
    assert {value.dtype for value in metric.fusion.own_state().values()} == {torch.float32}
    assert metric.similarity(*alike[:2]).dtype == torch.float32
    leaf = alike[0].clone().requires_grad_()
    metric.similarity(leaf, alike[0]).sum().backward()
    assert leaf.grad.isfinite().all()


def test_there_is_no_embedding(mid_metric, crops):
    with pytest.raises(TPIPSError, match="mid fusion compares two images at once"):
        mid_metric.embed(crops)


def test_rewards_rank_by_distance(mid_metric, alike):
    """Minus distances have no lower end; rewards read the range and the scale that the metric states."""
    assert mid_metric.change_scale == pytest.approx(6 * 0.0025)
    source, edit, other = alike[0], (alike[0] * 0.97 + 0.01).clamp(0, 1), alike[1]
    reward = TPIPSReward("tpips:preserve", mid_metric, gate="none")
    same, near, far = reward([source, edit, other], source, preserve=[["lighting"]]).scores.tolist()
    assert same == 0 and 0 > near > far
    reward = TPIPSReward("tpips:edit", mid_metric, gate_threshold=0.01)
    scores = reward([edit, other], source, [["lighting"]], [["subject color"]]).scores
    assert ((scores >= 0) & (scores <= 1)).all()


@pytest.mark.parametrize("kind", ["mid", "early"])
def test_many_calls_leave_nothing_behind(mid_metric, early_metric, kind):
    metric = {"mid": mid_metric, "early": early_metric}[kind]
    images = [torch.full((3, 8, 8), value) for value in (0.2, 0.7)]

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    metric.similarity(*images, ASPECTS[:2])
    before = tensors()
    for _ in range(20):
        metric.similarity(*images, ASPECTS[:2])
    assert tensors() <= before


@pytest.mark.parametrize(
    "pairs, message",
    [([], "got no pairs"), ([(0, 4, None)], r"pairs\[0\] names images\[4\], but there are only 4")],
)
def test_bad_calls(mid, crops, pairs, message):
    with pytest.raises(TPIPSError, match=message):
        mid.score_pairs(crops, pairs)


def test_a_new_fusion_trains_from_its_own_initialisation(mid):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = MidFusion(copy.deepcopy(mid.backbone), num_probes=3, text_pool="last")
    assert fresh.options == {"probe_layers": [1, 4, 6], "text_pool": "last"}
    assert all(value.isfinite().all() for value in fresh.own_state().values())
    with pytest.raises(TPIPSError, match="text_pool 'first' is unknown"):
        MidFusion(mid.backbone, num_probes=3, text_pool="first")
