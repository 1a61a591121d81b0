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
    assert "not known" in goals_table([unknown])


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
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "none")])
    assert "summary.json" in capsys.readouterr().err
