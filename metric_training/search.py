"""A Bayesian search for settings, over the paper's spaces (table 8), with validation agreement as the target.

    python -m metric_training.search --config metric_training/configs/late.yaml --trials 30 \\
        --launcher "accelerate launch --num_processes 8" --processes 8

Each trial is a training of its own in a folder below `--output_dir`. The same command goes on after a stop: finished
trials are kept, one that was cut off is resumed. Needs `pip install 'tpips-reward[tuning]'`.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from metric_training.training.config import OTHER_FLAGS, RESUMABLE, TrainConfig, check_config, parse_config, read_yaml
from metric_training.training.model import load_start
from metric_training.training.runs import best_agreement, finish
from metric_training.training.state import Diverged
from tpips_reward import TPIPSError
from tpips_reward.arguments import HelpFormatter, check_at_least
from tpips_reward.errors import INTERRUPTED, exit_on_errors
from tpips_reward.files import check_writable, write_text
from tpips_reward.fusion.base import FusionModule
from tpips_reward.fusion.distance import spread_layers
from tpips_reward.stopping import Interrupted

BATCH, STUDY, TRAIN = "effective_batch_size", "study.db", "metric_training/train.py"
_RATES = {"low": 1e-5, "high": 5e-4, "log": True}
_COMMON: dict[str, Any] = {"lora_r": [8, 16, 32, 64], "learning_rate": _RATES, BATCH: [32, 64, 128, 256]}
#: What is searched, by fusion: a list to choose from, or a range. The batch counts (triplet, aspect) examples.
SPACES: dict[str, dict[str, Any]] = {
    "late": {**_COMMON, "temperature": [0.05, 0.1, 0.2]},
    "early": {**_COMMON, "temperature": [0.05, 0.1, 0.2]},
    "triplet": dict(_COMMON),
    "mid": {
        **_COMMON,
        "temperature": {"low": 1e-3, "high": 1.0, "log": True},
        "num_probes": [3, 5, 8, 10, 14, 20],
    },
}


def read_space(path: Path | None, config: TrainConfig) -> dict[str, Any]:
    """The space of a YAML file, or the paper's for the fusion.

    Raises:
        TPIPSError: a file that is no space, or names what is no setting.
    """
    if path is None:
        space = dict(SPACES[config.fusion])
        if not config.use_peft:
            del space["lora_r"]
        return space
    hints = get_type_hints(TrainConfig)
    fractions = {name for name, hint in hints.items() if float in (hint, *get_args(hint))}
    space = {name: _with_fractions(values) if name in fractions else values for name, values in read_yaml(path, "space").items()}
    known = {item.name for item in fields(TrainConfig)} - RESUMABLE | {BATCH}
    for name, values in space.items():
        if name not in known:
            raise TPIPSError(f"{path} searches {name!r}, which is no setting of a training.")
        is_range = isinstance(values, dict) and {"low", "high"} <= values.keys() <= {"low", "high", "log"}
        if is_range and name not in fractions:
            raise TPIPSError(f"{path}: {name} is no setting with fractions; give a list of choices, not {values!r}.")
        if not is_range and not (isinstance(values, list) and values):
            raise TPIPSError(f"{path}: {name} must be a list, or low and high (and log: true), not {values!r}.")
        if is_range:
            low, high, log = values["low"], values["high"], values.get("log", False)
            if any(type(bound) not in (int, float) for bound in (low, high)) or not -math.inf < low < high < math.inf:
                raise TPIPSError(f"{path}: low and high of {name} must be numbers, low below high, not {low!r} and {high!r}.")
            if not isinstance(log, bool) or (log and low <= 0):
                raise TPIPSError(f"{path}: log of {name} is true or false, and true needs a low above 0; it has {values!r}.")
        elif any(type(value) not in (str, int, float, bool) for value in values):
            raise TPIPSError(f"{path}: the choices of {name} must be numbers or names, not {values!r}.")
    return space


def _with_fractions(values: Any) -> Any:
    """A setting's choices or range with numbers where they are meant: YAML takes 1e-5, without a point, for a text."""
    if isinstance(values, dict):
        return {key: _with_fractions(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_with_fractions(value) for value in values]
    try:
        return float(values) if isinstance(values, str) else values
    except ValueError:
        return values


def suggest(trial: Any, space: Mapping[str, Any]) -> dict[str, Any]:
    """A trial's values."""
    return {
        name: trial.suggest_categorical(name, values)
        if isinstance(values, list)
        else trial.suggest_float(name, values["low"], values["high"], log=bool(values.get("log", False)))
        for name, values in space.items()
    }


def with_values(config: TrainConfig, values: Mapping[str, Any], processes: int) -> TrainConfig:
    """The settings with a trial's values; α stays twice the rank, and the batch becomes passes.

    Raises:
        TPIPSError: a value that is none of its setting, or a batch that the processes and the aspects of a pass do not
            divide.
    """
    changes = dict(values)
    if "lora_r" in changes:
        changes["lora_alpha"] = 2 * changes["lora_r"]
    if BATCH in changes:
        if type(changes[BATCH]) is not int:
            raise TPIPSError(f"{BATCH} must be a whole number, not {changes[BATCH]!r}.")
        per_pass = processes * config.per_device_train_batch_size * config.max_aspects
        passes, rest = divmod(changes.pop(BATCH), per_pass)
        if rest or not passes:
            raise TPIPSError(
                f"A pass has {processes} processes x {config.per_device_train_batch_size} comparisons x "
                f"{config.max_aspects} aspects = {per_pass} examples, which does not divide the batch of {values[BATCH]}; "
                "lower max_aspects or per_device_train_batch_size."
            )
        changes["gradient_accumulation_steps"] = passes
    found = replace(config, **changes)
    check_config(found)
    return found


def search(
    config: TrainConfig,
    space: Mapping[str, Any],
    trials: int,
    folder: Path,
    *,
    launcher: str | None = None,
    processes: int = 1,
) -> TrainConfig:
    """Runs trials until there are ``trials`` finished ones; writes trials.csv and best.yaml.

    A trial whose loss or gradient becomes no number counts as finished, without a figure.

    Args:
        config: the settings that are not searched; its output_dir is not used.
        space: see :data:`SPACES`.
        trials: finished ones in the end, those of earlier calls included.
        folder: of the search.
        launcher: see `training.runs.finish`; processes: how many it starts.

    Returns:
        The settings of the best trial.

    Raises:
        TPIPSError: optuna is missing, a value of the space cannot be used, the folder is that of another search, or all
            trials diverged.
        Interrupted: a trial was asked to stop.
    """
    try:
        import optuna
    except ImportError as error:
        raise TPIPSError("The search needs optuna; install it with pip install 'tpips-reward[tuning]'.") from error
    for name, values in space.items():  # before hours go into the first trials
        for value in values if isinstance(values, list) else (values["low"], values["high"]):
            with_values(config, {name: value}, processes)
    probes = "num_probes" in space
    if probes and (config.fusion != "mid" or config.probe_layers is not None):
        raise TPIPSError("num_probes is searched, which only mid fusion without probe_layers has; take one of the two out.")
    check_writable(folder)
    if probes and not (folder / STUDY).exists():  # loads the start, which a search that was begun has passed
        _check_probes(config, space["num_probes"])
    folder.mkdir(parents=True, exist_ok=True)
    states = optuna.trial.TrialState
    # pruned: those that diverged; the sampler keeps away from their values, of which a failed one would tell it nothing
    done = (states.COMPLETE, states.PRUNED)
    try:
        study = optuna.create_study(
            study_name="search",
            storage=f"sqlite:///{(folder / STUDY).resolve()}",
            direction="maximize",
            load_if_exists=True,
        )
    except Exception as error:  # of the data base below, which has many
        reason = " ".join(str(error).split())[:100]
        raise TPIPSError(
            f"{folder / STUDY} holds no search that can be read ({type(error).__name__}: {reason}); take it away, or give "
            "another --output_dir."
        ) from error
    _check_same_search(study, config, space, folder)
    earlier = study.get_trials(deepcopy=False)
    # a new stream each time: the same one would propose the first trials again
    study.sampler = optuna.samplers.TPESampler(seed=config.seed + len(earlier))
    for trial in earlier:
        if trial.state == states.RUNNING:  # cut off: the same again, in the same folder
            study.enqueue_trial(trial.params, user_attrs={"folder": trial.user_attrs.get("folder", f"trial_{trial.number}")})
            study.tell(trial.number, state=states.FAIL)
    while len(study.get_trials(deepcopy=False, states=done)) < trials:
        asked = study.ask()
        values = suggest(asked, space)
        name = asked.user_attrs.get("folder", f"trial_{asked.number}")
        asked.set_user_attr("folder", name)
        try:
            settings = replace(with_values(config, values, processes), output_dir=str(folder / name))
            print(f"{folder / name}: {_described(values, settings)}", file=sys.stderr)
            run = finish(settings, launcher)
        except Diverged as error:
            print(f"{folder / name}: {error}", file=sys.stderr)
            study.tell(asked, state=states.PRUNED)
        else:
            study.tell(asked, best_agreement(run))
        _write_trials(study.get_trials(deepcopy=False, states=done), folder, list(space))
    if not study.get_trials(deepcopy=False, states=(states.COMPLETE,)):
        raise TPIPSError(f"All {trials} trials in {folder} diverged; search lower learning rates in another --output_dir.")
    best = with_values(config, study.best_params, processes)
    kept = {k: v for k, v in asdict(best).items() if v is not None and k not in ("output_dir", "resume", "overwrite")}
    write_text(folder / "best.yaml", yaml.safe_dump(kept, sort_keys=False))
    return best


def _described(values: Mapping[str, Any], settings: TrainConfig) -> str:
    """A trial's values, and the passes that its batch became."""
    text = ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items())
    passes = f" (gradient_accumulation_steps {settings.gradient_accumulation_steps})"
    return text + passes if BATCH in values else text


