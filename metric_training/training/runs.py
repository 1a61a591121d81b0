"""Whole trainings as steps of something larger: a search, a figure. Each is made once, and goes on where it stopped."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import yaml

from metric_training import train
from metric_training.training.config import TrainConfig
from metric_training.training.state import DIVERGED, STATE, Diverged, check_same_settings, load_checkpoint
from tpips_reward import TPIPSError
from tpips_reward.checkpoints import CONFIG_NAME
from tpips_reward.files import write_text
from tpips_reward.stopping import Interrupted


def finish(config: TrainConfig, launcher: str | None = None) -> Path:
    """Trains with these settings, unless that is done already; a run that was stopped goes on.

    Args:
        config: its output folder is the run's.
        launcher: a command that is put before the script, such as "accelerate launch --num_processes 8"; None: in this
            process.

    Returns:
        The output folder.

    Raises:
        TPIPSError: the settings cannot be used, or the command failed.
        Diverged: the loss or the gradient became no number.
        Interrupted: the run was asked to stop.
    """
    folder = Path(config.output_dir)
    if (folder / "last" / CONFIG_NAME).is_file():
        earlier = load_checkpoint(folder / STATE, {"config"})["config"]
        check_same_settings(earlier, config, f"The finished training in {folder}")
        return folder
    config = replace(config, resume=(folder / STATE).is_file(), overwrite=False)
    config.overwrite = not config.resume
    if launcher is None:
        train.main(config)
    else:
        _launch(config, folder, launcher)
    return folder


def best_agreement(folder: Path) -> float:
    """Agreement of a finished run's best validation."""
    return float(load_checkpoint(folder / STATE, {"best"})["best"])


def _launch(config: TrainConfig, folder: Path, launcher: str) -> None:
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise TPIPSError(f"The launcher {launcher!r} is no command ({error}).") from error
    if not words or shutil.which(words[0]) is None:
        raise TPIPSError(f"The launcher {launcher!r} is no command that is installed here; give one such as 'accelerate launch'.")
    settings = folder.with_name(f"{folder.name}.yaml")
    write_text(settings, yaml.safe_dump({k: v for k, v in asdict(config).items() if v is not None}))
    (folder / DIVERGED).unlink(missing_ok=True)  # of an earlier attempt
    done = subprocess.run([*words, train.__file__, "--config", str(settings)], check=False)
    if done.returncode == 130:
        raise Interrupted
    if done.returncode and (folder / DIVERGED).is_file():
        raise Diverged((folder / DIVERGED).read_text(encoding="utf-8").strip())
    if done.returncode:
        raise TPIPSError(f"The training in {folder} failed (exit code {done.returncode}); its message is above.")
