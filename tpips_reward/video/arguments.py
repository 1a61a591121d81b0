"""The options of `tpips-reward video`; importing this is quick."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds everything but --device, --dtype and --revision, which all commands share."""
    command.add_argument(
        "source", type=Path, metavar="SOURCE", help="a folder of frames, or a video file (extra video)"
    )
    command.add_argument("--aspect", action="append", required=True, help="what to compare; may be repeated")
    command.add_argument("--output", type=Path, required=True, help="folder for timeline.csv and timeline.png")
    command.add_argument(
        "--reference", type=int, default=0, metavar="FRAME", help="the frame to compare with"
    )
    command.add_argument("--every", type=int, default=1, help="take each N-th frame only")
    command.add_argument("--fps", type=float, default=24.0, help="of a folder of frames")
    command.add_argument("--metric", default="builtin:late", help="builtin:late, released:late (or mid, early) ...")
    command.add_argument("--batch-images", type=int, default=32, help="frames in one call of the metric")
    command.add_argument("--overwrite", action="store_true", help="replace a timeline that is there")
