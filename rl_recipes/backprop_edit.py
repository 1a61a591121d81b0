"""Direct backpropagation of the reward into an image editor: DRaFT-K, AlignProp and ReFL, rewarded by TPIPS.

    accelerate launch rl_recipes/backprop_edit.py --reward tpips:preserve

The gradient of the reward goes through the decoder and the last denoising steps into the trained weights. It needs
rewards that are differentiable, as TPIPS is, and far fewer edits than the other recipes (rl_recipes/algorithms/backprop.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl_recipes import backprop
from rl_recipes.config import BackpropArguments
from rl_recipes.progress import Clock
from rl_recipes.recipe import run_recipe
from rl_recipes.session import Session


def train(session: Session) -> None:
    """The loop."""
    for step in session.iterations():
        edits, moved = backprop.update(session.job, session.draw(step), step)
        session.finish_iteration(step, edits, moved)


def check(session: Session) -> None:
    """Refuses a reward without gradient."""
    backprop.check_reward(session.job, session.queue.source[0])


def main(argv: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Runs the recipe; returns the exit code."""
    return run_recipe(BackpropArguments, train, argv, clock, check)


if __name__ == "__main__":
    sys.exit(main(clock=Clock.since_process_start()))
