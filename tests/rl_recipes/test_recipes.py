"""DDPO, DiffusionNFT and backpropagation as whole runs: they move the weights, stop on Ctrl-C, and go on to the bit.

What all recipes share (folders, kills, damaged checkpoints, bad input) is tested with grpo_edit in test_grpo_edit.py.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from two_processes import run_two

from rl_recipes import backprop as backprop_steps
from rl_recipes import backprop_edit, collecting, ddpo_edit, nft_edit

Flags = Callable[..., list[str]]

#: Each with the settings that make every part of it run, one without an average of its weights, and what a line of it must have.
RECIPES: dict[str, tuple[ModuleType, dict[str, Any], set[str]]] = {
    "ddpo": (
        ddpo_edit,
        {"train_prompts": 5, "skip_saturated": "true", "min_count": 2, "ema_decay": 0.5, "ratio": "guard"},
        {"kl", "ratio_mean"},
    ),
    "nft": (nft_edit, {"noise_levels": 2, "kl_weight": 0.1, "old_decay_rate": 0.2}, {"positive", "negative", "distance"}),
    "backprop": (backprop_edit, {"kl_weight": 0.1, "backprop": "alignprop", "num_generations": 1, "ema_decay": 0}, {"gradient_steps"}),
}
#: The flags fixture is for grpo_edit; these settings are its own.
NOT_SHARED = ("sde_window", "train_steps")


def _flags(flags: Flags, name: str, run: Path, *switches: str, **changes: Any) -> list[str]:
    settings = {**RECIPES[name][1], "max_steps": 3, "save_steps": 5, "eval_samples": 2, "learning_rate": 0.01, **changes}
    made = flags(run, *switches, **settings)
    return [flag for flag in made if name == "ddpo" or not flag.startswith(tuple(f"--{n}=" for n in NOT_SHARED))]


def _lines(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


@pytest.fixture(scope="module", params=RECIPES)
def finished(request: pytest.FixtureRequest, flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of three iterations that nothing disturbed, of each recipe."""
    run = tmp_path_factory.mktemp(request.param) / "run"
    assert RECIPES[request.param][0].main(_flags(flags, request.param, run)) == 0
    return request.param, run


def test_a_run_trains_and_leaves_what_it_should(finished: tuple[str, Path]) -> None:
    name, run = finished
    lines, summary = _lines(run), json.loads((run / "summary.json").read_text())
    assert [line["iteration"] for line in lines] == [1, 2, 3] and summary["recipe"] == f"{name}_edit"
    assert all(line["grad_norm"] > 0 and RECIPES[name][2] <= line.keys() for line in lines)
    weights = load_file(run / "checkpoints" / "step_000003" / "trainable.safetensors")
    assert any(value.abs().max() > 0 for key, value in weights.items() if ".lora_B." in key)
    assert summary["before"] != summary["after"]
    assert {"report.html", "curves.png", "adapter", "samples"} <= {p.name for p in run.iterdir()}
    if name == "ddpo":
        assert lines[0]["ratio_mean"] == 1.0 and lines[0]["ratio_max_deviation"] == 0.0
    if name == "nft":
        assert lines[0]["positive"] == pytest.approx(lines[0]["negative"]), "the old policy begins as the policy"
        assert [line["old_decay"] for line in lines] == [0.0, 0.2, 0.4]
    if name == "backprop":
        assert {line["gradient_steps"] for line in lines} <= {1.0, 2.0}


#: Each recipe with its arguments, one after the other.
RUN_ALL = """
import json
from rl_recipes import backprop_edit, ddpo_edit, nft_edit
for name, arguments in json.loads(sys.argv[1]).items():
    assert globals()[f"{name}_edit"].main(arguments) == 0, name
"""


