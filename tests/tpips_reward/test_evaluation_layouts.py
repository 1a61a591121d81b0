"""The folders of GEdit-Bench, GEditBench v2 and ImgEdit, and the two EditReward-Benches, as small files."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluation_files import save, write_edits, write_lines
from fake_metrics import RegionMetric
from PIL import Image

import tpips_reward.cli
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import (
    Dataset,
    Settings,
    evaluate,
    read_editscore_bench,
    read_gedit,
    read_gedit_v2,
    read_imgedit,
    read_manifest,
    read_tiger_bench,
    read_vcreward_bench,
    read_votes,
)
from tpips_reward.evaluation.image_files import decode, image_size
from tpips_reward.evaluation.votes import parse_ranking
from tpips_reward.scenes import Scene


def png(level: int, size: tuple[int, int] = (8, 6)) -> dict[str, Any]:
    """An image as `datasets` stores it: its bytes, and no path."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (level, level, level)).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def level(ref: Any) -> int:
    return round(float(decode(ref.read(), ref.label).mean()) * 255)


def kinds(dataset: Dataset) -> Counter[str]:
    return Counter(problem.kind for problem in dataset.problems)


def write_parquet(path: Path, rows: list[dict[str, Any]], group: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def gedit_rows() -> list[dict[str, Any]]:
    return [
        {"key": f"k{index}", "task_type": task, "instruction": f"do {index} {language}",
         "instruction_language": language, "input_image": png(10 * index)}
        for index, task in enumerate(("color_alter", "subject-add", "color_alter"))
        for language in ("en", "cn")
    ]  # fmt: skip


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_gedit(tmp_path, write):
    table = write(tmp_path / f"gedit.{'parquet' if write is write_parquet else 'arrow'}", gedit_rows())
    results = tmp_path / "results"
    for model in ("a", "b"):
        for index, task in enumerate(("color_alter", "subject-add", "color_alter")):
            for language in ("en", "cn"):
                save(Scene(), results / model / "fullset" / task / language / f"k{index}.png")
    (results / "b/fullset/color_alter/en/k2.png").rename(results / "b/fullset/color_alter/en/K2.png")
    save(Scene(), results / "b/fullset/subject-add/en/k0.png")
    dataset = read_gedit(results, table)
    assert dataset.models == ("a", "b") and dataset.total_rows == 3
    assert [(row.key, row.category, row.instruction) for row in dataset.rows][1] == ("k1", "subject-add", "do 1 en")
    # the images inside the table belong to their rows, across row groups
    assert [level(row.source) for row in dataset.rows] == [0, 10, 20] and image_size(dataset.rows[0].source) == (8, 6)
    assert "en" in dataset.rows[0].outputs["a"].label
    assert kinds(dataset) == {"wrong_case": 1, "unexpected_file": 1} and "b" not in dataset.rows[2].outputs
    chinese = read_gedit(results, table, language="cn", models={"mine": results / "a"})
    assert chinese.models == ("mine",) and chinese.problems == () and "/cn/" in chinese.rows[0].outputs["mine"].label


def test_gedit_says_what_is_missing(tmp_path):
    table = write_parquet(tmp_path / "t.parquet", gedit_rows())
    with pytest.raises(TPIPSError, match="'fr'"):
        read_gedit(tmp_path, table, language="fr")
    with pytest.raises(TPIPSError, match="does not exist"):
        read_gedit(tmp_path / "nothing", table)
    other = write_parquet(tmp_path / "other.parquet", [{"key": "1"}])
    (tmp_path / "results" / "a").mkdir(parents=True)
    with pytest.raises(TPIPSError, match="no column 'task_type'; expected key"):
        read_gedit(tmp_path / "results", other)
    with pytest.raises(TPIPSError, match="cannot be read"):
        (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
        read_gedit(tmp_path / "results", tmp_path / "broken.parquet")


def test_gedit_v2(tmp_path, capsys):
    rows = [{"key": f"{n}", "instruction": f"do {n}", "task": "style", "source_image": png(n)} for n in range(4)]
    table = write_parquet(tmp_path / "bench" / "data.parquet", rows)
    home = tmp_path / "results"
    for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png", "a/2.png"):
        save(Scene(), home / name)
    lines = [
        {"key": "0", "candidates": [{"model": "a", "image": "a/0.png"}, {"model": "b", "image": "b/0.png"}]},
        {"key": "1", "candidates": [{"model": "a", "image": "a/1.png"}, {"model": "a", "image": "b/1.png"}]},
        {"key": "2", "candidates": [{"model": "a", "image": "a/2.jpg"}, {"model": "b", "image": "b/2.png"}]},
        {"key": "9", "candidates": [{"model": "a", "image": "a/0.png"}]},
    ]
    write_lines(home / "metadata.jsonl", lines)
    dataset = read_gedit_v2(home, table.parent)
    assert dataset.models == ("a", "b") and [sorted(row.outputs) for row in dataset.rows] == [["a", "b"], [], [], []]
    # row 1: two images of a, none of b; row 2: another suffix and a missing file; row 3: not listed; key 9: no row
    assert kinds(dataset) == {"doubled_file": 1, "missing_output": 4, "other_suffix": 1, "unexpected_file": 1}
    write_lines(home / "metadata.jsonl", [lines[0], lines[0], {"key": "1", "candidates": "x"}])
    with pytest.raises(TPIPSError, match=r"names no candidates\. The first of \d problems: "):
        read_gedit_v2(home, table)
    # a key is doubled where one of its two entries is faulty, too
    write_lines(home / "metadata.jsonl", [lines[0], {"key": "0", "candidates": "x"}, {**lines[0], "key": "1"}])
    dataset = read_gedit_v2(home, table)
    assert kinds(dataset)["doubled_key"] == 1 and [sorted(row.outputs) for row in dataset.rows][:2] == [[], ["a", "b"]]
    rows[1] |= {"key": "0", "instruction": None}
    dataset = read_gedit_v2(home, write_parquet(tmp_path / "doubled.parquet", rows))
    assert kinds(dataset)["doubled_key"] == 2 and [row.key for row in dataset.rows] == ["2", "3"]
    # and folders of models mean nothing here
    flags = ["evaluate", str(home), "--layout", "gedit-v2", "--benchmark", str(table), "--output", str(tmp_path / "r")]
    assert tpips_reward.cli.main([*flags, "--model", f"a={home / 'a'}"]) == 2
    assert "leave out --model" in capsys.readouterr().err


def test_imgedit(tmp_path):
    edits = {f"{n}": {"id": f"animal/{n}.jpg", "prompt": f"Remove {n}.", "edit_type": "remove"} for n in (7, 12, 30)}
    (tmp_path / "basic_edit.json").write_text(json.dumps(edits))
    for n in (7, 12):
        save(Scene(), tmp_path / f"origin/animal/{n}.jpg")
    (tmp_path / "origin/x").mkdir()  # a folder that no id names changes nothing
    for name in ("m/7.png", "m/12.jpg", "m/30.png", "n/7.png", "n/12.png", "n/12.webp", "n/30.png"):
        save(Scene(), tmp_path / "results" / name)
    dataset = read_imgedit(tmp_path / "results", tmp_path / "basic_edit.json", tmp_path / "origin")
    first = dataset.rows[0]
    assert (first.key, first.instruction, first.category) == ("7", "Remove 7.", "remove")
    assert [sorted(row.outputs) for row in dataset.rows] == [["m", "n"], ["m"]] and dataset.total_rows == 3
    assert kinds(dataset) == {"missing_source": 1, "other_suffix": 1, "doubled_file": 1}
    assert [problem.left_out for problem in dataset.problems if problem.kind == "other_suffix"] == [False]


# --- votes


def test_editscore_bench(tmp_path):
    dimensions = ("prompt_following", "consistency", "overall", "beauty")
    rows = [
        {"instruction": f"do {n}", "input_image": png(n), "output_images": [png(100 + n), png(200 + n)],
         "task_type": "color_alter", "dimension": dimension}
        for n, dimension in enumerate(dimensions)
    ]  # fmt: skip
    dataset = read_editscore_bench(write_parquet(tmp_path / "b.parquet", rows))
    assert [vote.dimension for vote in dataset.votes] == ["change", "preservation", "overall"]
    assert {vote.label for vote in dataset.votes} == {1} and dataset.vote_rule == "editscore" and dataset.anonymous
    assert kinds(dataset) == {"bad_row": 1} and dataset.total_rows == 4
    assert [level(dataset.rows[2].outputs[name]) for name in ("first", "second")] == [102, 202]


def test_tiger_bench(tmp_path):
    rows = [
        {"instruction": "a", "source_image": png(1), "candidate_1": png(11), "candidate_2": png(12), "ranking": "A<B"},
        {"instruction": "b", "source_image": png(2), "candidate_1": png(21), "candidate_2": png(22),
         "ranking": "A=B=Good"},
        {"instruction": "c", "source_image": png(3), "candidate_1": png(31), "candidate_2": png(32),
         "candidate_3": png(33), "ranking": "C>A>B"},
        {"instruction": "d", "source_image": png(4), "candidate_1": png(41), "candidate_2": png(42), "ranking": "A>C"},
    ]  # fmt: skip
    rows[0]["candidate_3"] = None  # the sets of two, three and four have the same columns when they are read together
    dataset = read_tiger_bench(write_parquet(tmp_path / "b.parquet", rows))
    votes = [(vote.key, vote.first, vote.second, vote.label) for vote in dataset.votes]
    assert votes == [
        ("00000", "A", "B", -1), ("00001", "A", "B", 0),
        ("00002", "A", "B", 1), ("00002", "A", "C", -1), ("00002", "B", "C", -1),
    ]  # fmt: skip
    assert dataset.models == ("A", "B", "C") and kinds(dataset) == {"bad_row": 1}
    assert level(dataset.rows[2].outputs["C"]) == 33


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("A>B", {"A": 0, "B": 1}),
        ("B > A", {"B": 0, "A": 1}),
        ("A<B", {"B": 0, "A": 1}),
        ("A=B=Bad", {"A": 0, "B": 0}),
        ("C>A=B", {"C": 0, "A": 1, "B": 1}),
    ],
)
def test_rankings(text, places):
    assert parse_ranking(text, len(places)) == places


