"""LoRA adapters in our own layout: apart or folded in, as the caller asks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError

FOLDERS = {"late": "embedding", "mid": "activation_dist", "early": "early_fusion"}
pytestmark = pytest.mark.filterwarnings("ignore:.*pairs have images of different sizes")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def apart(parity, tmp_path) -> Path:
    load_metric(parity / "embedding", device="cpu", merge_lora=False).save_pretrained(tmp_path / "m", merge_lora=False)
    return tmp_path / "m"


@pytest.mark.parametrize("kind", FOLDERS)
def test_kept_apart_and_loaded_both_ways(parity, crops, tmp_path, kind):
    metric = load_metric(parity / FOLDERS[kind], device="cpu", merge_lora=False)
    expected = metric.similarity(crops[:2], crops[2:], ["lighting", None])
    metric.save_pretrained(tmp_path / "m", merge_lora=False)
    files = {path: digest(path) for path in (tmp_path / "m").rglob("*.safetensors")}
    assert len(files) == 2
    for merge in (True, False):
        loaded = load_metric(tmp_path / "m", device="cpu", merge_lora=merge)
        assert any("lora_" in name for name in loaded.fusion.state_dict()) is not merge
        assert not any(parameter.requires_grad for parameter in loaded.fusion.parameters())
        found = loaded.similarity(crops[:2], crops[2:], ["lighting", None])
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    # folding changes the mapped weights in place: the copies in memory, never the files
    assert files == {path: digest(path) for path in files}


def test_folding_leaves_the_released_file_alone(parity, metric):
    path = parity / "embedding" / "model.pt"
    before = digest(path)
    folded = load_metric(parity / "embedding", device="cpu")
    stored = torch.load(path, map_location="cpu", weights_only=True)
    name = "backbone.model.language_model.base_model.model.layers.0.self_attn.q_proj.base_layer.weight"
    changed = folded.backbone.model.language_model.layers[0].self_attn.q_proj.weight
    assert (changed - stored[name]).abs().max() > 1e-4
    assert digest(path) == before


def test_peft_reads_the_folder(apart, parity, crops):
    from peft import PeftModel

    metric = load_metric(parity / "embedding", device="cpu", merge_lora=False)
    expected = metric.embed(crops[:1], "lighting")
    plain = load_metric(apart, device="cpu", merge_lora=False)
    model = type(plain.backbone.model)(plain.backbone.config)
    model.load_state_dict(load_file(apart / "model.safetensors"))
    plain.backbone.model = PeftModel.from_pretrained(model, str(apart / "adapter")).eval().base_model.model
    torch.testing.assert_close(plain.embed(crops[:1], "lighting"), expected, atol=1e-6, rtol=0)


def test_saving_folded_over_apart_leaves_no_adapters(apart, parity, crops):
    metric = load_metric(parity / "embedding", device="cpu", merge_lora=False)
    metric.save_pretrained(apart)
    assert not (apart / "adapter").exists() and "adapter" not in json.loads((apart / "tpips_config.json").read_text())
    found = load_metric(apart, device="cpu").embed(crops[:1], "lighting")
    torch.testing.assert_close(found, metric.embed(crops[:1], "lighting"), atol=1e-6, rtol=0)


def test_stored_in_bfloat16_the_adapters_stay_exact(parity, tmp_path):
    metric = load_metric(parity / "embedding", device="cpu", merge_lora=False)
    metric.save_pretrained(tmp_path, dtype="bfloat16", merge_lora=False)
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert {value.dtype for value in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values()} == {
        torch.float32
    }


def test_without_adapters_nothing_can_be_kept_apart(metric, tmp_path):
    with pytest.raises(TPIPSError, match="No adapters are apart"):
        metric.save_pretrained(tmp_path / "m", merge_lora=False)
    assert not (tmp_path / "m" / "tpips_config.json").exists()


def change_config(**fields):
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def change_weights(change):
    def apply(folder: Path) -> None:
        weights = load_file(folder / "adapter_model.safetensors")
        save_file(change(dict(weights)), folder / "adapter_model.safetensors")

    return apply


FIRST = "base_model.model.language_model.layers.0.mlp.up_proj.lora_{}.weight"


def without(*names):
    return change_weights(lambda weights: {name: value for name, value in weights.items() if name not in names})


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (change_config(use_dora=True), "use_dora True is not supported"),
        (change_config(peft_type="LOHA"), "peft_type 'LOHA' is not supported"),
        (change_config(r="4"), "it is damaged"),
        (change_config(r=True), "it is damaged"),
        (change_config(lora_alpha=float("nan")), "lora_alpha must be a finite number above 0, got nan"),
        (change_config(r=8), "config.json says lora_r=8"),
        (change_config(target_modules=["language_model.layers.0.mlp.up_proj"]), "has adapters that"),
        (without(FIRST.format("A")), "only one half of the adapters of language_model.layers.0.mlp.up_proj"),
        (without(FIRST.format("A"), FIRST.format("B")), "lacks the adapters of language_model.layers.0.mlp.up_proj"),
        (
            change_weights(lambda w: {n: v * 0 if "lora_B" in n else v for n, v in w.items()}),
            "every lora_B is zero",
        ),
        (
            change_weights(lambda w: {n.replace("layers.0", "layers.9"): v for n, v in w.items()}),
            "lacks the adapters of",
        ),
        (change_weights(lambda w: w | {"x.weight": torch.ones(1)}), "which is no LoRA weight"),
    ],
)
@pytest.mark.parametrize("merge", [True, False])
def test_damaged_adapters_are_an_error(apart, damage, message, merge):
    damage(apart / "adapter")
    with pytest.raises(TPIPSError, match=message):
        load_metric(apart, device="cpu", merge_lora=merge)


def test_adapters_of_two_kinds_cannot_be_saved_apart(parity, tmp_path):
    metric = load_metric(parity / "embedding", device="cpu", merge_lora=False)
    layer = metric.backbone.model.language_model.layers[0].mlp.up_proj
    layer.scaling["default"] = 7.0
    with pytest.raises(TPIPSError, match="different"):
        metric.save_pretrained(tmp_path / "m", merge_lora=False)
