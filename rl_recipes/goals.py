"""Finished runs of the main job against what it is meant to reach, a row a run.

    python -m rl_recipes.goals runs/seed0 runs/seed1 runs/seed2

reads each run's ``summary.json`` and prints a Markdown table; a cell in bold misses its goal. Runs that have not finished
are named below it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpips_reward.arguments import HelpFormatter
from tpips_reward.errors import BAD_INPUT, TPIPSError, exit_on_errors


@dataclass(frozen=True)
class Goal:
    """What a measure may become: ``met(before, after)``, in words ``text``."""

    measure: str
    text: str
    met: Callable[[float, float], bool]


GOALS: tuple[Goal, ...] = (
    Goal("drift", "at least 25 % lower", lambda before, after: after <= 0.75 * before),
    Goal("edit_success", "at most 2 points lower", lambda before, after: after >= before - 0.02),
    Goal("object_lost", "not higher", lambda before, after: after <= before),
    Goal("copy_rate", "not higher", lambda before, after: after <= before),
    Goal("l1_to_ideal", "not higher", lambda before, after: after <= before),
)
#: Seconds that a run may take.
MAX_SECONDS = 600.0


def missed(summary: dict[str, Any]) -> list[str]:
    """Names of the goals that a run misses, "seconds" among them; a measure that is not known is missed, one that does not
    apply is not.

    Args:
        summary: content of ``summary.json``.
    """
    out = [goal.measure for goal in GOALS if applies(goal.measure, summary) and not _met(goal, summary)]
    return out + (["seconds"] if summary["seconds"] > MAX_SECONDS else [])


def applies(measure: str, summary: dict[str, Any]) -> bool:
    """Whether a run's edits have the measure; photographs have no known scene, and of all of them ``copy_rate`` alone."""
    before = summary["before"]
    of_scenes = before["l1_to_ideal"] is not None or before["copy_rate"] is None  # the latter: nothing was evaluated
    return of_scenes or measure == "copy_rate"


def _met(goal: Goal, summary: dict[str, Any]) -> bool:
    before, after = summary["before"][goal.measure], summary["after"][goal.measure]
    return before is not None and after is not None and goal.met(before, after)


def goals_table(runs: Sequence[tuple[Path, dict[str, Any]]]) -> str:
    """The runs as a Markdown table, before → after in each cell; what misses its goal is bold.

    Args:
        runs: the folder and the summary of each; of runs of one seed the folder is named.
    """
    names = ["seed", *(goal.measure for goal in GOALS), "minutes", "iterations"]
    limits = ["goal", *(goal.text for goal in GOALS), f"at most {MAX_SECONDS / 60:g}", ""]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", f"| {' | '.join(limits)} |"]
    seeds = Counter(summary["seed"] for _, summary in runs)
    for folder, summary in runs:
        bad, seed = missed(summary), summary["seed"]
        cells = [f"{seed} ({folder})" if seeds[seed] > 1 else str(seed)]
        for goal in GOALS:
            cell = _change(summary["before"][goal.measure], summary["after"][goal.measure])
            cell = cell if applies(goal.measure, summary) else "does not apply"
            cells.append(f"**{cell}**" if goal.measure in bad else cell)
        minutes = f"{summary['seconds'] / 60:.1f}"
        cells += [f"**{minutes}**" if "seconds" in bad else minutes, str(summary["iterations"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "not known"
    relative = f" ({100 * (after / before - 1):+.0f} %)" if before else ""
    return f"{before:.4f} → {after:.4f}{relative}"


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of the finished runs, and a line on stderr for each other one.

    Returns:
        the exit code: 0 when every run meets every goal, 1 when one does not, 2 when one has not finished or cannot be read.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="output folders of finished runs")
    args = parser.parse_args(arguments)
    runs: list[tuple[Path, dict[str, Any]]] = []
    errors: list[TPIPSError] = []
    for run in args.runs:
        try:
            runs.append((run, _summary(run)))
        except TPIPSError as error:
            errors.append(error)
    if runs:
        print(goals_table(runs), flush=True)
    for refused in errors:
        print(f"error: {refused}", file=sys.stderr)
    return BAD_INPUT if errors else int(any(missed(summary) for _, summary in runs))


def _summary(run: Path) -> dict[str, Any]:
    """The summary of a run.

    Raises:
        TPIPSError: it has none, since it has not finished or is no run, or one that cannot be used.
    """
    path, again = run / "summary.json", f"--resume --output_dir {shlex.quote(str(run))} with the recipe that began it"
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        if (run / "config.yaml").is_file():
            raise TPIPSError(f"{run} has not finished: wait for it, or go on with {again}.") from error
        raise TPIPSError(f"{run} holds no run (no summary.json and no config.yaml); check the path.") from error
    except (OSError, ValueError) as error:
        raise TPIPSError(f"{path} cannot be read ({error}); {again} evaluates again and writes it anew.") from error
    try:
        missed(summary)
        summary["seed"], summary["iterations"]
    except (KeyError, TypeError) as error:
        raise TPIPSError(f"{path} is no summary of a recipe ({type(error).__name__}: {error}); check the path.") from error
    return summary


if __name__ == "__main__":
    raise SystemExit(main())
