"""A whole evaluation: good and bad editors ranked right, the report's files, and what stops it before there are any."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from evaluation_files import read_lines, write_lines
from evaluation_runs import FAST, run
from fake_metrics import RegionMetric
from page_parser import Page

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import Settings, evaluate, read_manifest, read_votes
from tpips_reward.evaluation.controls import COPY, NOISE, OTHER
from tpips_reward.evaluation.folder import REPORT_NAMES
from tpips_reward.evaluation.html import p_value
from tpips_reward.evaluation.report import write_report


def test_good_and_bad_editors_are_ranked_right(manifest, tmp_path):
    report = run(manifest, tmp_path / "report", settings=Settings(resamples=1000))
    entries = {entry["model"]: entry for entry in report["models"]}
    assert [entry["model"] for entry in report["models"]] == ["good", "drifting", "destroying", COPY, OTHER, NOISE]
    kept = [entries[model]["preservation"]["mean"] for model in ("good", "drifting", "destroying")]
    assert kept[0] > 0.95 and 0.5 < kept[1] < 0.8 and kept[2] < 0.5
    assert entries["good"]["change"]["mean"] > 0.9 and entries[NOISE]["change"]["mean"] == 1.0
    # a copy keeps everything and changes nothing
    assert (entries[COPY]["preservation"]["mean"], entries[COPY]["overall"]["mean"]) == (1.0, 0.0)
    pair = next(entry for entry in report["comparisons"] if entry["measure"] == "overall" and
                {entry["first"], entry["second"]} == {"good", "drifting"})  # fmt: skip
    assert pair["difference"]["high"] < 0 and pair["p_holm"] < 0.05  # drifting - good
    assert pair["losses"] == 1.0 and pair["rows_needed"] <= 12 == pair["difference"]["count"]
    assert {entry["category"]: entry["rows"] for entry in report["categories"]} == {"color": 6, "paint": 6}
    roles = {(entry["role"], entry["aspect"]): entry["cells"]["good"] for entry in report["aspects"]}
    assert set(roles) == {("preserve", "background"), ("target", "object color")}
    assert roles["target", "object color"]["count"] == 12
    assert report["counts"]["outputs_scored"] == report["counts"]["outputs_expected"] == 36


def test_half_a_model_is_compared_on_the_rows_that_it_has(manifest, tmp_path):
    for index in range(0, 12, 2):
        (manifest.parent / f"drifting/{index:03d}.png").unlink()
    report = run(manifest, tmp_path / "report")
    entry = next(entry for entry in report["models"] if entry["model"] == "drifting")
    assert (entry["expected"], entry["scored"], entry["missing"]) == (12, 6, 6)
    assert report["counts"]["rows_all_models_have"] == 6 and report["problems"]["counts"] == {"missing_output": 6}
    for other in report["models"]:
        assert other["overall_common"]["count"] == 6
    assert {entry["difference"]["count"] for entry in report["comparisons"] if "drifting" in entry.values()} == {6}
    assert "6 of 12" in Page((tmp_path / "report/report.html").read_text()).text


def test_the_same_input_gives_the_same_report(manifest, tmp_path):
    first, second = (run(manifest, tmp_path / name) for name in ("a", "b"))
    for report in (first, second):
        del report["work"]
    assert first == second
    for name in set(REPORT_NAMES) - {"report.html", "report.json"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_every_file_tells_the_same(manifest, tmp_path):
    report = run(manifest, tmp_path / "report")
    folder = tmp_path / "report"
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(report))
    tables = {name: list(csv.DictReader((folder / name).open())) for name in REPORT_NAMES if name.endswith(".csv")}
    good = next(entry for entry in report["models"] if entry["model"] == "good")
    line = next(row for row in tables["summary.csv"] if row["model"] == "good")
    assert float(line["overall_mean"]) == good["overall"]["mean"] and line["scored"] == "12"
    assert len(tables["rows.csv"]) == 12 * 6 and len(tables["aspects.csv"]) == 12 * 6 * 2
    mean = sum(float(row["overall"]) for row in tables["rows.csv"] if row["model"] == "good") / 12
    assert mean == pytest.approx(good["overall"]["mean"])
    shown = f"{good['overall']['mean']:.3f} ({good['overall']['low']:.3f} to {good['overall']['high']:.3f})"
    assert "| good | 12 of 12 |" in (folder / "report.md").read_text() and shown in (folder / "report.md").read_text()
    page = Page((folder / "report.html").read_text()).text
    assert f"{good['overall']['mean']:.3f} [" in page
    gaps = tables["differences.csv"]
    assert len(gaps) == 9 + 3 * (2 * 3 + 2) and Counter(row["by"] for row in gaps) == {
        "all": 9, "category": 18, "preserve": 3, "target": 3}  # fmt: skip
    entry = next(e for e in report["differences"] if (e["by"], e["first"], e["second"]) == ("preserve", "drifting", "good"))
    row = next(r for r in gaps if (r["by"], r["first"], r["second"]) == ("preserve", "drifting", "good"))
    kept = {m: [r["outputs"][m]["preserve"]["background"] for r in report["rows"]] for m in ("drifting", "good")}
    mean = sum(a - b for a, b in zip(kept["drifting"], kept["good"], strict=True)) / 12
    assert float(row["difference_mean"]) == entry["difference"]["mean"] == pytest.approx(mean)
    assert (row["name"], row["p_holm"], row["difference_count"]) == ("background", str(entry["p_holm"]), "12")
    shown = f"{mean:.3f} ({entry['difference']['low']:.3f} to {entry['difference']['high']:.3f})"
    assert f"| aspect to keep: similarity | background | drifting − good | {shown} |" in (folder / "report.md").read_text()
    assert f"background drifting − good {mean:.3f} [" in page


def test_the_markdown_has_aspects_and_examples(manifest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = run(Path("data/edits.jsonl"), Path("out/report"))
    text = Path("out/report/report.md").read_text()
    for role, aspect, title in (("preserve", "background", "## Aspects to keep"), ("target", "object color", "## Aspects to change")):
        entry = next(e for e in report["aspects"] if e["role"] == role)
        line = next(line for line in text.partition(title)[2].splitlines() if line.startswith(f"| {aspect} | 12 |"))
        means = [f"{entry['cells'][model['model']]['mean']:.3f}" for model in report["models"]]
        assert [cell.split(" ")[1] for cell in line.split("|")[3:-1]] == means
    examples = text.partition("## Best and worst")[2]
    for model in ("good", "drifting", "destroying"):
        ranked = sorted(report["rows"], key=lambda row: row["outputs"][model]["overall"])
        for reason, row in (("worst", ranked[0]), ("best", ranked[-1])):
            head, _, rest = examples.partition(f"\n### {row['key']}: ")[2].partition("\n\n")
            assert f"{reason} of {model}" in head and rest.startswith(row["instruction"] + "\n")
            output = row["outputs"][model]
            scores = [output[name] for name in ("overall", "change", "preservation")]
            scores += [output["preserve"]["background"], output["target"]["object color"]]
            cells = " | ".join(f"{score:.3f}" for score in scores)
            assert f"| {model} | {cells} | ../../data/{model}/{row['key']}.png |" in rest.partition("\n### ")[0]
            assert (tmp_path / f"out/report/../../data/{model}/{row['key']}.png").is_file()
            assert f"Category {row['category']}, source ../../data/in/{row['key']}.png" in rest
    assert "data:image" not in text
    run(Path("data/edits.jsonl"), Path("none"), settings=Settings(resamples=300, examples=0))
    assert "## Best and worst" not in Path("none/report.md").read_text()


def test_names_that_utf8_cannot_hold_reach_every_file(manifest, tmp_path):
    lines = read_lines(manifest)
    odd = manifest.parent / os.fsdecode(b"good/odd\xff.png")
    try:
        shutil.copy(manifest.parent / "good/000.png", odd)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    lines[0]["outputs"]["good"] = os.fsdecode(b"good/odd\xff.png")
    run(write_lines(manifest, lines), tmp_path / "report", settings=Settings(resamples=300, examples=12))
    assert "data/good/odd?.png |" in (tmp_path / "report/report.md").read_text()


def test_a_p_value_is_never_shown_as_zero(manifest, tmp_path):
    assert [p_value(value) for value in (None, 1e-5, 0.0001, 0.25)] == ["–", "< 0.0001", "0.0001", "0.2500"]
    ends = {"mean": 0.1, "low": 0.1, "high": 0.1, "count": 9}
    entry = {"first": "a", "second": "b", "measure": "overall", "difference": ends, "sources": 9, "p": 1e-5, "p_holm": 2e-5,
             "wins": 1.0, "ties": 0.0, "losses": 0.0, "rows_needed": 2, "by": "category", "name": "c"}  # fmt: skip
    report = run(manifest, tmp_path / "report") | {"comparisons": [entry], "differences": [entry]}
    write_report(tmp_path / "report", report, [], 0)
    shown = [(tmp_path / "report" / name).read_text() for name in ("report.html", "report.md")]
    assert shown[0].count("&lt; 0.0001") == 4 == shown[1].count("< 0.0001") + shown[1].count("&lt; 0.0001")


# --- aspects, votes


def test_rows_without_aspects_get_proposed_ones_that_can_be_corrected(manifest, tmp_path):
    lines = read_lines(manifest)
    for line in lines[:4]:
        del line["preserve"], line["target"]
    del lines[4]["target"]
    write_lines(manifest, lines)
    report = run(manifest, tmp_path / "report")
    assert report["aspect_origins"] == {"instruction": 5, "named": 7}
    assert [row["proposed"] for row in report["rows"]][:6] == [["preserve", "target"]] * 4 + [["target"], []]
    assert report["rows"][0]["target"][0].endswith(" color")
    assert "were proposed" in (tmp_path / "report/report.html").read_text()
    path = tmp_path / "report/aspects.jsonl"
    entries = read_lines(path)
    assert [entry["key"] for entry in entries] == ["000", "001", "002", "003", "004"]
    entries[0]["target"], entries[1]["instruction"] = ["object paint"], "something else"
    write_lines(path, [*entries, {**entries[0], "key": "gone"}])
    report = run(manifest, tmp_path / "report", overwrite=True)
    assert report["rows"][0]["target"] == ["object paint"] and report["aspect_origins"]["edited"] == 1
    assert report["problems"]["counts"] == {"stale_aspects": 2}
    assert [entry["key"] for entry in read_lines(path)][-1] == "gone"


def test_votes_are_counted(manifest, tmp_path):
    pair = {"first": "good", "second": "drifting"}
    votes = [{"key": f"{n:03d}", **pair, "vote": "second" if n == 0 else "first"} for n in range(12)]
    dataset = read_votes(write_lines(tmp_path / "votes.jsonl", votes), read_manifest(manifest))
    report = evaluate(dataset, RegionMetric(), tmp_path / "report", settings=FAST)
    assert report["votes"]["agreement"][0]["accuracy"] == pytest.approx(11 / 12)
    assert "Agreement with people" in (tmp_path / "report/report.html").read_text()


# --- what is not scored


def test_a_row_without_any_output_is_not_scored(manifest, tmp_path):
    for name in ("good", "drifting", "destroying"):
        (manifest.parent / name / "000.png").unlink()
    counts = run(manifest, tmp_path / "report")["counts"]
    assert (counts["rows"], counts["rows_scored"], counts["rows_left_out"]) == (12, 11, 1)


def test_nothing_to_score(manifest, tmp_path):
    loaded = []
    for name in ("good", "drifting", "destroying"):
        shutil.rmtree(manifest.parent / name)
    with pytest.raises(TPIPSError, match="no output that can be scored. The first of 36 problems: .*does not exist"):
        evaluate(read_manifest(manifest), lambda: loaded.append(1) or RegionMetric(), tmp_path / "report")
    assert not loaded  # the metric is loaded when the input is known to be good


def test_strict_stops_at_any_problem(manifest, tmp_path):
    (manifest.parent / "good/000.png").unlink()
    with pytest.raises(TPIPSError, match="1 problems with the input"):
        run(manifest, tmp_path / "report", settings=Settings(strict=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [("sizes", "x"), ("batch_images", 1), ("resamples", 5), ("examples", -1), ("level", 1.0), ("tie_margin", 2.0)],
)
def test_bad_settings(field, value):
    with pytest.raises(TPIPSError, match=field):
        Settings(**{field: value})