@pytest.mark.parametrize("text", ["A>A", "A>C", "A", "", None, "A>B<C", "AB", "A>B>C>D"])
def test_rankings_that_cannot_be_read(text):
    with pytest.raises(TPIPSError, match="the ranking is"):
        parse_ranking(text, 3)


def vcreward_rows(image) -> list[dict[str, Any]]:
    """Nine rows, of which three are usable; `image` makes a cell of a gray level."""
    winners = ("Image A", "image b", "Tie", "Image C", "A", "A")
    rows = [
        {"key": f"k{n}", "instruction": f"do {n}", "source_image": image(n), "task": "color_alter", "winner": winner,
         "edited_images": [image(100 + n), image(200 + n)]}
        for n, winner in enumerate(winners)
    ]  # fmt: skip
    rows[4]["edited_images"] = rows[4]["edited_images"][:1]
    faulty = {**rows[5], "key": "k8", "winner": "neither"}
    return [*rows[:5], {**rows[5], "key": "k9"}, {**rows[5], "key": "k9"}, {**rows[5], "key": "k8"}, faulty]


def check_vcreward(dataset: Dataset) -> None:
    votes = [(vote.key, vote.first, vote.label, vote.dimension) for vote in dataset.votes]
    assert votes == [("k0", "A", 1, "preservation"), ("k1", "A", -1, "preservation"), ("k2", "A", 0, "preservation")]
    assert [row.key for row in dataset.rows] == ["k0", "k1", "k2"] and dataset.rows[0].category == "color_alter"
    assert [level(dataset.rows[1].outputs[name]) for name in ("A", "B")] == [101, 201]
    assert kinds(dataset) == {"bad_row": 3, "doubled_key": 2} and dataset.total_rows == 9
    assert dataset.anonymous and dataset.vote_rule == "vcreward"


