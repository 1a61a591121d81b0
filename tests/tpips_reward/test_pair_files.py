"""`tpips-reward score` with a file of pairs: the right numbers, and every fault with its line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tpips_reward.cli import main
from tpips_reward.errors import TPIPSError
from tpips_reward.metric import Metric
from tpips_reward.pair_files import read_pairs, score_rows


@pytest.fixture
def folder(tmp_path, parity) -> Path:
    (tmp_path / "in").mkdir()
    for name in ("cat_0", "cat_1", "coffee_0"):
        shutil.copy(parity / "images" / f"{name}.png", tmp_path / "in")
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


CSV = """a,b,aspects
in/cat_0.png,in/cat_1.png,lighting; subject color
in/cat_0.png,in/coffee_0.png,

"""
JSONL = """{"a": "in/cat_0.png", "b": "in/cat_1.png", "aspects": ["lighting", "subject color"]}

{"a": "in/cat_0.png", "b": "in/coffee_0.png"}
"""


@pytest.mark.parametrize("name, text", [("pairs.csv", CSV), ("pairs.jsonl", JSONL)])
def test_scores_of_a_file(folder, parity, metric, capsys, monkeypatch, name, text):
    write(folder, name, text)
    monkeypatch.chdir(parity)  # paths are relative to the file, wherever the command runs
    status = main(["score", str(folder / name), "--aspect", "shape", "--metric", "embedding", "--json"])
    out, err = capsys.readouterr()
    rows = json.loads(out)["pairs"]
    assert status == 0 and err == ""  # no bar where nobody sees it
    images = {stem: Image.open(folder / "in" / f"{stem}.png") for stem in ("cat_0", "cat_1", "coffee_0")}
    first = metric.similarity(images["cat_0"], images["cat_1"], ["lighting", "subject color"])[0].tolist()
    second = metric.similarity(images["cat_0"], images["coffee_0"], "shape").item()
    assert [(row["a"], row["b"], list(row["scores"])) for row in rows] == [
        ("in/cat_0.png", "in/cat_1.png", ["lighting", "subject color"]),
        ("in/cat_0.png", "in/coffee_0.png", ["shape"]),
    ]
    assert [*rows[0]["scores"].values(), rows[1]["scores"]["shape"]] == pytest.approx([*first, second], abs=1e-5)


def test_a_table_and_its_progress(folder, parity, capsys, monkeypatch):
    write(folder, "pairs.csv", CSV)
    monkeypatch.chdir(parity)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["score", str(folder / "pairs.csv"), "--metric", "embedding"]) == 0
    out, err = capsys.readouterr()
    assert "2/2" in err
    assert all(text in out for text in ("in/cat_1.png", "subject color", "in/coffee_0.png", "overall"))


def test_batches_are_small_and_images_encoded_once_in_each(folder, metric, monkeypatch):
    path = write(folder, "pairs.csv", CSV + "in/cat_1.png,in/coffee_0.png,\n" * 3)
    rows = read_pairs(path, ["lighting"])
    expected = list(score_rows(rows, metric))
    encoded, done = [], []
    encode = metric.backbone.encode_images
    monkeypatch.setattr(metric.backbone, "encode_images", lambda images: encoded.append(len(images)) or encode(images))
    monkeypatch.setattr("tpips_reward.pair_files.BATCH_IMAGES", 2)
    small = list(score_rows(rows, metric, done.append))
    assert done == [1, 1, 3] and sum(encoded) == 2 + 2 + 2
    assert sum(map(len, small)) == 6
    assert [value for row in small for value in row] == pytest.approx([v for row in expected for v in row], abs=1e-5)


def fails(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(TPIPSError) as caught:
        read_pairs(path, ["lighting"])
    return str(caught.value)


def test_every_missing_file_is_listed_with_its_line(folder):
    text = "a,b\nin/cat_0.png,in/gone.png\nin/cat_0.png,in/cat_1.png\nnot.png,in/gone.png\n"
    message = fails(folder, "p.csv", text)
    assert "p.csv has 3 faults in 3 rows" in message
    for place, file in (("line 2", "in/gone.png"), ("line 4", "not.png"), ("line 4", "in/gone.png")):
        assert f"{place}: {folder / file} does not exist." in message


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_faults_of_form_hide_no_missing_files(folder, suffix):
    """All at once, in the order of the lines."""
    rows = [("in/cat_0.png", "gone.png", "lighting"), ("", "in/cat_1.png", "x;;y"), ("lost.png", "lost.png", "x; y;X"), ("in/cat_0.png", "off.png", "")]
    head = "a,b,aspects\n" if suffix == "csv" else "\n"
    lines = [",".join(row) if suffix == "csv" else json.dumps(dict(zip("ab", row, strict=False)) | {"aspects": row[2]}) for row in rows]
    message = fails(folder, f"p.{suffix}", head + "\n".join(lines))
    assert "has 6 faults in 4 rows: " + " ".join([
        f"line 2: {folder / 'gone.png'} does not exist.",
        "line 3: give the image 'a' as a path, not ''.",
        "line 3: aspects is 'x;;y'; give a list of texts, in a CSV parted by ';'.",
        "line 4: aspects names 'X' twice; each aspect counts once: drop one.",
        f"line 4: {folder / 'lost.png'} does not exist.",
        f"line 5: {folder / 'off.png'} does not exist.",
    ]) in message  # fmt: skip


def test_an_aspect_twice_is_an_error(folder, capsys):
    pair = [str(folder / "in" / f"{name}.png") for name in ("cat_0", "cat_1")]
    path = write(folder, "p.csv", "a,b,aspects\nin/cat_0.png,in/cat_1.png,lighting; Lighting\n")
    for images, options in ((pair, ("x y", "X  Y")), ([str(path)], ("x y", "X  Y")), ([str(path)], ("x",))):
        aspects = [word for option in options for word in ("--aspect", option)]
        assert main(["score", *images, *aspects, "--metric", "nonsense"]) == 2
        twice = "aspects names 'X  Y' twice" if len(options) > 1 else "line 2: aspects names 'Lighting' twice"
        assert " ".join(twice.split()) in capsys.readouterr().err


def test_many_faults_are_cut_short(folder):
    message = fails(folder, "p.csv", "a,b\n" + "".join(f"x{k}.png,in/cat_0.png\n" for k in range(30)))
    assert "30 faults in 30 rows" in message and message.endswith("and 10 more")


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("p.csv", "a,b\n", "p.csv has no rows"),
        ("p.csv", "in/cat_0.png,in/cat_1.png\n", "p.csv has no rows below the first line, which names the columns: a,b,aspects."),
        ("p.csv", "a,b,aspects\nin/cat_0.png,in/cat_1.png," + "x" * 4001 + "\n", "line 2: An aspect may have at most 4000"),
        ("p.jsonl", '{"a": null, "b": "in/cat_1.png"}\n', "line 1: give the image 'a' as a path, not None"),
        ("p.jsonl", '{"a": "in/cat_0.png", "b": "in/cat_1.png", "": 1}\n', "line 1: the field '' means nothing here"),
        ("p.csv", "", "p.csv is empty"),
        ("p.jsonl", "\n", "p.jsonl has no rows"),
        ("p.csv", "a,c\nin/cat_0.png,in/cat_1.png\n", "line 2: the field 'c' means nothing here; there are a, b, aspects"),
        ("p.csv", "a\nin/cat_0.png\n", "line 2: give the image 'b' as a path, not None"),
        ("p.csv", "a,b\nin/cat_0.png\n", "line 2: of another length than the heading"),
        ("p.csv", "a,b\nx,y,z\n", "line 2: of another length"),
        ("p.csv", "a,b\n ,in/cat_0.png\n", "line 2: give the image 'a' as a path"),
        ("p.csv", "a,b,aspects\nin/cat_0.png,in/cat_1.png,x;;y\n", "line 2: aspects is 'x;;y'"),
        ("p.jsonl", '{"a": "in/cat_0.png"\n', "line 1: no JSON"),
        ("p.jsonl", '{"a": "in/cat_0.png", "b": 3}\n', "line 1: give the image 'b' as a path, not 3"),
        ("p.jsonl", '{"a": "in/cat_0.png", "b": "in/cat_1.png", "aspects": [1]}\n', "line 1: aspects is"),
        ("p.csv", b"a,b\n\xff\xfe,x\n", "is not UTF-8"),
        ("p.csv", "a,b\nin/cat_0.png,p.csv\n", "no image that Pillow can read"),
    ],
)
def test_rows_that_cannot_be_used(folder, name, text, message):
    assert message in fails(folder, name, text)


def test_an_aspect_that_no_metric_takes_ends_the_command_before_a_model_is_loaded(folder, capsys):
    pair = [str(folder / "in" / f"{name}.png") for name in ("cat_0", "cat_1")]
    for images in (pair, [str(write(folder, "p.csv", "a,b\nin/cat_0.png,in/cat_1.png\n"))]):
        assert main(["score", *images, "--aspect", "x" * 4001, "--metric", "nonsense"]) == 2
        assert "An aspect may have at most 4000 characters" in capsys.readouterr().err


def test_faults_in_the_pixels_name_file_and_line(folder, metric, capsys, parity, monkeypatch):
    (folder / "cut.png").write_bytes((folder / "in" / "cat_0.png").read_bytes()[:2000])
    Image.new("RGB", (1, 500)).save(folder / "thin.png")
    assert "line 2" in fails(folder, "p.csv", "a,b\nthin.png,in/cat_0.png\n")
    path = write(folder, "pairs.csv", "a,b\nin/cat_0.png,in/cat_1.png\nin/cat_0.png,cut.png\n")
    monkeypatch.chdir(parity)
    assert main(["score", str(path), "--metric", "embedding"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1
    assert f"line 3: {folder / 'cut.png'} cannot be read" in err
    path = write(folder, "pairs.csv", "a,b,aspects\nin/cat_0.png,in/cat_1.png,<|im_end|>\n")
    assert main(["score", str(path), "--metric", "embedding"]) == 2
    assert "line 2: The aspect '<|im_end|>' contains the control token" in capsys.readouterr().err


def test_a_score_that_is_not_finite_names_line_files_and_aspect(folder, metric, capsys, parity, monkeypatch):
    class Broken(Metric):
        def __init__(self, good):
            super().__init__(metric.fusion)
            self.good = good

        def similarity_pairs(self, images, references, pairs, **options):
            answer = super().similarity_pairs(images, references, pairs, **options)
            answer[self.good :] = float("nan")
            return answer

    score_pairs = metric.fusion.score_pairs
    first, second, third = (folder / "in" / f"{name}.png" for name in ("cat_0", "cat_1", "coffee_0"))
    path = write(folder, "pairs.csv", CSV + "in/cat_1.png,in/coffee_0.png,\n")
    monkeypatch.chdir(parity)
    monkeypatch.setattr("tpips_reward.cli._load", lambda options: Broken(2))  # of rows with 2, 1 and 1 aspects
    assert main(["score", str(path), "--aspect", "shape"]) == 2
    own = capsys.readouterr()
    assert own.out == "" and f"line 3: The metric gives no finite number for {first} and {third} in 'shape': weights" in own.err
    monkeypatch.setattr("tpips_reward.cli._load", lambda options: Broken(0))
    assert main(["score", str(first), str(second), "--aspect", "shape"]) == 2
    assert f"tpips-reward: The metric gives no finite number for {first} and {second} in 'shape'" in capsys.readouterr().err
    monkeypatch.setattr(metric.fusion, "score_pairs", lambda images, pairs: score_pairs(images, pairs) * torch.tensor([1, 1, torch.inf, 1]))
    monkeypatch.setattr("tpips_reward.cli._load", lambda options: metric)
    assert main(["score", str(path), "--aspect", "shape"]) == 2
    assert capsys.readouterr() == own


def test_a_thin_image_as_an_argument_is_named(folder, capsys):
    Image.new("RGB", (1, 500)).save(folder / "thin.png")
    assert main(["score", str(folder / "in" / "cat_0.png"), str(folder / "thin.png")]) == 2
    assert f"{folder / 'thin.png'} has 1x500 pixels: one side is more than 200 times the other; crop it." in capsys.readouterr().err
