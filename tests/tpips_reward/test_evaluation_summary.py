"""What the report is made of: each figure against scores that are written down here, and every setting where it counts."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_files import read_lines, write_edits, write_lines
from fake_metrics import RegionMetric
from PIL import Image

import tpips_reward.cli
from tpips_reward.aspects import Proposal, Request
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import Settings, evaluate, read_manifest, score_rows
from tpips_reward.evaluation.cache import ScoreCache
from tpips_reward.evaluation.controls import NOISE
from tpips_reward.evaluation.differences import Resampling
from tpips_reward.evaluation.examples import MAX_PICTURES, Example, choose
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
#: Of whole evaluations: no pictures, few resamples.
QUICK = Settings(resamples=100, examples=0)

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
    assert f"<p>{sentence}0.33.</p>" in render_page(report, [], 0) and f"{sentence}0.33." in markdown(report)
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
    assert "| 1 pairs: 1.000 of 1; 3 pairs: 0.333 of 3 |" in markdown(report)


# --- what the page and the Markdown say


@pytest.mark.parametrize(
    ("proposed", "kept", "changed"), [((), "", ""), (("target",), "", "*"), (("preserve",), "*", ""), (("preserve", "target"), "*", "*")]
)
def test_proposed_aspects_are_marked(proposed, kept, changed):
    rows = [edit("1", ("a",), proposed=frozenset(proposed))]
    report = summary(rows, ("a",), {"1": {"a": both(0.5)}})
    assert report["rows"][0]["proposed"] == list(proposed)
    example = Example(report["rows"][0], ["best of a"], files={"source": "in.png", "output a": "a.png"})
    page, text = render_page(report, [example], 1), markdown(report, [example])
    assert f">keeps background{kept}</dt>" in page and f">changes paint{changed}</dt>" in page
    star = {"": "", "*": "\\*"}
    assert f"| keeps background{star[kept]} | changes paint{star[changed]} |" in text
    assert ("(marked *)" in page) == bool(proposed)


def test_the_markdown_counts_the_problems():
    rows = [edit("1", ("a",))]
    problems = [Problem("missing_output", f"{n} does not exist.", f"{n}", "b") for n in range(3)]
    problems.append(Problem("other_size", "It is smaller.", "1", "a", left_out=False))
    scores = {"1": {"a": both(0.5)}}
    text = markdown(summary(rows, ("a",), scores, problems=problems))
    section = text.partition("## Problems with the input\n\n")[2].splitlines()
    assert [line for line in section if line] == [
        "| problem | count | what it is |",
        "|---|---|---|",
        "| missing\\_output | 3 | a model without an output for this row |",
        "| other\\_size | 1 | an output of another size than its source, of the same proportions |",
    ]
    assert "Problems" not in markdown(summary(rows, ("a",), scores))


@pytest.mark.parametrize(("measured", "warned"), [(True, False), (False, True), (None, False)])
def test_a_rough_change_scale_is_told(tmp_path, measured, warned):
    metric = RegionMetric()
    if measured is not None:
        metric.is_calibrated = measured
    report = evaluate(read_manifest(write_edits(tmp_path, 2)), metric, tmp_path / "report", settings=QUICK)
    assert report["metric"]["change_scale_measured"] is not warned
    for name in ("report.html", "report.md"):
        page = (tmp_path / "report" / name).read_text()
        assert ("change scale is a rough value and not measured: compare changes, do not read them" in page) == warned


def test_examples_stay_within_the_pages_pictures():
    models = [f"model {n}" for n in range(10)]
    rng = np.random.default_rng(0)
    rows = [edit(f"{n}", models) for n in range(120)]
    report = summary(rows, models, {row.key: {model: both(rng.uniform()) for model in models} for row in rows},
                     how=Resampling(resamples=100))  # fmt: skip
    chosen, count = choose(report, 50)
    # two best and two worst of ten models, each a source and ten outputs, are 440 pictures; three were 660
    assert MAX_PICTURES == 600 and count == 2 and 20 < len(chosen) <= 40
    assert sum(1 + len(example.row["outputs"]) for example in chosen) <= MAX_PICTURES
    assert choose(report, 1)[1] == 1 and choose(report, 0) == ([], 0)
    few, count = choose({**report, "models": report["models"][:1]}, 50)
    assert count == 50 and len(few) == 100


def test_the_table_of_aspects_has_every_value(tmp_path):
    """Two aspects to keep in one row and a proposed one to change; what is to change has its distance from 1."""
    save = {"background": 0.25, "light, \"soft\"": 0.5, "paint": 0.125}
    rows = [edit("1", ("a", "b"), preserve=("background", "light, \"soft\""), category="color", proposed=frozenset({"target"})),
            edit("2", ("a",), preserve=(), category="paint", proposed=frozenset({"preserve"}))]  # fmt: skip
    scores = {"1": {"a": save, "b": {aspect: value + 0.0625 for aspect, value in save.items()}}, "2": {"a": {"paint": -0.5}}}
    write_report(tmp_path, summary(rows, ("a", "b"), scores), rows, 0)
    with (tmp_path / "aspects.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["key", "model", "category", "role", "aspect", "value", "proposed"],
            ["1", "a", "color", "preserve", "background", "0.25", "0"],
            ["1", "a", "color", "preserve", "light, \"soft\"", "0.5", "0"],
            ["1", "a", "color", "target", "paint", "0.875", "1"],
            ["1", "b", "color", "preserve", "background", "0.3125", "0"],
            ["1", "b", "color", "preserve", "light, \"soft\"", "0.5625", "0"],
            ["1", "b", "color", "target", "paint", "0.8125", "1"],
            ["2", "a", "paint", "target", "paint", "1.5", "0"],
        ]


# --- proposals


class Fixed:
    """Proposes the same for every edit."""

    name = "fixed"
    needs_image = False

    def __init__(self, target: tuple[str, ...], preserve: tuple[str, ...]) -> None:
        self.proposal = Proposal("color", "color", target, preserve, self.name)

    def __call__(self, request: Request) -> Proposal:
        return self.proposal


def test_a_proposed_aspect_is_never_what_the_row_names_on_the_other_side():
    rows = (edit("keeps", ("a",), preserve=("Car Color",), target=()), edit("changes", ("a",), preserve=(), target=("background",)))
    proposer = Fixed(target=("car color", "car shape"), preserve=("background", "lighting"))
    found = propose_aspects(Dataset("edits", rows, ("a",)), None, lambda: proposer).dataset.rows
    assert (found[0].preserve, found[0].target, found[0].proposed) == (("Car Color",), ("car shape",), {"target"})
    assert (found[1].preserve, found[1].target, found[1].proposed) == (("lighting",), ("background",), {"preserve"})


def test_rows_that_stay_without_aspects_are_listed(tmp_path):
    rows = (edit("whole", ("a",)), edit("keeps", ("a",), target=()), edit("changes", ("a",), preserve=()))
    problems = without_aspects(Dataset("edits", rows, ("a",)))
    assert [(problem.kind, problem.key, problem.left_out) for problem in problems] == [
        ("no_aspects", "keeps", True), ("no_aspects", "changes", True)]  # fmt: skip
    assert "no aspects to change" in problems[0].detail and "no aspects to keep" in problems[1].detail
    manifest = write_edits(tmp_path, 2)
    lines = read_lines(manifest)
    del lines[1]["target"]
    dataset = read_manifest(write_lines(manifest, lines))
    nothing = Fixed(target=("background",), preserve=())  # which the row keeps
    report = evaluate(dataset, RegionMetric(), tmp_path / "report", settings=QUICK, proposer=lambda: nothing)
    assert report["problems"]["counts"] == {"no_aspects": 1} and report["problems"]["list"][0]["key"] == "001"
    assert report["rows"][1]["outputs"]["good"]["overall"] is None
    with pytest.raises(TPIPSError, match="1 problems with the input, the first: The row '001' has no aspects to change"):
        evaluate(dataset, RegionMetric(), tmp_path / "strict", settings=replace(QUICK, strict=True), proposer=lambda: nothing)


# --- settings


def test_the_seed_is_that_of_the_noise(tmp_path):
    dataset = read_manifest(write_edits(tmp_path, 3))
    reports = [evaluate(dataset, RegionMetric(), tmp_path / f"report {seed}", settings=replace(QUICK, seed=seed)) for seed in (0, 1)]
    first, second = ([row["outputs"] for row in report["rows"]] for report in reports)
    for a, b in zip(first, second, strict=True):
        assert a.pop(NOISE)["preserve"] != b.pop(NOISE)["preserve"] and a == b
    cache = ScoreCache(tmp_path / "cache", "x")  # cached noise is of one seed too
    noises = [score_rows(dataset.rows, RegionMetric(), cache=cache, seed=seed).values["000"][NOISE] for seed in (0, 1, 0)]
    assert noises[0] == noises[2] != noises[1]


@pytest.mark.parametrize(("margin", "shares"), [(0.25, (0.25, 0.5, 0.25)), (0.0, (0.5, 0.0, 0.5)), (0.75, (0.0, 1.0, 0.0))])
def test_the_margin_is_that_of_every_tie(margin, shares):
    gaps = (0.5, 0.125, -0.125, -0.5) * 2
    rows = [edit(f"{n}", ("a", "b")) for n in range(len(gaps))]
    scores = {row.key: {"a": both(0.5 + gap / 2), "b": both(0.5 - gap / 2)} for row, gap in zip(rows, gaps, strict=True)}
    report = summary(rows, ("a", "b"), scores, how=Resampling(resamples=100, tie_margin=margin))
    entries = [*report["comparisons"], *report["differences"]]
    assert len(entries) == 3 + 3 + 2
    assert {(entry["wins"], entry["ties"], entry["losses"]) for entry in entries} == {shares}


def test_the_command_passes_the_margin_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tpips_reward.cli, "_load", lambda options: RegionMetric())
    manifest = write_edits(tmp_path, 2)
    for margin, tied in ((0, False), (0.99, True)):
        folder = tmp_path / f"report {margin}"
        arguments = ["evaluate", manifest, "--output", folder, "--resamples", 100, "--examples", 0, "--tie-margin", margin]
        assert tpips_reward.cli.main([*map(str, arguments)]) == 0
        report = json.loads((folder / "report.json").read_text())
        pair = next(e for e in report["comparisons"] if e["measure"] == "preservation" and e["second"] == "good")
        assert report["settings"]["tie_margin"] == margin and pair["ties"] == float(tied)


@pytest.mark.parametrize("broken", ["in", "good"])
def test_strict_stops_at_what_is_found_while_scoring(tmp_path, broken):
    """A JPEG with a whole header opens; that its pixels are cut off shows when it is decoded."""
    manifest = write_edits(tmp_path, 2)
    path = tmp_path / f"{broken}/000.png"
    Image.open(path).convert("RGB").save(path, "JPEG")
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"\xff\xda") + 20])
    dataset = read_manifest(manifest)
    kind = {"in": "unreadable_source", "good": "unreadable_output"}[broken]
    report = evaluate(dataset, RegionMetric(), tmp_path / "report", settings=QUICK)
    assert dataset.problems == () and report["problems"]["counts"] == {kind: 1}
    loaded: list[int] = []

    def load() -> RegionMetric:
        loaded.append(1)
        return RegionMetric()

    with pytest.raises(TPIPSError, match="1 problems with the input, the first: .*000.png"):
        evaluate(dataset, load, tmp_path / "strict", settings=replace(QUICK, strict=True))
    assert loaded == [1] and not (tmp_path / "strict/report.json").exists()  # the check of the input passed


def test_an_evaluation_passes_its_level_on(tmp_path):
    dataset = read_manifest(write_edits(tmp_path, 6))
    widths = []
    for level in (0.95, 0.5):
        report = evaluate(dataset, RegionMetric(), tmp_path / f"report {level}", settings=replace(QUICK, level=level))
        widths.append(width(next(entry for entry in report["models"] if entry["model"] == "destroying")["preservation"]))
    assert 0 < widths[1] < 0.6 * widths[0]
