"""The built-in editor's training: data, losses, optimizer, schedule, and resuming to the bit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_recipes.builtin.budget import Budget, learning_rate, load_state
from rl_recipes.builtin.components import build_vae
from rl_recipes.builtin.data import autoencoder_batch, edit_pairs, held_out_edits, noise_image, step_rng
from rl_recipes.builtin.instructions import InstructionStates, all_instructions, blind_text_encoder
from rl_recipes.builtin.measure_editor import save_pipeline
from rl_recipes.builtin.muon import Muon, orthogonalise
from rl_recipes.builtin.pool import LatentPool
from rl_recipes.builtin.train_editor import EditorSettings, EditorTraining, flow_loss, noise_levels
from rl_recipes.builtin.train_vae import VAESettings, VAETraining, moments, psnr, reconstruct, vae_loss
from rl_recipes.builtin.vae_start import start_linear
from rl_recipes.editors.single_frame import enable_single_frame
from tpips_reward.errors import TPIPSError
from tpips_reward.scenes import sample_edit

TINY_EDITOR = EditorSettings(num_layers=1, batch_size=3, first_pairs=6, pairs_a_step=1, text_share=0.5)
TINY_VAE = VAESettings(base_dim=8, batch_size=2)


@pytest.fixture(scope="module")
def small_vae() -> torch.nn.Module:
    vae = build_vae(base_dim=8, seed=1)
    enable_single_frame(vae)
    return vae


# Data


def test_a_pair_depends_on_its_index_alone() -> None:
    together = edit_pairs(3, range(5), drift_probability=0.5)
    alone = edit_pairs(3, [4], drift_probability=0.5)
    assert torch.equal(together.targets[4], alone.targets[0])
    assert together.instructions[4] == alone.instructions[0]
    assert not torch.equal(together.sources[3], together.sources[4])


def test_changed_marks_what_the_instruction_is_about_and_not_the_drift() -> None:
    clean = edit_pairs(0, range(40), drift_probability=0.0)
    drifted = edit_pairs(0, range(40), drift_probability=1.0)
    assert torch.equal(clean.changed, drifted.changed)
    difference = (clean.sources.int() - clean.targets.int()).abs().amax(-1)
    assert torch.equal(clean.changed, difference > 8)
    assert (clean.targets != drifted.targets).flatten(1).any(1).float().mean() > 0.9


def test_kind_weights_choose_the_kinds() -> None:
    pairs = edit_pairs(0, range(30), drift_probability=0.0, weights={"position": 1e6})
    assert all(sentence.startswith(("move", "shift")) for sentence in pairs.instructions)


def test_training_never_sees_a_held_out_combination() -> None:
    def combination(edit):
        return edit.kind, edit.source.shape, edit.value

    rng = np.random.default_rng(0)
    train = {combination(sample_edit(rng, "train")) for _ in range(1500)}
    test = {combination(edit) for edit in held_out_edits(0, 300)}
    assert not train & test and len(test) > 15


def test_autoencoder_images_are_in_range_and_repeatable() -> None:
    images = autoencoder_batch(step_rng(0, 1), 6)
    assert images.shape == (6, 3, 64, 64) and images.dtype == torch.float32
    assert images.min() >= -1 and images.max() <= 1
    assert torch.equal(images, autoencoder_batch(step_rng(0, 1), 6))


def test_noise_images_are_smoother_than_white_noise() -> None:
    image = noise_image(np.random.default_rng(0)).astype(float)
    neighbours = np.abs(np.diff(image, axis=1)).mean()
    assert neighbours < 0.5 * image.std() * math.sqrt(2)


# Optimizer and schedule


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalise(matrix)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.4 and values.max() < 1.3
    # Same singular vectors: the result is the polar factor's neighbour, so their inner product is near its maximum.
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert (result * (u @ v)).sum() > 0.9 * min(shape) * 0.7


def test_the_adam_part_is_adamw() -> None:
    start = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = Muon([], [ours], lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1)
    for step in range(5):
        for parameter, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            (parameter.sin() * (step + 1)).sum().backward()
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_unused_temporal_slices_are_left_alone() -> None:
    kernel = torch.nn.Parameter(torch.ones(4, 3, 3, 3, 3))
    kernel.grad = torch.zeros_like(kernel)
    kernel.grad[:, :, -1] = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    Muon([kernel], [], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(kernel[:, :, :2], torch.ones(4, 3, 2, 3, 3))
    assert (kernel[:, :, -1] != 1).all()


def test_learning_rate_warms_up_and_ends_at_zero() -> None:
    assert learning_rate(1.0, 0, 0.0, warmup=10) == pytest.approx(0.1)
    assert learning_rate(1.0, 500, 0.5) == pytest.approx(0.5)
    assert learning_rate(1.0, 500, 1.0) == pytest.approx(0.0)


@pytest.mark.parametrize("arguments", [{}, {"steps": 3, "minutes": 1.0}, {"steps": 0}, {"minutes": -1.0}])
def test_a_budget_needs_one_positive_length(arguments: dict[str, float]) -> None:
    with pytest.raises(TPIPSError, match="length|how long"):
        Budget(**arguments)


def test_missing_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="no checkpoint"):
        load_state(tmp_path / "checkpoint.pt", {})
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(TPIPSError, match="cannot be read"):
        load_state(tmp_path / "checkpoint.pt", {})
    torch.save({"settings": {"seed": 1}}, tmp_path / "checkpoint.pt")
    with pytest.raises(TPIPSError, match="seed=1"):
        load_state(tmp_path / "checkpoint.pt", {"seed": 0})


# Autoencoder


def test_psnr_is_its_formula() -> None:
    images = torch.zeros(1, 3, 8, 8)
    # 0.1 of a range of 2, up to 8-bit rounding.
    assert psnr(images, images + 0.1).item() == pytest.approx(20 * math.log10(2 / 0.1), abs=0.4)


def test_the_vae_loss_is_its_formula(small_vae: torch.nn.Module) -> None:
    images = autoencoder_batch(step_rng(0, 2), 2)[:, :, :32, :32]
    noise = torch.randn(2, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    settings = VAESettings(kl_weight=0.5)
    with torch.no_grad():
        mean, logvar = moments(small_vae, images)
        restored = reconstruct(small_vae, mean + (logvar / 2).exp() * noise)
        normal = torch.distributions.Normal(0.0, 1.0)
        kl = torch.distributions.kl_divergence(torch.distributions.Normal(mean, (logvar / 2).exp()), normal).mean()
        distance = (restored - images).abs()
        huber = torch.where(distance < 0.1, distance**2 / 0.2, distance - 0.05).mean()
        loss = vae_loss(small_vae, images, noise, settings)
    assert loss.item() == pytest.approx((huber + 0.5 * kl).item(), rel=1e-5)


def test_reconstruct_is_the_decoder_without_its_clamp(small_vae: torch.nn.Module) -> None:
    images = autoencoder_batch(step_rng(0, 3), 1)
    with torch.no_grad():
        mean, _ = moments(small_vae, images)
        ours = reconstruct(small_vae, mean).clamp(-1, 1)
        theirs = small_vae.decode(small_vae.encode(images[:, :, None]).latent_dist.mode()).sample[:, :, 0]
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_linear_start_closes_branches_and_carries_the_image() -> None:
    vae = build_vae(base_dim=16)
    start_linear(vae, torch.Generator().manual_seed(0))
    block = vae.encoder.down_blocks[0]
    stream = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(block(stream), block.conv_shortcut(stream))
        a, b = (moments(vae, image)[0] for image in autoencoder_batch(step_rng(0, 4), 2)[:, None].unbind(0))
    assert (a - b).abs().mean() > 1e-3


def test_vae_training_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(steps: range, resume: bool) -> VAETraining:
        training = VAETraining(TINY_VAE, Budget(steps=4), tmp_path)
        if resume:
            training.resume()
        for step in steps:
            training.train_step(step / 4)
        training.save()
        return training

    whole = run(range(4), resume=False)
    run(range(2), resume=False)
    resumed = run(range(2, 4), resume=True)
    assert resumed.step == 4
    for name, value in whole.vae.state_dict().items():
        assert torch.equal(value, resumed.vae.state_dict()[name]), name


# Editor


def test_noise_levels_cover_the_schedule() -> None:
    levels = noise_levels(np.random.default_rng(0), 4000, 4.0)
    assert levels.min() > 0 and levels.max() == 1
    # The sampler's first step starts from pure noise.
    assert (levels == 1).float().mean() == pytest.approx(0.25, abs=0.03)
    assert levels[levels < 1].median() == pytest.approx(0.8, abs=0.03)
    assert (levels < 0.2).float().mean() > 0.02


class _Oracle(torch.nn.Module):
    """Knows the velocity, and is off by ``error`` on one token."""

    def __init__(self, velocity: torch.Tensor, error: float) -> None:
        super().__init__()
        self.velocity, self.error = velocity, error

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor]:
        out = torch.zeros_like(hidden_states)
        out[:, : self.velocity.shape[1]] = self.velocity
        out[:, 0] += self.error
        return (out,)


def test_the_flow_loss_is_its_formula() -> None:
    g = torch.Generator().manual_seed(0)
    source, target, noise = (torch.randn(2, 16, 8, generator=g) for _ in range(3))
    changed = torch.zeros(2, 16, dtype=torch.bool)
    changed[:, 0] = True
    text, sigma = (torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)), torch.tensor([0.3, 0.8])

    def loss(error: float) -> float:
        oracle = _Oracle(noise - target, error)
        return flow_loss(oracle, (source, target, changed), text, noise, sigma, changed_weight=3.0).item()

    assert loss(0.0) == pytest.approx(0.0, abs=1e-12)
    # One token of 16 is wrong by 0.5 in every channel, and counts four times.
    assert loss(0.5) == pytest.approx(4 * 0.25 / (15 + 4), rel=1e-5)


@pytest.fixture(scope="module")
def training(small_vae: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> EditorTraining:
    return EditorTraining(TINY_EDITOR, small_vae, Budget(steps=4), tmp_path_factory.mktemp("editor"))


def test_states_are_the_pipelines_own_and_do_not_see_the_image(training: EditorTraining) -> None:
    sentences = [training.states.sentences[i] for i in (3, 50, 100)]
    noise = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 255, (3, 64, 64), dtype=torch.uint8, generator=noise) for _ in sentences]
    with torch.no_grad():
        theirs, mask = training.pipeline.encode_prompt(sentences, image=images)
        ours, our_mask = training.states.lookup(torch.tensor([3, 50, 100]))
    assert torch.equal(ours, theirs)
    assert torch.equal(our_mask, mask.bool())


def test_frozen_states_are_those_of_the_encoder(small_vae: torch.nn.Module, training: EditorTraining) -> None:
    states = InstructionStates(training.pipeline, training.states.sentences[:5], size=64)
    with torch.no_grad():
        live, mask = states.lookup(torch.tensor([4, 1, 1]))
    states.freeze()
    cached, cached_mask = states.lookup(torch.tensor([4, 1, 1]))
    assert torch.equal(mask, cached_mask)
    assert torch.allclose(live[mask], cached[mask], atol=1e-6)


def test_blind_text_encoders_give_zero_image_features(training: EditorTraining) -> None:
    blind_text_encoder(training.pipeline.text_encoder)
    visual = training.pipeline.text_encoder.model.visual
    assert not visual.merger.mlp[-1].weight.any() and not visual.merger.mlp[-1].bias.any()


def test_every_training_sentence_is_known() -> None:
    known = set(all_instructions())
    rng = np.random.default_rng(5)
    assert all(sample_edit(rng, "train").instruction in known for _ in range(500))


def test_the_pool_grows_without_changing_what_it_holds(training: EditorTraining, small_vae: torch.nn.Module) -> None:
    def pool() -> LatentPool:
        return LatentPool(small_vae, training.states, seed=0, drift_probability=0.5, chunk=16)

    one, two = pool(), pool()
    one.grow(24)
    two.grow(3)
    two.grow(19)
    assert len(one) == len(two) == 24
    ids = torch.tensor([23, 0, 9])
    for a, b in zip(one.batch(ids), two.batch(ids), strict=True):
        assert torch.equal(a, b)
    source, _, changed, _ = one.batch(ids)
    assert source.shape == (3, 64, 64) and changed.shape == (3, 64)


def test_editor_training_resumes_to_the_bit(small_vae: torch.nn.Module, tmp_path: Path) -> None:
    def run(steps: range, resume: bool) -> EditorTraining:
        run_ = EditorTraining(TINY_EDITOR, small_vae, Budget(steps=4), tmp_path)
        if resume:
            run_.resume()
        for step in steps:
            run_.train_step(step / 4)
        run_.save()
        return run_

    whole = run(range(4), resume=False)
    # The text encoder is frozen after half of the steps: both sides of that point are resumed into.
    run(range(3), resume=False)
    resumed = run(range(3, 4), resume=True)
    assert not resumed.text_learns
    for name, value in whole.average.state_dict().items():
        assert torch.equal(value, resumed.average.state_dict()[name]), name


def test_exported_folders_appear_whole_and_replace_older_ones(training: EditorTraining, tmp_path: Path) -> None:
    folder = tmp_path / "editor"
    folder.mkdir()
    (folder / "leftover").write_text("old")
    save_pipeline(training.pipeline, training.average, folder)
    assert (folder / "model_index.json").is_file() and not (folder / "leftover").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["editor"]
