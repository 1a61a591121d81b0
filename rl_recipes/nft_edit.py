"""DiffusionNFT for image editors, rewarded by TPIPS.

    accelerate launch rl_recipes/nft_edit.py --reward tpips:preserve

The old policy samples groups of edits with the ODE. Each edit is noised again, and the velocity is trained so that good
ones pull it and bad ones push it: no stochastic steps, no likelihoods (arXiv 2509.16117; rl_recipes/algorithms/nft.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl_recipes import nft
from rl_recipes.collecting import collect
from rl_recipes.config import NFTArguments
from rl_recipes.grpo import assign_group_advantages
from rl_recipes.progress import Clock
from rl_recipes.recipe import run_recipe
from rl_recipes.session import Session
from rl_recipes.weights import ShadowWeights


def train(session: Session) -> None:
    """The loop."""
    job = session.job
    old = ShadowWeights(job.editor.lora_parameters())
    session.keep("old policy", old)
    for step in session.iterations():
        with old.swapped():
            batches = [collect(job, part, step) for part in session.draw(step)]
        assign_group_advantages(batches, job)
        moved = nft.update(job, batches, old, step)
        session.finish_iteration(step, batches, moved)


def main(argv: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Runs the recipe; returns the exit code."""
    return run_recipe(NFTArguments, train, argv, clock)


if __name__ == "__main__":
    sys.exit(main(clock=Clock.since_process_start()))
