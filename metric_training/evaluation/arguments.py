"""What the evaluating commands have in common on their command lines, and what they make of it."""

from __future__ import annotations

import argparse
from typing import get_args

from metric_training.data.comparison import Task
from metric_training.data.sources import DataOptions
from metric_training.evaluation.baselines import BASELINES, UNTRAINED, VLM_SCORE, VLM_TRIPLET
from metric_training.evaluation.runner import DEFAULT_IMAGES_PER_CALL
from tpips_reward import TPIPSError
from tpips_reward.arguments import add_device_arguments, check_at_least


def add_metric_argument(parser: argparse.ArgumentParser) -> None:
    """--metric, repeated for several: judges by name, see `evaluation.baselines.load_judge`."""
    parser.add_argument(
        "--metric",
        action="append",
        help=f"anything that load_metric takes, {UNTRAINED}SOURCE, {', '.join(BASELINES)}, {VLM_SCORE}MODEL, "
        f"{VLM_TRIPLET}MODEL (a Hub id, a folder, or http://HOST:PORT/v1#MODEL); several by repeating it "
        "(default: builtin:late)",
    )


def add_reading_arguments(parser: argparse._ActionsContainer, split: str | None, split_help: str) -> None:
    """How files are read: --split, --image_root, --limit, --strict."""
    parser.add_argument("--split", default=split, help=split_help)
    parser.add_argument("--image_root", help="where relative image paths start (default: the data's own folder)")
    parser.add_argument("--limit", type=int, help="at most so many comparisons (or queries, pairs) of a set from files")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad row or image")


def add_vote_arguments(parser: argparse._ActionsContainer, split: str, seed: int, seed_help: str) -> None:
    """What `data.sources.load_data` needs to know about a set of votes beside its name; see `data_options`."""
    add_reading_arguments(parser, split, f"of a set with several splits (default: {split})")
    parser.add_argument("--task", choices=get_args(Task), help="of a set from files (default: by its columns)")
    parser.add_argument("--columns", help="2AFC columns by role: reference=photo,candidate_0=left,candidate_1=right")
    parser.add_argument("--revision", help="of a data set on the Hub")
    parser.add_argument("--seed", type=int, default=seed, help=seed_help)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """How metrics run: --device, --dtype, --images_per_call."""
    add_device_arguments(parser)
    parser.add_argument("--images_per_call", type=int, default=DEFAULT_IMAGES_PER_CALL, help="distinct images at once")


def check_run(options: argparse.Namespace, *more: str) -> None:
    """Refuses numbers below 1 among these flags and those of the functions above.

    Raises:
        TPIPSError: naming the flag.
    """
    check_at_least(options, 1, "images_per_call", "limit", *more)


def data_options(options: argparse.Namespace, count: int, wordings: str = "train") -> DataOptions:
    """The flags of `add_vote_arguments` as `load_data` takes them.

    Args:
        count, wordings: of a procedural set.

    Raises:
        TPIPSError: --columns that are none, or a negative seed.
    """
    check_at_least(options, 0, "seed")
    return DataOptions(
        count=count,
        seed=options.seed,
        wordings=wordings,
        split=options.split,
        image_root=options.image_root,
        strict=options.strict,
        revision=options.revision,
        task=options.task,
        columns=_columns(options.columns),
        limit=options.limit,
    )


def _columns(text: str | None) -> dict[str, str]:
    pairs = [part.partition("=") for part in (text or "").split(",") if part.strip()]
    bad = [role for role, equals, column in pairs if not equals or not column.strip()]
    if bad:
        raise TPIPSError(f"--columns has {bad[0]!r}; write role=column, separated by commas.")
    return {role.strip(): column.strip() for role, _, column in pairs}
