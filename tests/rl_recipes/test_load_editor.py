"""Loading an editor: the class by the pipeline's own name, and clear errors for all else."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from tiny_editors import generators, images, tiny_pipeline

from rl_recipes.editors import Editor, EditorError, attention, load_editor, registry
from rl_recipes.editors.qwen_image_edit import QwenImageEdit
from rl_recipes.editors.qwen_image_edit_plus import QwenImageEditPlus
from rl_recipes.parsing import PRESETS, parse_arguments
from tpips_reward import TPIPSError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipelines")
    for name in ("edit", "plus"):
        tiny_pipeline(plus=name == "plus").save_pretrained(root / name)
    return root


def test_the_pipelines_name_chooses_the_class(folders):
    assert type(load_editor(folders / "edit", device="cpu", resolution=32)) is QwenImageEdit
    assert type(Editor.from_pretrained(str(folders / "plus"), "cpu", torch.float32)) is QwenImageEditPlus


def test_dtype_and_device_reach_every_part(folders):
    editor = load_editor(folders / "edit", device="cpu", dtype="bfloat16")
    for part in ("vae", "transformer", "text_encoder"):
        module = getattr(editor.pipe, part)
        assert module.dtype == torch.bfloat16 and not module.training
    assert load_editor(folders / "edit", device="cpu").dtype == torch.float32


def test_resolution_comes_from_the_caller_then_the_folder_then_the_family(folders):
    assert load_editor(folders / "plus", device="cpu").resolution == 1024
    (folders / "plus" / registry.DEFAULTS_FILE).write_text('{"resolution": 48}')
    try:
        assert load_editor(folders / "plus", device="cpu").resolution == 48
        assert load_editor(folders / "plus", device="cpu", resolution=64).resolution == 64
    finally:
        (folders / "plus" / registry.DEFAULTS_FILE).unlink()


def test_unknown_pipelines_are_refused_with_what_is_supported(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(EditorError, match="StableDiffusionPipeline.*FluxKontextPipeline.*QwenImageEditPlusPipeline"):
        load_editor(tmp_path)


@pytest.mark.parametrize("content, words", [("{", "cannot be read"), ("[]", "no JSON object"), ("{}", "supported are")])
def test_broken_folders_are_named(tmp_path, content, words):
    (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(EditorError, match=words):
        load_editor(tmp_path)


def test_missing_sources_are_named(tmp_path, monkeypatch):
    with pytest.raises(EditorError, match="model_index.json"):
        load_editor(tmp_path)
    with pytest.raises(EditorError, match="no folder"):
        load_editor("./nowhere/at/all")
    with pytest.raises(TPIPSError, match="dtype 'float8' is unknown; use 'float32', 'bfloat16'"):
        load_editor(tmp_path, dtype="float8")

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(EditorError, match="could not be had from the Hub"):
        load_editor("nobody/nothing")


def test_a_resolution_below_one_token_is_refused(folders):
    with pytest.raises(EditorError, match="smallest image"):
        load_editor(folders / "edit", device="cpu", resolution=4)


@pytest.mark.parametrize(
    "source, preset",
    [
        ("Qwen/Qwen-Image-Edit-2511", "qwen_image_edit"),
        ("org/some-editor", "qwen_image_edit"),
        ("black-forest-labs/FLUX.1-Kontext-dev", "flux_kontext"),
        ("black-forest-labs/FLUX.2-dev", "flux_kontext"),
        ("black-forest-labs/FLUX.2-klein-4B", "flux2_klein"),
    ],
)
def test_the_preset_goes_by_the_name_on_the_hub(source, preset):
    args = parse_arguments(["--editor", source])
    expected = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())
    found = args.to_dict()
    assert {name: found[name] for name in expected if name in found}.items() <= expected.items() and found["resolution"] == 512


def test_the_preset_goes_by_the_class_in_a_folder(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "Flux2KleinPipeline"}))
    assert registry.preset_for(str(tmp_path)) == "flux2_klein"


def test_options_reach_the_editor(folders):
    editor = load_editor(folders / "edit", device="cpu", resolution=32, attention_backend="_native_math")
    processors = editor.transformer.attn_processors.values()
    assert processors and all(processor._attention_backend == "_native_math" for processor in processors)
    conditions = editor.encode(images(1), ["make it red"])
    latents = editor.noise(conditions, generators(1))
    with_math = editor.velocity(latents, 0.5, conditions)
    attention.set_backend(editor.transformer, "native", editor.device, editor.dtype)
    assert torch.allclose(editor.velocity(latents, 0.5, conditions), with_math, atol=1e-5)


@pytest.mark.parametrize(
    "name, device, dtype, words",
    [
        ("fast", "cpu", torch.float32, "no attention backend 'fast'; there are .*flash.*xformers"),
        ("flash_hub", "cuda", torch.bfloat16, "no attention backend 'flash_hub'"),
        ("flash", "cpu", torch.bfloat16, "needs a GPU"),
        ("flash", "cuda", torch.float32, "needs bfloat16"),
    ],
)
def test_attention_backends_that_cannot_work_are_named(name, device, dtype, words):
    with pytest.raises(EditorError, match=words):
        attention.set_backend(None, name, torch.device(device), dtype)


def test_a_missing_attention_package_is_named():
    class Transformer:
        def set_attention_backend(self, name):
            raise RuntimeError("Please install `flash-attn`.")

    with pytest.raises(EditorError, match="'flash' cannot be used: Please install `flash-attn`"):
        attention.set_backend(Transformer(), "flash", torch.device("cuda"), torch.bfloat16)
