"""FLUX.1-Kontext and FLUX.1: our sampler against the pipelines' own calls, guidance of both kinds, position ids."""

from __future__ import annotations

import pytest
import torch
from tiny_editors import (
    FLUX_TEXT_LENGTH,
    at_size,
    generators,
    images,
    tiny_flux_editor,
    tiny_flux_pipeline,
    tiny_kontext_editor,
    train_a_little,
)
from torchvision.transforms.functional import to_pil_image

from rl_recipes.editors import Conditions, EditorError
from rl_recipes.editors.flux import Flux
from rl_recipes.editors.flux_kontext import FluxKontext
from rl_recipes.rollout import replay, rollout

STEPS = 3
INSTRUCTIONS = ["make the circle red", "a darker background"]


@pytest.fixture(scope="module")
def kontext():
    return tiny_kontext_editor()


@pytest.fixture(scope="module")
def flux():
    return tiny_flux_editor()


@pytest.fixture(autouse=True)
def _plain(kontext, flux):
    for editor in (kontext, flux):
        at_size(editor, 32, 32).true_cfg_scale = 1.0


def _theirs(editor, size, guidance_scale, true_cfg_scale, **inputs):
    height, width = size
    return editor.pipe(
        prompt=INSTRUCTIONS,
        negative_prompt=["blurry"] * 2 if true_cfg_scale > 1 else None,
        true_cfg_scale=true_cfg_scale,
        guidance_scale=guidance_scale,
        height=height,
        width=width,
        num_inference_steps=STEPS,
        generator=generators(2),
        max_sequence_length=FLUX_TEXT_LENGTH,
        output_type="pt",
        **inputs,
    ).images


def _ours(editor, sources, guidance_scale, true_cfg_scale):
    at_size(editor, *sources[0].shape[-2:]).true_cfg_scale = true_cfg_scale
    conditions = editor.encode(sources, INSTRUCTIONS, negative_prompt="blurry")
    assert conditions.size == tuple(sources[0].shape[-2:])
    final = rollout(editor, conditions, generators(2), num_steps=STEPS, guidance_scale=guidance_scale).final
    return torch.stack(editor.decode(final, conditions))


