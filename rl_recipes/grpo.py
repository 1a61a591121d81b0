"""The parts of one GRPO iteration: rollouts of whole groups, their scores and advantages, and the update.

Each process handles whole groups. What is random depends on (seed, iteration, group, sample) alone, so several
processes draw what one process would draw, and the averaged gradient is that of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from accelerate import Accelerator

from rl_recipes.algorithms.advantages import group_advantages
from rl_recipes.algorithms.kl import gaussian_kl
from rl_recipes.algorithms.losses import clipped_policy_loss
from rl_recipes.config import Arguments
from rl_recipes.editors import Conditions, Editor
from rl_recipes.editors.base import Size
from rl_recipes.progress import PhaseTimer
from rl_recipes.prompts import Prompt, PromptSource
from rl_recipes.rollout import Trajectory, replay, rollout
from rl_recipes.runs import DivergedError, RunError, RunFolder
from rl_recipes.seeds import NOISE, WINDOW, generator
from tpips_reward.rewards import RewardOutput, TPIPSReward
from tpips_reward.stopping import StopSignal

T = TypeVar("T")


class Draw(NamedTuple):
    """What one edit is drawn from: the group's number within the iteration, the edit's within the group, the prompt."""

    group: int
    sample: int
    prompt: Prompt


@dataclass
class Batch:
    """Edits that go through the editor together, in rollout and replay alike.

    Attributes:
        prompts: one for each edit; edits of a group follow one another.
        groups: (B,) number of each edit's group within the iteration.
        trajectory: the rollout.
        edits: the images, (3, H, W) float32, on the editor's device.
        sources: what the editor saw of each source, in the edits' size; one tensor object for all edits of a group.
        output: the reward's answer.
        advantages: (B,), once the rewards of all processes are known.
    """

    prompts: list[Prompt]
    groups: torch.Tensor
    trajectory: Trajectory
    edits: list[torch.Tensor]
    sources: list[torch.Tensor]
    output: RewardOutput
    advantages: torch.Tensor

    def first_of_each_group(self) -> list[int]:
        """Positions of the first edit of each group that the batch holds."""
        groups = self.groups.tolist()
        return [i for i, group in enumerate(groups) if i == 0 or group != groups[i - 1]]


class NonFiniteError(RunError):
    """A loss or gradient that is NaN or infinite; it has not reached the weights."""


def draw_prompts(source: PromptSource, iteration: int, args: Arguments, accelerator: Accelerator) -> list[Draw]:
    """This process's edits of an iteration (from 1): whole groups, one after another."""
    g, rank, world = args.grpo, accelerator.process_index, accelerator.num_processes
    count = g.prompts_per_iteration
    groups = range(rank * count // world, (rank + 1) * count // world)
    prompts = {group: source[(iteration - 1) * count + group] for group in groups}
    return [Draw(group, sample, prompts[group]) for group in groups for sample in range(g.num_generations)]


def draw_train_steps(iteration: int, args: Arguments) -> list[int]:
    """Which of the stochastic steps are trained on in an iteration, the same in every process."""
    g = args.grpo
    rng = np.random.default_rng([g.seed, WINDOW, iteration])
    return sorted(int(k) for k in rng.permutation(g.sde_window)[: g.train_steps])


def make_batches(drawn: Sequence[Draw], editor: Editor, args: Arguments) -> list[list[Draw]]:
    """Splits the edits of an iteration into batches of one size each, of ``samples_per_batch`` edits at most."""
    sizes = {item.group: editor.output_size(item.prompt.image) for item in drawn}
    return list(same_size_batches(drawn, lambda item: sizes[item.group], args.grpo.samples_per_batch or len(drawn)))


def same_size_batches(items: Iterable[T], size_of: Callable[[T], Size], most: int) -> Iterator[list[T]]:
    """Neighbours whose edits have one size, at most ``most`` together; takes no more items than it yields."""
    batch: list[T] = []
    last = None
    for item in items:
        size = size_of(item)
        if batch and (len(batch) == most or size != last):
            yield batch
            batch = []
        batch.append(item)
        last = size
    if batch:
        yield batch


def encode(editor: Editor, prompts: Sequence[Prompt], guidance_scale: float) -> Conditions:
    """Encodes each prompt once, with an empty negative prompt where guidance is on."""
    negative = " " if guidance_scale > 1 else None
    return editor.encode([p.image for p in prompts], [p.instruction for p in prompts], negative_prompt=negative)


def collect(
    editor: Editor,
    reward: TPIPSReward,
    drawn: Sequence[Draw],
    iteration: int,
    args: Arguments,
    folder: RunFolder,
    accelerator: Accelerator,
    timer: PhaseTimer,
    stop: StopSignal,
) -> Batch:
    """Samples the edits of a batch and scores them; each distinct prompt is encoded once.

    Raises:
        RunError: when the reward fails or is not finite; the batch is kept in ``failed_batch`` then.
        DivergedError: when an edit has pixels that are not finite.
        Interrupted: when a stop was asked for.
    """
    g = args.grpo
    distinct = {item.group: item.prompt for item in drawn}
    place = {group: index for index, group in enumerate(distinct)}
    rows = [place[item.group] for item in drawn]
    with timer("encode"):
        conditions = encode(editor, list(distinct.values()), args.editor.guidance_scale).index(rows)
    stop.check()
    with timer("rollout"), accelerator.autocast():
        trajectory = rollout(
            editor,
            conditions,
            [generator(g.seed, NOISE, iteration, item.group, item.sample) for item in drawn],
            num_steps=g.num_inference_steps,
            sde_steps=range(g.sde_window),
            eta=g.eta,
            kind=g.sde_kind,
            guidance_scale=args.editor.guidance_scale,
        )
    stop.check()
    where = f"iteration_{iteration:06d}/group_{drawn[0].group:03d}_edit_{drawn[0].sample:03d}"
    with timer("decode"), torch.no_grad():
        edits = decode(editor, trajectory.final, conditions, where)
        fitted = [editor.fit(prompt.image).to(edits[0].device) for prompt in distinct.values()]
    prompts, sources = [item.prompt for item in drawn], [fitted[row] for row in rows]
    with timer("reward"):
        output = score(reward, edits, sources, prompts, where, folder)
    stop.check()
    groups = torch.tensor([item.group for item in drawn])
    return Batch(prompts, groups, trajectory, edits, sources, output, torch.empty(0))


def decode(editor: Editor, latents: torch.Tensor, conditions: Conditions, where: str) -> list[torch.Tensor]:
    """The edits as (3, H, W) float32 images.

    Raises:
        DivergedError: when a pixel is not finite.
    """
    edits = [image.float() for image in editor.decode(latents, conditions)]
    broken = sum(not bool(torch.isfinite(edit).all()) for edit in edits)
    if broken:
        raise DivergedError(
            f"{broken} of {len(edits)} edits of {where} have pixels that are not finite. Where training has begun, its "
            f"weights have diverged: start anew with a lower --learning_rate. Where it has not, the editor's own weights "
            f"or their type are at fault: try --editor_dtype float32."
        )
    return edits


def score(
    reward: TPIPSReward,
    edits: list[torch.Tensor],
    sources: list[torch.Tensor],
    prompts: Sequence[Prompt],
    where: str,
    folder: RunFolder,
) -> RewardOutput:
    """Asks the reward; a failure stops the run and never becomes a number.

    ``where`` names the batch in the message and in ``failed_batch``.

    Raises:
        RunError: naming the failure and where the batch was kept.
    """
    try:
        with torch.no_grad():
            output = reward(
                edits, sources, preserve=[list(p.preserve) for p in prompts], target=[list(p.target) for p in prompts]
            )
        if output.scores.shape != (len(edits),) or not bool(torch.isfinite(output.scores).all()):
            raise RunError(f"its scores are {output.scores.tolist()}")
        return output
    except Exception as error:
        rows = [
            {"key": p.key, "instruction": p.instruction, "preserve": list(p.preserve), "target": list(p.target)}
            for p in prompts
        ]
        kept = folder.save_failed_batch(where, edits, sources, rows)
        raise RunError(
            f"The reward failed in {where} ({type(error).__name__}: {error}). The batch is in {kept}; once the cause is "
            f"mended, --resume goes on from the last checkpoint."
        ) from error


def assign_advantages(batches: list[Batch], args: Arguments, accelerator: Accelerator) -> None:
    """Gives each edit its advantage within its group; the standard deviation may be that of all processes' edits."""
    g = args.grpo
    scores = torch.cat([b.output.scores for b in batches]).to(accelerator.device)
    groups = torch.cat([b.groups for b in batches]).to(accelerator.device)
    all_advantages = group_advantages(
        accelerator.gather(scores), accelerator.gather(groups), std_from=g.advantage_std, clip=g.adv_clip
    )
    start = accelerator.process_index * len(scores)
    own = all_advantages[start : start + len(scores)].to(batches[0].trajectory.final.device)
    for batch, advantages in zip(batches, own.split([len(b.groups) for b in batches]), strict=True):
        batch.advantages = advantages


def learning_rate(iteration: int, args: Arguments) -> float:
    """The learning rate of an iteration (from 1)."""
    g = args.grpo
    done = (iteration - 1) / max(1, g.max_steps)
    if g.lr_scheduler_type == "linear":
        return g.learning_rate * (1 - done)
    if g.lr_scheduler_type == "cosine":
        return g.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    return g.learning_rate


def update(
    editor: Editor,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    iteration: int,
    args: Arguments,
    accelerator: Accelerator,
    timer: PhaseTimer,
    before_step: Callable[[], None],
) -> dict[str, float]:
    """Replays the trained steps and moves the adapter.

    ``before_step`` is called before each step of the optimizer, the last moment at which the weights are those that the
    iteration began with.

    Returns:
        ``ratio_mean``, ``ratio_max_deviation`` (of this process), ``clip_fraction``, ``kl``, ``grad_norm``, ``loss``.

    Raises:
        NonFiniteError: for a NaN or infinite loss or gradient, before it reaches the weights.
    """
    g = args.grpo
    parameters = editor.lora_parameters()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(iteration, args)
    steps = draw_train_steps(iteration, args)
    chunks = [[k] for k in steps] if g.update_each_step else [steps]
    total = sum(len(b.groups) for b in batches)
    seen: dict[str, list[float]] = {name: [] for name in ("loss", "ratio", "deviation", "clipped", "kl", "norm")}
    for _ in range(g.num_iterations):
        for chunk in chunks:
            optimizer.zero_grad(set_to_none=True)
            for batch in batches:
                for k in chunk:
                    with timer("replay"), accelerator.autocast():
                        loss = _loss(editor, batch, k, args, seen)
                    with timer("backward"):
                        (loss * len(batch.groups) / (total * len(chunk))).backward()
            with timer("optimizer"):
                average_gradients(parameters, accelerator)
                norm = torch.nn.utils.clip_grad_norm_(parameters, g.max_grad_norm)
                seen["norm"].append(float(norm))
                if not math.isfinite(seen["norm"][-1]) or not all(map(math.isfinite, seen["loss"])):
                    raise NonFiniteError(
                        f"The loss or gradient of iteration {iteration} is not finite (loss {seen['loss'][-1]}, "
                        f"gradient norm {seen['norm'][-1]}); it has not reached the weights. Start anew with a lower "
                        f"--learning_rate or --eta."
                    )
                before_step()
                optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "loss": float(np.mean(seen["loss"])),
        "ratio_mean": float(np.mean(seen["ratio"])),
        "ratio_max_deviation": max(seen["deviation"]),
        "clip_fraction": float(np.mean(seen["clipped"])),
        "kl": float(np.mean(seen["kl"])),
        "grad_norm": float(np.mean(seen["norm"])),
    }


