"""The errors of this package: each message is a sentence that names the thing, the value and the remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Exit codes of every command: input that the user can mend, and Ctrl-C.
BAD_INPUT, INTERRUPTED = 2, 130


class TPIPSError(ValueError):
    """Base of every error that bad input raises here; a ValueError, so that generic handlers keep working."""


class NotFinite(TPIPSError):
    """A metric's number that is NaN or infinite, which is no score.

    Attributes:
        position: of the first such row among those that were asked, in the order of the answer: a pair of
            `similarity_pairs`, a triplet of `odd_one_out`; with a list of K aspects, row // K is the image or pair and
            row % K the aspect. Who asks a metric in parts has to add where the part begins.
    """

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position

    def __reduce__(self) -> tuple[Any, ...]:  # between processes
        return type(self), (str(self), self.position)


def hide_size_warnings() -> None:
    """For commands: Pillow's warning of images above its limit is not shown, since each is refused in a sentence of ours.

    It changes the whole process, so that no library may call it. A user's own `-W` stands before it.
    """
    warnings.filterwarnings("ignore", message=r"Image size \(\d+ pixels\) exceeds limit", append=True)


@contextmanager
def exit_on_errors(program: str = "error") -> Iterator[None]:
    """Ends a command with one line on stderr for an error that the user can mend, and for Ctrl-C; `hide_size_warnings`.

    A file that cannot be read or written is such an error too. Anything else is a mistake of ours, and keeps its
    traceback.

    Args:
        program: begins the line.

    Raises:
        SystemExit: with BAD_INPUT or INTERRUPTED.
    """
    hide_size_warnings()
    try:
        yield
    except TPIPSError as error:
        _leave(f"{program}: {' '.join(str(error).split())}", BAD_INPUT)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            raise
        _leave(f"{program}: {unusable(error)}", BAD_INPUT)
    except KeyboardInterrupt:
        _leave(f"{program}: interrupted", INTERRUPTED)


def reason(error: BaseException, most: int = 300) -> str:
    """What an error says, in one line, for a sentence of ours; its type where it says nothing.

    Args:
        most: characters that are kept of what other code says; our own errors end with their remedy, and are kept whole.
    """
    text = " ".join(str(error).split())
    return (text if isinstance(error, TPIPSError) else text[:most]) or type(error).__name__


def unusable(error: OSError) -> str:
    """The sentence for a file or folder that cannot be read or written; the error has its name."""
    return f"{error.filename} cannot be used: {error.strerror}; check the path, the rights and the space there."


def _leave(line: str, code: int) -> None:
    print(line, file=sys.stderr)
    raise SystemExit(code) from None