def test_vcreward_bench(tmp_path):
    def file(level: int) -> str:
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.new("RGB", (8, 6), (level, level, level)).save(tmp_path / f"images/{level}.png")
        return f"images/{level}.png"

    write_lines(tmp_path / "metadata.jsonl", vcreward_rows(file))
    check_vcreward(read_vcreward_bench(tmp_path))
    check_vcreward(read_vcreward_bench(tmp_path / "metadata.jsonl"))
    (tmp_path / "images/101.png").unlink()
    dataset = read_vcreward_bench(tmp_path)
    assert [row.key for row in dataset.rows] == ["k0", "k2"] and "101.png" in dataset.problems[0].detail


def test_vcreward_bench_with_its_images_in_parquet(tmp_path):
    check_vcreward(read_vcreward_bench(write_parquet(tmp_path / "b.parquet", vcreward_rows(png))))


def test_votes_of_ones_own(tmp_path):
    dataset = read_manifest(write_edits(tmp_path, 3))
    good = {"key": "000", "first": "good", "second": "drifting", "vote": "first"}
    bad = [{**good, "key": "7"}, {**good, "first": "x"}, {**good, "second": "good"}, {**good, "vote": "A"},
           {**good, "dimension": "beauty"}, {**good, "vote": ["first"]}]  # fmt: skip
    tie = {**good, "key": "001", "vote": "tie", "dimension": "change"}
    path = write_lines(tmp_path / "votes.jsonl", [good, *bad, tie])
    voted = read_votes(path, dataset)
    assert [(vote.label, vote.dimension) for vote in voted.votes] == [(1, "overall"), (0, "change")]
    assert kinds(voted) == {"bad_vote": 6}
    with pytest.raises(TPIPSError, match="no usable vote"):
        read_votes(write_lines(path, bad), dataset)


