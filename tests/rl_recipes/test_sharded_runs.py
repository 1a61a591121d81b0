"""Whole runs under FSDP2: two processes that share the weights give one process's run, for an adapter and for all weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file
from two_processes import run_two

from rl_recipes import grpo_edit

# Guided predictions, the reference in the loss and the moving average all meet the shared weights.
CHANGES: dict[str, Any] = {
    "eval_samples": 2, "save_steps": 1, "learning_rate": 1e-4, "ema_decay": 0.5, "beta": 10, "guidance_scale": 2.0
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "lora": {**CHANGES, "train": "lora"},
    "full": {**CHANGES, "train": "full", "gradient_checkpointing": True},
}

# A run of one iteration, and its continuation for another. accelerate asks for a GPU where FSDP is to be used.
SCRIPT = """
import json
from rl_recipes import sharding
sharding.is_sharded = lambda accelerator: True
Accelerator.is_fsdp2 = True
for run, flags in json.loads(sys.argv[1]).items():
    assert grpo_edit.main([*flags, "--max_steps=1"]) == 0
    assert grpo_edit.main(["--resume", f"--output_dir={run}", "--max_steps=2"]) == 0
"""


@pytest.fixture(scope="module")
def in_two_processes(flags: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    runs = {str(folder / name): flags(folder / name, **changes) for name, changes in RUNS.items()}
    for code, _, errors in run_two(SCRIPT, json.dumps(runs)):
        assert code == 0, errors[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("train", RUNS)
def test_two_processes_with_fsdp2_equal_one(
    train: str, flags: Callable[..., list[str]], in_two_processes: Path, tmp_path: Path
) -> None:
    one, two = tmp_path, in_two_processes / train
    # Adam makes of a gradient near zero, and of what rounding adds to it, a part of a step: of an adapter many are.
    within = 1e-5 if train == "full" else CHANGES["learning_rate"]
    assert grpo_edit.main(flags(one, max_steps=2, **RUNS[train])) == 0
    summary, expected = (json.loads((run / "summary.json").read_text()) for run in (two, one))
    assert summary["processes"] == 2 and summary["trained_parameters"] == expected["trained_parameters"]
    for when in ("before", "after"):
        assert summary[when] == pytest.approx(expected[when], abs=1e-5)
    for line, wanted_line in zip(_lines(two), _lines(one), strict=True):
        assert line["reward_mean"] == pytest.approx(wanted_line["reward_mean"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(wanted_line["grad_norm"], rel=1e-4)
    for step in ("step_000001", "step_000002"):
        found, wanted = (run / "checkpoints" / step for run in (two, one))
        _compare(load_file(found / "trainable.safetensors"), load_file(wanted / "trainable.safetensors"), within)
        state, other = (torch.load(folder / "state.pt", weights_only=True) for folder in (found, wanted))
        _compare(_average(state), _average(other), within)
        for index, moments in other["optimizer"]["state"].items():
            _compare(state["optimizer"]["state"][index], moments, 1e-6)
    for file in (one / "adapter").rglob("*.safetensors"):
        _compare(load_file(two / file.relative_to(one)), load_file(file), within)
    if train == "full":
        assert type(QwenImageTransformer2DModel.from_pretrained(two / "adapter" / "transformer")) is QwenImageTransformer2DModel
        assert _file(two, "config.json") == _file(one, "config.json"), "FSDP2 adds to the name of the class"
    assert grpo_edit.main(["--resume", f"--output_dir={two}", "--max_steps=3"]) == 0, "any launch takes it up"
    assert len(_lines(two)) == 3


def _file(run: Path, name: str) -> Any:
    return json.loads((run / "adapter" / "transformer" / name).read_text())


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _average(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"average {index}": tensor for index, tensor in enumerate(state["extra"]["kept"]["average"]["tensors"])}


def _compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], within: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=within, rtol=0)
