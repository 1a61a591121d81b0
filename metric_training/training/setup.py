"""The objects around a training loop: accelerator, optimizer, loader, and what processes agree on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from metric_training.data.comparison import DataError
from metric_training.training.config import TrainConfig
from metric_training.training.log import check_tracker
from metric_training.training.schedule import Order
from tpips_reward import TPIPSError
from tpips_reward.stopping import StopSignal


def build_accelerator(config: TrainConfig) -> Accelerator:
    """One process or several, as `accelerate launch` started them.

    Raises:
        TPIPSError: the tracker's package is missing, or the optimizer cannot work on shared-out weights.
    """
    check_tracker(config.report_to)
    tracked = config.report_to != "none"
    accelerator = Accelerator(
        # Without this, processes that torchrun starts on a machine without a GPU would not know of each other.
        cpu=not torch.accelerator.is_available(),
        log_with=config.report_to if tracked else None,
        project_dir=config.output_dir if tracked else None,
        # Parts of a vision tower may have no part in a loss: what it feeds into later layers has none in its own stage.
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=config.objective == "scenes" or not config.freeze_vision)
        ],
    )
    if config.optim == "muon" and accelerator.distributed_type == DistributedType.FSDP:
        raise TPIPSError("optim muon needs whole matrices, which FSDP shares out; use adamw_torch, or processes without FSDP.")
    return accelerator


def open_tracker(accelerator: Accelerator, config: TrainConfig) -> None:
    """Opens the tracker, which may write to the output folder: call it once that is this run's."""
    if config.report_to != "none":
        shown = {k: v for k, v in vars(config).items() if isinstance(v, int | float | str | bool)}
        accelerator.init_trackers("metric_training", config=shown)


def build_optimizers(config: TrainConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    """What changes the weights that are trained: the towers' at ``learning_rate``, all others at ``head_learning_rate_factor`` times that.

    With ``optim: muon`` the matrices of the towers' layers go to Muon, whose step is as large as AdamW's (Liu et al., "Muon is
    scalable for LLM training", 2025, eq. 4), and AdamW has embeddings, vectors, kernels and the fusion's own parameters.
    """
    matrices: list[nn.Parameter] = []
    towers: list[nn.Parameter] = []
    own: list[nn.Parameter] = []
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if ".backbone." not in f".{name}":
            own.append(parameter)
        elif config.optim == "muon" and parameter.ndim == 2 and id(parameter) not in embeddings:
            matrices.append(parameter)
        else:
            towers.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": towers, "lr": config.learning_rate},
        {"params": own, "lr": config.learning_rate * config.head_learning_rate_factor},
    ]
    adamw = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = []
    if adamw:
        optimizers.append(torch.optim.AdamW(adamw, weight_decay=config.weight_decay, betas=(0.9, config.adam_beta2)))
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    return optimizers


class _Carrying(Dataset[Any]):
    """Examples; one that cannot be read is its error, which a worker process would wrap in a traceback."""

    def __init__(self, examples: Any) -> None:
        self.examples = examples

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.examples[key]
        except DataError as error:
            return error


def unpacked(batch: list[Any]) -> list[Any]:
    """A batch of `build_loader`.

    Raises:
        DataError: that of an example that cannot be read.
    """
    for example in batch:
        if isinstance(example, DataError):
            raise example
    return batch


def build_loader(
    config: TrainConfig, examples: Any, order: Order, start: int, stop: int, process: int
) -> Iterable[list[Any]]:
    """This process's batches of the steps from ``start`` to before ``stop``, one a pass."""
    return DataLoader(
        _Carrying(examples),
        batch_sampler=list(order.batches(start, stop, process)),
        collate_fn=list,
        num_workers=config.dataloader_num_workers,
    )


def stop_everywhere(accelerator: Accelerator, stop: StopSignal) -> bool:
    """Whether any process was asked to stop; all get the same answer at the same step."""
    return stop.requested if accelerator.num_processes == 1 else total(accelerator, float(stop.requested)) > 0


def gathered(value: Tensor) -> float:
    """A number that may be spread over processes."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def total(accelerator: Accelerator, value: float) -> float:
    """The sum over all processes."""
    if accelerator.num_processes == 1:
        return value
    return float(accelerator.reduce(torch.tensor(value, device=accelerator.device), reduction="sum"))
