"""Manifests: what is read, and that everything that cannot be is listed and nothing is shifted."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluation_files import read_lines, save, write_edits, write_lines
from PIL import Image

from tpips_reward.errors import TPIPSError, exit_on_errors, hide_size_warnings
from tpips_reward.evaluation import Dataset, read_manifest
from tpips_reward.evaluation.checking import check_images
from tpips_reward.evaluation.image_files import ImageFile, decode, image_size
from tpips_reward.evaluation.layouts import model_folders
from tpips_reward.scenes import Scene


def kinds(dataset: Dataset) -> Counter[str]:
    return Counter(problem.kind for problem in dataset.problems)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_edits(tmp_path, 4)


def change(manifest: Path, index: int, **fields: object) -> None:
    lines = read_lines(manifest)
    lines[index].update(fields)
    write_lines(manifest, lines)


def test_a_good_manifest_has_no_problems(manifest):
    dataset = read_manifest(manifest)
    assert dataset.models == ("drifting", "good", "destroying")
    assert [row.key for row in dataset.rows] == ["000", "001", "002", "003"]
    assert dataset.problems == () and dataset.total_rows == 4
    row = dataset.rows[2]
    assert row.preserve == ("background",) and row.target == ("object color",) and row.category == "paint"
    assert row.outputs["good"].label.endswith("good/002.png")


def test_csv_gives_the_same_rows(manifest):
    lines = read_lines(manifest)
    names = ("drifting", "good", "destroying")
    text = "key,source,instruction,category,preserve,target," + ",".join(f"output:{name}" for name in names) + "\n"
    for line in lines:
        cells = [line["key"], line["source"], line["instruction"], line["category"], "background", "object color"]
        text += ",".join(f'"{cell}"' for cell in [*cells, *[line["outputs"][name] for name in names]]) + "\n"
    table = manifest.with_suffix(".csv")
    table.write_text("\ufeff" + text, encoding="utf-8")
    assert read_manifest(table).rows == read_manifest(manifest).rows


def test_csv_splits_aspects_and_lists_bad_rows(tmp_path):
    save(Scene(), tmp_path / "a.png")
    table = tmp_path / "edits.csv"
    heading = "key,source,preserve,output:m\n"
    table.write_text(heading + "1,a.png,background; lighting,a.png\n2,a.png\n3,a.png,x,a.png,more\n")
    dataset = read_manifest(table)
    assert dataset.rows[0].preserve == ("background", "lighting")
    assert [row.key for row in dataset.rows] == ["1"] and kinds(dataset)["bad_row"] == 2 and dataset.total_rows == 3


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_parquet_gives_the_same_rows(manifest):
    lines = read_lines(manifest)
    nested = parquet(manifest.with_name("nested.parquet"), lines)
    assert read_manifest(nested).rows == read_manifest(manifest).rows and read_manifest(nested).problems == ()
    flat = [{**line, **{f"output:{name}": value for name, value in line["outputs"].items()}} for line in lines]
    for row in flat:
        del row["outputs"]
    flat[1]["output:good"], flat[2]["key"] = None, None
    dataset = read_manifest(parquet(manifest.with_name("flat.parquet"), flat))
    assert dataset.models == ("drifting", "good", "destroying") and [row.key for row in dataset.rows][2] == "3"
    assert kinds(dataset) == {"missing_output": 1} and "good" not in dataset.rows[1].outputs


def test_parquet_may_hold_the_images(manifest):
    home = manifest.parent

    def image(path: str, embedded: bool = True) -> dict[str, object]:
        return {"bytes": (home / path).read_bytes() if embedded else None, "path": path}

    rows = [
        {"key": line["key"], "source": image(line["source"]), "instruction": line["instruction"], "preserve": ["a"],
         "output:m": image(line["outputs"]["good"], embedded=index != 3)}
        for index, line in enumerate(read_lines(manifest))
    ]  # fmt: skip
    rows[2]["output:m"] = {"bytes": b"no image", "path": None}
    dataset = check_images(read_manifest(parquet(manifest.with_name("b.parquet"), rows)))
    assert kinds(dataset) == {"unreadable_output": 1}
    assert dataset.rows[3].outputs["m"].label == str(home / "good/003.png")
    for row, line in zip(dataset.rows, read_lines(manifest), strict=True):
        assert row.source.read() == (home / line["source"]).read_bytes()
        if row.key != "002":
            assert row.outputs["m"].read() == (home / line["outputs"]["good"]).read_bytes()


def test_edits_that_are_still_to_be_made_need_no_outputs(tmp_path):
    dataset = read_manifest(folder_manifest(tmp_path), needs_outputs=False)
    assert dataset.models == () and len(dataset.rows) == 3 and dataset.problems == ()


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("good/nothing.png", "missing_output", "does not exist"),
        ("good/001.PNG", "wrong_case", "001.png"),
        ("good/001.jpg", "other_suffix", "001.png"),
        (None, "missing_output", "names no output"),
    ],
)
def test_an_output_that_is_not_there_is_listed_and_the_rest_stays(manifest, name, kind, hint):
    lines = read_lines(manifest)
    change(manifest, 1, outputs={**lines[1]["outputs"], "good": name})
    dataset = read_manifest(manifest)
    assert kinds(dataset) == {kind: 1}
    problem = dataset.problems[0]
    assert problem.left_out and (problem.key, problem.model) == ("001", "good") and hint in problem.detail
    assert set(dataset.rows[1].outputs) == {"drifting", "destroying"}
    assert all(set(row.outputs) == set(dataset.models) for row in dataset.rows if row.key != "001")


def test_a_model_that_a_row_does_not_mention(manifest):
    lines = read_lines(manifest)
    del lines[0]["outputs"]["good"]
    dataset = read_manifest(write_lines(manifest, lines))
    assert kinds(dataset) == {"missing_output": 1} and "good" not in dataset.rows[0].outputs


def test_a_model_with_half_the_outputs(manifest):
    for index in (0, 2):
        (manifest.parent / f"good/00{index}.png").unlink()
    dataset = read_manifest(manifest)
    assert kinds(dataset) == {"missing_output": 2}
    assert [row.key for row in dataset.rows if "good" in row.outputs] == ["001", "003"]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"source": "in/nothing.png"}, "missing_source"),
        ({"source": "IN/001.png"}, "missing_source"),
        ({"source": "in/001.Png"}, "wrong_case"),
        ({"preserve": ["background", " "]}, "bad_aspects"),
        ({"preserve": ["background", "Background "]}, "bad_aspects"),
        ({"target": ["background"]}, "bad_aspects"),
        ({"target": [3]}, "bad_aspects"),
        ({"preserve": 3}, "bad_row"),
        ({"outputs": ["good/001.png"]}, "bad_row"),
        ({"outputs": {"good": 3}}, "bad_row"),
        ({"outputs": {"control: noise": "good/001.png"}}, "bad_row"),
        ({"key": ""}, "bad_row"),
        ({"key": "../001"}, "bad_row"),
        ({"key": "1\ud800"}, "bad_row"),
        ({"source": None}, "bad_row"),
        ({"instruction": 7}, "bad_row"),
        ({"key": "000"}, "doubled_key"),
    ],
)
def test_a_bad_row_is_listed_and_left_out(manifest, fields, kind):
    change(manifest, 1, **fields)
    dataset = read_manifest(manifest)
    assert kinds(dataset)[kind] == 1
    assert "001" not in [row.key for row in dataset.rows] and dataset.total_rows == 4
    assert len(dataset.rows) == (2 if kind == "doubled_key" else 3)


@pytest.mark.parametrize("fault", [{"source": None}, {"source": "in/none.png"}, {"preserve": [""]}])
def test_a_key_that_a_faulty_row_has_too_is_doubled(manifest, fault):
    change(manifest, 1, key="000", **fault)
    dataset = read_manifest(manifest)
    assert kinds(dataset)["doubled_key"] == 1 and [row.key for row in dataset.rows] == ["002", "003"]


def test_models_whose_names_differ_in_blanks_only(manifest, tmp_path):
    lines = read_lines(manifest)
    change(manifest, 1, outputs={**lines[1]["outputs"], " good": "good/000.png"})
    dataset = read_manifest(manifest)
    assert kinds(dataset) == {"bad_row": 1} and "'good' has two outputs" in dataset.problems[0].detail
    table = manifest.with_name("edits.csv")
    table.write_text("key,source,output:m,output: m\n1,in/000.png,good/000.png,good/001.png\n")
    assert kinds(read_manifest(table, needs_outputs=False)) == {"bad_row": 1}


def test_lines_that_are_no_json(manifest):
    text = manifest.read_text().splitlines()
    broken = [text[0], "{", "[1]", text[1].replace('"key"', '"key": "9", "key"'), "", *text[2:]]
    manifest.write_text("\n".join(broken))
    dataset = read_manifest(manifest)
    assert kinds(dataset) == {"bad_row": 3} and dataset.total_rows == 6
    assert [problem.detail.split()[1] for problem in dataset.problems] == ["2", "3", "4"]


def test_a_bad_row_is_listed_with_its_key(manifest):
    change(manifest, 1, instruction=7)
    change(manifest, 2, key="../x")
    assert [(problem.kind, problem.key) for problem in read_manifest(manifest).problems] == [("bad_row", "001"), ("bad_row", "")]
    lines = read_lines(manifest)
    del lines[1]["key"]
    write_lines(manifest, lines)
    assert read_manifest(manifest).problems[0].key == "2", "a row's number is its key"


def test_an_empty_output_is_a_missing_one(manifest):
    lines = read_lines(manifest)
    change(manifest, 1, outputs={**lines[1]["outputs"], "good": " "})
    dataset = read_manifest(manifest)
    assert [(p.kind, p.key, p.model) for p in dataset.problems] == [("missing_output", "001", "good")]
    assert list(dataset.rows[1].outputs) == ["drifting", "destroying"]


@pytest.mark.parametrize(
    ("heading", "message"),
    [
        ("key\tsource\toutput:m", r"no column for the source image. Its columns are 'key\\tsource\\toutput:m'; expected source,"),
        ("key;source;output:m", "no column for the source image. Its columns are 'key;source;output:m'; .*parted by commas"),
        ("key,source,m", "names no outputs.* Its columns are 'key', 'source', 'm'; expected source, output:NAME for each model"),
    ],
)
def test_columns_that_are_none_of_a_manifest(tmp_path, heading, message):
    save(Scene(), tmp_path / "a.png")
    table = tmp_path / "edits.csv"
    between = next(mark for mark in "\t;," if mark in heading)
    table.write_text(heading + "\n" + between.join(["1", "a.png", "a.png"]) + "\n")
    with pytest.raises(TPIPSError, match=message):
        read_manifest(table)


def test_unknown_fields_are_named_once(manifest):
    for index in (0, 1):
        change(manifest, index, preserv=["background"])
    dataset = read_manifest(manifest)
    assert kinds(dataset) == {"unknown_field": 1} and "preserv" in dataset.problems[0].detail
    assert len(dataset.rows) == 4


def test_one_file_for_two_outputs(manifest):
    lines = read_lines(manifest)
    change(manifest, 1, outputs={**lines[1]["outputs"], "good": "good/000.png", "drifting": "in/001.png"})
    dataset = read_manifest(manifest)
    assert kinds(dataset) == {"shared_file": 2} and not any(problem.left_out for problem in dataset.problems)


# --- outputs in folders


def folder_manifest(tmp_path: Path, keys: tuple[str, ...] = ("1", "2", "a.b")) -> Path:
    save(Scene(), tmp_path / "in.png")
    return write_lines(tmp_path / "edits.jsonl", [{"key": key, "source": "in.png"} for key in keys])


def test_folders_pair_by_key_and_say_what_does_not_fit(tmp_path):
    manifest = folder_manifest(tmp_path, ("1", "2", "a.b", "Cat", "dog", "animal/7"))
    fitting = ("1.png", "2.png", "2.jpg", "a.b.webp", "cat.png", "animal/7.png")
    for name in (*fitting, "extra.png", "animal/8.png", "10.png"):
        save(Scene(), tmp_path / "m" / name)
    (tmp_path / "m" / "notes.txt").write_text("no image")
    dataset = read_manifest(manifest, {"m": tmp_path / "m"})
    paired = {row.key: Path(row.outputs["m"].label).name for row in dataset.rows if row.outputs}
    assert paired == {"1": "1.png", "a.b": "a.b.webp", "animal/7": "7.png"}
    assert kinds(dataset) == {"doubled_file": 1, "wrong_case": 1, "missing_output": 1, "unexpected_file": 3}


def test_folders_of_models_whose_names_differ_in_blanks_only(tmp_path):
    manifest = write_edits(tmp_path, 2)
    with pytest.raises(TPIPSError, match="Two models are called 'q' but for blanks"):
        read_manifest(manifest, {"q": tmp_path / "good", " q": tmp_path / "drifting"})
    for name in ("base", " base"):
        (tmp_path / "results" / name).mkdir(parents=True)
    with pytest.raises(TPIPSError, match="Two models are called 'base' but for blanks"):
        model_folders(tmp_path / "results")


def test_folders_need_keys_and_must_exist(tmp_path):
    manifest = folder_manifest(tmp_path)
    with pytest.raises(TPIPSError, match="of the model 'm' does not exist"):
        read_manifest(manifest, {"m": tmp_path / "nothing"})
    with pytest.raises(TPIPSError, match="of the model 'm' is no folder"):
        read_manifest(manifest, {"m": manifest})
    (tmp_path / "m").mkdir()
    write_lines(manifest, [{"source": "in.png"}])
    with pytest.raises(TPIPSError, match="names no outputs|no \"key\"") as error:
        read_manifest(manifest)
    assert "folder a model" in str(error.value)
    assert kinds(read_manifest(manifest, {"m": tmp_path / "m"})) == {"bad_row": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", None, "does not exist"),
        ("x.txt", "a", "no manifest"),
        ("x.jsonl", "\n", "no rows"),
        ("x.csv", "", "is empty"),
        ("x.csv", "key,key\n1,2\n", "column 'key' twice"),
        ("x.jsonl", b"\xff\xfe{}", "not UTF-8"),
        ("x.parquet", None, "does not exist"),
        ("x.parquet", b"PAR1", "cannot be read"),
    ],
)
def test_files_that_are_no_manifest(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TPIPSError, match=message):
        read_manifest(path)


# --- images


def test_sizes_and_unreadable_images_are_found_before_scoring(manifest):
    home = manifest.parent
    (home / "good/000.png").write_bytes(b"no image")
    (home / "in/001.png").write_bytes(b"")
    Image.new("RGB", (48, 48)).save(home / "good/002.png")
    Image.new("RGB", (48, 24)).save(home / "good/003.png")
    dataset = check_images(read_manifest(manifest))
    assert kinds(dataset) == {"unreadable_output": 1, "unreadable_source": 1, "other_size": 1, "other_shape": 1}
    assert [row.key for row in dataset.rows] == ["000", "002", "003"]
    assert "good" not in dataset.rows[0].outputs and "good" in dataset.rows[1].outputs
    skipped = check_images(read_manifest(manifest), "skip")
    assert not any("good" in row.outputs for row in skipped.rows)
    assert sum(problem.left_out for problem in skipped.problems) == 4


def test_a_manifest_without_outputs_says_why(manifest):
    lines = read_lines(manifest)
    for line in lines:
        line["outputs"] = {"good": "good/000.png", " good": "good/001.png"}
    write_lines(manifest, lines)
    with pytest.raises(TPIPSError, match=r"names no outputs.*The first of 4 problems: line 1: the model 'good' has two outputs"):
        read_manifest(manifest)


def test_an_image_that_no_metric_takes_is_said_once(manifest):
    home = manifest.parent
    Image.new("RGB", (3000, 2)).save(home / "good/000.png")
    Image.new("RGB", (2, 3000)).save(home / "in/001.png")
    dataset = check_images(read_manifest(manifest))
    assert [(p.kind, p.key, p.left_out) for p in dataset.problems] == [
        ("unreadable_output", "000", True), ("unreadable_source", "001", True)]  # fmt: skip
    limit = "pixels: one side is more than 200 times the other; crop it."
    assert dataset.problems[0].detail == f"{home / 'good/000.png'} has 3000x2 {limit}"
    assert dataset.problems[1].detail == f"{home / 'in/001.png'} has 2x3000 {limit}"
    assert [row.key for row in dataset.rows] == ["000", "002", "003"] and "good" not in dataset.rows[0].outputs


def test_more_pixels_than_are_read_are_said_before_scoring(manifest, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    Image.new("RGB", (30, 25)).save(manifest.parent / "good/000.png")
    (problem,) = check_images(read_manifest(manifest)).problems
    assert problem.kind == "unreadable_output" and problem.detail.endswith("more pixels than the 600 that are read; make it smaller.")
    monkeypatch.setattr("tpips_reward.images.MAX_PIXELS", 500)
    assert {p.detail.partition(" has ")[2] for p in check_images(read_manifest(manifest)).problems if not p.model} == {
        "24x24 pixels, over the limit of 0 million; make it smaller."}  # fmt: skip


def test_the_file_of_a_refused_image_is_closed_and_pillow_says_nothing_beside(manifest, monkeypatch):
    path = manifest.parent / "good/000.png"
    Image.new("RGB", (30, 25)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    files, opened = [], Image.open

    def opening(source):
        image = opened(source)
        files.append(image.fp)
        return image

    monkeypatch.setattr(Image, "open", opening)
    sentence = "has more pixels than the 600 that are read; make it smaller."
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        with exit_on_errors(), pytest.raises(TPIPSError, match=sentence):
            image_size(ImageFile(path))
    assert [file.closed for file in files] == [True] and said == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hide_size_warnings()
        with pytest.raises(TPIPSError, match=sentence):
            image_size(ImageFile(path))
        with pytest.raises(TPIPSError, match=sentence):
            decode(path.read_bytes(), str(path))


@pytest.mark.parametrize("name", ["good", "in/..", "good/001.png"])
def test_a_folder_in_place_of_an_image_is_called_one(manifest, name):
    if name.endswith(".png"):
        (manifest.parent / name).unlink()
        (manifest.parent / name).mkdir()
    lines = read_lines(manifest)
    change(manifest, 1, outputs={**lines[1]["outputs"], "good": name})
    change(manifest, 2, source=name)
    dataset = read_manifest(manifest)
    assert kinds(dataset) == {"unreadable_output": 1, "unreadable_source": 1}
    assert all(f"{manifest.parent / name} is a folder; name the image file" in p.detail for p in dataset.problems)
    assert [row.key for row in dataset.rows] == ["000", "001", "003"] and "good" not in dataset.rows[1].outputs


@pytest.mark.parametrize("name", ["mod\udce8le", "half \ud83d"])
def test_a_model_whose_name_is_no_unicode(tmp_path, name):
    """It would be lost, with the whole report, when the files are written."""
    manifest = folder_manifest(tmp_path, ("1",))
    with pytest.raises(TPIPSError, match="holds half a character; rename it"):
        read_manifest(manifest, {name: tmp_path})


def test_a_link_to_itself_costs_no_other_file(tmp_path):
    manifest = folder_manifest(tmp_path, ("1", "2"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/1.png").symlink_to(tmp_path / "m/1.png")
    Image.new("RGB", (32, 32)).save(tmp_path / "m/2.png")
    dataset = read_manifest(manifest, {"m": tmp_path / "m"})
    assert kinds(dataset) == {"unreadable_output": 1} and [row.key for row in dataset.rows if row.outputs] == ["2"]


def test_what_is_no_file_in_a_folder_of_outputs(tmp_path):
    manifest = folder_manifest(tmp_path, ("1", "2"))
    (tmp_path / "m/1.png").mkdir(parents=True)
    (tmp_path / "m/2.png").symlink_to(tmp_path / "gone.png")
    details = [p.detail for p in read_manifest(manifest, {"m": tmp_path / "m"}).problems if p.kind == "unreadable_output"]
    assert len(details) == 2 and "1.png is a folder" in details[0] and "2.png is a link to nothing" in details[1]


def test_a_turned_photograph_has_its_turned_size(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(tmp_path / "a.jpg", exif=exif)
    Image.new("RGB", (20, 30)).save(tmp_path / "b.png")
    manifest = write_lines(tmp_path / "x.jsonl", [{"source": "a.jpg", "outputs": {"m": "b.png"}}])
    assert check_images(read_manifest(manifest)).problems == ()


def test_one_file_under_two_spellings_is_one_file(tmp_path):
    for name in ("s.png", "a.png"):
        Image.new("RGB", (32, 32), (200, 30, 40) if name == "a.png" else (10, 20, 30)).save(tmp_path / name)
    rows = [
        {"key": "1", "source": "s.png", "outputs": {"m": f"../{tmp_path.name}/s.png"}},
        {"key": "2", "source": "s.png", "outputs": {"m": "a.png"}},
        {"key": "3", "source": "s.png", "outputs": {"m": str(tmp_path / "a.png")}},
    ]
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [p.detail for p in read_manifest(tmp_path / "edits.jsonl").problems if p.kind == "shared_file"]
    assert len(found) == 2 and "is the source and the output of m" in found[0] and "2 (m), 3 (m)" in found[1]
