"""Rollout and replay: on-policy to the last bit, reproducible, one noise a sample."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_editors import generators, images, tiny_editor

from rl_recipes.algorithms.losses import clipped_policy_loss
from rl_recipes.rollout import replay, rollout, sample_ode
from tpips_reward.errors import TPIPSError

INSTRUCTIONS = ["make the circle red", "move the square far to the left", "darker"]


@pytest.fixture(scope="module")
def editor():
    made = tiny_editor()
    made.add_lora(4, 8, generator=torch.Generator().manual_seed(0))
    _train_a_little(made)
    return made


@pytest.fixture(scope="module")
def conditions(editor):
    return editor.encode(images(3), INSTRUCTIONS, negative_prompt=" ").repeat(2)


@torch.no_grad()
def _train_a_little(editor):
    generator = torch.Generator().manual_seed(1)
    for parameter in editor.lora_parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def _sample(editor, conditions, **options):
    options = {"num_steps": 4, "sde_steps": [0, 2], "eta": 0.7} | options
    return rollout(editor, conditions, generators(6), **options)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("kind", ["flow_sde", "dance", "cps"])
def test_first_ratio_is_exactly_one(editor, conditions, kind, guidance_scale):
    trajectory = _sample(editor, conditions, kind=kind, guidance_scale=guidance_scale)
    for k in range(2):
        result = replay(editor, trajectory, k)
        assert result.log_prob.requires_grad
        loss = clipped_policy_loss(result.log_prob, trajectory.log_probs[k], torch.ones(6), clip_range=1e-4)
        assert loss.ratio.tolist() == [1.0] * 6
        assert torch.equal(result.mean.detach(), trajectory.means[k])


def test_an_update_moves_the_ratio_the_right_way(conditions):
    editor = tiny_editor()
    parameters = editor.add_lora(4, 8, generator=torch.Generator().manual_seed(0))
    trajectory = _sample(editor, conditions)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    result = replay(editor, trajectory, 0)
    clipped_policy_loss(result.log_prob, trajectory.log_probs[0], advantages, clip_range=10.0).loss.backward()
    optimizer.step()
    with torch.no_grad():
        change = replay(editor, trajectory, 0).log_prob - trajectory.log_probs[0]
    assert (change * advantages).mean() > 1e-6


def test_same_generators_same_bits(editor, conditions):
    first, second = _sample(editor, conditions), _sample(editor, conditions)
    assert torch.equal(first.final, second.final)
    assert torch.equal(first.log_probs, second.log_probs)


def test_samples_of_a_group_differ(editor, conditions):
    trajectory = _sample(editor, conditions)
    assert (trajectory.final[0] - trajectory.final[1]).abs().mean() > 0.05
    noise = trajectory.next_latents - trajectory.means
    assert (noise[0, 0] - noise[0, 1]).abs().mean() > 0.05


def test_a_sample_depends_on_its_own_generator_alone(editor, conditions):
    trajectory = _sample(editor, conditions)
    others = generators(6, seed=50)
    others[2] = generators(6)[2]
    again = rollout(editor, conditions, others, num_steps=4, sde_steps=[0, 2], eta=0.7)
    assert torch.equal(again.final[2], trajectory.final[2])
    assert not torch.equal(again.final[1], trajectory.final[1])


def _alike(editor, conditions, **options):
    """Each prompt's two samples, which follow one another in `conditions`, start alike."""
    starts = [g for g in generators(3, seed=7) for _ in range(2)]
    return _sample(editor, conditions, starts=starts, **options)


def test_samples_that_start_alike_share_the_steps_before_the_first_stochastic_one(editor, conditions, monkeypatch):
    asked = []
    velocity = type(editor).velocity

    def counted(self, latents, *others):
        asked.append(len(latents))
        return velocity(self, latents, *others)

    monkeypatch.setattr(type(editor), "velocity", counted)
    trajectory = _alike(editor, conditions, sde_steps=[1, 2])
    assert asked == [3, 3, 6, 6]
    replay(editor, trajectory, 0)
    replay(editor, trajectory, 1)
    assert asked[4:] == [3, 6]
    assert torch.equal(trajectory.latents[0, ::2], trajectory.latents[0, 1::2])
    assert (trajectory.final[::2] - trajectory.final[1::2]).abs().mean() > 0.05
    without = _alike(editor, conditions, sde_steps=[])
    assert torch.equal(without.final[::2], without.final[1::2])


