"""Options of editors as flags of a run: what trains, kernels, guidance, and several condition images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from safetensors.torch import load_file
from tiny_editors import tiny_flux2_editor, tiny_plus_editor

from rl_recipes import backprop_edit, grpo_edit
from rl_recipes.building import build_prompts
from rl_recipes.collecting import encode, fitted_source
from rl_recipes.editors import load_editor
from rl_recipes.parsing import parse_arguments
from rl_recipes.prompts import JSONLPrompts, PromptError
from rl_recipes.rewards import Rewards

Flags = Callable[..., list[str]]


def test_all_weights_train_and_are_handed_out(flags: Flags, tmp_path: Path, editor_folder: Path) -> None:
    run = tmp_path / "run"
    assert grpo_edit.main(flags(run, train="full", max_steps=1, eval_samples=2, save_steps=1)) == 0
    start = QwenImageTransformer2DModel.from_pretrained(editor_folder / "transformer").state_dict()
    trained = QwenImageTransformer2DModel.from_pretrained(run / "adapter" / "transformer").state_dict()
    saved = load_file(run / "checkpoints" / "step_000001" / "trainable.safetensors")
    assert any(not torch.equal(start[name], value) for name, value in trained.items())
    assert saved.keys() == trained.keys() and all(torch.equal(saved[name], value) for name, value in trained.items())
    assert json.loads((run / "summary.json").read_text())["trained_parameters"] == sum(v.numel() for v in trained.values())
    assert grpo_edit.main(["--resume", f"--output_dir={run}", "--max_steps=2"]) == 0


def test_text_encoders_that_wait_elsewhere_encode_the_same(flags: Flags, tmp_path: Path, editor_folder: Path) -> None:
    edits = [torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))]
    plain, waiting = (
        load_editor(editor_folder, device="cpu", resolution=32, offload_text_encoders=offload) for offload in (False, True)
    )
    assert all(p.device.type == "meta" for p in waiting.pipe.text_encoder.parameters())
    assert all(p.device.type == "cpu" for p in waiting.pipe.vae.parameters())
    states = [editor.encode(edits, ["make it red"]).prompt for editor in (plain, waiting)]
    assert torch.equal(*states)
    assert all(p.device.type == "meta" for p in waiting.pipe.text_encoder.parameters())
    run = tmp_path / "run"
    assert grpo_edit.main(flags(run, "--offload_text_encoders", max_steps=1, eval_samples=0)) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_backend": "fast"}, "no attention backend 'fast'"),
        ({"attention_backend": "flash"}, "'flash' needs a GPU"),
        ({"true_cfg_scale": 2.0}, "has no true_cfg_scale; leave --true_cfg_scale out"),
    ],
)
def test_options_that_an_editor_does_not_have_are_named(
    changes: dict[str, object], message: str, flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grpo_edit.main(flags(tmp_path / "run", **changes)) == 2
    assert message in capsys.readouterr().err


def test_a_kernel_of_ones_own_choice_runs(flags: Flags, tmp_path: Path) -> None:
    made = flags(tmp_path / "run", attention_backend="_native_math", max_steps=1, eval_samples=0, num_generations=1)
    made = [flag for flag in made if not flag.startswith(("--sde_window", "--train_steps"))]
    assert backprop_edit.main(made) == 0


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Rows of one and of two images of different sizes."""
    for name, size in {"a.png": (48, 32), "b.png": (32, 48)}.items():
        Image.new("RGB", size, (200, 40, 40)).save(tmp_path / name)
    common = {"instruction": "wear the coat", "preserve": ["face"], "target": ["clothes"]}
    rows = [{"image": ["a.png", "b.png"], **common}, {"image": "a.png", **common}, {"image": [], **common}]
    path = tmp_path / "edits.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_several_images_reach_the_editor_and_the_right_one_is_compared_with(several: Path) -> None:
    prompts = JSONLPrompts(several)
    assert len(prompts) == 2 and prompts.bad[0][0] == 3
    assert [tuple(image.shape) for image in prompts[0].image] == [(3, 32, 48), (3, 48, 32)]
    for editor, tall in ((tiny_plus_editor(64), True), (tiny_flux2_editor(64), False)):
        conditions = encode(editor, [prompts[0]], 1.0)
        assert len(conditions.image_sizes) == 2
        height, width = conditions.size
        assert (height > width) == tall, "the last image gives Qwen's edit its size, the first one FLUX.2's"
        assert tuple(fitted_source(editor, prompts[0]).shape[-2:]) == (height, width)


def test_each_of_several_images_must_have_a_size_that_the_editor_takes(several: Path) -> None:
    Image.new("RGB", (320, 42)).save(several.parent / "strip.png")
    row = {"image": ["strip.png", "b.png"], "instruction": "wear it", "preserve": ["face"]}
    several.write_text(several.read_text() + json.dumps(row))
    args = parse_arguments(["--data", str(several)])
    train, _, _ = build_prompts(args, tiny_plus_editor(8), Rewards("none"))
    assert isinstance(train, JSONLPrompts) and [line for line, _ in train.bad] == [3, 4]
    assert "42x320 pixels (height x width) is too elongated" in train.bad[1][1]


def test_an_editor_of_one_image_refuses_rows_of_several(several: Path, editor_folder: Path) -> None:
    from rl_recipes.editors import load_editor

    editor = load_editor(editor_folder, device="cpu", resolution=64)
    train, _, _ = build_prompts(parse_arguments(["--data", str(several)]), editor, Rewards("none"))
    assert isinstance(train, JSONLPrompts) and [line for line, _ in train.bad] == [1, 3]
    assert "it has 2 images, but this editor takes one" in train.bad[0][1]
    with pytest.raises(PromptError, match="line 1: it has 2 images"):
        build_prompts(parse_arguments(["--data", str(several), "--on_bad_row", "error"]), editor, Rewards("none"))
