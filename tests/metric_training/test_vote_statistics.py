"""Figures against numbers written out, and reports against figures."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from metric_training.data.comparison import DataError
from metric_training.evaluation.report import as_markdown, curve_csv, write_report
from metric_training.evaluation.statistics import (
    Examples,
    agreement_of,
    bootstrap_interval,
    consensus_of,
    describe_examples,
    figures,
    groups,
    standard_error,
    threshold_curve,
    tie_rows,
)

VOTES = np.array([[0.6, 0.4, 0.0], [0.2, 0.2, 0.6], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], np.float32)
SIMILARITIES = np.array([[0.9, 0.1, 0.2], [0.8, 0.1, 0.2], [0.3, 0.3, 0.1], [0.1, 0.2, 0.7]])


def examples() -> Examples:
    return Examples(VOTES, ("pose", "color", "pose", "pose"), ("a", "a", "b", "b"), np.array([0, 0, 1, 1]))


def test_agreement_and_consensus() -> None:
    # the choices are 0, 0, a tie of 0 and 1, and 2
    assert agreement_of(SIMILARITIES, VOTES).tolist() == pytest.approx([0.6, 0.2, 0.5, 0.0])
    assert consensus_of(VOTES).tolist() == pytest.approx([0.52, 0.44, 1.0, 0.5])
    two = np.array([[0.8, 0.2]], np.float32)
    assert agreement_of(np.array([[0.1, 0.3]]), two).tolist() == pytest.approx([0.2])
    assert consensus_of(two).tolist() == pytest.approx([0.68])


def test_ties_are_exact_ones() -> None:
    assert tie_rows(SIMILARITIES).tolist() == [False, False, True, False]
    assert tie_rows(np.array([[1.0, 1.0 - 1e-15, 0.0]])).tolist() == [False]  # float32 would make one of it


def test_the_standard_error_is_that_of_the_mean_over_examples() -> None:
    assert standard_error(np.array([0.6, 0.2, 0.5, 0.0])) == pytest.approx(0.275378527 / 2)
    assert standard_error(np.array([0.4])) == 0


def test_the_bootstrap_draws_whole_comparisons() -> None:
    # two comparisons, of means 0 and 1 and of one and three examples: the resampled means are 0, 3/4 and 1
    values, clusters = np.array([0.0, 1.0, 1.0, 1.0]), np.array([7, 3, 3, 3])
    assert bootstrap_interval(values, clusters, draws=400) == (0.0, 1.0)
    assert bootstrap_interval(values, clusters, draws=400, level=0.4) == (0.75, 0.75)
    rng = np.random.default_rng(0)
    many = rng.random(4000)
    low, high = bootstrap_interval(many, np.arange(4000), draws=500)
    assert high - low == pytest.approx(2 * 1.96 * standard_error(many), rel=0.15)
    assert bootstrap_interval(many, np.arange(4000), draws=500) == (low, high)
    # examples that repeat each other within a comparison tell nothing new
    repeated = bootstrap_interval(np.repeat(many[:400], 10), np.repeat(np.arange(400), 10), draws=500)
    single = bootstrap_interval(many[:400], np.arange(400), draws=500)
    assert repeated == pytest.approx(single)


def test_the_confidence_curve() -> None:
    agreed = agreement_of(SIMILARITIES, VOTES)
    curve = threshold_curve(agreed, VOTES)
    assert [p["threshold"] for p in curve] == [0.5, 0.6, 1.0]
    assert [p["examples"] for p in curve] == [4, 3, 1]
    assert [p["agreement"] for p in curve] == pytest.approx([1.3 / 4, 1.3 / 3, 0.5])
    assert [p["consensus"] for p in curve] == pytest.approx([2.46 / 4, 1.96 / 3, 1.0])
    assert [p["share"] for p in curve] == [1, 0.75, 0.25]
    assert curve[2]["standard_error"] == 0


def test_groups_come_by_size() -> None:
    agreed, crowd = agreement_of(SIMILARITIES, VOTES), consensus_of(VOTES)
    found = groups(agreed, crowd, examples().names)
    assert list(found) == ["pose", "color"]
    assert found["pose"]["agreement"] == pytest.approx(1.1 / 3) and found["pose"]["examples"] == 3
    assert found["color"] == {
        "agreement": pytest.approx(0.2),
        "standard_error": 0,
        "consensus": pytest.approx(0.44),
        "examples": 1,
    }


def test_all_figures_of_a_metric() -> None:
    result = figures(SIMILARITIES, examples(), draws=50)
    assert result["agreement"] == pytest.approx(0.325) and result["gap"] == pytest.approx(0.615 - 0.325)
    assert result["metric_ties"] == 0.25
    assert result["interval"] == pytest.approx([0.25, 0.4])  # the comparisons' means are 0.4 and 0.25
    assert result["per_source"]["b"]["agreement"] == pytest.approx(0.25)
    facts = describe_examples(examples())
    assert facts["comparisons"] == 2 and facts["examples"] == 4 and facts["vote_ties"] == 0.25
    assert facts["consensus"] == pytest.approx(0.615) and facts["chance"] == pytest.approx(1 / 3)
    constant = figures(np.zeros((4, 3)), examples(), draws=50)
    assert constant["agreement"] == pytest.approx(1 / 3) and constant["metric_ties"] == 1


def results() -> dict[str, Any]:
    data = {"name": "set", "task": "odd_one_out", **describe_examples(examples())}
    data |= {"dropped": {"ties": 3}, "problems": [[4, "bad"]], "undecodable": [], "unanswered": {"judge": 2}}
    rows = {"ours|late": SIMILARITIES, "constant": np.zeros((4, 3))}
    return {"data": data, "metrics": {name: figures(values, examples(), draws=50) for name, values in rows.items()}}


def test_the_table_has_every_metric_beside_consensus_and_chance() -> None:
    lines = as_markdown(results()).splitlines()
    assert "| ours\\|late | 0.325 | 0.138 | 0.250 to 0.400 | 0.290 | 25.0 % |" in lines
    assert "| *consensus* | 0.615 | 0.129 | | | 25.0 % |" in lines and "| *chance* | 0.333 | | | | |" in lines
    assert "| pose | 0.367 | 0.333 | 0.673 | 3 |" in lines and "| b | 0.250 | 0.333 | 0.750 | 2 |" in lines
    assert lines[-1] == "Left out: 3 ties, 1 problems in rows, 2 examples that judge did not answer."


def test_the_curve_is_written_as_csv_and_png(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(curve_csv(results()))))
    assert len(rows) == 6 and rows[1] == {
        "metric": "ours|late",
        "threshold": "0.6",
        "examples": "3",
        "share": "0.75",
        "agreement": "0.433333",
        "standard_error": "0.120185",
        "consensus": "0.653333",
    }
    written = write_report(tmp_path / "report", results())
    assert sorted(p.name for p in written) == ["report.json", "report.md", "thresholds.csv", "thresholds.png"]
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == sorted(p.name for p in written)
    stored = json.loads((tmp_path / "report" / "report.json").read_text())
    assert stored["metrics"]["constant"]["agreement"] == pytest.approx(1 / 3)
    with Image.open(tmp_path / "report" / "thresholds.png") as image:
        assert image.size[0] > 400 and len(set(image.convert("RGB").get_flattened_data())) > 10


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_report(tmp_path / "file", results())
