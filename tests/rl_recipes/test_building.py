"""What is refused before anything is loaded."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from accelerate.utils import DistributedType
from jobs import job_of, settings
from PIL import Image
from tiny_editors import tiny_editor

from rl_recipes import building, grpo_edit, hub
from rl_recipes.config import ConfigError
from rl_recipes.evaluation import MEASURES
from rl_recipes.parsing import parse_arguments
from rl_recipes.prompts import JSONLPrompts
from rl_recipes.rewards import Asked, AspectSource, Rewards
from rl_recipes.session import Session
from tpips_reward.errors import TPIPSError


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


@pytest.mark.parametrize(
    ("reward", "metric"),
    [
        ("tpips:preserve,my:own", "builtin:late"),
        ("tpips:edit[metric=a/b],tpips:target[gate=none]", "builtin:late"),
        ("tpips:preserve[metric=a/b]", None),
        ("remote:http://host:8000,my:own", None),
    ],
)
def test_a_metric_is_named_where_the_reward_uses_it(reward: str, metric: str | None, tmp_path: Path) -> None:
    args = settings(reward=reward)
    assert building.describe(job_of(args, tiny_editor(), tmp_path))["metric"] == metric
    means = dict.fromkeys(MEASURES)
    summary = {"editor": "a/b", "recipe": "x", "reward": reward, "metric": metric, "iterations": 1, "seed": 0, "before": means,
               "after": means, "held_out": True, "evaluated": 0}  # fmt: skip
    assert ("(`builtin:late`)" in hub.card(summary, args)) == (metric is not None) == ("builtin:late" in hub.card(summary, args))


def test_rows_for_which_the_judge_cannot_answer_are_bad_rows(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    row = {"image": "a.png", "instruction": "make it red", "preserve": ["background"]}
    (tmp_path / "edits.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "target": ["color"]}))
    args, judge = settings(data=tmp_path / "edits.jsonl"), Rewards("tpips:target", [Asked(_Targets(), {"tpips:target": 1.0})])
    prompts, _, count = building.build_prompts(args, tiny_editor(), Rewards("none"), judge)
    assert isinstance(prompts, JSONLPrompts) and count == 1
    assert prompts.bad == [(1, "--judge cannot answer for it: it names no target")]


def test_photographs_without_a_judge_are_watched_by_less(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    row = {"image": "a.png", "instruction": "make it red", "preserve": ["background"], "target": ["color"]}
    (tmp_path / "edits.jsonl").write_text(json.dumps(row))
    judge = Rewards("tpips:target", [Asked(_Targets(), {"tpips:target": 1.0})])
    for stop, given, said in ((True, None, True), (True, judge, False), (False, None, False)):
        caplog.clear()
        args = settings(data=tmp_path / "edits.jsonl", stop_on_hack=stop)
        building.build_prompts(args, tiny_editor(), Rewards("none"), given)
        assert ("--stop_on_hack has no --judge" in caplog.text) == said


class _Targets(AspectSource):
    def __init__(self) -> None:
        self.reward: Any = self

    def check_aspects(self, preserve: Any, target: Any) -> None:
        if not target:
            raise TPIPSError("it names no target")


def test_a_tracker_that_does_not_start_is_one_sentence() -> None:
    class Refusing:
        def __init__(self) -> None:
            self.trackers = ["begun by half"]

        def init_trackers(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("api_key not configured\nuse wandb login")

    accelerator: Any = Refusing()
    message = r"--report_to wandb does not start \(RuntimeError: api_key not configured use wandb login\); log in"
    with pytest.raises(ConfigError, match=message):
        building.start_trackers(settings(report_to="wandb"), accelerator)
    assert accelerator.trackers == [], "what has not begun is not ended"


def test_a_tracker_that_does_not_end_costs_no_run(caplog: pytest.LogCaptureFixture) -> None:
    class Ending:
        trackers: ClassVar[list[str]] = ["wandb"]
        ended = False

        def end_training(self) -> None:
            if self.trackers:
                raise ConnectionError("no network")
            self.ended = True

    accelerator = Ending()
    building.end_trackers(accelerator)  # type: ignore[arg-type]
    assert accelerator.ended and "no network" in caplog.text


def test_a_tracker_that_fails_later_costs_no_run(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    run: Any = SimpleNamespace(job=SimpleNamespace(accelerator=SimpleNamespace(log=refuse)), iteration=1, _untracked=False)
    for _ in range(2):
        Session.track(run, {"reward_mean": 0.5})
    assert [r.getMessage() for r in caplog.records] == ["The tracker failed, and training goes on without it: no network"]


@pytest.mark.parametrize("deepspeed", [False, True])
def test_processes_wait_longer_for_one_another_than_a_checkpoint_takes(monkeypatch: pytest.MonkeyPatch, deepspeed: bool) -> None:
    """NCCL's default of ten minutes would end a run whose main process writes all weights."""
    given: dict[str, Any] = {}

    def accelerator(**options: Any) -> None:
        given.update(options)
        raise TPIPSError("far enough")

    monkeypatch.setattr(building, "Accelerator", accelerator)
    monkeypatch.setattr(building.zero, "asked", lambda: deepspeed)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(TPIPSError, match="far enough"):
        building.build_accelerator(settings())
    (handler,) = given["kwargs_handlers"]
    assert handler.to_kwargs() == {"timeout": timedelta(hours=3), **({"backend": "gloo"} if deepspeed else {})}


def test_ctrl_c_while_loading_is_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "build_reward", interrupt)
    assert grpo_edit.main(["--output_dir", str(tmp_path / "run")]) == 130
    assert not (tmp_path / "run").exists()
