"""Agreement of metrics with odd-one-out and 2AFC votes (paper, §5): vote share of the choice that a metric makes.

    python -m metric_training.evaluate --metric builtin:late --triplets 1000
    python -m metric_training.evaluate --metric released:late --metric lpips --metric ssim \\
        --data sywang/tpips-odd-one-out --output_dir runs/evaluation

The first compares one metric, on simulated votes, with pixel L2 and its own architecture untrained. With `--data`, or
with several metrics, everything goes through `metric_training.evaluation` (docs/data.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metric_training.data.comparison import show_problems
from metric_training.data.procedural import KINDS, TEST_SEED, held_out_triplets
from metric_training.data.sources import load_data
from metric_training.data.triplets import Triplet
from metric_training.data.votes import PAIRS
from metric_training.evaluation.arguments import (
    add_metric_argument,
    add_run_arguments,
    add_vote_arguments,
    check_run,
    data_options,
)
from metric_training.evaluation.baselines import is_baseline, load_judge, untrained
from metric_training.evaluation.report import as_markdown as report_markdown
from metric_training.evaluation.report import write_file, write_report
from metric_training.evaluation.runner import evaluate
from metric_training.losses import agreement, consensus
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.arguments import HelpFormatter, check_at_least
from tpips_reward.errors import NotFinite, exit_on_errors
from tpips_reward.files import check_writable
from tpips_reward.scenes import to_tensor

__all__ = [
    "TEST_SEED",
    "Judge",
    "as_markdown",
    "compare",
    "held_out_triplets",
    "main",
    "metric_judge",
    "pixel_judge",
    "score_triplets",
]

#: Triplet → (A, 3) similarities in the order of the image left out.
Judge = Callable[[Triplet], Tensor]


def metric_judge(metric: Metric) -> Judge:
    """Judges with a metric's own pairwise similarities, whatever its fusion."""

    def judge(triplet: Triplet) -> Tensor:
        images = [to_tensor(i) for i in triplet.images]
        asked = [(i, j, wording) for wording in triplet.wordings for i, j in PAIRS]
        return metric.similarity_pairs(images, images, asked).view(-1, 3)

    return judge


def pixel_judge(triplet: Triplet) -> Tensor:
    """Minus the mean squared pixel difference, the same for every aspect."""
    images = [to_tensor(i) for i in triplet.images]
    row = torch.stack([-((images[i] - images[j]) ** 2).mean() for i, j in PAIRS])
    return row.expand(len(triplet.aspects), 3)


@torch.no_grad()
def score_triplets(judge: Judge, triplets: Sequence[Triplet]) -> dict[str, Any]:
    """Agreement and consensus over all (triplet, aspect) examples.

    Returns:
        "agreement", "standard_error", "consensus", "examples", and "per_aspect": agreement, consensus and count by
        plain name.

    Raises:
        TPIPSError: when the judge gives a similarity that is not finite.
    """
    scores, crowds, names = [], [], []
    for number, triplet in enumerate(triplets):
        votes = torch.from_numpy(triplet.votes)
        try:
            similarities = judge(triplet).cpu()
            finite = bool(torch.isfinite(similarities).all())
        except NotFinite:
            finite = False
        if not finite:
            raise TPIPSError(f"The metric gave a similarity that is not finite on triplet {number}; nothing was scored.")
        scores.append(agreement(similarities, votes))
        crowds.append(consensus(votes))
        names += list(triplet.aspects)
    agreed, crowd = torch.cat(scores).double(), torch.cat(crowds).double()
    groups: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        groups[name].append(index)
    return {
        "agreement": float(agreed.mean()),
        "standard_error": float(agreed.std() / len(agreed) ** 0.5),
        "consensus": float(crowd.mean()),
        "examples": len(agreed),
        "per_aspect": {
            name: {"agreement": float(agreed[rows].mean()), "consensus": float(crowd[rows].mean()), "count": len(rows)}
            for name, rows in sorted(groups.items())
        },
    }


