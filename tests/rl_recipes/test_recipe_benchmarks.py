"""The benchmarks run at their small size, as they do at the real one on a GPU."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import recipes


@pytest.mark.parametrize("editor", recipes.EDITORS)
def test_one_tiny_iteration(editor: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipes.main(["iteration", "--size", "tiny", "--editor", editor])
    line = json.loads(capsys.readouterr().out)
    assert line["editor"] == editor and line["ratio_max_deviation"] == 0.0 and line["edits"] == 2
    assert {"seconds", "seconds_rollout", "seconds_replay", "seconds_backward"} <= line.keys() and line["peak_gib"] > 0


def test_memory_asks_for_no_more_steps_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def one(command: list[str], **_: object) -> Namespace:
        last = command[command.index("--last") + 1]
        recipes.parse_arguments([f"--last_steps={last}"], recipes.BackpropArguments)
        asked.append(int(last))
        return Namespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(recipes.subprocess, "run", one)
    recipes.main(["memory"])
    assert sorted(set(asked)) == [1, 2, 4, 6] and len(asked) == 8
