"""The edits of an iteration: who draws what, sampling, decoding and scoring. All recipes and the evaluation share it.

What is random depends on (seed, iteration, group, sample) alone, so several processes draw what one process would draw.
Each process has an equal share of the edits, which may begin or end in the middle of a group.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rl_recipes.editors import Conditions, Editor
from rl_recipes.editors.base import Size
from rl_recipes.job import Iteration, Job
from rl_recipes.prompts import Prompt, PromptSource
from rl_recipes.rewards import Rewards
from rl_recipes.rollout import Trajectory, rollout
from rl_recipes.runs import DivergedError, RunError, RunFolder
from rl_recipes.seeds import NOISE, START, generator
from tpips_reward.errors import reason
from tpips_reward.rewards import RewardOutput

T = TypeVar("T")


class Draw(NamedTuple):
    """What one edit is drawn from: the group's number within the iteration, the edit's within the group, the prompt."""

    group: int
    sample: int
    prompt: Prompt


@dataclass
class Edits:
    """Edits that went through the editor together, and what they earned.

    Attributes:
        drawn: what each of the B edits was drawn from; edits of a group follow one another.
        edits: the images, (3, H, W) float32, on the editor's device.
        sources: what the editor saw of each source, in the edits' size; one tensor object for all edits of a group.
        output: the reward's answer.
    """

    drawn: list[Draw]
    edits: list[Tensor]
    sources: list[Tensor]
    output: RewardOutput

    @property
    def prompts(self) -> list[Prompt]:
        """One for each edit."""
        return [item.prompt for item in self.drawn]

    @property
    def groups(self) -> Tensor:
        """(B,) number of each edit's group within the iteration."""
        return torch.tensor([item.group for item in self.drawn])

    def __len__(self) -> int:
        return len(self.drawn)


@dataclass
class Batch(Edits):
    """Edits of a rollout that an update goes back to.

    Attributes:
        trajectory: the rollout.
        advantages: (B,), once the rewards of all processes are known.
    """

    trajectory: Trajectory
    advantages: Tensor

    def first_of_each_group(self) -> list[int]:
        """Positions of the first edit of each group that the batch holds."""
        groups = self.groups.tolist()
        return [i for i, group in enumerate(groups) if i == 0 or group != groups[i - 1]]


