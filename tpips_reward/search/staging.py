"""A folder that is built beside its place and takes it as a whole; what a killed process has left is cleared."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from socket import gethostname

from tpips_reward.errors import TPIPSError
from tpips_reward.files import TEMPORARY, lock_folder

#: Bytes of the output's name in the staging folder's.
_SHOWN = 100


class Staged:
    """A folder that takes its place when the block ends well, and is gone when it does not.

    Args:
        output: its place.
        check: raises where it may not take that place; asked again at the end, since somebody may have come meanwhile.
    """

    def __init__(self, output: Path, check: Callable[[], None]) -> None:
        self.output, self._check = output, check

    def __enter__(self) -> Path:
        prefix = _prefix(self.output.name)
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            _clear_killed(self.output, prefix)
            while True:
                self.staging = Path(tempfile.mkdtemp(dir=self.output.parent, prefix=prefix))
                try:
                    self._lock = lock_folder(self.staging, wait=True)
                except FileNotFoundError:
                    continue
                if self.staging.exists():  # not taken for a killed one's before it was locked
                    return self.staging
                _unlock(self._lock)
        except OSError as error:
            raise TPIPSError(f"{self.output} cannot be written ({error.strerror or error}); give another --output.") from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        old = self.staging.with_name(self.staging.name + "-old")
        try:
            if kind is None:
                self.staging.chmod(0o777 & ~_umask())
                self._check()
                if self.output.exists():
                    os.replace(self.output, old)
                os.replace(self.staging, self.output)
        except OSError as error:
            raise TPIPSError(
                f"The index cannot take its place at {self.output} ({error.strerror or error}); what was there is kept."
            ) from error
        finally:
            if self.staging.exists() and old.exists():  # Ctrl-C between the two moves, or the second failed
                os.replace(old, self.output)
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(self.staging, ignore_errors=True)  # where it has not become the output
            _unlock(self._lock)


def _prefix(name: str) -> str:
    """What the staging folders of one output begin with on one machine: on a shared disk, a lock may count on one only.

    A name may be so long that nothing can be added to it, so it is cut; the digest keeps outputs apart, and machines.
    """
    whole = os.fsencode(name)
    digest = hashlib.sha256(os.fsencode(gethostname()) + b"\0" + whole).hexdigest()[:8]
    return f"{TEMPORARY}{whole[:_SHOWN].decode(errors='ignore')}-{digest}-"


def _clear_killed(output: Path, prefix: str) -> None:
    """Removes what killed builds of the same output have left on this machine: nobody holds the lock on their folders.

    What a build had moved aside stays until there is an output again: it may be the only one.
    """
    own = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}(-old)?")
    for path in output.parent.glob(f"{glob.escape(prefix)}*"):
        if not own.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        if path.name.endswith("-old") and not output.exists():
            continue
        try:
            handle = lock_folder(path)
        except OSError:  # somebody holds it, or has removed it
            continue
        if handle is not None:  # where there are no locks nobody knows
            shutil.rmtree(path, ignore_errors=True)
        _unlock(handle)


def _unlock(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
