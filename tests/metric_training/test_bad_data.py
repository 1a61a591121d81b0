"""Bad data: a row, a vote or a file that is none is named in one sentence, and the other rows are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bad_input import OVERFLOWING, draw_pictures, row, written
from PIL import Image

from metric_training.data.photographs import load_photographs
from metric_training.data.raw_votes import read_votes
from metric_training.data.sources import load_data
from tpips_reward import TPIPSError


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.png to 8.png, and one image of every bad kind."""
    folder = tmp_path_factory.mktemp("pictures")
    draw_pictures(folder)
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no image")
    (folder / "folder.png").mkdir()
    Image.new("1", (20000, 20000)).save(folder / "bomb.png")
    Image.new("1", (10200, 10000)).save(folder / "large.png")
    Image.new("L", (900, 2)).save(folder / "strip.png")
    (folder / "none").mkdir()
    return folder


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "missing file": (row("nowhere.png"), "nowhere.png does not exist; check the image root"),
    "name too long": (row("x" * 5000), "x… does not exist"),
    "NUL in a name": (row("a\0.png"), "does not exist"),
    "broken name": (row("\ud800.png"), "does not exist"),
    "folder": (row("folder.png"), "folder.png is a folder; name a file"),
    "empty image": (row("empty.png"), "empty.png does not open"),
    "no image": (row("text.png"), "text.png does not open"),
    "bomb": (row("bomb.png"), "bomb.png does not open (Image size (400000000 pixels) exceeds limit"),
    "too large": (row("large.png"), "large.png has 10200x10000 pixels, over the limit"),
    "strip": (row("strip.png"), "strip.png has 900x2 pixels: one side is more than 200 times the other"),
    "equal": (row(0, 0), "p0 and p1 are the same image"),
    "sum": (row(factor={"probs": [0.2, 0.2, 0.2]}), "sum to 0.6, not to 1"),
    "NaN": (row(factor={"probs": [float("nan"), 1, 0]}), "must be at least 0 and finite"),
    "overflowing integer": (row(factor={"probs": [OVERFLOWING, 0, 0]}), "must be at least 0 and finite"),
    "overflowing sum": (row(factor={"probs": [1e308, 1e308, 0]}), "sum to inf, not to 1"),
    "wrong label": (row(factor={"label": "p0"}), "label"),
    "label of another type": (row(factor={"label": 3}), "must be one of p0, p1, p2, not 3"),
    "probs of another type": (row(factor={"probs": {"a": 1}}), "probs must be 3 numbers"),
    "a number for probs": (row(factor={"probs": 1}), "probs must be 3 numbers"),
    "blank name": (row(factor={"name": " "}), "must have a name"),
    "no factors": (row(factors=None), "'factors' must be a list of objects, not None"),
    "deep text": (row(factors="[" * 100_000), "'factors' must be a list of objects; this text is not JSON"),
    "digits in a text": (row(factors=f"[{'9' * 5000}]"), "'factors' must be a list of objects; this text is not JSON"),
    "digits in a line": (f'{{"a": {"9" * 5000}}}', "not JSON (Exceeds the limit"),
    "deep line": ("[" * 100_000, "not JSON"),
    "cut line": ('{"p0_path": ', "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_listed_and_the_others_used(case: str, pictures: Path) -> None:
    bad, message = BAD_ROWS[case]
    data = load_data(written(pictures, row(3, 4, 5), bad))
    ((line, found),) = data.problems.found
    assert line == 2 and message in found and len(found) < 600
    assert [comparison.key for comparison in data.comparisons] == ["line 1"]


NO_SHARE, NO_COUNTS = "must be a share in [0, 1]", "left_vote and right_vote must be counts of votes"


@pytest.mark.parametrize(
    ("votes", "message"),
    [
        ({"y": 2}, NO_SHARE), ({"y": float("nan")}, NO_SHARE), ({"y": OVERFLOWING}, NO_SHARE),
        ({"y": "9" * 5000}, "must be two numbers or a share"), ({"y": "many"}, "must be two numbers or a share"),
        ({"y": [OVERFLOWING, 0.5]}, "must be at least 0 and finite"),
        ({"left_vote": "many", "right_vote": 1}, "'left_vote' must be a number"),
        *[({"left_vote": left, "right_vote": 1}, NO_COUNTS) for left in (float("nan"), float("inf"), OVERFLOWING, -1, -0.5)],
    ],
)  # fmt: skip
def test_votes_that_are_none_are_listed(votes: dict[str, Any], message: str, pictures: Path) -> None:
    good: dict[str, Any] = {"y": 0.2} if "y" in votes else {"left_vote": 1, "right_vote": 0}
    lines = [{"ref": f"{n}.png", "left": f"{n + 1}.png", "right": f"{n + 2}.png", **v} for n, v in ((0, good), (3, votes))]
    data = load_data(written(pictures, *lines))
    ((line, found),) = data.problems.found
    assert len(data.comparisons) == 1 and line == 2 and message in found and len(found) < 400


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "has no row"),
        ("empty.csv", "", "has no row"),
        ("empty.json", "", "is not JSON"),
        ("digits.json", f"[{'9' * 5000}]", "is not JSON"),
        ("number.json", "3", "must hold a list of rows, not int"),
        ("words.txt", "x", "is no data file"),
        ("folder.jsonl", None, "holds no data file"),
    ],
)
def test_files_without_rows(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(TPIPSError, match=message):
        load_data(str(path))


def test_folders_of_photographs_that_are_none(pictures: Path) -> None:
    for name, message in (("0.png", "0.png is no folder"), ("nowhere", "is no folder"), ("none", "holds no photograph")):
        with pytest.raises(TPIPSError, match=message):
            load_photographs(pictures / name)


def test_votes_with_names_that_no_file_can_have(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from metric_training.data.raw_votes import main

    head = "triplet,aspect,worker,choice,p0_path,p1_path,p2_path"
    table = written(pictures, head, f"t1,lighting,w1,p1,{'x' * 5000},1.png,2.png", name="votes.csv")
    main([table, "--output", str(pictures / "out.jsonl")])
    assert "images are not there, so that equal files could not be found: 1" in capsys.readouterr().out
    assert len(read_votes(table)[0]) == 1
