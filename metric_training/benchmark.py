"""Metrics on published benchmarks: NIGHTS, BAPPS, GeneCIS, QARE-Bench, EDIR and VLM-SubtleBench.

    python -m metric_training.benchmark nights --data data/nights --metric released:late --metric dreamsim
    python -m metric_training.benchmark edir --data data/edir --metric untrained:released:late --query text \\
        --output_dir runs/edir

`--data` is the folder that the benchmark's authors publish; docs/data.md has the layouts and protocols.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from metric_training.benchmarks.edir import QUERIES
from metric_training.benchmarks.protocol import Benchmark, Settings
from metric_training.benchmarks.registry import BENCHMARKS
from metric_training.benchmarks.report import as_markdown, write_report
from metric_training.evaluation.arguments import (
    add_metric_argument,
    add_reading_arguments,
    add_run_arguments,
    check_run,
)
from metric_training.evaluation.baselines import load_judge
from metric_training.evaluation.judges import Judge
from tpips_reward import TPIPSError
from tpips_reward.arguments import HelpFormatter
from tpips_reward.errors import exit_on_errors
from tpips_reward.files import check_writable


def run(
    benchmark: Benchmark, folder: Path, judges: Sequence[Callable[[], Judge]], settings: Settings | None = None
) -> dict[str, Any]:
    """Figures of several judges on one benchmark, side by side.

    Args:
        benchmark: one of `metric_training.benchmarks.registry.BENCHMARKS`.
        folder: as its authors publish it.
        judges: called one after the other, so that only one model is in memory at a time.
        settings: how it is read and run.

    Returns:
        {"benchmark", "title", "about", "size", "problems", "metrics": {judge: see `Benchmark.measure`}}.

    Raises:
        TPIPSError: a layout that does not fit, a judge that the protocol does not take, its own errors, two of one name.
    """
    settings = settings or Settings()
    loaded = benchmark.load(folder, settings)
    metrics: dict[str, Any] = {}
    for make in judges:
        judge = make()
        if judge.name in metrics:
            raise TPIPSError(f"{judge.name} is there twice; give each metric once.")
        metrics[judge.name] = benchmark.measure(judge, loaded, settings)
        del judge
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {
        "benchmark": benchmark.name,
        "title": benchmark.title,
        "about": benchmark.about,
        **({"query": settings.query} if benchmark.name == "edir" else {}),
        "size": loaded.size,
        "problems": [[line, message] for line, message in loaded.problems.found],
        "metrics": metrics,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Metrics on published benchmarks, in their own layouts and protocols.", formatter_class=HelpFormatter)
    parser.add_argument("name", choices=list(BENCHMARKS))
    parser.add_argument("--data", type=Path, required=True, help="the folder that its authors publish")
    add_metric_argument(parser)
    add_reading_arguments(parser, None, "another one than its authors report; of GeneCIS: one of its subsets")
    parser.add_argument(
        "--query", choices=QUERIES, default="text", help="EDIR: image and text, or a composition of aspects"
    )
    parser.add_argument("--output_dir", type=Path, help="write report.md and report.json there")
    add_run_arguments(parser)
    return parser


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = _parser().parse_args(arguments)
    check_run(options)
    check_writable(options.output_dir)
    settings = Settings(
        split=options.split,
        image_root=options.image_root,
        strict=options.strict,
        limit=options.limit,
        images_per_call=options.images_per_call,
        query=options.query,
        progress=sys.stderr.isatty(),
    )
    judges = [
        partial(load_judge, name, device=options.device, dtype=options.dtype)
        for name in options.metric or ["builtin:late"]
    ]
    results = run(BENCHMARKS[options.name], options.data.expanduser(), judges, settings)
    for line, message in results["problems"][:20]:
        print(f"{options.data}, {line}: {message}", file=sys.stderr)
    print(as_markdown(results))
    if options.output_dir:
        write_report(options.output_dir, results)
        print(f"\nWritten to {options.output_dir}")


if __name__ == "__main__":
    main()
