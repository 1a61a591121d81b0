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


def all_scores(metric, parity, cases) -> torch.Tensor:
    names = sorted({case[side] for case in cases for side in "ab"})
    images = [Image.open(parity / name) for name in names]
    pairs = [(names.index(case["a"]), names.index(case["b"]), case["factor"]) for case in cases]
    return metric.similarity_pairs(images, images, pairs)


def test_every_case_matches_in_float32(metric, parity, cases):
    assert len(cases) >= 10
    for case in cases:
        score = metric.similarity(Image.open(parity / case["a"]), Image.open(parity / case["b"]), case["factor"])
        assert score.item() == pytest.approx(case["score"], abs=TOLERANCE), case


def test_all_cases_in_one_call_match(metric, parity, cases):
    expected = torch.tensor([case["score"] for case in cases])
    torch.testing.assert_close(all_scores(metric, parity, cases), expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_within_the_stated_bound(parity, cases):
    half = load_metric(parity / "embedding", device="cpu", dtype="bfloat16")
    scores = all_scores(half, parity, cases)
    assert half.dtype == torch.bfloat16 and scores.dtype == torch.float32
    assert (scores - torch.tensor([case["score"] for case in cases])).abs().max() < BF16_BOUND


def test_unmerged_adapters_give_the_same_scores(metric, parity, cases):
    apart = load_metric(parity / "embedding", device="cpu", merge_lora=False)
    assert any("lora_A" in name for name, _ in apart.fusion.named_parameters())
    expected = all_scores(metric, parity, cases)
    # measured: 7e-7
    torch.testing.assert_close(all_scores(apart, parity, cases), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype, bound", [(None, 1e-6), ("bfloat16", 0.02)])
@pytest.mark.parametrize("merged", [True, False])
def test_saved_and_loaded_again(metric, parity, cases, tmp_path: Path, dtype, bound, merged):
    first = load_metric(parity / "embedding", device="cpu", merge_lora=merged)
    first.save_pretrained(tmp_path / "own", dtype=dtype)
    again = load_metric(tmp_path / "own", device="cpu")
    expected = all_scores(metric, parity, cases)
    torch.testing.assert_close(all_scores(again, parity, cases), expected, atol=bound, rtol=0)
    assert again.backbone.settings == first.backbone.settings


@pytest.mark.parametrize("kind", ["early_fusion", "activation_dist"])
def test_other_fusions_are_refused_by_name(parity, kind):
    with pytest.raises(TPIPSError, match=f"{kind}.*not implemented in this version"):
        load_metric(parity / kind, device="cpu")
