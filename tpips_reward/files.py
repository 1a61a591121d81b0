"""Files that are there as a whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tpips_reward.errors import TPIPSError

#: Begins the names of temporary files; what a killed process left can be told by it.
TEMPORARY = ".tmp-"
#: On the usual file systems: in bytes, on Windows in letters of UTF-16.
_LONGEST_NAME = 255


def check_writable(folder: Path | None, file: Path | None = None) -> None:
    """Refuses output paths that cannot be written, before hours have gone into what belongs there.

    Args:
        folder: that is to be made, with those above it, or that is there.
        file: that is to be written, in a folder that is made too.

    Raises:
        TPIPSError: the folder, or one above it, is a file or a link to nothing; the file is a folder; a name is none that a
            file can have; or nothing may be written there.
    """
    for path in (folder, file):
        if path is not None and not _can_be_named(path):
            raise TPIPSError(f"{str(path)[:80]!r} has a name that no file can have; give another path for the output.")
    for path in (folder, file.parent if file else None):
        taken = next((p for p in (path, *path.parents) if os.path.lexists(p)), None) if path else None
        if taken is None:
            continue
        if not taken.is_dir():
            kind = "a file" if os.path.exists(taken) else "a link to nothing"
            raise TPIPSError(f"{path} cannot be a folder, since {taken} is {kind}; give another path for the output.")
        if not os.access(taken, os.W_OK | os.X_OK):
            raise TPIPSError(f"The folder {taken} may not be written to; mend its rights, or give another path for the output.")
    if file is not None and file.is_dir():
        raise TPIPSError(f"{file} is a folder; name a file for the output.")


def _can_be_named(path: Path) -> bool:
    try:
        return all(_length(name) <= _LONGEST_NAME and "\0" not in name for name in path.parts)
    except UnicodeEncodeError:
        return False


def _length(name: str) -> int:
    return len(name.encode("utf-16-le", "surrogatepass")) // 2 if os.name == "nt" else len(os.fsencode(name))


def lock_folder(folder: Path, *, wait: bool = False) -> int | None:
    """Takes a lock on a folder itself, which leaves no file behind and ends with the process.

    Args:
        wait: until another process gives it back.

    Returns:
        What `os.close` gives back; None where the system or the file system has no locks.

    Raises:
        BlockingIOError: another holds it, and ``wait`` is False.
        OSError: the folder cannot be opened.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        os.close(handle)
        return None
    return handle


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


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with all that is in it; nothing there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
