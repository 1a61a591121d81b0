"""What is refused before anything is loaded."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

from rl_recipes import building, grpo_edit
from rl_recipes.config import ConfigError
from rl_recipes.parsing import parse_arguments


def test_a_tracker_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "is_wandb_available", lambda: False)
    with pytest.raises(ConfigError, match="pip install wandb"):
        building.build_accelerator(parse_arguments(["--report_to", "wandb"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixed_precision": "fp16"}, "float16 overflows"),
        ({"num_processes": 5}, "An iteration has 96 edits .* do not divide among 5 processes"),
    ],
)
def test_launches_that_cannot_work(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"distributed_type": DistributedType.NO, "mixed_precision": "no", "num_processes": 1, "device": torch.device("cpu"), "is_main_process": True}
    monkeypatch.setattr(building, "Accelerator", lambda **_: SimpleNamespace(**{**launched, **changes}))
    with pytest.raises(ConfigError, match=message):
        building.build_accelerator(parse_arguments([]))


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    building.build_accelerator(parse_arguments([]))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    building.build_accelerator(parse_arguments([]))
    building.build_accelerator(parse_arguments(["--threads", "5"]))
    assert used == [8, 2, 5]


def test_ctrl_c_while_loading_is_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "build_reward", interrupt)
    assert grpo_edit.main(["--output_dir", str(tmp_path / "run")]) == 130
    assert not (tmp_path / "run").exists()