def compare(metric: Metric, count: int, seed: int = TEST_SEED) -> dict[str, dict[str, Any]]:
    """A metric on known and on new wordings, beside pixel L2 and its own architecture with random weights."""
    known, new = (held_out_triplets(count, seed=seed, split=split) for split in ("train", "test"))
    return {
        "metric, known wordings": score_triplets(metric_judge(metric), known),
        "metric, wordings never trained on": score_triplets(metric_judge(metric), new),
        "pixel L2": score_triplets(pixel_judge, known),
        "untrained backbone": score_triplets(metric_judge(untrained(metric)), known),
    }


def as_markdown(results: dict[str, dict[str, Any]]) -> str:
    """The results as two Markdown tables: overall, and per aspect on known wordings."""
    lines = ["| judge | agreement | standard error | consensus | examples |", "|---|---|---|---|---|"]
    for name, r in results.items():
        lines.append(
            f"| {name} | {r['agreement']:.3f} | {r['standard_error']:.3f} | {r['consensus']:.3f} | {r['examples']} |"
        )
    known, new = (results[f"metric, {w}"]["per_aspect"] for w in ("known wordings", "wordings never trained on"))
    lines += ["", "| aspect | agreement | on new wordings | consensus |", "|---|---|---|---|"]
    for name, r in known.items():
        other = f"{new[name]['agreement']:.3f}" if name in new and name != "overall" else "–"
        lines.append(f"| {name} | {r['agreement']:.3f} | {other} | {r['consensus']:.3f} |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Agreement of metrics with human or simulated votes.",
        formatter_class=HelpFormatter,
        epilog="With one metric and no --data: that metric on known and on new wordings, pixel L2, and it untrained.",
    )
    add_metric_argument(parser)
    parser.add_argument("--triplets", type=int, default=1000, help="comparisons in a procedural test set")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    parser.add_argument(
        "--output_dir", type=Path, help="write report.md, report.json, thresholds.csv, thresholds.png there"
    )
    parser.add_argument("--bootstrap", type=int, default=1000, help="resamples for the intervals")
    add_run_arguments(parser)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        help=f"{', '.join(KINDS)} (photographs:FOLDER for your own), a JSONL, CSV or Parquet file, a folder, a Hub id",
    )
    data.add_argument("--wordings", choices=["train", "test"], default="train", help="of a procedural set")
    add_vote_arguments(data, "test", TEST_SEED, "of a procedural set")
    return parser


def run_evaluation(options: argparse.Namespace, metrics: Sequence[str]) -> dict[str, Any]:
    """The evaluation that the command line asks for; problems of the data go to stderr."""
    check_run(options, "triplets", "bootstrap")
    source = "procedural" if options.data is None else options.data
    data = show_problems(load_data(source, data_options(options, options.triplets, options.wordings)))
    return evaluate(
        [partial(load_judge, name, device=options.device, dtype=options.dtype) for name in metrics],
        data,
        images_per_call=options.images_per_call,
        draws=options.bootstrap,
        strict=options.strict,
        progress=sys.stderr.isatty(),
    )


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = _parser().parse_args(arguments)
    check_writable(options.output_dir, options.output)
    metrics: list[str] = options.metric or ["builtin:late"]
    simple = options.data is None and options.output_dir is None and len(metrics) == 1
    simple = simple and not is_baseline(metrics[0])
    if simple:
        check_run(options, "triplets")
        check_at_least(options, 0, "seed")
        metric = load_metric(metrics[0], device=options.device, dtype=options.dtype)
        results = compare(metric, options.triplets, options.seed)
    else:
        results = run_evaluation(options, metrics)
    print(as_markdown(results) if simple else report_markdown(results))
    if options.output:
        write_file(options.output, (json.dumps(results, indent=1) + "\n").encode())
    if options.output_dir:
        write_report(options.output_dir, results)
        print(f"\nWritten to {options.output_dir}")


if __name__ == "__main__":
    main()
