"""Finished runs of the main job against what it is meant to reach, a row a run.

    python -m rl_recipes.goals runs/seed0 runs/seed1 runs/seed2

reads each run's ``summary.json`` and prints a Markdown table; a cell in bold misses its goal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_recipes.runs import read_json
from tpips_reward.arguments import HelpFormatter
from tpips_reward.errors import TPIPSError, exit_on_errors


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
    """Names of the goals that a run misses, "seconds" among them; a measure that is not known is missed.

    Args:
        summary: content of ``summary.json``.
    """
    before, after = summary["before"], summary["after"]
    out = [
        goal.measure
        for goal in GOALS
        if before[goal.measure] is None or not goal.met(before[goal.measure], after[goal.measure])
    ]
    return out + (["seconds"] if summary["seconds"] > MAX_SECONDS else [])


def goals_table(summaries: Sequence[dict[str, Any]]) -> str:
    """The runs as a Markdown table, before → after in each cell; what misses its goal is bold."""
    names = ["seed", *(goal.measure for goal in GOALS), "minutes", "iterations"]
    limits = ["goal", *(goal.text for goal in GOALS), f"at most {MAX_SECONDS / 60:g}", ""]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", f"| {' | '.join(limits)} |"]
    for summary in summaries:
        bad = missed(summary)
        cells = [str(summary["seed"])]
        for goal in GOALS:
            cell = _change(summary["before"][goal.measure], summary["after"][goal.measure])
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
    """Prints the table; returns 0 when every run meets every goal, 1 when one does not.

    Raises:
        TPIPSError: for a run that cannot be read.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="output folders of finished runs")
    args = parser.parse_args(arguments)
    summaries = [_summary(run / "summary.json") for run in args.runs]
    print(goals_table(summaries))
    return int(any(missed(summary) for summary in summaries))


def _summary(path: Path) -> dict[str, Any]:
    summary = read_json(path)
    try:
        missed(summary)
        summary["seed"], summary["iterations"]
    except (KeyError, TypeError) as error:
        raise TPIPSError(f"{path} is no summary of rl_recipes/grpo_edit.py ({type(error).__name__}: {error}).") from error
    return summary


if __name__ == "__main__":
    raise SystemExit(main())
