"""Chunks of a batch side by side on a CPU's cores, each on one.

Small matrices do not fill several cores: every operator waits for its slowest thread. Whole chunks on a core each do
without that. Each chunk's result is that of one thread, so rollout and replay stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, TypeVar

import torch

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")


def map_chunks(function: Callable[[Chunk], Result], chunks: Sequence[Chunk], workers: int) -> list[Result]:
    """[function(chunk) for chunk in chunks], on ``workers`` threads with one core each; gradients are recorded as here.

    Args:
        function: must not depend on the order of its calls.
        workers: 1 calls it in this thread, with the threads that torch has.

    Raises:
        whatever ``function`` raises, for the first of its chunks that fails.
    """
    # Autocast is a thread's own setting, with a cache that cannot be handed on.
    if workers == 1 or len(chunks) == 1 or torch.is_autocast_enabled("cpu"):
        return [function(chunk) for chunk in chunks]
    results: list[Any] = [None] * len(chunks)
    errors: dict[int, Exception] = {}
    records = torch.is_grad_enabled()

    def work(first: int) -> None:
        torch.set_num_threads(1)  # a thread's own setting too: the caller keeps its own
        with torch.set_grad_enabled(records):
            for index in range(first, len(chunks), workers):
                try:
                    results[index] = function(chunks[index])
                except Exception as error:  # noqa: BLE001 - it is raised in the calling thread
                    errors[index] = error
                    return

    # New threads and a fixed share for each: autograd numbers its nodes by thread, and goes back through them by
    # number. Any other way, gradients would be summed in another order on another day.
    threads = [Thread(target=work, args=(first,), daemon=True) for first in range(min(workers, len(chunks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results
