"""What every family must do alike: ratio, source, batches, sizes, LoRA, loading by name."""

from __future__ import annotations

import pytest
import torch
from tiny_editors import FAMILIES, at_size, generators, images, train_a_little

from rl_recipes.algorithms.losses import clipped_policy_loss
from rl_recipes.editors import Conditions, EditorError, group_by_size, load_editor
from rl_recipes.rollout import replay, rollout

INSTRUCTIONS = ["make the circle red", "a darker background"]
SIDE = 64
# Each family's own kind: an input of the transformer, or a second prediction.
GUIDANCE = 3.0


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def editor(family):
    """With an adapter that is no longer zero."""
    made = at_size(FAMILIES[family][1](), SIDE, SIDE)
    made.add_lora(4, 8, generator=torch.Generator().manual_seed(0))
    train_a_little(made)
    return made


@pytest.fixture(scope="module")
def conditions(editor):
    return editor.encode(images(2, SIDE, SIDE), INSTRUCTIONS, negative_prompt=" ")


def test_first_ratio_is_exactly_one(editor, conditions):
    batch = conditions.repeat(2)
    trajectory = rollout(editor, batch, generators(4), num_steps=3, sde_steps=[0, 1], eta=0.9, guidance_scale=GUIDANCE)
    for k in range(2):
        result = replay(editor, trajectory, k)
        assert result.log_prob.requires_grad
        loss = clipped_policy_loss(result.log_prob, trajectory.log_probs[k], torch.ones(4), clip_range=1e-4)
        assert loss.ratio.tolist() == [1.0] * 4
    result.log_prob.sum().backward()
    gradients = [p.grad for p in editor.lora_parameters() if p.grad is not None]
    editor.transformer.zero_grad()
    assert len(gradients) > len(editor.lora_parameters()) // 2 and all(bool(g.isfinite().all()) for g in gradients)


def test_source_and_instruction_reach_the_transformer(editor):
    first, second = images(2, SIDE, SIDE)
    batch = editor.encode([first, second, first], [INSTRUCTIONS[0], INSTRUCTIONS[0], INSTRUCTIONS[1]])
    latents = editor.noise(batch, generators(3))[:1].expand(3, -1, -1)
    velocity = editor.velocity(latents, 0.5, batch)
    source, instruction = (velocity[0] - velocity[1]).abs().mean(), (velocity[0] - velocity[2]).abs().mean()
    assert instruction > 1e-4
    assert source > 1e-4 if editor.sees_image else source < 1e-6
    assert batch.image_latents.shape[1] == (latents.shape[1] if editor.sees_image else 0)


def test_a_sample_does_not_depend_on_its_batch(editor, conditions):
    together = rollout(editor, conditions, generators(2), num_steps=2, guidance_scale=GUIDANCE).final
    for index in range(2):
        one = conditions.index([index])
        alone = rollout(editor, one, generators(2)[index : index + 1], num_steps=2, guidance_scale=GUIDANCE)
        assert (together[index] - alone.final[0]).abs().max() < 1e-4


def test_mixed_sizes_are_grouped_fitted_and_decoded(editor):
    mixed = [images(1, SIDE, SIDE)[0], images(1, 48, 88)[0], images(1, 2 * SIDE, 2 * SIDE)[0]]
    assert group_by_size(editor, mixed) == [[0, 2], [1]]
    with pytest.raises(EditorError, match="48x88.*group_by_size"):
        editor.encode(mixed, ["x"] * 3)
    for rows in ([0, 2], [1]):
        encoded = editor.encode([mixed[row] for row in rows], ["x"] * len(rows))
        decoded = editor.decode(editor.noise(encoded, generators(len(rows))), encoded)
        assert [tuple(image.shape) for image in decoded] == [(3, *encoded.size)] * len(rows)
        assert all(0.0 <= image.min() and image.max() <= 1.0 for image in decoded)
    with pytest.raises(EditorError, match="Latents of shape"):
        editor.decode(torch.zeros(1, 3, 16), encoded)


def test_every_target_is_adapted_and_nothing_else_trains(editor):
    adapted = {name.split(".lora_A.")[0] for name, _ in editor.transformer.named_parameters() if ".lora_A." in name}
    for target in editor.lora_targets:
        assert any(name.endswith(f".{target}") for name in adapted), target
    assert all(".lora_" in name for name, p in editor.transformer.named_parameters() if p.requires_grad)


def test_a_folder_is_recognised_and_takes_the_saved_adapter(family, editor, conditions, tmp_path):
    build_pipeline, _ = FAMILIES[family]
    build_pipeline().save_pretrained(tmp_path / "pipeline")
    loaded = load_editor(tmp_path / "pipeline", device="cpu", resolution=SIDE)
    assert type(loaded) is type(editor) and loaded.pipeline_class == family
    latents = editor.noise(conditions, generators(2))
    before = loaded.velocity(latents, 0.6, conditions)
    with editor.disable_lora():
        assert torch.allclose(before, editor.velocity(latents, 0.6, conditions), atol=2e-5)
    editor.save_lora(tmp_path / "adapter")
    loaded.pipe.load_lora_weights(tmp_path / "adapter")
    after = loaded.velocity(latents, 0.6, conditions)
    assert (after - before).abs().max() > 1e-3
    assert torch.allclose(after, editor.velocity(latents, 0.6, conditions), atol=2e-5)


@pytest.mark.parametrize(
    "instructions, words", [(["a", "b"], "one instruction"), (["  "], "sentence"), (["red " * 3000], "shorten")]
)
def test_bad_instructions_are_refused(editor, instructions, words):
    with pytest.raises(EditorError, match=words):
        editor.encode(images(1, SIDE, SIDE), instructions)


def test_odd_instructions_are_taken(editor):
    for instruction in ['make it "red" {now}\n', "\U0001f98a → кошка"]:
        assert len(editor.encode(images(1, SIDE, SIDE), [instruction])) == 1


def test_joined_conditions_are_those_encoded_together(editor, conditions):
    parts = [
        editor.encode(images(2, SIDE, SIDE)[index : index + 1], [INSTRUCTIONS[index]], negative_prompt=" ")
        for index in range(2)
    ]
    joined = Conditions.cat(parts)
    latents = editor.noise(conditions, generators(2))
    difference = editor.velocity(latents, 0.5, joined) - editor.velocity(latents, 0.5, conditions)
    assert difference.abs().max() < 1e-4
