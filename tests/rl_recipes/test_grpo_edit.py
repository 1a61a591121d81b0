"""Whole runs with a tiny random editor and metric: what they leave, and what survives an accident."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from rl_recipes import building, checkpoints, collecting, grpo, grpo_edit
from rl_recipes.editors import load_editor
from rl_recipes.evaluation import MEASURES, Evaluation
from rl_recipes.optimizing import NonFiniteError
from rl_recipes.runs import RunError, RunFolder
from tpips_reward.errors import TPIPSError

Flags = Callable[..., list[str]]


def _lines(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


def _weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "trainable.safetensors")


def _assert_same_run(a: Path, b: Path, step: int = 4) -> None:
    assert _lines(a) == _lines(b)
    weights_a, weights_b = _weights(a, step), _weights(b, step)
    assert weights_a.keys() == weights_b.keys()
    assert all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)
    for name in ("before", "after"):
        assert json.loads((a / "summary.json").read_text())[name] == json.loads((b / "summary.json").read_text())[name]


@pytest.fixture(scope="module")
def whole_run(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four iterations that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert grpo_edit.main(flags(run)) == 0
    return run


def test_a_run_leaves_what_it_should(whole_run: Path) -> None:
    summary = json.loads((whole_run / "summary.json").read_text())
    assert set(summary["before"]) == set(summary["after"]) == set(MEASURES)
    assert all(value is not None for value in summary["before"].values())
    assert summary["iterations"] == 4 and summary["seconds"] > 0 and summary["seed"] == 0
    lines = [json.loads(text) for text in (whole_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    needed = {"reward_mean", "reward_std", "aspects", "ratio_mean", "clip_fraction", "kl", "grad_norm", "copy_rate"}
    needed |= {"zero_std_share", "seconds", "seconds_rollout", "seconds_decode", "seconds_reward", "seconds_replay"}
    assert all(needed <= line.keys() for line in lines)
    with Image.open(whole_run / "samples" / "grid_00.png") as grid, Image.open(whole_run / "curves.png") as curves:
        assert grid.width > 4 * 160 and curves.width > 1000
    page = (whole_run / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "http" not in page and "src=\"data" in page
    assert "drift" in page and "num_inference_steps" in page and "object color" in page
    assert sorted(p.name for p in (whole_run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    assert not list(whole_run.rglob(".tmp-*"))


def test_the_first_ratio_is_exactly_one_and_the_weights_move(whole_run: Path) -> None:
    lines = _lines(whole_run)
    assert all(line["ratio_mean"] == 1.0 and line["ratio_max_deviation"] == 0.0 for line in lines)
    assert lines[0]["kl"] < 1e-9 < lines[-1]["kl"]
    assert all(line["grad_norm"] > 0 for line in lines)
    moved = [name for name, value in _weights(whole_run, 4).items() if ".lora_B." in name and value.abs().max() > 0]
    assert moved


def test_the_adapter_loads_into_the_pipeline_and_is_the_average_of_the_trained_one(whole_run: Path, editor_folder: Path) -> None:
    editor = load_editor(editor_folder, device="cpu", resolution=32)
    editor.pipe.load_lora_weights(whole_run / "adapter")
    trained = _weights(whole_run, 4)
    state = torch.load(whole_run / "checkpoints" / "step_000004" / "state.pt", weights_only=True)
    average = state["extra"]["kept"]["average"]["tensors"]
    loaded = {n: p for n, p in editor.transformer.named_parameters() if ".lora_" in n}
    assert len(loaded) == len(trained) == len(average)
    sums = [sorted(p.detach().double().sum().item() for p in part) for part in (loaded.values(), average, trained.values())]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6) and sums[0] != pytest.approx(sums[2], rel=1e-3)


def test_runs_with_one_seed_are_equal_and_with_two_are_not(flags: Flags, whole_run: Path, tmp_path: Path) -> None:
    assert grpo_edit.main(flags(tmp_path / "other", seed=1, max_steps=1, eval_samples=0)) == 0
    assert grpo_edit.main(flags(tmp_path / "same", max_steps=1, eval_samples=0)) == 0
    assert _lines(tmp_path / "same")[0] == _lines(whole_run)[0] != _lines(tmp_path / "other")[0]


class _Killed(BaseException):
    """Stands for SIGKILL: nothing in the run catches it."""


def test_a_killed_run_continues_to_the_bit(
    flags: Flags, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    original = grpo.update

    def kill_in_the_fourth(*args: Any) -> dict[str, float]:
        result = original(*args)
        if args[2].number == 4:
            raise _Killed
        return result

    monkeypatch.setattr(grpo, "update", kill_in_the_fourth)
    with pytest.raises(_Killed):
        grpo_edit.main(flags(run))
    monkeypatch.undo()
    assert len(_lines(run)) == 3 and not (run / "checkpoints" / "step_000003").exists()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 4, "cut o')
    assert grpo_edit.main(["--resume", f"--output_dir={run}"]) == 0
    _assert_same_run(run, whole_run)


def _kill_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """The process gets a SIGKILL in the number-th call, after what is called has done its work."""
    original, calls = getattr(owner, name), []

    def killing(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    monkeypatch.setattr(owner, name, killing)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize(
    ("owner", "name", "number", "steps"),
    [
        (checkpoints, "_sha256", 4, ["step_000002"]),  # within the second checkpoint, before its manifest is there
        (RunFolder, "append_metrics", 4, ["step_000002"]),  # the line is there, and no checkpoint of it
        (Evaluation, "save", 1, []),  # the evaluation before is there, and nothing else
    ],
)
def test_a_real_kill_costs_no_bit(
    owner: Any, name: str, number: int, steps: list[str], flags: Flags, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    _kill_in(monkeypatch, owner, name, number)
    child = os.fork()
    if child == 0:
        try:  # whatever it raises must not go on into pytest
            grpo_edit.main(flags(run))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    monkeypatch.undo()
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert sorted(p.name for p in run.glob("checkpoints/step_*")) == steps
    assert grpo_edit.main(["--resume", f"--output_dir={run}"]) == 0
    _assert_same_run(run, whole_run)
    assert not list(run.rglob(".tmp-*"))


def test_a_truncated_checkpoint_costs_two_iterations_and_no_bit(
    flags: Flags, whole_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    state = run / "checkpoints" / "step_000004" / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    assert grpo_edit.main(["--resume", f"--output_dir={run}"]) == 0
    assert "step_000004 is damaged" in caplog.text
    _assert_same_run(run, whole_run)


def test_ctrl_c_takes_a_checkpoint_and_exits_with_130(
    flags: Flags, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    original = collecting.score

    def press_ctrl_c(*args: Any) -> Any:
        if args[4].startswith("iteration_000002"):
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(collecting, "score", press_ctrl_c)
    assert grpo_edit.main(flags(run)) == 130
    monkeypatch.undo()
    assert "--resume" in capsys.readouterr().out
    assert (run / "checkpoints" / "step_000001").is_dir() and len(_lines(run)) == 1
    assert grpo_edit.main(["--resume", f"--output_dir={run}"]) == 0
    _assert_same_run(run, whole_run)


def test_a_reward_that_fails_stops_the_run_and_keeps_the_batch(
    flags: Flags, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    original = building.build_reward

    def build(*args: Any) -> Any:
        reward = original(*args)

        class Failing:
            calls = 0

            def __getattr__(self, name: str) -> Any:
                return getattr(reward, name)

            def __call__(self, *a: Any, **k: Any) -> Any:
                self.calls += 1
                if self.calls == 3:
                    raise ConnectionError("the server is down")
                return reward(*a, **k)

        return Failing()

    monkeypatch.setattr(building, "build_reward", build)
    assert grpo_edit.main(flags(run)) == 2
    monkeypatch.undo()
    error = capsys.readouterr().err
    assert "The reward failed in iteration_000002/group_000_edit_000 (ConnectionError: the server is down)" in error
    kept = run / "failed_batch" / "iteration_000002" / "group_000_edit_000"
    assert len(list(kept.glob("*_edit.png"))) == 4 and len(json.loads((kept / "batch.json").read_text())) == 4
    assert (run / "checkpoints" / "step_000001").is_dir()
    assert grpo_edit.main(["--resume", f"--output_dir={run}"]) == 0
    _assert_same_run(run, whole_run)


def test_a_full_disk_does_not_hide_why_the_reward_failed(
    flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise RunError("Cannot write failed_batch: the disk is full.")

    monkeypatch.setattr(RunFolder, "save_failed_batch", refuse)
    made = flags(tmp_path / "run", reward="reward_functions:not_a_number", reward_retries=0, eval_samples=0)
    assert grpo_edit.main(made) == 2
    error = capsys.readouterr().err
    assert "its scores for 4 edits are [nan" in error and "could not be kept (Cannot write failed_batch: the disk is full.)" in error
    assert "--resume goes on from the last checkpoint, or starts over where there is none." in error


def test_a_full_device_is_one_sentence_and_a_run_goes_on_with_its_remedy(
    flags: Flags, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    original = grpo.update

    def full(*args: Any) -> dict[str, float]:
        if args[2].number == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")
        return original(*args)

    monkeypatch.setattr(grpo, "update", full)
    assert grpo_edit.main(flags(run)) == 2
    monkeypatch.undo()
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "memory is full (CUDA out of memory. Tried to allocate 2.00 GiB. See" in error and "--resume" in error
    assert (run / "checkpoints" / "step_000003").is_dir()
    assert grpo_edit.main(["--resume", f"--output_dir={run}", "--gradient_checkpointing=true"]) == 0
    found, expected = _lines(run), _lines(whole_run)
    assert found[:3] == expected[:3] and found[3]["reward_mean"] == expected[3]["reward_mean"]
    assert found[3]["grad_norm"] == pytest.approx(expected[3]["grad_norm"], rel=1e-3)


def test_a_device_that_is_full_in_the_reward_is_no_failed_reward(
    flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert grpo_edit.main(flags(run, reward="reward_functions:full_device", reward_retries=3, max_steps=1)) == 2
    assert "The device's memory is full (CUDA out of memory" in capsys.readouterr().err
    assert not (run / "failed_batch").exists()


def test_a_damaged_evaluation_is_repeated_after_the_remedy_that_is_named(
    flags: Flags, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    (run / "before.safetensors").write_bytes(b"")
    assert grpo_edit.main(["--resume", f"--output_dir={run}"]) == 2
    assert f"remove {run / 'before.json'}, and --resume" in capsys.readouterr().err
    (run / "before.json").unlink()
    assert grpo_edit.main(["--resume", f"--output_dir={run}"]) == 0
    _assert_same_run(run, whole_run)


def test_a_tracker_gets_every_number_of_every_iteration(flags: Flags, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs a tracker: pip install 'tpips-reward[trackers]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    assert grpo_edit.main(flags(run, report_to="tensorboard", max_steps=2, eval_samples=0)) == 0
    assert grpo_edit.main(["--resume", f"--output_dir={run}", "--max_steps=3"]) == 0
    found = EventAccumulator(str(run / "logs" / "grpo_edit"))
    found.Reload()
    lines = _lines(run)
    numbers = {name for name, value in lines[0].items() if isinstance(value, float)}
    assert {"reward_mean", "kl", "grad_norm", "copy_rate", "judge"} <= numbers <= set(found.Tags()["scalars"])
    for name in numbers:
        points = [(event.step, event.value) for event in found.Scalars(name)]
        assert points == [(line["iteration"], pytest.approx(line[name], rel=1e-5, abs=1e-6)) for line in lines]


def test_a_nan_stops_the_run_before_it_reaches_the_weights(
    flags: Flags, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    original = grpo.update

    def spoil(*args: Any) -> dict[str, float]:
        if args[2].number == 3:
            args[1][0].advantages[0] = float("nan")
        return original(*args)

    monkeypatch.setattr(grpo, "update", spoil)
    assert grpo_edit.main(flags(run, eval_samples=0)) == 2
    assert "The loss or gradient of iteration 3 is not finite" in capsys.readouterr().err
    saved = _weights(run, 2)
    assert all(torch.equal(saved[name], value) for name, value in _weights(whole_run, 2).items())


def test_bad_input_is_one_line_and_changes_nothing(
    flags: Flags, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(argv: list[str]) -> str:
        assert grpo_edit.main(argv) == 2
        error = capsys.readouterr().err.strip().splitlines()
        return error[-1]

    before = sorted(p.name for p in whole_run.iterdir())
    assert "is in use" in refused(flags(whole_run))
    assert "Unknown flag --rewrad. Did you mean --reward?" in refused([*flags(tmp_path / "a"), "--rewrad", "x"])
    assert "Unknown mode 'keep'" in refused(flags(whole_run, "--overwrite", reward="tpips:keep"))
    assert "no-such" in refused(flags(whole_run, "--overwrite", editor="no-such"))
    assert "builtin:nothing" in refused(flags(whole_run, "--overwrite", metric="builtin:nothing"))
    assert "resolution" in refused(flags(tmp_path / "a", resolution=2))
    assert sorted(p.name for p in whole_run.iterdir()) == before
    assert not (tmp_path / "a").exists(), "a run that was refused leaves no folder"


def test_overwrite_starts_anew(flags: Flags, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for _ in range(2):
        assert grpo_edit.main(flags(run, "--overwrite", max_steps=1, eval_samples=0, save_steps=1)) == 0
    assert len(_lines(run)) == 1


def test_every_option_of_the_update_runs(flags: Flags, tmp_path: Path) -> None:
    changes = {
        "num_iterations": 2, "train_steps": 2, "beta": 0.1, "guidance_scale": 2.0, "advantage_std": "batch",
        "lr_scheduler_type": "cosine", "sde_kind": "dance", "samples_per_batch": 1, "max_steps": 2, "eval_samples": 2,
        "eval_inference_steps": 2, "reward": "tpips:preserve=0.7,tpips:target=0.3", "learning_rate": 0.05,
    }  # fmt: skip
    assert grpo_edit.main(flags(tmp_path / "run", "--update_each_step", **changes)) == 0
    lines = _lines(tmp_path / "run")
    assert all(line["ratio_max_deviation"] > 0 for line in lines), "later passes are off-policy"


def test_a_time_limit_ends_training_and_still_evaluates(flags: Flags, tmp_path: Path) -> None:
    assert grpo_edit.main(flags(tmp_path / "run", max_minutes=1e-5)) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["iterations"] == 0 and summary["before"] == summary["after"]


@pytest.mark.slow
def test_two_processes_equal_one(flags: Flags, whole_run: Path, tmp_path: Path) -> None:
    """The script by its path, in two processes; the whole run has the same global batch in one."""
    root = Path(__file__).parents[2]
    run, launch = tmp_path / "run", ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launch, str(root / "rl_recipes" / "grpo_edit.py"), *flags(run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((run / "summary.json").read_text())["processes"] == 2
    for line, expected in zip(_lines(run), _lines(whole_run), strict=True):
        assert line["reward_mean"] == pytest.approx(expected["reward_mean"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, value in _weights(run, 4).items():
        torch.testing.assert_close(value, _weights(whole_run, 4)[name], atol=1e-5, rtol=0)


def test_errors_of_the_package_are_those_that_are_shown() -> None:
    assert issubclass(NonFiniteError, TPIPSError)
