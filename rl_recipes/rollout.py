"""Sampling of edits with stochastic steps, and replay of those steps under gradients.

Both go through `_step`: the same velocity, the same formulas, the same batch. As long as the weights have not changed,
replay therefore gives the rollout's log-probabilities to the last bit, and the first ratio of an update is exactly 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_recipes.algorithms import sde
from rl_recipes.editors.base import Conditions, Editor
from tpips_reward.errors import TPIPSError


@dataclass(frozen=True)
class Trajectory:
    """What a rollout of B samples leaves. K is the number of stochastic steps; tensors are float32.

    Attributes:
        conditions: what the samples were conditioned on.
        sigmas: the schedule, num_steps + 1 values from 1 to 0.
        sde_steps: indices of the stochastic steps, K of them, ascending; a rule may add no noise in a last step.
        latents: (K, B, T, C) before each stochastic step.
        next_latents: (K, B, T, C) after it.
        means: (K, B, T, C) mean of the Gaussian it was drawn from.
        log_probs: (K, B) of `next_latents` under the policy that sampled.
        final: (B, T, C) clean latents, for `editor.decode`.
        eta, kind, guidance_scale: the options of the sampler, which replay reuses.
        alike: for each sample the row of the first one that shares its start, or None where each has its own.
    """

    conditions: Conditions
    sigmas: tuple[float, ...]
    sde_steps: tuple[int, ...]
    latents: Tensor
    next_latents: Tensor
    means: Tensor
    log_probs: Tensor
    final: Tensor
    eta: float
    kind: str
    guidance_scale: float
    alike: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.conditions)


@torch.no_grad()
def rollout(
    editor: Editor,
    conditions: Conditions,
    generators: Sequence[torch.Generator],
    *,
    num_steps: int,
    sde_steps: Sequence[int] = (),
    eta: float = 0.7,
    kind: str = "flow_sde",
    guidance_scale: float = 1.0,
    starts: Sequence[torch.Generator] | None = None,
    mirrored: Sequence[bool] | None = None,
) -> Trajectory:
    """Sample one edit for each of the B conditions.

    Args:
        generators: one for each sample, distinct; sample i depends on generators[i] alone: its initial noise first, then
            the noise of each stochastic step.
        num_steps: steps of the schedule.
        sde_steps: which of them are stochastic (0 is the first); none gives the pipeline's deterministic sampler.
        eta, kind: noise strength and rule of stochastic steps, see `rl_recipes.algorithms.sde`.
        starts: generators of the initial noise in place of those, one for each sample; samples of equal conditions may
            share one, and then the editor is asked once for all of them until the first stochastic step has parted them.
        mirrored: whose noise of the stochastic steps is taken with a minus sign.

    Raises:
        TPIPSError: steps out of range or repeated, or options that the SDE or the editor refuses.
    """
    chosen = check_sde_steps(sde_steps, num_steps)
    if chosen and not eta > 0.0:
        raise TPIPSError(
            f"Stochastic steps need a positive eta, but it is {eta}; leave sde_steps empty to sample without."
        )
    for name, given in (("starts", starts), ("mirrored", mirrored)):
        if given is not None and len(given) != len(conditions):
            raise TPIPSError(f"{name} has {len(given)} entries for {len(conditions)} samples; give one each.")
    sigmas = tuple(editor.sigmas(num_steps, conditions).tolist())
    if starts is None:
        alike, latents = None, editor.noise(conditions, generators)
    else:
        alike, latents = _start_alike(editor, conditions, starts)
    signs = latents.new_tensor([-1.0 if minus else 1.0 for minus in mirrored or [False] * len(conditions)])
    together = alike
    stored, before, after, means, log_probs = [], [], [], [], []
    for index in range(num_steps):
        stochastic = index in chosen
        result = _step(
            editor,
            latents,
            conditions,
            sigmas,
            index,
            eta=eta if stochastic else 0.0,
            kind=kind,
            guidance_scale=guidance_scale,
            noise=_noise_like(latents, generators) * signs[:, None, None] if stochastic else None,
            alike=together,
        )
        if result.log_prob is not None:
            stored.append(index)
            before.append(latents)
            after.append(result.sample)
            means.append(result.mean)
            log_probs.append(result.log_prob)
            together = None
        latents = result.sample
    empty = latents.new_empty((0, *latents.shape))
    return Trajectory(
        conditions=conditions,
        sigmas=sigmas,
        sde_steps=tuple(stored),
        latents=torch.stack(before) if before else empty,
        next_latents=torch.stack(after) if after else empty,
        means=torch.stack(means) if means else empty,
        log_probs=torch.stack(log_probs) if log_probs else latents.new_empty((0, len(conditions))),
        final=latents,
        eta=eta,
        kind=kind,
        guidance_scale=guidance_scale,
        alike=alike,
    )


def sample_ode(
    editor: Editor,
    conditions: Conditions,
    generators: Sequence[torch.Generator],
    num_steps: int,
    guidance_scale: float = 1.0,
) -> Tensor:
    """The pipeline's deterministic sampler: clean latents (B, T, C), for `editor.decode`."""
    return rollout(editor, conditions, generators, num_steps=num_steps, guidance_scale=guidance_scale).final