def _check_probes(config: TrainConfig, counts: Sequence[int]) -> None:
    """Refuses a start that keeps its probe layers, or has fewer layers than a trial might read."""
    start = load_start(config)
    if isinstance(start, FusionModule):
        raise TPIPSError(
            f"num_probes is searched, but {config.model_name_or_path} is a mid metric that keeps its probe layers; give a "
            "--space without it, or another start."
        )
    spread_layers(max(counts), int(start.config.text_config.num_hidden_layers))


def _check_same_search(study: Any, config: TrainConfig, space: Mapping[str, Any], folder: Path) -> None:
    """Refuses to mix trials of two searches; remembers what this one is."""
    fixed = {k: v for k, v in asdict(config).items() if k not in RESUMABLE and k not in space}
    mine = json.loads(json.dumps({"space": dict(space), **fixed}))
    earlier = study.user_attrs.get("search")
    if earlier is None:
        study.set_user_attr("search", mine)
    else:  # a setting that came after it was begun had its default then
        later = {k: v for k, v in asdict(TrainConfig()).items() if k in mine and k not in earlier["space"]}
        earlier = later | earlier
    for name in mine.keys() | (earlier or mine).keys():
        before, now = (settings.get(name, "searched") for settings in (earlier or mine, mine))
        if before != now:
            raise TPIPSError(
                f"The search in {folder} was begun with {name}={before!r}, not {now!r}; use the same settings, or start anew "
                "in another --output_dir."
            )


