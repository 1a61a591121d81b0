"""SDE windows: which steps are stochastic in which iteration."""

from __future__ import annotations

from collections import Counter

import pytest

from rl_recipes.algorithms.windows import sde_window
from tpips_reward.errors import TPIPSError


def _starts(iterations, **options):
    windows = [sde_window(i, **options) for i in iterations]
    for window in windows:
        assert window == tuple(range(window[0], window[0] + options["size"]))
        assert window[-1] < options["limit"]
    return [window[0] for window in windows]


def test_the_first_window_stays():
    assert _starts([1, 2, 77], size=3, limit=8) == [0, 0, 0]
    assert sde_window(5, size=8, limit=8) == tuple(range(8))


def test_a_sliding_window_moves_by_its_stride_every_few_iterations():
    assert _starts(range(1, 10), kind="slide", size=2, limit=6, every=2) == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert _starts(range(1, 8), kind="slide", size=2, limit=6, stride=2) == [0, 2, 4, 0, 2, 4, 0]


def test_the_last_place_is_flush_with_the_end_and_the_window_starts_over():
    options = {"kind": "slide", "size": 3, "limit": 8, "stride": 3}
    assert _starts(range(1, 7), **options) == [0, 3, 5, 0, 3, 5]
    assert sde_window(9, kind="slide", size=4, limit=4, stride=2) == (0, 1, 2, 3)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_sliding_window_reaches_every_step(stride):
    reached = {step for i in range(1, 12) for step in sde_window(i, kind="slide", size=3, limit=10, stride=stride)}
    assert reached == set(range(10))


def test_a_random_window_is_a_function_of_seed_and_iteration_and_moves():
    options = {"kind": "random", "size": 2, "limit": 6}
    starts = _starts(range(1, 501), **options, seed=3)
    assert starts == _starts(range(1, 501), **options, seed=3)
    assert starts != _starts(range(1, 501), **options, seed=4)
    # Resumed in the middle it goes on as it would have.
    assert starts[200:] == _starts(range(201, 501), **options, seed=3)
    # 500 draws of 5 places: 100 each, with a standard deviation of 9.
    counts = Counter(starts)
    assert set(counts) == {0, 1, 2, 3, 4}
    assert all(60 < count < 140 for count in counts.values())


def test_a_random_window_stays_for_a_few_iterations():
    starts = _starts(range(1, 61), kind="random", size=1, limit=8, every=3, seed=0)
    assert all(len(set(starts[i : i + 3])) == 1 for i in range(0, 60, 3))
    assert len(set(starts)) > 4


@pytest.mark.parametrize(
    "iteration, options, message",
    [
        (1, {"kind": "jump", "size": 1, "limit": 4}, "first, slide, random"),
        (0, {"size": 1, "limit": 4}, "iteration .* at least 1, but it is 0"),
        (1, {"size": 0, "limit": 4}, "size .* at least 1"),
        (1, {"size": 2, "limit": 4, "every": 0}, "every .* at least 1"),
        (1, {"size": 2, "limit": 4, "stride": 0, "kind": "slide"}, "stride .* at least 1"),
        (1, {"size": 5, "limit": 4}, "5 steps does not fit in 4"),
        (1, {"size": 2, "limit": 8, "stride": 3, "kind": "slide"}, "stride of 2 or less"),
    ],
)
def test_bad_settings_are_named(iteration, options, message):
    with pytest.raises(TPIPSError, match=message):
        sde_window(iteration, **options)
