"""For all tests: workers share the cores, and files do not share what accelerate keeps for a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before anything imports torch, and for the processes that tests start
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module", autouse=True)
def accelerate_starts_anew() -> Iterator[None]:
    """Its precision and device are those of the first `Accelerator` of a process; TRL's trainer takes bfloat16."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
