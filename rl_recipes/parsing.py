"""Settings from flags and YAML: dataclass defaults, the recipe's, the editor's preset, ``--config``, flags; the last wins."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml
from trl import TrlParser

from rl_recipes.config import (
    ALGORITHMS,
    RESUMABLE,
    Algorithm,
    Arguments,
    ConfigError,
    EditorArguments,
    GRPOArguments,
    RewardArguments,
    RunArguments,
)
from rl_recipes.editors.registry import BUILTIN, DEFAULTS_FILE, preset_for
from tpips_reward.arguments import explain_negations

PRESETS = Path(__file__).parent / "configs"


class _Parser(TrlParser):
    """TrlParser whose errors are one sentence instead of a page of usage, and name the file that a value came from."""

    #: The file of each setting whose value is not a flag's.
    files: dict[str, str]

    def error(self, message: str) -> NoReturn:
        bad = re.match(r"argument --(\w+)\S*: (.*)", message, re.DOTALL)
        if bad and bad[1] in self.files:
            raise ConfigError(f"{_place(bad[1], self.files)}: {bad[2].rstrip('.')}.")
        raise ConfigError(f"{message[:1].upper()}{message[1:].rstrip('.')}. --help lists all flags.")


def parse_arguments(argv: Sequence[str], algorithm: type[Algorithm] = GRPOArguments) -> Arguments:
    """Reads the settings of a recipe, which ``algorithm`` names.

    With ``--resume`` the settings of the run in ``output_dir`` take the preset's place.

    Raises:
        ConfigError: for an unknown flag or setting, a value of the wrong type, or one out of range.
    """
    argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    config, file, argv = _take_config(list(argv))
    files = dict.fromkeys(config, file)
    # The preset depends on the editor, which may come from either place, so both are read once before it.
    # --help waits for it, and shows the defaults that hold for the editor.
    first = _parse(algorithm, config, files, [flag for flag in argv if flag not in ("-h", "--help")])
    _check_names(first)
    base, base_file = _saved_settings(first) if first.run.resume else _preset(first)
    args = _parse(algorithm, {**base, **config}, {**dict.fromkeys(base, base_file), **files}, argv)
    _check_ranges(args)
    if args.run.resume:
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


def _take_config(argv: list[str]) -> tuple[dict[str, Any], str, list[str]]:
    """The settings of ``--config``, its name, and the flags without it."""
    if "--config" not in argv:
        return {}, "", argv
    at = argv.index("--config")
    if at + 1 >= len(argv):
        raise ConfigError("--config needs a file name after it.")
    return load_yaml(argv[at + 1]), argv[at + 1], argv[:at] + argv[at + 2 :]


def _place(name: str, files: dict[str, str]) -> str:
    """What to call a setting in an error: with its file, where it was not a flag."""
    return f"{name} in {files[name]}" if name in files else name


def _parse(
    algorithm: type[Algorithm], settings: dict[str, Any], files: dict[str, str], argv: list[str]
) -> Arguments:
    """Settings from files, over which flags win; ``files`` has the file of each."""
    known = _names(algorithm)
    for name in settings:
        if name not in known:
            raise ConfigError(f"Unknown setting {name!r} in {files[name]}.{_nearest(str(name), known)}")
    flags = {arg.split("=")[0].lstrip("-").replace("-", "_") for arg in argv if arg.startswith("--")}
    files = {name: file for name, file in files.items() if name not in flags}
    parser = _Parser(
        (EditorArguments, RewardArguments, RunArguments, algorithm),
        allow_abbrev=False,
        description=(algorithm.__doc__ or "").partition("\n")[0],
        epilog="--config FILE reads settings from a YAML file with lines such as 'learning_rate: 2e-4'; flags win over it. "
        "Defaults are those for the editor that is named: --editor X --help shows those of X.",
    )
    parser.files = files
    parser.set_defaults_with_config(**{**algorithm.shared, **settings})
    explain_negations(parser)
    *parsed, rest = parser.parse_args_into_dataclasses(args=argv, return_remaining_strings=True)
    if rest:
        name = rest[0].split("=")[0]
        raise ConfigError(f"Unknown flag {name}.{_nearest(name.lstrip('-').replace('-', '_'), known, '--')}")
    args = Arguments(*parsed)
    _check_types(args, files)
    return args


def _names(algorithm: type[Algorithm]) -> list[str]:
    return [f.name for cls in (EditorArguments, RewardArguments, RunArguments, algorithm) for f in fields(cls)]


def _nearest(name: str, known: list[str], dashes: str = "") -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {dashes}{near[0]}?" if near else " --help lists all flags."


def auto_preset(editor: str) -> str:
    """The preset that 'auto' stands for: that of the editor's family, or 'none'."""
    # A folder that brings defaults of its own is a small editor, to which a preset for GPUs does not apply.
    own = editor == BUILTIN or (Path(editor) / DEFAULTS_FILE).is_file()
    return "none" if own else preset_for(editor)


