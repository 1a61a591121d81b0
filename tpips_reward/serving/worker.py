"""The process that holds the metric. It may die and be replaced without the server, its clients or their items dying."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from tpips_reward.adapters.core import RewardCall
from tpips_reward.errors import NotFinite, TPIPSError
from tpips_reward.rewards.reward import TPIPSReward
from tpips_reward.serving.errors import bad_field, failed
from tpips_reward.serving.items import Answer, Item, split_output

LOAD_SECONDS = 3600.0  # 16 GB from a slow disk


class WorkerDied(Exception):
    """The worker's process is gone, or did not answer in time; it has to be started again."""


class Rewards(Protocol):
    """What a worker holds: rewards by their spec, all on one metric."""

    facts: dict[str, Any]

    def of(self, spec: str) -> RewardCall: ...


@dataclass(frozen=True)
class RewardSource:
    """How a worker gets its rewards; sent to the process, which calls it.

    Attributes:
        metric, device, dtype, revision: as for `load_metric`.
        gate, gate_threshold, gate_weight: as for `TPIPSReward`.
    """

    metric: str = "builtin:late"
    device: str | None = None
    dtype: str | None = None
    revision: str | None = None
    gate: str = "change"
    gate_threshold: float | None = None
    gate_weight: float = 1.0

    def __call__(self) -> Rewards:
        from transformers.utils import logging

        from tpips_reward.checkpoints import load_metric

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        metric = load_metric(self.metric, device=self.device, dtype=self.dtype, revision=self.revision)
        options = {"gate": self.gate, "gate_threshold": self.gate_threshold, "gate_weight": self.gate_weight}
        facts = {
            "metric": shown_name(self.metric),
            "fusion": metric.fusion.kind,
            "device": str(metric.device),
            "change_scale": metric.change_scale,
        }
        return MetricRewards(metric, options, facts)


def shown_name(metric: str) -> str:
    """What clients may know of a metric's name: the last part of a path, which may say where the server keeps things.

    A built-in name ("builtin:late") and a Hub id ("owner/name") are public and stay whole.
    """
    is_path = Path(metric).exists() or metric.startswith((".", "~", "/")) or metric.count("/") > 1
    return Path(metric).expanduser().resolve().name if is_path else metric


class MetricRewards:
    """Rewards of any spec on one metric."""

    def __init__(self, metric: Any, options: dict[str, Any], facts: dict[str, Any]) -> None:
        self.facts = facts
        self._make = lru_cache(maxsize=64)(lambda spec: TPIPSReward(spec, metric, **options))

    def of(self, spec: str) -> RewardCall:
        """The reward of a spec, made once."""
        return self._make(spec)


def score_items(rewards: Rewards, items: Sequence[Item]) -> list[Answer]:
    """One answer an item, in order; items of one reward are scored in one call.

    Where a call fails its items are scored in halves, so that an error stays with the item that has it. An error of the
    device is raised: after it no call succeeds in this process, which has to end and be replaced.
    """
    answers: dict[int, Answer] = {}
    for spec in dict.fromkeys(item.reward for item in items):
        members = [index for index, item in enumerate(items) if item.reward == spec]
        found = _score(rewards.of(spec), [items[index] for index in members])
        answers.update(zip(members, found, strict=True))
    return [answers[index] for index in range(len(items))]


def _score(reward: RewardCall, items: list[Item]) -> list[Answer]:
    try:
        output = reward(
            [item.image for item in items],
            [item.source for item in items],
            preserve=[list(item.preserve) for item in items],
            target=[list(item.target) for item in items],
            target_images=[item.target_image for item in items] if any(i.target_image for i in items) else None,
        )
        return split_output(output)
    except Exception as error:  # whatever else it is, it belongs to one item
        if _is_of_device(error):
            raise
        if len(items) > 1:
            middle = len(items) // 2
            return _score(reward, items[:middle]) + _score(reward, items[middle:])
        if isinstance(error, TPIPSError) and not isinstance(error, NotFinite):  # that one is the weights' fault
            return [bad_field(str(error))]
        return [failed("The reward failed on this item.", error)]


