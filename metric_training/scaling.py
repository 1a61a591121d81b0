"""Agreement against the share of the training data (paper, table 7): one training a share, all on the same test set.

    python -m metric_training.scaling --config metric_training/configs/builtin_early.yaml --output_dir runs/scaling

Leaves scaling.csv, scaling.md and scaling.png. Shares whose training is finished are not trained again.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from metric_training.data.comparison import Data, show_problems
from metric_training.data.sources import DataOptions, load_data
from metric_training.evaluation.judges import metric_judge
from metric_training.evaluation.runner import evaluate
from metric_training.training.config import OTHER_FLAGS, TrainConfig, check_config, parse_config
from metric_training.training.examples import check_apart
from metric_training.training.runs import finish
from tpips_reward import TPIPSError, load_metric
from tpips_reward.arguments import HelpFormatter, check_at_least
from tpips_reward.errors import INTERRUPTED, exit_on_errors
from tpips_reward.files import check_writable, write_atomic, write_text
from tpips_reward.stopping import Interrupted

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)


def measure_scaling(
    config: TrainConfig, shares: Sequence[float], test: Data, folder: Path, launcher: str | None = None
) -> list[dict[str, float]]:
    """Trains with each share of the data and measures its best weights.

    Args:
        config: of the trainings; each has its ``train_share`` and folder.
        shares: above 0, at most 1.
        test: comparisons that no training sees.
        folder: of the figure; the trainings are in folders below it.
        launcher: see `training.runs.finish`.

    Returns:
        A row a share: "share", "agreement", "standard_error", "consensus".

    Raises:
        TPIPSError: settings that cannot be used, or two shares of one percentage, whose trainings would share a folder.
    """
    runs: list[TrainConfig] = []
    for share in shares:
        run = replace(config, train_share=float(share))
        check_config(run)
        run.output_dir = str(folder / f"share_{round(100 * share)}")
        if run.output_dir in [other.output_dir for other in runs]:
            raise TPIPSError(f"Two shares are {round(100 * share)} %; give shares that differ in whole per cents.")
        runs.append(run)
    rows = []
    for share, run in zip(shares, runs, strict=True):
        print(f"{share:.0%} of the training data, in {run.output_dir}", file=sys.stderr)
        metric = load_metric(finish(run, launcher) / "best")
        found = evaluate([lambda metric=metric: metric_judge("metric", metric)], test)  # type: ignore[misc]
        figures = found["metrics"]["metric"]
        rows.append(
            {
                "share": float(share),
                "agreement": figures["agreement"],
                "standard_error": figures["standard_error"],
                "consensus": found["data"]["consensus"],
            }
        )
    return rows


def write_scaling(rows: Sequence[dict[str, float]], folder: Path) -> str:
    """Writes the table (CSV, Markdown) and the figure (PNG); returns the Markdown."""
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / "scaling.csv", table.getvalue())
    lines = ["| share of the training data | agreement | standard error |", "|---|---|---|"]
    lines += [f"| {row['share']:.0%} | {row['agreement']:.3f} | {row['standard_error']:.3f} |" for row in rows]
    lines += [f"| consensus | {rows[-1]['consensus']:.3f} | |"]
    write_text(folder / "scaling.md", "\n".join(lines) + "\n")
    _plot(rows, folder / "scaling.png")
    return "\n".join(lines)


def _plot(rows: Sequence[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    shares = [100 * row["share"] for row in rows]
    axes.errorbar(
        shares, [row["agreement"] for row in rows], [row["standard_error"] for row in rows], marker="o", capsize=3
    )
    axes.axhline(rows[-1]["consensus"], color="gray", linestyle="--", label="consensus")
    axes.set_xlabel("share of the training data (%)")
    axes.set_ylabel("agreement")
    axes.legend()
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=150))


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; flags that it does not know are settings of the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False, epilog=OTHER_FLAGS)
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="above 0, at most 1")
    parser.add_argument("--test_samples", "--test-samples", type=int, default=600, help="comparisons in the test")
    parser.add_argument("--output_dir", "--output-dir", type=Path, default=Path("runs/scaling"), help="of the figure and its trainings")
    parser.add_argument("--launcher", help="command before the script, such as 'accelerate launch --num_processes 8'")
    options, rest = parser.parse_known_args(arguments)
    config = parse_config(rest)
    check_at_least(options, 1, "test_samples")
    if config.max_steps > 0:
        print(f"max_steps {config.max_steps}: each share trains for as many steps, a smaller one for more epochs.", file=sys.stderr)
    check_writable(options.output_dir)
    remedy = "a folder of files named by split, or a Hub id (docs/data.md)"
    check_apart(config.dataset_name, config.dataset_name, "the test", remedy)
    how = DataOptions(
        count=options.test_samples,
        split="test",
        image_root=config.image_root,
        limit=options.test_samples,
        strict=config.strict,
    )
    test = show_problems(load_data(config.dataset_name, how))
    try:
        rows = measure_scaling(config, options.shares, test, options.output_dir, options.launcher)
    except Interrupted:
        print("Stopped. The same command goes on.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print(write_scaling(rows, options.output_dir))
    print(f"Written to {options.output_dir}: scaling.md, scaling.csv, scaling.png")


if __name__ == "__main__":
    main()
