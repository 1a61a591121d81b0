"""The built-in editor as it ships: its autoencoder, its text encoder, and what it has learnt."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImageEditPipeline

from rl_recipes.builtin.data import held_out_edits
from rl_recipes.builtin.measure_editor import measure_editor, summarise
from rl_recipes.builtin.train_vae import evaluate_vae, held_out_images
from rl_recipes.editors import Editor, load_editor
from rl_recipes.editors.registry import BUILTIN_FOLDER
from rl_recipes.seeds import generator
from tpips_reward.scenes import EditMeasures, render, to_tensor


@pytest.fixture(scope="module")
def editor() -> Editor:
    return load_editor("builtin", "cpu", torch.float32)


def test_a_plain_pipeline_loads_the_folder() -> None:
    pipeline = QwenImageEditPipeline.from_pretrained(BUILTIN_FOLDER, torch_dtype=torch.float32)
    assert type(pipeline.vae).__name__ == "AutoencoderKLQwenImage"
    assert (BUILTIN_FOLDER / "README.md").is_file()


def test_the_autoencoder_reaches_32_db_on_held_out_scenes(editor: Editor) -> None:
    psnr = evaluate_vae(editor.pipe.vae, held_out_images(12))
    assert psnr["edits"] >= 32.0 and psnr["scenes"] >= 32.0, psnr


def test_latents_are_normalised(editor: Editor) -> None:
    edits = held_out_edits(1, 12)
    tokens = editor.encode([to_tensor(render(e.source)) for e in edits], ["move it"] * 12).image_latents
    assert abs(float(tokens.mean())) < 0.4 and 0.5 < float(tokens.std()) < 1.5


def test_states_of_an_instruction_do_not_depend_on_the_image(editor: Editor) -> None:
    images = [to_tensor(render(e.source)) for e in held_out_edits(1, 2)]
    a, b = editor.encode(images, ["make the star red"] * 2).prompt
    assert torch.equal(a, b)
    other = editor.encode(images[:1], ["make the star blue"]).prompt[0]
    assert not torch.allclose(a, other)


@torch.no_grad()
def test_the_velocity_at_pure_noise_follows_source_and_instruction(editor: Editor) -> None:
    edits = held_out_edits(3, 24)
    sources, ideals = ([to_tensor(render(getattr(e, n))) for e in edits] for n in ("source", "ideal"))
    conditions = editor.encode(sources, [e.instruction for e in edits])
    target = editor.encode(ideals, [e.instruction for e in edits]).image_latents
    noise = editor.noise(conditions, [generator(0, i) for i in range(len(edits))])

    def error(chosen) -> float:
        return float((editor.velocity(noise, 1.0, chosen) - (noise - target)).square().mean())

    shifted = list(range(1, len(edits))) + [0]
    wrong_text = editor.encode(sources, [edits[i].instruction for i in shifted])
    wrong_source = editor.encode([sources[i] for i in shifted], [e.instruction for e in edits])
    right = error(conditions)
    assert right < 0.95 * error(wrong_text)
    assert right < 0.8 * error(wrong_source)


def test_measures_report_the_autoencoders_floor_and_every_kind() -> None:
    figures, edits = measure_editor(BUILTIN_FOLDER, count=12, seed=4, batch_size=12)
    assert len(edits) == 12 and edits[0][1].shape == (3, 64, 64)
    assert set(figures["by_kind"]) == {e.kind for e, _ in edits} and len(figures["by_kind"]) == 6
    floor = figures["autoencoder_floor"]
    assert floor["edit_success"] == 1.0 and floor["drift"] < figures["drift"] and floor["object_lost"] == 0.0


def test_summaries_leave_out_unknown_drift() -> None:
    rows = [EditMeasures(True, 0.2, False, 0.1, False), EditMeasures(False, float("nan"), True, 0.3, True)]
    figures = summarise(rows)
    assert figures["drift"] == 0.2 and figures["edit_success"] == 0.5
    assert figures["object_lost"] == 0.5 and figures["l1_to_ideal"] == 0.2 and figures["copy_rate"] == 0.5
