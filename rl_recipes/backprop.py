"""Direct backpropagation in a run: sampling whose last steps carry a gradient, through the decoder, into the reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_recipes.algorithms.backprop import GradientPlan, gradient_plan, predict_clean, reward_loss
from rl_recipes.algorithms.kl import velocity_distance
from rl_recipes.collecting import Draw, Edits, batch_name, decode, edit_generators, encode_drawn, fitted_source, score
from rl_recipes.config import Arguments
from rl_recipes.editors import Conditions
from rl_recipes.job import Iteration, Job
from rl_recipes.optimizing import take_step
from rl_recipes.prompts import Prompt
from rl_recipes.rewards import RemoteSource
from rl_recipes.runs import RunError
from rl_recipes.zero import backward
from tpips_reward.rewards import RewardOutput


def plan_steps(iteration: int, args: Arguments) -> GradientPlan:
    """Which steps of an iteration carry the gradient, the same in every process."""
    a = args.algorithm
    return gradient_plan(
        iteration, kind=a.backprop, num_steps=args.run.num_inference_steps, last=a.last_steps, seed=args.run.seed
    )


def update(job: Job, drawn: Sequence[Sequence[Draw]], step: Iteration) -> tuple[list[Edits], dict[str, float]]:
    """Samples, scores and differentiates each batch of draws, then moves the trained weights.

    Returns:
        the edits without gradients, and ``loss``, ``grad_norm``, ``gradient_steps``, and ``distance`` (to the editor
        without its adapter) where it has a weight.

    Raises:
        NonFiniteError: for a NaN or infinite loss or gradient, before it reaches the weights.
        RunError: a reward that fails, or that gives no gradient.
        Interrupted: when a stop was asked for.
    """
    plan = plan_steps(step.number, job.args)
    total = sum(map(len, drawn))
    found, losses, distances = [], [], []
    for part in drawn:
        with step.timer("encode"):
            conditions, sources = encode_drawn(job, part)
        job.stop.check()
        with step.timer("rollout"), job.accelerator.autocast():
            latents, distance = sample_with_gradient(job, part, conditions, plan, step)
        where = batch_name(part, step)
        with step.timer("decode"):
            edits = _decode(job, latents, conditions, where)
        with step.timer("reward"):
            output = score(job.reward, edits, sources, [item.prompt for item in part], where, job.folder)
            _check_gradients(output)
            loss = reward_loss(output.scores, distance=distance, kl_weight=job.args.algorithm.kl_weight)
        with step.timer("backward"):
            backward(loss * len(part) / total, job.optimizer)
        job.stop.check()
        losses.append(float(loss.detach()))
        distances.append(0.0 if distance is None else float(distance.detach().mean()))
        found.append(Edits(list(part), [edit.detach() for edit in edits], sources, _detached(output)))
    moved = {"loss": float(np.mean(losses)), "gradient_steps": float(len(plan.steps))}
    if job.args.algorithm.kl_weight:
        moved["distance"] = float(np.mean(distances))
    return found, {**moved, "grad_norm": take_step(job, step, losses)}


def check_reward(job: Job, prompt: Prompt) -> None:
    """Asks for a prompt's source in the place of an edit, so that a reward without gradient costs no evaluation.

    Raises:
        RunError: a part of the reward gives no gradient. Whatever else is wrong with it will be said of a batch of its own.
    """
    remote = [name for one in job.reward.asked if isinstance(one.source, RemoteSource) for name in one.weights]
    if remote:
        raise _no_gradient(remote[0])
    source = fitted_source(job.editor, prompt)
    edit = (0.9 * source + 0.05).requires_grad_()  # a reward may have no gradient of a perfect copy
    try:
        output = job.reward([edit], [source], [prompt])
    except Exception:  # noqa: BLE001  of whatever kind: the evaluation asks again, and keeps the batch
        return
    _check_gradients(output)


def sample_with_gradient(
    job: Job, drawn: Sequence[Draw], conditions: Conditions, plan: GradientPlan, step: Iteration
) -> tuple[Tensor, Tensor | None]:
    """Clean latents (B, T, C), whose gradient goes through the plan's steps, and the distance (B,) to the reference.

    The distance is the mean over the plan's steps; None where it has no weight.
    """
    editor, run, a = job.editor, job.args.run, job.args.algorithm
    guidance = job.args.editor.guidance_scale
    sigmas = editor.sigmas(run.num_inference_steps, conditions).tolist()
    latents = editor.noise(conditions, edit_generators(job, drawn, step.number))
    distances = []
    for index in range(plan.steps[-1] + 1):
        learns = index in plan.steps
        with torch.set_grad_enabled(learns):
            velocity = maybe_recomputed(
                learns and a.recompute, editor.velocity, latents, sigmas[index], conditions, guidance
            )
            if learns and a.kl_weight:
                with torch.no_grad(), editor.disable_lora():
                    reference = editor.velocity(latents, sigmas[index], conditions, guidance)
                distances.append(velocity_distance(velocity, reference))
            if plan.jump and index == plan.steps[-1]:
                latents = predict_clean(latents, velocity, sigmas[index])
            else:
                latents = latents + velocity * (sigmas[index + 1] - sigmas[index])
    return latents, torch.stack(distances).mean(dim=0) if distances else None


def maybe_recomputed(recompute: bool, function: Callable[..., Any], *inputs: Any) -> Any:
    """``function(*inputs)``; with ``recompute`` its activations are computed again in the backward pass."""
    return checkpoint(function, *inputs, use_reentrant=False) if recompute else function(*inputs)


def _decode(job: Job, latents: Tensor, conditions: Conditions, where: str) -> list[Tensor]:
    def decoded(latents: Tensor) -> list[Tensor]:
        return decode(job.editor, latents, conditions, where)

    return maybe_recomputed(job.args.algorithm.recompute, decoded, latents)


def _check_gradients(output: RewardOutput) -> None:
    """A reward without gradient beside one that has it would be left out of the training without a word."""
    for name, part in output.parts.items():
        if not part.requires_grad:
            raise _no_gradient(name)


def _no_gradient(name: str) -> RunError:
    return RunError(
        f"The reward {name!r} gives no gradient, so that it cannot be backpropagated; leave it out, make it of "
        "differentiable operations on the images, or use grpo_edit.py."
    )


def _detached(output: RewardOutput) -> RewardOutput:
    parts = {name: part.detach() for name, part in output.parts.items()}
    return RewardOutput(output.scores.detach(), output.per_aspect, output.terms, parts)
