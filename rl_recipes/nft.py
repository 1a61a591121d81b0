"""DiffusionNFT's update: edits are noised again, and good ones pull the velocity that bad ones push."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_recipes.algorithms.nft import (
    NFTLoss,
    draw_times,
    nft_loss,
    noised,
    old_policy_decay,
    weights_from_advantages,
)
from rl_recipes.collecting import Batch
from rl_recipes.job import Iteration, Job
from rl_recipes.optimizing import take_step
from rl_recipes.seeds import FORWARD, generator
from rl_recipes.weights import ShadowWeights
from rl_recipes.zero import backward


def update(job: Job, batches: Sequence[Batch], old: ShadowWeights, step: Iteration) -> dict[str, float]:
    """Trains on each edit at ``noise_levels`` levels, then lets the old policy, which sampled, follow.

    Returns:
        ``loss``, ``positive`` and ``negative`` (the mean normalised errors of both sides), ``distance`` (to the editor
        without its adapter; where it has a weight), ``old_decay`` and ``grad_norm``.

    Raises:
        NonFiniteError: for a NaN or infinite loss or gradient, before it reaches the weights.
    """
    a = job.args.algorithm
    total = sum(map(len, batches)) * a.noise_levels
    seen: dict[str, list[float]] = {name: [] for name in ("loss", "positive", "negative", "distance", "norm")}
    for number in range(a.num_iterations):
        for batch in batches:
            clean = batch.trajectory.final
            generators = _generators(job, batch, step, number)
            levels = draw_times(
                generators, a.noise_levels, kind=a.noise_level_kind, sigmas=batch.trajectory.sigmas
            ).to(clean.device)
            for times in levels.unbind(dim=1):
                latents = noised(clean, job.editor.noise(batch.trajectory.conditions, generators), times)
                with step.timer("replay"), job.accelerator.autocast():
                    found = _loss(job, batch, old, latents, times)
                with step.timer("backward"):
                    backward(found.loss * len(batch) / total, job.optimizer)
                seen["loss"].append(float(found.loss.detach()))
                for name in ("positive", "negative", "distance"):
                    seen[name].append(float(getattr(found, name).mean()))
        seen["norm"].append(take_step(job, step, seen["loss"]))
    decay = old_policy_decay(step.number - 1, rate=a.old_decay_rate, most=a.old_decay_most)
    old.follow(decay)
    means = {name: float(np.mean(values)) for name, values in seen.items()}
    means["grad_norm"] = means.pop("norm")
    if not a.kl_weight:
        del means["distance"]
    return {**means, "old_decay": decay}


def _generators(job: Job, batch: Batch, step: Iteration, number: int) -> list[torch.Generator]:
    """One for each edit, of this iteration and pass."""
    return [generator(job.args.run.seed, FORWARD, step.number, number, d.group, d.sample) for d in batch.drawn]


def _loss(job: Job, batch: Batch, old: ShadowWeights, latents: Tensor, times: Tensor) -> NFTLoss:
    a, trajectory = job.args.algorithm, batch.trajectory

    def velocity() -> Tensor:
        return job.editor.velocity(latents, times, trajectory.conditions, trajectory.guidance_scale)

    with torch.no_grad():
        with old.swapped():
            old_velocity = velocity()
        reference = None
        if a.kl_weight:
            with job.editor.disable_lora():
                reference = velocity()
    return nft_loss(
        velocity(),
        old_velocity,
        latents,
        trajectory.final,
        times,
        weights_from_advantages(batch.advantages, clip=a.adv_clip),
        beta=a.nft_beta,
        reference_velocity=reference,
        kl_weight=a.kl_weight,
    )
