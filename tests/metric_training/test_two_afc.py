"""2AFC sets: their columns are found, or the message says what was expected; ties are dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from metric_training.data.comparison import DataError
from metric_training.data.sources import DataOptions, guess_task, load_data
from metric_training.data.two_afc import find_columns, load_two_afc, two_afc_shares

PATHS = ("r.png", "x.png", "y.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate((*PATHS, "z.png")):
        Image.new("RGB", (8, 8), (60 * number, 0, 0)).save(tmp_path / name)
    return tmp_path


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "set.jsonl"


NAMES = [
    ("ref_path", "p0_path", "p1_path"),
    ("reference", "candidate_0", "candidate_1"),
    ("Reference Image", "Image_A", "Image_B"),
    ("ref", "left", "right"),
    ("x_ref", "x_0", "x_1"),
    ("reference_path", "cand_a_path", "cand_b_path"),
    ("ref_image", "candidate1", "candidate2"),
]


@pytest.mark.parametrize("names", NAMES)
def test_image_columns_are_found_by_their_names(names: tuple[str, str, str]) -> None:
    row = {"id": 1, **dict(zip(names, PATHS, strict=True)), "aspect": "pose", "probs": [0.2, 0.8], "task": "editing"}
    found = find_columns(row, "set")
    assert (found.reference, found.candidate_0, found.candidate_1) == names
    assert (found.aspect, found.probs, found.source, found.factors) == ("aspect", "probs", "task", None)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"probs": [0.2, 0.8]}, 0.8),
        ({"y": 0.75}, 0.75),
        ({"judge": "0.6"}, 0.6),
        ({"votes": [4, 1]}, 0.2),
        ({"left_vote": 1, "right_vote": 3}, 0.75),
        ({"factors": [{"name": "pose", "probs": [0.4, 0.6]}]}, 0.6),
        ({"factors": [{"name": "pose", "y": 1}]}, 1.0),
    ],
)
def test_votes_in_every_form(cells: dict[str, Any], expected: float, folder: Path) -> None:
    row = {"ref": "r.png", "left": "x.png", "right": "y.png", "aspect": "pose"} | cells
    (comparison,) = load_two_afc(write(folder, [row])).comparisons
    assert comparison.aspects == ("pose",)
    assert comparison.votes.tolist() == [pytest.approx([1 - expected, expected])]
    assert [Path(image.key).name for image in comparison.images] == list(PATHS)


def test_rows_about_the_same_images_are_one_comparison_and_ties_are_dropped(folder: Path) -> None:
    images = {"ref_path": "r.png", "p0_path": "x.png", "p1_path": "y.png", "source": "nvs"}
    rows = [
        images | {"aspect": "pose", "y": 0.2},
        images | {"aspect": "color", "y": 0.5},
        images | {"p1_path": "z.png", "aspect": "pose", "y": 1.0},
        images | {"aspect": "lighting", "y": 0.6},
        images | {"aspect": "pose", "y": 0.9},
        images | {"aspect": "size", "y": 1.4},
    ]
    data = load_two_afc(write(folder, rows))
    first, second = data.comparisons
    assert first.aspects == ("pose", "lighting") and second.aspects == ("pose",) and first.source == "nvs"
    assert data.dropped == {"ties": 1}
    assert [line for line, _ in data.problems.found] == [5, 6]
    assert "is there twice" in data.problems.found[0][1] and "share in [0, 1]" in data.problems.found[1][1]


def test_columns_that_do_not_fit_say_what_was_expected() -> None:
    row = {"photo": "r.png", "left": "x.png", "right": "y.png", "score": 0.3}
    with pytest.raises(DataError) as caught:
        find_columns(row, "my set")
    message = str(caught.value)
    assert "my set" in message and "photo, left, right, score" in message and "reference, votes not found" in message
    assert "ref_path" in message and "left_vote" in message and "--columns reference=photo" in message
    found = find_columns(row, "my set", {"reference": "photo", "probs": "score"})
    assert (found.reference, found.candidate_0, found.probs) == ("photo", "left", "score")


def test_given_columns_are_checked_and_doubt_is_an_error() -> None:
    row = {"ref": "r.png", "left": "x.png", "right": "y.png", "y": 0.3}
    with pytest.raises(DataError, match="the columns are ref, left"):
        find_columns(row, "set", {"reference": "photo"})
    with pytest.raises(DataError, match="the roles are reference"):
        find_columns(row, "set", {"picture": "ref"})
    with pytest.raises(DataError, match="several columns could be the reference: reference, ref"):
        find_columns(row | {"reference": "a.png"}, "set")


def test_vote_cells_that_are_no_votes() -> None:
    for bad in ("left", None, [1, 2, 3], 2.0, [0.3, 0.3], True):
        with pytest.raises(DataError):
            two_afc_shares(bad)


def test_missing_and_equal_images_are_bad_rows(folder: Path) -> None:
    good = {"ref_path": "r.png", "p0_path": "x.png", "p1_path": "y.png", "aspect": "pose", "y": 0.2}
    data = load_two_afc(write(folder, [good, good | {"p0_path": "none.png"}, good | {"p1_path": "x.png"}]))
    assert [line for line, _ in data.problems.found] == [2, 3] and len(data.comparisons) == 1
    assert "candidate_0 and candidate_1 are the same image" in data.problems.found[1][1]


def test_the_task_is_seen_in_the_columns(folder: Path) -> None:
    triplet = {"p0_path": "a", "p1_path": "b", "p2_path": "c", "factors": []}
    assert guess_task(triplet, {}) == "odd_one_out"
    assert guess_task({k: v for k, v in triplet.items() if k != "p2_path"}, {}) == "odd_one_out"  # a bad first row
    assert guess_task({"ref_path": "r", "p0_path": "a", "p1_path": "b", "factors": []}, {}) == "two_afc"
    row = {"photo": "r.png", "a": "x.png", "b": "y.png", "aspect": "pose", "y": 1.0}
    path = write(folder, [row, row | {"b": "z.png"}])
    data = load_data(str(path), DataOptions(columns={"reference": "photo"}, limit=1))
    assert data.task == "two_afc" and len(data.comparisons) == 1
    assert data.dropped["comparisons beyond the limit"] == 1
