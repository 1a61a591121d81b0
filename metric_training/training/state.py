"""The output folder, checkpoints that a run resumes from exactly, and the weights of its best validation.

`state.pt` holds what is trained, the optimizer and the step; `best.pt` what was trained at the best validation. Frozen
weights are in neither. Files are written by the main process, whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from metric_training.training.config import RESUMABLE, TrainConfig
from tpips_reward import TPIPSError
from tpips_reward.files import write_atomic

STATE, BEST, LOG = "state.pt", "best.pt", "log.jsonl"
_KEYS = {"trained", "optimizer", "step", "seconds", "best", "config"}
# Gathered from all processes on the main one, whatever the sharding.
_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


def open_folder(config: TrainConfig, used_by_us: bool = False) -> dict[str, Any] | None:
    """Makes the output folder; the checkpoint to resume from, or None.

    Args:
        used_by_us: whether another process of this run may have written to the folder already.

    Raises:
        TPIPSError: a folder in use, or a checkpoint that is missing, damaged, or of other settings.
    """
    folder = Path(config.output_dir)
    if config.resume:
        if not (folder / STATE).exists():
            raise TPIPSError(f"--resume was given, but {folder / STATE} does not exist; leave --resume out to start.")
        saved = load_checkpoint(folder / STATE, _KEYS)
        for name, value in asdict(config).items():
            if name not in RESUMABLE and saved["config"].get(name) != value:
                raise TPIPSError(
                    f"The checkpoint {folder / STATE} was made with {name}={saved['config'].get(name)!r}, not {value!r}; "
                    "resume with the same settings, or start anew in another --output_dir."
                )
        return saved
    if not (config.overwrite or used_by_us) and folder.exists() and any(folder.iterdir()):
        raise TPIPSError(f"The output folder {folder} is not empty; give --resume to go on or --overwrite to start anew.")
    folder.mkdir(parents=True, exist_ok=True)
    if not used_by_us:
        for name in (STATE, BEST, LOG):
            (folder / name).unlink(missing_ok=True)
    return None


def load_checkpoint(path: Path, keys: set[str]) -> dict[str, Any]:
    """A checkpoint file with these entries.

    Raises:
        TPIPSError: it is damaged, or something else.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise TPIPSError(f"{path} does not exist; give the output_dir of metric_training/train.py.") from None
    except Exception as error:  # torch raises many kinds for a damaged file
        raise TPIPSError(f"The checkpoint {path} cannot be read ({error}); start anew with --overwrite.") from error
    if not isinstance(saved, dict) or keys - saved.keys():
        raise TPIPSError(f"{path} is no checkpoint of metric_training/train.py; start anew with --overwrite.")
    return saved


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, whole and on the CPU (on the main process; every process has to call this)."""
    return get_model_state_dict(model, options=_OPTIONS)  # type: ignore[return-value]


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint needs of model and optimizer; every process has to call this."""
    return {
        "trained": trained_weights(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_OPTIONS),
    }


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """The reverse of `training_state`."""
    set_model_state_dict(model, saved["trained"], options=_OPTIONS)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=_OPTIONS)


def write_checkpoint(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a checkpoint file atomically."""
    write_atomic(path, lambda temporary: torch.save(dict(content), temporary))
