"""Flow-GRPO for image editors, rewarded by TPIPS.

    accelerate launch rl_recipes/grpo_edit.py --reward tpips:preserve
    accelerate launch rl_recipes/grpo_edit.py --data edits.jsonl --editor Qwen/Qwen-Image-Edit-2511
        --metric released:late

An iteration samples a group of edits for each of a few (source, instruction) pairs, scores them, and raises the
likelihood of those that scored above their group's mean (Flow-GRPO; rl_recipes/algorithms has the formulas). Dance-SDE,
CPS, moving windows and GRPO-Guard are settings.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl_recipes import grpo
from rl_recipes.config import GRPOArguments
from rl_recipes.progress import Clock
from rl_recipes.recipe import run_recipe
from rl_recipes.session import Session


def train(session: Session) -> None:
    """The loop."""
    job = session.job
    for step in session.iterations():
        batches = grpo.sample(job, session.draw(step), step)
        grpo.assign_group_advantages(batches, job)
        moved = grpo.update(job, batches, step)
        session.finish_iteration(step, batches, moved)


def main(argv: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Runs the recipe; returns the exit code."""
    return run_recipe(GRPOArguments, train, argv, clock)


if __name__ == "__main__":
    sys.exit(main(clock=Clock.since_process_start()))
