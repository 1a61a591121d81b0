"""Full fine-tuning: what trains, the reference policy, states, and what is saved."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel
from tiny_editors import generators, images, tiny_kontext_editor

from rl_recipes.algorithms.losses import clipped_policy_loss
from rl_recipes.editors import EditorError
from rl_recipes.editors.flux_kontext import FluxKontext
from rl_recipes.rollout import replay, rollout

INSTRUCTIONS = ["make it red", "darker"]


def _velocity(editor):
    conditions = editor.encode(images(2), INSTRUCTIONS)
    return editor.velocity(editor.noise(conditions, generators(2)), 0.6, conditions)


def _trained():
    """An editor after one step of gradient descent, and its velocity before."""
    editor = tiny_kontext_editor()
    parameters = editor.train_all()
    before = _velocity(editor)
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    before.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return editor, before.detach()


def test_all_weights_of_the_transformer_train_and_no_others():
    editor = tiny_kontext_editor()
    parameters = editor.train_all()
    assert len(parameters) == len(editor.lora_parameters()) == len(list(editor.transformer.parameters()))
    assert all(p.requires_grad for p in parameters) and not editor.transformer.training
    assert not any(p.requires_grad for p in editor.pipe.vae.parameters())


def test_the_reference_policy_is_where_training_began():
    editor, before = _trained()
    after = _velocity(editor)
    assert (after - before).abs().max() > 1e-3
    with torch.no_grad(), editor.disable_lora():
        assert torch.equal(_velocity(editor), before)
    assert torch.equal(_velocity(editor), after)
    after.square().mean().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in editor.lora_parameters())


def test_first_ratio_is_exactly_one():
    editor, _ = _trained()
    conditions = editor.encode(images(2), INSTRUCTIONS)
    trajectory = rollout(editor, conditions, generators(2), num_steps=3, sde_steps=[0], eta=0.9, guidance_scale=2.5)
    result = replay(editor, trajectory, 0)
    with torch.no_grad(), editor.disable_lora():
        assert (replay(editor, trajectory, 0).mean - result.mean).abs().max() > 1e-5
    loss = clipped_policy_loss(result.log_prob, trajectory.log_probs[0], torch.ones(2), clip_range=1e-4)
    assert loss.ratio.tolist() == [1.0, 1.0]
    loss.loss.backward()


def test_the_saved_transformer_is_what_the_pipeline_takes(tmp_path):
    editor, _ = _trained()
    folder = editor.save_lora(tmp_path / "weights")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["transformer"]
    transformer = FluxTransformer2DModel.from_pretrained(folder)
    pipe = type(editor.pipe)(**(editor.pipe.components | {"transformer": transformer}))
    loaded = FluxKontext(pipe, resolution=32, max_sequence_length=editor.max_sequence_length)
    assert torch.allclose(_velocity(loaded), _velocity(editor), atol=1e-6)


def test_misuse_is_named():
    editor = tiny_kontext_editor()
    editor.add_lora(2, 2, generator=torch.Generator())
    with pytest.raises(EditorError, match="has a LoRA adapter"):
        editor.train_all()
    half = FluxKontext(tiny_kontext_editor().pipe, resolution=32, dtype=torch.bfloat16)
    with pytest.raises(EditorError, match="float32 weights, but the transformer's are torch.bfloat16"):
        half.train_all()
    full = tiny_kontext_editor()
    full.train_all()
    with pytest.raises(EditorError, match="All weights train already"):
        full.add_lora(2, 2, generator=torch.Generator())
