"""The released package's scores, and the bounds that are stated for bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError

TOLERANCE = 1e-4
# Measured on these fixtures: 0.011 at most. Six random layers; the bound leaves a factor of two.
BF16_BOUND = 0.022


def scores_of(metric, parity, cases):
    return [
        metric.similarity(Image.open(parity / case["a"]), Image.open(parity / case["b"]), case["factor"]).item()
        for case in cases
    ]


def test_every_case_matches_in_float32(metric, parity, cases):
    assert len(cases) >= 10
    for case, score in zip(cases, scores_of(metric, parity, cases), strict=True):
        assert score == pytest.approx(case["score"], abs=TOLERANCE), case


def test_all_cases_in_one_call_match(metric, parity, cases):
    names = sorted({case[side] for case in cases for side in "ab"})
    images = [Image.open(parity / name) for name in names]
    pairs = [(names.index(case["a"]), names.index(case["b"]), case["factor"]) for case in cases]
    scores = metric.similarity_pairs(images, images, pairs)
    torch.testing.assert_close(scores, torch.tensor([case["score"] for case in cases]), atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_within_the_stated_bound(parity, cases):
    half = load_metric(parity / "embedding", device="cpu", dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    scores = half.similarity(Image.open(parity / cases[0]["a"]), Image.open(parity / cases[0]["b"]))
    assert scores.dtype == torch.float32
    worst = max(abs(s - case["score"]) for s, case in zip(scores_of(half, parity, cases), cases, strict=True))
    assert worst < BF16_BOUND


def test_unmerged_adapters_give_the_same_scores(parity, cases):
    apart = load_metric(parity / "embedding", device="cpu", merge_lora=False)
    assert any("lora_A" in name for name, _ in apart.fusion.named_parameters())
    for case, score in zip(cases, scores_of(apart, parity, cases), strict=True):
        assert score == pytest.approx(case["score"], abs=1e-5), case


@pytest.mark.parametrize("dtype, bound", [(None, 1e-6), ("bfloat16", 0.02)])
@pytest.mark.parametrize("merged", [True, False])
def test_saved_and_loaded_again(parity, cases, tmp_path: Path, dtype, bound, merged):
    first = load_metric(parity / "embedding", device="cpu", merge_lora=merged)
    first.save_pretrained(tmp_path / "own", dtype=dtype)
    again = load_metric(tmp_path / "own", device="cpu")
    before, after = scores_of(first, parity, cases), scores_of(again, parity, cases)
    assert max(abs(x - y) for x, y in zip(before, after, strict=True)) < bound
    assert again.backbone.settings == first.backbone.settings


@pytest.mark.parametrize("kind", ["early_fusion", "activation_dist"])
def test_other_fusions_are_refused_by_name(parity, kind):
    with pytest.raises(TPIPSError, match=f"{kind}.*not implemented in this version"):
        load_metric(parity / kind, device="cpu")
