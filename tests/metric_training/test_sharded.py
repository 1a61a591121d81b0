"""FSDP2 on two CPU processes, sharded as accelerate does it: the same step, and checkpoints that hold whole weights.

accelerate itself shards on accelerators only, so the wrapping is done here with torch's own call.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
import yaml
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from metric_training import train
from metric_training.builtin_model import build_late_fusion
from metric_training.training import setup
from metric_training.training.config import TrainConfig
from metric_training.training.model import build_fusion
from metric_training.training.objectives import build_objective
from metric_training.training.setup import build_optimizers
from metric_training.training.state import restore, training_state
from tpips_reward import Metric, TPIPSError

SETTINGS = Path(train.__file__).parent / "accelerate" / "fsdp2.yaml"


def one_step(config: TrainConfig, shard: bool) -> dict[str, Any]:
    """The training state after two steps; a sharded one is lost on the way, and restored from what was saved."""
    objective = build_objective(config, build_fusion(config))
    model = objective.model
    if shard:
        names = yaml.safe_load(SETTINGS.read_text())["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"].split(",")
        assert set(names) <= {type(module).__name__ for module in model.modules()}, "the settings name blocks that are not there"
        mesh = init_device_mesh("cpu", (2,))
        for module in list(model.modules()):
            if type(module).__name__ in names:
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizers = build_optimizers(config, model)
    for step in range(2):
        batch = [objective.examples[step, step]]
        (objective.loss(model, batch, 0.0) / objective.weight(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = deepcopy(training_state(model, optimizers))  # on one process it holds the live weights
        if shard:  # only the main process gets the gathered weights, and gives them to the others
            box = [state if torch.distributed.get_rank() == 0 else None]
            torch.distributed.broadcast_object_list(box)
            state = box[0]  # type: ignore[assignment]
        if shard and step == 0:
            for optimizer in optimizers:
                optimizer.state.clear()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.zero_()
            restore(model, optimizers, state, Path("a checkpoint"))
    return state


def work(rank: int, config: TrainConfig, port: int, path: str) -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    state = one_step(config, shard=True)
    if rank == 0:
        torch.save(state, path)
    torch.distributed.destroy_process_group()


def test_sharded_weights_make_the_same_step(tmp_path: Path) -> None:
    Metric(build_late_fusion(0, hidden=96, layers=2, vision_hidden=32)).save_pretrained(tmp_path / "start")
    config = TrainConfig(
        model_name_or_path=str(tmp_path / "start"), fusion="early", dataset_name="procedural", train_samples=2,
        max_aspects=3, lora_dropout=0.0, lora_r=2, learning_rate=1e-3,
    )  # fmt: skip
    expected = one_step(config, shard=False)
    port = 20000 + (os.getpid() + 7) % 20000
    path = str(tmp_path / "state.pt")
    torch.multiprocessing.start_processes(work, (config, port, path), nprocs=2, start_method="spawn")
    found = torch.load(path, weights_only=True)
    assert found["trained"].keys() == expected["trained"].keys() and asdict(config)["use_peft"]
    for name, value in expected["trained"].items():
        assert torch.allclose(found["trained"][name], value, atol=2e-5), name


def test_muon_is_refused_where_matrices_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "Accelerator", lambda **_: SimpleNamespace(distributed_type=DistributedType.FSDP))
    with pytest.raises(TPIPSError, match="optim muon needs whole matrices, which FSDP shares out; use adamw_torch"):
        setup.build_accelerator(TrainConfig(optim="muon"))
    setup.build_accelerator(TrainConfig())


def test_accelerate_reads_the_settings() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(SETTINGS))
    assert config.distributed_type == "FSDP" and config.fsdp_config["fsdp_version"] == 2
