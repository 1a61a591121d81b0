"""The console script `tpips-reward`.

tpips-reward score a.png b.png --aspect lighting --aspect "subject color"
tpips-reward score pairs.csv --aspect lighting --json
tpips-reward info builtin:late
tpips-reward evaluate edits.jsonl --output report
tpips-reward serve --reward tpips:preserve --port 8000
tpips-reward index photos --aspect lighting --output photos.index
tpips-reward search photos.index --query a.png lighting
tpips-reward video clip.mp4 --aspect "cup handle position" --output clip
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tpips_reward
from tpips_reward.arguments import HelpFormatter, add_device_arguments
from tpips_reward.errors import TPIPSError, hide_size_warnings, unusable
from tpips_reward.evaluation.arguments import add_arguments
from tpips_reward.search.arguments import add_index_arguments, add_search_arguments
from tpips_reward.serving.arguments import add_arguments as add_serve_arguments
from tpips_reward.video.arguments import add_arguments as add_video_arguments

if TYPE_CHECKING:
    from tpips_reward.metric import Metric

BAD_INPUT = 2
METRIC_HELP = "builtin:late, released:late (or mid, early), a Hub id or a folder"


def build_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(prog="tpips-reward", description="Aspect-conditioned perceptual similarity.")
    parser.add_argument("--version", action="version", version=f"tpips-reward {tpips_reward.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    score = commands.add_parser("score", help="similarity of image files, in one or several aspects", formatter_class=HelpFormatter)
    score.add_argument("images", nargs="+", metavar="IMAGE", help="two files, several pairs A1 B1 A2 B2 ..., or "
                       "a .csv or .jsonl file with a, b and aspects in each row")  # fmt: skip
    score.add_argument("--aspect", action="append", help="what to compare, such as lighting; may be repeated "
                       "(default: overall)")  # fmt: skip
    score.add_argument("--metric", default="builtin:late", help=METRIC_HELP)
    score.add_argument("--json", action="store_true", help="print JSON instead of a table")
    score.set_defaults(run=run_score)

    info = commands.add_parser("info", help="what a metric is", formatter_class=HelpFormatter)
    info.add_argument("metric", metavar="METRIC", help=METRIC_HELP)
    info.add_argument("--json", action="store_true", help="print JSON instead of a table")
    info.set_defaults(run=run_info)

    evaluate = commands.add_parser("evaluate", help="compare editors by what they keep and what they change", formatter_class=HelpFormatter)
    add_arguments(evaluate)
    evaluate.set_defaults(run=run_evaluate)

    serve = commands.add_parser("serve", help="the reward over HTTP, for trainers on other machines", formatter_class=HelpFormatter)
    add_serve_arguments(serve)
    serve.set_defaults(run=run_serve)

    index = commands.add_parser("index", help="embed a folder of images in several aspects, for search", formatter_class=HelpFormatter)
    add_index_arguments(index)
    index.set_defaults(run=run_index)

    search = commands.add_parser("search", help="find images that are like others in chosen aspects", formatter_class=HelpFormatter)
    add_search_arguments(search)
    search.set_defaults(run=run_search)

    video = commands.add_parser("video", help="similarity to one frame over time, in several aspects", formatter_class=HelpFormatter)
    add_video_arguments(video)
    video.set_defaults(run=run_video)

    for command in (score, info, evaluate, serve, index, search, video):
        add_device_arguments(command)
        command.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 with one line on stderr for bad input."""
    options = build_parser().parse_args(arguments)
    hide_size_warnings()
    shown, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        options.run(options)
    except TPIPSError as error:
        print(f"tpips-reward: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("tpips-reward: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `tpips-reward ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:  # a mistake of ours: it keeps its traceback
            raise
        print(f"tpips-reward: {unusable(error)}", file=sys.stderr)
        return BAD_INPUT
    finally:
        warnings.formatwarning = shown
    return 0


def _one_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning for who reads a terminal: without the line of ours that it comes from."""
    return f"tpips-reward: warning: {' '.join(str(message).split())}\n"


def run_score(options: argparse.Namespace) -> None:
    """The command `score`."""
    from tqdm import tqdm

    from tpips_reward.pair_files import is_pair_file, pairs_of_arguments, read_pairs, score_rows

    aspects = options.aspect or ["overall"]
    for aspect in aspects:
        if not aspect.strip():
            raise TPIPSError("--aspect is empty; name what to compare, or leave it out for overall similarity.")
    if is_pair_file(options.images):
        pairs = read_pairs(Path(options.images[0]), aspects)
    else:
        pairs = pairs_of_arguments(options.images, aspects)
    metric = _load(options)
    lowest, highest = metric.range
    # disable=None: no bar where nobody sees it
    with tqdm(total=len(pairs), unit="pair", disable=None if len(pairs) > 1 else True, file=sys.stderr) as bar:
        rows: list[dict[str, Any]] = [
            {"a": pair.a, "b": pair.b, "scores": dict(zip(pair.aspects, scores, strict=True))}
            for pair, scores in zip(pairs, score_rows(pairs, metric, bar.update), strict=True)
        ]
    if options.json:
        print(json.dumps({"metric": options.metric, "range": _json_range((lowest, highest)), "pairs": rows}, indent=2))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    several = len(rows) > 1
    digits = 4 if math.isfinite(lowest) else 6  # mid fusion's distances are small numbers
    for heading in (["A", "B"] if several else []) + ["aspect"]:
        table.add_column(heading, overflow="fold")
    table.add_column(f"similarity ({highest:g} = same)", justify="right")
    for row in rows:
        for aspect, value in row["scores"].items():
            table.add_row(
                *([_plain(row["a"]), _plain(row["b"])] if several else []), _plain(aspect), f"{value:.{digits}f}"
            )
    _print(table)


def run_info(options: argparse.Namespace) -> None:
    """The command `info`."""
    from tpips_reward.metric import count_parameters

    metric = _load(options)
    backbone, settings = metric.backbone, metric.backbone.settings
    facts: dict[str, Any] = {
        "metric": options.metric,
        "fusion": metric.fusion.kind,
        "backbone": f"{backbone.config.model_type}, hidden {backbone.hidden_size}, "
        f"{backbone.config.text_config.num_hidden_layers} layers",
        "parameters": count_parameters(metric.fusion),
        "dtype": str(metric.dtype).removeprefix("torch."),
        "device": str(metric.device),
        **_meaning(metric, options.json),
        "image_pixels": [settings.min_pixels, settings.max_pixels],
        "image_multiple": settings.factor,
    }
    facts |= {key: value for key, value in metric.info.items() if key not in facts and key != "source"}
    facts.setdefault("license", "not stated in the checkpoint; see its model card")
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    for key, value in facts.items():
        between = ", " if key == "probe_layers" else "–"
        shown = (
            f"{value:,}" if key == "parameters" else between.join(map(str, value)) if isinstance(value, list) else value
        )
        table.add_row(key.replace("_", " "), _plain(str(shown)))
    _print(table)


def _meaning(metric: Metric, as_json: bool) -> dict[str, Any]:
    """What the numbers of a metric mean."""
    if not metric.is_pairwise:
        return {"output": "probability of each of three images of being the odd one; no score of two images"}
    return {
        "range": _json_range(metric.range) if as_json else list(metric.range),
        "direction": "higher is more similar",
        **metric.fusion.options,
        # measured on some hundred edits: further digits say nothing to a reader
        "change_scale": metric.change_scale if as_json else float(f"{metric.change_scale:.4g}"),
        "change_scale_measured": metric.is_calibrated,
    }


def run_evaluate(options: argparse.Namespace) -> None:
    """The command `evaluate`."""
    from tpips_reward.evaluation import command

    command.run_evaluate(options, lambda: _load(options))


def run_serve(options: argparse.Namespace) -> None:
    """The command `serve`."""
    from tpips_reward.serving import command

    command.run_serve(options)


def run_index(options: argparse.Namespace) -> None:
    """The command `index`."""
    from tpips_reward.search import command

    command.run_index(options, lambda: _load(options))


def run_search(options: argparse.Namespace) -> None:
    """The command `search`."""
    from tpips_reward.search import command

    command.run_search(options, lambda name: _load(argparse.Namespace(**{**vars(options), "metric": name})))


def run_video(options: argparse.Namespace) -> None:
    """The command `video`."""
    from tpips_reward.video import command

    command.run_video(options, lambda: _load(options))


def _load(options: argparse.Namespace) -> Metric:
    from transformers.utils import logging

    from tpips_reward.checkpoints import load_metric

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return load_metric(options.metric, device=options.device, dtype=options.dtype, revision=options.revision)


def _json_range(bounds: tuple[float, float]) -> list[float | None]:
    """JSON has no infinity: null where a range has no end (mid fusion, from minus infinity to 0)."""
    return [bound if math.isfinite(bound) else None for bound in bounds]


def _plain(text: str) -> str:
    """Text as it is: brackets in an aspect or a path are no markup."""
    from rich.markup import escape

    return escape(text)


def _print(table: Any) -> None:
    from rich.console import Console

    # a file or a pipe has no width of its own; 80 columns would fold long paths
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
