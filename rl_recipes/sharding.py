"""FSDP2 for the frozen weights: each process keeps a share of every block and borrows the rest while it runs.

Only what is frozen is sharded, which is nearly all of it. The adapter is whole in every process, so that checkpoints, the
moving average and the averaged gradients are those of unsharded runs.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rl_recipes.config import Arguments, ConfigError
from rl_recipes.editors.attention import takes_masks


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the launch asked for FSDP."""
    return accelerator.distributed_type == DistributedType.FSDP


def calls_together(accelerator: Accelerator) -> bool:
    """Whether all processes must call the transformer equally often, since each has a part of its weights (FSDP, ZeRO-3)."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return bool(accelerator.deepspeed_plugin.zero_stage == 3)
    return is_sharded(accelerator)


def check(args: Arguments, accelerator: Accelerator) -> None:
    """Refuses what sharded weights cannot do.

    Raises:
        ConfigError: FSDP 1, full fine-tuning, or batches whose number differs between processes.
    """
    if not is_sharded(accelerator):
        return
    if not accelerator.is_fsdp2:
        raise ConfigError("FSDP must be of version 2; launch with rl_recipes/accelerate/fsdp2.yaml.")
    if args.editor.train == "full":
        raise ConfigError("FSDP2 shards frozen weights, and --train full has none; train an adapter, or launch with DDP or ZeRO-2.")
    check_calls(args)


def check_calls(args: Arguments) -> None:
    """Refuses what makes processes call the transformer at different counts, so that one would wait for ever.

    Raises:
        ConfigError: batches or kernels whose number of calls depends on what is in a batch.
    """
    if args.run.samples_per_batch == 1:
        return
    if args.run.data is not None:
        raise ConfigError(
            "With FSDP2 or DeepSpeed all processes must call the transformer equally often, but photographs of several sizes "
            "make batches of several lengths; give --samples_per_batch 1."
        )
    if not takes_masks(args.editor.attention_backend):
        raise ConfigError(
            f"With FSDP2 or DeepSpeed all processes must call the transformer equally often, but the attention backend "
            f"{args.editor.attention_backend!r} is called once for each length of prompt; give --samples_per_batch 1."
        )


def shard(transformer: Any, accelerator: Accelerator) -> None:
    """Shards the frozen weights of ``transformer``, block by block, in place."""
    trained = {p for p in transformer.parameters() if p.requires_grad}
    kinds = set(transformer._no_split_modules or ())
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in [m for m in transformer.modules() if type(m).__name__ in kinds]:
        fully_shard(module, mesh=mesh, ignored_params=trained)
    fully_shard(transformer, mesh=mesh, ignored_params=trained)
