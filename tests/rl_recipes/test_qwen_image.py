"""Qwen-Image, text to image: our sampler against the pipeline's own call."""

from __future__ import annotations

import pytest
import torch
from tiny_editors import at_size, generators, images, tiny_qwen_image_editor

from rl_recipes.rollout import rollout

INSTRUCTIONS = ["a red circle", "a square on a darker background"]


@pytest.fixture(scope="module")
def editor():
    return tiny_qwen_image_editor()


@pytest.mark.parametrize("guidance_scale, size", [(1.0, (32, 32)), (4.0, (24, 40))])
def test_deterministic_sampler_gives_the_pipelines_own_images(editor, size, guidance_scale):
    negative = " " if guidance_scale > 1 else None
    expected = editor.pipe(
        prompt=INSTRUCTIONS,
        negative_prompt=None if negative is None else [negative] * 2,
        true_cfg_scale=guidance_scale,
        height=size[0],
        width=size[1],
        num_inference_steps=3,
        generator=generators(2),
        output_type="pt",
    ).images
    conditions = at_size(editor, *size).encode(images(2, *size), INSTRUCTIONS, negative_prompt=negative)
    assert conditions.size == size and conditions.image_sizes == ()
    final = rollout(editor, conditions, generators(2), num_steps=3, guidance_scale=guidance_scale).final
    ours = torch.stack(editor.decode(final, conditions))
    assert ours.shape == expected.shape and expected.std() > 0.05
    assert (ours - expected).abs().max() <= 1e-4


def test_the_text_encoder_does_not_see_the_reference(editor):
    at_size(editor, 32, 32)
    first, second = (editor.encode([image], INSTRUCTIONS[:1]) for image in images(2))
    assert torch.equal(first.prompt, second.prompt)
