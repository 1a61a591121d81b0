"""Builds what a run needs from its settings, and refuses what cannot work before anything is loaded for long."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, is_tensorboard_available, is_trackio_available, is_wandb_available
from transformers.integrations import unset_hf_deepspeed_config

from rl_recipes import logs, sharding, zero
from rl_recipes.config import Arguments, ConfigError, RewardArguments
from rl_recipes.editors import Editor, EditorError, load_editor
from rl_recipes.job import Job
from rl_recipes.prompts import JSONLPrompts, ProceduralPrompts, PromptSource, Row
from rl_recipes.rewards import Rewards, build_rewards, parse_entries
from rl_recipes.runs import RunFolder
from rl_recipes.seeds import ADAPTER, generator
from tpips_reward.errors import TPIPSError, reason

log = logging.getLogger(__name__)

#: Processes wait so long for one another. NCCL's ten minutes are less than a checkpoint of all weights may take, or a reward
#: that one of them waits for; the run would die there without the sentence that says why.
PATIENCE = timedelta(hours=3)


def build_accelerator(args: Arguments) -> Accelerator:
    """The accelerator that ``accelerate launch`` (or nothing) configured, and the number of CPU threads.

    Raises:
        ConfigError: for float16, a tracker that is not installed, or edits that do not divide among the processes.
    """
    g = args.run
    trackers = {
        "tensorboard": is_tensorboard_available, "wandb": is_wandb_available, "trackio": is_trackio_available
    }  # fmt: skip
    if g.report_to != "none" and not trackers[g.report_to]():
        raise ConfigError(f"--report_to {g.report_to} needs that package: pip install {g.report_to}")
    has_device = torch.accelerator.is_available()
    group = InitProcessGroupKwargs(timeout=PATIENCE)
    if not has_device and zero.asked():
        # Without a GPU accelerate finds no backend for DeepSpeed, and would take every process for the main one.
        group = InitProcessGroupKwargs(backend="gloo", timeout=PATIENCE)
    accelerator = Accelerator(
        # Without this, processes that torchrun starts on a machine without a GPU would not know of each other; with it,
        # accelerate would overlook DeepSpeed.
        cpu=not has_device and not zero.asked(),
        kwargs_handlers=[group],
        log_with=None if g.report_to == "none" else g.report_to,
        project_dir=os.path.join(g.output_dir, "logs"),
    )
    if accelerator.mixed_precision == "fp16":
        raise ConfigError("float16 overflows in log-probabilities; launch with --mixed_precision bf16 or no.")
    edits = g.prompts_per_iteration * g.num_generations
    if edits % accelerator.num_processes:
        raise ConfigError(
            f"An iteration has {edits} edits (prompts_per_iteration x num_generations), which do not divide among "
            f"{accelerator.num_processes} processes; change one of the two."
        )
    sharding.check(args, accelerator)
    zero.check(args, accelerator)
    if zero.is_zero(accelerator):
        # accelerate leaves mixed precision to DeepSpeed, which would cast the adapter; these recipes use autocast.
        accelerator.native_amp = accelerator.mixed_precision == "bf16"
        # Under ZeRO-3 transformers would share out whatever it loads, the metric too; the transformer is shared out later.
        unset_hf_deepspeed_config()
    if not accelerator.is_main_process:
        logs.quieten()
    set_threads(accelerator, g.threads)
    return accelerator


def set_threads(accelerator: Accelerator, threads: int) -> None:
    """On a CPU, the threads of this process; 0: the cores, shared by the machine's processes."""
    if accelerator.device.type == "cpu":
        # accelerate launch leaves one thread where nothing else is configured.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(threads or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def start_trackers(args: Arguments, accelerator: Accelerator) -> None:
    """Opens the tracker that ``--report_to`` names.

    Raises:
        ConfigError: it does not start, mostly for want of a login.
    """
    if args.run.report_to != "none":
        config = {k: v if v is not None else "" for k, v in args.to_dict().items()}
        try:
            accelerator.init_trackers(args.algorithm.recipe, config=config)
        except Exception as error:  # each tracker has errors of its own
            accelerator.trackers = []  # ends without what has not begun
            raise ConfigError(
                f"--report_to {args.run.report_to} does not start ({type(error).__name__}: {reason(error)}); log in to it, or "
                "leave --report_to out."
            ) from error


