"""The output folder, checkpoints that a run resumes from exactly, and the weights of its best validation.

`state.pt` holds what is trained, the optimizers, the step and what the run is the continuation of; `best.pt` what was trained at the best validation. Frozen
weights are in neither. Files are written by the main process, whole or not at all.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
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
from tpips_reward.checkpoints import CONFIG_NAME, check_save_folder
from tpips_reward.files import TEMPORARY, check_writable, write_atomic

STATE, BEST, LOG = "state.pt", "best.pt", "log.jsonl"
#: Why a run diverged: an exit code that a launcher passes on does not say that it did.
DIVERGED = "diverged.txt"
#: What a checkpoint to resume from holds.
_TYPES: dict[str, Any] = {
    "trained": dict, "optimizer": dict, "step": int, "seconds": float, "best": float, "config": dict,
}  # fmt: skip
#: What it holds beside that, unless it was made by a version from before that: what a run is the continuation of, ...
_ORIGIN: dict[str, Any] = {"data": str, "start": str, "teacher": str, "processes": int}
#: ... and the record of a step that is done, where its validation is not.
UNVALIDATED = "unvalidated"
_OPTIONAL: dict[str, Any] = {**_ORIGIN, UNVALIDATED: dict}
_ANEW = "give the folder of another run, or start anew with --overwrite."
# Gathered from all processes on the main one, whatever the sharding.
_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


class Diverged(TPIPSError):
    """A loss or gradient that is not finite: other settings may work, and the same ones will not."""


def open_folder(config: TrainConfig, used_by_us: bool = False) -> dict[str, Any] | None:
    """Looks at the output folder; the checkpoint to resume from, or None.

    What an earlier run left stays until `clear_folder`: settings and data that cannot be used must not cost it.

    Args:
        used_by_us: whether another process of this run may have written to the folder already.

    Raises:
        TPIPSError: a folder that is in use or none, that holds what the run starts from or another model in best/ or last/, or
            a checkpoint that is missing, damaged, or of other settings.
    """
    folder = Path(config.output_dir)
    check_writable(folder)
    for name, source in (("model_name_or_path", config.model_name_or_path), ("teacher", config.teacher)):
        place = Path(source or "").expanduser()
        replaced = [(folder / name).resolve() for name in ("best", "last")]
        if source and place.is_dir() and any(place.resolve().is_relative_to(home) for home in replaced):
            raise TPIPSError(
                f"{name} {source} lies in the output folder {folder}, whose best/ and last/ are replaced; give another --output_dir."
            )
    for name in ("best", "last"):  # before hours go into what is saved there
        check_save_folder(folder / name)
    if config.resume:
        if not (folder / STATE).exists():
            raise TPIPSError(f"--resume was given, but {folder / STATE} does not exist: no step was saved; give --overwrite to start.")
        saved = load_checkpoint(folder / STATE, set(_TYPES))
        check_same_settings(saved["config"], config, f"The checkpoint {folder / STATE}")
        return saved
    if not (config.overwrite or used_by_us) and folder.exists() and any(folder.iterdir()):
        go_on = "--resume to go on, or " if (folder / STATE).exists() else ""
        raise TPIPSError(f"The output folder {folder} is not empty; give {go_on}--overwrite to start anew in it.")
    return None


def clear_folder(folder: Path, anew: bool) -> None:
    """Makes it where it is not there, and removes what killed processes left half written, and why a run diverged.

    Args:
        anew: the files of an earlier run go too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob(f"{TEMPORARY}*"), folder / DIVERGED, *([folder / name for name in (STATE, BEST, LOG)] if anew else [])]:
        if path.is_file():
            path.unlink()
    for name in ("best", "last") if anew else ():
        if (folder / name / CONFIG_NAME).is_file():  # would pass for this run's
            shutil.rmtree(folder / name)


def check_same_settings(saved: Mapping[str, Any], config: TrainConfig, what: str) -> None:
    """Refuses settings with which a run could not be the continuation of another.

    Args:
        saved: the settings of that run.
        what: it is, for the message.

    Raises:
        TPIPSError: naming the first setting that differs, and both values.
    """
    earlier = asdict(TrainConfig()) | dict(saved)  # a run from before there was a setting had its default
    for name, value in asdict(config).items():
        if name not in RESUMABLE and earlier[name] != value:
            raise TPIPSError(
                f"{what} was made with {name}={earlier[name]!r}, not {value!r}; use the same settings, or start anew in "
                "another --output_dir."
            )


