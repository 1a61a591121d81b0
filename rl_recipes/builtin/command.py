"""The command line that the trainings of the built-in parts share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rl_recipes.runs import Interrupted
from tpips_reward.errors import TPIPSError

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
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the weights and figures")
    parser.add_argument("--minutes", type=float, help="train for so many minutes")
    parser.add_argument("--steps", type=int, help="train for so many steps (the same weights on every run)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --output")
    parser.add_argument("--overwrite", action="store_true", help="start anew in an --output that holds a training")
    for name, default in asdict(settings).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="(%(default)s)")
    return parser


def chosen_settings(args: argparse.Namespace, default: S) -> S:
    """The settings that the flags say, of the class of ``default``."""
    return type(default)(**{name: getattr(args, name) for name in asdict(default)})  # type: ignore[call-overload]


def run_training(training: Training, args: argparse.Namespace, run: Callable[[], dict[str, Any]]) -> None:
    """Starts or resumes, runs to the end and prints the figures; after Ctrl-C says how to go on.

    Raises:
        TPIPSError: when --output holds a training and neither --resume nor --overwrite is given.
    """
    if not (args.resume or args.overwrite) and (args.output / "checkpoint.pt").exists():
        raise TPIPSError(
            f"--output {args.output} holds a training; --resume goes on with it, --overwrite starts anew, or give another."
        )
    if args.resume:
        training.resume()
    else:
        training.start()
    try:
        print(json.dumps(run(), indent=2))
    except Interrupted:
        print(f"Stopped. Go on with --resume --output {args.output}.")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns an error that the user can mend into one line and exit code 2."""
    try:
        yield
    except TPIPSError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
