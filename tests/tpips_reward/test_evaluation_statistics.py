"""Intervals, tests, ties and agreement against formulas, brute force and known answers."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import product

import numpy as np
import pytest

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.agreement import agreement, best_tie_threshold, ranking_agreement
from tpips_reward.evaluation.measures import measure
from tpips_reward.evaluation.rows import Row, Vote
from tpips_reward.evaluation.statistics import (
    bootstrap_weights,
    compare,
    holm,
    kendall_tau,
    mean_intervals,
    sign_flips,
)
from tpips_reward.rewards.terms import Scale


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def intervals(values: np.ndarray, clusters: np.ndarray | None = None, resamples: int = 4000):
    clusters = np.arange(len(values)) if clusters is None else clusters
    return mean_intervals(values, clusters, bootstrap_weights(rng(), int(clusters.max()) + 1, resamples))


def test_an_interval_has_the_width_of_the_standard_error():
    values = rng().normal(3.0, 2.0, size=(400, 1))
    found = intervals(values)[0]
    assert found.mean == pytest.approx(values.mean()) and found.count == 400
    half = 1.96 * values.std() / 20
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_rows_of_one_source_count_once():
    """Ten copies of each row tell nothing new: the interval stays as wide."""
    values = rng().normal(size=(40, 1))
    alone = intervals(values)[0]
    copied = intervals(np.repeat(values, 10, axis=0), np.repeat(np.arange(40), 10))[0]
    assert (copied.low, copied.high) == pytest.approx((alone.low, alone.high)) and copied.count == 400


def test_missing_values_are_left_out_and_never_zero():
    values = np.array([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan], [np.nan, np.nan, np.nan]])
    first, second, third = intervals(values)
    assert (first.mean, first.count) == (2.0, 2) and 1.0 <= first.low <= first.high <= 3.0
    assert (second.mean, second.low, second.high, second.count) == (5.0, None, None, 1)
    assert (third.mean, third.count) == (None, 0)


def test_the_same_generator_gives_the_same_interval():
    values = rng().random((30, 2))
    assert intervals(values) == intervals(values)


def compared(a: np.ndarray, b: np.ndarray, clusters: np.ndarray | None = None, flips: np.ndarray | None = None):
    clusters = np.arange(len(a)) if clusters is None else clusters
    count = int(clusters.max()) + 1
    signs = sign_flips(rng(), count, 4000) if flips is None else [flips[:20], flips[20:]]
    return compare((a - b)[:, None], clusters, bootstrap_weights(rng(), count), signs)[0]


def test_the_p_value_is_that_of_all_sign_flips():
    gaps = np.array([0.3, 0.1, 0.4, -0.1, 0.2, 0.3])
    every = np.array(list(product([-1.0, 1.0], repeat=6)))
    exact = np.mean(np.abs((every * gaps).sum(1)) >= gaps.sum() - 1e-9)
    found = compared(gaps, np.zeros(6), flips=every)
    assert found.p == pytest.approx((1 + exact * 64) / 65)
    assert compared(gaps, np.zeros(6)).p == exact, "64 flips are fewer than 4,000: each is counted once"
    assert compared(np.ones(5), np.zeros(5)).p == 2 / 2**5


def test_all_sign_flips_or_as_many_as_are_drawn(monkeypatch):
    monkeypatch.setattr("tpips_reward.evaluation.statistics._CHUNK", 35)
    every = np.concatenate(list(sign_flips(rng(), 5, 32)))
    assert {tuple(row) for row in every} == set(product([-1.0, 1.0], repeat=5)) - {(1.0,) * 5} and len(every) == 31
    assert len(np.concatenate(list(sign_flips(rng(), 5, 31)))) == 31
    assert len({tuple(row) for row in np.concatenate(list(sign_flips(rng(), 5, 31)))}) < 31, "drawn ones repeat"
    assert np.concatenate(list(sign_flips(rng(), 200, 10))).shape == (10, 200)


def test_pairs_beside_one_another_are_compared_as_if_alone(monkeypatch):
    gaps = rng().normal(0.2, 1.0, size=(40, 3))
    gaps[::3, 1] = gaps[:, 2] = np.nan
    clusters = np.arange(40) % 25
    weights, every = bootstrap_weights(rng(), 25), np.concatenate(list(sign_flips(rng(), 25, 999)))
    monkeypatch.setattr("tpips_reward.evaluation.statistics._CHUNK", 1000)
    chunks = list(sign_flips(rng(), 25, 999))
    assert {len(chunk) for chunk in chunks} == {40, 39} and np.array_equal(np.concatenate(chunks), every)
    together = compare(gaps, clusters, weights, chunks)
    alone = [compare(gaps[:, k : k + 1], clusters, weights, [every])[0] for k in range(3)]
    for one, other in zip(together[:2], alone[:2], strict=True):
        assert astuple(one.difference) == pytest.approx(astuple(other.difference))
        assert replace(one, difference=other.difference) == other
    assert alone[2] is None and together[0].sources == 25 and together[1].difference.count == 26 and together[2] is None


def test_equal_models_are_rarely_different():
    """Under exchangeable models p is below 0.1 about one time in ten."""
    generator = rng()
    below = [compared(generator.random(20), generator.random(20)).p < 0.1 for _ in range(100)]
    assert 2 <= sum(below) <= 19


def test_wins_ties_and_losses():
    a, b = np.array([0.5, 0.505, 0.3, np.nan, 0.9]), np.array([0.4, 0.5, 0.4, 0.2, np.nan])
    found = compared(a, b)
    assert (found.wins, found.ties, found.losses) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert found.difference.count == 3
    assert compared(np.full(3, np.nan), b[:3]) is None


def test_rows_needed_follow_the_formula_and_suffice():
    generator = rng()
    gaps = generator.normal(0.1, 0.5, size=200)
    found = compared(gaps, np.zeros(200))
    assert found.rows_needed == np.ceil(1.95996**2 * gaps.var(ddof=1) / gaps.mean() ** 2)
    weights, flips = bootstrap_weights(rng(), 200), list(sign_flips(rng(), 200, 100))
    wider = compare(gaps[:, None], np.arange(200), weights, flips, level=0.99)[0]
    assert wider.rows_needed == np.ceil(2.57583**2 * gaps.var(ddof=1) / gaps.mean() ** 2) > found.rows_needed
    many = compared(np.tile(gaps, 1 + 4 * found.rows_needed // 200), np.zeros(200 * (1 + 4 * found.rows_needed // 200)))
    assert many.difference.low > 0
    assert compared(np.zeros(5), np.zeros(5)).rows_needed is None


def test_holm():
    assert holm([0.01, 0.04, 0.03, None]) == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06), None]
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_kendall():
    assert kendall_tau([1, 2, 3], [1, 2, 3]) == pytest.approx(1.0)
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / np.sqrt(6))
    assert kendall_tau([1, 1], [1, 2]) is None


# --- measures


def test_the_measures_follow_the_formula():
    row = Row("k", None, "", {}, ("a", "b"), ("c",))  # type: ignore[arg-type]
    kept_only = Row("l", None, "", {}, ("a",), ())  # type: ignore[arg-type]
    scores = {"k": {"m": {"a": 0.8, "b": 0.6, "c": 0.9}, "n": {"a": 1.0, "b": 1.0, "c": 1.0}}, "l": {"m": {"a": -0.5}}}
    found = measure([row, kept_only], ["m", "n"], scores, Scale(-1.0, 1.0, 0.4))
    np.testing.assert_allclose(found.values["preservation"], [[0.7, 1.0], [0.0, np.nan]], atol=1e-12)
    np.testing.assert_allclose(found.values["change"], [[0.25, 0.0], [np.nan, np.nan]], atol=1e-12)
    np.testing.assert_allclose(found.values["overall"], [[np.sqrt(0.7 * 0.25), 0.0], [np.nan, np.nan]], atol=1e-12)
    np.testing.assert_allclose(found.aspects["target"]["c"], [[0.1, 0.0], [np.nan, np.nan]], atol=1e-12)
    np.testing.assert_allclose(found.aspects["preserve"]["a"], [[0.8, 1.0], [-0.5, np.nan]])


def test_minus_distances_are_measured_too():
    row = Row("k", None, "", {}, ("a",), ("c",))  # type: ignore[arg-type]
    found = measure([row], ["m"], {"k": {"m": {"a": -0.02, "c": -0.05}}}, Scale(float("-inf"), 0.0, 0.1))
    assert found.values["preservation"][0, 0] == pytest.approx(np.exp(-0.2))
    assert found.values["change"][0, 0] == pytest.approx(0.5)


# --- votes


def judge(votes: list[Vote], scores: dict[str, float], rule: str, sources: dict[str, str] | None = None):
    drawn = sources or {vote.key: vote.key for vote in votes}
    return agreement(votes, lambda key, model, measure: scores.get(f"{key}{model}"), drawn, rule, rng(), 200)


@pytest.mark.parametrize("rule", ["plain", "editscore", "tiger"])
def test_the_intervals_of_agreement_draw_sources(rule):
    keys = [f"{source}-{row}" for source in range(4) for row in range(25)]  # right on all rows of a source, or on none
    votes = [Vote(key, "a", "b", 1 if row % 2 else -1, group=key) for row, key in enumerate(keys)]
    scores = {f"{v.key}a": 0.5 + 0.1 * v.label * (1 if v.key[0] < "2" else -1) for v in votes}
    scores |= {f"{v.key}b": 0.5 for v in votes}
    wide = judge(votes, scores, rule, {key: key[0] for key in keys})[0]
    assert wide["accuracy"] == 0.5 and (wide["low"], wide["high"]) == (0.0, 1.0)
    narrow = judge(votes, scores, rule)[0]
    assert narrow["low"] > 0.35 and narrow["high"] < 0.65


def test_plain_votes_drop_peoples_ties_and_halve_the_metrics():
    scores = {"1a": 0.9, "1b": 0.1, "2a": 0.3, "2b": 0.6, "3a": 0.5, "3b": 0.5, "4a": 1.0, "4b": 0.0}
    votes = [Vote("1", "a", "b", 1), Vote("2", "a", "b", 1), Vote("3", "a", "b", -1), Vote("4", "a", "b", 0),
             Vote("5", "a", "b", 1)]  # fmt: skip
    found = judge(votes, scores, "plain")[0]
    assert found["accuracy"] == pytest.approx(0.5) and found["counted"] == 3
    assert (found["human_ties"], found["metric_ties"], found["unscored"]) == (1, 1, 1)


def test_editscores_ties_are_wrong():
    scores = {"1first": 0.5, "1second": 0.5, "2first": 0.9, "2second": 0.2}
    votes = [Vote(key, "first", "second", 1, "preservation") for key in ("1", "2")]
    found = judge(votes, scores, "editscore")[0]
    assert found["accuracy"] == 0.5 and found["dimension"] == "preservation"


def test_vcrewards_human_ties_are_left_out_and_the_metrics_are_wrong():
    scores = {"1A": 0.5, "1B": 0.5, "2A": 0.9, "2B": 0.2, "3A": 0.9, "3B": 0.2}
    votes = [Vote("1", "A", "B", -1), Vote("2", "A", "B", 1), Vote("3", "A", "B", 0)]
    found = judge(votes, scores, "vcreward")[0]
    assert (found["accuracy"], found["counted"], found["human_ties"]) == (0.5, 2, 1)


def test_the_tie_threshold_is_the_best_of_all():
    generator = rng()
    for _ in range(20):
        labels = generator.integers(-1, 2, size=15)
        gaps = np.round(labels * generator.random(15) + 0.4 * generator.normal(size=15), 1)

        def hits(threshold: float, labels: np.ndarray = labels, gaps: np.ndarray = gaps) -> int:
            return int((np.where(np.abs(gaps) <= threshold, 0, np.sign(gaps)) == labels).sum())

        best = max(hits(threshold) for threshold in [0.0, *np.abs(gaps)])
        assert hits(best_tie_threshold(labels.tolist(), gaps.tolist())) == best


def test_tigers_rankings_are_right_as_a_whole():
    scores = {"1A": 0.9, "1B": 0.1, "2A": 0.50, "2B": 0.52}
    scores |= {"3A": 0.1, "3B": 0.2, "3C": 0.9, "4A": 0.1, "4B": 0.9, "4C": 0.5}
    orders = {"1": [("A", "B", 1)], "2": [("A", "B", 0)]}
    orders["3"] = [("A", "B", -1), ("A", "C", -1), ("B", "C", -1)]
    orders["4"] = [("A", "B", -1), ("A", "C", 1), ("B", "C", 1)]
    orders["5"] = [("A", "B", 1)] * 3
    scores |= {"5A": 0.4, "5B": 0.1}  # whose third candidate was not scored
    votes = [Vote(key, *pair, group=key) for key, pairs in orders.items() for pair in pairs]
    votes[-1] = Vote("5", "A", "C", 1, group="5")
    found = judge(votes, scores, "tiger")[0]
    assert found["tie_threshold"] == pytest.approx(0.02) and found["unscored"] == 1
    pairs, triples = found["rankings"]
    assert (pairs["rankings"], pairs["all_right"], pairs["pair_accuracy"]) == (2, 1.0, 1.0)
    assert (triples["rankings"], triples["all_right"]) == (2, 0.5) and triples["pair_accuracy"] == pytest.approx(5 / 6)
    assert found["without_ties"] == pytest.approx(8 / 9)


def test_rankings_of_models():
    votes = [Vote("1", "a", "b", 1), Vote("1", "b", "c", 1), Vote("1", "a", "c", 1)]
    assert ranking_agreement(votes, ["a", "b", "c"], [0.9, 0.5, 0.1]) == pytest.approx(1.0)
    assert ranking_agreement(votes, ["a", "b", "c"], [0.9, 0.5, None]) is None


def test_unknown_settings():
    with pytest.raises(TPIPSError, match="counted by plain, editscore, vcreward, tiger, not 'x'"):
        judge([Vote("1", "a", "b", 1)], {}, "x")
    with pytest.raises(TPIPSError, match="100 or more"):
        bootstrap_weights(rng(), 5, 10)
    with pytest.raises(TPIPSError, match="nothing to resample"):
        bootstrap_weights(rng(), 0)
