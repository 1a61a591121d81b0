"""What mid and early fusion share within a call: made once, dropped after the last use."""

from __future__ import annotations

import numpy as np

from tpips_reward.fusion.sharing import Shared, windows


def test_each_value_is_made_once_and_missing_ones_together():
    made: list[list[int]] = []
    shared = Shared(lambda keys: made.append(keys) or [key * 10 for key in keys], {1: 2, 2: 1, 3: 1})
    assert shared.get([1, 2, 1]) == [10, 20, 10]
    assert shared.get([3, 1]) == [30, 10]
    assert made == [[1, 2], [3]]


def test_values_go_after_their_last_use():
    shared = Shared(lambda keys: keys, {"a": 2, "b": 1})
    shared.get(["a", "b"])
    shared.release(["a", "b"])
    assert len(shared) == 1
    shared.release(["a"])
    assert len(shared) == 0


def test_windows():
    sizes = {"source": 4, "a": 4, "b": 4, "c": 4, "large": 50}
    pairs = [("source", "a"), ("source", "b"), ("source", "c"), ("source", "large"), ("a", "b"), ("a", "a")]
    assert windows(pairs, sizes, 12) == [[0, 1], [2], [3], [4, 5]]
    assert windows(pairs, sizes, 1000) == [[0, 1, 2, 3, 4, 5]]
    assert windows([], sizes, 12) == []


def test_windows_keep_the_order_and_the_budget():
    rng = np.random.default_rng(0)
    sizes = dict(enumerate(rng.integers(1, 30, 40).tolist()))
    pairs = [tuple(pair) for pair in rng.integers(0, 40, (200, 2)).tolist()]
    runs = windows(pairs, sizes, 100)
    assert [index for run in runs for index in run] == list(range(200))
    for run in runs:
        assert len(run) == 1 or sum(sizes[key] for key in {key for index in run for key in pairs[index]}) <= 100
