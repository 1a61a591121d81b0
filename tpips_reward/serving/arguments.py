"""The options of `tpips-reward serve`; importing this is quick."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds everything but --device, --dtype and --revision, which all commands share."""
    command.add_argument(
        "--reward", default="tpips:preserve", help="for requests that name none"
    )
    command.add_argument(
        "--metric", default="builtin:late", help="builtin:late, released:late (or mid, early), a Hub id or a folder"
    )
    command.add_argument("--gate", default="change", help="change or none, as in docs/rewards.md")
    command.add_argument("--gate-threshold", type=float, help="the change that opens the gate (default: the metric's)")
    command.add_argument("--gate-weight", type=float, default=1.0, help="what a closed gate costs")
    command.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    command.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    command.add_argument("--token-file", type=Path,
                         help="a file with the token that clients must send (or the environment's TPIPS_REWARD_TOKEN)")  # fmt: skip
    command.add_argument("--max-body-mb", type=float, default=64, help="of one request")
    command.add_argument("--max-pixels", type=int, default=4096 * 4096, help="of one image")
    command.add_argument("--max-items", type=int, default=256, help="of one request")
    command.add_argument("--max-batch", type=int, default=32, help="items in one call of the reward")
    command.add_argument("--max-queue", type=int, default=1024, help="items that may wait")
    command.add_argument("--batch-wait-ms", type=float, default=5, help="for a batch to fill")
    command.add_argument("--max-connections", type=int, default=512, help="open at one time")
    command.add_argument("--head-timeout", type=float, default=10,
                         help="seconds for a client to send the head of a request")  # fmt: skip
    command.add_argument("--body-timeout", type=float, default=30, help="seconds for a client to send")
    command.add_argument("--score-timeout", type=float, default=300,
                         help="seconds for a batch before the worker is replaced")  # fmt: skip
