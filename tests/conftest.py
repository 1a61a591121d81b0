"""For all tests: the workers of pytest-xdist share the cores, so that each computes on one."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before anything imports torch, and for the processes that tests start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