def _write_trials(trials: Sequence[Any], folder: Path, names: list[str]) -> None:
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(["folder", "validation_agreement", *names])
    for trial in sorted(trials, key=lambda trial: math.inf if trial.value is None else -trial.value):
        writer.writerow([trial.user_attrs["folder"], "diverged" if trial.value is None else trial.value, *(trial.params[name] for name in names)])
    write_text(folder / "trials.csv", table.getvalue())


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; flags that it does not know are settings of the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False, epilog=OTHER_FLAGS)
    parser.add_argument("--trials", type=int, default=30, help="finished trainings in the end")
    parser.add_argument("--space", type=Path, help="YAML: setting: [choices], or {low, high, log}; default: the paper's")
    parser.add_argument("--output_dir", "--output-dir", type=Path, default=Path("runs/search"), help="study.db, trials.csv, best.yaml")
    parser.add_argument("--launcher", help="command before the script, such as 'accelerate launch --num_processes 8'")
    parser.add_argument("--processes", type=int, default=1, help="how many processes the launcher starts")
    options, rest = parser.parse_known_args(arguments)
    check_at_least(options, 1, "trials", "processes")
    config = parse_config(rest)
    try:
        search(
            config,
            read_space(options.space, config),
            options.trials,
            options.output_dir,
            launcher=options.launcher,
            processes=options.processes,
        )
    except Interrupted:
        print("Stopped. The same command goes on with this trial.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print((options.output_dir / "trials.csv").read_text(encoding="utf-8"))
    best = options.output_dir / "best.yaml"
    steps = f" (of {config.max_steps} steps, as the trials; --max_steps -1 leaves it to num_train_epochs)"
    launcher = options.launcher or "accelerate launch"
    print(f"A training with the best settings{steps if config.max_steps > 0 else ''}: {launcher} {TRAIN} --config {best}")


if __name__ == "__main__":
    main()
