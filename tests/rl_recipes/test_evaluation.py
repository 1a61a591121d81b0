"""Before and after: the same edits and noise, honest differences, and a judge that is not the reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import PixelSource, job_of, settings
from rich.console import Console
from tiny_editors import tiny_editor

from rl_recipes import evaluation
from rl_recipes.evaluation import MEASURES, Evaluation, compare, comparison_table, evaluate, setbacks
from rl_recipes.prompts import ProceduralPrompts, Prompt
from rl_recipes.rewards import Asked, Rewards, TPIPSSource
from rl_recipes.runs import DivergedError, RunError
from rl_recipes.seeds import generator
from tpips_reward.rewards import TPIPSReward
from tpips_reward.scenes import render, to_tensor
from tpips_reward.stopping import Interrupted


class FlatMetric:
    """Similarity 1 - mean |a - b| in every aspect."""

    range = (-1.0, 1.0)
    change_scale = 0.5

    def similarity_pairs(self, images: Any, references: Any, pairs: Any, **_: Any) -> torch.Tensor:
        return torch.stack([1 - (images[i] - references[r]).abs().mean() for i, r, _ in pairs])


def _evaluate(editor: Any, folder: Path, prompts: Any = None, count: int = 6, **changes: Any) -> Evaluation:
    args = settings(**{"num_inference_steps": 2, "sde_window": 1, "sample_grids": 3, **changes})
    sources = {"tpips:preserve": TPIPSSource(TPIPSReward("tpips:preserve", FlatMetric()))}
    return evaluate(job_of(args, editor, folder, sources), prompts or ProceduralPrompts(7, "test", 32), count, "before")


def _rows(**columns: list[float | None]) -> Evaluation:
    count = len(next(iter(columns.values())))
    nothing: list[float | None] = [None] * count
    return Evaluation([{"kind": "color", "key": f"row-{i}"} | {m: columns.get(m, nothing)[i] for m in MEASURES} for i in range(count)])


def test_an_evaluation_repeats_exactly_and_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    editor = tiny_editor()
    first, second = _evaluate(editor, tmp_path), _evaluate(editor, tmp_path)
    assert first.rows == second.rows and len(first.images) == 3
    single = _evaluate(editor, tmp_path, samples_per_batch=1, num_generations=2)
    for a, b in zip(first.images, single.images, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_a_perfect_editor_and_a_copying_one_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, editor = ProceduralPrompts(7, "test", 32), tiny_editor()
    results = {}
    for which in ("ideal", "source"):
        images = [to_tensor(render(getattr(prompts[i].edit, which), 32)) for i in range(6)]
        answers = iter([images[:4], images[4:]])
        monkeypatch.setattr(editor, "decode", lambda latents, conditions, answers=answers: next(answers))
        results[which] = _evaluate(editor, tmp_path).means()
    perfect, copying = results["ideal"], results["source"]
    assert (perfect["edit_success"], perfect["copy_rate"], perfect["object_lost"]) == (1.0, 0.0, 0.0)
    assert perfect["drift"] == pytest.approx(0, abs=1e-6) == perfect["l1_to_ideal"]
    assert (copying["edit_success"], copying["copy_rate"]) == (0.0, 1.0)
    assert copying["preserve"] == pytest.approx(1.0) and copying["target"] == pytest.approx(0.0, abs=1e-6)


def test_the_reward_and_each_of_several_are_measures(tmp_path: Path) -> None:
    red, green = "tpips:edit[metric=a/b]", "my_module:<green>"
    one, two = Asked(PixelSource(0), {red: 0.5}), Asked(PixelSource(1), {green: 2.0})
    job = job_of(settings(num_inference_steps=2, sde_window=1), tiny_editor(), tmp_path)
    job.reward = Rewards("both", [one, two])
    before = evaluate(job, ProceduralPrompts(7, "test", 32), 3, "before")
    for row in before.rows:
        assert row["reward"] == pytest.approx(0.5 * row[f"reward/{red}"] + 2 * row[f"reward/{green}"], rel=1e-5)
    assert list(before.means())[:3] == ["reward", f"reward/{red}", f"reward/{green}"]
    before.save(tmp_path)
    loaded = Evaluation.load(tmp_path)
    assert loaded is not None and loaded.rows == before.rows
    console = Console(record=True, width=160)
    console.print(comparison_table(before, before, "edits"))
    assert all(f"{name} ↑" in console.export_text(clear=False) for name in before.means() if name.startswith("reward"))
    job.reward = Rewards("one", [one])
    alone = evaluate(job, ProceduralPrompts(7, "test", 32), 3, "after")
    assert list(alone.means()) == list(MEASURES), "the only one is the reward itself"
    assert alone.means()["reward"] == pytest.approx(0.5 * (before.means()[f"reward/{red}"] or 0), rel=1e-5)


def test_a_reward_below_zero_that_rises_has_risen_in_percent() -> None:
    before, after = _rows(reward=[-0.2] * 8), _rows(reward=[-0.1] * 8)
    assert compare(before, after)["reward"]["relative"] == pytest.approx(0.5)
    assert setbacks(after, before) == ["reward went from -0.1000 to -0.2000"]


def test_photographs_have_no_ideal_but_copies_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor, image = tiny_editor(), torch.rand(3, 32, 32, generator=generator(0))
    prompts = [Prompt(image, "make it red", ("background",), (), f"line-{i}") for i in range(2)]
    monkeypatch.setattr(editor, "decode", lambda latents, conditions: [image, 1 - image])
    result = _evaluate(editor, tmp_path, prompts, 2)
    assert [row["copy_rate"] for row in result.rows] == [1.0, 0.0]
    assert result.rows[0]["aspects"]["preserve"] == {"background": pytest.approx(1.0)}
    assert result.means()["reward"] == pytest.approx(float(np.mean([row["preserve"] for row in result.rows]))), "what was optimised"
    assert result.rows[0]["drift"] is result.rows[0]["target"] is None
    means = result.means()
    assert means["copy_rate"] == 0.5 and means["edit_success"] is None


def test_an_evaluation_is_kept_and_damage_is_noticed(tmp_path: Path) -> None:
    assert Evaluation.load(tmp_path) is None
    row = {
        "key": "a", "kind": None, "instruction": "x", "reward": 0.5, "aspects": {}, **dict.fromkeys(MEASURES), "drift": 0.1
    }  # fmt: skip
    result = Evaluation([row], [torch.rand(3, 4, 6), torch.rand(3, 8, 4)])
    result.save(tmp_path)
    loaded = Evaluation.load(tmp_path)
    assert loaded is not None and loaded.rows == result.rows
    assert all(torch.equal(a, b) for a, b in zip(loaded.images, result.images, strict=True))
    for content in ('{"rows": [{"key": "a"}], "seconds": 1}', '{"rows": 3, "seconds": 1}', "[]", '{"rows": [], "seconds": "x"}', "{"):
        (tmp_path / "before.json").write_text(content)
        with pytest.raises(RunError, match=r"before\.json is damaged.*remove .*before\.json, and --resume evaluates"):
            Evaluation.load(tmp_path)
    (tmp_path / "before.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"before\.safetensors is damaged.*remove .*before\.json, and --resume"):
        Evaluation.load(tmp_path)


def test_a_photograph_that_stands_in_for_a_broken_one_counts_once(tmp_path: Path) -> None:
    image = torch.rand(3, 32, 32, generator=generator(0))
    prompts = [Prompt(image, "make it red", ("background",), (), key) for key in ("line-2", "line-2", "line-3")]
    result = _evaluate(tiny_editor(), tmp_path, prompts, 3)
    assert [row["key"] for row in result.rows] == ["line-2", "line-3"] == list(result.images_by_key())


def test_where_weights_are_shared_a_photograph_that_stands_in_is_edited_as_often_as_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one process would call the transformer less often than the others, which would wait for it."""
    asked: list[tuple[bool, ...]] = []
    monkeypatch.setattr(evaluation, "calls_together", lambda accelerator: True)
    monkeypatch.setattr(evaluation, "any_process", lambda accelerator, *flags: asked.append(flags) or flags)
    image = torch.rand(3, 32, 32, generator=generator(0))
    prompts = [Prompt(image, "make it red", ("background",), (), key) for key in ("line-2", "line-2", "line-3")]
    result = _evaluate(tiny_editor(), tmp_path, prompts, 3, samples_per_batch=1)
    assert asked == [(False, True)] * 3 + [(False, False)]
    assert [row["key"] for row in result.rows] == ["line-2", "line-3"]


