"""The parts of an iteration: who draws what, how gradients add up, and what a line says."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_editors import tiny_editor

from rl_recipes import grpo
from rl_recipes.config import Arguments, parse_arguments
from rl_recipes.progress import PhaseTimer
from rl_recipes.prompts import ProceduralPrompts
from rl_recipes.reporting import summarise_rows
from rl_recipes.runs import RunFolder
from rl_recipes.seeds import generator
from tpips_reward.rewards import RewardOutput
from tpips_reward.stopping import StopSignal


def _args(**changes: Any) -> Arguments:
    settings = {"resolution": 32, "prompts_per_iteration": 4, "num_generations": 2, "num_inference_steps": 3, "sde_window": 2,
                "train_steps": 2, "threads": 1, **changes}  # fmt: skip
    return parse_arguments([f"--{name}={value}" for name, value in settings.items()])


class PixelReward:
    """Red is good: a reward whose answer is known."""

    def __call__(self, images: Any, references: Any, preserve: Any, target: Any) -> RewardOutput:
        scores = torch.stack([image[0].mean() for image in images])
        aspects: list[dict[str, dict[str, float]]] = [{"preserve": {"red": float(s)}, "target": {}} for s in scores]
        return RewardOutput(scores, aspects, {"preserve": scores})


def _process(rank: int = 0, world: int = 1) -> Any:
    """What draw_prompts asks of an accelerator."""
    return SimpleNamespace(process_index=rank, num_processes=world)


def _collect(args: Arguments, tmp_path: Any, editor: Any, rank: int = 0, world: int = 1) -> list[grpo.Batch]:
    drawn = grpo.draw_prompts(ProceduralPrompts(0, "train", 32), 1, args, _process(rank, world))
    parts = grpo.make_batches(drawn, editor, args)
    folder, accelerator = RunFolder(tmp_path), Accelerator(cpu=True)
    return [
        grpo.collect(editor, PixelReward(), part, 1, args, folder, accelerator, PhaseTimer(), StopSignal())  # type: ignore[arg-type]
        for part in parts
    ]


def test_generators_are_functions_of_all_their_keys() -> None:
    draws = {
        keys: torch.rand(3, generator=generator(*keys)).tolist()
        for keys in [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1, 2, 0), (0, 12), (3,)]
    }
    assert len({tuple(v) for v in draws.values()}) == len(draws)
    assert torch.rand(3, generator=generator(0, 1, 2)).tolist() == draws[(0, 1, 2)]


def test_processes_draw_what_one_process_would() -> None:
    args, source = _args(), ProceduralPrompts(0, "train", 32)
    alone = grpo.draw_prompts(source, 3, args, _process())
    shared = [pair for rank in range(2) for pair in grpo.draw_prompts(source, 3, args, _process(rank, 2))]
    assert [(d.group, d.sample, d.prompt.key) for d in alone] == [(d.group, d.sample, d.prompt.key) for d in shared]
    assert [(d.group, d.sample) for d in alone] == [(g, s) for g in range(4) for s in range(2)]
    later = grpo.draw_prompts(source, 4, args, _process())
    assert {d.prompt.key for d in alone}.isdisjoint(d.prompt.key for d in later)


def test_trained_steps_change_and_stay_in_the_window() -> None:
    args = _args(num_inference_steps=8, sde_window=5, train_steps=2)
    drawn = [tuple(grpo.draw_train_steps(i, args)) for i in range(60)]
    assert all(len(set(steps)) == 2 and 0 <= min(steps) <= max(steps) < 5 for steps in drawn)
    assert len(set(drawn)) == 10, "every pair of five steps turns up"
    assert drawn == [tuple(grpo.draw_train_steps(i, args)) for i in range(60)]


def test_no_two_samples_share_noise_and_a_group_shares_its_source(tmp_path: Any) -> None:
    editor = tiny_editor()
    (batch,) = _collect(_args(), tmp_path, editor)
    flat = batch.trajectory.latents[0].flatten(1)
    assert torch.unique(flat, dim=0).shape[0] == 8
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.sources[0] is batch.sources[1] and batch.sources[1] is not batch.sources[2]
    assert [p.key for p in batch.prompts[::2]] == [p.key for p in batch.prompts[1::2]]


def test_an_iteration_in_parts_gives_the_gradient_of_the_whole(tmp_path: Any) -> None:
    """Batches of three edits, and processes of two groups each, add up to the gradient of one batch of four groups."""
    gradients = {}
    for name, changes, shares in (("whole", {}, 1), ("batches", {"samples_per_batch": 3}, 1), ("processes", {}, 2)):
        editor = tiny_editor()
        parameters = editor.add_lora(4, 8, generator=generator(0))
        args = _args(max_grad_norm=1e9, beta=0.1, **changes)
        with torch.no_grad():  # B = 0 would leave A without a gradient, and the KL at 0
            for parameter in parameters:
                parameter.add_(0.01)
        total: list[torch.Tensor] = [torch.zeros_like(p) for p in parameters]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        for rank in range(shares):
            batches = _collect(args, tmp_path, editor, rank, shares)
            grpo.assign_advantages(batches, args, Accelerator(cpu=True))

            def keep(total: list[torch.Tensor] = total, parameters: Any = parameters, shares: int = shares) -> None:
                for t, p in zip(total, parameters, strict=True):
                    if p.grad is not None:
                        t += p.grad / shares

            moved = grpo.update(editor, optimizer, batches, 1, args, Accelerator(cpu=True), PhaseTimer(), keep)
            assert moved["ratio_max_deviation"] == 0.0
        gradients[name] = total
    for name in ("batches", "processes"):
        for a, b in zip(gradients["whole"], gradients[name], strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-3)


def test_the_update_raises_what_scored_above_its_group(tmp_path: Any) -> None:
    editor, args = tiny_editor(), _args(learning_rate=1e-2, epsilon=10.0, train_steps=2)
    parameters = editor.add_lora(4, 8, generator=generator(0))
    (batch,) = _collect(args, tmp_path, editor)
    grpo.assign_advantages([batch], args, Accelerator(cpu=True))
    scores = batch.output.scores.view(4, 2)
    assert torch.equal(batch.advantages.view(4, 2) > 0, scores > scores.mean(1, keepdim=True))
    optimizer = torch.optim.SGD(parameters, lr=1e-2)

    def gain() -> float:
        with torch.no_grad():
            log_probs = torch.stack([grpo.replay(editor, batch.trajectory, k).log_prob for k in range(2)])  # type: ignore[misc]
        return float(((log_probs - batch.trajectory.log_probs) * batch.advantages).mean())

    assert gain() == 0.0
    for _ in range(3):
        grpo.update(editor, optimizer, [batch], 1, args, Accelerator(cpu=True), PhaseTimer(), lambda: None)
    assert gain() > 0.0


def test_equal_rewards_teach_nothing(tmp_path: Any) -> None:
    editor, args = tiny_editor(), _args()
    editor.add_lora(4, 8, generator=generator(0))
    (batch,) = _collect(args, tmp_path, editor)
    batch.output = replace(batch.output, scores=torch.full((8,), 0.3) + 1e-9 * torch.arange(8))
    grpo.assign_advantages([batch], args, Accelerator(cpu=True))
    assert batch.advantages.tolist() == [0.0] * 8
    before = editor.lora_state()
    optimizer = torch.optim.AdamW(editor.lora_parameters(), lr=1e-2, weight_decay=0.0)
    grpo.update(editor, optimizer, [batch], 1, args, Accelerator(cpu=True), PhaseTimer(), lambda: None)
    assert all(torch.equal(value, before[name]) for name, value in editor.lora_state().items())


def test_batches_hold_so_many_edits_and_never_two_sizes() -> None:
    drawn = grpo.draw_prompts(ProceduralPrompts(0, "train", 32), 1, _args(), _process())
    for settings, sizes in (({}, [8]), ({"samples_per_batch": 3}, [3, 3, 2])):
        parts = grpo.make_batches(drawn, tiny_editor(), _args(**settings))
        assert [len(part) for part in parts] == sizes
        assert [item for part in parts for item in part] == drawn
    wide = replace(drawn[2].prompt, image=torch.zeros(3, 32, 64))
    mixed = [item._replace(prompt=wide) if item.group == 1 else item for item in drawn]
    parts = grpo.make_batches(mixed, tiny_editor(), _args(num_generations=2))
    assert [{item.group for item in part} for part in parts] == [{0}, {1}, {2, 3}]


def test_gradient_checkpointing_changes_no_number(tmp_path: Any) -> None:
    found = {}
    for name in ("plain", "checkpointed"):
        editor = tiny_editor()
        parameters = editor.add_lora(4, 8, generator=generator(0))
        if name == "checkpointed":
            editor.transformer.enable_gradient_checkpointing()
        batches = _collect(_args(), tmp_path, editor)
        grpo.assign_advantages(batches, _args(), Accelerator(cpu=True))
        seen: list[torch.Tensor] = []

        def keep(seen: list[torch.Tensor] = seen, parameters: Any = parameters) -> None:
            seen += [p.grad.clone() for p in parameters if p.grad is not None]

        optimizer = torch.optim.SGD(parameters, lr=0.0)
        moved = grpo.update(editor, optimizer, batches, 1, _args(), Accelerator(cpu=True), PhaseTimer(), keep)
        assert moved["ratio_max_deviation"] == 0.0
        found[name] = seen
    assert found["plain"]
    for plain, checkpointed in zip(found["plain"], found["checkpointed"], strict=True):
        # The second forward pass has all cores, the first one each: the last bits may differ.
        torch.testing.assert_close(checkpointed, plain, atol=1e-8, rtol=1e-4)


@pytest.mark.parametrize(
    ("schedule", "half", "last"), [("constant", 1.0, 1.0), ("linear", 0.5, 0.1), ("cosine", 0.5, 0.0245)]
)
def test_learning_rates(schedule: str, half: float, last: float) -> None:
    args = _args(lr_scheduler_type=schedule, learning_rate=1.0, max_steps=10)
    assert grpo.learning_rate(1, args) == 1.0
    assert grpo.learning_rate(6, args) == pytest.approx(half)
    assert grpo.learning_rate(10, args) == pytest.approx(last, abs=1e-3)


def test_a_line_holds_means_of_what_is_known() -> None:
    def row(group: int, score: float, advantage: float, aspects: dict[str, float], change: float) -> dict[str, Any]:
        return {"group": group, "score": score, "advantage": advantage, "aspects": {"preserve": aspects, "target": {}},
                "terms": {"preserve": score, "change": change}}  # fmt: skip

    rows = [row(0, 0.2, -1, {"a": 0.2}, math.nan), row(0, 0.6, 1, {"a": 0.6, "b": 1.0}, math.nan),
            row(1, 0.5, 0, {"b": 0.0}, 0.4), row(1, 0.5, 0, {}, math.nan)]  # fmt: skip
    rows[0]["known"] = {"copy_rate": True, "edit_success": False, "object_lost": False}
    line = summarise_rows(rows)
    assert line["reward_mean"] == pytest.approx(0.45) and line["zero_std_share"] == 0.5
    assert line["group_std"] == pytest.approx(0.1)
    assert line["term_change"] == pytest.approx(0.4) and line["copy_rate"] == 1.0
    assert line["aspects"]["preserve"] == pytest.approx({"a": 0.4, "b": 0.5})
    assert "term_change" not in summarise_rows(rows[:2])
