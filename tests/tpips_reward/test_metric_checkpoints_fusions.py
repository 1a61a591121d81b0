"""Checkpoints of mid and early fusion: their own parameters and options are whole, or there is no score."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError

PREFIXES = {
    "activation_dist": (
        "extractor.backbone.base_model.model.model.language_model.",
        "extractor.backbone.base_model.model.model.visual.",
    ),
    "early_fusion": ("backbone.language_model.base_model.model.", "backbone.visual."),
}


@pytest.fixture
def released(parity, tmp_path):
    """Copies of a released-layout checkpoint that a test may damage."""
    shutil.copytree(parity / "backbone", tmp_path / "backbone")

    def copy(model: str) -> Path:
        return Path(shutil.copytree(parity / model, tmp_path / model))

    return copy


def change_state(folder: Path, change) -> None:
    state = torch.load(folder / "model.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "model.pt")


def change_config(folder: Path, **fields) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["model"].update(fields)
    (folder / "config.json").write_text(json.dumps(content))


MLP = "head.layer_heads.2.channel_mlp"
DAMAGE = [
    ("activation_dist", lambda s: s.pop("head.layer_logits"), "lacks 1 weights .head.layer_logits"),
    ("activation_dist", lambda s: s.pop(f"{MLP}.2.bias"), "lacks 1 weights .head.layer_heads.2.channel_mlp.2.bias"),
    ("activation_dist", lambda s: [s.pop(k) for k in list(s) if k.startswith("head.")], "lacks 17 weights .head"),
    ("activation_dist", lambda s: s.update({f"{MLP}.0.weight": torch.zeros(8, 64)}),
     r"channel_mlp.0.weight has shape \(8, 64\), mid fusion needs \(16, 64\)"),
    ("activation_dist", lambda s: s.update({"head.layer_logits": torch.zeros(3)}), r"layer_logits has shape \(3,\)"),
    ("activation_dist", lambda s: s["head.layer_logits"].fill_(float("nan")), "layer_logits holds NaN"),
    ("activation_dist", lambda s: s.update({"head.extra": torch.zeros(1)}), "that the model does not .head.extra"),
    ("activation_dist", lambda s: s.update({"register_embed.weight": torch.zeros(1, 64)}), "1 unexpected weights"),
    ("activation_dist", lambda s: [v.zero_() for k, v in s.items() if "lora_B" in k], "every lora_B is zero"),
    ("activation_dist", lambda s: [s.pop(k) for k in list(s) if "o_proj.lora" in k], "lacks the adapters of .*o_proj"),
    ("early_fusion", lambda s: s.pop("register_embed.weight"), "lacks 1 weights .register_embed.weight"),
    ("early_fusion", lambda s: s.update({"register_embed.weight": torch.zeros(2, 64)}),
     r"register_embed.weight has shape \(2, 64\), early fusion needs \(1, 64\)"),
    ("early_fusion", lambda s: s.update({"register_embed.bias": torch.zeros(1)}), "that the model does not"),
    ("early_fusion", lambda s: [s.pop(k) for k in list(s) if "down_proj.lora" in k], "lacks the adapters of .*down_proj"),
]  # fmt: skip


@pytest.mark.parametrize("model, change, message", DAMAGE)
def test_a_damaged_state_dict_is_an_error(released, model, change, message):
    folder = released(model)
    change_state(folder, change)
    with pytest.raises(TPIPSError, match=message):
        load_metric(folder, device="cpu")


@pytest.mark.parametrize(
    "model, fields, message",
    [
        ("activation_dist", {"type": "early_fusion"}, "unexpected weights"),
        ("early_fusion", {"type": "activation_dist"}, "unexpected weights"),
        ("activation_dist", {"activation_dist_num_probes": 5}, r"lacks 4 weights .*layer_heads.4"),
        ("activation_dist", {"activation_dist_num_probes": 20}, "20 probe layers do not fit a backbone of 6 layers"),
        ("activation_dist", {"activation_dist_layers": [0, 2, 4, 6]}, r"probe layers \[0\] do not exist"),
        ("activation_dist", {"activation_dist_layers": [1, 2]}, "that the model does not .head.layer_heads.2"),
        ("activation_dist", {"activation_dist_layers": "all"}, "list of whole numbers from 1 to 6, got 'all'"),
        ("activation_dist", {"activation_dist_text_pool": "max"}, "text_pool 'max' is unknown; known are mean, last"),
        ("activation_dist", {"activation_dist_text_cond": False}, "activation_dist_text_cond False is not supported"),
        ("activation_dist", {"activation_dist_tuning": "frozen"}, "activation_dist_tuning 'frozen' is not supported"),
        ("activation_dist", {"activation_dist_norm": "l1"}, "the option activation_dist_norm is unknown"),
        ("activation_dist", {"instruction": "Do this."}, "instruction 'Do this.'"),
        ("early_fusion", {"similarity_pooling": "mean"}, "similarity_pooling 'mean' is not supported"),
        ("early_fusion", {"lora_r": 64}, "config.json says lora_r=64"),
    ],
)
def test_a_config_that_does_not_fit_is_an_error(released, model, fields, message):
    folder = released(model)
    change_config(folder, **fields)
    with pytest.raises(TPIPSError, match=message):
        load_metric(folder, device="cpu")


def test_explicit_layers_and_the_last_text_token(released, mid_metric, crops):
    folder = released("activation_dist")
    change_config(folder, activation_dist_layers=[1, 3, 4, 6], activation_dist_num_probes=20)
    same = load_metric(folder, device="cpu")
    expected = mid_metric.similarity(crops[0], crops[0] * 0.5)
    torch.testing.assert_close(same.similarity(crops[0], crops[0] * 0.5), expected, atol=1e-7, rtol=0)
    change_config(folder, activation_dist_layers=[2, 3, 5, 6], activation_dist_text_pool="last")
    other = load_metric(folder, device="cpu")
    assert other.fusion.options == {"probe_layers": [2, 3, 5, 6], "text_pool": "last"}
    assert (other.similarity(crops[0], crops[0] * 0.5) - expected).abs() > 1e-4


def test_a_head_trained_on_a_frozen_backbone_has_no_adapters(released):
    folder = released("activation_dist")

    def remove(state):
        for name in list(state):
            value = state.pop(name)
            if "lora_" not in name:
                state[name.replace(".base_layer.", ".")] = value

    change_state(folder, remove)
    with pytest.raises(TPIPSError, match="no LoRA adapters"):
        load_metric(folder, device="cpu")
    change_config(folder, activation_dist_tuning="channel")
    assert load_metric(folder, device="cpu").fusion.kind == "mid"


@pytest.mark.parametrize("model", list(PREFIXES))
def test_a_partial_file_takes_the_rest_from_the_backbone(released, model, mid_metric, early_metric, crops):
    folder = released(model)
    language, visual = PREFIXES[model]
    base = {}

    def split(state):
        for name in [name for name in state if name.startswith((language, visual)) and "lora_" not in name]:
            plain = name.replace(language, "model.language_model.").replace(visual, "model.visual.")
            base[plain.replace(".base_layer.", ".")] = state.pop(name)

    change_state(folder, split)
    save_file(base, folder.parent / "backbone" / "model.safetensors")
    whole = mid_metric if model == "activation_dist" else early_metric
    partial = load_metric(folder, device="cpu")
    pair = crops[0], crops[0].flip(-1)
    torch.testing.assert_close(partial.similarity(*pair), whole.similarity(*pair), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["mid", "early"])
def test_own_layout_keeps_own_parameters_and_options(kind, mid_metric, early_metric, tmp_path):
    metric = {"mid": mid_metric, "early": early_metric}[kind]
    metric.save_pretrained(tmp_path / "own", dtype="bfloat16")
    stored = load_file(tmp_path / "own" / "model.safetensors")
    own = metric.fusion.own_state()
    assert own and all(torch.equal(stored[name], value) for name, value in own.items())
    assert {value.dtype for name, value in stored.items() if name not in own} == {torch.bfloat16}
    state = torch.get_rng_state()
    again = load_metric(tmp_path / "own", device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert again.fusion.options == metric.fusion.options and again.change_scale == metric.change_scale
    assert not any(parameter.requires_grad for parameter in again.fusion.parameters())
    assert "options" not in again.info


@pytest.mark.parametrize("kind", ["mid", "early"])
def test_damaged_files_of_our_own(kind, mid_metric, early_metric, tmp_path):
    metric = {"mid": mid_metric, "early": early_metric}[kind]
    metric.save_pretrained(tmp_path)
    weights, name = load_file(tmp_path / "model.safetensors"), next(iter(metric.fusion.own_state()))
    save_file({key: value for key, value in weights.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(TPIPSError, match=f"lacks 1 weights .{name}"):
        load_metric(tmp_path, device="cpu")
    save_file({**weights, "something": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(TPIPSError, match="that the model does not .something"):
        load_metric(tmp_path, device="cpu")
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "tpips_config.json").read_text())
    (tmp_path / "tpips_config.json").write_text(json.dumps({**config, "options": {"depth": 3}}))
    with pytest.raises(TPIPSError, match=f"options .*depth.* which {kind} fusion does not take"):
        load_metric(tmp_path, device="cpu")
    (tmp_path / "tpips_config.json").write_text(json.dumps({**config, "fusion": "late"}))
    with pytest.raises(TPIPSError):
        load_metric(tmp_path, device="cpu")
