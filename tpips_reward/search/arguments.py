"""The options of `tpips-reward index` and `search`; importing this is quick."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_index_arguments(command: argparse.ArgumentParser) -> None:
    """Adds everything but --device, --dtype and --revision, which all commands share."""
    command.add_argument("images", type=Path, metavar="FOLDER", help="images, in subfolders too")
    command.add_argument("--aspect", action="append", default=[], required=True,
                         help="to search in later; may be repeated (overall is always there)")  # fmt: skip
    command.add_argument("--output", type=Path, required=True, help="folder of the index")
    command.add_argument(
        "--metric", default="builtin:late", help="a late-fusion metric: builtin:late, released:late ..."
    )
    command.add_argument("--batch-images", type=int, default=32, help="images in one call of the metric")
    command.add_argument("--overwrite", action="store_true", help="replace an index that is there")


def add_search_arguments(command: argparse.ArgumentParser) -> None:
    """As `add_index_arguments`."""
    command.add_argument("index", type=Path, metavar="INDEX", help="folder that tpips-reward index wrote")
    command.add_argument("--query", action="append", required=True, nargs="+", metavar="IMAGE ASPECT [WEIGHT]",
                         help="what the images should be like, and in what; several are added by weight (1 unless given)")  # fmt: skip
    command.add_argument("--top", type=int, default=10, help="how many images")
    command.add_argument("--overall-weight", type=float,
                         help="share of the overall similarity that is subtracted, for neighbours that look different "
                         "(default: 0.3 with one query, 0 with several)")  # fmt: skip
    command.add_argument("--metric", help="the metric of the index where its name has changed (default: as indexed)")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
