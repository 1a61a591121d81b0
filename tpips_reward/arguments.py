"""What commands have in common on their command lines; imports nothing slow."""

from __future__ import annotations

import argparse

from tpips_reward.errors import TPIPSError


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Adds an option's default to its help, where there is one and the text does not say it; keeps a description's lines."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default is None or action.default is False or action.default == []
        return action.help if nothing or "default" in (action.help or "") else super()._get_help_string(action)


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Where metrics run: --device and --dtype, as `load_metric` takes them."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: the GPU if there is one)")
    parser.add_argument("--dtype", help="float32 or bfloat16 (default: float32 on the CPU, else bfloat16)")


def explain_negations(parser: argparse.ArgumentParser) -> None:
    """Says of each --no_FLAG that it turns FLAG off, where transformers' parser repeats the flag's own help."""
    for action in parser._actions:
        if isinstance(action, argparse._StoreFalseAction):
            action.help = f"Turns --{action.dest} off."
            action.default = argparse.SUPPRESS  # else the help would call False what is True unless it is given


def check_at_least(options: argparse.Namespace, lowest: int, *names: str) -> None:
    """Refuses numbers that are too small; what was not given (None) passes.

    Raises:
        TPIPSError: naming the first flag that is.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise TPIPSError(f"--{name} must be at least {lowest}, not {value}.")