def end_trackers(accelerator: Accelerator) -> None:
    """Closes the tracker, whose failure must cost neither a finished run nor the error that ended one, and leaves the process group."""
    try:
        accelerator.end_training()
    except Exception as error:  # noqa: BLE001  each tracker has errors of its own
        log.warning("The tracker did not end as it should: %s", reason(error))
        accelerator.trackers = []
        accelerator.end_training()


def find_folder(args: Arguments, accelerator: Accelerator) -> RunFolder:
    """The output folder, once the main process has seen that this run may use it; nothing in it is changed yet."""
    folder = RunFolder(args.run.output_dir, owner=accelerator.is_main_process)
    check_folder(folder, args, accelerator)
    return folder


def check_folder(folder: RunFolder, args: Arguments, accelerator: Accelerator) -> None:
    """Refuses a folder that this run may not use; asked again once it is locked, for another run may have come in between."""
    if accelerator.is_main_process:
        folder.check(overwrite=args.run.overwrite, resume=args.run.resume)


def claim_folder(folder: RunFolder, args: Arguments, accelerator: Accelerator) -> None:
    """Takes the folder for this run: --overwrite acts now, when everything else has been found to work."""
    if accelerator.is_main_process:
        if args.run.overwrite:
            folder.clear()
        folder.save_config(args.to_dict())
    accelerator.wait_for_everyone()


def build_reward(args: Arguments, device: torch.device) -> Rewards:
    """What is optimised, with its metrics on their devices."""
    return build_rewards(args.reward.reward, args.reward, device)


def build_judge(args: Arguments, device: torch.device) -> Rewards | None:
    """What is measured beside the reward and never optimised, or None."""
    if args.reward.judge is None:
        return None
    return build_rewards(args.reward.judge, args.reward, device)


def check_judge(judge: Rewards | None, reward: Rewards, settings: RewardArguments) -> None:
    """Refuses a judge that is optimised.

    Args:
        settings: that hold where a part's own options say nothing.

    Raises:
        ConfigError: naming the part that both have.
    """
    optimised = [_measured(name, settings) for name in reward.weights]
    both = [name for name in judge.weights if _measured(name, settings) in optimised] if judge is not None else []
    if both:
        raise ConfigError(
            f"--judge {both[0]!r} is a part of the reward, and a judge that is optimised cannot tell when the reward is "
            "fooled; give another metric, or a function of yours."
        )


#: Options of a part that say where and how it is computed, not what.
_HOW = ("device", "dtype", "timeout", "patience")


def _measured(name: str, settings: RewardArguments) -> tuple[str, dict[str, str]]:
    """What a part of a reward measures: its name, and the options that are not those that hold anyway."""
    if not name.endswith("]"):
        return name, {}
    plain, _, text = name.removesuffix("]").rpartition("[")
    options = dict(option.split("=", 1) for option in text.split(",") if "=" in option)
    given = {"metric": settings.metric, "gate": settings.gate}
    return plain, {k: v for k, v in options.items() if k not in _HOW and v != given.get(k)}


def build_editor(args: Arguments, accelerator: Accelerator) -> tuple[Editor, torch.optim.AdamW | zero.ZeroOptimizer]:
    """The editor with a fresh adapter or with all weights to be trained, and the optimizer of them.

    With FSDP2 its weights are shared among the processes, with DeepSpeed what its stage says.

    Raises:
        ConfigError: options that this editor does not have.
        EditorError: for what `load_editor` refuses.
    """
    e, g = args.editor, args.run
    dtype = None if e.editor_dtype == "auto" else e.editor_dtype
    options = {} if e.true_cfg_scale is None else {"true_cfg_scale": e.true_cfg_scale}
    try:
        editor = load_editor(
            e.editor,
            device=accelerator.device,
            dtype="float32" if e.train == "full" else dtype,
            resolution=e.resolution,
            revision=e.revision,
            attention_backend=e.attention_backend,
            offload_text_encoders=e.offload_text_encoders,
            **options,
        )
    except TypeError as error:
        if not options:
            raise
        raise ConfigError(f"The editor {e.editor!r} has no true_cfg_scale; leave --true_cfg_scale out.") from error
    if e.gradient_checkpointing:
        editor.transformer.enable_gradient_checkpointing()
    sharded = sharding.is_sharded(accelerator)
    if e.train == "full":
        if sharded:
            sharding.shard(editor.transformer, accelerator)  # before its weights are copied for the reference
        parameters = editor.train_all()
    else:
        parameters = editor.add_lora(e.lora_rank, e.lora_alpha, generator=generator(g.seed, ADAPTER))
        if sharded:
            sharding.shard(editor.transformer, accelerator)
    optimizer = torch.optim.AdamW(
        parameters, lr=g.learning_rate, betas=(g.adam_beta1, g.adam_beta2), weight_decay=g.weight_decay
    )
    if sharded and e.train == "full":
        sharding.keep_whole_state(optimizer)
    if zero.is_zero(accelerator):
        return editor, zero.ZeroOptimizer(editor, optimizer, accelerator, g.max_grad_norm)
    return editor, optimizer


