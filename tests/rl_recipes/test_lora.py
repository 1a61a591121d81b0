"""LoRA of editors: targets, reference policy, merged route, saving, and what pipe.load_lora_weights makes of it."""

from __future__ import annotations

import pytest
import torch
from tiny_editors import generators, images, tiny_editor, tiny_pipeline

from rl_recipes.editors import EditorError
from rl_recipes.editors.merged_lora import disable_merged_lora, enable_merged_lora
from rl_recipes.editors.qwen_image_edit import QwenImageEdit

RANK, ALPHA = 4, 12


def _editor(trained=True):
    editor = tiny_editor()
    editor.add_lora(RANK, ALPHA, generator=torch.Generator().manual_seed(0))
    if trained:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in editor.lora_parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return editor


def _velocity(editor):
    editor.resolution = 32
    conditions = editor.encode(images(2), ["make it red", "move the circle to the left"])
    return editor.velocity(editor.noise(conditions, generators(2)), 0.6, conditions)


def test_every_target_is_adapted_and_nothing_else_trains():
    editor = _editor()
    adapted = {name.split(".lora_A.")[0] for name, _ in editor.transformer.named_parameters() if ".lora_A." in name}
    for block in range(2):
        for target in editor.lora_targets:
            where = target if "mlp" in target else f"attn.{target}"
            assert f"transformer_blocks.{block}.{where}" in adapted
    assert len(adapted) == 2 * len(editor.lora_targets)
    trained = [name for name, p in editor.transformer.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    assert len(editor.lora_parameters()) == len(trained)
    assert all(p.dtype == torch.float32 for p in editor.lora_parameters())
    assert not editor.transformer.training
    for part in ("vae", "text_encoder"):
        assert not any(p.requires_grad for p in getattr(editor.pipe, part).parameters())


def test_a_new_adapter_changes_nothing_and_follows_its_generator():
    plain = _velocity(tiny_editor())
    fresh = _editor(trained=False)
    assert torch.allclose(_velocity(fresh), plain, atol=1e-6)
    torch.manual_seed(123)
    again = _editor(trained=False)
    assert all(torch.equal(a, b) for a, b in zip(fresh.lora_parameters(), again.lora_parameters(), strict=True))


def test_switched_off_it_is_the_reference_policy_and_gradients_survive():
    editor = _editor()
    plain = _velocity(tiny_editor())
    adapted = _velocity(editor)
    assert (adapted - plain).abs().max() > 1e-3
    with editor.disable_lora():
        reference = _velocity(editor)
    assert torch.equal(reference, plain)
    assert all(p.requires_grad for p in editor.lora_parameters())
    (adapted - reference.detach()).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in editor.lora_parameters()[:4])
    assert torch.allclose(_velocity(editor), adapted)


def test_merged_route_equals_pefts_own_with_its_gradients():
    editor = _editor()

    def run():
        editor.transformer.zero_grad()
        output = _velocity(editor)
        output.square().mean().backward()
        return output.detach(), [None if p.grad is None else p.grad.clone() for p in editor.lora_parameters()]

    enable_merged_lora(editor.transformer)
    merged = run()
    disable_merged_lora(editor.transformer)
    plain = run()
    assert not torch.equal(merged[0], plain[0])  # another order of rounding: the merged route did run
    assert torch.allclose(merged[0], plain[0], atol=2e-5)
    for ours, theirs in zip(merged[1], plain[1], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6)


def test_merged_gradients_against_finite_differences():
    from rl_recipes.editors.merged_lora import _MergedLinear

    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 5), (4, 5), (4,), (2, 5), (4, 2)]
    x, weight, bias, lora_a, lora_b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    for tensor in (x, lora_a, lora_b):
        tensor.requires_grad_()
    torch.autograd.gradcheck(lambda x, a, b: _MergedLinear.apply(x, weight, bias, a, b, 1.5), (x, lora_a, lora_b))


def test_the_saved_adapter_is_what_the_pipeline_loads(tmp_path):
    editor = _editor()
    expected = _velocity(editor)
    path = editor.save_lora(tmp_path / "adapter")
    assert path.name == "pytorch_lora_weights.safetensors"
    assert [item.name for item in (tmp_path / "adapter").iterdir()] == [path.name]
    pipe = tiny_pipeline()
    before = _velocity(QwenImageEdit(pipe, resolution=32))
    pipe.load_lora_weights(tmp_path / "adapter")
    loaded = QwenImageEdit(pipe, resolution=32)
    after = _velocity(loaded)
    assert (after - before).abs().max() > 1e-3
    assert torch.allclose(after, expected, atol=2e-5)


def test_misuse_is_named(tmp_path):
    with pytest.raises(EditorError, match="already has"):
        _editor().add_lora(2, 2, generator=torch.Generator())
    with pytest.raises(EditorError, match="add_lora first"):
        tiny_editor().save_lora(tmp_path)
    with pytest.raises(EditorError, match="rank 0"):
        tiny_editor().add_lora(0, 2, generator=torch.Generator())
