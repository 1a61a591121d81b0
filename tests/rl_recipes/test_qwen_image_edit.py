"""Qwen-Image-Edit and -Plus: our sampler against the pipelines' own calls, and what must reach the transformer."""

from __future__ import annotations

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from tiny_editors import generators, images, tiny_editor, tiny_plus_editor
from torchvision.transforms.functional import to_pil_image

from rl_recipes.editors import Conditions, EditorError, group_by_size
from rl_recipes.editors.qwen_image_edit import guide, pack, unpack
from rl_recipes.rollout import rollout

STEPS = 3


@pytest.fixture(scope="module")
def editor():
    return tiny_editor()


@pytest.fixture(scope="module")
def plus_editor():
    return tiny_plus_editor()


def _pipeline_size(monkeypatch, size):
    """Let the pipeline's call keep our size: its own resizes every source to about 1024 x 1024."""
    height, width = size
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (width, height, None))


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_deterministic_sampler_gives_the_pipelines_own_images(editor, monkeypatch, size, guidance_scale):
    _pipeline_size(monkeypatch, size)
    sources = images(2, *size)
    instructions = ["make the circle red", "make the background a good deal darker than it is"]
    negative = " " if guidance_scale > 1 else None
    expected = editor.pipe(
        image=[to_pil_image(source) for source in sources],
        prompt=instructions,
        negative_prompt=None if negative is None else [negative] * 2,
        true_cfg_scale=guidance_scale,
        num_inference_steps=STEPS,
        generator=generators(2),
        output_type="pt",
    ).images
    editor.resolution = round((size[0] * size[1]) ** 0.5)
    conditions = editor.encode(sources, instructions, negative_prompt=negative)
    assert conditions.size == size
    trajectory = rollout(editor, conditions, generators(2), num_steps=STEPS, guidance_scale=guidance_scale)
    ours = torch.stack(editor.decode(trajectory.final, conditions))
    assert ours.shape == expected.shape
    assert expected.std() > 0.05
    assert (ours - expected).abs().max() <= 1e-4


def test_schedule_is_the_pipelines(editor, monkeypatch):
    _pipeline_size(monkeypatch, (32, 32))
    editor.pipe(image=to_pil_image(images(1)[0]), prompt="x", num_inference_steps=5, output_type="latent")
    conditions = editor.encode(images(1), ["x"])
    assert torch.equal(editor.sigmas(5, conditions), editor.pipe.scheduler.sigmas)
    assert editor.sigmas(5, conditions)[-2] == pytest.approx(0.02)


def test_a_schedule_that_one_step_cannot_have_is_refused(editor):
    conditions = editor.encode(images(1), ["x"])
    with pytest.raises(EditorError, match="no noise levels for 1 step .*larger num_inference_steps"):
        editor.sigmas(1, conditions)
    assert editor.sigmas(2, conditions).tolist() == pytest.approx([1.0, 0.02, 0.0])


def test_source_and_instruction_reach_the_transformer(editor):
    editor.resolution = 32
    first, second = images(2)
    conditions = editor.encode([first, second, first], ["make it red", "make it red", "make it blue"])
    latents = editor.noise(conditions, generators(3))[:1].expand(3, -1, -1)
    velocity = editor.velocity(latents, 0.5, conditions)
    assert (velocity[0] - velocity[1]).abs().mean() > 1e-3
    assert (velocity[0] - velocity[2]).abs().mean() > 1e-4


def test_the_text_encoder_sees_the_source(editor):
    editor.resolution = 32
    first, second = images(2)
    conditions = editor.encode([first, second], ["make it red"] * 2)
    assert (conditions.prompt[0] - conditions.prompt[1]).abs().max() > 1e-3


def test_a_sample_does_not_depend_on_its_batch(editor):
    editor.resolution = 32
    sources, instructions = images(3), ["make it red", "move the small square to the very left of the image", "darker"]
    together = editor.encode(sources, instructions, negative_prompt=" ")
    batch = rollout(editor, together, generators(3), num_steps=2, guidance_scale=2.0).final
    for index in range(3):
        alone = editor.encode(sources[index : index + 1], instructions[index : index + 1], negative_prompt=" ")
        single = rollout(editor, alone, generators(3)[index : index + 1], num_steps=2, guidance_scale=2.0).final
        assert (batch[index] - single[0]).abs().max() < 1e-4


