"""The benchmark of one iteration runs at its small size, as it does at the real one on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import recipes


def test_one_tiny_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    recipes.main(["iteration", "--size", "tiny"])
    line = json.loads(capsys.readouterr().out)
    assert line["ratio_max_deviation"] == 0.0 and line["edits"] == 2
    assert {"seconds", "seconds_rollout", "seconds_replay", "seconds_backward"} <= line.keys() and line["peak_gib"] > 0
