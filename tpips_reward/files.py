"""Files that are there as a whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tpips_reward.errors import TPIPSError

#: Begins the names of temporary files; what a killed process left can be told by it.
TEMPORARY = ".tmp-"


def check_folder(path: Path) -> None:
    """Refuses a place where no folder can be.

    Raises:
        TPIPSError: the path, or one above it, is there and is no folder.
    """
    for place in (path, *path.parents):
        if place.is_dir():
            return
        if place.exists() or place.is_symlink():
            raise TPIPSError(f"{place} is no folder, so that nothing can be written to {path}; give another --output.")


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a temporary file beside ``path`` and moves it there once it is on the disk.

    Args:
        path: where the file belongs; its folder is made if it does not exist.
        write: gets the temporary path (same suffix) and writes to it.

    Raises:
        OSError: when the disk refuses, naming ``path``; an old file is untouched then, and no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY, suffix=path.suffix)
    except OSError as error:
        error.filename = str(path)  # not the temporary name
        raise
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        sync(temporary)
        make_readable(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        if error.filename in (None, str(temporary), temporary):  # a full disk names no file
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text atomically."""
    write_atomic(path, lambda p: p.write_text(text, encoding="utf-8"))


def make_readable(path: Path) -> None:
    """Gives a file the rights that ``open()`` would have given it; mkstemp and safetensors make private files."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def sync(path: Path) -> None:
    """Waits until a file's or folder's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems cannot sync folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
