"""One step of the optimizer, the same for all recipes: gradients averaged, clipped and checked before they move anything."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from rl_recipes.config import RunArguments
from rl_recipes.job import Iteration, Job
from rl_recipes.runs import RunError
from rl_recipes.shares import are_shared
from rl_recipes.zero import ZeroOptimizer


class NonFiniteError(RunError):
    """A loss or gradient that is NaN or infinite; it has not reached the weights."""


def learning_rate(iteration: int, run: RunArguments) -> float:
    """The learning rate of an iteration (from 1)."""
    done = (iteration - 1) / max(1, run.max_steps)
    if run.lr_scheduler_type == "linear":
        return run.learning_rate * (1 - done)
    if run.lr_scheduler_type == "cosine":
        return run.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    return run.learning_rate


def take_step(job: Job, step: Iteration, losses: Sequence[float]) -> float:
    """Moves the trained weights by the gradients that the backward passes have left; returns the gradient's norm.

    From here on the weights are between two iterations, until the session says that the iteration is finished.

    Raises:
        NonFiniteError: one of ``losses`` or the gradient is NaN or infinite; nothing has moved then.
    """
    parameters = job.editor.lora_parameters()
    with step.timer("optimizer"):
        for group in job.optimizer.param_groups:
            group["lr"] = learning_rate(step.number, job.args.run)
        if isinstance(job.optimizer, ZeroOptimizer):
            # Its gradients are averaged already; a step clips them, and leaves the weights where they are not finite.
            job.weights_are_between = True
            job.optimizer.step()
            norm = job.optimizer.gradient_norm()
            _check_finite(step, norm, losses)
        else:
            average_gradients(parameters, job.accelerator)
            norm = _number(torch.nn.utils.clip_grad_norm_(parameters, job.args.run.max_grad_norm))
            _check_finite(step, norm, losses)
            job.weights_are_between = True
            job.optimizer.step()
            job.optimizer.zero_grad(set_to_none=True)
        if job.average is not None:
            job.average.update()
    return norm


def _number(norm: torch.Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _check_finite(step: Iteration, norm: float, losses: Sequence[float]) -> None:
    if not math.isfinite(norm) or not all(map(math.isfinite, losses)):
        raise NonFiniteError(
            f"The loss or gradient of iteration {step.number} is not finite (loss {losses[-1]}, gradient norm {norm}); "
            "it has not reached the weights. Start anew with a lower --learning_rate (and --eta, where there is one)."
        )


def average_gradients(parameters: Sequence[torch.nn.Parameter], accelerator: Accelerator) -> None:
    """Averages gradients over the processes; an adapter is small enough for one message after the backward pass.

    Those of weights that FSDP2 shares out are averages already.
    """
    if accelerator.num_processes == 1 or are_shared(parameters):
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    flat = accelerator.reduce(flat, reduction="mean")
    for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)