def test_velocity_takes_one_sigma_a_sample(editor):
    editor.resolution = 32
    conditions = editor.encode(images(2), ["a", "b"])
    latents = editor.noise(conditions, generators(2))
    both = editor.velocity(latents, torch.tensor([0.9, 0.2]), conditions)
    assert torch.allclose(both[0], editor.velocity(latents, 0.9, conditions)[0], atol=1e-5)
    assert torch.allclose(both[1], editor.velocity(latents, 0.2, conditions)[1], atol=1e-5)


def test_conditions_index_repeat_and_join(editor):
    editor.resolution = 32
    conditions = editor.encode(images(2), ["make it red", "move the circle to the left"], negative_prompt=" ")
    assert conditions.prompt_mask is not None
    repeated = conditions.repeat(3)
    assert len(repeated) == 6
    assert torch.equal(repeated.image_latents[2], conditions.image_latents[0])
    assert torch.equal(repeated.prompt[3], conditions.prompt[1])
    again = Conditions.cat([conditions.index([1]), conditions.index([0])])
    assert torch.equal(again.prompt, conditions.index([1, 0]).prompt)
    assert torch.equal(again.prompt_mask, conditions.prompt_mask[[1, 0]])
    short = editor.encode(images(1), ["make it red"], negative_prompt=" ")
    joined = Conditions.cat([short, conditions])
    assert joined.prompt.shape[1] == conditions.prompt.shape[1]
    assert torch.equal(joined.prompt_mask[0], conditions.prompt_mask[0])


def test_sizes_keep_the_aspect_ratio(editor):
    editor.resolution = 64
    for height, width in [(64, 64), (427, 640), (640, 427), (100, 300)]:
        fitted = editor.output_size(torch.zeros(3, height, width))
        assert fitted[0] % 8 == 0 and fitted[1] % 8 == 0
        assert abs(fitted[0] * fitted[1] / 64**2 - 1) < 0.2
        assert abs(fitted[1] / fitted[0] / (width / height) - 1) < 0.15
    with pytest.raises(EditorError, match="elongated"):
        editor.output_size(torch.zeros(3, 4, 4000))


def test_mixed_sizes_are_grouped_or_refused(editor):
    editor.resolution = 32
    mixed = [*images(2, 32, 32), *images(1, 24, 40), *images(1, 64, 64)]
    assert group_by_size(editor, mixed) == [[0, 1, 3], [2]]
    with pytest.raises(EditorError, match="group_by_size"):
        editor.encode(mixed, ["x"] * 4)
    square, wide = editor.encode(mixed[:1], ["x"]), editor.encode(mixed[2:3], ["x"])
    with pytest.raises(EditorError, match="24x40"):
        Conditions.cat([square, wide])


@pytest.mark.parametrize(
    "image, words",
    [
        (torch.zeros(3, 8, 8, dtype=torch.uint8), "divide by 255"),
        (torch.zeros(1, 3, 8, 8), "shape"),
        (torch.full((3, 8, 8), float("nan")), "NaN"),
        (torch.full((3, 8, 8), 2.0), "rescale"),
        ("photo.png", "tensor"),
    ],
)
def test_bad_images_are_refused(editor, image, words):
    with pytest.raises(EditorError, match=words):
        editor.fit(image)


@pytest.mark.parametrize(
    "instructions, words",
    [
        (["a", "b"], "one instruction"),
        ("ab", "one string"),
        (["  "], "sentence"),
        (["look <|image_pad|> here"], "control token"),
        (["red " * 3000], "shorten"),
    ],
)
def test_bad_instructions_are_refused(editor, instructions, words):
    with pytest.raises(EditorError, match=words):
        editor.encode(images(1), instructions)


def test_one_condition_image_a_sample(editor):
    editor.resolution = 32
    assert torch.equal(editor.encode([images(1)], ["x"]).prompt, editor.encode(images(1), ["x"]).prompt)
    with pytest.raises(EditorError, match="one condition image"):
        editor.encode([images(2)], ["x"])


