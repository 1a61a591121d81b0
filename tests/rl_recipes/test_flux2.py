"""FLUX.2 dev and klein: our sampler against the pipelines' own calls, several condition images, guidance of each kind."""

from __future__ import annotations

import pytest
import torch
from tiny_editors import (
    FLUX_TEXT_LENGTH,
    at_size,
    generators,
    images,
    tiny_flux2_editor,
    tiny_flux2_pipeline,
    tiny_klein_editor,
)
from torchvision.transforms.functional import to_pil_image

from rl_recipes.editors import EditorError
from rl_recipes.editors.flux2 import Flux2Klein
from rl_recipes.rollout import replay, rollout

STEPS = 3
INSTRUCTION = "make the circle red"


@pytest.fixture(scope="module")
def dev():
    return tiny_flux2_editor()


@pytest.fixture(scope="module")
def klein():
    return tiny_klein_editor()


@pytest.fixture(autouse=True)
def _square(dev, klein):
    for editor in (dev, klein):
        at_size(editor, 64, 64)


def _check_against_the_pipeline(editor, sources, guidance_scale):
    expected = editor.pipe(
        image=[to_pil_image(source) for source in sources],
        prompt=INSTRUCTION,
        guidance_scale=guidance_scale,
        num_inference_steps=STEPS,
        generator=generators(1),
        max_sequence_length=editor.max_sequence_length,
        output_type="pt",
    ).images
    at_size(editor, *sources[0].shape[-2:])
    conditions = editor.encode([sources], [INSTRUCTION], negative_prompt="")
    assert conditions.image_sizes == tuple(tuple(source.shape[-2:]) for source in sources)
    final = rollout(editor, conditions, generators(1), num_steps=STEPS, guidance_scale=guidance_scale).final
    ours = torch.stack(editor.decode(final, conditions))
    assert ours.shape == expected.shape and expected.std() > 0.05
    assert (ours - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("sizes", [[(64, 64)], [(64, 96)], [(64, 64), (64, 64)]])
def test_dev_gives_the_pipelines_own_image(dev, sizes):
    _check_against_the_pipeline(dev, [images(1, *size, seed=i)[0] for i, size in enumerate(sizes)], 4.0)


@pytest.mark.parametrize("guidance_scale, sizes", [(1.0, [(64, 64), (64, 64)]), (4.0, [(96, 64)])])
def test_klein_gives_the_pipelines_own_image(klein, sizes, guidance_scale):
    _check_against_the_pipeline(klein, [images(1, *size, seed=i)[0] for i, size in enumerate(sizes)], guidance_scale)


@pytest.mark.parametrize("steps", [4, 12])
def test_the_schedule_is_the_pipelines(klein, steps):
    source = images(1, 64, 96)[0]
    klein.pipe(
        image=to_pil_image(source), prompt="x", num_inference_steps=steps, guidance_scale=1.0,
        max_sequence_length=FLUX_TEXT_LENGTH, output_type="latent",
    )  # fmt: skip
    conditions = at_size(klein, 64, 96).encode([source], ["x"])
    assert torch.equal(klein.sigmas(steps, conditions), klein.pipe.scheduler.sigmas)


def test_position_ids_are_the_pipelines(klein):
    conditions = klein.encode([[*images(1, 64, 64), *images(1, 32, 128)]], [INSTRUCTION])
    grids = [torch.zeros(1, 4, height // 8, width // 8) for height, width in (conditions.size, *conditions.image_sizes)]
    expected = torch.cat([klein.pipe._prepare_latent_ids(grids[0]), klein.pipe._prepare_image_ids(grids[1:])], dim=1)
    assert torch.equal(klein._ids(conditions), expected[0])


def test_the_guidance_scale_reaches_devs_transformer_without_a_second_prediction(dev):
    conditions = dev.encode(images(1, 64, 64), [INSTRUCTION], negative_prompt=" ")
    assert conditions.negative is None
    latents = dev.noise(conditions, generators(1))
    weak, strong = (dev.velocity(latents, 0.5, conditions, scale) for scale in (1.0, 4.0))
    assert (weak - strong).abs().mean() > 1e-4


def test_distilled_klein_samples_without_guidance():
    pipe = tiny_flux2_pipeline(klein=True, distilled=True)
    editor = Flux2Klein(pipe, resolution=64, max_sequence_length=FLUX_TEXT_LENGTH)
    conditions = editor.encode(images(1, 64, 64), [INSTRUCTION], negative_prompt=" ")
    assert conditions.negative is None
    latents = editor.noise(conditions, generators(1))
    assert editor.velocity(latents, 0.5, conditions).isfinite().all()
    with pytest.raises(EditorError, match="guidance_scale is 4.0.*distilled"):
        editor.velocity(latents, 0.5, conditions, 4.0)


def test_the_first_of_several_images_gives_the_size(klein):
    first, second = images(1, 64, 64)[0], images(1, 32, 128)[0]
    assert klein.encode([[first, second]], [INSTRUCTION]).size == (64, 64)
    assert klein.output_size([second, first]) == (32, 128)
    with pytest.raises(EditorError, match="no condition image"):
        klein.encode([[]], [INSTRUCTION])


def test_several_condition_sizes_in_one_batch(klein):
    """Samples with one, two and other condition images share a batch; each comes out as it does alone."""
    square, wide = images(2, 64, 64), images(1, 32, 128)[0]
    samples = [square[:1], [square[1], wide], square[1:], [square[0], wide]]
    instructions = [INSTRUCTION, "darker", "blue", INSTRUCTION]
    batch = klein.encode(samples, instructions, negative_prompt="")
    assert batch.ragged is not None and batch.image_latents.shape[1] == 128
    options = {"num_steps": 2, "guidance_scale": 2.0}
    together = rollout(klein, batch, generators(4), **options).final
    for row in range(4):
        alone = klein.encode(samples[row : row + 1], instructions[row : row + 1], negative_prompt="")
        assert alone.ragged is None
        single = rollout(klein, alone, generators(4)[row : row + 1], **options).final[0]
        assert (together[row] - single).abs().max() < 1e-4
    assert batch.index([1, 3]).ragged is None and batch.index([0, 2]).image_latents.shape[1] == 64
    assert batch.repeat(2).ragged == tuple(entry for entry in batch.ragged for _ in range(2))
    trajectory = rollout(klein, batch, generators(4), num_steps=2, sde_steps=[0], eta=0.7)
    assert torch.equal(replay(klein, trajectory, 0).log_prob, trajectory.log_probs[0])


@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>"])
def test_control_tokens_are_refused(klein, dev, token):
    for editor in (klein, dev):
        with pytest.raises(EditorError, match="control token"):
            editor.encode(images(1, 64, 64), [f"red {token}"])