@pytest.fixture(scope="module")
def in_two_processes(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of `finished` again, in a folder each, with half of every batch in each of two processes."""
    folder = tmp_path_factory.mktemp("two")
    for code, _, errors in run_two(RUN_ALL, json.dumps({name: _flags(flags, name, folder / name) for name in RECIPES})):
        assert code == 0, errors[-2000:]
    return folder


@pytest.mark.slow
def test_two_processes_equal_one(finished: tuple[str, Path], in_two_processes: Path) -> None:
    name, whole = finished
    run = in_two_processes / name
    assert json.loads((run / "summary.json").read_text())["processes"] == 2
    for line, expected in zip(_lines(run), _lines(whole), strict=True):
        assert line["reward_mean"] == pytest.approx(expected["reward_mean"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    found, expected = (load_file(r / "checkpoints" / "step_000003" / "trainable.safetensors") for r in (run, whole))
    assert found.keys() == expected.keys()
    apart = torch.cat([(value - expected[key]).abs().flatten() for key, value in found.items()])
    # Adam makes of a gradient near zero, and of what rounding adds to it, a part of a step: three of them are 0.03
    assert float(apart.mean()) < 1e-5 and float(apart.max()) < 3e-3


def test_ctrl_c_takes_a_checkpoint_and_the_run_goes_on_to_the_bit(
    finished: tuple[str, Path], flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, whole = finished
    run, original = tmp_path / "run", collecting.score

    def press_ctrl_c(*args: Any) -> Any:
        if args[4].startswith("iteration_000003"):
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    for module in (collecting, backprop_steps):
        monkeypatch.setattr(module, "score", press_ctrl_c)
    assert RECIPES[name][0].main(_flags(flags, name, run)) == 130
    monkeypatch.undo()
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_000002"] and len(_lines(run)) == 2
    assert RECIPES[name][0].main(["--resume", f"--output_dir={run}"]) == 0
    assert _lines(run) == _lines(whole)
    for step_file in ("checkpoints/step_000003/trainable.safetensors", "adapter/pytorch_lora_weights.safetensors"):
        found, expected = load_file(run / step_file), load_file(whole / step_file)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def test_the_average_of_the_weights_is_what_is_handed_out(finished: tuple[str, Path]) -> None:
    name, run = finished
    trained = load_file(run / "checkpoints" / "step_000003" / "trainable.safetensors")
    saved = load_file(run / "adapter" / "pytorch_lora_weights.safetensors")
    sums = [sorted(float(v.double().sum()) for v in part.values()) for part in (trained, saved)]
    assert (sums[0] == pytest.approx(sums[1], rel=1e-6)) == (name == "backprop")


def test_every_way_of_backpropagation_runs(flags: Flags, tmp_path: Path) -> None:
    norms: list[float] = []
    for changes in ({"backprop": "draft"}, {"backprop": "draft", "recompute": True}, {"backprop": "refl"}):
        run = tmp_path / str(len(norms))
        made = _flags(flags, "backprop", run, **{**changes, "max_steps": 1, "eval_samples": 0, "kl_weight": 0.0})
        assert backprop_edit.main(made) == 0
        norms.append(_lines(run)[0]["grad_norm"])
    draft, recomputed, refl = norms
    assert draft == recomputed != refl


def test_a_reward_without_gradient_is_refused(flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = "tpips:preserve,reward_functions:brightness_without_gradient=0.1"
    for text, name in ((reward, "reward_functions:brightness_without_gradient"), *[("remote:http://127.0.0.1:1",) * 2]):
        assert backprop_edit.main(_flags(flags, "backprop", tmp_path / "run", "--overwrite", reward=text)) == 2
        assert f"The reward '{name}' gives no gradient" in capsys.readouterr().err
        assert not (tmp_path / "run" / "before.json").exists(), "before an evaluation has cost its hours"
        assert not (tmp_path / "run" / "config.yaml").exists(), "before the folder is taken"


def test_a_refused_reward_costs_no_earlier_run(finished: tuple[str, Path], flags: Flags, tmp_path: Path) -> None:
    run = shutil.copytree(finished[1], tmp_path / "run")
    refused = _flags(flags, "backprop", run, "--overwrite", reward="reward_functions:brightness_without_gradient")
    assert backprop_edit.main(refused) == 2
    assert filecmp.dircmp(finished[1], run).diff_files == [] and (run / "summary.json").is_file() and (run / "adapter").is_dir()


def test_a_stop_before_the_folder_is_taken_leaves_it_as_it_was(
    flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(backprop_steps, "check_reward", stopped)
    assert backprop_edit.main(_flags(flags, "backprop", tmp_path / "run")) == 130
    assert "Nothing was begun, and nothing is changed." in " ".join("".join(capsys.readouterr()).split())
    assert not (tmp_path / "run").exists()


def test_saturated_prompts_are_skipped_in_a_run(flags: Flags, tmp_path: Path) -> None:
    """Every reward counts as the top here; after three visits nothing is left, and training goes on all the same."""
    run = tmp_path / "run"
    changes = {"train_prompts": 2, "skip_saturated": True, "saturated_at": -5.0, "gate": "none", "max_steps": 4}
    assert backprop_edit.main(_flags(flags, "backprop", run, **{**changes, "eval_samples": 0, "learning_rate": 0.0})) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["saturated"] == ["train-000000", "train-000001"]
    assert [warning.split(" (")[0] for warning in summary["warnings"]] == ["Every prompt is saturated"]
