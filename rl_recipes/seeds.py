"""Randomness by name: each draw has a generator of its own, a function of what it is for."""

from __future__ import annotations

import numpy as np
import torch

#: What a stream of random numbers is for: the second key of its generator, after the seed.
NOISE, WINDOW, EVALUATION, ADAPTER, FORWARD, START = range(6)


def generator(*keys: int) -> torch.Generator:
    """A CPU generator whose stream is a function of the keys, independent between different keys.

    >>> a, b = generator(0, 1, 2), generator(0, 1, 3)
    >>> bool(torch.rand(1, generator=a) == torch.rand(1, generator=b))
    False
    """
    # SeedSequence mixes the keys, where sums or products of them would collide; alone it would ignore zeros at the end.
    state = np.random.SeedSequence([len(keys), *keys]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 31 ^ int(state[1]))
