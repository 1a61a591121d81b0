"""Paired differences by category and by aspect, against direct computations from the single values."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from tpips_reward.evaluation.differences import FEWEST_SOURCES, Resampling, differences_within, overall_differences
from tpips_reward.evaluation.image_files import ImageFile
from tpips_reward.evaluation.measures import MEASURES, Measured, measure
from tpips_reward.evaluation.page import MAX_DIFFERENCES, render_page, shown_differences
from tpips_reward.evaluation.report import write_report
from tpips_reward.evaluation.rows import Dataset, Row
from tpips_reward.evaluation.statistics import bootstrap_weights
from tpips_reward.evaluation.summary import summarize
from tpips_reward.rewards.terms import Scale

MODELS = ("a", "b", "c")
SCALE = Scale(-1.0, 1.0, 0.4)
HOW = Resampling(resamples=4000, seed=3)


def measured(count: int = 20, models: tuple[str, ...] = MODELS, aspects: int = 3, seed: int = 0) -> Measured:
    """Rows in two categories; the i-th aspect to keep is in every row whose number is at most 12 - 4 i, or in all."""
    rng = np.random.default_rng(seed)
    rows, scores = [], {}
    for index in range(count):
        keep = tuple(f"keep {k}" for k in range(aspects) if k == 0 or index < 12 - 4 * k)
        row = Row(f"{index}", ImageFile(Path("x.png")), "", {}, keep, ("paint",), "few" if index < 7 else "many")
        rows.append(row)
        # every third row lacks the last model, and where it has it, it is worse: only pairing sees that
        has = models if index % 3 else models[:-1]
        level = rng.normal(0.6, 0.15)
        scores[row.key] = {
            model: {aspect: float(np.clip(level - 0.05 * place + rng.normal(0, 0.05), -1, 1)) for aspect in row.aspects}
            for place, model in enumerate(has)
        }
    return measure(rows, models, scores, SCALE)


def found(data: Measured, sources: np.ndarray, how: Resampling = HOW) -> list[dict]:
    weights = bootstrap_weights(np.random.default_rng(0), int(sources.max()) + 1, how.resamples)
    return differences_within(data, MODELS, sources, weights, how)


def direct(gaps: np.ndarray, sources: np.ndarray) -> dict[str, float]:
    """Mean, p of all sign flips of whole sources, and an interval of sources of the whole set drawn one by one."""
    groups = [gaps[(sources == source) & ~np.isnan(gaps)] for source in np.unique(sources)]
    totals = np.array([group.sum() for group in groups if len(group)])
    flips = np.array(list(product([-1.0, 1.0], repeat=len(totals)))) @ totals
    rng = np.random.default_rng(9)
    drawn = [np.concatenate([groups[k] for k in rng.integers(len(groups), size=len(groups))]) for _ in range(1000)]
    low, high = np.percentile([values.mean() for values in drawn if len(values)], [2.5, 97.5])
    return {"mean": np.nanmean(gaps), "p": np.mean(np.abs(flips) >= abs(totals.sum()) - 1e-9), "low": low, "high": high,
            "count": sum(map(len, groups)), "sources": len(totals)}  # fmt: skip


def test_the_numbers_are_those_of_the_single_values():
    data, sources = measured(), np.arange(20) % 13  # some rows share a source
    entries = found(data, sources)
    tables = {("category", category, name): np.where([[row.category == category] for row in data.rows], data.values[name], np.nan)
              for category in ("few", "many") for name in MEASURES}  # fmt: skip
    tables |= {(role, aspect, {"preserve": "similarity", "target": "distance"}[role]): values
               for role, named in data.aspects.items() for aspect, values in named.items()}  # fmt: skip
    assert len(tables) == 10 and len(entries) == 10 * 3
    assert {(e["by"], e["name"], e["measure"], e["first"], e["second"]) for e in entries} == {
        (*part, *pair) for part in tables for pair in combinations(MODELS, 2)}  # fmt: skip
    for entry in entries:
        values = tables[entry["by"], entry["name"], entry["measure"]]
        gaps = values[:, MODELS.index(entry["first"])] - values[:, MODELS.index(entry["second"])]
        expected = direct(gaps, sources)
        difference, width = entry["difference"], expected["high"] - expected["low"]
        assert difference["mean"] == pytest.approx(expected["mean"])
        assert (difference["count"], entry["sources"]) == (expected["count"], expected["sources"])
        assert entry["p"] == pytest.approx(expected["p"], abs=0.025)
        assert difference["low"] == pytest.approx(expected["low"], abs=0.2 * width)
        assert difference["high"] == pytest.approx(expected["high"], abs=0.2 * width)
        margin = 0.01 * (1.0 if entry["by"] == "category" else SCALE.change_scale)
        known = gaps[~np.isnan(gaps)]
        assert (entry["wins"], entry["losses"]) == (np.mean(known > margin), np.mean(known < -margin))
    # the last model has other rows than the first: the difference of the means is another number
    gap = next(e for e in entries if (e["by"], e["first"], e["second"]) == ("target", "a", "c"))
    means = np.nanmean(data.aspects["target"]["paint"], axis=0)
    assert abs(gap["difference"]["mean"] - (means[0] - means[2])) > 0.005


def holm(p_values: list[float]) -> list[float]:
    """By the definition: the largest of p_(j) (m - j) over all j up to the place of p, at most 1."""
    ordered = sorted(p_values)
    return [max(min(1.0, q * (len(ordered) - j)) for j, q in enumerate(ordered) if q <= p) for p in p_values]


def test_each_kind_is_a_family_and_small_parts_are_in_none():
    data, sources = measured(), np.arange(20)
    entries = found(data, sources)
    families = [("category", name) for name in MEASURES] + [("preserve", "similarity"), ("target", "distance")]
    for by, name in families:
        family = [entry for entry in entries if (entry["by"], entry["measure"]) == (by, name)]
        tested = [entry for entry in family if entry["sources"] >= FEWEST_SOURCES]
        assert [e["p_holm"] for e in tested] == pytest.approx(holm([e["p"] for e in tested]))
        assert all(entry["p_holm"] is None and entry["p"] is not None for entry in family if entry not in tested)
    few = [entry for entry in entries if entry["name"] == "keep 2"]
    assert len(few) == 3 and {entry["sources"] for entry in few} == {4, 2}
    assert {e["name"] for e in entries if e["by"] == "preserve" and e["p_holm"] is not None} == {"keep 0", "keep 1"}


def test_a_large_family_can_still_tell_a_difference():
    """200 flips give no p below 0.005, which 120 tests would lift to 0.6; a family draws as many as it needs."""
    rng = np.random.default_rng(0)
    rows = [Row(f"{n}", ImageFile(Path("x.png")), "", {}, tuple(f"aspect {k}" for k in range(40)), ()) for n in range(20)]
    scores = {row.key: {m: {a: float(v + 0.1 * (m == "a")) for a, v in zip(row.aspects, rng.normal(0, 0.01, 40), strict=True)}
                        for m in MODELS} for row in rows}  # fmt: skip
    entries = found(measure(rows, MODELS, scores, SCALE), np.arange(20), Resampling(resamples=200))
    adjusted = {(e["first"], e["second"]): [] for e in entries}
    for entry in entries:
        if entry["by"] == "preserve":
            adjusted[entry["first"], entry["second"]].append(entry["p_holm"])
    assert max(adjusted["a", "b"]) <= 0.02 and max(adjusted["a", "c"]) <= 0.02 and min(adjusted["b", "c"]) > 0.05


def test_parts_and_pairs_that_share_no_two_sources_are_left_out():
    data = measured(2)
    assert {entry["sources"] for entry in found(data, np.arange(2))} == {2}
    assert found(data, np.zeros(2, dtype=np.int64)) == []
    weights = bootstrap_weights(np.random.default_rng(0), 1, 200)
    overall = overall_differences(data, MODELS, np.zeros(2, dtype=np.int64), weights, HOW)
    assert len(overall) == 9 and {entry["p"] for entry in overall} == {None}
    assert differences_within(data, ("a",), np.zeros(2, dtype=np.int64), weights, HOW) == []


@pytest.fixture(scope="module")
def large() -> dict:
    """The report of six models on 100 rows with 300 aspects, 15 pairs of models in each."""
    rng = np.random.default_rng(0)
    models = tuple(f"checkpoint-{n}00" for n in range(6))
    rows = [Row(f"{n}", ImageFile(Path("x.png")), "make the car red",
                {model: ImageFile(Path("y.png")) for model in models},
                tuple(f"aspect number {k}" for k in rng.choice(150, 4, replace=False)),
                tuple(f"change number {k}" for k in rng.choice(150, 4, replace=False)), f"kind {n % 11}")
            for n in range(100)]  # fmt: skip
    scores = {row.key: {m: {a: float(rng.uniform(0.5, 1)) for a in row.aspects} for m in models} for row in rows}
    sources = {row.key: row.key for row in rows}
    data = measure(rows, (*models, "control: noise"), scores, SCALE)
    report = summarize(Dataset("large", tuple(rows), models), data, sources, [], Resampling(resamples=200))
    return report | {"metric": {"name": "x", "change_scale_measured": True}, "settings": {}, "work": {}, "aspect_origins": {}}


def test_many_differences_stay_readable(large, tmp_path):
    total = len(large["differences"])
    shown = shown_differences(large, MAX_DIFFERENCES)
    assert total > 1.5 * MAX_DIFFERENCES and MAX_DIFFERENCES >= len(shown) > MAX_DIFFERENCES - 200
    kinds = {(entry["by"], entry["measure"]) for entry in large["differences"]}
    for kind in kinds:  # of each kind those with the most rows
        counts = [e["difference"]["count"] for e in large["differences"] if (e["by"], e["measure"]) == kind]
        mine = [e["difference"]["count"] for e in shown if (e["by"], e["measure"]) == kind]
        assert mine and mine == counts[: len(mine)]
    write_report(tmp_path, large, [], 0)
    page = (tmp_path / "report.html").read_text()
    assert f"{len(shown)} of {total} differences" in page and "differences.csv has all" in page
    without = render_page({**large, "differences": []}, [], 0)
    assert len(page) - len(without) < 1_100_000
    assert (tmp_path / "report.md").stat().st_size < 120_000
    assert len((tmp_path / "differences.csv").read_text().splitlines()) == 1 + len(large["comparisons"]) + total
