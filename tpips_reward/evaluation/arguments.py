"""The options of `tpips-reward evaluate`; importing this is quick."""

from __future__ import annotations

import argparse
from pathlib import Path

LAYOUTS = ("manifest", "gedit", "gedit-v2", "imgedit", "editreward-editscore", "editreward-tiger", "vcreward")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds everything but --device, --dtype and --revision, which all commands share."""
    command.add_argument(
        "input", type=Path, metavar="INPUT", help="the manifest, the folder of results, or the benchmark's table"
    )
    command.add_argument("--output", type=Path, required=True, help="folder for the report")
    command.add_argument(
        "--metric", default="builtin:late", help="builtin:late, released:late (or mid, early), a Hub id or a folder"
    )
    command.add_argument("--layout", choices=LAYOUTS, default="manifest", help="what INPUT is")
    command.add_argument("--benchmark", type=Path, help="gedit, gedit-v2, imgedit: the benchmark's own table")
    command.add_argument("--sources", type=Path, help="imgedit: the folder with the original images")
    command.add_argument("--language", default="en", help="gedit: en or cn")
    command.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER",
                         help="outputs of a model, one image a key; may be repeated")  # fmt: skip
    command.add_argument("--votes", type=Path, help="people's votes, JSONL: key, first, second, vote")
    command.add_argument("--aspects", type=Path, metavar="FILE",
                         help="proposed aspects, to be corrected (default: OUTPUT/aspects.jsonl)")  # fmt: skip
    command.add_argument("--proposer", default="rules", metavar="NAME",
                         help="who proposes aspects where rows name none: rules, vlm:SOURCE (a model of transformers) or "
                         "endpoint:MODEL@URL (OpenAI-compatible; key in TPIPS_API_KEY)")  # fmt: skip
    command.add_argument("--calibrated", action="store_true",
                         help="score with probabilities, by the calibration beside the metric")  # fmt: skip
    command.add_argument("--sizes", default="resize", choices=("resize", "keep", "skip"),
                         help="outputs of another size than their source")  # fmt: skip
    command.add_argument("--batch-images", type=int, default=64, help="images in one call of the metric")
    command.add_argument(
        "--examples", type=int, default=6, help="best and worst edits of each model on the page"
    )
    command.add_argument("--resamples", type=int, default=2000, help="of the bootstrap")
    command.add_argument(
        "--tie-margin", type=float, default=0.01, help="scores that differ by no more are a tie"
    )
    command.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    command.add_argument("--strict", action="store_true", help="stop at any problem with the input")
    command.add_argument("--overwrite", action="store_true", help="replace a report that is there")
    command.add_argument("--resume", action="store_true", help="go on with an evaluation that was interrupted")
