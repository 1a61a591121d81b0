"""DeepSpeed's ZeRO behind the optimizer that the recipes know: `step`, `zero_grad`, `param_groups`, `state_dict`.

ZeRO-2 shares gradients, optimizer state and the float32 copy of what trains among the processes, ZeRO-3 the weights as well.
Checkpoints are those of every other launch: all processes gather, the main one keeps and writes, and any launch takes them up.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from rl_recipes.config import Arguments, ConfigError
from rl_recipes.editors import Editor
from rl_recipes.editors.merged_lora import disable_merged_lora
from rl_recipes.sharding import check_calls

_MOMENTS = ("exp_avg", "exp_avg_sq")


def asked() -> bool:
    """Whether the launch asks for DeepSpeed, before there is an accelerator.

    Raises:
        ConfigError: it is not installed.
    """
    wanted = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if wanted and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("This launch needs DeepSpeed: pip install 'tpips-reward[deepspeed]'.")
    return wanted


def is_zero(accelerator: Accelerator) -> bool:
    """Whether it is DeepSpeed's."""
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def check(args: Arguments, accelerator: Accelerator) -> None:
    """Refuses what ZeRO cannot do here.

    Raises:
        ConfigError: other stages, what `check_calls` refuses, and with ZeRO-3 whatever keeps a second set of weights.
    """
    if not is_zero(accelerator):
        return
    stage = accelerator.deepspeed_plugin.zero_stage
    if stage not in (2, 3):
        raise ConfigError(
            f"DeepSpeed's ZeRO must be of stage 2 or 3, not {stage}; launch with rl_recipes/accelerate/zero2.yaml or zero3.yaml."
        )
    check_calls(args)
    second = {
        "--train full": args.editor.train == "full",
        "nft_edit.py": args.algorithm.recipe == "nft_edit",
        "--ema_decay": bool(args.ema_decay()),
    }
    if stage == 3 and any(second.values()):
        name = next(name for name, used in second.items() if used)
        without = "give --ema_decay 0, or " if name == "--ema_decay" and not args.run.resume else ""
        raise ConfigError(
            f"{name} keeps a second set of the trained weights, which ZeRO-3 shares out; {without}launch with "
            "rl_recipes/accelerate/zero2.yaml or fsdp2.yaml."
        )


class ZeroOptimizer:
    """DeepSpeed's engine around the editor's transformer, as an optimizer; the editor's predictions go through it.

    Args:
        editor: with its trained parameters; its transformer is called through the engine from here on.
        optimizer: AdamW of those parameters.
        accelerator: launched with DeepSpeed.
        max_grad_norm: gradients are clipped to this norm in `step`.
    """

    def __init__(
        self, editor: Editor, optimizer: torch.optim.AdamW, accelerator: Accelerator, max_grad_norm: float
    ) -> None:
        import deepspeed

        plugin = accelerator.deepspeed_plugin
        self._parameters: list[nn.Parameter] = editor.lora_parameters()
        self.partitions_weights = plugin.zero_stage == 3
        if self.partitions_weights:
            # Weights are gathered when their own module is called, and the merged route looks at them before that.
            disable_merged_lora(editor.transformer)
        config = {
            # The precision is that of the weights and of autocast: DeepSpeed would cast the adapter to bfloat16.
            "zero_optimization": dict(plugin.deepspeed_config["zero_optimization"]),
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": max_grad_norm,
            # An iteration has as many backward passes as it has batches, and `step` ends it.
            "managed_gradient_accumulation": False,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "steps_per_print": float("inf"),
        }
        self._engine, *_ = deepspeed.initialize(
            model=editor.transformer, optimizer=optimizer, config=config, dist_init_required=False
        )
        editor.call_through(self._engine)
        self._gathered: dict[str, Any] | None = None
        self._writes = accelerator.is_main_process

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer that steps, for the learning rate."""
        return self._engine.optimizer.param_groups

    def backward(self, loss: Tensor) -> None:
        """Adds the loss's gradients, averaged over the processes, to those that the next `step` takes."""
        self._engine.backward(loss)

    def step(self) -> None:
        """Clips the gradients and moves the weights, unless the gradients' norm is not finite; forgets the gradients."""
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: `step` has done so."""

    def gradient_norm(self) -> float:
        """The norm that `step` has found; not finite where nothing was moved."""
        return float(self._engine.get_global_grad_norm())

    # Checkpoints -----------------------------------------------------------------------------------------------------

    @contextmanager
    def whole(self, moments: bool = False) -> Iterator[None]:
        """Weights whole in every process, and with ``moments`` the optimizer's state in the main one; all must enter.

        What the main process changes in the weights is what all have afterwards.
        """
        if moments:
            self._gathered = self._gather()
        with self._gather_weights():
            yield
        self._gathered = None

    def _gather_weights(self) -> AbstractContextManager[Any]:
        if not self.partitions_weights:
            return nullcontext()
        import deepspeed

        gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(self._parameters, modifier_rank=0)
        return gathered

    def _gather(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        inner = self._inner()
        step: Any = next((state["step"] for state in inner.state.values() if "step" in state), None)
        states: dict[int, Any] = {}
        for index, p in enumerate(self._parameters if step is not None else ()):
            moments = {name: safe_get_full_optimizer_state(p, name) for name in _MOMENTS}  # with all processes
            if self._writes:  # the others have no use for it, and a machine's processes would fill its memory together
                kept = {name: value.reshape(_shape(p)).cpu() for name, value in moments.items()}
                states[index] = {"step": torch.tensor(float(step)), **kept}
        group = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        return {"state": states, "param_groups": [{**group, "params": list(range(len(self._parameters)))}]}

    def state_dict(self) -> dict[str, Any]:
        """AdamW's own layout, as `torch.optim.AdamW` would give it; in the main process, within `whole` with ``moments``."""
        assert self._gathered is not None
        return self._gathered

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up AdamW's state, and the weights as they are now; within `whole`."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for p in self._parameters:
            safe_set_full_fp32_param(p, p.detach().float())
        for group in self.param_groups:
            group.update({k: v for k, v in state["param_groups"][0].items() if k != "params"})
        if not state["state"]:
            return
        inner, engine = self._inner(), self._engine.optimizer
        step = next(iter(state["state"].values()))["step"]
        # ZeRO-3 gives the inner optimizer its parameters within a step only.
        for part in engine.fp32_partitioned_groups_flat if self.partitions_weights else engine.single_partition_of_fp32_groups:
            moments = {name: torch.zeros_like(part) for name in _MOMENTS}
            inner.state[part] = {"step": step.clone(), **moments}
        if not self.partitions_weights:
            engine._lazy_init_hp_params_optimizer_state()  # what a first step does: parameters learn of their moments
        for index, moments in state["state"].items():  # of what has ever had a gradient
            for name in _MOMENTS:
                p = self._parameters[index]
                safe_set_full_optimizer_state(p, moments[name].to(p.device), name)

    def _inner(self) -> torch.optim.Optimizer:
        return self._engine.optimizer.optimizer


def whole(optimizer: Any, moments: bool = False) -> AbstractContextManager[None]:
    """`ZeroOptimizer.whole` where the launch shares out weights or optimizer state, and nothing elsewhere."""
    return optimizer.whole(moments) if isinstance(optimizer, ZeroOptimizer) else nullcontext()


def backward(loss: Tensor, optimizer: Any) -> None:
    """The backward pass of a loss."""
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()


def num_elements(parameters: Sequence[nn.Parameter]) -> int:
    """How many numbers the parameters have, shared out or not."""
    return sum(_shape(p).numel() for p in parameters)


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)
