"""The clipped likelihood-ratio update (GRPO, DDPO), and advantages within groups (GRPO, NFT)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rl_recipes.algorithms.advantages import group_advantages
from rl_recipes.algorithms.guard import guard_policy_loss
from rl_recipes.algorithms.kl import gaussian_kl
from rl_recipes.algorithms.losses import PolicyLoss, clipped_policy_loss
from rl_recipes.algorithms.sde import StepResult
from rl_recipes.algorithms.windows import sde_window
from rl_recipes.collecting import Batch, Draw, collect
from rl_recipes.config import Arguments
from rl_recipes.job import Iteration, Job
from rl_recipes.optimizing import take_step
from rl_recipes.rollout import Trajectory, replay
from rl_recipes.seeds import WINDOW
from rl_recipes.zero import backward


def stochastic_steps(iteration: int, args: Arguments) -> tuple[int, ...]:
    """The denoising steps of an iteration that are stochastic, the same in every process."""
    a = args.algorithm
    return sde_window(
        iteration,
        size=a.sde_window,
        limit=a.last_sde_step(args.run.num_inference_steps),
        kind=a.window,
        every=a.window_every,
        stride=a.window_stride,
        seed=args.run.seed,
    )


def draw_train_steps(iteration: int, args: Arguments) -> list[int]:
    """Which of the stochastic steps are trained on in an iteration, the same in every process."""
    a = args.algorithm
    rng = np.random.default_rng([args.run.seed, WINDOW, iteration])
    return sorted(int(k) for k in rng.permutation(a.sde_window)[: a.train_steps])


def sample(job: Job, drawn: Sequence[Sequence[Draw]], step: Iteration) -> list[Batch]:
    """The scored edits of an iteration, a batch for each of ``drawn``, with the steps that the update replays."""
    a, noisy = job.args.algorithm, stochastic_steps(step.number, job.args)
    return [
        collect(
            job, part, step,
            sde_steps=noisy, eta=a.eta, kind=a.sde_kind, same_noise=a.same_noise, antithetic=a.antithetic,
        )
        for part in drawn
    ]  # fmt: skip


def assign_group_advantages(batches: Sequence[Batch], job: Job) -> None:
    """Gives each edit its advantage within its group; the standard deviation may be that of all processes' edits."""
    a, accelerator = job.args.algorithm, job.accelerator
    groups = accelerator.gather(torch.cat([b.groups for b in batches]).to(accelerator.device))

    def compare(name: str, rewards: Tensor) -> Tensor:
        return group_advantages(rewards, groups, std_from=a.advantage_std, clip=a.adv_clip)

    assign_advantages(batches, job, compare)


def assign_advantages(batches: Sequence[Batch], job: Job, compare: Callable[[str, Tensor], Tensor]) -> None:
    """Gives each edit its advantage.

    Args:
        compare: (a reward's name, the rewards of all processes' edits (N,)) -> their advantages (N,). It is asked for
            the sum of all rewards, or for each of several with ``--normalise separately``; advantages are then averaged
            by the rewards' weights.
    """
    weights = job.reward.weights if job.args.reward.normalise == "separately" else {}
    columns = [(n, w, [b.output.parts[n] for b in batches]) for n, w in weights.items()] if len(weights) > 1 else []
    columns = columns or [("sum", 1.0, [b.output.scores for b in batches])]
    total = sum(weight for _, weight, _ in columns)
    mixed = sum(
        weight / total * compare(name, job.accelerator.gather(torch.cat(scores).to(job.accelerator.device)))
        for name, weight, scores in columns
    )
    assert isinstance(mixed, Tensor)
    count = sum(map(len, batches))
    start = job.accelerator.process_index * count
    own = mixed[start : start + count].to(batches[0].trajectory.final.device)
    for batch, advantages in zip(batches, own.split([len(b) for b in batches]), strict=True):
        batch.advantages = advantages


def update(job: Job, batches: Sequence[Batch], step: Iteration) -> dict[str, float]:
    """Replays the trained steps and moves the trained weights.

    Returns:
        ``ratio_mean``, ``ratio_max_deviation``, ``clip_fraction``, ``kl`` and ``loss`` of this process's edits, and
        ``grad_norm`` of all.

    Raises:
        NonFiniteError: for a NaN or infinite loss or gradient, before it reaches the weights.
    """
    a = job.args.algorithm
    steps = draw_train_steps(step.number, job.args)
    chunks = [[k] for k in steps] if a.update_each_step else [steps]
    total = sum(map(len, batches))
    seen: dict[str, list[float]] = {name: [] for name in ("loss", "ratio", "deviation", "clipped", "kl", "norm")}
    for _ in range(a.num_iterations):
        for chunk in chunks:
            for batch in batches:
                for k in chunk:
                    with step.timer("replay"), job.accelerator.autocast():
                        loss = _loss(job, batch, k, seen)
                    with step.timer("backward"):
                        backward(loss * len(batch) / (total * len(chunk)), job.optimizer)
            seen["norm"].append(take_step(job, step, seen["loss"]))
    return {
        "loss": float(np.mean(seen["loss"])),
        "ratio_mean": float(np.mean(seen["ratio"])),
        "ratio_max_deviation": max(seen["deviation"]),
        "clip_fraction": float(np.mean(seen["clipped"])),
        "kl": float(np.mean(seen["kl"])),
        "grad_norm": float(np.mean(seen["norm"])),
    }


def _loss(job: Job, batch: Batch, k: int, seen: dict[str, list[float]]) -> Tensor:
    """The clipped loss of one trained step, plus the KL to the editor without its adapter."""
    a, trajectory = job.args.algorithm, batch.trajectory
    step = replay(job.editor, trajectory, k)
    policy = _policy_loss(step, trajectory, k, batch.advantages, job.args)
    # Without a weight the KL is only watched, and the first edit of each group is enough for that.
    rows = list(range(len(batch))) if a.beta else batch.first_of_each_group()
    with torch.no_grad(), job.editor.disable_lora():
        reference = replay(job.editor, _part(trajectory, rows), k).mean
    kl = gaussian_kl(step.mean[rows], reference, step.std).mean()
    loss = policy.loss + a.beta * kl if a.beta else policy.loss
    seen["loss"].append(float(loss.detach()))
    seen["kl"].append(float(kl.detach()))
    seen["ratio"].append(float(policy.ratio.mean()))
    seen["deviation"].append(float((policy.ratio - 1).abs().max()))
    seen["clipped"].append(float(policy.clip_fraction))
    return loss


def _policy_loss(step: StepResult, trajectory: Trajectory, k: int, advantages: Tensor, args: Arguments) -> PolicyLoss:
    if args.algorithm.ratio == "guard":
        index = trajectory.sde_steps[k]
        return guard_policy_loss(
            step.mean,
            trajectory.means[k],
            trajectory.next_latents[k],
            advantages,
            std=step.std,
            dt=trajectory.sigmas[index + 1] - trajectory.sigmas[index],
            clip_range=args.algorithm.epsilon,
        )
    assert step.log_prob is not None
    return clipped_policy_loss(step.log_prob, trajectory.log_probs[k], advantages, clip_range=args.algorithm.epsilon)


def _part(trajectory: Trajectory, rows: list[int]) -> Trajectory:
    if len(rows) == len(trajectory):
        return trajectory
    return replace(
        trajectory,
        conditions=trajectory.conditions.index(rows),
        latents=trajectory.latents[:, rows],
        next_latents=trajectory.next_latents[:, rows],
        means=trajectory.means[:, rows],
        log_probs=trajectory.log_probs[:, rows],
        final=trajectory.final[rows],
        alike=None,
    )
