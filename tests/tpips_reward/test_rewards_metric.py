"""TPIPSReward on a real metric: a tiny random checkpoint in the released layout."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError
from tpips_reward.rewards import TPIPSReward

PARITY = Path(__file__).parents[1] / "data" / "parity"
KEEP, CHANGE = [["background", "lighting"], ["lighting"]], [["color"], None]


@pytest.fixture(scope="module")
def metric():
    return load_metric(PARITY / "embedding", device="cpu")


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, 40, 56, generator=generator) for _ in range(3)]


def test_scores_are_the_formula_on_the_metrics_own_similarities(metric, images):
    out = TPIPSReward("tpips:preserve", metric, gate_threshold=2.0)(images[:2], images[2], KEEP, CHANGE)
    background, lighting, color = metric.similarity(images[0], images[2], ["background", "lighting", "color"])[0]
    gate = (1 - color) / 2
    assert 0 < float(gate) < 1
    other = metric.similarity(images[1], images[2], "lighting")[0]
    expected = torch.stack([(background + lighting) / 2 - (1 - gate), other])
    torch.testing.assert_close(out.scores, expected, atol=1e-5, rtol=0)
    assert out.scores.dtype == torch.float32 and not out.scores.requires_grad
    assert out.per_aspect[0]["target"]["color"] == pytest.approx(float(1 - color), abs=1e-5)


def test_a_copy_scores_zero_with_target_aspects_and_one_without(metric, images):
    for name in ("tpips:preserve", "tpips:edit"):
        scores = TPIPSReward(name, metric)([images[0]], images[0].clone(), "lighting", "color").scores
        torch.testing.assert_close(scores, torch.zeros(1), atol=1e-5, rtol=0)
    plain = TPIPSReward("tpips:preserve", metric)([images[0]], images[0].clone(), "lighting").scores
    torch.testing.assert_close(plain, torch.ones(1), atol=1e-5, rtol=0)


def test_a_batch_scores_as_single_calls_do(metric, images):
    small = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1))
    edits, sources = [images[0], small, images[1]], [images[2], images[2], small]
    keep, change = [["lighting"], ["lighting", "pose"], ["pose"]], [["color"], ["shape"], None]
    reward = TPIPSReward("tpips:preserve", metric)
    together = reward(edits, sources, keep, change).scores
    alone = [reward([e], s, [k], [c]).scores for e, s, k, c in zip(edits, sources, keep, change, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


def test_equal_sources_are_encoded_once(metric, images, monkeypatch):
    seen = []
    original = metric.fusion.score_pairs
    monkeypatch.setattr(metric.fusion, "score_pairs", lambda i, p: (seen.append((len(i), len(p))), original(i, p))[1])
    sources = [images[2], images[2].clone()]
    spec = "tpips:preserve,tpips:target,tpips:edit"
    TPIPSReward(spec, metric)(images[:2], sources, KEEP[:1] * 2, CHANGE[:1] * 2)
    assert seen == [(3, 6)]  # two edits and one source; three aspects each


def test_gradients_reach_the_edits_and_no_weights(metric, images):
    edits = torch.stack(images[:2]).requires_grad_()
    out = TPIPSReward("tpips:edit", metric, gate_threshold=2.0)(edits, images[2], "lighting", "color")
    (gradient,) = torch.autograd.grad(out.scores.sum(), edits)
    assert bool(torch.isfinite(gradient).all()) and all(float(g.abs().max()) > 0 for g in gradient)
    assert not any(parameter.requires_grad for parameter in metric.fusion.parameters())


def test_gradients_are_finite_for_a_copy(metric, images):
    edit = images[0].clone().requires_grad_()
    out = TPIPSReward("tpips:preserve", metric)([edit], images[0], "lighting", "color")
    (gradient,) = torch.autograd.grad(out.scores.sum(), edit)
    assert bool(torch.isfinite(gradient).all())


def test_value_range(metric, images):
    reward = TPIPSReward("tpips:preserve", metric)
    expected = reward(images[:2], images[2], KEEP, CHANGE).scores
    wide = [image * 2 - 1 for image in images]
    scores = TPIPSReward("tpips:preserve", metric, value_range=(-1.0, 1.0))(wide[:2], wide[2], KEEP, CHANGE).scores
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    with pytest.raises(TPIPSError, match="value_range"):
        reward(wide[:2], wide[2], KEEP, CHANGE)


def test_pictures_and_arrays(metric, images):
    arrays = [(image.permute(1, 2, 0).numpy() * 255).round().astype("uint8") for image in images]
    reward = TPIPSReward("tpips:preserve", metric)
    expected = reward(arrays[:2], arrays[2], KEEP, CHANGE).scores
    pictures = [Image.fromarray(array) for array in arrays]
    torch.testing.assert_close(reward(pictures[:2], pictures[2], KEEP, CHANGE).scores, expected, atol=1e-6, rtol=0)
    tensors = [torch.from_numpy(array).permute(2, 0, 1) for array in arrays]
    torch.testing.assert_close(reward(tensors[:2], tensors[2], KEEP, CHANGE).scores, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["images", "references"])
def test_pixels_that_are_not_finite_are_an_error(metric, images, value, where):
    bad = images[0].clone()
    bad[0, 3, 4] = value
    edits, source = ([images[1], bad], images[2]) if where == "images" else (images[1:], bad)
    with pytest.raises(TPIPSError, match=where):
        TPIPSReward("tpips:preserve", metric)(edits, source, KEEP)


def test_a_path_instead_of_an_image(metric, images):
    with pytest.raises(TPIPSError, match="PIL.Image.open"):
        TPIPSReward("tpips:preserve", metric)(["edit.png"], images[0], "lighting")


def test_an_unknown_metric_is_named():
    with pytest.raises(TPIPSError, match="builtin:never"):
        TPIPSReward("tpips:preserve", metric="builtin:never")