def frozen_digest(module: nn.Module) -> str:
    """Of the weights that are not trained: they are in no checkpoint, and what is trained means nothing beside others.

    About a hundred numbers of each are looked at: weights that were trained anew differ in all, and those of a large backbone are many.
    """
    found = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            values = parameter.detach().flatten()
            values = values[:: max(1, len(values) // 64)].float().cpu()
            found.update(f"{name} {tuple(parameter.shape)} ".encode() + values.numpy().tobytes())
    return found.hexdigest()


def check_same_origin(saved: Mapping[str, Any], origin: Mapping[str, Any], config: TrainConfig, where: Path) -> None:
    """Refuses to go on with a checkpoint elsewhere than it came from.

    Args:
        saved: the checkpoint.
        origin: what there is now: "data", a digest (see `examples.VoteExamples.digest`); "start" and "teacher", of their
            frozen weights (see `frozen_digest`); "processes", how many.
        where: the checkpoint is, for the message.

    Raises:
        TPIPSError: something differs.
    """
    reasons = {
        "data": f"The rows of {config.dataset_name} are not those that the checkpoint {where} was made with (other aspects or "
        "votes, rows added or left out, another order, or another version that reads them otherwise); bring the data back",
        "start": f"The weights of {config.model_name_or_path} are not those that the checkpoint {where} was trained beside; "
        "bring them back",
        "teacher": f"The weights of the teacher {config.teacher} are not those that the checkpoint {where} was made with; bring "
        "them back",
        "processes": f"The checkpoint {where} was made by {saved.get('processes')} processes, not {origin.get('processes')}, which "
        "would take other rows in a step; launch as many (--num_processes)",
    }
    for name, value in origin.items():
        if saved.get(name, value) != value:
            raise TPIPSError(f"{reasons[name]}, or start anew in another --output_dir.")


def load_checkpoint(path: Path, keys: set[str]) -> dict[str, Any]:
    """A checkpoint file with these entries.

    Raises:
        TPIPSError: it is damaged, or something else.
    """
    if not path.exists():
        raise TPIPSError(f"{path} does not exist; give the output_dir of metric_training/train.py.")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        # torch's own text is a page of advice on files of other origin
        reason = f"{error.strerror}" if isinstance(error, OSError) else f"{path.stat().st_size} bytes, {type(error).__name__}"
        raise TPIPSError(f"The checkpoint {path} is damaged or none ({reason}); {_ANEW}") from error
    wanted = {key: _TYPES[key] for key in keys}
    if isinstance(saved, dict):
        wanted |= {key: kind for key, kind in _OPTIONAL.items() if key in saved}
    if not isinstance(saved, dict) or any(not isinstance(saved.get(key), kind) for key, kind in wanted.items()):
        raise TPIPSError(f"{path} is no checkpoint of metric_training/train.py, or of another version; {_ANEW}")
    return saved


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, whole and on the CPU (on the main process; every process has to call this)."""
    return get_model_state_dict(model, options=_OPTIONS)  # type: ignore[return-value]


def training_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """What a checkpoint needs of model and optimizers; every process has to call this."""
    return {
        "trained": trained_weights(model),
        "optimizer": get_optimizer_state_dict(model, optimizers, options=_OPTIONS),
    }


def restore(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: Mapping[str, Any], where: Path
) -> None:
    """The reverse of `training_state`.

    Args:
        where: the checkpoint is, for messages.

    Raises:
        TPIPSError: the checkpoint has not what this model trains.
    """
    trained, missing = saved["trained"], f"The checkpoint {where} does not fit what is trained"
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")  # of a distributed wrapper
        if not parameter.requires_grad:
            continue
        found = trained.get(name)
        if not isinstance(found, Tensor) or found.shape != parameter.shape:
            shape = f"has the shape {tuple(found.shape)}, not {tuple(parameter.shape)}" if isinstance(found, Tensor) else "is missing"
            raise TPIPSError(f"{missing} ({name} {shape}); {_ANEW}")
        if not bool(found.isfinite().all()):
            raise TPIPSError(f"{missing} ({name} holds NaN or infinite numbers); {_ANEW}")
    if not saved["optimizer"].get("state"):  # PyTorch would start with an empty one
        raise TPIPSError(f"{missing} (its optimizer has no state); {_ANEW}")
    set_model_state_dict(model, trained, options=_OPTIONS)
    try:
        set_optimizer_state_dict(model, optimizers, saved["optimizer"], options=_OPTIONS)
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TPIPSError(f"{missing} (its optimizer: {type(error).__name__}, {' '.join(str(error).split())[:100]}); {_ANEW}") from error


def write_checkpoint(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a checkpoint file atomically.

    Raises:
        TPIPSError, OSError: the disk refuses; the checkpoint that was there stays.
    """
    try:
        write_atomic(path, lambda temporary: torch.save(dict(content), temporary))
    except RuntimeError as error:  # a full disk, from torch's own writer
        raise TPIPSError(
            f"The checkpoint {path} cannot be written ({' '.join(str(error).split())[:150]}); is the disk full? The checkpoint "
            "before it is whole: make room, and go on with --resume."
        ) from error
