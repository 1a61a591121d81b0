"""The folder of a report: what is refused, what is replaced, and what an evaluation leaves that did not finish."""

from __future__ import annotations

import os

import pytest
import torch
from evaluation_files import read_lines, write_edits, write_lines
from evaluation_runs import FAST, run
from fake_metrics import RegionMetric

import tpips_reward.cli
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import Settings, evaluate, read_gedit_v2, read_manifest, read_vcreward_bench, read_votes
from tpips_reward.evaluation.folder import REPORT_NAMES


def test_a_folder_that_exists_is_refused(manifest, tmp_path):
    folder = tmp_path / "report"
    run(manifest, folder)
    with pytest.raises(TPIPSError, match=r"holds a report; give --overwrite \(in Python overwrite=True\)"):
        run(manifest, folder)
    (folder / "notes.txt").write_text("mine")
    again = run(manifest, folder, resume=True)
    assert again["work"]["pairs_measured"] == 0 and again["work"]["pairs_cached"] == 12 * 6 * 2
    assert run(manifest, folder, overwrite=True)["work"]["pairs_cached"] == 0
    assert (folder / "notes.txt").read_text() == "mine"
    scored = next((folder / "cache").glob("*/*.json"))
    mine = [folder / "cache/model.bin", scored.parent / "notes.json", folder / f"cache/mine/{scored.name}"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    stale = scored.with_name("0" * 32 + ".json")
    stale.write_text("{}")
    assert run(manifest, folder, overwrite=True)["work"]["pairs_cached"] == 0, "the cache is cleared"
    assert not stale.exists() and [path.read_text() for path in mine] == ["mine"] * 3, "and what is not ours stays"
    foreign = tmp_path / "foreign"
    (foreign / "cache").mkdir(parents=True)
    (foreign / "cache/model.bin").write_text("mine")
    with pytest.raises(TPIPSError, match=r"not empty \(cache\)"):
        run(manifest, foreign)
    with pytest.raises(TPIPSError, match="give one of the two"):
        run(manifest, folder, overwrite=True, resume=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "photo.png").write_text("mine")
    with pytest.raises(TPIPSError, match=r"not empty \(photo.png\)"):
        run(manifest, other)
    with pytest.raises(TPIPSError, match="is a file"):
        run(manifest, manifest)
    with pytest.raises(TPIPSError, match="cannot be used"):
        run(manifest, manifest / "report")


@pytest.mark.parametrize("how", ["overwrite", "resume"])
def test_files_that_no_evaluation_has_written_are_not_replaced(manifest, tmp_path, how):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "rows.csv").write_text("mine")
    (folder / "report.json").write_text("[]")
    with pytest.raises(TPIPSError, match=r"report.json would be replaced, and no evaluation has written it"):
        run(manifest, folder, **{how: True})
    assert (folder / "rows.csv").read_text() == "mine"


