"""FSDP2: each process keeps a share of every block's weights and borrows the rest while it runs.

Beside an adapter only what is frozen is sharded, which is nearly all of it. The adapter is whole in every process, so that
checkpoints, the moving average and the averaged gradients are those of unsharded runs.

With ``--train full`` all weights are sharded, and with them gradients, moments, reference and moving average (shares.py).
Checkpoints are those of every other launch: all processes gather, the main one writes, and any launch takes them up.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rl_recipes.config import Arguments, ConfigError
from rl_recipes.editors.attention import takes_masks
from rl_recipes.shares import gathered, put


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
        ConfigError: FSDP 1, or batches whose number differs between processes.
    """
    if not is_sharded(accelerator):
        return
    if not accelerator.is_fsdp2:
        raise ConfigError("FSDP must be of version 2; launch with rl_recipes/accelerate/fsdp2.yaml.")
    check_calls(args)


def check_calls(args: Arguments) -> None:
    """Refuses what makes processes call the transformer at different counts, so that one would wait for ever.

    Raises:
        ConfigError: batches or kernels whose number of calls depends on what is in a batch.
    """
    if args.run.samples_per_batch == 1:
        return
    if args.run.data is not None or args.run.eval_data is not None:
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
    """Shards the frozen weights of ``transformer``, block by block, in place.

    Where nothing trains yet, all of them are to: then none stays whole between two calls, since other values may be in its
    place by then, and blocks are gathered in the precision in which they compute.
    """
    trained = {p for p in transformer.parameters() if p.requires_grad}
    options: dict[str, Any] = {}
    if not trained:
        options["reshard_after_forward"] = True
        if accelerator.mixed_precision == "bf16":
            # Autocast would make a bfloat16 copy of each block, and keep it for the backward pass. Inputs it casts itself.
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    kinds = set(transformer._no_split_modules or ())
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in [m for m in transformer.modules() if type(m).__name__ in kinds]:
        fully_shard(module, mesh=mesh, ignored_params=trained, **options)
    fully_shard(transformer, mesh=mesh, ignored_params=trained, **options)


def keep_whole_state(optimizer: torch.optim.Optimizer) -> None:
    """Lets ``state_dict`` of sharded weights' optimizer give whole moments, and ``load_state_dict`` take them.

    All processes must ask for both; see `shares.gathered` for what each of them gets.
    """

    def gather(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        whole: dict[str, Any] = gathered(state)
        return whole

    def share(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        shared = {
            index: {name: part(value, parameters[index]) for name, value in moments.items()}
            for index, moments in state["state"].items()
        }
        return {**state, "state": shared}

    def part(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if value.shape != parameter.shape:  # the number of steps
            return value
        mine = torch.zeros_like(parameter)
        put(mine, value)
        return mine

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(share)
