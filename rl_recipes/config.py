"""The settings of a run: three dataclasses, read from flags, from ``--config file.yaml``, or both (flags win)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml
from trl import TrlParser

from rl_recipes.editors.registry import DEFAULTS_FILE, preset_for
from tpips_reward.errors import TPIPSError

PRESETS = Path(__file__).parent / "configs"
#: Minutes that the built-in job may take when nothing else is said: it must end within ten on two cores.
BUILTIN_MINUTES = 9.5
#: Settings that may differ between a run and its continuation; any other would make it another run.
RESUMABLE = frozenset(
    {
        "output_dir", "resume", "overwrite", "preset", "max_steps", "max_minutes", "save_steps",
        "save_total_limit", "report_to", "threads", "sample_grids", "on_bad_row",
    }
)  # fmt: skip


class ConfigError(TPIPSError):
    """A flag or a setting that cannot be used; the message names it and says what to do."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class EditorArguments:
    """The image editor that is trained, and its adapter."""

    editor: str = _setting("builtin", "'builtin', a Hub id such as Qwen/Qwen-Image-Edit-2511, or a pipeline folder.")
    preset: str = _setting(
        "auto", "Defaults for the editor, a file in rl_recipes/configs; 'auto' goes by the editor, 'none' uses none."
    )
    resolution: int | None = _setting(
        None,
        "Edits have about resolution x resolution pixels, in the source's aspect ratio; left out: the editor's own.",
    )
    editor_dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "Type of the frozen weights; 'auto' is float32 on a CPU and bfloat16 elsewhere."
    )
    guidance_scale: float = _setting(1.0, "Classifier-free guidance in rollout, replay and evaluation; 1 turns it off.")
    revision: str | None = _setting(None, "Branch, tag or commit of the editor on the Hub.")
    gradient_checkpointing: bool = _setting(
        False, "Recompute the transformer's activations in the backward pass: less memory, about a third more time."
    )
    lora_rank: int = _setting(16, "Rank of the LoRA.")
    lora_alpha: int = _setting(32, "Scale of the LoRA (alpha / rank).")


@dataclass
class RewardArguments:
    """What is optimised."""

    reward: str = _setting("tpips:preserve", "One reward, or several: 'tpips:preserve=0.7,tpips:target=0.3'.")
    metric: str = _setting("builtin:late", "The TPIPS metric: 'builtin:late', 'released:late', a Hub id or a folder.")
    metric_revision: str | None = _setting(None, "Branch, tag or commit of the metric on the Hub.")
    gate: Literal["change", "none"] = _setting(
        "change", "'change' makes tpips:preserve depend on the change in the target aspects; 'none' is the plain mean."
    )
    gate_threshold: float | None = _setting(None, "Change that opens the gate fully; left out: the metric's own scale.")
    gate_weight: float = _setting(1.0, "What a closed gate costs.")
    reward_dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "Type of the metric's weights; 'auto' is float32 on a CPU and bfloat16 elsewhere."
    )


