"""Which denoising steps of an iteration are stochastic: a window that stays, slides or jumps.

Only stochastic steps can be trained on, and each costs a pass with gradients, so a few are enough; the others follow the
ODE. With `limit` steps to choose from, a window of `size` steps begins at 0 (the noisiest step) up to limit - size.

- first: steps 0 to size - 1, always.
- slide (MixGRPO): begins at step 0 and moves on by `stride` every `every` iterations. Its last place is flush with the
  end; then it starts over.
- random (Flow-GRPO-Fast): every `every` iterations a new place, each with equal chance.

A window is a function of (seed, iteration) alone: all processes and a resumed run agree on it.
"""

from __future__ import annotations

import torch

from rl_recipes.seeds import WINDOW, generator
from tpips_reward.errors import TPIPSError

KINDS = ("first", "slide", "random")


def sde_window(
    iteration: int,
    *,
    size: int,
    limit: int,
    kind: str = "first",
    every: int = 1,
    stride: int = 1,
    seed: int = 0,
) -> tuple[int, ...]:
    """The stochastic steps of an iteration, ascending.

    Args:
        iteration: from 1.
        size: how many steps are stochastic.
        limit: they are among the first so many steps: num_steps, or fewer (cps has no noise in the very last step).
        every: iterations before the window moves (slide, random).
        stride: steps that it moves by (slide).
        seed: seed of the run (random).

    >>> [sde_window(i, kind="slide", size=2, limit=5, stride=2) for i in (1, 2, 3, 4)]
    [(0, 1), (2, 3), (3, 4), (0, 1)]

    Raises:
        TPIPSError: for an unknown kind, numbers below 1, a window longer than `limit`, or a stride that leaves steps out.
    """
    if kind not in KINDS:
        raise TPIPSError(f"Unknown kind of window {kind!r}; use one of {', '.join(KINDS)}.")
    for name, value in {"iteration": iteration, "size": size, "every": every, "stride": stride}.items():
        if value < 1:
            raise TPIPSError(f"{name} of an SDE window must be at least 1, but it is {value}.")
    if size > limit:
        raise TPIPSError(f"An SDE window of {size} steps does not fit in {limit}; make it shorter or add steps.")
    if kind == "slide" and stride > size:
        raise TPIPSError(
            f"A window of {size} steps that moves by {stride} never reaches the steps between; "
            f"use a stride of {size} or less."
        )
    last, move = limit - size, (iteration - 1) // every
    start = 0
    if kind == "slide":
        places = -(-last // stride) + 1
        start = min(move % places * stride, last)
    elif kind == "random":
        start = int(torch.randint(last + 1, (), generator=generator(seed, WINDOW, move)))
    return tuple(range(start, start + size))