def average_gradients(parameters: Sequence[torch.nn.Parameter], accelerator: Accelerator) -> None:
    """Averages gradients over the processes; an adapter is small enough for one message after the backward pass."""
    if accelerator.num_processes == 1:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    flat = accelerator.reduce(flat, reduction="mean")
    for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)


def _loss(editor: Editor, batch: Batch, k: int, args: Arguments, seen: dict[str, list[float]]) -> torch.Tensor:
    """The clipped loss of one trained step, plus the KL to the editor without its adapter."""
    g, trajectory = args.grpo, batch.trajectory
    step = replay(editor, trajectory, k)
    assert step.log_prob is not None
    policy = clipped_policy_loss(step.log_prob, trajectory.log_probs[k], batch.advantages, clip_range=g.epsilon)
    # Without a weight the KL is only watched, and the first edit of each group is enough for that.
    rows = list(range(len(batch.groups))) if g.beta else batch.first_of_each_group()
    with torch.no_grad(), editor.disable_lora():
        reference = replay(editor, _part(trajectory, rows), k).mean
    kl = gaussian_kl(step.mean[rows], reference, step.std).mean()
    loss = policy.loss + g.beta * kl if g.beta else policy.loss
    seen["loss"].append(float(loss.detach()))
    seen["kl"].append(float(kl.detach()))
    seen["ratio"].append(float(policy.ratio.mean()))
    seen["deviation"].append(float((policy.ratio - 1).abs().max()))
    seen["clipped"].append(float(policy.clip_fraction))
    return loss


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
    )