def test_pixels_that_are_not_finite_are_never_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tiny_editor()
    monkeypatch.setattr(editor, "decode", lambda latents, conditions: [torch.full((3, 32, 32), torch.nan)] * len(latents))
    with pytest.raises(DivergedError, match="4 of 4 edits of evaluation_before/edit_000000 have pixels that are not finite"):
        _evaluate(editor, tmp_path)


def test_a_few_edits_have_a_difference_but_no_standard_error() -> None:
    before, after = _rows(drift=[0.1] * 7), _rows(drift=[0.2] * 7)
    found = compare(before, after)["drift"]
    assert found["difference"] == pytest.approx(0.1) and found["standard_error"] is found["low"] is None
    assert setbacks(before, after) == []
    console = Console(record=True, width=120)
    console.print(comparison_table(before, after, "edits"))
    assert "+0.1000" in console.export_text()
    assert setbacks(_rows(drift=[0.1] * 8), _rows(drift=[0.2] * 8))


def test_differences_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=400)
    change = rng.normal(-0.05, 0.1, size=400)
    before, after = _rows(drift=list(base)), _rows(drift=list(base + change))
    found = compare(before, after)["drift"]
    assert found["difference"] == pytest.approx(change.mean())
    # The spread between edits (1.0) is no part of the error of their differences (0.1).
    assert found["standard_error"] == pytest.approx(change.std() / 20, rel=0.1)
    assert found["low"] is not None and found["low"] < change.mean() < found["high"]
    assert found["relative"] == pytest.approx(change.mean() / abs(base.mean()))
    assert compare(before, after)["preserve"]["difference"] is None


