"""Trains a fusion model on votes, from any data, from scratch or from any checkpoint (paper, §4 and C.3).

    accelerate launch metric_training/train.py --config metric_training/configs/late.yaml

All aspects of a comparison go through in one pass, which does the work on its images once. What a step sees depends on
the settings and its number only, so a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from torch import nn

from metric_training.data.comparison import DataError
from metric_training.training.config import TrainConfig, check_config, parse_config
from metric_training.training.embeddings import EmbeddingObjective
from metric_training.training.log import Log
from metric_training.training.model import build_fusion
from metric_training.training.objectives import Objective, build_objective
from metric_training.training.output import write_metrics
from metric_training.training.schedule import Order, dropout_seed, learning_rate_factor
from metric_training.training.setup import (
    build_accelerator,
    build_loader,
    build_optimizers,
    gathered,
    open_tracker,
    stop_everywhere,
    total,
    unpacked,
)
from metric_training.training.state import (
    BEST,
    DIVERGED,
    STATE,
    UNVALIDATED,
    Diverged,
    check_same_origin,
    clear_folder,
    frozen_digest,
    open_folder,
    restore,
    training_state,
    write_checkpoint,
)
from metric_training.training.validation import build_validation
from tpips_reward import TPIPSError
from tpips_reward.errors import INTERRUPTED, exit_on_errors
from tpips_reward.files import write_text
from tpips_reward.stopping import Interrupted, StopSignal

_LESS = "Give --gradient_checkpointing or a lower --token_budget"
_SMALLER = "a smaller --per_device_train_batch_size and more --gradient_accumulation_steps"


def out_of_memory(where: str, resumable: bool, less: str = _LESS, other: str = _SMALLER) -> TPIPSError:
    """What to do when the memory of a device was full.

    Args:
        where: it was.
        resumable: whether there is a checkpoint of this run.
        less: what needs less and may change on a resume; other: what may not.
    """
    go_on = "go on with --resume" if resumable else "start again with --overwrite"
    return TPIPSError(f"The memory of the device was full {where}. {less} and {go_on}, or start anew with {other}.")


def main(config: TrainConfig) -> None:
    """Trains; leaves checkpoints, log.jsonl, and the metrics best/ and last/ in the output folder.

    Raises:
        TPIPSError: for settings, data or a folder that cannot be used.
        Diverged: for a loss or gradient that is not finite; a file in the output folder says so too.
        Interrupted: after Ctrl-C or SIGTERM; a checkpoint of all steps that are done is there then.
    """
    check_config(config)
    with StopSignal() as stop:
        try:
            run(config, stop)
        except Diverged as error:
            write_text(Path(config.output_dir) / DIVERGED, f"{error}\n")
            raise
        except torch.OutOfMemoryError as error:  # mostly of the model, which did not fit
            raise out_of_memory("outside of a step", config.resume) from error


def accumulate_gradients(
    accelerator: Accelerator, model: nn.Module, objective: Objective, passes: Sequence[Any], progress: float
) -> float:
    """Adds the gradients of a step, pass by pass, to those of the model.

    Returns:
        The loss, a mean over what the objective weighs in all passes of all processes.
    """
    # where all weights are 0 so is the loss, and not 0 / 0
    weight = total(accelerator, sum(objective.weight(batch) for batch in passes)) or 1.0
    loss = 0.0
    for number, batch in enumerate(passes, 1):
        with accelerator.no_sync(model) if number < len(passes) else nullcontext():
            # gradients are averaged over processes, the loss is a sum over all
            part = objective.loss(model, batch, progress) / weight
            accelerator.backward(part * accelerator.num_processes)
        loss += float(part.detach())
    return total(accelerator, loss)


def run(config: TrainConfig, stop: StopSignal) -> None:
    """The training itself; see `main`."""
    accelerator = build_accelerator(config)
    with accelerator.main_process_first():
        saved = open_folder(config, used_by_us=not accelerator.is_main_process)
    folder = Path(config.output_dir)

    fusion = build_fusion(config)
    objective = build_objective(config, fusion)
    origin: dict[str, Any] = {"data": objective.examples.digest, "start": frozen_digest(fusion)}
    origin["processes"] = accelerator.num_processes
    if isinstance(objective, EmbeddingObjective):
        origin["teacher"] = frozen_digest(objective.teacher.fusion)
    model, *wrapped = accelerator.prepare(objective.model, *build_optimizers(config, objective.model))
    optimizers = [wrapper.optimizer for wrapper in wrapped]
    validate = build_validation(config, accelerator, fusion)
    order = Order(
        items=len(objective.examples),
        batch=config.per_device_train_batch_size,
        passes=config.gradient_accumulation_steps,
        processes=accelerator.num_processes,
        seed=config.seed,
    )
    steps = order.steps(config.num_train_epochs, config.max_steps)
    start, seconds, best = 0, 0.0, -math.inf
    if saved is not None:
        check_same_origin(saved, origin, config, folder / STATE)
        restore(model, optimizers, saved, folder / STATE)
        start, seconds, best = saved["step"], saved["seconds"], saved["best"]
    if accelerator.is_main_process:
        clear_folder(folder, anew=saved is None)
        write_text(folder / "config.yaml", yaml.safe_dump(asdict(config), sort_keys=False))
    open_tracker(accelerator, config)
    batches = iter(build_loader(config, objective.examples, order, start, steps, accelerator.process_index))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups] if saved is None else saved["peaks"]
    clock = time.monotonic() - seconds
    concluded = start - (saved is not None and UNVALIDATED in saved)
    log = Log(accelerator, folder, concluded, steps)

    def save(done: int, name: str = STATE, **more: Any) -> None:
        content: dict[str, Any] = training_state(model, optimizers) | origin | more
        content |= {"step": done, "seconds": time.monotonic() - clock, "best": best, "peaks": peaks, "config": asdict(config)}
        if accelerator.is_main_process:
            write_checkpoint(folder / name, content)

    def leave(done: int, **more: Any) -> None:
        """Keeps what is done, before an error ends the run."""
        if done > start and accelerator.num_processes == 1:  # others would wait for this one
            save(done, **more)
        log.close()

    def conclude(record: dict[str, Any]) -> None:
        """Validates, logs and saves after a step, as far as that is due."""
        nonlocal best
        done, record = record["step"], dict(record)
        last = done == steps
        if validate is not None and (done % config.eval_steps == 0 or last):
            try:
                record |= validate(model)
            except torch.OutOfMemoryError as error:
                leave(done, **{UNVALIDATED: record})
                less = "Give a lower --token_budget"
                raise out_of_memory(f"in the validation after step {done}", (folder / STATE).exists(), less) from error
            if record["validation_agreement"] > best:
                best = record["validation_agreement"]
                save(done, BEST)
        # before the checkpoint: lines of later steps are dropped on a resume, and one that is missing would stay so
        log.step(record, write=done % config.logging_steps == 0 or "validation_agreement" in record or last)
        if done % config.save_steps == 0 or last:
            save(done)

    model.train()
    if saved is not None and concluded < start:
        conclude(saved[UNVALIDATED])
        save(start)
    for step in range(start, steps):
        if stop_everywhere(accelerator, stop):
            if step > start:
                save(step)
            log.close()
            raise Interrupted
        factor = learning_rate_factor(step, steps, config.warmup_ratio, config.lr_scheduler_type)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * factor
        torch.manual_seed(dropout_seed(config.seed, step, accelerator.process_index))
        try:
            passes = [unpacked(batch) for batch in islice(batches, order.passes)]
        except DataError as error:
            leave(step)
            raise DataError(f"{error} Mend it and go on with --resume, or take its row out and start anew.") from error
        try:
            loss = accumulate_gradients(accelerator, model, objective, passes, step / steps)
            norm = gathered(accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm))
        except torch.OutOfMemoryError as error:
            leave(step)
            raise out_of_memory(f"in step {step + 1}", (folder / STATE).exists()) from error
        done = step + 1
        if not math.isfinite(loss):
            log.close()
            raise Diverged(f"The loss became {loss} at step {done}; start anew with a lower --learning_rate.")
        if not math.isfinite(norm):  # weights would become NaN, and the next checkpoint too
            log.close()
            raise Diverged(f"The gradient's norm became {norm} at step {done}; start anew with a lower --learning_rate.")
        try:
            for wrapper in wrapped:
                wrapper.step()
                wrapper.zero_grad(set_to_none=True)
        except torch.OutOfMemoryError as error:  # some weights are a step ahead of the others: only an earlier checkpoint is whole
            log.close()
            where = f"in step {done}, where the optimizer was at work"
            fewer = "fewer weights that train (--lora_r, --freeze_vision, --freeze_embeddings), or on more devices with fsdp2.yaml"
            raise out_of_memory(where, (folder / STATE).exists(), "Make room", fewer) from error
        seconds_so_far = time.monotonic() - clock
        conclude({"step": done, "loss": loss, "learning_rate": config.learning_rate * factor, "seconds": seconds_so_far})
    log.close()
    if accelerator.is_main_process:
        write_metrics(folder)


if __name__ == "__main__":
    with exit_on_errors():
        settings = parse_config()
        try:
            main(settings)
        except Interrupted:
            print("Stopped. The same command with --resume goes on from the last step.", file=sys.stderr)
            sys.exit(INTERRUPTED)
