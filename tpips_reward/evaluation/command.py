"""The command `tpips-reward evaluate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpips_reward.aspects import parse_proposer
from tpips_reward.calibration import CalibratedMetric
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.layouts import read_gedit, read_gedit_v2, read_imgedit
from tpips_reward.evaluation.manifest import read_manifest
from tpips_reward.evaluation.markdown import markdown
from tpips_reward.evaluation.rows import Dataset
from tpips_reward.evaluation.run import Settings, evaluate
from tpips_reward.evaluation.votes import read_editscore_bench, read_tiger_bench, read_vcreward_bench, read_votes
from tpips_reward.rewards.reward import PairMetric

#: Layouts that bring their outputs and people's votes on them.
_VOTED: dict[str, Callable[[Path], Dataset]] = {
    "editreward-editscore": read_editscore_bench,
    "editreward-tiger": read_tiger_bench,
    "vcreward": read_vcreward_bench,
}


def run_evaluate(options: argparse.Namespace, load: Callable[[], PairMetric]) -> None:
    """Runs the command.

    Args:
        options: of `add_arguments`.
        load: loads the metric; called once the input is known to be good.

    Raises:
        TPIPSError: as `evaluate`, and for options that do not go together.
    """
    settings = Settings(
        sizes=options.sizes,
        batch_images=options.batch_images,
        seed=options.seed,
        resamples=options.resamples,
        tie_margin=options.tie_margin,
        examples=options.examples,
        strict=options.strict,
    )
    proposer = parse_proposer(options.proposer)
    dataset = read_dataset(options)
    if options.votes is not None:
        dataset = read_votes(options.votes, dataset)
    report = evaluate(
        dataset,
        (lambda: CalibratedMetric(load())) if options.calibrated else load,
        options.output,
        metric_name=f"{options.metric}, calibrated" if options.calibrated else options.metric,
        settings=settings,
        aspects_file=options.aspects,
        proposer=proposer,
        overwrite=options.overwrite,
        resume=options.resume,
        progress=_Bar() if sys.stderr.isatty() else None,
    )
    print(ending(report, options.output))


def read_dataset(options: argparse.Namespace) -> Dataset:
    """The rows that the options name.

    Raises:
        TPIPSError: an option is missing or means nothing for this layout; whatever reading raises.
    """
    folders = _folders(options.model)
    layout = options.layout
    needs = {"gedit": ("benchmark",), "gedit-v2": ("benchmark",), "imgedit": ("benchmark", "sources")}.get(layout, ())
    for name in ("benchmark", "sources"):
        given = getattr(options, name) is not None
        if name in needs and not given:
            raise TPIPSError(f"--layout {layout} needs --{name}.")
        if given and name not in needs:
            raise TPIPSError(f"--{name} means nothing for --layout {layout}; leave it out.")
    if layout in _VOTED and (folders or options.votes is not None):
        raise TPIPSError(f"--layout {layout} has outputs and votes of its own; leave out --model and --votes.")
    if layout == "gedit-v2" and folders:
        raise TPIPSError("--layout gedit-v2 finds the models and their images in metadata.jsonl; leave out --model.")
    if layout == "gedit":
        return read_gedit(options.input, options.benchmark, models=folders, language=options.language)
    if layout == "gedit-v2":
        return read_gedit_v2(options.input, options.benchmark)
    if layout == "imgedit":
        return read_imgedit(options.input, options.benchmark, options.sources, models=folders)
    if layout in _VOTED:
        return _VOTED[layout](options.input)
    return read_manifest(options.input, folders)


def _folders(given: list[str]) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for item in given:
        name, separator, folder = item.partition("=")
        if not separator or not name.strip() or not folder.strip():
            raise TPIPSError(f"--model is {item!r}; write NAME=FOLDER.")
        if name.strip() in folders:
            raise TPIPSError(f"--model names {name.strip()!r} twice.")
        folders[name.strip()] = Path(folder)
    return folders


def ending(report: dict[str, Any], folder: Path) -> str:
    """What the terminal shows: the summary table, the problems' counts, and where the page is.

    Args:
        report: of `evaluate`.
        folder: the report's.
    """
    summary = markdown(report).split("## Summary")[1].split("## ")[0].strip()
    lines = [summary]
    for kind, count in report["problems"]["counts"].items():
        lines.append(f"{count} {kind.replace('_', ' ')}: {report['problems']['meaning'][kind]}")
    return "\n".join([*lines, f"Report: {folder / 'report.html'}"])


class _Bar:
    """Rows done, on the terminal."""

    def __init__(self) -> None:
        self.bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        from tqdm import tqdm

        if self.bar is None:
            self.bar = tqdm(total=total, unit="row")
        self.bar.update(done - self.bar.n)
        if done >= total:
            self.bar.close()
