"""Fine-tunes, or trains from scratch, a fusion model on odd-one-out votes.

    accelerate launch metric_training/train.py --config metric_training/configs/builtin_late.yaml

All aspects of a triplet share the image work of a step. Every step draws its data from (seed, step, rank), so a resumed run sees
what an uninterrupted one would have seen.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from tqdm.auto import tqdm
from trl import TrlParser

from metric_training.attributes import AttributeHead, aspect_weights, attribute_loss, attribute_targets
from metric_training.builtin_model import build_late_fusion
from metric_training.data.triplets import Triplet, sample_triplet
from metric_training.data.votes import Voters
from metric_training.evaluate import held_out_triplets, metric_judge, score_triplets
from metric_training.losses import odd_one_out_loss, pair_similarities
from tpips_reward import Metric, TPIPSError
from tpips_reward.errors import INTERRUPTED, exit_on_errors
from tpips_reward.files import write_atomic, write_text
from tpips_reward.fusion.late import LateFusion
from tpips_reward.scenes import Scene, render, sample_scene, to_tensor
from tpips_reward.stopping import Interrupted, StopSignal


@dataclass
class TrainConfig:
    """Everything a run depends on.

    Attributes:
        output_dir: where checkpoints and the trained metric go.
        seed: of weights and data.
        vision_steps: steps in which the vision tower alone learns the scenes' parameters.
        vision_batch_size: scenes a step in that stage.
        vision_learning_rate: peak learning rate of that stage.
        steps: steps on votes.
        batch_size: triplets a step and process.
        learning_rate: peak learning rate on votes, after warm-up, falling to zero along a cosine.
        warmup_ratio: share of the steps.
        weight_decay: AdamW's.
        max_grad_norm: gradient clipping.
        temperature: τ of the softmax over the three similarities.
        attribute_weight: weight of the parameter loss at the first vote step; it fades to zero.
        voters: votes an aspect in training.
        max_aspects: aspects a triplet at most.
        save_every: steps between checkpoints.
        eval_every: steps between validations.
        eval_triplets: held-out triplets a validation.
        resume: go on from the newest checkpoint in output_dir.
        overwrite: start anew in a used output_dir.
    """

    output_dir: str = "runs/metric_late"
    seed: int = 0
    vision_steps: int = 1500
    vision_batch_size: int = 48
    vision_learning_rate: float = 1.5e-3
    steps: int = 2000
    batch_size: int = 24
    learning_rate: float = 1.0e-3
    warmup_ratio: float = 0.03
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    temperature: float = 0.1
    attribute_weight: float = 0.3
    voters: int = 5
    max_aspects: int = 6
    save_every: int = 100
    eval_every: int = 250
    eval_triplets: int = 200
    resume: bool = field(default=False)
    overwrite: bool = field(default=False)


#: Settings that may differ between a run and its continuation.
RESUMABLE = frozenset({"output_dir", "resume", "overwrite", "save_every", "eval_every", "eval_triplets"})


def learning_rate_factor(step: int, steps: int, warmup_ratio: float) -> float:
    """Linear warm-up, then a cosine to zero (paper, §C.3)."""
    warmup = max(1, round(warmup_ratio * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class Trainee(nn.Module):
    """The metric and its two auxiliary heads, in one module so that distributed wrappers see every parameter."""

    def __init__(self, late: LateFusion) -> None:
        super().__init__()
        self.late = late
        self.vision_head = AttributeHead(late.backbone.hidden_size)
        self.readout_head = AttributeHead(late.backbone.hidden_size)

    def forward(
        self, images: list[Tensor], aspects: list[list[str]] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
        """Parameters predicted from each image's tokens; where aspects are given, from each read-out, and the embeddings."""
        features = self.late.backbone.encode_images(images)
        # The mean over the tokens: were they told apart, a place could stay unsaid in them, and no read-out would find it.
        seen = self.vision_head(torch.stack([f.tokens.mean(0) for f in features]))
        if aspects is None:
            return seen, {}, []
        suffixes = [[self.late.prompts.suffix(a) for a in names] for names in aspects]
        vectors = self.late.embed_features(features, suffixes)
        return seen, self.readout_head(torch.cat(vectors) * self.late.backbone.hidden_size**0.5), vectors


def _targets(scenes: Sequence[Scene], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in attribute_targets(scenes).items()}


def vision_step(trainee: nn.Module, config: TrainConfig, rng: np.random.Generator) -> Tensor:
    """Loss of one step of the first stage."""
    scenes = [sample_scene(rng) for _ in range(config.vision_batch_size)]
    seen, _, _ = trainee([to_tensor(render(s)) for s in scenes], None)
    return attribute_loss(seen, _targets(scenes, seen["continuous"].device))


