"""The folder of a report: who may use it, and what in it belongs to an evaluation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.rows import Dataset
from tpips_reward.files import TEMPORARY

CACHE_NAME = "cache"
ASPECTS_NAME = "aspects.jsonl"
#: How each file of a report begins, by which one that an evaluation has written is told from a user's own.
_BEGINNINGS = {
    "report.html": b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"',
    "report.json": b'{\n "format": 1,\n "name": "',
    "report.md": b"# Edits of ",
    "summary.csv": b"model,control,expected,scored,",
    "rows.csv": b"key,model,category,preservation,",
    "aspects.csv": b"key,model,category,role,aspect,",
    "differences.csv": b"by,name,first,second,measure,",
    "problems.csv": b"problem,key,model,left_out,",
}
REPORT_NAMES = tuple(_BEGINNINGS)
#: What a process that was killed left of a file of a report, or of the aspects beside it.
_LEFTOVER = re.compile(re.escape(TEMPORARY) + r"[a-z0-9_]{8}\.(html|json|md|csv|jsonl)")
#: `ScoreCache` keeps a folder a metric, and in it a file a source.
_METRIC, _SCORES = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{32}\.json")


def keep_inputs(dataset: Dataset, folder: Path, aspects: Path) -> None:
    """Refuses an evaluation that would replace what it reads.

    Args:
        dataset: what is to be scored.
        folder: of the report; need not exist.
        aspects: the file of proposed aspects, which is read and written.

    Raises:
        TPIPSError: a file of the data set is the aspects file, or it or the aspects file is one that a report has, under
            whatever path; the folder cannot be read.
    """
    files = list(dataset.files())
    try:
        report = [*(folder / name for name in REPORT_NAMES), *_leftovers(folder), *_cached(folder / CACHE_NAME)]
    except OSError as error:
        raise _unusable(folder, error) from error
    keep_files([*files, aspects], report, "The report", "--output")
    keep_files(files, [aspects], "The file of proposed aspects", "--aspects")


def keep_files(read: Iterable[Path], written: Iterable[Path], what: str, option: str) -> None:
    """Refuses to write files that are read.

    Args:
        read: files that must stay.
        written: files that will be replaced or removed where they exist.
        what: is written, for the message.
        option: that names another place for it.

    Raises:
        TPIPSError: a file is in both, under whatever path.
    """
    taken = {_identity(path) for path in written}
    for path in read:
        if _identity(path) in taken:
            raise TPIPSError(f"{what} would replace {path}, which it is made from; give another {option}.")


def open_folder(folder: Path, *, overwrite: bool = False, resume: bool = False) -> Path:
    """Makes the folder, or checks that one that exists may be used; removes nothing. Where proposed aspects are all that
    lies there, nothing would be lost: every evaluation reads and keeps them.

    Args:
        folder: of the report.
        overwrite: the report and the cached scores that are there may be replaced (`clear_folder`).
        resume: go on with what is there.

    Raises:
        TPIPSError: it holds anything else and neither was said, both were said, it is a file, it holds files with the report's names
            that no evaluation has written, or it cannot be written.
    """
    if overwrite and resume:
        raise TPIPSError("--overwrite (overwrite=True) starts anew and --resume (resume=True) goes on; give one of the two.")
    if folder.exists() and not folder.is_dir():
        raise TPIPSError(f"{folder} is a file; name a folder for the report.")
    try:
        there = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
        if set(there) - {ASPECTS_NAME} and not (overwrite or resume):
            raise TPIPSError(_refusal(folder, there))
        foreign = _foreign(folder, there)
        if foreign:
            raise TPIPSError(f"{folder / foreign[0]} would be replaced, and no evaluation has written it as it is; move it, or give another --output.")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def clear_folder(folder: Path) -> None:
    """Removes the report and the cached scores of an earlier evaluation, and what a killed one left of them; nothing
    else, the aspects file neither.

    Raises:
        TPIPSError: the disk refuses.
    """
    try:
        for path in [*(folder / name for name in REPORT_NAMES), *_leftovers(folder)]:
            path.unlink(missing_ok=True)
        _clear_cache(folder / CACHE_NAME)
    except OSError as error:
        raise TPIPSError(f"The folder {folder} cannot be cleared: {error.strerror or error}.") from error


def _identity(path: Path) -> tuple[int, int] | str:
    """What is the same for all the paths of a file: links, and another case on file systems that ignore it."""
    try:
        status = path.stat()
    except OSError:  # it is not there yet
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def _foreign(folder: Path, there: Iterable[str]) -> list[str]:
    """The names of a report's files that no evaluation has written, each judged by itself: a finished evaluation may have
    been here, or one that did not finish, and a user may have put a file there since."""
    return [name for name in sorted(set(there) & set(REPORT_NAMES)) if not _is_ours(folder / name)]


def _is_ours(path: Path) -> bool:
    mark = _BEGINNINGS[path.name]
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(mark)) == mark


def _leftovers(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob(f"{TEMPORARY}*")) if _LEFTOVER.fullmatch(path.name) and path.is_file()]


def _cached(cache: Path) -> list[Path]:
    """The files of ours: cached scores, and what a killed process left of them."""
    homes = [home for home in sorted(cache.glob("*")) if _METRIC.fullmatch(home.name) and home.is_dir()]
    files = [file for home in homes for file in sorted(home.iterdir())]
    return [file for file in files if _SCORES.fullmatch(file.name) or file.name.startswith(TEMPORARY)]


def _clear_cache(cache: Path) -> None:
    """Removes the files of ours and the folders that are empty then; `cache` may be a user's own."""
    files = _cached(cache)
    for file in files:
        file.unlink()
    for home in [*dict.fromkeys(file.parent for file in files), *([cache] if files else [])]:
        if not home.is_symlink() and not any(home.iterdir()):
            home.rmdir()


def _unusable(folder: Path, error: OSError) -> TPIPSError:
    return TPIPSError(f"The folder {folder} cannot be used: {error.strerror or error}.")


def _refusal(folder: Path, there: list[str]) -> str:
    foreign = _foreign(folder, there)
    if "report.json" in there and "report.json" not in foreign:
        return f"{folder} holds a report; give --overwrite (in Python overwrite=True) to replace it, or another --output."
    ours = {CACHE_NAME, ASPECTS_NAME, *REPORT_NAMES, *(path.name for path in _leftovers(folder))}
    whole = CACHE_NAME not in there or _cached(folder / CACHE_NAME)
    if set(there) <= ours and whole and not foreign:
        return (
            f"{folder} holds an evaluation that did not finish; give --resume (in Python resume=True) to go on, or --overwrite "
            "(overwrite=True) to start anew."
        )
    return f"{folder} is not empty ({there[0]}); give another --output, or --overwrite (in Python overwrite=True) to write into it all the same."
