"""Launch configs, and frozen weights that two processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from torch.distributed.fsdp import MixedPrecisionPolicy

from rl_recipes import sharding
from rl_recipes.config import ConfigError
from rl_recipes.parsing import parse_arguments

CONFIGS = Path(sharding.__file__).parent / "accelerate"
EXPECTED = {
    "one_gpu": DistributedType.NO,
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "multi_node": DistributedType.MULTI_GPU,
    "zero2": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
}


def test_there_is_a_test_for_every_config() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_takes_every_config(name: str) -> None:
    path = str(CONFIGS / f"{name}.yaml")
    config = load_config_from_file(path)  # refuses keys that it does not know
    assert config.distributed_type == EXPECTED[name] and config.mixed_precision == "bf16"
    args = launch_command_parser().parse_args(["--config_file", path, "rl_recipes/grpo_edit.py"])
    args, _, _ = _validate_launch_command(args)
    assert args.num_processes == yaml.safe_load(Path(path).read_text())["num_processes"]
    assert args.use_fsdp == (name == "fsdp2") and args.multi_gpu == (name in ("ddp", "multi_node"))
    assert args.use_deepspeed == (name in ("zero2", "zero3"))
    if name == "fsdp2":
        environment = prepare_multi_gpu_env(args)
        assert environment["ACCELERATE_USE_FSDP"] == "true" and environment["FSDP_VERSION"] == "2"


@pytest.mark.parametrize("stage", [2, 3])
def test_processes_find_the_stage_of_zero(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `accelerate launch` hands to each process, as accelerate reads it there; DeepSpeed itself is not needed."""
    command = launch_command_parser().parse_args(
        ["--config_file", str(CONFIGS / f"zero{stage}.yaml"), "--num_processes", "2", "rl_recipes/grpo_edit.py"]
    )
    args, _, _ = _validate_launch_command(command)
    args.deepspeed_fields_from_accelerate_config = "zero_stage"
    _, environment = prepare_deepspeed_cmd_env(args)
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true" and environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    for name, value in environment.items():
        if name.startswith("ACCELERATE_DEEPSPEED"):
            monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == stage and not plugin.zero3_init_flag, "an editor is loaded whole, and shared out afterwards"
    shared = plugin.deepspeed_config["zero_optimization"]
    assert shared["stage"] == stage and shared["offload_param"]["device"] == shared["offload_optimizer"]["device"] == "none"


@pytest.mark.parametrize(
    ("launch", "flags", "message"),
    [
        ({"is_fsdp2": False}, [], "must be of version 2"),
        ({}, ["--data", __file__], "photographs of several sizes.* give --samples_per_batch 1"),
        ({}, ["--eval_data", __file__], "photographs of several sizes.* give --samples_per_batch 1"),
        ({}, ["--attention_backend", "flash"], "'flash' is called once for each length .* give --samples_per_batch 1"),
    ],
)
def test_launches_that_sharded_weights_cannot_serve(launch: dict[str, Any], flags: list[str], message: str) -> None:
    accelerator: Any = SimpleNamespace(**{"distributed_type": DistributedType.FSDP, "is_fsdp2": True, **launch})
    with pytest.raises(ConfigError, match=message):
        sharding.check(parse_arguments(flags), accelerator)
    sharding.check(parse_arguments(["--samples_per_batch", "1", "--data", __file__, "--attention_backend", "flash"]), SimpleNamespace(
        distributed_type=DistributedType.FSDP, is_fsdp2=True))  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "stage", "together"),
    [("FSDP", None, True), ("DEEPSPEED", 3, True), ("DEEPSPEED", 2, False), ("MULTI_GPU", None, False), ("NO", None, False)],
)
def test_processes_that_share_weights_call_the_transformer_together(kind: str, stage: int | None, together: bool) -> None:
    plugin = SimpleNamespace(zero_stage=stage)
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType[kind], deepspeed_plugin=plugin)
    assert sharding.calls_together(accelerator) == together


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_weights_that_all_train_are_whole_for_their_own_call_alone(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(sharding, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(sharding, "fully_shard", lambda module, **options: asked.append(options))
    transformer = torch.nn.Linear(2, 2).requires_grad_(False)
    transformer._no_split_modules = ["Linear"]  # type: ignore[assignment]
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=2, mixed_precision=precision)
    sharding.shard(transformer, accelerator)
    policies = [options.get("mp_policy") for options in asked]
    assert len(asked) == 2 and all(options["reshard_after_forward"] is True for options in asked)
    in_bfloat16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    assert policies == ([in_bfloat16] * 2 if precision == "bf16" else [None] * 2)
    transformer.bias.requires_grad_(True)  # beside frozen weights something else trains
    sharding.shard(transformer, accelerator)
    assert asked[-1]["ignored_params"] == {transformer.bias} and "mp_policy" not in asked[-1]


TWO_PROCESSES = """
import copy, sys
from types import SimpleNamespace
sys.path.insert(0, {tests!r})
import torch
import torch.distributed as dist
from tiny_editors import generators, images, tiny_editor, train_a_little
from rl_recipes.sharding import shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
editor = tiny_editor()
editor.add_lora(4, 8, generator=torch.Generator().manual_seed(0))
train_a_little(editor, 0.05)
conditions = editor.encode(images(2)[rank:rank + 1], ["make it red"])  # each process has a sample of its own
latents = editor.noise(conditions, generators(2)[rank:rank + 1])

def shared_bytes(module):
    return sum(getattr(p, "_local_tensor", p).nbytes for p in module.parameters())

def measured():
    for p in editor.lora_parameters():
        p.grad = None
    velocity = editor.velocity(latents, 0.6, conditions)
    velocity.square().mean().backward()
    with torch.no_grad(), editor.disable_lora():
        reference = editor.velocity(latents, 0.6, conditions)
    return [velocity.detach(), reference, *(torch.zeros(1) if p.grad is None else p.grad.clone() for p in editor.lora_parameters())]

before, whole = measured(), shared_bytes(editor.transformer)
shard(editor.transformer, SimpleNamespace(device=torch.device("cpu"), num_processes=2))
for _ in range(2):
    for a, b in zip(before, measured(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
assert (before[0] - before[1]).abs().max() > 1e-4
lora = sum(p.nbytes for p in editor.lora_parameters())
share = (shared_bytes(editor.transformer) - lora) / (whole - lora)
assert 0.45 < share < 0.6, share
print("share", round(share, 3))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_the_frozen_weights_and_compute_the_same(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES.format(tests=str(Path(__file__).parent)))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("share") == 2
