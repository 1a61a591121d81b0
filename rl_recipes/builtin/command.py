"""The command line that the trainings of the built-in parts share."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rl_recipes.runs import write_atomic
from tpips_reward.arguments import HelpFormatter
from tpips_reward.errors import INTERRUPTED, TPIPSError
from tpips_reward.stopping import Interrupted

S = TypeVar("S")


class Training(Protocol):
    """What a training must offer to be run from the command line."""

    def resume(self) -> None:
        """Takes up the checkpoint in the output folder."""
        ...

    def start(self) -> None:
        """Prepares what a resumed training finds in its checkpoint."""
        ...


def training_parser(text: str | None, settings: Any) -> argparse.ArgumentParser:
    """Flags for the output folder, the training's length, ``--resume``, and every field of ``settings`` (a dataclass
    instance, whose values are the defaults)."""
    parser = argparse.ArgumentParser(description=text, formatter_class=HelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the weights and figures")
    parser.add_argument("--minutes", type=float, help="train for so many minutes")
    parser.add_argument("--steps", type=int, help="train for so many steps (the same weights on every run)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --output")
    parser.add_argument("--overwrite", action="store_true", help="start anew in an --output that holds a training")
    for name, default in asdict(settings).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="(%(default)s)")
    return parser


def chosen_settings(args: argparse.Namespace, default: S) -> S:
    """The settings that the flags say, of the class of ``default``.

    Raises:
        TPIPSError: for a number that is negative or not finite, and for a count of 0.
    """
    for name, old in asdict(default).items():  # type: ignore[call-overload]
        value = getattr(args, name)
        if isinstance(old, int | float) and not (value >= 0 and math.isfinite(value)):
            raise TPIPSError(f"--{name} must be a number of at least 0, not {value}.")
        if isinstance(old, int) and old > 0 and name != "seed" and value < 1:
            raise TPIPSError(f"--{name} must be at least 1, not {value}.")
    return type(default)(**{name: getattr(args, name) for name in asdict(default)})  # type: ignore[call-overload]


def run_training(training: Training, args: argparse.Namespace, run: Callable[[], dict[str, Any]]) -> None:
    """Starts or resumes, runs to the end and prints the figures; after Ctrl-C says how to go on.

    Raises:
        TPIPSError: when --output holds a training and neither --resume nor --overwrite is given, or cannot be written to.
        SystemExit: after Ctrl-C, with exit code 130.
    """
    if not (args.resume or args.overwrite) and (args.output / "checkpoint.pt").exists():
        raise TPIPSError(
            f"--output {args.output} holds a training; --resume goes on with it, --overwrite starts anew, or give another."
        )
    # An hour's training must not end at a folder that cannot be written to.
    write_atomic(args.output / ".writable", lambda path: path.write_bytes(b""))
    (args.output / ".writable").unlink()
    if args.resume:
        training.resume()
    else:
        training.start()
    try:
        print(json.dumps(run(), indent=2))
    except Interrupted:
        print(f"Stopped. Go on with --resume --output {shlex.quote(str(args.output))}.")
        raise SystemExit(INTERRUPTED) from None

