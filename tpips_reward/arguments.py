"""What commands have in common on their command lines; imports nothing slow."""

from __future__ import annotations

import argparse

from tpips_reward.errors import TPIPSError


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Where metrics run: --device and --dtype, as `load_metric` takes them."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: the GPU if there is one)")
    parser.add_argument("--dtype", help="float32 or bfloat16 (default: float32 on the CPU, else bfloat16)")


def check_at_least(options: argparse.Namespace, lowest: int, *names: str) -> None:
    """Refuses numbers that are too small; what was not given (None) passes.

    Raises:
        TPIPSError: naming the first flag that is.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise TPIPSError(f"--{name} must be at least {lowest}, not {value}.")
