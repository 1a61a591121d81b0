"""The released package's scores of all three fusions, and the bounds that are stated for bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tpips_reward.checkpoints import load_metric
from tpips_reward.metric import Metric

TOLERANCE = 1e-4
# Largest differences from float32 that bfloat16 towers gave on these six random layers: 0.0112, 0.0018 and 0.0064. The
# bounds leave a factor of two.
BF16_BOUNDS = {"embedding": 0.022, "activation_dist": 0.0036, "early_fusion": 0.013}


@pytest.fixture(scope="module", params=list(BF16_BOUNDS))
def model(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(model, parity) -> Metric:
    return load_metric(parity / model, device="cpu")


@pytest.fixture(scope="module")
def own_cases(model, cases) -> list[dict[str, Any]]:
    return [case for case in cases if case["model"] == model]


@pytest.fixture(scope="module")
def expected(own_cases) -> Tensor:
    return torch.tensor([case["score"] for case in own_cases])


@pytest.fixture(scope="module")
def score(own_cases, parity):
    """Scores of all cases in one call."""
    names = sorted({case[side] for case in own_cases for side in "ab"})
    images = [Image.open(parity / name) for name in names]
    pairs = [(names.index(case["a"]), names.index(case["b"]), case["factor"]) for case in own_cases]
    return lambda metric: metric.similarity_pairs(images, images, pairs)


def test_every_stored_case_belongs_to_a_fusion_that_is_tested(cases):
    assert {case["model"] for case in cases} == set(BF16_BOUNDS)


def test_every_case_matches_in_float32(whole, parity, own_cases):
    assert len(own_cases) >= 10
    for case in own_cases:
        score = whole.similarity(Image.open(parity / case["a"]), Image.open(parity / case["b"]), case["factor"])
        assert score.item() == pytest.approx(case["score"], abs=TOLERANCE), case


def test_all_cases_in_one_call_match(whole, score, expected):
    torch.testing.assert_close(score(whole), expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_within_the_stated_bound(model, parity, score, expected):
    half = load_metric(parity / model, device="cpu", dtype="bfloat16")
    scores = score(half)
    assert half.dtype == torch.bfloat16 and scores.dtype == torch.float32
    assert (scores - expected).abs().max() < BF16_BOUNDS[model]


def test_float64_matches_and_answers_in_float64(model, parity, score, expected):
    scores = score(load_metric(parity / model, device="cpu", dtype="float64"))
    torch.testing.assert_close(scores, expected.double(), atol=1e-5, rtol=0)


def test_unmerged_adapters_give_the_same_scores(model, whole, parity, score):
    apart = load_metric(parity / model, device="cpu", merge_lora=False)
    assert any("lora_A" in name for name, _ in apart.fusion.named_parameters())
    # measured: 7e-7
    torch.testing.assert_close(score(apart), score(whole), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype, bound", [(None, 1e-6), ("bfloat16", 0.02)])
@pytest.mark.parametrize("merged", [True, False])
def test_saved_and_loaded_again(model, whole, parity, score, tmp_path: Path, dtype, bound, merged):
    first = load_metric(parity / model, device="cpu", merge_lora=merged)
    first.save_pretrained(tmp_path / "own", dtype=dtype)
    again = load_metric(tmp_path / "own", device="cpu")
    torch.testing.assert_close(score(again), score(whole), atol=bound, rtol=0)
    assert again.fusion.kind == first.fusion.kind and again.fusion.options == first.fusion.options
    assert again.range == first.range and again.backbone.settings == first.backbone.settings
