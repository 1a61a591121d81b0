"""Dynamic batching: items of all requests wait in one queue, and each idle worker takes as many as one call scores.

Everything here runs in the server's event loop; only `worker.score` and `worker.start` run in threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from tpips_reward.errors import TPIPSError
from tpips_reward.serving.errors import RequestError, busy, failed, too_large, unavailable
from tpips_reward.serving.items import Answer, Item
from tpips_reward.serving.limits import Limits
from tpips_reward.serving.metrics import ServerMetrics
from tpips_reward.serving.worker import WorkerDied

_log = logging.getLogger("tpips_reward.serving")
#: A worker may die of anything once; an item that kills it when it is scored alone, too, is given up.
DEATHS_OF_AN_ITEM = 2
#: Failed attempts to start a worker again before the items that wait are told so.
FAILED_STARTS = 3
LONGEST_PAUSE = 30.0
#: So often an idle worker is looked at, which nobody else would see die.
CHECK_SECONDS = 0.5


class Worker(Protocol):
    """What a batcher needs of a worker; `WorkerProcess` has it."""

    facts: dict[str, Any]

    @property
    def is_alive(self) -> bool: ...

    def start(self) -> None: ...

    def score(self, items: Sequence[Item]) -> list[Answer]: ...

    def stop(self) -> None: ...


@dataclass(eq=False)
class _Job:
    item: Item
    future: asyncio.Future[Answer]
    since: float = field(default_factory=time.monotonic)
    deaths: int = 0


class Batcher:
    """A queue in front of workers.

    Args:
        workers: started ones; one batch at a time each.
    """

    def __init__(self, workers: Sequence[Worker], limits: Limits, metrics: ServerMetrics) -> None:
        self.workers = workers
        self.limits = limits
        self.metrics = metrics
        self._pending: deque[_Job] = deque()
        self._changed = asyncio.Condition()
        self._items = self._pixels = 0  # admitted and not yet answered
        self._rate = 0.0  # items a second, of the last batches
        self._down: set[Worker] = set()  # these have to be started again
        self._closing = False
        self._threads = ThreadPoolExecutor(len(workers), thread_name_prefix="worker")
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def _ready(self) -> int:
        return len(self.workers) - len(self._down)

    @property
    def is_ready(self) -> bool:
        """Whether any worker can score."""
        return self._ready > 0 and not self._closing

    def open(self) -> None:
        """Begins to serve; to be called in the event loop."""
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in self.workers]
        self.metrics.workers.set(self._ready)

    async def close(self) -> None:
        """Answers everything that was accepted, and ends the workers; those at once that are started for nobody."""
        async with self._changed:
            self._closing = True
            self._changed.notify_all()
        while not all(task.done() for task in self._tasks):
            if self._is_done():  # again and again, for a start whose process is not there yet does not see it
                # not in the batcher's own threads: the starts have them
                await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in self._down))
            await asyncio.wait(self._tasks, timeout=CHECK_SECONDS)
        await asyncio.gather(*self._tasks)
        self._give_up(WorkerDied("the server closed"))  # what the last one put back when it died
        for worker in self.workers:
            await asyncio.get_running_loop().run_in_executor(self._threads, worker.stop)
        self._threads.shutdown()

    def admit(self, items: int, pixels: int) -> None:
        """Takes places in the queue; give them back with `release`.

        Raises:
            RequestError: 413 where the queue could never hold that many; 429 where it is full now; 503 where the
                server is stopping.
        """
        if self._closing:
            raise unavailable("The server is stopping.")
        if items > self.limits.queue or pixels > self.limits.queue_pixels:
            raise too_large(
                f"The request has {items} items and {pixels} pixels; the whole queue holds {self.limits.queue} items "
                f"and {self.limits.queue_pixels} pixels: send it in parts."
            )
        if self._items + items > self.limits.queue or self._pixels + pixels > self.limits.queue_pixels:
            wait = self._items / self._rate if self._rate else 1.0
            raise busy(f"The queue is full ({self._items} items).", min(60.0, math.ceil(max(1.0, wait))))
        self._items += items
        self._pixels += pixels
        self.metrics.queued.set(self._items)

    def release(self, items: int, pixels: int) -> None:
        """Gives places back."""
        self._items -= items
        self._pixels -= pixels
        self.metrics.queued.set(self._items)

    async def score(self, items: Sequence[Item]) -> list[Answer]:
        """One answer an item. Cancelling it takes the items out of the queue that no worker has yet."""
        loop = asyncio.get_running_loop()
        jobs = [_Job(item, loop.create_future()) for item in items]
        async with self._changed:
            self._pending.extend(jobs)
            self._changed.notify_all()
        try:
            return list(await asyncio.gather(*(job.future for job in jobs)))
        except asyncio.CancelledError:
            for job in jobs:
                job.future.cancel()
            raise

    async def _serve(self, worker: Worker) -> None:
        while True:
            try:
                jobs = await self._take(worker)
            except WorkerDied as death:
                goes_on = await self._restart(worker, death)
            else:
                goes_on = bool(jobs) and await self._score(worker, jobs)
            if not goes_on:
                return

    async def _take(self, worker: Worker) -> list[_Job]:
        """The next batch; empty once the server is closing and nothing waits.

        Raises:
            WorkerDied: the worker did, while it was idle.
        """
        async with self._changed:
            while True:
                if self._is_done():
                    return []
                if not worker.is_alive:
                    raise WorkerDied("its process ended while it was idle")
                if self._pending and (self._closing or await self._filled()):
                    return self._pop()
                if not self._pending and not self._closing:
                    await self._wait(CHECK_SECONDS)

    async def _wait(self, seconds: float) -> bool:
        """Waits for a change; whether it came within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _filled(self) -> bool:
        """Waits until the batch is full or its first item has waited long enough; whether there is still a batch."""
        end = self._pending[0].since + self.limits.wait_seconds
        while self._pending and len(self._pending) < self.limits.batch and not self._closing:
            left = end - time.monotonic()
            if left <= 0 or not await self._wait(left):
                break
        self._drop_cancelled()
        return bool(self._pending)

    def _is_done(self) -> bool:
        """Whether the server is closing and nothing waits."""
        self._drop_cancelled()
        return self._closing and not self._pending

    def _drop_cancelled(self) -> None:
        if any(job.future.cancelled() for job in self._pending):
            self._pending = deque(job for job in self._pending if not job.future.cancelled())

    def _pop(self) -> list[_Job]:
        """Items that a worker died of come first (they were put back there), each alone."""
        jobs = [self._pending.popleft()]
        while not jobs[0].deaths and self._pending and len(jobs) < self.limits.batch:
            jobs.append(self._pending.popleft())
        return jobs

    async def _score(self, worker: Worker, jobs: list[_Job]) -> bool:
        """Scores a batch; whether the worker can score another."""
        begin = time.monotonic()
        for job in jobs:
            self.metrics.waiting.observe(begin - job.since)
        self.metrics.batches.observe(len(jobs))
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._threads, worker.score, [job.item for job in jobs])
            if len(answers) != len(jobs):
                raise WorkerDied(f"{len(answers)} answers for {len(jobs)} items")
        except Exception as death:  # noqa: BLE001 - no memory, no files ...: this loop must go on, or nobody is answered
            self._mourn(jobs, str(death))
            async with self._changed:
                self._changed.notify_all()
            return await self._restart(worker, death)
        seconds = time.monotonic() - begin
        self.metrics.scoring.observe(seconds)
        rate = len(jobs) * len(self.workers) / max(seconds, 1e-6)
        self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        for job, answer in zip(jobs, answers, strict=True):
            self._answer(job, answer)
        return True

    def _answer(self, job: _Job, answer: Answer) -> None:
        self.metrics.items.labels("error" if isinstance(answer, RequestError) else "scored").inc()
        if not job.future.done():
            job.future.set_result(answer)

    def _mourn(self, jobs: list[_Job], why: str) -> None:
        """Puts the items of a dead worker back to the front; what was alone when it died too often is answered."""
        for job in reversed(jobs):
            job.deaths += 1
            if job.deaths > DEATHS_OF_AN_ITEM:
                self._answer(job, failed("The worker died each time that this item was scored.", why))
            else:
                self._pending.appendleft(job)

    async def _restart(self, worker: Worker, death: Exception) -> bool:
        """Starts a worker again, with longer and longer pauses where that fails; False where the server closes first."""
        self._down.add(worker)
        self.metrics.workers.set(self._ready)
        name, begin = f"worker {self.workers.index(worker)}", time.monotonic()
        _log_death(f"{name} died", death)
        loop = asyncio.get_running_loop()
        for attempt in count(1):
            if self._is_done():
                return False
            try:
                await loop.run_in_executor(self._threads, worker.start)
                break
            except Exception as error:  # noqa: BLE001 - as above
                if self._is_done():  # `close` has ended it
                    return False
                _log_death(f"{name} could not be started again", error)
                if self._ready == 0 and (attempt >= FAILED_STARTS or self._closing):
                    self._give_up(error)
                if self._closing:
                    return False
                await self._pause(min(LONGEST_PAUSE, 2.0**attempt))
        self._down.remove(worker)
        self.metrics.restarts.inc()
        self.metrics.workers.set(self._ready)
        _log.warning("%s can score again after %.1f s", name, time.monotonic() - begin)
        return True

    async def _pause(self, seconds: float) -> None:
        """Waits so long, or until the server closes; new items do not end it, or each would cost a start."""
        async with self._changed:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait_for(lambda: self._closing)
            except TimeoutError:
                pass

    def _give_up(self, cause: Exception) -> None:
        """Tells the items that wait that no worker can score them, all with one error."""
        if self._pending:
            error = failed("The worker cannot be started again.", cause, 503, LONGEST_PAUSE)
            while self._pending:
                self._answer(self._pending.popleft(), error)


def _log_death(what: str, error: Exception) -> None:
    """One line; of the ends of a worker those that are no WorkerDied say something about the server, and have more."""
    is_surprise = not isinstance(error, (TPIPSError, WorkerDied))
    _log.warning("%s: %s", what, repr(error) if is_surprise else error, exc_info=error if is_surprise else None)