def _is_of_device(error: Exception) -> bool:
    """Whether the device's context is lost ("CUDA error: an illegal memory access ..."). Too little memory is not that."""
    if any(words in str(error) for words in ("out of memory", "ALLOC_FAILED")):  # of CUDA itself, of cuBLAS, of cuDNN
        return False
    kind = getattr(torch, "AcceleratorError", ())  # torch >= 2.8
    return isinstance(error, kind) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))


class WorkerProcess:
    """A process with rewards; `start` it, let it `score`, `stop` it. Only `stop` may come from another thread.

    Args:
        source: called in the process; must be picklable.
        seconds: for one call of `score`.
    """

    def __init__(self, source: Callable[[], Rewards], seconds: float) -> None:
        self.source = source
        self.seconds = seconds
        self.facts: dict[str, Any] = {}
        self._busy = False
        self._process: Any = None
        self._pipe: Connection | None = None
        atexit.register(self.stop)  # before multiprocessing's own, which waits for a process that ignores its signal

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Starts the process and waits until it can score.

        Raises:
            TPIPSError: what loading raised.
            WorkerDied: the process ended while loading, such as by `stop` in another thread.
        """
        self.stop()
        context = multiprocessing.get_context("spawn")  # a forked CUDA context cannot be used
        pipe, theirs = context.Pipe()
        try:
            process = context.Process(target=_work, args=(theirs, self.source), daemon=True)
            process.start()
        except BaseException:  # no memory, no more files: nothing of this attempt stays
            pipe.close()
            raise
        finally:
            theirs.close()
        self._process, self._pipe = process, pipe
        self._busy = True  # it looks at nothing while it loads
        try:
            kind, content = _receive(process, pipe, LOAD_SECONDS)
        finally:
            self._busy = False
        if kind != "ready":
            self.stop()
            raise TPIPSError(content)
        self.facts = content

    def score(self, items: Sequence[Item]) -> list[Answer]:
        """One answer an item.

        Raises:
            WorkerDied: the process is gone or silent.
        """
        process, pipe = self._process, self._pipe  # `stop` may come from another thread at any time
        if process is None or pipe is None:
            raise WorkerDied("the worker is not running")
        self._busy = True
        try:
            pipe.send(list(items))
            return _receive(process, pipe, self.seconds)[1]
        except (OSError, ValueError) as error:
            raise WorkerDied(str(error)) from error
        finally:
            self._busy = False

    def stop(self) -> None:
        """Ends the process, at once where it is busy: a thread that waits for its answer gets a WorkerDied."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is None or pipe is None:
            return
        if not self._busy:
            pipe.close()
            process.join(timeout=2)
        if process.is_alive():
            process.kill()
            process.join()
        pipe.close()


def _receive(process: Any, pipe: Connection, seconds: float) -> tuple[str, Any]:
    """What the process says within so many seconds; otherwise it is ended."""
    why = f"no answer within {seconds:g} s"
    try:
        if pipe.poll(seconds):
            return pipe.recv()
    except (EOFError, OSError):
        why = "its process ended"
    process.kill()
    process.join()
    raise WorkerDied(why)


def _work(pipe: Connection, source: Callable[[], Rewards]) -> None:
    """The process: ends when the server closes the pipe or is gone itself, and not, once it has loaded, by a signal for both."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rewards: Rewards | None = None
    try:
        rewards = source()
        loaded: tuple[str, Any] = ("ready", rewards.facts)
    except TPIPSError as error:
        loaded = ("failed", str(error))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # not before, for while it loads it does not see that the server is gone
    try:
        pipe.send(loaded)
        while rewards is not None:
            pipe.send(("scores", score_items(rewards, pipe.recv())))
    except (EOFError, OSError):
        return
