"""DeepSpeed's ZeRO: what is refused, and two processes that give one process's run."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from jobs import job_of, settings, step
from safetensors.torch import load_file
from tiny_editors import tiny_editor
from two_processes import run_two

from rl_recipes import grpo_edit, optimizing, zero
from rl_recipes.config import ALGORITHMS, ConfigError
from rl_recipes.optimizing import NonFiniteError, take_step
from rl_recipes.parsing import parse_arguments

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def _launch(stage: int, kind: DistributedType = DistributedType.DEEPSPEED) -> Any:
    return SimpleNamespace(distributed_type=kind, deepspeed_plugin=SimpleNamespace(zero_stage=stage))


@pytest.mark.parametrize(
    ("stage", "algorithm", "flags", "message"),
    [
        (1, 0, [], "must be of stage 2 or 3, not 1"),
        (2, 0, ["--data", __file__], "give --samples_per_batch 1"),
        (3, 0, ["--train", "full"], "--train full keeps a second set"),
        (3, 0, ["--ema_decay", "0.9"], "--ema_decay keeps a second set"),
        (3, 0, [], "give --ema_decay 0, or launch"),
        (3, 2, [], "nft_edit.py keeps a second set"),
    ],
)
def test_what_zero_cannot_do_is_refused(
    stage: int, algorithm: int, flags: list[str], message: str
) -> None:
    args = parse_arguments(flags, ALGORITHMS[algorithm])
    with pytest.raises(ConfigError, match=message):
        zero.check(args, _launch(stage))
    zero.check(args, _launch(stage, DistributedType.MULTI_GPU))
    zero.check(parse_arguments(["--train", "full", "--ema_decay", "0.9"]), _launch(2))
    zero.check(parse_arguments(["--ema_decay", "0"]), _launch(3))


def test_a_missing_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    assert not zero.asked()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match=r"pip install 'tpips-reward\[deepspeed\]'"):
        zero.asked()


class _Engine(zero.ZeroOptimizer):
    """Its part in a step, without DeepSpeed."""

    def __init__(self, norm: float) -> None:
        self.norm, self.asked = norm, list[str]()
        self.groups: list[dict[str, Any]] = [{"lr": 0.0}]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.groups

    def step(self) -> None:
        self.asked.append("step")

    def gradient_norm(self) -> float:
        return self.norm


def test_a_step_leaves_averaging_and_clipping_to_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizing, "average_gradients", None)
    editor = tiny_editor()
    editor.add_lora(2, 2, generator=torch.Generator())
    job = job_of(settings(learning_rate=0.5), editor, tmp_path)
    job.optimizer = engine = _Engine(3.0)
    assert take_step(job, step(), [0.1]) == 3.0 and engine.asked == ["step"] and engine.groups == [{"lr": 0.5}]
    job.optimizer = _Engine(math.inf)
    with pytest.raises(NonFiniteError, match="gradient norm inf"):
        take_step(job, step(), [0.1])


@pytest.mark.parametrize("main", [True, False])
def test_only_the_process_that_writes_keeps_the_moments(main: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def gather(parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        asked.append(name)
        return torch.ones(parameter.numel())

    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", SimpleNamespace(safe_get_full_optimizer_state=gather))
    optimizer: Any = zero.ZeroOptimizer.__new__(zero.ZeroOptimizer)
    optimizer._parameters, optimizer.partitions_weights, optimizer._writes = [torch.nn.Parameter(torch.zeros(2, 3))], False, main
    inner = SimpleNamespace(state={"flat": {"step": torch.tensor(3.0)}})
    optimizer._engine = SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner, param_groups=[{"lr": 0.1, "params": []}]))
    with optimizer.whole(moments=True):
        state = optimizer.state_dict()["state"]
    assert asked == ["exp_avg", "exp_avg_sq"], "gathering needs all processes"
    assert {i: {n: v.tolist() for n, v in s.items()} for i, s in state.items()} == (
        {0: {"step": 3.0, "exp_avg": [[1.0] * 3] * 2, "exp_avg_sq": [[1.0] * 3] * 2}} if main else {}
    )


# Without a GPU DeepSpeed compiles an operator for processes of one machine at its first start, which takes minutes.
NO_COMPILER = """
import importlib
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
"""

# Three steps of two backward passes a process; after the second a checkpoint goes to another engine, which takes the third.
STEPS = (
    NO_COMPILER
    + """
sys.path.insert(0, sys.argv[1])
from types import SimpleNamespace
import deepspeed, torch
from rl_recipes import zero
from tiny_editors import generators, images, tiny_editor

torch.set_num_threads(1)
deepspeed.init_distributed("gloo", verbose=False)
rank = int(os.environ["RANK"])