@pytest.mark.parametrize("how", ["overwrite", "resume"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_users_file_beside_an_evaluation_is_not_replaced(manifest, tmp_path, how, finished):
    folder = tmp_path / "report"
    run(manifest, folder)
    for name in REPORT_NAMES:
        if finished or name not in ("report.json", "problems.csv"):
            ours = (folder / name).read_bytes()
            (folder / name).write_bytes(b"mine" + ours)
            if not finished:
                (folder / "report.json").unlink(missing_ok=True)
            with pytest.raises(TPIPSError, match=f"{name} would be replaced, and no evaluation has written it"):
                run(manifest, folder, **{how: True})
            assert (folder / name).read_bytes() == b"mine" + ours
            (folder / name).write_bytes(ours)
    assert run(manifest, folder, **{how: True})["counts"]["rows_scored"] == 12


def test_what_a_killed_process_left_is_cleared(manifest, tmp_path):
    folder = tmp_path / "report"
    run(manifest, folder)
    (folder / "report.json").unlink()
    left = [folder / f".tmp-a1_b2c3d{suffix}" for suffix in (".html", ".csv", ".jsonl", ".json", ".md")]
    mine = [folder / ".tmp-notes.html", folder / ".tmp-a1_b2c3d.png"]
    for path in left:
        path.write_text("half")
    with pytest.raises(TPIPSError, match="did not finish; give --resume"):
        run(manifest, folder)
    for path in mine:
        path.write_text("mine")
    with pytest.raises(TPIPSError, match="is not empty"):
        run(manifest, folder)
    run(manifest, folder, overwrite=True)
    assert [path.exists() for path in left] == [False] * 5 and [path.read_text() for path in mine] == ["mine"] * 2


class Broken(RegionMetric):
    """Works `good` times, and then answers `answer` or raises it."""

    def __init__(self, good, answer):
        super().__init__()
        self.good, self.answer = good, answer

    def similarity_pairs(self, images, references, pairs, *, value_range=(0.0, 1.0)):
        if len(self.calls) < self.good:
            return super().similarity_pairs(images, references, pairs, value_range=value_range)
        if isinstance(self.answer, Exception):
            raise self.answer
        return torch.full((len(pairs),), self.answer)


@pytest.mark.parametrize("good", [0, 1])  # 1: it answers to the two fixed images alone
@pytest.mark.parametrize("answer", [TPIPSError("no"), torch.OutOfMemoryError("no"), float("nan")])
def test_a_metric_that_does_not_work_costs_no_report(manifest, tmp_path, good, answer):
    folder = tmp_path / "report"
    run(manifest, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises((TPIPSError, torch.OutOfMemoryError)):
        evaluate(read_manifest(manifest), Broken(good, answer), folder, metric_name="region", settings=FAST, overwrite=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_metric_that_does_not_load_costs_no_report(manifest, tmp_path):
    def load():
        raise TPIPSError("no such metric")

    folder = tmp_path / "report"
    run(manifest, folder)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    with pytest.raises(TPIPSError, match="no such metric"):
        evaluate(read_manifest(manifest), load, folder, overwrite=True)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


def test_a_report_never_replaces_its_manifest(tmp_path, capsys):
    write_edits(tmp_path, 1)
    run(tmp_path / "edits.jsonl", tmp_path / "out")
    manifest = tmp_path / "out/rows.csv"
    manifest.write_text("key,source,instruction,output:good\n0,../in/000.png,paint it red,../good/000.png\n")
    before = manifest.read_bytes()
    assert tpips_reward.cli.main(["evaluate", str(manifest), "--output", str(manifest.parent), "--overwrite"]) == 2
    assert "which it is made from" in capsys.readouterr().err and manifest.read_bytes() == before
    with pytest.raises(TPIPSError, match=r"would replace .*rows.csv, which it is made from; give another --output"):
        run(manifest, manifest.parent, overwrite=True)
    assert manifest.read_bytes() == before


def without_aspects(manifest):
    """Aspects are proposed, so that their file is written."""
    return write_lines(manifest, [{k: v for k, v in line.items() if k != "preserve"} for line in read_lines(manifest)])


def refused(call, aspects, *kept):
    """The call does not replace what it reads."""
    before = [path.read_bytes() for path in kept]
    with pytest.raises(TPIPSError, match="which it is made from"):
        call(aspects)
    assert [path.read_bytes() for path in kept] == before


def test_proposed_aspects_never_replace_what_is_read(tmp_path, capsys):
    manifest = without_aspects(write_edits(tmp_path / "data", 2))
    home, out = manifest.parent, tmp_path / "out"
    votes = write_lines(home / "votes.jsonl", [{"key": "000", "first": "good", "second": "drifting", "vote": "first"}])
    (home / "link.jsonl").symlink_to(manifest)

    def call(aspects):
        evaluate(read_votes(votes, read_manifest(manifest)), RegionMetric(), out, aspects_file=aspects, overwrite=True)

    for path in (manifest, home / "../data/edits.jsonl", home / "link.jsonl", votes, home / "in/000.png", home / "good/001.png"):
        refused(call, path, manifest, votes, home / "in/000.png", home / "good/001.png")
    refused(call, out / "report.md", manifest)
    assert not out.exists()
    argv = ["evaluate", str(manifest), "--output", str(out), "--aspects", str(manifest)]
    assert tpips_reward.cli.main(argv) == 2 and "give another --aspects" in capsys.readouterr().err
    named = manifest.rename(home / "aspects.jsonl")
    refused(lambda aspects: run(named, home, aspects_file=aspects, overwrite=True), None, named)


def test_no_benchmarks_table_is_replaced(tmp_path):
    lines = read_lines(write_edits(tmp_path / "data", 2))
    home = tmp_path / "data"
    images = [[line["outputs"]["good"], line["outputs"]["drifting"]] for line in lines]
    same = [{"key": line["key"], "instruction": "", "source_image": line["source"], "task": "x"} for line in lines]
    voted = write_lines(home / "voted.jsonl", [{**row, "edited_images": pair, "winner": "Image A"}
                                               for row, pair in zip(same, images, strict=True)])  # fmt: skip
    table = write_lines(home / "table.jsonl", same)
    listed = write_lines(home / "metadata.jsonl", [{"key": row["key"], "candidates": [{"model": "a", "image": pair[0]}]}
                                                   for row, pair in zip(same, images, strict=True)])  # fmt: skip
    for dataset, files in ((read_vcreward_bench(voted), [voted]), (read_gedit_v2(home, table), [listed, table])):
        for file in files:
            refused(lambda aspects, rows=dataset: evaluate(rows, RegionMetric(), tmp_path / "out", aspects_file=aspects), file, file)


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_no_image_is_replaced_by_a_report(manifest, tmp_path, link):
    folder = tmp_path / "report"
    run(manifest, folder)
    lines = read_lines(manifest)
    scores = next((folder / "cache").glob("*/*.json"))
    for place in (folder / "report.md", scores):
        place.unlink()
        link(manifest.parent / lines[0]["source"], place)
        refused(lambda _: run(manifest, folder, overwrite=True), None, place)


@pytest.mark.parametrize("fails", ["metric", "strict"])
def test_a_run_that_fails_before_it_scores_is_in_nobodys_way(tmp_path, fails):
    manifest = without_aspects(write_edits(tmp_path / "data", 4))
    folder = tmp_path / "report"

    def load():
        raise TPIPSError("no calibration")

    if fails == "metric":
        with pytest.raises(TPIPSError, match="no calibration"):
            evaluate(read_manifest(manifest), load, folder)
    else:
        (manifest.parent / "good/000.png").unlink()
        with pytest.raises(TPIPSError, match="problems with the input"):
            run(manifest, folder, settings=Settings(strict=True))
    assert not list(folder.iterdir())
    run(manifest, folder)
    mine = (folder / "aspects.jsonl").read_bytes()
    (tmp_path / "new").mkdir()
    (folder / "aspects.jsonl").rename(tmp_path / "new/aspects.jsonl")
    with pytest.raises(TPIPSError, match="no calibration"):
        evaluate(read_manifest(manifest), load, tmp_path / "new", overwrite=True)
    assert (tmp_path / "new/aspects.jsonl").read_bytes() == mine
    assert run(manifest, tmp_path / "new")["counts"]["rows_scored"] == 4, "aspects alone are no evaluation"


def test_an_evaluation_that_did_not_finish_says_so(manifest, tmp_path):
    class Stops(RegionMetric):
        def similarity_pairs(self, images, references, pairs, *, value_range=(0.0, 1.0)):
            if len(self.calls) == 3:
                raise TPIPSError("stopped")
            return super().similarity_pairs(images, references, pairs, value_range=value_range)

    options = Settings(batch_images=7, resamples=300)
    with pytest.raises(TPIPSError, match="stopped"):
        evaluate(read_manifest(manifest), Stops(), tmp_path / "report", metric_name="region", settings=options)
    assert not (tmp_path / "report/report.json").exists()
    with pytest.raises(TPIPSError, match="did not finish; give --resume"):
        run(manifest, tmp_path / "report")
    report = evaluate(read_manifest(manifest), RegionMetric(), tmp_path / "report", metric_name="region", resume=True)
    assert report["counts"]["rows_scored"] == 12