def build_prompts(
    args: Arguments, editor: Editor, reward: Rewards, judge: Rewards | None = None
) -> tuple[PromptSource, PromptSource, int]:
    """Prompts to train on, prompts to evaluate on, and how many of the latter there are.

    A user's own edits serve both, their rows in order for the evaluation, unless --eval_data brings others. A row of
    --eval_data that is a row of --data too is a bad row.
    """
    g, size = args.run, editor.resolution

    def check(row: Row) -> None:
        """What editor, reward and judge would refuse later, when nothing could be skipped any more."""
        if len(row.images) > 1 and not editor.takes_several:
            raise EditorError(f"it has {len(row.images)} images, but this editor takes one condition image.")
        for width, height in row.sizes:  # each of several condition images is brought to a size of its own
            editor.output_size(torch.empty((3, height, width), device="meta"))
        editor.check_instruction(row.instruction)
        reward.check_aspects(row.preserve, row.target)
        try:
            if judge is not None:
                judge.check_aspects(row.preserve, row.target)
        except TPIPSError as error:
            raise ConfigError(f"--judge cannot answer for it: {error}") from error

    train: PromptSource = ProceduralPrompts(g.seed, "train", size, count=g.train_prompts)
    held_out: PromptSource = ProceduralPrompts(g.eval_seed, "test", size)
    if g.data is not None:
        if g.stop_on_hack and judge is None:
            log.warning(
                "--stop_on_hack has no --judge: of photographs no truth is known, and training ends at copies, images that are none "
                "and lost edges alone"
            )
        train = rows = JSONLPrompts(g.data, g.on_bad_row, g.seed, check)
        held_out = rows.in_file_order()
        aimless = sum(not row.target for row in rows.rows)
        if aimless:
            log.warning(
                "%d of %d rows name no target aspects: there, leaving the photograph as it is scores best",
                aimless,
                len(rows),
            )
    if g.eval_data is not None:
        trained = {_asks(row): row.line for row in train.rows} if isinstance(train, JSONLPrompts) else {}

        def check_other(row: Row) -> None:
            """The same, and that it is not trained on."""
            if _asks(row) in trained:
                raise ConfigError(f"it is line {trained[_asks(row)]} of --data too, which is trained on.")
            check(row)

        held_out = JSONLPrompts(g.eval_data, g.on_bad_row, None, check_other)
    count = g.eval_samples if held_out.period is None else min(g.eval_samples, held_out.period)
    return train, held_out, count


def _asks(row: Row) -> tuple[object, ...]:
    """What tells one edit from another: the photographs, wherever they are named from, and the instruction."""
    return *(path.resolve() for path in row.images), row.instruction


def _metric(args: Arguments) -> str | None:
    """--metric, where a TPIPS reward uses it; others bring their own, or have none."""
    tpips = [dict(entry.options) for entry in parse_entries(args.reward.reward) if entry.family == "tpips"]
    return args.reward.metric if any("metric" not in options for options in tpips) else None


def describe(job: Job) -> dict[str, Any]:
    """What ran, for ``summary.json``."""
    args, accelerator = job.args, job.accelerator
    gates = [reward.gate for reward in job.reward.tpips()]
    return {
        "recipe": args.algorithm.recipe,
        "editor": args.editor.editor,
        "pipeline": job.editor.pipeline_class,
        "metric": _metric(args),
        "reward": job.reward.text,
        "judge": args.reward.judge,
        "gate": gates[0].kind if gates else None,
        "gate_threshold": gates[0].threshold if gates else None,
        "seed": args.run.seed,
        "eval_seed": args.run.eval_seed,
        "trained_parameters": zero.num_elements(job.editor.lora_parameters()),
        "processes": accelerator.num_processes,
        "device": str(accelerator.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
