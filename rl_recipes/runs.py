"""The folder of a run: who may use it, how files get into it, and what is taken out of it when a run resumes."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from PIL import Image
from safetensors import SafetensorError

from tpips_reward import files
from tpips_reward.errors import TPIPSError

log = logging.getLogger(__name__)

#: What a run writes; --overwrite removes these and nothing else.
_OWN = (
    "config.yaml", "metrics.jsonl", "summary.json", "curves.png", "before.json", "before.safetensors",
    "samples", "adapter", "checkpoints", "failed_batch", "logs", "report.html",
)  # fmt: skip


class RunError(TPIPSError):
    """A run that cannot start or go on; the message says what happened and what to do."""


class DivergedError(RunError):
    """Weights that no longer make finite images: what they are must not be kept as a checkpoint."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full, read-only or forbidden disk into one sentence.

    Raises:
        RunError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        why = {
            errno.ENOSPC: "the disk is full; free some space, then --resume",
            errno.EDQUOT: "your disk quota is used up; free some space, then --resume",
            errno.EACCES: "you may not write there; choose another --output_dir",
            errno.EPERM: "you may not write there; choose another --output_dir",
            errno.EROFS: "it is read-only; choose another --output_dir",
            errno.ENOTDIR: "a part of the path is a file; choose another --output_dir",
            errno.EEXIST: "a part of the path is a file; choose another --output_dir",
            errno.ENAMETOOLONG: "the name is too long; choose another --output_dir",
        }.get(error.errno or 0, f"{error.strerror or error}; check the path and the disk, or choose another --output_dir")
        raise RunError(f"Cannot write {path}: {why}.") from error
    except SafetensorError as error:
        raise RunError(f"Cannot write {path}: {error}.") from error


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a temporary file beside ``path`` and moves it there once it is on the disk.

    Raises:
        RunError: when the disk refuses; the old file is untouched then.
    """
    with disk_errors(path):
        files.write_atomic(path, write)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically; NaN is refused, so that every reader can parse the file."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomic(path, lambda p: p.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """Reads a JSON file of this run.

    Raises:
        RunError: when it is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is missing or damaged ({error}); start anew with --overwrite.") from error


def write_image(path: Path, image: Image.Image) -> None:
    """Writes a PNG atomically."""
    write_atomic(path, lambda p: image.save(p, format="PNG"))