def draw_edits(job: Job, source: PromptSource, positions: Sequence[int]) -> list[Draw]:
    """This process's share of an iteration's edits, in order; ``positions`` are those of the groups' prompts."""
    count = job.args.run.num_generations
    total, rank, world = len(positions) * count, job.accelerator.process_index, job.accelerator.num_processes
    own = range(rank * total // world, (rank + 1) * total // world)
    prompts = {group: source[positions[group]] for group in sorted({index // count for index in own})}
    return [Draw(index // count, index % count, prompts[index // count]) for index in own]


def make_batches(job: Job, drawn: Sequence[Draw]) -> list[list[Draw]]:
    """Splits the edits of an iteration into batches of one size each, of ``samples_per_batch`` edits at most."""
    sizes = {item.group: job.editor.output_size(item.prompt.image) for item in drawn}
    return list(same_size_batches(drawn, lambda item: sizes[item.group], job.args.run.samples_per_batch or len(drawn)))


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
    # FLUX.1's classifier-free guidance beside the distilled one has a scale of its own.
    guided = max(guidance_scale, getattr(editor, "true_cfg_scale", 1.0)) > 1
    negative = " " if guided else None
    return editor.encode([p.image for p in prompts], [p.instruction for p in prompts], negative_prompt=negative)


def encode_drawn(job: Job, drawn: Sequence[Draw]) -> tuple[Conditions, list[Tensor]]:
    """Conditions of the edits, and what each is compared with: its source at the edit's size; each prompt once."""
    distinct = {item.group: item.prompt for item in drawn}
    place = {group: index for index, group in enumerate(distinct)}
    rows = [place[item.group] for item in drawn]
    conditions = encode(job.editor, list(distinct.values()), job.args.editor.guidance_scale).index(rows)
    fitted = [fitted_source(job.editor, prompt) for prompt in distinct.values()]
    return conditions, [fitted[row] for row in rows]


def fitted_source(editor: Editor, prompt: Prompt) -> Tensor:
    """The image that an edit of the prompt is compared with, in the edit's size, on the editor's device."""
    return editor.fit(editor.main_image(prompt.image)).to(editor.device)


def edit_generators(
    job: Job, drawn: Sequence[Draw], number: int, stream: int = NOISE, *, antithetic: bool = False
) -> list[torch.Generator]:
    """A generator for each edit of an iteration, the same whatever the process or batch; of one stream for two neighbours
    of a group that are ``antithetic``."""
    samples = [item.sample // 2 if antithetic else item.sample for item in drawn]
    seed = job.args.run.seed
    return [generator(seed, stream, number, item.group, n) for item, n in zip(drawn, samples, strict=True)]


def group_generators(job: Job, drawn: Sequence[Draw], number: int) -> list[torch.Generator]:
    """For each edit of an iteration the generator of its group: one object for all edits of a group."""
    made = {item.group: generator(job.args.run.seed, START, number, item.group) for item in drawn}
    return [made[item.group] for item in drawn]


def collect(
    job: Job,
    drawn: Sequence[Draw],
    step: Iteration,
    *,
    sde_steps: Sequence[int] = (),
    eta: float = 0.0,
    kind: str = "flow_sde",
    same_noise: bool = False,
    antithetic: bool = False,
) -> Batch:
    """Samples the edits of a batch and scores them; each distinct prompt is encoded once.

    Args:
        sde_steps, eta, kind: of the stochastic steps, see `rollout`.
        same_noise: the edits of a group start from the same noise.
        antithetic: every second edit of a group takes the stochastic steps' noise of the one before it, negated.

    Raises:
        RunError: when the reward fails or is not finite; the batch is kept in ``failed_batch`` then.
        DivergedError: when an edit has pixels that are not finite.
        Interrupted: when a stop was asked for.
    """
    timer = step.timer
    with timer("encode"):
        conditions, sources = encode_drawn(job, drawn)
    starts = None
    if same_noise:
        starts = group_generators(job, drawn, step.number)
    elif antithetic:  # neighbours share a stream for the steps, and each still starts from noise of its own
        starts = edit_generators(job, drawn, step.number, START)
    job.stop.check()
    with timer("rollout"), job.accelerator.autocast():
        trajectory = rollout(
            job.editor,
            conditions,
            edit_generators(job, drawn, step.number, antithetic=antithetic),
            num_steps=job.args.run.num_inference_steps,
            sde_steps=sde_steps,
            eta=eta,
            kind=kind,
            guidance_scale=job.args.editor.guidance_scale,
            starts=starts,
            mirrored=[antithetic and item.sample % 2 == 1 for item in drawn],
        )
    job.stop.check()
    where = batch_name(drawn, step)
    with timer("decode"), torch.no_grad():
        edits = decode(job.editor, trajectory.final, conditions, where)
    with timer("reward"), torch.no_grad():
        output = score(job.reward, edits, sources, [item.prompt for item in drawn], where, job.folder)
    job.stop.check()
    return Batch(list(drawn), edits, sources, output, trajectory, torch.empty(0))


def batch_name(drawn: Sequence[Draw], step: Iteration) -> str:
    """Names a batch in messages and in ``failed_batch``."""
    return f"iteration_{step.number:06d}/group_{drawn[0].group:03d}_edit_{drawn[0].sample:03d}"


def decode(editor: Editor, latents: Tensor, conditions: Conditions, where: str) -> list[Tensor]:
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
    reward: Rewards, edits: list[Tensor], sources: list[Tensor], prompts: Sequence[Prompt], where: str, folder: RunFolder
) -> RewardOutput:
    """Asks the reward; a failure stops the run and never becomes a number. Gradients flow unless the caller stops them.

    ``where`` names the batch in the message and in ``failed_batch``.

    Raises:
        RunError: naming the failure and where the batch was kept, or why it was not.
    """
    try:
        output = reward(edits, sources, prompts)
        if output.scores.shape != (len(edits),) or not bool(torch.isfinite(output.scores).all()):
            raise RunError(f"its scores are {output.scores.tolist()}")
        return output
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        rows = [
            {"key": p.key, "instruction": p.instruction, "preserve": list(p.preserve), "target": list(p.target)}
            for p in prompts
        ]
        try:
            trace = "".join(traceback.format_exception(error))
            kept = f"The batch and the traceback are in {folder.save_failed_batch(where, edits, sources, rows, trace)}"
        except RunError as refused:  # a full disk must not hide what is wrong with the reward
            kept = f"The batch could not be kept ({refused})"
        raise RunError(
            f"The reward failed in {where} ({type(error).__name__}: {reason(error)}). {kept}; once the cause is "
            f"mended, --resume goes on from the last checkpoint, or starts over where there is none."
        ) from error