def _preset(args: Arguments) -> tuple[dict[str, Any], str]:
    """The preset's settings, without those of other algorithms or that this one has for any editor, and its file."""
    editor, name = args.editor, args.editor.preset
    if name == "auto":
        name = auto_preset(editor.editor)
    if name == "none":
        return {}, ""
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in PRESETS.glob("*.yaml")))
        raise ConfigError(f"There is no preset {name!r}; there are {there}, 'auto' and 'none'.")
    known = _names(type(args.algorithm))
    others = {name for algorithm in ALGORITHMS for name in _names(algorithm)} - set(known)
    taken = others | set(type(args.algorithm).whatever_editor)
    return {name: value for name, value in load_yaml(path).items() if name not in taken}, str(path)


def _saved_settings(args: Arguments) -> tuple[dict[str, Any], str]:
    """The settings of the run in ``output_dir``, and their file."""
    folder = args.run.output_dir
    path = Path(folder) / "config.yaml"
    if not os.path.isfile(path):
        raise ConfigError(f"Nothing to resume: {folder} holds no run. Check --output_dir, or leave out --resume.")
    saved = load_yaml(path)
    odd = saved.keys() - set(_names(type(args.algorithm)))
    if odd:
        raise ConfigError(
            f"{folder} holds a run of another recipe or version (it has the setting {min(map(str, odd))!r}), which "
            f"{args.algorithm.recipe}.py cannot resume; take the script that began it."
        )
    return saved, str(path)


def _check_resumable(saved: dict[str, Any], args: Arguments) -> None:
    for name, value in args.to_dict().items():
        if name not in RESUMABLE and name in saved and saved[name] != value:
            raise ConfigError(
                f"--resume continues a run with {name} = {saved[name]!r}, but {value!r} was given; "
                f"leave the flag out, or start anew in another --output_dir."
            )


def _check_types(args: Arguments, files: dict[str, str]) -> None:
    for part in (args.editor, args.reward, args.run, args.algorithm):
        hints = get_type_hints(type(part))
        for item in fields(part):
            value, hint = getattr(part, item.name), hints[item.name]
            if get_origin(hint) is Literal:
                if value not in get_args(hint):
                    choices = ", ".join(map(repr, get_args(hint)))
                    raise ConfigError(f"{_place(item.name, files)} must be one of {choices}, not {value!r}.")
                continue
            allowed = get_args(hint) or (hint,)
            if float in allowed and type(value) is int:
                value = float(value)
                setattr(part, item.name, value)
            if type(value) not in allowed:
                names = " or ".join(t.__name__ for t in allowed if t is not type(None))
                raise ConfigError(f"{_place(item.name, files)} must be of type {names}, not {value!r}.")


def _check_names(args: Arguments) -> None:
    values = args.to_dict()
    for name in ("editor", "metric", "reward", "output_dir"):
        if not values[name].strip():
            raise ConfigError(f"{name} is empty; --help shows its default.")
        if "\0" in values[name]:
            raise ConfigError(f"{name} holds a NUL character, which no name may: {values[name]!r}.")