def to_image(pixels: torch.Tensor) -> Image.Image:
    """(3, H, W) float in [0, 1] → a PIL image."""
    array = (pixels.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(array.permute(1, 2, 0).cpu().numpy())


class RunFolder:
    """The output folder of one run: ``with folder`` keeps other runs out of it.

    Only the main process writes, except that each keeps the batches on which its reward failed. All files but ``metrics.jsonl`` are replaced as a whole; that one is appended to, a
    line an iteration, and a broken last line is dropped when the run resumes.

    Args:
        path: the folder; it need not exist.
        owner: whether this is the process that writes, and that holds the lock.
    """

    def __init__(self, path: str | Path, owner: bool = True) -> None:
        self.path, self.owner = Path(path), owner
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None
        self._depth = 0
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        """Locks the folder, which is made if it does not exist; the system unlocks it when the process ends.

        Raises:
            RunError: when another run writes to it, or it cannot be made.
        """
        if self.owner and self._depth == 0:
            with disk_errors(self.path):
                if self.path.exists() and not self.path.is_dir():
                    raise RunError(f"--output_dir {self.path} is a file; give a folder.")
                self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
                self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_folder(self.path)
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        # A run that is refused leaves no trace: folders that were made for it and are still empty go again.
        for made in self._made:
            try:
                made.rmdir()
            except OSError:
                break
        self._made = []
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check(self, *, overwrite: bool = False, resume: bool = False) -> None:
        """Checks that this run may use the folder, and that it can be written to; changes nothing that is in it.

        Raises:
            RunError: when it is used already and neither flag is given, another run writes to it, or it cannot be
                written to.
        """
        with self:
            self._check(overwrite, resume)

    def _check(self, overwrite: bool, resume: bool) -> None:
        with disk_errors(self.path):
            used = [p.name for p in self.path.iterdir() if not p.name.startswith(".")]
        if used and not (overwrite or resume):
            raise RunError(
                f"The output folder {self.path} is in use (it holds {', '.join(sorted(used)[:3])}…). "
                f"--resume continues the run in it, --overwrite replaces it, or give another --output_dir."
            )
        if overwrite and any(name in _OWN for name in used) and not self._holds_a_run():
            raise RunError(
                f"--overwrite would delete from {self.path} what no run of this script has written (its config.yaml is "
                "missing or is another program's); give another --output_dir, or empty it yourself."
            )
        write_atomic(self.path / ".writable", lambda p: p.write_bytes(bytes(1 << 20)))
        with disk_errors(self.path):
            (self.path / ".writable").unlink()
            for leftover in self.path.glob(".tmp-*"):
                leftover.unlink(missing_ok=True)

    def _holds_a_run(self) -> bool:
        """Whether ``config.yaml`` is one of ours, so that what lies beside it is the run's."""
        try:
            content = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return False
        return isinstance(content, dict) and {"reward", "num_generations"} <= content.keys()

    def clear(self) -> None:
        """Removes what an earlier run wrote here, and nothing else."""
        with disk_errors(self.path):
            for name in _OWN:
                files.remove(self.path / name)

    def save_config(self, settings: dict[str, Any]) -> None:
        """Writes ``config.yaml``, which ``--config`` and ``--resume`` read back."""
        kept = {k: v for k, v in settings.items() if k not in ("resume", "overwrite")}
        text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
        write_atomic(self.path / "config.yaml", lambda p: p.write_text(text, encoding="utf-8"))

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Adds one line to ``metrics.jsonl`` and waits until it is on the disk."""
        text = json.dumps(line, allow_nan=False) + "\n"
        with disk_errors(self.metrics), open(self.metrics, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``; a last line that was cut off is left out."""
        if not self.metrics.exists():
            return []
        lines: list[dict[str, Any]] = []
        for text in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                break
            if not isinstance(line, dict) or type(line.get("iteration")) is not int:
                break
            lines.append(line)
        return lines

    def rewind_metrics(self, iteration: int) -> None:
        """Drops the lines after an iteration, for those iterations will be run again."""
        kept = [json.dumps(line) + "\n" for line in self.read_metrics() if line["iteration"] <= iteration]
        write_atomic(self.metrics, lambda p: p.write_text("".join(kept), encoding="utf-8"))

    def save_failed_batch(
        self, name: str, edits: list[torch.Tensor], sources: list[torch.Tensor], rows: list[dict[str, Any]], trace: str
    ) -> Path:
        """Keeps the batch on which a reward failed, and the traceback, for a look at them; returns their folder."""
        folder = self.path / "failed_batch" / name
        for role, images in (("edit", edits), ("source", sources)):
            for index, image in enumerate(images):
                write_image(folder / f"{index:03d}_{role}.png", to_image(torch.nan_to_num(image)))
        write_json(folder / "batch.json", rows)
        write_atomic(folder / "traceback.txt", lambda p: p.write_text(trace, encoding="utf-8"))
        return folder


def _lock_folder(path: Path) -> int | None:
    """`files.lock_folder`, with its errors in one sentence.

    Raises:
        RunError: when another process holds it.
    """
    with disk_errors(path):
        try:
            handle = files.lock_folder(path)
        except BlockingIOError as error:
            raise RunError(f"Another run is writing to {path}; wait for it, stop it, or give another --output_dir.") from error
    if handle is None and sys.platform != "win32":
        log.warning("%s cannot be locked; see to it that no other run writes to it.", path)
    return handle
