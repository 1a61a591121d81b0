"""Loading and saving: what is whole loads, what is not is an error before there is a score."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tpips_reward import checkpoints
from tpips_reward.calibration import Calibration, MonotoneMap, probe_answers
from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError

LANGUAGE = "backbone.model.language_model.base_model.model."
ADAPTER = LANGUAGE + "layers.0.self_attn.q_proj"


@pytest.fixture
def released(parity, tmp_path) -> Path:
    """A copy of the released-layout checkpoint that a test may damage."""
    shutil.copytree(parity / "embedding", tmp_path / "embedding")
    shutil.copytree(parity / "backbone", tmp_path / "backbone")
    return tmp_path / "embedding"


@pytest.fixture
def own(metric, tmp_path) -> Path:
    metric.save_pretrained(tmp_path / "own")
    return tmp_path / "own"


def change_state(folder: Path, change) -> None:
    state = torch.load(folder / "model.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "model.pt")


def change_json(path: Path, **fields) -> None:
    content = json.loads(path.read_text())
    content.get("model", content).update(fields)
    path.write_text(json.dumps(content))


def test_loads_frozen_in_eval_mode_without_backbone_weights(released):
    metric = load_metric(released, device="cpu")
    assert not (released.parent / "backbone" / "model.safetensors").exists()
    assert not metric.fusion.training
    assert not any(parameter.requires_grad for parameter in metric.fusion.parameters())
    assert metric.dtype == torch.float32 and not metric.is_calibrated


def test_backbone_is_found_from_the_current_folder(released, tmp_path, monkeypatch):
    os.renames(tmp_path / "backbone", tmp_path / "elsewhere" / "backbone")
    with pytest.raises(TPIPSError, match="backbone 'backbone'.*no folder here or beside"):
        load_metric(released, device="cpu")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_metric(released, device="cpu")


def test_processor_files_of_the_checkpoint_win(released):
    for name in ("processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(released.parent / "backbone" / name, released / name)
    config = json.loads((released / "processor_config.json").read_text())
    config["image_processor"]["size"]["longest_edge"] = 64 * 64
    (released / "processor_config.json").write_text(json.dumps(config))
    assert load_metric(released, device="cpu").backbone.settings.max_pixels == 64 * 64


def split_partial(state: dict, folder: Path) -> None:
    """Move everything but the adapters into a backbone folder, under the names that transformers uses."""
    base = {}
    for name in [name for name in state if "lora_" not in name]:
        plain = name.replace("backbone.model.", "model.").replace("base_model.model.", "").replace(".base_layer.", ".")
        base[plain] = state.pop(name)
    save_file(base, folder / "model.safetensors")


def test_a_partial_file_takes_the_rest_from_the_backbone(released, metric, crops):
    change_state(released, lambda state: split_partial(state, released.parent / "backbone"))
    partial = load_metric(released, device="cpu")
    torch.testing.assert_close(partial.similarity(*crops[:2]), metric.similarity(*crops[:2]), atol=1e-6, rtol=0)
    (released.parent / "backbone" / "model.safetensors").unlink()
    with pytest.raises(TPIPSError, match="weights are missing"):
        load_metric(released, device="cpu")


DAMAGE = {
    "missing base weight": (lambda s: s.pop(LANGUAGE + "layers.3.mlp.up_proj.base_layer.weight"), "adapters of"),
    "missing norm": (lambda s: s.pop(LANGUAGE + "norm.weight"), "lacks 1 weights .language_model.norm.weight"),
    "missing vision weight": (lambda s: s.pop("backbone.model.visual.pos_embed.weight"), "lacks 1 weights .visual"),
    "missing lora_A": (lambda s: s.pop(ADAPTER + ".lora_A.default.weight"), "only one half of the adapters"),
    "missing adapter": (
        lambda s: [s.pop(f"{ADAPTER}.lora_{x}.default.weight") for x in "AB"],
        "lacks the adapters of language_model.layers.0.self_attn.q_proj",
    ),
    "a kind of adapter missing": (
        lambda s: [s.pop(k) for k in list(s) if "gate_proj.lora" in k],
        "lacks the adapters of .*gate_proj.* and 1 more",
    ),
    "last layer missing": (lambda s: [s.pop(k) for k in list(s) if "layers.5." in k], "lacks the adapters"),
    "no adapters": (lambda s: [s.pop(k) for k in list(s) if "lora" in k], "no LoRA adapters"),
    "zero lora_B": (lambda s: [v.zero_() for k, v in s.items() if "lora_B" in k], "every lora_B is zero"),
    "unexpected": (lambda s: s.update({"head.weight": torch.zeros(1)}), "1 unexpected weights .head.weight"),
    "unexpected in tower": (lambda s: s.update({LANGUAGE + "extra": torch.zeros(1)}), "that the model does not"),
    "shape": (lambda s: s.update({LANGUAGE + "norm.weight": torch.zeros(3)}), r"norm.weight has shape \(3,\)"),
    "adapter shape": (
        lambda s: s.update({ADAPTER + ".lora_A.default.weight": torch.zeros(2, 64)}),
        "config.json says lora_r=4",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_dict_is_an_error(released, damage):
    change, message = DAMAGE[damage]
    change_state(released, change)
    with pytest.raises(TPIPSError, match=message):
        load_metric(released, device="cpu")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_give_no_score(released, crops, number):
    change_state(released, lambda state: state[f"{ADAPTER}.lora_B.default.weight"].view(-1)[:1].fill_(number))
    metric, leaf = load_metric(released, device="cpu"), crops[0].clone().requires_grad_()
    calls = {
        r"a\[0\] and b\[0\] in 'lighting'": lambda: metric.similarity(leaf, crops[1:3], ["lighting", None]),
        r"images\[1\] and references\[0\] in overall similarity": lambda: metric.similarity_pairs(
            crops, crops[:1], [(1, 0, None)]
        ),
        r"images\[0\] in 'lighting'": lambda: metric.embed(crops[:2], "lighting"),
        r"images\[0\] and images\[1\] and images\[2\] in 'lighting'": lambda: metric.odd_one_out(crops, [(0, 1, 2, "lighting")]),
    }
    for what, call in calls.items():
        with pytest.raises(TPIPSError, match=f"no finite number for {what}: weights hold NaN"):
            call()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"type": "something"}, "type 'something'; known types are embedding"),
        ({"type": "early_fusion"}, "unexpected weights"),
        ({"backbone_family": "llava"}, "family 'llava'"),
        ({"similarity_pooling": "mean"}, "similarity_pooling 'mean'"),
        ({"instruction": "Do this."}, "instruction 'Do this.'"),
        ({"lora_r": 16}, "config.json says lora_r=16"),
        *[({"lora_alpha": x}, "lora_alpha must be a finite number above 0") for x in (0, -8, True, None, "8", float("nan"))],
        ({"use_lora": False}, 'holds LoRA adapters, which config.json denies .."use_lora": false'),
        ({"full_finetune": True}, 'holds LoRA adapters, which config.json denies .."full_finetune": true'),
        ({"name": "nowhere"}, "backbone 'nowhere'"),
    ],
)
def test_a_config_that_does_not_fit_is_an_error(released, fields, message):
    change_json(released / "config.json", **fields)
    with pytest.raises(TPIPSError, match=message):
        load_metric(released, device="cpu")


def test_a_backbone_of_other_dimensions_is_an_error(released):
    path = released.parent / "backbone" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["intermediate_size"] = 64
    path.write_text(json.dumps(config))
    with pytest.raises(TPIPSError, match="has shape .* the config asks for"):
        load_metric(released, device="cpu")


def test_a_backbone_of_another_family_is_an_error(released):
    change_json(released.parent / "backbone" / "config.json", model_type="llama")
    with pytest.raises(TPIPSError, match="model_type 'llama'"):
        load_metric(released, device="cpu")


def test_a_truncated_file_is_an_error(released):
    path = released / "model.pt"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(TPIPSError, match="model.pt is damaged"):
        load_metric(released, device="cpu")


@pytest.mark.parametrize("kind", ["empty", "text", "pickle", "code", "zeros", "legacy"])
def test_no_error_recommends_to_run_what_a_file_holds(released, kind):
    path = released / "model.pt"
    content = {"empty": b"", "text": b"hello" * 100, "pickle": pickle.dumps({"a": 1}), "zeros": path.read_bytes()}
    if kind == "legacy":
        torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    elif kind == "code":
        torch.save({"a": Evil()}, path)
    else:
        path.write_bytes(content[kind])
    if kind == "zeros":
        path.write_bytes(content[kind][:1000] + bytes(500) + content[kind][1500:])
    with pytest.raises(TPIPSError) as caught:
        load_metric(released, device="cpu")
    remedy = "save it again with torch.save." if kind == "legacy" else "fetch it again."
    assert str(caught.value).startswith(f"{path} is ") and str(caught.value).endswith(remedy)
    assert not any(word in str(caught.value) for word in ("weights_only", "mmap", "Re-running"))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.update({3: torch.zeros(1)}), "no plain state dict of tensors"),
        (lambda s: s.update({LANGUAGE + "norm.weight": torch.zeros(64, device="meta")}), "no numbers for .*norm.weight"),
    ],
)
def test_a_state_dict_that_is_none_is_named(released, change, message):
    change_state(released, change)
    with pytest.raises(TPIPSError, match=f"model.pt .*{message}"):
        load_metric(released, device="cpu")


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil",))


def test_a_pickle_with_code_is_never_run(released, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for write in (lambda: torch.save({"a": Evil()}, released / "model.pt"),
                  lambda: (released / "model.pt").write_bytes(pickle.dumps(Evil()))):  # fmt: skip
        write()
        with pytest.raises(TPIPSError, match="damaged, or holds more than tensors"):
            load_metric(released, device="cpu")
    assert not (tmp_path / "evil").exists()


def test_own_layout_keeps_scores_and_information(metric, crops, tmp_path):
    from tpips_reward.metric import Metric

    Metric(metric.fusion, change_scale=0.125, info={"license": "CC0"}).save_pretrained(tmp_path / "new" / "folder")
    again = load_metric(tmp_path / "new" / "folder", device="cpu")
    assert again.is_calibrated and again.change_scale == 0.125 and again.info["license"] == "CC0"
    torch.testing.assert_close(again.similarity(*crops[:2]), metric.similarity(*crops[:2]), atol=1e-6, rtol=0)
    assert not list((tmp_path / "new" / "folder").glob(".*"))


def test_weights_stored_in_bfloat16_take_half_the_space(metric, own, tmp_path):
    metric.save_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("half", "own")]
    assert sizes[0] < 0.6 * sizes[1]
    assert all(value.dtype == torch.bfloat16 for value in load_file(tmp_path / "half" / "model.safetensors").values())
    assert metric.dtype == torch.float32


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter/weights", "config.json"])
def test_files_of_another_model_are_no_earlier_metric(metric, tmp_path, name, monkeypatch):
    """Saving would have to replace or remove them, or loading would read them. Nothing is written before the refusal."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    monkeypatch.setattr("tpips_reward.checkpoints.save_file", lambda *_, **__: pytest.fail("weights are written"))
    with pytest.raises(TPIPSError, match=f"holds {Path(name).parts[0]}, and no metric was saved there"):
        metric.save_pretrained(tmp_path)
    assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == [path] and path.read_text() == "mine"


