"""Signs that a reward is being fooled: each is found when it is there, once, and not when it is not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import PixelSource, draws, job_of, rewards_of, settings
from tiny_editors import tiny_editor

from rl_recipes import grpo_edit
from rl_recipes.collecting import Edits
from rl_recipes.reporting import edit_rows, summarise_rows
from rl_recipes.watching import LASTS, Watch
from tpips_reward.rewards import RewardOutput
from tpips_reward.scenes import render, to_tensor

GOOD = {"copy_rate": 0.1, "degenerate": 0.0, "edge_density": 0.2, "edge_density_source": 0.2, "judge": 0.8}


def _line(number: int, **changes: Any) -> dict[str, Any]:
    noise = 0.001 * np.random.default_rng(number).normal()
    return {**GOOD, "reward_mean": 0.5 + noise, **changes}


def _looks(lines: list[dict[str, Any]]) -> list[str]:
    watch = Watch()
    return [sentence for line in lines for sentence in watch.look(line)]


def test_a_run_without_signs_is_left_alone() -> None:
    assert _looks([_line(i, judge=0.8 + 0.001 * (i % 3)) for i in range(60)]) == []
    assert _looks([{"reward_mean": 0.5}] * 20) == [], "what is not known is no sign"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"copy_rate": 0.8}, "80% of the edits of the last 5 iterations are copies"),
        ({"degenerate": 0.3}, "30% .* black, flat or noise"),
        ({"edge_density": 0.05}, "0.25 times the edges .* blur"),
        ({"edge_density": 0.6}, "3.00 times the edges .* grids or noise"),
    ],
)
def test_a_sign_that_lasts_is_named_once(changes: dict[str, float], sentence: str) -> None:
    start = [_line(0)]
    assert _looks(start + [_line(i, **changes) for i in range(1, LASTS)]) == []
    found = _looks(start + [_line(i, **changes) for i in range(1, 20)])
    assert len(found) == 1
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(found[0])


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"zero_std_share": 1.0, "grad_norm": 0.0}, "all edits of each group earned the same"), ({"grad_norm": 0.0}, "the gradient was zero")],
)
def test_a_reward_that_teaches_nothing_is_named_and_is_no_hack(changes: dict[str, float], what: str) -> None:
    watch = Watch()
    learns = {"zero_std_share": 0.5, "grad_norm": 0.1}
    lines = [_line(i, **changes) for i in range(1, LASTS)]
    assert [found for line in [*lines, _line(0, **learns), *lines] for found in watch.look(line)] == []
    found = [sentence for i in range(3) for sentence in watch.look(_line(i, **changes))]
    assert found == [f"The reward taught nothing in the last {LASTS} iterations: {what}."] and not watch.fooled
    for i in range(LASTS):
        watch.look(_line(i, copy_rate=0.9))
    assert watch.fooled


def test_prompts_that_are_all_saturated_are_named_once() -> None:
    watch = Watch()
    found = [watch.look(_line(i, saturated=float(i > 1))) for i in range(6)]
    assert [len(sentences) for sentences in found] == [0, 0, 1, 0, 0, 0] and not watch.fooled
    assert found[2][0].startswith("Every prompt is saturated (--saturated_at)")


def test_reward_and_judge_that_part_are_named() -> None:
    parted = [_line(i, reward_mean=0.5 + 0.01 * i + 0.002 * (i % 2), judge=0.8 - 0.01 * i + 0.002 * (i % 3)) for i in range(20)]
    (sentence,) = _looks(parted)
    assert "the reward went from 0.5" in sentence and "the judge from 0.8" in sentence
    together = [_line(i, reward_mean=0.5 + 0.01 * i, judge=0.5 + 0.01 * i) for i in range(20)]
    assert _looks(together) == []


def test_a_resumed_watch_knows_what_it_knew() -> None:
    lines = [_line(i, copy_rate=0.9) for i in range(9)]
    whole, first, second = Watch(), Watch(), Watch()
    for line in lines[:4]:
        first.look(line)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.look(line) for line in lines[4:]] == [whole.look(line) for line in lines][4:]
    assert second.state_dict() == whole.state_dict() and whole.found


def test_rows_hold_the_looks_of_every_edit_and_the_judgement_of_one_a_group(tmp_path: Path) -> None:
    job = job_of(settings(), tiny_editor(), tmp_path)
    drawn = draws(job)
    sources = [to_tensor(render(item.prompt.edit.source, 32)) for item in drawn]
    ideals = [to_tensor(render(item.prompt.edit.ideal, 32)) for item in drawn]
    images = [sources[0], ideals[1], torch.zeros(3, 32, 32), torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))]
    output = RewardOutput(torch.arange(4.0), [{}] * 4, {}, {"red": torch.arange(4.0)})
    rows = edit_rows([Edits(drawn, images, sources, output)], rewards_of({"judge": PixelSource()}))
    assert [row["looks"]["copy_rate"] for row in rows] == [1.0, 0.0, 0.0, 0.0]
    assert [row["looks"]["degenerate"] for row in rows] == [0.0, 0.0, 1.0, 1.0]
    assert ["judge" in row for row in rows] == [True, False, True, False]
    assert rows[0]["judge"] == pytest.approx(float(images[0][0].mean())) and rows[2]["judge"] == 0.0
    without = edit_rows([Edits(drawn, images, sources, output)])
    assert without[0]["judge"] == pytest.approx(1.0 - without[0]["known"]["l1_to_ideal"])
    line = summarise_rows(rows)
    assert line["copy_rate"] == 0.25 and line["degenerate"] == 0.5 and "zero_std_share" not in line


def test_a_judge_that_fails_is_asked_once_an_iteration_and_costs_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    class Failing:
        def __call__(self, *_: Any) -> RewardOutput:
            asked.append(1)
            raise ConnectionError("the server is down")

    job = job_of(settings(), tiny_editor(), tmp_path)
    drawn = draws(job)
    images = [torch.rand(3, 32, 32)] * 4
    batch = Edits(drawn, images, images, RewardOutput(torch.zeros(4), [{}] * 4, {}))
    with caplog.at_level(logging.ERROR):
        for iteration in (1, 2):
            rows = edit_rows([batch, batch, batch], rewards_of({"x": Failing()}))
            assert len(asked) == iteration and len(rows) == 12 and all("known" in row for row in rows[::4])
            assert not any("judge" in row for row in rows), "the truth of a scene is on another scale"
    assert [record.getMessage() for record in caplog.records] == [
        "The judge failed (x: ConnectionError: the server is down); iterations where it does lack its judgement."
    ]


def test_a_judge_that_never_answers_is_told_at_the_end(flags: Callable[..., list[str]], tmp_path: Path) -> None:
    made = flags(tmp_path / "run", judge="reward_functions:not_a_number", reward_retries=0, max_steps=2, eval_samples=0)
    assert grpo_edit.main(made) == 0
    warnings = json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"]
    assert any(warning.startswith("--judge said nothing in 2 of 2 iterations") for warning in warnings)


def test_a_run_stops_at_a_sign_when_asked_to(
    flags: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Watch, "look", lambda self, line: [self.found.setdefault("x", "something is wrong.")])
    assert grpo_edit.main(flags(tmp_path / "run", "--stop_on_hack", eval_samples=0)) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["iterations"] == 1 and summary["warnings"] == ["something is wrong. (during training)"]
    assert "something is wrong." in (tmp_path / "run" / "report.html").read_text()
    assert "Training ends after iteration 1 (--stop_on_hack)" in capsys.readouterr().out
