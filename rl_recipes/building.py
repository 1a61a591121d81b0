"""Builds what a run needs from its settings, and refuses what cannot work before anything is loaded for long."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_tensorboard_available, is_trackio_available, is_wandb_available

from rl_recipes.config import Arguments, ConfigError
from rl_recipes.editors import Editor, load_editor
from rl_recipes.prompts import JSONLPrompts, ProceduralPrompts, PromptSource, Row
from rl_recipes.runs import RunFolder
from rl_recipes.seeds import ADAPTER, generator
from tpips_reward import load_metric
from tpips_reward.rewards import TPIPSReward, parse_reward

log = logging.getLogger(__name__)


def build_accelerator(args: Arguments) -> Accelerator:
    """The accelerator that ``accelerate launch`` (or nothing) configured, and the number of CPU threads.

    Raises:
        ConfigError: for float16, a tracker that is not installed, or groups that do not divide among the processes.
    """
    g = args.grpo
    trackers = {
        "tensorboard": is_tensorboard_available, "wandb": is_wandb_available, "trackio": is_trackio_available
    }  # fmt: skip
    if g.report_to != "none" and not trackers[g.report_to]():
        raise ConfigError(f"--report_to {g.report_to} needs that package: pip install {g.report_to}")
    accelerator = Accelerator(
        # Without this, processes that torchrun starts on a machine without a GPU would not know of each other.
        cpu=not torch.accelerator.is_available(),
        log_with=None if g.report_to == "none" else g.report_to,
        project_dir=os.path.join(g.output_dir, "logs"),
    )
    if accelerator.mixed_precision == "fp16":
        raise ConfigError("float16 overflows in log-probabilities; launch with --mixed_precision bf16 or no.")
    if g.prompts_per_iteration % accelerator.num_processes:
        raise ConfigError(
            f"prompts_per_iteration is {g.prompts_per_iteration}, which does not divide among "
            f"{accelerator.num_processes} processes; give a multiple of {accelerator.num_processes}."
        )
    if not accelerator.is_main_process:
        logging.getLogger("rl_recipes").setLevel(logging.ERROR)
    if accelerator.device.type == "cpu":
        # accelerate launch leaves one thread where nothing else is configured.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(g.threads or max(1, cores // local))
    return accelerator


def start_trackers(args: Arguments, accelerator: Accelerator) -> None:
    """Opens the tracker that ``--report_to`` names."""
    if args.grpo.report_to != "none":
        config = {k: v if v is not None else "" for k, v in args.to_dict().items()}
        accelerator.init_trackers("grpo_edit", config=config)


def check_folder(args: Arguments, accelerator: Accelerator) -> RunFolder:
    """The output folder, once the main process has seen that this run may use it; nothing in it is changed yet."""
    folder = RunFolder(args.grpo.output_dir, owner=accelerator.is_main_process)
    if accelerator.is_main_process:
        folder.check(overwrite=args.grpo.overwrite, resume=args.grpo.resume)
    return folder


def claim_folder(folder: RunFolder, args: Arguments, accelerator: Accelerator) -> None:
    """Takes the folder for this run: --overwrite acts now, when everything else has been found to work."""
    if accelerator.is_main_process:
        folder.check(overwrite=args.grpo.overwrite, resume=args.grpo.resume)  # another run may have come in between
        if args.grpo.overwrite:
            folder.clear()
        folder.save_config(args.to_dict())
    accelerator.wait_for_everyone()


def build_reward(args: Arguments, device: torch.device) -> TPIPSReward:
    """The reward with its metric on the device."""
    r = args.reward
    parse_reward(r.reward)
    dtype = None if r.reward_dtype == "auto" else r.reward_dtype
    return TPIPSReward(
        r.reward,
        metric=load_metric(r.metric, device=device, dtype=dtype, revision=r.metric_revision),
        gate=r.gate,
        gate_threshold=r.gate_threshold,
        gate_weight=r.gate_weight,
    )


def build_editor(args: Arguments, device: torch.device) -> tuple[Editor, torch.optim.AdamW]:
    """The editor with a fresh adapter, and the optimizer of the adapter."""
    e, g = args.editor, args.grpo
    editor = load_editor(
        e.editor,
        device=device,
        dtype=None if e.editor_dtype == "auto" else e.editor_dtype,
        resolution=e.resolution,
        revision=e.revision,
    )
    if e.gradient_checkpointing:
        editor.transformer.enable_gradient_checkpointing()
    parameters = editor.add_lora(e.lora_rank, e.lora_alpha, generator=generator(g.seed, ADAPTER))
    optimizer = torch.optim.AdamW(
        parameters, lr=g.learning_rate, betas=(g.adam_beta1, g.adam_beta2), weight_decay=g.weight_decay
    )
    return editor, optimizer


def build_prompts(args: Arguments, editor: Editor, reward: TPIPSReward) -> tuple[PromptSource, PromptSource, int]:
    """Prompts to train on, prompts to evaluate on, and how many of the latter there are.

    A user's own edits serve both: their rows in order for the evaluation.
    """
    g = args.grpo
    if g.data is None:
        size = editor.resolution
        return ProceduralPrompts(g.seed, "train", size), ProceduralPrompts(g.eval_seed, "test", size), g.eval_samples

    def check(row: Row) -> None:
        """What editor and reward would refuse later, when nothing could be skipped any more."""
        editor.output_size(torch.empty((3, row.size[1], row.size[0]), device="meta"))
        editor.check_instruction(row.instruction)
        reward.check_aspects(row.preserve, row.target)

    train = JSONLPrompts(g.data, g.on_bad_row, g.seed, check)
    aimless = sum(not row.target for row in train.rows)
    if aimless:
        log.warning(
            "%d of %d rows name no target aspects: there, leaving the photograph as it is scores best",
            aimless,
            len(train),
        )
    return train, train.in_file_order(), min(g.eval_samples, len(train))


def describe(args: Arguments, editor: Editor, reward: TPIPSReward, accelerator: Accelerator) -> dict[str, Any]:
    """What ran, for ``summary.json``."""
    return {
        "editor": args.editor.editor,
        "pipeline": editor.pipeline_class,
        "metric": args.reward.metric,
        "reward": str(reward.spec),
        "gate": reward.gate.kind,
        "gate_threshold": reward.gate.threshold,
        "seed": args.grpo.seed,
        "eval_seed": args.grpo.eval_seed,
        "trained_parameters": sum(p.numel() for p in editor.lora_parameters()),
        "processes": accelerator.num_processes,
        "device": str(accelerator.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
