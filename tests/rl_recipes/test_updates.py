"""The updates of DDPO, DiffusionNFT and backpropagation, on a reward whose answer is known: red is good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import PixelSource, draws, job_of, settings, step
from tiny_editors import tiny_editor, train_a_little

from rl_recipes import backprop, grpo, nft
from rl_recipes.collecting import Batch, collect, make_batches
from rl_recipes.config import BackpropArguments, DDPOArguments, GRPOArguments, NFTArguments
from rl_recipes.ddpo import Statistics, assign_prompt_advantages
from rl_recipes.job import Job
from rl_recipes.runs import RunError
from rl_recipes.seeds import generator
from rl_recipes.weights import ShadowWeights


def _job(algorithm: type, folder: Path, **changes: Any) -> Job:
    job = job_of(settings(algorithm, **changes), tiny_editor(), folder)
    parameters = job.editor.add_lora(4, 8, generator=generator(0))
    job.optimizer = torch.optim.Adam(parameters, lr=0.0)  # each step sets the rate of the settings
    return job


def _sampled(job: Job, number: int = 1) -> list[Batch]:
    return [collect(job, part, step(number)) for part in make_batches(job, draws(job, number))]


def _red(batches: list[Batch]) -> float:
    return float(torch.cat([batch.output.scores for batch in batches]).mean())


def test_backpropagation_raises_the_reward(tmp_path: Path) -> None:
    job = _job(BackpropArguments, tmp_path, learning_rate=0.02, kl_weight=0.01)
    before = _red(_sampled(job))
    moved = []
    for _ in range(4):
        edits, found = backprop.update(job, make_batches(job, draws(job)), step())
        moved.append(found)
        assert not edits[0].output.scores.requires_grad and not edits[0].edits[0].requires_grad
    assert _red(_sampled(job)) > before + 0.01
    assert moved[0]["distance"] == 0.0 < moved[-1]["distance"] and moved[0]["loss"] > moved[-1]["loss"]


def test_the_sampler_with_gradient_is_the_sampler(tmp_path: Path) -> None:
    job = _job(BackpropArguments, tmp_path, learning_rate=0.0)
    (batch,) = _sampled(job)
    edits, _ = backprop.update(job, [batch.drawn], step())
    for a, b in zip(edits[0].edits, batch.edits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_the_gradient_reaches_back_as_far_as_it_is_asked_to(tmp_path: Path) -> None:
    """K steps are K differing gradients; computing again changes none; batches add up to the whole."""
    norms = []
    for changes in ({"last_steps": 1}, {"last_steps": 3}, {"last_steps": 3, "recompute": True}, {"samples_per_batch": 1}):
        job = _job(BackpropArguments, tmp_path, **{"learning_rate": 0.0, "last_steps": 3, **changes})
        _, moved = backprop.update(job, make_batches(job, draws(job)), step())
        norms.append(moved["grad_norm"])
    one, three, again, parts = norms
    assert one > 0 and three == pytest.approx(again, rel=1e-6) == pytest.approx(parts, rel=1e-4)
    assert one != pytest.approx(three, rel=1e-3)


def test_a_reward_without_gradient_beside_one_that_has_it_is_refused(tmp_path: Path) -> None:
    class Still(PixelSource):
        def __call__(self, edits: Any, *rest: Any) -> Any:
            return super().__call__([edit.detach() for edit in edits], *rest)

    job = _job(BackpropArguments, tmp_path)
    job.reward = job_of(job.args, job.editor, tmp_path, {"red": PixelSource(), "still": Still()}).reward
    with pytest.raises(RunError, match="'still' gives no gradient"):
        backprop.update(job, make_batches(job, draws(job)), step())


def test_nft_raises_the_reward_and_its_old_policy_follows(tmp_path: Path) -> None:
    changes = {"num_generations": 4, "noise_levels": 3, "learning_rate": 0.01, "old_decay_rate": 0.25, "kl_weight": 0.01}
    job = _job(NFTArguments, tmp_path, **changes)
    old = ShadowWeights(job.editor.lora_parameters())
    before, moved = _red(_sampled(job)), []
    for number in range(1, 7):
        with old.swapped():
            batches = _sampled(job, number)
        grpo.assign_group_advantages(batches, job)
        moved.append(nft.update(job, batches, old, step(number)))
    assert _red(_sampled(job)) > before + 0.005
    assert [found["old_decay"] for found in moved[:4]] == [0.0, 0.25, 0.5, 0.5]
    assert moved[0]["distance"] == 0.0 < moved[-1]["distance"]
    assert not all(map(torch.equal, old.tensors, job.editor.lora_parameters()))


def test_nft_in_batches_is_nft_as_a_whole(tmp_path: Path) -> None:
    norms = []
    for most in (0, 1, 3):
        job = _job(NFTArguments, tmp_path, samples_per_batch=most, learning_rate=0.0, noise_levels=2)
        batches = _sampled(job)
        grpo.assign_group_advantages(batches, job)
        norms.append(nft.update(job, batches, ShadowWeights(job.editor.lora_parameters()), step())["grad_norm"])
    assert norms[0] > 0 and norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_in_mixed_precision_the_old_policy_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job(NFTArguments, tmp_path, noise_levels=1)
    monkeypatch.setattr(job.accelerator, "autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    batches = _sampled(job)
    grpo.assign_group_advantages(batches, job)
    old = ShadowWeights(job.editor.lora_parameters())
    train_a_little(job.editor)
    moved = nft.update(job, batches, old, step())
    assert moved["positive"] != moved["negative"], "both are the old policy's where the new one has its weights"


@pytest.mark.parametrize("algorithm", [GRPOArguments, BackpropArguments])
def test_in_mixed_precision_the_reference_is_where_all_weights_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: type
) -> None:
    job = job_of(settings(algorithm, kl_weight=0.1), tiny_editor(), tmp_path)
    monkeypatch.setattr(job.accelerator, "autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    job.optimizer = torch.optim.Adam(job.editor.train_all(), lr=0.0)
    train_a_little(job.editor, 0.03)
    if algorithm is BackpropArguments:
        distance = backprop.update(job, make_batches(job, draws(job)), step())[1]["distance"]
    else:
        batches = grpo.sample(job, make_batches(job, draws(job)), step())
        grpo.assign_group_advantages(batches, job)
        distance = grpo.update(job, batches, step())["kl"]
    assert distance > 0.05


def test_ddpo_compares_a_prompt_with_its_own_past(tmp_path: Path) -> None:
    job = _job(DDPOArguments, tmp_path, min_count=4, buffer_size=4, num_generations=2)
    statistics = Statistics(4)
    batches = grpo.sample(job, make_batches(job, draws(job)), step())
    assign_prompt_advantages(batches, job, statistics)
    scores = batches[0].output.scores
    first = (scores - scores.mean()) / scores.std(correction=0)  # too few rewards: the batch stands in
    torch.testing.assert_close(batches[0].advantages, first, atol=0.05, rtol=0)
    restored = Statistics(4)
    restored.load_state_dict(statistics.state_dict())
    batches[0].output = type(batches[0].output)(scores + 1.0, batches[0].output.per_aspect, {}, {})
    for one in (statistics, restored):
        assign_prompt_advantages(batches, job, one)
        assert bool((batches[0].advantages > 0.5).all()), "better than the past, all of them"
        assert len(one.of("sum").rewards(batches[0].prompts[0].key)) == 4
