"""The settings of a training; names are those of transformers and TRL where they have one."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import yaml
from trl import TrlParser

from tpips_reward import TPIPSError
from tpips_reward.arguments import explain_negations
from tpips_reward.fusion import FUSIONS

SCHEDULES = ("cosine", "linear", "constant")
OPTIMIZERS = ("adamw_torch", "muon")
TRACKERS = ("none", "tensorboard", "wandb", "trackio")
OBJECTIVES = ("votes", "scenes", "embeddings")
SCRATCH = "scratch"
#: For the help of commands that train.
OTHER_FLAGS = "All other flags are those of metric_training/train.py, --config among them."
#: torch's generators take 64 bits, and seeds are derived from this one by adding to it.
LARGEST_SEED = 2**62


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class TrainConfig:
    """Everything that a run depends on."""

    # model
    model_name_or_path: str = _setting(
        SCRATCH,
        "What training starts from: a metric (builtin:late, released:early, a folder, a Hub id), a plain Qwen3-VL "
        "backbone (a folder or Hub id), or 'scratch': the built-in size with random weights.",
    )
    fusion: str = _setting("late", f"{', '.join(FUSIONS)}.")
    num_probes: int = _setting(20, "Mid fusion: probe layers, evenly spaced.")
    probe_layers: list[int] | None = field(
        default=None, metadata={"help": "Mid fusion: the probe layers themselves, counted from 1, instead of num_probes."}
    )
    use_peft: bool = _setting(True, "LoRA on the language tower; else its decoder layers themselves are trained.")
    lora_r: int = _setting(16, "Rank.")
    lora_alpha: int = _setting(32, "Scale of the adapters, divided by the rank.")
    lora_dropout: float = _setting(0.05, "Dropout before the adapters.")
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Linear layers by name; those of the paper's fusion unless given."}
    )
    freeze_vision: bool = _setting(True, "Leave the vision tower as it is.")
    freeze_embeddings: bool = _setting(True, "Leave the token embeddings as they are.")
    # data
    dataset_name: str = _setting("sywang/tpips-odd-one-out", "What evaluate's --data takes: see docs/data.md.")
    dataset_train_split: str = _setting("train", "Of a set with several splits.")
    image_root: str | None = _setting(None, "Where relative image paths start.")
    strict: bool = _setting(False, "Stop at the first bad row; else bad rows are listed and left out.")
    eval_dataset_name: str | None = _setting(None, "For validation; the same set unless given.")
    dataset_eval_split: str = _setting("validation", "Of the set for validation.")
    eval_samples: int = _setting(500, "Comparisons in a validation at most.")
    train_samples: int = _setting(20000, "Comparisons that a procedural set has.")
    train_share: float = _setting(1.0, "Share of the training comparisons that is used (paper, table 7).")
    max_aspects: int = _setting(8, "A comparison with more aspects is several items; a procedural one leaves some out.")
    aspect_weights: dict[str, float] | None = field(
        default=None, metadata={"help": "Weights of single aspects in the loss, 1 for the others (in a config file)."}
    )
    dataloader_num_workers: int = _setting(0, "Processes that read and decode ahead.")
    # optimisation
    objective: str = _setting(
        "votes",
        "'votes'; or a start from scratch: 'scenes' (the vision tower alone learns procedural scenes' parameters, and which parts of "
        "the image the object covers) or "
        "'embeddings' (mid fusion's image tokens learn the embeddings of --teacher).",
    )
    teacher: str | None = _setting(None, "Late metric whose embeddings objective 'embeddings' teaches.")
    num_train_epochs: float = _setting(1.0, "Times that the data are gone through.")
    max_steps: int = _setting(-1, "Steps instead of epochs, where above 0.")
    per_device_train_batch_size: int = _setting(1, "Comparisons, with all their aspects, in one process and one forward pass.")
    gradient_accumulation_steps: int = _setting(1, "Forward and backward passes before each optimizer step.")
    optim: str = _setting(
        "adamw_torch", "'adamw_torch'; or 'muon': the towers' matrices by Muon (LoRA's, where there are such), all else by AdamW; tried from scratch only."
    )
    learning_rate: float = _setting(5e-5, "Peak.")
    head_learning_rate_factor: float = _setting(1.0, "For a fusion's own parameters, times learning_rate.")
    lr_scheduler_type: str = _setting("cosine", f"After the warm-up: {', '.join(SCHEDULES)}.")
    warmup_ratio: float = _setting(0.03, "Share of the steps.")
    weight_decay: float = _setting(0.01, "Decoupled from the gradient.")
    adam_beta2: float = _setting(0.999, "AdamW's.")
    max_grad_norm: float = _setting(1.0, "Gradient clipping.")
    temperature: float | None = _setting(None, "τ of the softmax over similarities; the fusion's own of the paper.")
    attribute_weight: float = _setting(0.0, "Late fusion on procedural scenes: weight of their parameters, fading to 0.")
    permute_images: bool = _setting(False, "Show the three images in a random order (triplet judge; paper, C.3).")
    bf16: bool = _setting(False, "Frozen weights in bfloat16; trained ones stay float32.")
    gradient_checkpointing: bool = _setting(False, "Recompute activations in the backward pass.")
    token_budget: int = _setting(32768, "Tokens of the language tower in one pass.")
    seed: int = _setting(0, "Of weights and data.")
    # run
    output_dir: str = _setting("runs/metric", "Checkpoints, logs, and the trained metric in best/ and last/.")
    name: str | None = _setting(None, "The trained metric's name in its card.")
    logging_steps: int = _setting(10, "Steps between lines of log.jsonl.")
    save_steps: int = _setting(100, "Steps between checkpoints.")
    eval_steps: int = _setting(250, "Steps between validations.")
    report_to: str = _setting("none", f"Tracker: {', '.join(TRACKERS)}.")
    resume: bool = _setting(False, "Go on from the checkpoint in output_dir.")
    overwrite: bool = _setting(False, "Start anew in a used output_dir.")


#: Settings that may differ between a run and its continuation.
RESUMABLE = frozenset(
    {
        "output_dir", "name", "resume", "overwrite", "save_steps", "eval_steps", "logging_steps", "report_to", "eval_samples",
        "dataloader_num_workers", "strict", "token_budget", "gradient_checkpointing",
    }
)  # fmt: skip


def parse_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """The settings from flags and ``--config file.yaml``, checked.

    Raises:
        TPIPSError: for a config file that cannot be read, an unknown setting or flag, or a value that cannot be used.
    """
    given, argv = _take_config(list(sys.argv[1:] if argv is None else argv))
    known = [item.name for item in fields(TrainConfig)]
    for name in given:
        if name not in known:
            raise TPIPSError(f"Unknown setting {name!r} in the config file.{_nearest(str(name), known)}")
    parser = _Parser(
        (TrainConfig,),
        allow_abbrev=False,
        description="Trains a fusion model on votes.",
        epilog="--config FILE reads settings from a YAML file with lines such as 'learning_rate: 1e-4'; flags win over it.",
    )
    parser.set_defaults_with_config(**given)
    explain_negations(parser)
    config, rest = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if rest:
        flag = rest[0].split("=")[0]
        raise TPIPSError(f"Unknown flag {flag}.{_nearest(flag.lstrip('-').replace('-', '_'), known, '--')}")
    check_config(config)
    return config


def read_yaml(path: str | Path, what: str) -> dict[str, Any]:
    """A YAML mapping.

    Args:
        what: the file is, for messages, such as "config file".

    Raises:
        TPIPSError: it cannot be read, is no YAML or no mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TPIPSError(f"The {what} {path} cannot be read ({error.strerror}); check its path.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TPIPSError(f"The {what} {path} is not YAML ({' '.join(str(error).split())[:300]}).") from error
    if not isinstance(content, dict) or not content:
        found = "nothing" if not content else f"a {type(content).__name__}"
        raise TPIPSError(f"The {what} {path} must have lines such as 'learning_rate: 0.0001'; it holds {found}.")
    return content


class _Parser(TrlParser):
    """TrlParser whose errors are one sentence instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise TPIPSError(f"{message[:1].upper()}{message[1:].rstrip('.')}; --help lists all settings.")


def _take_config(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings of --config's file, and the other arguments."""
    argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if "--config" not in argv:
        return {}, argv
    at = argv.index("--config")
    if at + 1 >= len(argv):
        raise TPIPSError("--config needs a file name after it.")
    return read_yaml(argv[at + 1], "config file"), argv[:at] + argv[at + 2 :]


def _nearest(name: str, known: list[str], dashes: str = "") -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {dashes}{near[0]}?" if near else " --help lists all settings."


def check_config(config: TrainConfig) -> None:
    """Refuses values with which a run could not work; whole numbers become floats where floats are meant.

    Raises:
        TPIPSError: naming the setting, its value and what it must be.
    """
    hints = get_type_hints(TrainConfig)
    for item in fields(config):
        _check_type(config, item.name, hints[item.name])
    at_least = {
        "seed": 0, "num_probes": 1, "lora_r": 1, "lora_alpha": 1, "train_samples": 1, "eval_samples": 1, "max_aspects": 1,
        "dataloader_num_workers": 0, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "weight_decay": 0,
        "attribute_weight": 0, "warmup_ratio": 0, "logging_steps": 1, "save_steps": 1, "eval_steps": 1, "token_budget": 1,
    }  # fmt: skip
    for name, low in at_least.items():
        if not low <= getattr(config, name) < math.inf:
            raise TPIPSError(f"{name} must be at least {low}, not {getattr(config, name)!r}.")
    above_zero = ["learning_rate", "head_learning_rate_factor", "max_grad_norm", "num_train_epochs", "train_share"]
    for name in above_zero + (["temperature"] if config.temperature is not None else []):
        if not 0 < getattr(config, name) < math.inf:
            raise TPIPSError(f"{name} must be a number above 0, not {getattr(config, name)!r}.")
    for name in ("warmup_ratio", "train_share"):
        if not 0 <= getattr(config, name) <= 1:
            raise TPIPSError(f"{name} must be from 0 to 1, not {getattr(config, name)!r}.")
    for name in ("lora_dropout", "adam_beta2"):  # with 1 nothing would be left of what adapters see, or of gradients
        if not 0 <= getattr(config, name) < 1:
            raise TPIPSError(f"{name} must be at least 0 and below 1, not {getattr(config, name)!r}.")
    if config.seed > LARGEST_SEED:
        raise TPIPSError(f"seed must be at most {LARGEST_SEED}, not {config.seed}.")
    for name, known in (
        ("fusion", tuple(FUSIONS)),
        ("objective", OBJECTIVES),
        ("optim", OPTIMIZERS),
        ("lr_scheduler_type", SCHEDULES),
        ("report_to", TRACKERS),
    ):
        if getattr(config, name) not in known:
            raise TPIPSError(f"{name} must be one of {', '.join(known)}, not {getattr(config, name)!r}.")
    if (config.objective == "embeddings") != (config.teacher is not None):
        raise TPIPSError(
            f"teacher and objective 'embeddings' belong together; got objective {config.objective!r} with teacher "
            f"{config.teacher!r}."
        )
    for name, needed in (("probe_layers", config.probe_layers is not None), ("teacher", config.teacher is not None)):
        if needed and config.fusion != "mid":
            raise TPIPSError(f"{name} is for mid fusion; fusion is {config.fusion!r}.")
    for name in ("temperature", "attribute_weight", "aspect_weights"):
        if config.objective != "votes" and getattr(config, name):
            raise TPIPSError(f"{name} is for objective 'votes'; objective is {config.objective!r}, which does not use it.")
    trains_whole = not (config.use_peft and config.freeze_vision and config.freeze_embeddings and config.objective == "votes")
    if config.bf16 and trains_whole:
        raise TPIPSError(
            "bf16 holds frozen weights in bfloat16 and trains float32 adapters beside them; it needs use_peft, freeze_vision, "
            "freeze_embeddings and objective votes."
        )
    if config.resume and config.overwrite:
        raise TPIPSError("--overwrite and --resume contradict each other; give one of them.")


def _check_type(config: TrainConfig, name: str, hint: Any) -> None:
    value, kinds = getattr(config, name), get_args(hint) or (hint,)
    if type(None) in kinds and value is None:
        return
    plain = [getattr(kind, "__origin__", kind) for kind in kinds if kind is not type(None)]
    if float in plain and type(value) is int:
        setattr(config, name, float(value))
    elif type(value) not in plain:
        raise TPIPSError(f"{name} must be of type {plain[0].__name__}, not {value!r}.")
    parts = list(value) if isinstance(value, list | dict) else []
    numbers = list(value.values()) if isinstance(value, dict) else []
    whole = list[int] in kinds
    wrong = [part for part in parts if type(part) is not (int if whole else str)]
    wrong += [part for part in numbers if type(part) not in (int, float) or not 0 <= part < math.inf]
    if wrong:
        what = "names with a number of at least 0 each" if numbers else f"a list of {'whole numbers' if whole else 'names'}"
        raise TPIPSError(f"{name} must be {what}; it holds {wrong[0]!r}.")
