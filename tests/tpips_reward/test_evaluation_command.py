"""`tpips-reward evaluate`: its options, and its errors in one line."""

from __future__ import annotations

import json
import warnings

import pytest
from evaluation_files import read_lines, write_lines
from fake_metrics import RegionMetric
from PIL import Image

import tpips_reward.cli
from tpips_reward.calibration import Calibration, MonotoneMap, probe_answers


@pytest.fixture
def command(monkeypatch, capsys):
    monkeypatch.setattr(tpips_reward.cli, "_load", lambda options: RegionMetric())

    def call(*arguments: object) -> tuple[int, str, str]:
        status = tpips_reward.cli.main(["evaluate", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_the_command(command, manifest, tmp_path):
    status, out, err = command(manifest, "--output", tmp_path / "r", "--resamples", 300, "--model",
                               f"more={manifest.parent / 'good'}")  # fmt: skip
    assert status == 0 and err == "" and "| more | 12 of 12 |" in out and str(tmp_path / "r/report.html") in out
    assert "24" not in out.split("Report:")[0].splitlines()[-1]
    report = json.loads((tmp_path / "r/report.json").read_text())
    values = {entry["model"]: entry["overall"] for entry in report["models"]}
    assert values["more"] == values["good"] and report["problems"]["counts"] == {"shared_file": 12}


def test_the_command_with_a_calibration(command, manifest, tmp_path, monkeypatch):
    bare = [{k: v for k, v in line.items() if k != "target"} for line in read_lines(manifest)]
    proposing = (write_lines(manifest.with_name("bare.jsonl"), bare), "--output", tmp_path / "r", "--resamples", 300)
    status, _, err = command(*proposing, "--calibrated")
    assert status == 2 and "has no calibration" in err and not list((tmp_path / "r").iterdir())
    assert command(*proposing)[0] == 0, "the corrected command is not refused"
    metric = RegionMetric()
    metric.calibration = Calibration(MonotoneMap((0.0, 1.0), (0.5, 1.0)), probe=tuple(probe_answers(metric)))
    monkeypatch.setattr(tpips_reward.cli, "_load", lambda options: metric)
    reports = {}
    for name, flags in (("raw", ()), ("calibrated", ("--calibrated",))):
        assert command(manifest, "--output", tmp_path / name, "--resamples", 300, *flags)[0] == 0
        reports[name] = json.loads((tmp_path / name / "report.json").read_text())
    raw, calibrated = (reports[name]["rows"][0]["outputs"]["good"]["preserve"]["background"] for name in reports)
    assert calibrated == pytest.approx(0.5 + raw / 2, abs=1e-6) and reports["calibrated"]["metric"]["range"] == [0, 1]
    assert reports["calibrated"]["metric"]["name"] == "builtin:late, calibrated"


def test_the_command_on_a_voted_benchmark(command, manifest, tmp_path):
    rows = [
        {"key": line["key"], "instruction": line["instruction"], "source_image": line["source"], "task": "color_alter",
         "edited_images": [line["outputs"]["good"], line["outputs"]["drifting"]], "winner": "Image A"}
        for line in read_lines(manifest)
    ]  # fmt: skip
    write_lines(manifest.parent / "metadata.jsonl", rows)
    status, _, err = command(manifest.parent, "--layout", "vcreward", "--output", tmp_path / "r", "--resamples", 300)
    report = json.loads((tmp_path / "r/report.json").read_text())
    assert status == 0 and err == "" and report["votes"]["agreement"][0]["accuracy"] == 1.0
    assert report["votes"]["rule"] == "vcreward" and report["comparisons"] == []


def test_the_command_does_not_warn_of_what_it_refuses(command, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        status, _, err = command(manifest, "--output", tmp_path / "r")
    assert status == 2 and "more pixels than the 400" in err
    assert not [warning for warning in said if warning.category is Image.DecompressionBombWarning]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "x"), "write NAME=FOLDER"),
        (("--model", "good=."), "has a folder; name one of them otherwise"),
        (("--layout", "gedit"), "needs --benchmark"),
        (("--sources", "."), "--sources means nothing"),
        (("--layout", "editreward-tiger", "--votes", "v"), "of its own"),
        (("--resamples", "1"), "resamples is 1"),
        (("--votes", "nothing.jsonl"), "nothing.jsonl does not exist"),
    ],
)
def test_bad_options_are_one_line(command, manifest, tmp_path, arguments, message):
    status, out, err = command(manifest, "--output", tmp_path / "r", *arguments)
    assert status == 2 and out == "" and message in err and len(err.strip().splitlines()) == 1