def test_embedded_images_are_read_a_group_at_a_time(tmp_path):
    rows = [{"key": str(n), "instruction": "x", "task": "t", "source_image": png(n)} for n in range(7)]
    table = write_parquet(tmp_path / "b.parquet", rows, group=3)
    write_lines(tmp_path / "metadata.jsonl", [{"key": "0", "candidates": [{"model": "m", "image": "m.png"}]}])
    found = read_gedit_v2(tmp_path, table).rows
    order = np.random.default_rng(0).permutation(7)
    assert [level(found[int(n)].source) for n in order] == order.tolist()


def test_candidates_of_a_benchmark_are_no_missing_outputs(tmp_path):
    rows = [
        {"instruction": "make it red", "source_image": png(10 * n), "candidate_1": png(50), "candidate_2": png(90 + n),
         "candidate_3": png(200) if n == 0 else None, "ranking": "A>B>C" if n == 0 else "A>B"}
        for n in range(3)
    ]  # fmt: skip
    dataset = read_tiger_bench(write_parquet(tmp_path / "b.parquet", rows, group=1))
    report = evaluate(dataset, RegionMetric(), tmp_path / "report", settings=Settings(resamples=200))
    assert report["counts"]["outputs_expected"] == report["counts"]["outputs_scored"] == 7
    assert not any(entry.get("missing") for entry in report["models"]) and report["comparisons"] == []
    agreed = report["votes"]["agreement"][0]
    assert agreed["votes"] == agreed["counted"] == 5 and report["votes"]["kendall_tau_of_models"] is None
    assert "only the votes compare them" in (tmp_path / "report/report.html").read_text()
