"""The parts of an iteration: who draws what, how gradients add up, and what a line says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import PixelSource, draws, job_of, settings, step
from tiny_editors import tiny_editor

from rl_recipes import grpo
from rl_recipes.collecting import Batch, make_batches
from rl_recipes.config import Arguments
from rl_recipes.drawing import PromptQueue
from rl_recipes.job import Job
from rl_recipes.optimizing import learning_rate
from rl_recipes.prompts import ProceduralPrompts
from rl_recipes.reporting import summarise_rows
from rl_recipes.seeds import generator


def _args(**changes: Any) -> Arguments:
    return settings(**{"prompts_per_iteration": 4, "train_steps": 2, **changes})


def _collect(job: Job, rank: int = 0, world: int = 1) -> list[Batch]:
    return grpo.sample(job, make_batches(job, draws(job, 1, rank, world)), step())


def _trained(job: Job, lr: float = 0.0, optimizer: type = torch.optim.SGD) -> list[torch.nn.Parameter]:
    """Adds an adapter that an optimizer of its own trains."""
    parameters = job.editor.add_lora(4, 8, generator=generator(0))
    job.optimizer = optimizer(parameters, lr=lr)
    return parameters


def _gradients(job: Job, batches: list[Batch]) -> list[torch.Tensor]:
    """The gradients of an update, as the optimizer gets them."""
    seen: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.extend(
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in optimizer.param_groups[0]["params"]
        )

    handle = job.optimizer.register_step_pre_hook(keep)
    moved = grpo.update(job, batches, step())
    handle.remove()
    assert moved["ratio_max_deviation"] == 0.0
    return seen


def test_generators_are_functions_of_all_their_keys() -> None:
    draws = {
        keys: torch.rand(3, generator=generator(*keys)).tolist()
        for keys in [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1, 2, 0), (0, 12), (3,)]
    }
    assert len({tuple(v) for v in draws.values()}) == len(draws)
    assert torch.rand(3, generator=generator(0, 1, 2)).tolist() == draws[(0, 1, 2)]


def test_processes_draw_what_one_process_would(tmp_path: Any) -> None:
    """Two processes have two groups each; eight have one edit each, so that groups span processes."""
    job = job_of(_args(), tiny_editor(), tmp_path)

    def drawn(iteration: int, world: int) -> list[tuple[int, int, str]]:
        all_draws = [d for rank in range(world) for d in draws(job, iteration, rank, world)]
        return [(d.group, d.sample, d.prompt.key) for d in all_draws]

    alone = drawn(3, 1)
    assert [(group, sample) for group, sample, _ in alone] == [(g, s) for g in range(4) for s in range(2)]
    assert drawn(3, 2) == drawn(3, 8) == alone
    assert len(draws(job, 3, 5, 8)) == 1
    assert {key for *_, key in alone}.isdisjoint(key for *_, key in drawn(4, 1))


def test_trained_steps_change_and_stay_in_the_window() -> None:
    args = _args(num_inference_steps=8, sde_window=5, train_steps=2)
    drawn = [tuple(grpo.draw_train_steps(i, args)) for i in range(60)]
    assert all(len(set(steps)) == 2 and 0 <= min(steps) <= max(steps) < 5 for steps in drawn)
    assert len(set(drawn)) == 10, "every pair of five steps turns up"
    assert drawn == [tuple(grpo.draw_train_steps(i, args)) for i in range(60)]


def test_windows_move_and_replay_knows_where_they_were(tmp_path: Any) -> None:
    args = _args(window="slide", window_every=2, sde_window=1, train_steps=1)
    assert [grpo.stochastic_steps(i, args) for i in range(1, 8)] == [(0,), (0,), (1,), (1,), (2,), (2,), (0,)]
    jumping = _args(window="random", num_inference_steps=8, window_limit=6)
    places = {grpo.stochastic_steps(i, jumping)[0] for i in range(1, 60)}
    assert places == {0, 1, 2, 3, 4}
    assert grpo.stochastic_steps(1, _args(window="slide", sde_kind="cps", num_inference_steps=3)) == (0, 1)
    job = job_of(_args(window="slide", sde_window=1, train_steps=1), tiny_editor(), tmp_path)
    _trained(job)
    batches = grpo.sample(job, make_batches(job, draws(job, 3)), step(3))
    assert batches[0].trajectory.sde_steps == (2,)
    grpo.assign_group_advantages(batches, job)
    assert grpo.update(job, batches, step(3))["ratio_max_deviation"] == 0.0


def test_guard_begins_at_ratio_one_and_weighs_late_steps(tmp_path: Any) -> None:
    job = job_of(_args(ratio="guard", beta=0.0, learning_rate=0.0), tiny_editor(), tmp_path)
    parameters = _trained(job)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.01)
    batches = _collect(job)
    grpo.assign_group_advantages(batches, job)
    guarded = _gradients(job, batches)
    job.args.algorithm.ratio = "plain"
    plain = _gradients(job, batches)
    assert any(float(g.abs().max()) > 0 for g in guarded)
    assert not all(torch.allclose(a, b) for a, b in zip(guarded, plain, strict=True))


def test_no_two_samples_of_separate_noise_share_it_and_a_group_shares_its_source(tmp_path: Any) -> None:
    (batch,) = _collect(job_of(_args(same_noise=False, antithetic=False), tiny_editor(), tmp_path))
    flat = batch.trajectory.latents[0].flatten(1)
    assert torch.unique(flat, dim=0).shape[0] == 8
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.sources[0] is batch.sources[1] and batch.sources[1] is not batch.sources[2]
    assert [p.key for p in batch.prompts[::2]] == [p.key for p in batch.prompts[1::2]]


@pytest.mark.parametrize("antithetic", [True, False])
def test_a_group_starts_from_one_noise_and_its_pairs_part_in_opposite_directions(tmp_path: Any, antithetic: bool) -> None:
    args = _args(prompts_per_iteration=2, num_generations=4, antithetic=antithetic)
    (batch,) = _collect(job_of(args, tiny_editor(), tmp_path))
    t = batch.trajectory
    assert [batch.groups[row] for row in t.alike or ()] == batch.groups.tolist()
    assert torch.unique(t.latents[0].flatten(1), dim=0).shape[0] == 2
    drawn = (t.next_latents - t.means).flatten(2)
    opposite = torch.allclose(drawn[:, ::2], -drawn[:, 1::2], atol=1e-5)
    assert opposite == antithetic
    assert not torch.allclose(drawn[:, 0], drawn[:, 2], atol=0.1), "two pairs have noise of their own"


def test_antithetic_edits_of_separate_noise_start_apart(tmp_path: Any) -> None:
    (batch,) = _collect(job_of(_args(same_noise=False, antithetic=True), tiny_editor(), tmp_path))
    t = batch.trajectory
    assert torch.unique(t.latents[0].flatten(1), dim=0).shape[0] == 8
    drawn = t.next_latents - t.means
    torch.testing.assert_close(drawn[:, ::2], -drawn[:, 1::2], atol=1e-5, rtol=1e-4)


def test_an_iteration_in_parts_gives_the_gradient_of_the_whole(tmp_path: Any) -> None:
    """Batches of three edits, and processes of two groups each, add up to the gradient of one batch of four groups."""
    gradients = {}
    for name, changes, shares in (("whole", {}, 1), ("batches", {"samples_per_batch": 3}, 1), ("processes", {}, 2)):
        job = job_of(_args(max_grad_norm=1e9, beta=0.1, **changes), tiny_editor(), tmp_path)
        parameters = _trained(job)
        with torch.no_grad():  # B = 0 would leave A without a gradient, and the KL at 0
            for parameter in parameters:
                parameter.add_(0.01)
        total: list[torch.Tensor] = [torch.zeros_like(p) for p in parameters]
        for rank in range(shares):
            batches = _collect(job, rank, shares)
            grpo.assign_group_advantages(batches, job)
            for mine, part in zip(total, _gradients(job, batches), strict=True):
                mine += part / shares
        gradients[name] = total
    for name in ("batches", "processes"):
        for a, b in zip(gradients["whole"], gradients[name], strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-3)


def test_the_update_raises_what_scored_above_its_group(tmp_path: Any) -> None:
    job = job_of(_args(learning_rate=1e-2, epsilon=10.0), tiny_editor(), tmp_path)
    _trained(job, lr=1e-2)
    (batch,) = _collect(job)
    grpo.assign_group_advantages([batch], job)
    scores = batch.output.scores.view(4, 2)
    assert torch.equal(batch.advantages.view(4, 2) > 0, scores > scores.mean(1, keepdim=True))

    def gain() -> float:
        with torch.no_grad():
            replayed = [grpo.replay(job.editor, batch.trajectory, k).log_prob for k in range(2)]
        return float(((torch.stack(replayed) - batch.trajectory.log_probs) * batch.advantages).mean())  # type: ignore[arg-type]

    assert gain() == 0.0
    for _ in range(3):
        grpo.update(job, [batch], step())
    assert gain() > 0.0


def test_equal_rewards_teach_nothing(tmp_path: Any) -> None:
    job = job_of(_args(), tiny_editor(), tmp_path)
    parameters = _trained(job, lr=1e-2, optimizer=torch.optim.Adam)
    (batch,) = _collect(job)
    batch.output = replace(batch.output, scores=torch.full((8,), 0.3) + 1e-9 * torch.arange(8))
    grpo.assign_group_advantages([batch], job)
    assert batch.advantages.tolist() == [0.0] * 8
    before = [p.detach().clone() for p in parameters]
    grpo.update(job, [batch], step())
    assert all(map(torch.equal, parameters, before))


def test_rewards_are_normalised_together_or_each_for_itself(tmp_path: Any) -> None:
    """Of two rewards, one with a thousand times the spread, the sum follows that one; apart, both count by weight."""
    found = {}
    for way in ("together", "separately"):
        sources = {"large": PixelSource(0, 1000.0), "small": PixelSource(1, 1.0)}
        job = job_of(_args(normalise=way), tiny_editor(), tmp_path, sources)
        _trained(job)
        (batch,) = _collect(job)
        grpo.assign_group_advantages([batch], job)
        found[way] = batch.advantages.view(4, 2)
        parts = {n: v.view(4, 2) for n, v in batch.output.parts.items()}
    signs = {name: torch.sign(v - v.mean(1, keepdim=True)) for name, v in parts.items()}
    assert torch.equal(torch.sign(found["together"]), signs["large"])
    torch.testing.assert_close(found["separately"], (signs["large"] + signs["small"]) / 2, atol=0.3, rtol=0)
    assert not torch.equal(found["together"], found["separately"])


def test_batches_hold_so_many_edits_and_never_two_sizes(tmp_path: Any) -> None:
    for changes, sizes in (({}, [8]), ({"samples_per_batch": 3}, [3, 3, 2])):
        job = job_of(_args(**changes), tiny_editor(), tmp_path)
        drawn = draws(job, 1)
        parts = make_batches(job, drawn)
        assert [len(part) for part in parts] == sizes
        assert [item for part in parts for item in part] == drawn
    wide = replace(drawn[2].prompt, image=torch.zeros(3, 32, 64))
    mixed = [item._replace(prompt=wide) if item.group == 1 else item for item in drawn]
    parts = make_batches(job_of(_args(), tiny_editor(), tmp_path), mixed)
    assert [{item.group for item in part} for part in parts] == [{0}, {1}, {2, 3}]


def test_gradient_checkpointing_changes_no_number(tmp_path: Any) -> None:
    found = {}
    for name in ("plain", "checkpointed"):
        job = job_of(_args(), tiny_editor(), tmp_path)
        _trained(job)
        if name == "checkpointed":
            job.editor.transformer.enable_gradient_checkpointing()
        batches = _collect(job)
        grpo.assign_group_advantages(batches, job)
        found[name] = _gradients(job, batches)
    assert found["plain"]
    for plain, checkpointed in zip(found["plain"], found["checkpointed"], strict=True):
        # The second forward pass has all cores, the first one each: the last bits may differ.
        torch.testing.assert_close(checkpointed, plain, atol=1e-8, rtol=1e-4)


def test_saturated_prompts_are_skipped_and_come_back() -> None:
    source = ProceduralPrompts(0, "train", 32, count=4)
    queue = PromptQueue(source, skip=True, top=0.9)
    taken = []
    for iteration in range(1, 11):
        positions = queue.take(iteration, 2)
        taken.append([source.key_at(p) for p in positions])
        scores = {key: 0.95 if key == "train-000001" else 0.5 for key in taken[-1]}
        queue.note([k for k in scores for _ in range(2)], [s for s in scores.values() for _ in range(2)])
    assert queue.saturated() == {"train-000001"} and not queue.exhausted()
    epochs = [key for keys in taken for key in keys]
    # Three epochs with all four prompts, and the fourth is one of those in which saturated prompts are visited too.
    assert epochs[:16] == [source.key_at(p) for p in range(16)]
    assert epochs[16:] == [source.key_at(p) for p in (0, 2, 3, 0)]
    other = PromptQueue(source, skip=True, top=0.9)
    other.load_state_dict(queue.state_dict())
    assert other.take(11, 4) == queue.take(11, 4)
    plain = PromptQueue(source)
    plain.note(["train-000001"] * 9, [1.0] * 9)
    assert plain.take(3, 2) == [4, 5] and plain.saturated() == frozenset()


def test_when_all_prompts_are_saturated_training_goes_on() -> None:
    source = ProceduralPrompts(0, "train", 32, count=2)
    queue = PromptQueue(source, skip=True, top=0.9)
    for iteration in range(1, 4):
        assert not queue.exhausted()
        queue.note([source.key_at(p) for p in queue.take(iteration, 2)], [1.0, 1.0])
    assert len(queue.saturated()) == 2 and queue.exhausted()
    assert [queue.take(i, 2) for i in (4, 5)] == [[6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("schedule", "half", "last"), [("constant", 1.0, 1.0), ("linear", 0.5, 0.1), ("cosine", 0.5, 0.0245)]
)
def test_learning_rates(schedule: str, half: float, last: float) -> None:
    args = _args(lr_scheduler_type=schedule, learning_rate=1.0, max_steps=10)
    assert learning_rate(1, args.run) == 1.0
    assert learning_rate(6, args.run) == pytest.approx(half)
    assert learning_rate(10, args.run) == pytest.approx(last, abs=1e-3)


def test_a_line_holds_means_of_what_is_known() -> None:
    def row(group: int, score: float, advantage: float, aspects: dict[str, float], change: float) -> dict[str, Any]:
        return {"group": group, "score": score, "advantage": advantage, "aspects": {"preserve": aspects, "target": {}},
                "terms": {"preserve": score, "change": change}}  # fmt: skip

    rows = [row(0, 0.2, -1, {"a": 0.2}, math.nan), row(0, 0.6, 1, {"a": 0.6, "b": 1.0}, math.nan),
            row(1, 0.5, 0, {"b": 0.0}, 0.4), row(1, 0.5, 0, {}, math.nan)]  # fmt: skip
    rows[0]["known"] = {"edit_success": True, "object_lost": False, "drift": math.nan, "l1_to_ideal": 0.25}
    rows[0]["judge"] = 0.75
    line = summarise_rows(rows)
    assert line["reward_mean"] == pytest.approx(0.45) and line["zero_std_share"] == 0.5
    assert line["group_std"] == pytest.approx(0.1)
    assert line["term_change"] == pytest.approx(0.4) and line["edit_success"] == 1.0
    assert line["judge"] == 0.75 and "drift" not in line
    assert line["aspects"]["preserve"] == pytest.approx({"a": 0.4, "b": 0.5})
    assert "term_change" not in summarise_rows(rows[:2])
    del rows[0]["terms"]["change"]
    rows[3]["terms"] = {"own": 0.5}
    line = summarise_rows(rows)
    assert line["term_change"] == pytest.approx(0.4) and line["term_own"] == 0.5 and line["term_preserve"] == pytest.approx(1.3 / 3)
