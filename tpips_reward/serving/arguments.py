"""The options of `tpips-reward serve`; importing this is quick."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds everything but --device, --dtype and --revision, which all commands share."""
    command.add_argument(
        "--reward", default="tpips:preserve", help="for requests that name none (default: tpips:preserve)"
    )
    command.add_argument(
        "--metric", default="builtin:late", help="builtin:late, released:late (or mid, early), a Hub id or a folder"
    )
    command.add_argument("--gate", default="change", help="change or none, as in docs/rewards.md (default: change)")
    command.add_argument("--gate-threshold", type=float, help="the change that opens the gate (default: the metric's)")
    command.add_argument("--gate-weight", type=float, default=1.0, help="what a closed gate costs (default: 1)")
    command.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    command.add_argument("--token-file", type=Path,
                         help="a file with the token that clients must send (or the environment's TPIPS_REWARD_TOKEN)")  # fmt: skip
    command.add_argument("--max-body-mb", type=float, default=64, help="of one request (default: 64)")
    command.add_argument("--max-pixels", type=int, default=4096 * 4096, help="of one image (default: 16777216)")
    command.add_argument("--max-items", type=int, default=256, help="of one request (default: 256)")
    command.add_argument("--max-batch", type=int, default=32, help="items in one call of the reward (default: 32)")
    command.add_argument("--max-queue", type=int, default=1024, help="items that may wait (default: 1024)")
    command.add_argument("--batch-wait-ms", type=float, default=5, help="for a batch to fill (default: 5)")
    command.add_argument("--max-connections", type=int, default=512, help="open at one time (default: 512)")
    command.add_argument("--head-timeout", type=float, default=10,
                         help="seconds for a client to send the head of a request (default: 10)")  # fmt: skip
    command.add_argument("--body-timeout", type=float, default=30, help="seconds for a client to send (default: 30)")
    command.add_argument("--score-timeout", type=float, default=300,
                         help="seconds for a batch before the worker is replaced (default: 300)")  # fmt: skip
