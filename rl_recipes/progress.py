"""Time: what a run has used, what is left, and what the terminal shows of it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

#: Lines that a run prints where no bar can be drawn (a log file), about.
_PLAIN_LINES = 20


class PhaseTimer:
    """Seconds by phase: ``with timer("rollout"): …``.

    On accelerators a phase ends when the device is done, not when the last kernel is queued.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device_type = device_type
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device_type == "cuda":
            import torch

            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - start

    def report(self) -> dict[str, float]:
        """``seconds`` in all, ``seconds_<phase>`` for each phase."""
        total = time.perf_counter() - self._start
        return {"seconds": total, **{f"seconds_{name}": value for name, value in self.seconds.items()}}


class Clock:
    """What a run has used of its time, earlier parts of a resumed run included.

    Attributes:
        limit: seconds for the whole run; infinite for no limit.
        earlier: seconds of the parts before this one.
        reserved: seconds kept free for the evaluation at the end.
    """

    def __init__(self, used: float = 0.0) -> None:
        self.limit = float("inf")
        self.earlier = 0.0
        self.reserved = 0.0
        self._start = time.perf_counter() - used
        self._longest = 0.0

    @classmethod
    def since_process_start(cls) -> Clock:
        """A clock that counts the imports too, as the user who waits does."""
        return cls(used=max(0.0, time.time() - psutil.Process().create_time()))

    def elapsed(self) -> float:
        """Seconds that the run has taken so far."""
        return self.earlier + time.perf_counter() - self._start

    def note(self, seconds: float) -> None:
        """Remembers what an iteration took."""
        self._longest = max(self._longest, seconds)

    def left_for(self, iterations: int, seconds_each: float) -> float:
        """Seconds until training ends: when the iterations are done, or the limit is reached."""
        return max(0.0, min(iterations * seconds_each, self.limit - self.reserved - self.elapsed()))

    def is_over(self) -> bool:
        """Whether one more iteration would take the run over its limit."""
        return self.elapsed() + self._longest + self.reserved > self.limit


class Display:
    """The terminal: a bar with the time left where there is a terminal, a few plain lines where there is none."""

    def __init__(self, total: int, enabled: bool = True) -> None:
        self.console = Console(quiet=not enabled, soft_wrap=True, highlight=False)
        self._live = enabled and self.console.is_terminal
        self._every = max(1, total // _PLAIN_LINES)
        self._total = total
        self._bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[info]}"), TimeElapsedColumn(), console=self.console, disable=not self._live,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: Any, style: str | None = None) -> None:
        """Prints a line or a table above the bar; brackets in a line are text and no markup."""
        self.console.print(text, style=style, markup=False)

    def count(self, phase: str, done: int, total: int, info: str | None = None) -> None:
        """Moves the bar of a phase such as an evaluation; without ``info`` its text stays."""
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total, info="")
        self._bar.update(self._tasks[phase], completed=done)
        if info is not None:
            self._bar.update(self._tasks[phase], info=info)

    def close(self) -> None:
        """Ends the bars, so that what is said from now on comes below them."""
        self._bar.stop()

    def iteration(self, metrics: dict[str, Any], seconds_left: float) -> None:
        """Shows one finished iteration."""
        number = metrics["iteration"]
        left = f"{int(seconds_left) // 60}:{int(seconds_left) % 60:02d} left"
        info = f"reward {metrics['reward_mean']:.3f} ± {metrics['reward_std']:.3f}  {left}"
        self.count("training", number, self._total, info)
        if not self._live and (number % self._every == 0 or number in (1, self._total)):
            self.say(f"iteration {number}/{self._total}  {info}  ({metrics['seconds']:.1f} s)")
