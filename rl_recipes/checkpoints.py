"""Checkpoints: a folder each, complete or not there at all.

Files are written to a hidden folder, a manifest with their sizes and hashes last, and the folder is renamed. What a
kill or a broken disk leaves is recognised by the manifest, and the checkpoint before it is used.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from rl_recipes.runs import RunError, disk_errors
from rl_recipes.shares import gathered, put
from tpips_reward.files import sync

log = logging.getLogger(__name__)

_MANIFEST, _WEIGHTS, _STATE = "manifest.json", "trainable.safetensors", "state.pt"


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def save_checkpoint(
    folder: Path,
    iteration: int,
    module: torch.nn.Module,
    optimizer: Any,
    extra: dict[str, Any],
    keep: int = 2,
    also: Callable[[Path], Any] = lambda folder: None,
    writes: bool = True,
) -> Path:
    """Writes ``folder/step_000010`` with the trained weights, the optimizer, the global random states and ``extra``.

    Where processes share out the weights all must call it, for the whole is gathered in the one that writes.

    Args:
        folder: the run's ``checkpoints`` folder.
        iteration: how many iterations are done.
        module: its trainable parameters are saved exactly.
        optimizer: anything with ``state_dict()``.
        extra: plain numbers, texts, lists, dicts and tensors.
        keep: so many are left once the new one is there, itself included: older ones are removed, and those of later
            iterations.
        also: writes further files into the folder that it is given.
        writes: whether this is the process that writes.

    Raises:
        RunError: when the disk refuses; earlier checkpoints are untouched then.
    """
    final = folder / f"step_{iteration:06d}"
    # Before anything can go wrong with the disk, for others would wait.
    weights = gathered({k: p.detach() for k, p in trainable(module).items()})
    moments = optimizer.state_dict()
    if not writes:
        return final
    with disk_errors(final):
        folder.mkdir(parents=True, exist_ok=True)
        # What a kill has left is of no use to anybody; its name may come again, for process numbers do.
        for leftover in folder.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(dir=folder, prefix=".tmp-"))
        try:
            work.chmod(0o755)
            state = {
                "iteration": iteration,
                "optimizer": moments,
                "random": _random_state(),
                "extra": extra,
            }
            buffer = io.BytesIO()
            torch.save(state, buffer)
            # Through Python's own files, whose errors say what is wrong with the disk.
            (work / _WEIGHTS).write_bytes(save({k: w.cpu().contiguous() for k, w in weights.items()}))
            (work / _STATE).write_bytes(buffer.getbuffer())
            also(work)
            _write_manifest(work, iteration)
            if final.exists():
                shutil.rmtree(final)
            os.rename(work, final)
            sync(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        steps = _steps(folder)
        at = steps.index(final)
        # What is numbered above it was damaged, and passed over when the run resumed.
        for old in steps[:at] + steps[at + keep :]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is complete, or None where none was ever written.

    Raises:
        RunError: when there are checkpoints and all of them are damaged.
    """
    found = _steps(folder)
    for path in found:
        damage = find_damage(path)
        if damage is None:
            return path
        log.warning("The checkpoint %s is damaged (%s); the one before it is used.", path, damage)
    if found:
        raise RunError(f"All checkpoints in {folder} are damaged; start anew with --overwrite.")
    return None


def load_checkpoint(path: Path, module: torch.nn.Module, optimizer: Any) -> tuple[int, dict[str, Any]]:
    """Restores what :func:`save_checkpoint` saved, to the bit.

    Returns:
        (iteration, extra).

    Raises:
        RunError: when it belongs to another adapter.
    """
    try:
        weights = load_file(path / _WEIGHTS)
        state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
        iteration, extra, moments, randomness = (state[k] for k in ("iteration", "extra", "optimizer", "random"))
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RunError(f"The checkpoint {path} cannot be read ({reason}); start anew with --overwrite.") from error
    parameters = trainable(module)
    if {k: tuple(v.shape) for k, v in weights.items()} != {k: tuple(v.shape) for k, v in parameters.items()}:
        raise RunError(f"The checkpoint {path} belongs to another editor or adapter; give that one's settings.")
    for name, parameter in parameters.items():
        put(parameter, weights[name])
    optimizer.load_state_dict(moments)
    _set_random_state(randomness)
    return int(iteration), extra


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None when every file has the size and hash of its manifest."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        unlisted = {_WEIGHTS, _STATE} - manifest["files"].keys()
        if unlisted:
            return f"its manifest does not list {', '.join(sorted(unlisted))}"
        for name, expected in manifest["files"].items():
            file = path / name
            if file.stat().st_size != expected["size"]:
                return f"{name} has {file.stat().st_size} bytes, not {expected['size']}"
            if _sha256(file) != expected["sha256"]:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _steps(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    numbered = ((re.fullmatch(r"step_(\d+)", p.name), p) for p in folder.glob("step_*") if p.is_dir())
    found = [(int(match[1]), p) for match, p in numbered if match]
    return [p for _, p in sorted(found, reverse=True)]


def _write_manifest(folder: Path, iteration: int) -> None:
    files = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        sync(file)
        files[file.relative_to(folder).as_posix()] = {"size": file.stat().st_size, "sha256": _sha256(file)}
    text = json.dumps({"iteration": iteration, "files": files}, indent=2)
    (folder / _MANIFEST).write_text(text, encoding="utf-8")
    sync(folder / _MANIFEST)
    sync(folder)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, list(numbers), gauss],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