def vote_losses(trainee: nn.Module, triplets: list[Triplet], temperature: float) -> tuple[Tensor, Tensor]:
    """Vote loss (every aspect of every triplet weighs the same) and parameter loss of a batch.

    The parameter loss has two parts: all parameters from the image's tokens, and from each read-out those of its aspect.
    """
    images = [to_tensor(image) for t in triplets for image in t.images]
    aspects = [list(t.wordings) for t in triplets for _ in range(3)]
    seen, meant, vectors = trainee(images, aspects)
    similarities = torch.cat([pair_similarities(torch.stack(vectors[3 * i : 3 * i + 3], 1)) for i in range(len(triplets))])
    device = similarities.device
    votes = torch.from_numpy(np.concatenate([t.votes for t in triplets])).to(device)
    scenes = [s for t in triplets for s in t.scenes]
    repeated = [s for t in triplets for s in t.scenes for _ in t.aspects]
    weights = aspect_weights([a for t in triplets for _ in range(3) for a in t.aspects])
    side_loss = attribute_loss(seen, _targets(scenes, device)) + attribute_loss(
        meant, _targets(repeated, device), {name: value.to(device) for name, value in weights.items()}
    )
    return odd_one_out_loss(similarities, votes, temperature), side_loss


def step_rng(config: TrainConfig, stage: int, step: int, rank: int) -> np.random.Generator:
    """The data of a step depend on nothing but this."""
    return np.random.default_rng([config.seed, stage, step, rank])


def prepare_folder(config: TrainConfig, used_by_us: bool = False) -> tuple[Path, dict[str, Any] | None]:
    """The output folder, and the checkpoint to resume from (or None).

    Args:
        used_by_us: whether another process of this run may have written to the folder already.

    Raises:
        TPIPSError: a folder in use, or a checkpoint that is missing, damaged, or of other settings.
    """
    folder = Path(config.output_dir)
    checkpoint = folder / "checkpoint.pt"
    if config.resume and not checkpoint.exists():
        raise TPIPSError(f"--resume was given, but {checkpoint} does not exist; leave --resume out to start.")
    free = config.resume or config.overwrite or used_by_us
    if not free and folder.exists() and any(folder.iterdir()):
        raise TPIPSError(f"The output folder {folder} is not empty; give --resume to go on or --overwrite to start anew.")
    folder.mkdir(parents=True, exist_ok=True)
    if not config.resume:
        return folder, None
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise TPIPSError(f"The checkpoint {checkpoint} cannot be read ({error}); start anew with --overwrite.") from error
    if not isinstance(saved, dict) or {"model", "optimizer", "step", "seconds", "config"} - saved.keys():
        raise TPIPSError(f"{checkpoint} is no checkpoint of this script; start anew with --overwrite.")
    for name, value in asdict(config).items():
        if name not in RESUMABLE and saved["config"].get(name) != value:
            raise TPIPSError(
                f"The checkpoint {checkpoint} was made with {name}={saved['config'].get(name)!r}, not {value!r}; resume with "
                "the same settings, or start anew in another --output_dir."
            )
    return folder, saved


def check_config(config: TrainConfig) -> None:
    """Refuses numbers with which a run could not work.

    Raises:
        TPIPSError: naming the setting, its value and what it must be.
    """
    lowest = {
        "seed": 0, "vision_steps": 0, "steps": 1, "vision_batch_size": 1, "batch_size": 1, "voters": 1, "max_aspects": 3,
        "save_every": 1, "eval_every": 1, "eval_triplets": 1, "weight_decay": 0, "attribute_weight": 0, "warmup_ratio": 0,
    }  # fmt: skip
    for name, low in lowest.items():
        if not low <= getattr(config, name) < math.inf:
            raise TPIPSError(f"{name} must be at least {low}, not {getattr(config, name)!r}.")
    for name in ("learning_rate", "vision_learning_rate", "max_grad_norm", "temperature"):
        if not 0 < getattr(config, name) < math.inf:
            raise TPIPSError(f"{name} must be a number above 0, not {getattr(config, name)!r}.")


def schedule(config: TrainConfig, start: int) -> Iterator[tuple[int, int, int, float]]:
    """(global step, stage, step in stage, learning rate) from ``start`` on."""
    for total in range(start, config.vision_steps + config.steps):
        stage = 0 if total < config.vision_steps else 1
        step = total - stage * config.vision_steps
        steps, peak = (
            (config.vision_steps, config.vision_learning_rate) if stage == 0 else (config.steps, config.learning_rate)
        )
        yield total, stage, step, peak * learning_rate_factor(step, steps, config.warmup_ratio)


def validate(late: LateFusion, triplets: list[Triplet]) -> dict[str, float]:
    """Agreement, its standard error and the consensus on held-out triplets; the model's mode is restored."""
    training = late.training
    try:
        scores = score_triplets(metric_judge(Metric(late)), triplets)
    finally:
        late.train(training)
    return {f"validation_{k}": scores[k] for k in ("agreement", "standard_error", "consensus")}