@pytest.mark.parametrize("guidance_scale, true_cfg_scale", [(1.0, 1.0), (2.5, 1.0), (2.5, 3.0)])
@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_kontext_gives_the_pipelines_own_images(kontext, size, guidance_scale, true_cfg_scale):
    sources = images(2, *size)
    expected = _theirs(
        kontext,
        size,
        guidance_scale,
        true_cfg_scale,
        image=[to_pil_image(source) for source in sources],
        max_area=size[0] * size[1],
        _auto_resize=False,
    )
    ours = _ours(kontext, sources, guidance_scale, true_cfg_scale)
    assert ours.shape == expected.shape and expected.std() > 0.05
    assert (ours - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("guidance_scale, true_cfg_scale, size", [(3.5, 1.0, (24, 40)), (3.5, 2.0, (32, 32))])
def test_flux_gives_the_pipelines_own_images(flux, size, guidance_scale, true_cfg_scale):
    expected = _theirs(flux, size, guidance_scale, true_cfg_scale)
    ours = _ours(flux, images(2, *size), guidance_scale, true_cfg_scale)
    assert expected.std() > 0.05
    assert (ours - expected).abs().max() <= 1e-4


def test_the_schedule_is_the_pipelines_and_shifts_with_the_size(kontext):
    schedules = []
    for size in [(32, 32), (128, 192)]:
        at_size(kontext, *size)
        conditions = kontext.encode(images(1, *size), INSTRUCTIONS[:1])
        schedules.append(kontext.sigmas(5, conditions))
        source = to_pil_image(images(1, *size)[0])
        kontext.pipe(
            image=source, prompt="x", height=size[0], width=size[1], max_area=size[0] * size[1], _auto_resize=False,
            num_inference_steps=5, max_sequence_length=FLUX_TEXT_LENGTH, output_type="latent",
        )  # fmt: skip
        assert torch.equal(schedules[-1], kontext.pipe.scheduler.sigmas)
    assert not torch.equal(*schedules)


def test_the_guidance_scale_reaches_the_transformer_without_a_second_prediction(kontext, monkeypatch):
    conditions = kontext.encode(images(1), INSTRUCTIONS[:1], negative_prompt=" ")
    assert conditions.negative is None
    latents = kontext.noise(conditions, generators(1))
    seen = []
    original = kontext.transformer.forward
    monkeypatch.setattr(
        kontext.transformer, "forward", lambda **kw: (seen.append(kw["guidance"].tolist()), original(**kw))[1]
    )
    weak, strong = (kontext.velocity(latents, 0.5, conditions, scale) for scale in (1.0, 4.0))
    assert seen == [[1.0], [4.0]]
    assert (weak - strong).abs().mean() > 1e-4


def test_a_transformer_without_guidance_embedding_refuses_a_guidance_scale():
    editor = Flux(tiny_flux_pipeline(guidance_embeds=False), resolution=32, max_sequence_length=FLUX_TEXT_LENGTH)
    conditions = editor.encode(images(1), INSTRUCTIONS[:1])
    latents = editor.noise(conditions, generators(1))
    assert editor.velocity(latents, 0.5, conditions).isfinite().all()
    with pytest.raises(EditorError, match="guidance_scale is 3.5.*schnell"):
        editor.velocity(latents, 0.5, conditions, 3.5)


def test_true_guidance_needs_a_negative_prompt(kontext):
    conditions = kontext.encode(images(1), INSTRUCTIONS[:1], negative_prompt=" ")
    kontext.true_cfg_scale = 3.0
    with pytest.raises(EditorError, match='negative_prompt=" "'):
        kontext.velocity(kontext.noise(conditions, generators(1)), 0.5, conditions)
    both = kontext.encode(images(1), INSTRUCTIONS[:1], negative_prompt=" ")
    with pytest.raises(EditorError, match="negative prompt and some have none"):
        Conditions.cat([conditions, both])


def test_first_ratio_is_exactly_one_with_both_kinds_of_guidance(kontext):
    kontext.true_cfg_scale = 3.0
    conditions = kontext.encode(images(2), INSTRUCTIONS, negative_prompt=" ")
    trajectory = rollout(kontext, conditions, generators(2), num_steps=3, sde_steps=[0, 1], eta=0.9, guidance_scale=2.5)
    for k in range(2):
        assert torch.equal(replay(kontext, trajectory, k).log_prob, trajectory.log_probs[k])


def test_bfloat16_weights_keep_float32_samples_and_an_exact_ratio():
    editor = FluxKontext(
        tiny_flux_pipeline(kontext=True), dtype=torch.bfloat16, resolution=32, max_sequence_length=FLUX_TEXT_LENGTH
    )
    editor.add_lora(4, 8, generator=torch.Generator().manual_seed(0))
    train_a_little(editor)
    conditions = editor.encode(images(2), INSTRUCTIONS)
    trajectory = rollout(editor, conditions, generators(2), num_steps=3, sde_steps=[0, 1], eta=0.9, guidance_scale=2.5)
    assert trajectory.next_latents.dtype == torch.float32
    for k in range(2):
        assert torch.equal(replay(editor, trajectory, k).log_prob.detach(), trajectory.log_probs[k])
    assert editor.decode(trajectory.final, conditions)[0].dtype == torch.float32


def test_position_ids_are_the_pipelines(kontext):
    conditions = kontext.encode(images(1, 24, 40), INSTRUCTIONS[:1])
    grid = kontext.pipe._prepare_latent_image_ids(1, *kontext._grid(conditions.size)[1:], "cpu", torch.float32)
    source = grid.clone()
    source[:, 0] = 1
    assert torch.equal(kontext._ids(conditions).float(), torch.cat([grid, source]))


def test_the_source_has_a_place_of_its_own(kontext, monkeypatch):
    """The coordinates matter: with the source at the edit's own place the transformer answers otherwise."""
    conditions = kontext.encode(images(1), INSTRUCTIONS[:1])
    latents = kontext.noise(conditions, generators(1))
    apart = kontext.velocity(latents, 0.5, conditions)
    ids = kontext._ids(conditions) * torch.tensor([0, 1, 1])
    monkeypatch.setattr(kontext, "_ids", lambda conditions: ids)
    assert (kontext.velocity(latents, 0.5, conditions) - apart).abs().mean() > 1e-4


def test_pooled_states_follow_their_samples(kontext):
    conditions = kontext.encode(images(2), INSTRUCTIONS)
    assert conditions.pooled.shape == (2, 24)
    assert torch.equal(conditions.repeat(2).pooled[2], conditions.pooled[1])
    joined = Conditions.cat([conditions.index([1]), conditions.index([0])])
    assert torch.equal(joined.pooled, conditions.pooled.flip(0))
    latents = kontext.noise(conditions, generators(2))[:1]
    one = conditions.index([0])
    other = Conditions(**(vars(one) | {"pooled": conditions.pooled[1:]}))
    assert (kontext.velocity(latents, 0.5, one) - kontext.velocity(latents, 0.5, other)).abs().max() > 1e-4


def test_long_instructions_are_refused(kontext):
    with pytest.raises(EditorError, match=f"at most {FLUX_TEXT_LENGTH}"):
        kontext.encode(images(1), ["red " * 30])


def test_kontext_takes_one_condition_image(kontext):
    assert len(kontext.encode([images(1)], INSTRUCTIONS[:1])) == 1
    with pytest.raises(EditorError, match="FluxKontext takes one condition image"):
        kontext.encode([images(2)], INSTRUCTIONS[:1])


def test_text_to_image_uses_its_reference_for_the_size_alone(flux):
    assert not flux.sees_image
    first, second = (flux.encode([image], INSTRUCTIONS[:1]) for image in images(2, 24, 40))
    assert first.size == (24, 40) and first.image_latents.shape == (1, 0, 16)
    latents = flux.noise(first, generators(1))
    assert torch.equal(flux.velocity(latents, 0.5, first), flux.velocity(latents, 0.5, second))