#: Lowest and highest values; beyond the latter a slip of the finger would fill the memory before anything could be said.
_LOWEST: dict[str, float] = {
    "resolution": 16, "lora_rank": 1, "lora_alpha": 1, "guidance_scale": 0, "true_cfg_scale": 0, "prompts_per_iteration": 1,
    "samples_per_batch": 0, "num_inference_steps": 1, "eval_inference_steps": 0, "sde_window": 1,
    "train_steps": 1, "learning_rate": 0, "weight_decay": 0, "num_iterations": 1, "beta": 0,
    "max_steps": 0, "max_minutes": 0, "threads": 0, "seed": 0, "eval_seed": 0, "eval_samples": 0,
    "sample_grids": 0, "save_steps": 1, "save_total_limit": 1, "reward_retries": 0, "train_prompts": 0,
    "window_every": 1, "window_stride": 1, "window_limit": 0, "buffer_size": 1, "min_count": 1,
    "kl_weight": 0, "noise_levels": 1, "old_decay_rate": 0, "last_steps": 1,
}  # fmt: skip
_HIGHEST: dict[str, float] = {"resolution": 8192, "lora_rank": 4096, "threads": 1024, "reward_retries": 100}
_ABOVE_ZERO = ("eta", "epsilon", "adv_clip", "max_grad_norm", "gate_weight", "nft_beta")
_SHARES = ("adam_beta1", "adam_beta2", "ema_decay", "old_decay_most")


def _check_ranges(args: Arguments) -> None:
    run, values = args.run, args.to_dict()
    lowest = {**_LOWEST, "num_generations": args.algorithm.least_generations}
    for name in lowest.keys() & values.keys():
        low, high, value = lowest[name], _HIGHEST.get(name, float("inf")), values[name]
        if value is not None and not (low <= value <= high and value < float("inf")):
            bounds = f"between {low:g} and {high:g}" if name in _HIGHEST else f"a number of at least {low:g}"
            raise ConfigError(f"{name} must be {bounds}, not {value!r}.")
    for name in _ABOVE_ZERO:
        if name in values and not 0 < values[name] < float("inf"):
            raise ConfigError(f"{name} must be a number above 0, not {values[name]!r}.")
    for name in _SHARES:
        if values.get(name) is not None and not 0 <= values[name] < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, not {values[name]!r}.")
    if not float("-inf") < run.saturated_at < float("inf"):
        raise ConfigError(f"saturated_at must be a number, not {run.saturated_at!r}.")
    args.algorithm.check(run)
    if run.overwrite and run.resume:
        raise ConfigError("--overwrite and --resume contradict each other; give one of them.")
    if run.data is not None and not os.path.isfile(run.data):
        raise ConfigError(f"--data {run.data} is no file; give a JSONL file with one edit a line.")
    if run.eval_data is not None and not os.path.isfile(run.eval_data):
        raise ConfigError(f"--eval_data {run.eval_data} is no file; give a JSONL file with one edit a line.")
    if run.data is not None and run.eval_data is not None and os.path.samefile(run.data, run.eval_data):
        raise ConfigError(
            f"--eval_data {run.eval_data} is the file of --data, whose rows are trained on; give a file of other edits, or "
            "leave --eval_data out."
        )
    if run.skip_saturated and run.data is None and not run.train_prompts:
        raise ConfigError("--skip_saturated needs prompts that come again: give --data or --train_prompts.")
    if run.push_to_hub and not run.hub_model_id:
        raise ConfigError("--push_to_hub needs a repository: give --hub_model_id, such as me/my-editor-lora.")
    if args.editor.train == "full" and args.editor.editor_dtype == "bfloat16":
        raise ConfigError(
            "--train full needs --editor_dtype float32: in bfloat16 small updates would be rounded away. Mixed precision "
            "(accelerate launch --mixed_precision bf16) still computes fast."
        )