def start_log(path: Path, start: int) -> None:
    """Drops the lines of steps that a resumed run will do again."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() and start else []:
        try:
            if json.loads(line)["step"] <= start:
                kept.append(line)
        except ValueError:  # a kill cut the last line off; its step is done again
            break
    write_text(path, "".join(f"{line}\n" for line in kept))


def stop_everywhere(accelerator: Accelerator, stop: StopSignal) -> bool:
    """Whether any process was asked to stop; all get the same answer at the same step."""
    if accelerator.num_processes == 1:
        return stop.requested
    asked = torch.tensor(float(stop.requested), device=accelerator.device)
    return bool(accelerator.reduce(asked, reduction="sum") > 0)


def main(config: TrainConfig) -> None:
    """Trains, and leaves checkpoint.pt (for --resume and metric_training.export) and log.jsonl in the output folder.

    Raises:
        TPIPSError: for settings or a folder that cannot be used, or a loss that is not finite.
        Interrupted: after Ctrl-C or SIGTERM; a checkpoint of all steps that are done is there then.
    """
    check_config(config)
    with StopSignal() as stop:
        run(config, stop)


def run(config: TrainConfig, stop: StopSignal) -> None:
    """The training itself; see `main`."""
    accelerator = Accelerator(
        # Without this, processes that torchrun starts on a machine without a GPU would not know of each other.
        cpu=not torch.accelerator.is_available(),
        # The first stage leaves the language tower unused.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    with accelerator.main_process_first():
        folder, saved = prepare_folder(config, used_by_us=not accelerator.is_main_process)
    late = build_late_fusion(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed + 1)
        trainee = Trainee(late)
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=1.0, weight_decay=config.weight_decay, betas=(0.9, 0.98))
    start, seconds = 0, 0.0
    if saved is not None:
        trainee.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, seconds = int(saved["step"]), float(saved["seconds"])
    wrapped, optimizer = accelerator.prepare(trainee, optimizer)
    voters = Voters(count=config.voters)
    validation = held_out_triplets(config.eval_triplets, seed=config.seed + 99)
    bar = tqdm(total=config.vision_steps + config.steps, initial=start, disable=not accelerator.is_main_process)
    clock = time.monotonic() - seconds
    if accelerator.is_main_process:
        start_log(folder / "log.jsonl", start)
    def save(done: int) -> None:
        state = {"model": trainee.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
        facts = {"seconds": time.monotonic() - clock, "config": asdict(config)}
        write_atomic(folder / "checkpoint.pt", lambda path: torch.save(state | facts, path))

    for total, stage, step, rate in schedule(config, start):
        if stop_everywhere(accelerator, stop):
            if accelerator.is_main_process and total > start:
                save(total)
            raise Interrupted
        for group in optimizer.param_groups:
            group["lr"] = rate
        rng = step_rng(config, stage, step, accelerator.process_index)
        if stage == 0:
            loss = vision_step(wrapped, config, rng)
        else:
            triplets = [sample_triplet(rng, voters=voters, max_aspects=config.max_aspects) for _ in range(config.batch_size)]
            vote_loss, side_loss = vote_losses(wrapped, triplets, config.temperature)
            fade = config.attribute_weight * max(0.0, 1 - step / (0.8 * config.steps))
            loss = vote_loss + fade * side_loss
        done = total + 1
        record = {"step": done, "stage": stage, "loss": float(loss.detach()), "seconds": time.monotonic() - clock}
        if not math.isfinite(record["loss"]):
            raise TPIPSError(
                f"The loss became {record['loss']} at step {done}; start anew with a lower "
                f"{'--vision_learning_rate' if stage == 0 else '--learning_rate'} in another --output_dir."
            )
        optimizer.zero_grad(set_to_none=True)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), config.max_grad_norm)
        optimizer.step()
        bar.update()
        if stage == 1:
            record["vote_loss"] = float(vote_loss.detach())
        last = done == config.vision_steps + config.steps
        if accelerator.is_main_process and stage == 1 and (done % config.eval_every == 0 or last):
            record |= validate(late, validation)
            bar.write(json.dumps(record))
        if accelerator.is_main_process and (done % 10 == 0 or last):
            with open(folder / "log.jsonl", "a") as log:
                log.write(json.dumps(record) + "\n")
        if accelerator.is_main_process and (done % config.save_every == 0 or last):
            save(done)
    if accelerator.is_main_process:
        bar.close()


def parse_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """The settings from flags and ``--config file.yaml``.

    Raises:
        TPIPSError: for a config file that cannot be read, an unknown setting or flag, or a value of the wrong type.
    """
    parser = TrlParser((TrainConfig,), allow_abbrev=False)
    try:
        config, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise TPIPSError(f"The settings cannot be used: {error} --help lists them.") from error
    if rest:
        raise TPIPSError(f"Unknown flag or setting {rest[0]}; --help lists them all.")
    for item in fields(config):
        value, kind = getattr(config, item.name), type(item.default)
        if type(value) is int and kind is float:
            setattr(config, item.name, float(value))
        elif type(value) is not kind:
            raise TPIPSError(f"{item.name} must be of type {kind.__name__}, not {value!r}.")
    return config


if __name__ == "__main__":
    with exit_on_errors():
        arguments = parse_config()
        try:
            main(arguments)
        except Interrupted:
            print("Stopped. The same command with --resume goes on from the last step.", file=sys.stderr)
            sys.exit(INTERRUPTED)
