"""The folder of a report: what is refused, what is replaced, and what an evaluation leaves that did not finish."""

from __future__ import annotations

import pytest
from evaluation_files import write_edits
from evaluation_runs import run
from fake_metrics import RegionMetric

import tpips_reward.cli
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import Settings, evaluate, read_manifest


def test_a_folder_that_exists_is_refused(manifest, tmp_path):
    folder = tmp_path / "report"
    run(manifest, folder)
    with pytest.raises(TPIPSError, match="holds a report; give --overwrite"):
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