def test_odd_instructions_are_taken(editor):
    for instruction in ['make it "red" {now}\n', "\U0001f98a → кошка", "big " * 100]:
        assert len(editor.encode(images(1), [instruction])) == 1


def test_guidance_needs_a_negative_prompt(editor):
    editor.resolution = 32
    conditions = editor.encode(images(1), ["x"])
    with pytest.raises(EditorError, match="negative_prompt"):
        editor.velocity(editor.noise(conditions, generators(1)), 0.5, conditions, 4.0)


def test_generators_must_be_distinct(editor):
    editor.resolution = 32
    conditions = editor.encode(images(2), ["x", "y"])
    with pytest.raises(EditorError, match="share a generator"):
        editor.noise(conditions, generators(1) * 2)
    with pytest.raises(EditorError, match="generator each"):
        editor.noise(conditions, generators(1))


def test_guidance_against_its_formula():
    generator = torch.Generator().manual_seed(0)
    p, n = torch.randn(2, 2, 5, 7, generator=generator)
    combined = n.double() + 3.0 * (p.double() - n.double())
    expected = combined * (p.double().norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
    assert torch.allclose(guide(p, n, 3.0).double(), expected, atol=1e-5)


def test_packing_is_the_pipelines(editor):
    latents = torch.randn(2, 16, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    packed = pack(latents)
    assert torch.equal(packed, editor.pipe._pack_latents(latents, 2, 16, 6, 8))
    assert torch.equal(unpack(packed, 6, 8), latents)


def _plus_pipeline_sizes(monkeypatch, editor, condition_area, area):
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", condition_area)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", area)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize("count", [1, 2])
def test_plus_gives_the_pipelines_own_image(plus_editor, monkeypatch, count, guidance_scale):
    _plus_pipeline_sizes(monkeypatch, plus_editor, 32 * 64, 64 * 32)
    sources = images(count, 64, 32)
    negative = " " if guidance_scale > 1 else None
    expected = plus_editor.pipe(
        image=[to_pil_image(source) for source in sources],
        prompt="make the circle red",
        negative_prompt=negative,
        true_cfg_scale=guidance_scale,
        height=64,
        width=32,
        num_inference_steps=STEPS,
        generator=generators(1),
        output_type="pt",
    ).images
    plus_editor.resolution = 45
    conditions = plus_editor.encode([sources], ["make the circle red"], negative_prompt=negative)
    assert conditions.size == (64, 32) and len(conditions.image_sizes) == count
    trajectory = rollout(plus_editor, conditions, generators(1), num_steps=STEPS, guidance_scale=guidance_scale)
    ours = torch.stack(plus_editor.decode(trajectory.final, conditions))
    assert (ours - expected).abs().max() <= 1e-4


def test_plus_with_2511s_zero_timestep_for_conditions(monkeypatch):
    editor = tiny_plus_editor(zero_cond_t=True)
    _plus_pipeline_sizes(monkeypatch, editor, 32 * 32, 32 * 32)
    source = images(1)[0]
    expected = editor.pipe(
        image=[to_pil_image(source)],
        prompt="make it red",
        true_cfg_scale=1.0,
        height=32,
        width=32,
        num_inference_steps=STEPS,
        generator=generators(1),
        output_type="pt",
    ).images
    conditions = editor.encode([source], ["make it red"])
    final = rollout(editor, conditions, generators(1), num_steps=STEPS).final
    assert (torch.stack(editor.decode(final, conditions)) - expected).abs().max() <= 1e-4


def test_plus_text_encoder_has_its_own_image_size(plus_editor, monkeypatch):
    seen = []
    original = plus_editor.pipe.encode_prompt
    monkeypatch.setattr(
        plus_editor.pipe, "encode_prompt", lambda *args, **kw: (seen.append(kw["image"]), original(*args, **kw))[1]
    )
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", 96 * 96)
    plus_editor.resolution = 32
    plus_editor.encode([images(1, 40, 80)[0]], ["x"])
    assert [tuple(image.shape) for image in seen[0]] == [(3, 64, 128)]
