"""The main job's goals: each can be met, and each can be missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_recipes.goals import goals_table, main, missed

BEFORE = {"drift": 0.08, "edit_success": 0.9, "object_lost": 0.02, "copy_rate": 0.0, "l1_to_ideal": 0.05}


def _summary(seconds: float = 500.0, **after: float) -> dict[str, Any]:
    better = {**BEFORE, "drift": 0.06, "edit_success": 0.88, **after}
    return {"seed": 3, "before": BEFORE, "after": better, "seconds": seconds, "iterations": 40}


def test_a_run_that_just_meets_everything() -> None:
    assert missed(_summary()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("drift", 0.0601), ("edit_success", 0.879), ("object_lost", 0.03), ("copy_rate", 0.01), ("l1_to_ideal", 0.051)],
)
def test_each_goal_can_be_missed(name: str, value: float) -> None:
    assert missed(_summary(**{name: value})) == [name]


def test_time_is_a_goal_and_an_unknown_measure_is_missed() -> None:
    assert missed(_summary(seconds=601)) == ["seconds"]
    unknown = _summary()
    unknown["before"] = {**BEFORE, "drift": None}
    assert missed(unknown) == ["drift"]
    assert "**not known**" in goals_table([(Path("run"), unknown)])
    lost = _summary()
    lost["after"]["drift"] = None
    assert missed(lost) == ["drift"]


def test_what_a_run_on_photographs_cannot_have_is_no_miss() -> None:
    photographs = _summary()
    nothing = dict.fromkeys(BEFORE)
    photographs["before"] = photographs["after"] = {**nothing, "copy_rate": 0.0}
    row = goals_table([(Path("run"), photographs)]).splitlines()[-1]
    assert missed(photographs) == [] and row.count("| does not apply ") == 4 and "**" not in row
    photographs["after"] = {**nothing, "copy_rate": 0.2}
    assert missed(photographs) == ["copy_rate"]
    photographs["before"] = nothing
    assert len(missed(photographs)) == 5, "nothing was evaluated, so that nothing is known"


def test_runs_of_one_seed_are_told_apart_by_their_folders() -> None:
    other = {**_summary(), "seed": 4}
    rows = goals_table([(Path("a"), _summary()), (Path("b"), other), (Path("c"), _summary())]).splitlines()[3:]
    assert [row.split(" | ")[0] for row in rows] == ["| 3 (a)", "| 4", "| 3 (c)"]


def test_the_command_prints_a_row_a_run_and_says_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, summary in (("good", _summary()), ("bad", _summary(drift=0.08))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    assert main([str(tmp_path / "good")]) == 0
    assert "0.0800 → 0.0600 (-25 %)" in capsys.readouterr().out
    assert main([str(tmp_path / "good"), str(tmp_path / "bad")]) == 1
    assert "**0.0800 → 0.0800 (+0 %)**" in capsys.readouterr().out


def test_runs_without_a_summary_are_named_beside_those_that_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file, content in (
        ("good", "summary.json", json.dumps(_summary())), ("running", "config.yaml", "seed: 0"), ("cut", "summary.json", '{"seed"'),
        ("other", "summary.json", "{}"),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content)
    folders = [str(tmp_path / name) for name in ("running", "cut", "good", "other", "none")]
    assert main(folders) == 2
    said = capsys.readouterr()
    assert "0.0800 → 0.0600 (-25 %)" in said.out
    running, cut, other, none = said.err.splitlines()
    again = "--resume --output_dir {} with the recipe that began it"
    assert running == f"error: {folders[0]} has not finished: wait for it, or go on with {again.format(folders[0])}."
    assert "cut/summary.json cannot be read (" in cut and f"{again.format(folders[1])} evaluates again" in cut
    assert "other/summary.json is no summary of a recipe (KeyError: 'before')" in other
    assert "none holds no run" in none and "--overwrite" not in said.err
    assert main(folders[:1]) == 2
    assert capsys.readouterr().out == ""
