"""How a long job is asked to stop: at a point where nothing is half done, so that a checkpoint can be taken."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Self

import psutil


class Interrupted(Exception):
    """The user asked the run to stop (Ctrl-C or SIGTERM)."""


class StopSignal:
    """Ctrl-C and SIGTERM as a wish that the loop asks for at points where nothing is half done.

    The second signal raises KeyboardInterrupt at once. A run whose ``accelerate launch`` has gone stops too: a SIGTERM
    to the launcher, which is what a scheduler sends, does not reach the process that trains.

    Args:
        alone: whether :meth:`check` raises; with several processes they have to agree first.
        first: what happens before the job ends, for the line that a signal prints.
    """

    def __init__(self, alone: bool = True, first: str = "what is done is kept") -> None:
        self._alone = alone
        self._line = f"\nStopping: {first}; once more stops at once.\n".encode()
        self._signalled = False
        self._launcher = _launcher()
        self._old: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self._signalled or (self._launcher is not None and os.getppid() != self._launcher)

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
        # os.write, for a print may be interrupted by this very handler.
        os.write(2, self._line)

    def check(self) -> None:
        """Raises Interrupted when a stop was asked for, and no other process has to agree."""
        if self.requested and self._alone:
            raise Interrupted


def _launcher() -> int | None:
    """The process number of the ``accelerate launch`` that started this process, or None."""
    try:
        parent = psutil.Process(os.getppid())
        command = parent.cmdline()
    except psutil.Error:
        return None
    launches = "launch" in command and any("accelerate" in os.path.basename(part) for part in command)
    return parent.pid if launches else None
