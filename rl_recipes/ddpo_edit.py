"""DDPO for image editors, rewarded by TPIPS.

    accelerate launch rl_recipes/ddpo_edit.py --reward tpips:preserve

The update is that of GRPO, but an edit is compared with the earlier edits of its prompt instead of a group, so that one
edit of each prompt is enough (arXiv 2305.13301, per-prompt statistics; rl_recipes/algorithms/ddpo.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl_recipes import grpo
from rl_recipes.config import DDPOArguments
from rl_recipes.ddpo import Statistics, assign_prompt_advantages
from rl_recipes.progress import Clock
from rl_recipes.recipe import run_recipe
from rl_recipes.session import Session


def train(session: Session) -> None:
    """The loop."""
    job = session.job
    statistics = Statistics(job.args.algorithm.buffer_size)
    session.keep("statistics", statistics)
    for step in session.iterations():
        batches = grpo.sample(job, session.draw(step), step)
        assign_prompt_advantages(batches, job, statistics)
        moved = grpo.update(job, batches, step)
        session.finish_iteration(step, batches, moved)


def main(argv: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Runs the recipe; returns the exit code."""
    return run_recipe(DDPOArguments, train, argv, clock)


if __name__ == "__main__":
    sys.exit(main(clock=Clock.since_process_start()))