@dataclass
class GRPOArguments:
    """Prompts, rollouts, the update, and what the run leaves behind."""

    data: str | None = _setting(None, "A JSONL file of your own edits; left out: procedural edits.")
    on_bad_row: Literal["skip", "error"] = _setting(
        "skip", "Bad rows of --data are named and skipped, or stop the run."
    )

    prompts_per_iteration: int = _setting(12, "(source, instruction) pairs an iteration, over all processes.")
    num_generations: int = _setting(8, "Edits of each pair: the group.")
    samples_per_batch: int = _setting(0, "Edits in one pass through the editor; 0: all where sizes are equal.")
    num_inference_steps: int = _setting(6, "Denoising steps of a rollout.")
    eval_inference_steps: int = _setting(8, "Denoising steps in the evaluation; 0: as many as in a rollout.")
    sde_window: int = _setting(2, "The first so many steps are stochastic; the rest follow the ODE.")
    train_steps: int = _setting(2, "So many of the stochastic steps, drawn anew each iteration, are trained on.")
    eta: float = _setting(0.7, "Noise level of the stochastic steps.")
    sde_kind: Literal["flow_sde", "dance", "cps"] = _setting("flow_sde", "Rule of the stochastic steps.")

    learning_rate: float = _setting(1.2e-3, "Learning rate of AdamW.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = _setting("constant", "Decay over max_steps.")
    weight_decay: float = _setting(0.0, "Weight decay of AdamW.")
    adam_beta1: float = _setting(0.9, "First momentum of AdamW.")
    adam_beta2: float = _setting(0.999, "Second momentum of AdamW.")
    max_grad_norm: float = _setting(1.0, "Gradients are clipped to this norm.")
    num_iterations: int = _setting(1, "Passes over each rollout.")
    update_each_step: bool = _setting(False, "An optimizer step after each trained denoising step, not one for all.")
    epsilon: float = _setting(1e-4, "PPO clip of the likelihood ratio.")
    adv_clip: float = _setting(5.0, "Advantages are clipped to this size.")
    advantage_std: Literal["group", "batch"] = _setting(
        "group", "Advantages are divided by the standard deviation of the group, or of the whole batch."
    )
    beta: float = _setting(
        0.3, "Weight of the KL to the editor without its adapter; it damps what the noise of few samples does."
    )

    max_steps: int = _setting(80, "Iterations.")
    max_minutes: float | None = _setting(
        None,
        "Stop in time for the whole run, evaluation included, to end within so many minutes; 0: no limit; "
        f"left out: {BUILTIN_MINUTES} for the built-in job, no limit otherwise.",
    )
    seed: int = _setting(0, "Seed of prompts, noise and the adapter's initial weights.")
    threads: int = _setting(0, "CPU threads of a process; 0: all cores shared by the processes.")

    eval_samples: int = _setting(256, "Held-out edits for the evaluation before and after; 0: no evaluation.")
    eval_seed: int = _setting(20_000, "Seed of the held-out edits and of their noise, the same for all runs.")
    sample_grids: int = _setting(24, "So many of them are drawn source | before | after.")

    output_dir: str = _setting("runs/grpo_edit", "Where everything goes.")
    overwrite: bool = _setting(False, "Replace the run that is in output_dir.")
    resume: bool = _setting(False, "Continue the run in output_dir with its own settings.")
    save_steps: int = _setting(10, "Iterations between checkpoints.")
    save_total_limit: int = _setting(2, "So many checkpoints are kept.")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = _setting("none", "A tracker, through accelerate.")


@dataclass
class Arguments:
    """All settings of a run."""

    editor: EditorArguments
    reward: RewardArguments
    grpo: GRPOArguments

    def to_dict(self) -> dict[str, Any]:
        """All settings in one flat dict, as ``--config`` reads them."""
        return {**asdict(self.editor), **asdict(self.reward), **asdict(self.grpo)}

    def time_limit(self) -> float:
        """Seconds that the whole run may take; infinite when there is no limit."""
        minutes = self.grpo.max_minutes
        if minutes is None:
            minutes = BUILTIN_MINUTES if self.editor.editor == "builtin" and self.grpo.data is None else 0.0
        return minutes * 60.0 if minutes > 0 else float("inf")


class _Parser(TrlParser):
    """TrlParser whose errors are one sentence instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. --help lists all flags.")


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Reads the settings: dataclass defaults, then the editor's preset, then ``--config``, then flags.

    With ``--resume`` the settings of the run in ``output_dir`` take the preset's place.

    Raises:
        ConfigError: for an unknown flag or setting, a value of the wrong type, or one out of range.
    """
    argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    parser = _Parser((EditorArguments, RewardArguments, GRPOArguments), allow_abbrev=False)
    config, argv = _take_config(list(argv))
    # The preset depends on the editor, which may come from either place, so both are read once before it.
    first = _parse(parser, config, argv)
    _check_types(first)
    _check_names(first)
    base = _saved_settings(first.grpo.output_dir) if first.grpo.resume else _preset(first.editor)
    parser = _Parser((EditorArguments, RewardArguments, GRPOArguments), allow_abbrev=False)
    args = _parse(parser, {**base, **config}, argv)
    _check_types(args)
    _check_ranges(args)
    if args.grpo.resume:
        _check_resumable(base, args)
    return args


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML mapping of settings.

    Raises:
        ConfigError: when the file is missing, is not YAML, or is not a mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read ({error.strerror}); check --config.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"The config file {path} is not YAML: {' '.join(str(error).split())[:300]}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"The config file {path} must hold 'setting: value' lines, not {type(content).__name__}.")
    return content


def _take_config(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    if "--config" not in argv:
        return {}, argv
    at = argv.index("--config")
    if at + 1 >= len(argv):
        raise ConfigError("--config needs a file name after it.")
    return load_yaml(argv[at + 1]), argv[:at] + argv[at + 2 :]


def _parse(parser: _Parser, settings: dict[str, Any], argv: list[str]) -> Arguments:
    known = [f.name for cls in (EditorArguments, RewardArguments, GRPOArguments) for f in fields(cls)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"Unknown setting {name!r} in the config file.{_nearest(str(name), known)}")
    parser.set_defaults_with_config(**settings)
    *parsed, rest = parser.parse_args_into_dataclasses(args=argv, return_remaining_strings=True)
    if rest:
        name = rest[0].split("=")[0]
        raise ConfigError(f"Unknown flag {name}.{_nearest(name.lstrip('-').replace('-', '_'), known, '--')}")
    return Arguments(*parsed)


def _nearest(name: str, known: list[str], dashes: str = "") -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {dashes}{near[0]}?" if near else " --help lists all flags."


def _preset(editor: EditorArguments) -> dict[str, Any]:
    name = editor.preset
    if name == "auto":
        # A folder that brings defaults of its own is a small editor, to which a preset for GPUs does not apply.
        own = editor.editor == "builtin" or os.path.isfile(os.path.join(editor.editor, DEFAULTS_FILE))
        name = "none" if own else preset_for(editor.editor)
    if name == "none":
        return {}
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in PRESETS.glob("*.yaml")))
        raise ConfigError(f"There is no preset {name!r}; there are {there}, 'auto' and 'none'.")
    return load_yaml(path)