@pytest.mark.parametrize("kind", ["flow_sde", "dance", "cps"])
def test_the_first_ratio_of_samples_that_start_alike_is_exactly_one(editor, conditions, kind):
    trajectory = _alike(editor, conditions, kind=kind)
    for k in range(2):
        assert torch.equal(replay(editor, trajectory, k).log_prob.detach(), trajectory.log_probs[k])


def test_shared_work_has_the_gradient_of_separate_work(editor, conditions):
    trajectory = _alike(editor, conditions)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0, 0.3, -1.5])
    parameters = editor.lora_parameters()

    def gradient(of):
        loss = (replay(editor, of, 0).log_prob * advantages).sum()
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)

    shared, separate = gradient(trajectory), gradient(replace(trajectory, alike=None))
    scale = max(float(g.abs().max()) for g in separate)
    assert scale > 1e-4
    for one, other in zip(shared, separate, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * scale, rtol=1e-4)


def test_mirrored_samples_take_the_noise_negated(editor, conditions):
    noise = [g for seed in (0, 1, 2) for g in (generators(1, seed=seed) + generators(1, seed=seed))]
    starts = [g for g in generators(3, seed=7) for _ in range(2)]
    options = {"num_steps": 4, "sde_steps": [0, 2], "eta": 0.7, "starts": starts}
    trajectory = rollout(editor, conditions, noise, mirrored=[False, True] * 3, **options)
    drawn = trajectory.next_latents - trajectory.means
    torch.testing.assert_close(drawn[:, ::2], -drawn[:, 1::2], atol=1e-6, rtol=1e-5)
    assert drawn.std() > 0.1
    plain = rollout(editor, conditions, [g.manual_seed(n // 2) for n, g in enumerate(noise)], **options)
    assert torch.equal(plain.final[::2], plain.final[1::2])


def test_what_is_stored_fits_together(editor, conditions):
    trajectory = _sample(editor, conditions, sde_steps=[2, 1])
    assert trajectory.sde_steps == (1, 2)
    assert trajectory.latents.shape == (2, 6, 16, 64)
    assert trajectory.log_probs.shape == (2, 6)
    assert torch.equal(trajectory.next_latents[0], trajectory.latents[1])
    stored = (trajectory.latents, trajectory.next_latents, trajectory.log_probs, trajectory.final)
    assert all(tensor.dtype == torch.float32 and not tensor.requires_grad for tensor in stored)
    assert len(trajectory.sigmas) == 5 and trajectory.sigmas[0] == 1.0 and trajectory.sigmas[-1] == 0.0


def test_without_stochastic_steps_nothing_is_stored(editor, conditions):
    trajectory = _sample(editor, conditions, sde_steps=[])
    assert trajectory.latents.shape[0] == trajectory.log_probs.shape[0] == 0
    assert torch.equal(trajectory.final, sample_ode(editor, conditions, generators(6), 4))
    with pytest.raises(TPIPSError, match="0 stochastic steps"):
        replay(editor, trajectory, 0)


def test_bfloat16_weights_keep_float32_samples_and_an_exact_ratio():
    editor = tiny_editor()
    editor.__init__(editor.pipe, dtype=torch.bfloat16, resolution=32)
    editor.add_lora(4, 8, generator=torch.Generator().manual_seed(0))
    _train_a_little(editor)
    conditions = editor.encode(images(2), INSTRUCTIONS[:2])
    trajectory = rollout(editor, conditions, generators(2), num_steps=3, sde_steps=[0, 1], eta=0.7)
    assert trajectory.next_latents.dtype == torch.float32
    for k in range(2):
        assert torch.equal(replay(editor, trajectory, k).log_prob.detach(), trajectory.log_probs[k])
    assert editor.decode(trajectory.final, conditions)[0].dtype == torch.float32


def test_bad_options_are_named(editor, conditions):
    with pytest.raises(TPIPSError, match="between 0 and 3"):
        _sample(editor, conditions, sde_steps=[4])
    with pytest.raises(TPIPSError, match="starts has 2 entries for 6"):
        _sample(editor, conditions, starts=generators(2))
    with pytest.raises(TPIPSError, match="mirrored has 1 entries for 6"):
        _sample(editor, conditions, mirrored=[True])
    with pytest.raises(TPIPSError, match="twice"):
        _sample(editor, conditions, sde_steps=[1, 1])
    with pytest.raises(TPIPSError, match="positive eta"):
        _sample(editor, conditions, eta=0.0)
    with pytest.raises(TPIPSError, match="num_steps"):
        _sample(editor, conditions, num_steps=0, sde_steps=[])
