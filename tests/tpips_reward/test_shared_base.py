"""A metric that stores only what differs from a built-in one: small files, the same scores, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError
from tpips_reward.fusion import EarlyFusion
from tpips_reward.metric import Metric

CHANGED = "language_model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def changed() -> Metric:
    """builtin:late's backbone with one changed layer, as early fusion."""
    backbone = load_metric("builtin:late", device="cpu").backbone
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = backbone.model.get_parameter(CHANGED)
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator)).copy_(weight.bfloat16().float())
        fusion = EarlyFusion(backbone)
        fusion.register_embed.weight.copy_(torch.randn(1, backbone.hidden_size, generator=generator))
    return Metric(fusion, change_scale=0.2)


def test_only_what_differs_is_stored_and_the_scores_are_the_same(changed: Metric, tmp_path: Path) -> None:
    changed.save_pretrained(tmp_path, dtype="bfloat16", base="builtin:late")
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "tpips_config.json"}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {CHANGED, "register_embed.weight"}
    loaded = load_metric(tmp_path, device="cpu")
    images = list(torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)))
    expected = changed.similarity(images[0], images[1], ["size", "object color"])
    assert torch.equal(loaded.similarity(images[0], images[1], ["size", "object color"]), expected)
    assert loaded.change_scale == 0.2 and loaded.fusion.kind == "early"
    loaded.save_pretrained(tmp_path / "whole", dtype="bfloat16")  # saved without a base, it stands alone
    whole = load_metric(tmp_path / "whole", device="cpu")
    assert torch.equal(whole.similarity(images[0], images[1], ["size", "object color"]), expected)


def test_a_base_must_be_built_in_and_fit(changed: Metric, metric: Metric, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="must be a built-in metric"):
        changed.save_pretrained(tmp_path, base=str(tmp_path))
    with pytest.raises(TPIPSError, match="another architecture"):
        metric.save_pretrained(tmp_path / "other", base="builtin:late")
    changed.save_pretrained(tmp_path, base="builtin:late")
    for base, message in (("/somewhere", "must be a built-in metric"), ("builtin:none", "no metric 'builtin:none'")):
        config = json.loads((tmp_path / "tpips_config.json").read_text()) | {"base": base}
        (tmp_path / "tpips_config.json").write_text(json.dumps(config))
        with pytest.raises(TPIPSError, match=message):
            load_metric(tmp_path, device="cpu")


def test_a_base_has_no_base_itself(changed: Metric, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="has a base itself"):
        changed.save_pretrained(tmp_path, base="builtin:early")