@pytest.mark.parametrize("source", ["own", "builtin:late"])
def test_every_file_that_saving_writes_is_another_models_where_no_metric_is(metric, own, tmp_path, source):
    saved = load_metric(source if source != "own" else own, device="cpu")
    saved.save_pretrained(tmp_path / "whole")
    names = {path.name for path in (tmp_path / "whole").iterdir()} - {"tpips_config.json"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    for name in names:
        (tmp_path / f"with {name}").mkdir()
        (tmp_path / f"with {name}" / name).write_text("mine")
        with pytest.raises(TPIPSError, match=f"holds {name}, and no metric was saved there"):
            saved.save_pretrained(tmp_path / f"with {name}")
        assert [path.read_text() for path in (tmp_path / f"with {name}").iterdir()] == ["mine"]


def test_a_folder_with_other_files_alone_takes_a_metric(metric, tmp_path):
    others = ("README.md", "pytorch_model.bin", "adapter_config.json", "model_index.json", "figures.json")
    for name in others:
        (tmp_path / name).write_text("mine")
    metric.save_pretrained(tmp_path)
    metric.save_pretrained(tmp_path)
    assert {(tmp_path / name).read_text() for name in others} == {"mine"}


def test_what_a_killed_first_save_left_is_our_own(metric, own, crops):
    """The weights have taken their place, the config has not; another one was killed before it had all weights."""
    files = sorted(path.name for path in own.iterdir())
    for name in (".saving-abcdefgh", ".saving-bcdefghi"):
        (own / name).mkdir()
    (own / "tpips_config.json").rename(own / ".saving-abcdefgh" / "tpips_config.json")
    (own / ".saving-bcdefghi" / "model.safetensors").write_bytes(b"half")
    metric.save_pretrained(own)
    assert torch.equal(load_metric(own, device="cpu").similarity(*crops[:2]), metric.similarity(*crops[:2]))
    assert sorted(path.name for path in own.iterdir()) == files


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("last", ["model.safetensors", "tokenizer.json"])
def test_an_interrupted_first_save_leaves_nothing_that_forbids_the_next(metric, tmp_path, monkeypatch, error, last):
    replace = os.replace

    def interrupted(source, target):
        replace(source, target)
        if Path(target) == tmp_path / last:
            raise error

    (tmp_path / "README.md").write_text("mine")
    with monkeypatch.context() as patch, pytest.raises((TPIPSError, KeyboardInterrupt)):
        patch.setattr(os, "replace", interrupted)
        metric.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    metric.save_pretrained(tmp_path)
    assert load_metric(tmp_path, device="cpu")


def test_a_later_save_that_is_interrupted_takes_nothing_away(metric, own, monkeypatch):
    files = sorted(path.name for path in own.iterdir())

    def refuse(source, target):
        if Path(target).name == "tpips_config.json":
            raise OSError(5, "Input/output error")
        os.rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(TPIPSError, match="cannot be saved"):
        patch.setattr(os, "replace", refuse)
        metric.save_pretrained(own)
    assert sorted(path.name for path in own.iterdir()) == files


def test_an_option_of_mid_fusion_denies_no_adapters_of_late(released):
    change_json(released / "config.json", activation_dist_tuning="channel")
    assert load_metric(released, device="cpu").fusion.kind == "late"


def test_saving_over_a_metric_replaces_it(metric, own, crops, tmp_path):
    """Whatever was there: what loads is the new metric, and what is no part of a metric stays."""
    before = metric.similarity(*crops[:2], ["lighting", None])
    files = sorted(path.name for path in own.iterdir())
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-00001-of-00001.safetensors"}}))
    weights = {name: value * 0.5 for name, value in load_file(own / "model.safetensors").items()}
    save_file(weights, own / "model-00001-of-00001.safetensors")
    settings = json.loads((own / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] = 64 * 64
    (own / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    (own / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (own / "additional_chat_templates").mkdir()
    Calibration(MonotoneMap((0.0, 1.0), (0.5, 1.0)), probe=tuple(probe_answers(metric))).save(own / "tpips_calibration.json")
    (own / "adapter").mkdir()
    (own / "README.md").write_text("mine")
    changed = load_metric(own, device="cpu")
    assert (changed.similarity(*crops[:2], ["lighting", None]) - before).abs().max() > 1e-3

    metric.save_pretrained(own)
    again = load_metric(own, device="cpu")
    assert torch.equal(again.similarity(*crops[:2], ["lighting", None]), before)
    assert again.calibration is None and again.backbone.settings == metric.backbone.settings
    assert sorted(path.name for path in own.iterdir()) == sorted([*files, "README.md"])


def test_a_folder_that_cannot_be_written_is_an_error(metric, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TPIPSError, match="cannot be saved"):
        metric.save_pretrained(tmp_path / "file" / "folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"])
def test_a_missing_file_of_our_own_is_an_error(own, name):
    (own / name).unlink()
    with pytest.raises(TPIPSError):
        load_metric(own, device="cpu")


def test_damaged_files_of_our_own(own):
    weights = (own / "model.safetensors").read_bytes()
    (own / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(TPIPSError, match="damaged or truncated"):
        load_metric(own, device="cpu")
    (own / "model.safetensors").write_bytes(weights)
    change_json(own / "tpips_config.json", format=99)
    with pytest.raises(TPIPSError, match="format 99"):
        load_metric(own, device="cpu")
    change_json(own / "tpips_config.json", format=1, fusion="other")
    with pytest.raises(TPIPSError, match="fusion 'other'"):
        load_metric(own, device="cpu")
    (own / "tpips_config.json").write_text("{")
    with pytest.raises(TPIPSError, match="cannot be read as JSON"):
        load_metric(own, device="cpu")


@pytest.mark.parametrize(
    "source, message",
    [
        ("builtin:nothing", "no metric 'builtin:nothing'"),
        ("released:nothing", "known are released:late"),
        ("nothing", "no folder and no Hub id"),
        ("a/b/c", "no folder and no Hub id"),
        ("", "no folder and no Hub id"),
    ],
)
def test_unknown_sources(source, message):
    with pytest.raises(TPIPSError, match=message):
        load_metric(source)


def test_an_empty_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(TPIPSError, match="no TPIPS checkpoint"):
        load_metric(tmp_path)


def test_hub_ids_go_through_the_hub_client(released, monkeypatch):
    """Checkpoint and backbone are asked for with the caller's options, and the backbone without its weights."""
    asked = []

    def snapshot_download(repo, **options):
        asked.append((repo, options))
        return str(released if repo.startswith("sywang/") else released.parent / "backbone")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    change_json(released / "config.json", name="Qwen/some-backbone")
    metric = load_metric("released:late", device="cpu", revision="abc", cache_dir="cache", local_files_only=True)
    assert metric.info == {"source": "released:late", "license": "noncommercial; see the model card"}
    assert "license" not in load_metric(released, device="cpu").info  # a folder's origin is not known
    (first, options), (second, backbone_options) = asked[:2]
    assert first == checkpoints.RELEASED["late"] and second == "Qwen/some-backbone"
    assert options["revision"] == "abc" and options["cache_dir"] == "cache" and options["local_files_only"]
    assert "*.pt" in options["allow_patterns"]
    assert backbone_options["revision"] is None and backbone_options["local_files_only"]
    assert not any("safetensors" in pattern for pattern in backbone_options["allow_patterns"])


def test_an_offline_hub_is_one_clear_error(tmp_path):
    with pytest.raises(TPIPSError, match="'owner/name' could not be had from the Hub"):
        load_metric("owner/name", cache_dir=tmp_path, local_files_only=True)


@pytest.mark.parametrize("device, message", [("cuda:99", "is not there"), ("nonsense", "is unknown")])
def test_devices(parity, device, message):
    with pytest.raises(TPIPSError, match=message):
        load_metric(parity / "embedding", device=device)


@pytest.mark.parametrize("source", [None, 3])
def test_a_source_that_is_no_name_is_an_error(source):
    with pytest.raises(TPIPSError, match="named by a text or a path"):
        load_metric(source)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", "{% if messages %}"),
        ("tpips_config.json", '{"format": 1, "fusion": "late", "change_scale": "abc"}'),
        ("tpips_config.json", '{"format": 1, "fusion": ["late"]}'),
        ("preprocessor_config.json", '{"patch_size": "a"}'),
    ],
)
def test_a_damaged_file_of_our_own_layout_is_an_error(own, name, text):
    for other in own.glob("*processor_config.json"):
        if name == "preprocessor_config.json":
            other.write_text(text)
    (own / name).write_text(text)
    with pytest.raises(TPIPSError):
        load_metric(own, device="cpu")


def test_a_device_without_numbers_is_refused(own):
    with pytest.raises(TPIPSError, match="meta"):
        load_metric(own, device="meta")