def start(train):
    editor = tiny_editor()
    trained = editor.train_all() if train == "full" else editor.add_lora(4, 8, generator=torch.Generator().manual_seed(0))
    return editor, torch.optim.AdamW(trained, lr=1e-3)

def shared(stage, train):
    editor, optimizer = start(train)
    plugin = SimpleNamespace(zero_stage=stage, deepspeed_config={"zero_optimization": {"stage": stage}})
    return editor, zero.ZeroOptimizer(editor, optimizer, SimpleNamespace(deepspeed_plugin=plugin, is_main_process=True), max_grad_norm=1.0)

def losses(editor, which):
    for i in which:
        conditions = editor.encode(images(4)[i:i + 1], ["make it red"])
        latents = editor.noise(conditions, generators(4)[i:i + 1])
        with torch.no_grad(), editor.disable_lora():
            reference = editor.velocity(latents, 0.6, conditions)
        velocity = editor.velocity(latents, 0.6, conditions)
        yield (velocity - 1).square().mean() + 0.1 * (velocity - reference).square().mean()

def step(editor, optimizer):
    for loss in losses(editor, range(2 * rank, 2 * rank + 2)):
        zero.backward(loss / 2, optimizer)
    optimizer.step()
    return optimizer.gradient_norm()

for stage, train in ((2, "lora"), (3, "lora"), (2, "full")):
    editor, optimizer = start(train)
    norms = []
    for _ in range(3):
        for loss in losses(editor, range(4)):
            (loss / 4).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(editor.lora_parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    expected = [p.detach().clone() for p in editor.lora_parameters()]

    two, engine = shared(stage, train)
    found = [step(two, engine) for _ in range(2)]
    with zero.whole(engine, moments=True):
        kept = engine.state_dict(), [p.detach().clone() for p in two.lora_parameters()]
    again, other = shared(stage, train)
    with zero.whole(other):
        with torch.no_grad():
            for p, value in zip(again.lora_parameters(), kept[1], strict=True):
                p.copy_(value)
        other.load_state_dict(kept[0])
    found += [step(again, other), step(two, engine)]
    assert zero.num_elements(two.lora_parameters()) == sum(p.numel() for p in expected)
    print(stage, train, norms, found, flush=True)
    torch.testing.assert_close(found, [*norms, norms[-1]], atol=0, rtol=1e-5)
    for way in (two, again):
        with zero.whole(engine if way is two else other):
            for p, value in zip(way.lora_parameters(), expected, strict=True):
                torch.testing.assert_close(p.detach(), value, atol=5e-5, rtol=0)
print("equal", flush=True)
"""
)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs DeepSpeed: pip install 'tpips-reward[deepspeed]'")
def test_steps_of_two_processes_with_zero_equal_those_of_one() -> None:
    found = run_two(STEPS, str(Path(__file__).parent), DS_ACCELERATOR="cpu")
    assert [code for code, _, _ in found] == [0, 0], "\n".join(errors[-3000:] for _, _, errors in found)
    assert all("equal" in out for _, out, _ in found)


SCRIPT = (
    NO_COMPILER
    + """
run, *flags = sys.argv[1:]
assert grpo_edit.main([*flags, "--max_steps=1"]) == 0
assert grpo_edit.main(["--resume", f"--output_dir={run}", "--max_steps=2"]) == 0
"""
)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs DeepSpeed: pip install 'tpips-reward[deepspeed]'")
@pytest.mark.parametrize(("stage", "train"), [(2, "lora"), (3, "lora"), (2, "full")])
def test_two_processes_with_zero_equal_one(flags: Callable[..., list[str]], tmp_path: Path, stage: int, train: str) -> None:
    changes: dict[str, Any] = {"train": train, "eval_samples": 2, "save_steps": 1, "learning_rate": 1e-3, "ema_decay": 0}
    one, two = tmp_path / "one", tmp_path / "two"
    assert grpo_edit.main(flags(one, max_steps=2, **changes)) == 0
    found = run_two(
        SCRIPT,
        str(two),
        *flags(two, **changes),
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_ZERO_STAGE=str(stage),
        ACCELERATE_DEEPSPEED_ZERO3_INIT="false",
        DS_ACCELERATOR="cpu",
    )
    assert [code for code, _, _ in found] == [0, 0], "\n".join(errors[-3000:] for _, _, errors in found)
    assert json.loads((two / "summary.json").read_text())["processes"] == 2
    for number in ("step_000001", "step_000002"):
        weights = load_file(two / "checkpoints" / number / "trainable.safetensors")
        expected = load_file(one / "checkpoints" / number / "trainable.safetensors")
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], atol=5e-5, rtol=0)