def _saved_settings(output_dir: str) -> dict[str, Any]:
    path = Path(output_dir) / "config.yaml"
    if not os.path.isfile(path):
        raise ConfigError(f"Nothing to resume: {output_dir} holds no run. Check --output_dir, or leave out --resume.")
    return load_yaml(path)


def _check_resumable(saved: dict[str, Any], args: Arguments) -> None:
    for name, value in args.to_dict().items():
        if name not in RESUMABLE and name in saved and saved[name] != value:
            raise ConfigError(
                f"--resume continues a run with {name} = {saved[name]!r}, but {value!r} was given; "
                f"leave the flag out, or start anew in another --output_dir."
            )


def _check_types(args: Arguments) -> None:
    for part in (args.editor, args.reward, args.grpo):
        hints = get_type_hints(type(part))
        for item in fields(part):
            value, hint = getattr(part, item.name), hints[item.name]
            if get_origin(hint) is Literal:
                if value not in get_args(hint):
                    choices = ", ".join(map(repr, get_args(hint)))
                    raise ConfigError(f"{item.name} must be one of {choices}, not {value!r}.")
                continue
            allowed = get_args(hint) or (hint,)
            if float in allowed and type(value) is int:
                value = float(value)
                setattr(part, item.name, value)
            if type(value) not in allowed:
                names = " or ".join(t.__name__ for t in allowed if t is not type(None))
                raise ConfigError(f"{item.name} must be of type {names}, not {value!r}.")


def _check_names(args: Arguments) -> None:
    values = args.to_dict()
    for name in ("editor", "metric", "reward", "output_dir"):
        if not values[name].strip():
            raise ConfigError(f"{name} is empty; --help shows its default.")
        if "\0" in values[name]:
            raise ConfigError(f"{name} holds a NUL character, which no name may: {values[name]!r}.")


def _check_ranges(args: Arguments) -> None:
    g = args.grpo
    lowest: dict[str, float] = {
        "resolution": 16, "lora_rank": 1, "lora_alpha": 1, "guidance_scale": 0, "prompts_per_iteration": 1,
        "num_generations": 2, "samples_per_batch": 0, "num_inference_steps": 1, "eval_inference_steps": 0, "sde_window": 1,
        "train_steps": 1, "learning_rate": 0, "weight_decay": 0, "num_iterations": 1, "beta": 0,
        "max_steps": 0, "max_minutes": 0, "threads": 0, "seed": 0, "eval_seed": 0, "eval_samples": 0,
        "sample_grids": 0, "save_steps": 1, "save_total_limit": 1,
    }  # fmt: skip
    # Beyond these a slip of the finger would fill the memory, or the machine, before anything could be said.
    highest: dict[str, float] = {"resolution": 8192, "lora_rank": 4096, "threads": 1024}
    values = args.to_dict()
    for name, low in lowest.items():
        high = highest.get(name, float("inf"))
        if values[name] is not None and not (low <= values[name] <= high and values[name] < float("inf")):
            bounds = f"between {low:g} and {high:g}" if name in highest else f"a number of at least {low:g}"
            raise ConfigError(f"{name} must be {bounds}, not {values[name]!r}.")
    for name in ("eta", "epsilon", "adv_clip", "max_grad_norm", "gate_weight"):
        if not 0 < values[name] < float("inf"):
            raise ConfigError(f"{name} must be a number above 0, not {values[name]!r}.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= values[name] < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, not {values[name]!r}.")
    if g.sde_window > g.num_inference_steps:
        raise ConfigError(
            f"sde_window is {g.sde_window}, but there are only {g.num_inference_steps} steps (num_inference_steps)."
        )
    if g.sde_kind == "cps" and (g.eta > 1 or g.sde_window == g.num_inference_steps):
        raise ConfigError(
            f"With sde_kind 'cps', eta must be at most 1 (it is {g.eta:g}) and sde_window below num_inference_steps "
            f"(it is {g.sde_window} of {g.num_inference_steps}): the rule adds no noise in a last step."
        )
    if g.train_steps > g.sde_window:
        raise ConfigError(f"train_steps is {g.train_steps}, but only {g.sde_window} steps are stochastic (sde_window).")
    if g.overwrite and g.resume:
        raise ConfigError("--overwrite and --resume contradict each other; give one of them.")
    if g.data is not None and not os.path.isfile(g.data):
        raise ConfigError(f"--data {g.data} is no file; give a JSONL file with one edit a line.")