def test_edits_are_compared_by_key_and_one_without_a_partner_is_left_out() -> None:
    before, after = _rows(drift=[0.5, 0.3, 0.1]), _rows(drift=[0.4, 0.3, 0.2])
    del after.rows[0]
    assert compare(before, after)["drift"]["difference"] == pytest.approx(0.05)


def test_unknown_values_are_left_out_in_pairs() -> None:
    found = compare(_rows(drift=[0.5, None, 0.1]), _rows(drift=[0.4, 0.2, None]))["drift"]
    assert found["difference"] == pytest.approx(-0.1)


def test_setbacks_are_what_got_clearly_worse() -> None:
    half = [0.0, 1.0] * 50
    before = _rows(edit_success=half, object_lost=[0.0] * 100, drift=[0.2] * 100)
    after = _rows(edit_success=half, object_lost=[0.0] * 90 + [1.0] * 10, drift=[0.1] * 100)
    assert setbacks(before, after) == ["object_lost went from 0.0000 to 0.1000"]
    console = Console(width=100, record=True)
    console.print(comparison_table(before, after, "held-out edits"))
    text = console.export_text()
    assert "100 held-out edits" in text and "-0.1000 (-50 %)" in text and "preserve" not in text, "what nobody measured has no row"


def test_a_failing_reward_stops_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatMetric, "similarity_pairs", lambda *a, **k: torch.full((len(a[3]),), float("nan")))
    with pytest.raises(RunError, match="failed in evaluation_before/edit_000000"):
        _evaluate(tiny_editor(), tmp_path)
    assert (tmp_path / "failed_batch" / "evaluation_before" / "edit_000000" / "batch.json").is_file()


def test_every_measure_has_a_direction() -> None:
    assert set(MEASURES.values()) == {1, -1}


def test_a_stop_in_any_process_ends_the_evaluation_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, ...]] = []

    def another_is_stopped(accelerator: Any, *flags: bool) -> tuple[bool, bool]:
        asked.append(flags)
        return len(asked) == 2, True

    monkeypatch.setattr(evaluation, "any_process", another_is_stopped)
    with pytest.raises(Interrupted):
        _evaluate(tiny_editor(), tmp_path, count=8)
    assert asked == [(False, True), (False, True)], "after one batch of two"


def test_a_process_that_is_done_answers_until_all_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, ...]] = []

    def others_have_more(accelerator: Any, *flags: bool) -> tuple[bool, bool]:
        asked.append(flags)
        return False, len(asked) < 4

    monkeypatch.setattr(evaluation, "any_process", others_have_more)
    assert len(_evaluate(tiny_editor(), tmp_path, count=4).rows) == 4
    assert asked == [(False, True), (False, False), (False, False), (False, False)]
