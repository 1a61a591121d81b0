"""Trains a fusion model on votes, from any data, from scratch or from any checkpoint (paper, §4 and C.3).

    accelerate launch metric_training/train.py --config metric_training/configs/late.yaml

All aspects of a comparison go through in one pass, which does the work on its images once. What a step sees depends on
the settings and its number only, so a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import math
import sys
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
from metric_training.training.model import build_fusion
from metric_training.training.objectives import Objective, build_objective
from metric_training.training.output import write_metrics
from metric_training.training.progress import Progress, out_of_memory
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
    DIVERGED,
    STATE,
    Diverged,
    check_same_origin,
    clear_folder,
    frozen_digest,
    open_folder,
    restore,
)
from metric_training.training.validation import build_validation
from tpips_reward.errors import INTERRUPTED, exit_on_errors
from tpips_reward.files import write_text
from tpips_reward.stopping import Interrupted, StopSignal


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
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    if saved is not None:
        check_same_origin(saved, origin, config, folder / STATE)
        restore(model, optimizers, saved, folder / STATE)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]  # restored ones are other objects
    if accelerator.is_main_process:
        clear_folder(folder, anew=saved is None)
        write_text(folder / "config.yaml", yaml.safe_dump(asdict(config), sort_keys=False))
    open_tracker(accelerator, config)
    progress = Progress(config, accelerator, model, optimizers, validate, origin, steps, saved)
    done_before = f", of which {progress.start} are done" if progress.start else ""
    accelerator.print(f"{order.items} items to train on, {order.per_step} in each of {steps} steps{done_before}.")
    batches = iter(build_loader(config, objective.examples, order, progress.start, steps, accelerator.process_index))

    model.train()
    progress.catch_up()
    for step in range(progress.start, steps):
        if stop_everywhere(accelerator, stop):
            if step > progress.start:
                progress.save(step)
            progress.close()
            raise Interrupted
        factor = learning_rate_factor(step, steps, config.warmup_ratio, config.lr_scheduler_type)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * factor
        torch.manual_seed(dropout_seed(config.seed, step, accelerator.process_index))
        try:
            passes = [unpacked(batch) for batch in islice(batches, order.passes)]
        except DataError as error:
            progress.leave(step)
            raise DataError(f"{error} Mend it and go on with --resume, or take its row out and start anew.") from error
        try:
            loss = accumulate_gradients(accelerator, model, objective, passes, step / steps)
            norm = gathered(accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm))
        except torch.OutOfMemoryError as error:
            progress.leave(step)
            raise out_of_memory(f"in step {step + 1}", progress.resumable) from error
        done = step + 1
        if not math.isfinite(loss):
            progress.close()
            raise Diverged(f"The loss became {loss} at step {done}; start anew with a lower --learning_rate.")
        if not math.isfinite(norm):  # weights would become NaN, and the next checkpoint too
            progress.close()
            raise Diverged(f"The gradient's norm became {norm} at step {done}; start anew with a lower --learning_rate.")
        try:
            for wrapper in wrapped:
                wrapper.step()
                wrapper.zero_grad(set_to_none=True)
        except torch.OutOfMemoryError as error:  # some weights are a step ahead of the others: only an earlier checkpoint is whole
            progress.close()
            where = f"in step {done}, where the optimizer was at work"
            fewer = "fewer weights that train (--lora_r, --freeze_vision, --freeze_embeddings), or on more devices with fsdp2.yaml"
            raise out_of_memory(where, progress.resumable, "Make room", fewer) from error
        progress.stepped(done, loss, config.learning_rate * factor)
    progress.close()
    if accelerator.is_main_process:
        print("Written: " + ", ".join(f'load_metric("{path}")' for path in write_metrics(folder)))


if __name__ == "__main__":
    with exit_on_errors():
        settings = parse_config()
        try:
            main(settings)
        except Interrupted:
            print("Stopped. The same command with --resume goes on from the last step.", file=sys.stderr)
            sys.exit(INTERRUPTED)
