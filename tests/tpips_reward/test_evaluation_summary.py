"""What the report is made of: each figure against scores that are written down here, and every setting where it counts."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_files import write_edits
from fake_metrics import RegionMetric

from tpips_reward.aspects import Proposal, Request
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import Settings, evaluate, read_manifest, score_rows
from tpips_reward.evaluation.cache import ScoreCache
from tpips_reward.evaluation.controls import CONTROLS, NOISE
from tpips_reward.evaluation.differences import Resampling
from tpips_reward.evaluation.examples import MAX_PICTURES, Example, add_files, add_pictures, choose
from tpips_reward.evaluation.image_files import ImageFile
from tpips_reward.evaluation.markdown import markdown
from tpips_reward.evaluation.measures import measure
from tpips_reward.evaluation.page import render_page
from tpips_reward.evaluation.proposals import propose_aspects, without_aspects
from tpips_reward.evaluation.report import write_report
from tpips_reward.evaluation.rows import Dataset, Problem, Row, Vote
from tpips_reward.evaluation.summary import summarize
from tpips_reward.rewards.terms import Scale

#: With a change scale of 1 a similarity f to the source preserves f and changes 1 - f, where it is not negative.
SCALE = Scale(-1.0, 1.0, 1.0)
HOW = Resampling(resamples=400)

Scores = Mapping[str, Mapping[str, Mapping[str, float]]]


def edit(key: str, models: Sequence[str], **fields: Any) -> Row:
    outputs = {model: ImageFile(Path(f"{model}/{key}.png")) for model in models}
    return Row(key, ImageFile(Path(f"in/{key}.png")), "paint it",
               **{"outputs": outputs, "preserve": ("background",), "target": ("paint",), **fields})  # fmt: skip


def both(value: float) -> dict[str, float]:
    """Similarities that make preservation, change and overall all `value`."""
    return {"background": value, "paint": 1 - value}


def summary(
    rows: Sequence[Row],
    models: Sequence[str],
    scores: Scores,
    *,
    sources: dict[str, str] | None = None,
    problems: Sequence[Problem] = (),
    how: Resampling = HOW,
    **fields: Any,
) -> dict[str, Any]:
    """A report as `evaluate` makes it; by default each row has a source of its own."""
    data = measure(rows, models, scores, SCALE)
    report = summarize(Dataset("edits", tuple(rows), tuple(models), **fields), data,
                       sources or {row.key: row.key for row in rows}, problems, how)  # fmt: skip
    facts: dict[str, Any] = {"metric": {"name": "x", "change_scale_measured": True}}
    return report | facts | {"settings": {}, "work": {}, "aspect_origins": {}}


def all_intervals(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """An interval from each part of the report, of the model "a" or of a - b."""
    aspects = {entry["role"]: entry["cells"]["a"] for entry in report["aspects"]}
    differences = {entry["by"]: entry["difference"] for entry in report["differences"]}
    model = next(entry for entry in report["models"] if entry["model"] == "a")
    return {
        "model": model["overall"],
        "common": model["overall_common"],
        "category": report["categories"][0]["cells"]["a"]["overall"],
        "comparison": report["comparisons"][0]["difference"],
        **{f"aspect {role}": cell for role, cell in aspects.items()},
        **{f"difference {by}": interval for by, interval in differences.items()},
    }


def width(interval: dict[str, Any]) -> float:
    return interval["high"] - interval["low"]


def two_models(values: np.ndarray) -> tuple[list[Row], Scores]:
    """A row for each number, which is what the model "a" gets; "b" gets its square."""
    rows = [edit(f"{index}", ("a", "b")) for index in range(len(values))]
    return rows, {row.key: {"a": both(v), "b": both(v * v)} for row, v in zip(rows, values, strict=True)}


def test_rows_of_one_source_are_drawn_together():
    values = np.random.default_rng(0).uniform(0.1, 0.9, 10)
    rows, scores = two_models(values)
    alone = summary(rows, ("a", "b"), scores)
    rows, scores = two_models(np.repeat(values, 30))
    together = summary(rows, ("a", "b"), scores, sources={row.key: f"photo {int(row.key) // 30}" for row in rows})
    apart = summary(rows, ("a", "b"), scores)
    assert (together["counts"]["sources"], together["counts"]["rows"], apart["counts"]["sources"]) == (10, 300, 300)
    first, second, third = map(all_intervals, (alone, together, apart))
    assert set(first) == set(second) and len(first) == 9
    for name, interval in first.items():  # 30 equal rows tell no more than one
        assert second[name]["mean"] == pytest.approx(interval["mean"]) and second[name]["count"] == 300
        assert [second[name][end] for end in ("low", "high")] == pytest.approx([interval["low"], interval["high"]])
        assert width(second[name]) > 3.5 * width(third[name]) > 0  # sqrt(30) = 5.5, as if they were independent
    assert together["comparisons"][0]["sources"] == 10 and {entry["sources"] for entry in together["differences"]} == {10}


def test_models_are_ordered_by_the_rows_that_all_have():
    """The model "half" leaves out the hard rows, so its own mean is the highest."""
    rows = [edit(f"{n}", ("better", "worse", "half") if n < 4 else ("better", "worse")) for n in range(8)]
    easy = {"worse": both(0.6), "half": both(0.7), "better": both(0.8)}
    hard = {"worse": both(0.5), "better": both(0.1)}
    scores = {row.key: easy if int(row.key) < 4 else hard for row in rows}
    report = summary(rows, ("worse", "half", "better"), scores)
    own = {entry["model"]: entry["overall"]["mean"] for entry in report["models"]}
    common = {entry["model"]: entry["overall_common"]["mean"] for entry in report["models"]}
    assert own == pytest.approx({"better": 0.45, "half": 0.7, "worse": 0.55})
    assert common == pytest.approx({"better": 0.8, "half": 0.7, "worse": 0.6})
    assert [entry["model"] for entry in report["models"]] == ["better", "half", "worse"]


def test_the_level_is_that_of_every_interval():
    rows, scores = two_models(np.random.default_rng(1).uniform(0.1, 0.9, 12))
    votes = tuple(Vote(row.key, "a", "b", 1 if n % 3 else -1) for n, row in enumerate(rows))
    wide, narrow = (
        summary(rows, ("a", "b"), scores, how=Resampling(resamples=400, level=level), votes=votes) for level in (0.95, 0.5)
    )
    parts = all_intervals(wide), all_intervals(narrow)
    for report, found in zip((wide, narrow), parts, strict=True):
        found["votes"] = report["votes"]["agreement"][0]
    for name, interval in parts[0].items():  # of a normal distribution 1.96 : 0.67
        assert 0 < width(parts[1][name]) < 0.6 * width(interval), name


# --- votes


def test_the_page_tells_how_the_ranking_of_models_agrees():
    """People prefer b to a, and both to c; the scores prefer a to b: one of three pairs the other way round."""
    rows = [edit(f"{n}", ("a", "b", "c")) for n in range(4)]
    scores = {row.key: {"a": both(0.8), "b": both(0.7), "c": both(0.2)} for row in rows}
    choices = (("b", "a"), ("a", "c"), ("b", "c"))
    votes = tuple(Vote(row.key, first, second, 1) for row in rows for first, second in choices)
    report = summary(rows, ("a", "b", "c"), scores, votes=votes)
    assert report["votes"]["kendall_tau_of_models"] == pytest.approx(1 / 3)
    sentence = "Kendall's tau between the models' overall scores and the votes they won: "
    assert f"<p>{sentence}0.33.</p>" in render_page(report, [], 0)
    few = summary(rows, ("a", "b"), scores, votes=votes[:1])
    assert few["votes"]["kendall_tau_of_models"] is None and "Kendall" not in render_page(few, [], 0)


def test_the_page_shows_how_many_whole_rankings_are_right():
    """Three rankings of three candidates, A > B > C, of which the scores meet one; and a pair that they meet."""
    letters = ("A", "B", "C")
    places = ((0.9, 0.5, 0.1), (0.9, 0.1, 0.5), (0.5, 0.9, 0.1), (0.9, 0.5))
    rows = [edit(f"{n}", letters[: len(values)]) for n, values in enumerate(places)]
    scores = {row.key: dict(zip(letters, map(both, values), strict=False)) for row, values in zip(rows, places, strict=True)}
    pairs = (("A", "B"), ("A", "C"), ("B", "C"))
    votes = tuple(Vote(row.key, *pair, 1, group=row.key) for row in rows[:3] for pair in pairs)
    votes += (Vote("3", "A", "B", 1, group="3"),)
    report = summary(rows, letters, scores, votes=votes, vote_rule="tiger", anonymous=True)
    assert "<td>1 pairs: 1.000 of 1; 3 pairs: 0.333 of 3</td>" in render_page(report, [], 0)
