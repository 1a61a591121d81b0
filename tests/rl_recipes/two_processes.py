"""Two real processes that belong together, each of which runs a recipe several times: importing takes longer than running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

# The process group outlives a run, so that the next one in the same processes need not build another.
START = """
import os, sys
from accelerate import Accelerator
from rl_recipes import grpo_edit
Accelerator.end_training = lambda self: self.wait_for_everyone()
"""


def run_two(script: str, *arguments: str, **environment: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each of two processes that run ``script``, which begins with :data:`START`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **environment,
    }  # fmt: skip
    both = [
        subprocess.Popen(
            [sys.executable, "-c", START + script, *arguments],
            env={**shared, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        texts = [pool.submit(process.communicate) for process in both]
        try:
            wait(texts, timeout=400, return_when=FIRST_COMPLETED)
            failed = any(process.poll() for process in both)
            # Where one has failed, the other may wait for it for ever: it is given the time to fail by itself.
            wait(texts, timeout=20 if failed else 400)
            waiting = not failed and any(process.poll() is None for process in both)
        finally:
            for process in both:
                process.kill()
    if waiting:
        pytest.fail("two processes have not ended in 400 seconds: do they wait for one another?")
    return [(process.returncode, *text.result()) for process, text in zip(both, texts, strict=True)]