def replay(editor: Editor, trajectory: Trajectory, k: int) -> sde.StepResult:
    """The k-th stochastic step (0 <= k < K) again, with gradients: `.log_prob` (B,), `.mean` (B, T, C), `.std`.

    The whole batch is replayed at once: another batch shape may round differently, and then the first ratio is not 1.
    """
    if not 0 <= k < len(trajectory.sde_steps):
        raise TPIPSError(
            f"The trajectory has {len(trajectory.sde_steps)} stochastic steps, but step {k} was asked for."
        )
    return _step(
        editor,
        trajectory.latents[k],
        trajectory.conditions,
        trajectory.sigmas,
        trajectory.sde_steps[k],
        eta=trajectory.eta,
        kind=trajectory.kind,
        guidance_scale=trajectory.guidance_scale,
        sample=trajectory.next_latents[k],
        alike=trajectory.alike if k == 0 else None,
    )


def _step(
    editor: Editor,
    latents: Tensor,
    conditions: Conditions,
    sigmas: Sequence[float],
    index: int,
    *,
    eta: float,
    kind: str,
    guidance_scale: float,
    noise: Tensor | None = None,
    sample: Tensor | None = None,
    alike: Sequence[int] | None = None,
) -> sde.StepResult:
    if alike is None:
        velocity = editor.velocity(latents, sigmas[index], conditions, guidance_scale)
    else:
        first, place = _distinct(alike)
        velocity = editor.velocity(latents[first], sigmas[index], conditions.index(first), guidance_scale)[place]
    return sde.step(
        velocity,
        latents,
        sigmas[index],
        sigmas[index + 1],
        sigma_second=sigmas[1],
        eta=eta,
        kind=kind,
        noise=noise,
        sample=sample,
    )


def _start_alike(
    editor: Editor, conditions: Conditions, starts: Sequence[torch.Generator]
) -> tuple[tuple[int, ...] | None, Tensor]:
    """For each sample the first one with its start (None where each has its own), and the initial noise of all."""
    rows: dict[int, int] = {}
    alike = tuple(rows.setdefault(id(start), row) for row, start in enumerate(starts))
    if len(rows) == len(starts):
        return None, editor.noise(conditions, starts)
    first, place = _distinct(alike)
    return alike, editor.noise(conditions.index(first), [starts[row] for row in first])[place]


def _distinct(alike: Sequence[int]) -> tuple[list[int], list[int]]:
    """The rows that stand for others, ascending, and for each sample the position of its own among them."""
    first = sorted(set(alike))
    return first, [first.index(row) for row in alike]


def check_sde_steps(sde_steps: Sequence[int], num_steps: int) -> tuple[int, ...]:
    """`sde_steps` ascending, or a TPIPSError that names the one that is out of range or repeated."""
    chosen = sorted(int(index) for index in sde_steps)
    if len(set(chosen)) != len(chosen):
        raise TPIPSError(f"A stochastic step is listed twice in {list(sde_steps)}.")
    if chosen and not 0 <= chosen[0] <= chosen[-1] < num_steps:
        raise TPIPSError(f"Stochastic steps must lie between 0 and {num_steps - 1}, but they are {list(sde_steps)}.")
    return tuple(chosen)


def _noise_like(latents: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    drawn = [torch.randn(latents.shape[1:], generator=g, device=g.device, dtype=latents.dtype) for g in generators]
    return torch.stack(drawn).to(latents.device)
