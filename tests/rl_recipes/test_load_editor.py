"""Loading an editor: the class by the pipeline's own name, and clear errors for all else."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_editors import tiny_pipeline

from rl_recipes.editors import Editor, EditorError, load_editor, registry
from rl_recipes.editors.qwen_image_edit import QwenImageEdit
from rl_recipes.editors.qwen_image_edit_plus import QwenImageEditPlus


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
    with pytest.raises(EditorError, match="StableDiffusionPipeline.*QwenImageEditPipeline, QwenImageEditPlusPipeline"):
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
    with pytest.raises(EditorError, match="float32 or bfloat16"):
        load_editor(tmp_path, dtype="float8")

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(EditorError, match="could not be had from the Hub"):
        load_editor("nobody/nothing")


def test_a_resolution_below_one_token_is_refused(folders):
    with pytest.raises(EditorError, match="smallest image"):
        load_editor(folders / "edit", device="cpu", resolution=4)
