"""The folder of a report: who may use it, and what in it belongs to an evaluation."""

from __future__ import annotations

import shutil
from pathlib import Path

from tpips_reward.errors import TPIPSError

CACHE_NAME = "cache"
ASPECTS_NAME = "aspects.jsonl"
REPORT_NAMES = ("report.html", "report.json", "report.md", "summary.csv", "rows.csv", "aspects.csv", "differences.csv",
                "problems.csv")  # fmt: skip


def open_folder(folder: Path, *, overwrite: bool = False, resume: bool = False) -> Path:
    """Makes the folder, or checks that one that exists may be used.

    Args:
        folder: of the report.
        overwrite: remove the report and the cached scores that are there; nothing else is touched, the aspects file
            neither.
        resume: keep the cached scores.

    Raises:
        TPIPSError: it exists and neither was said, both were said, it is a file, or it cannot be written.
    """
    if overwrite and resume:
        raise TPIPSError("--overwrite starts anew and --resume goes on; give one of the two.")
    if folder.exists() and not folder.is_dir():
        raise TPIPSError(f"{folder} is a file; name a folder for the report.")
    try:
        there = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
        if there and not (overwrite or resume):
            raise TPIPSError(_refusal(folder, there))
        folder.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for name in REPORT_NAMES:
                (folder / name).unlink(missing_ok=True)
            if (folder / CACHE_NAME).is_dir():
                shutil.rmtree(folder / CACHE_NAME)
    except OSError as error:
        raise TPIPSError(f"The folder {folder} cannot be used: {error.strerror or error}.") from error
    return folder


def _refusal(folder: Path, there: list[str]) -> str:
    if "report.json" in there:
        return f"{folder} holds a report; give --overwrite to replace it, or another --output."
    if set(there) <= {CACHE_NAME, ASPECTS_NAME}:
        return (
            f"{folder} holds an evaluation that did not finish; give --resume to go on, or --overwrite to start anew."
        )
    return f"{folder} is not empty ({there[0]}); give another --output, or --overwrite to write into it all the same."
