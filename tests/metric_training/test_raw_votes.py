"""Single votes become distributions by the paper's rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from metric_training.data.comparison import DataError
from metric_training.data.odd_one_out import load_odd_one_out
from metric_training.data.raw_votes import Vote, distributions, main, parse_choice, read_votes
from metric_training.data.two_afc import load_two_afc


def votes(choices: list[int | None], triplet: str = "t", aspect: str = "pose", first_worker: int = 0) -> list[Vote]:
    return [
        Vote(k, triplet, aspect, f"w{first_worker + k}", f"s{first_worker + k}", choice)
        for k, choice in enumerate(choices)
    ]


def test_cant_tell_is_dropped_and_the_rest_normalised() -> None:
    (triplet,), report = distributions(votes([0, 1, 1, None, None]) + votes([2, 2, 2, 2, 2], aspect="overall"))
    assert triplet.votes["pose"].tolist() == pytest.approx([1 / 3, 2 / 3, 0])
    assert triplet.votes["overall"].tolist() == [0, 0, 1]
    assert (report.votes, report.used, report.cant_tell, report.removed) == (10, 8, 2, [])


def test_three_cant_tell_remove_an_aspect_from_a_test_set_only() -> None:
    cast = votes([0, 0, None, None, None]) + votes([None] * 5, aspect="gloss") + votes([1] * 5, aspect="color")
    (triplet,), report = distributions(cast)
    assert list(triplet.votes) == ["color"] and report.removed_votes == 10
    assert [(a, r) for _, a, r in report.removed] == [("pose", "3 of 5 can't tell"), ("gloss", "5 of 5 can't tell")]
    (triplet,), report = distributions(cast, test_set=False)
    assert triplet.votes["pose"].tolist() == [1, 0, 0]  # kept for training
    assert [a for _, a, _ in report.removed] == ["gloss"]  # nothing to learn from


def test_a_session_that_fails_a_sentinel_is_left_out() -> None:
    sentinel = [
        Vote(1, "check", "overall", "w0", "s0", 2, ("a", "a", "b")),
        Vote(2, "check", "overall", "w1", "s1", 0, ("a", "a", "b")),  # the odd one is b
        Vote(3, "check", "overall", "w2", "s2", None, ("a", "a", "b")),  # it could be told
    ]
    triplets, report = distributions(sentinel + votes([0, 1, 1, 0, 0]))
    assert [t.name for t in triplets] == ["t"]
    assert triplets[0].votes["pose"].tolist() == [1, 0, 0]  # of workers 0, 3 and 4
    assert report.failed_sessions == {"s1": 1, "s2": 1} and report.sentinel_votes == 3 and report.used == 3
    assert "session s1 left out (1 votes)" in report.describe()


def test_a_triplet_of_which_nothing_is_left_is_named() -> None:
    triplets, report = distributions(votes([None] * 3))
    assert triplets == [] and report.lost_triplets == ["t"]


def test_a_second_vote_of_a_worker_is_a_bad_row() -> None:
    (triplet,), report = distributions([*votes([0, 1]), Vote(9, "t", "pose", "w0", "s0", 2)])
    assert triplet.votes["pose"].tolist() == [0.5, 0.5, 0]
    assert report.votes == 2 and report.problems.found[0][0] == 9 and "before (line 0)" in report.problems.found[0][1]


def test_two_afc_ties_are_removed() -> None:
    cast = votes([0, 0, 1, 1, None]) + votes([0, 0, 0, 1, 1], aspect="color")
    (triplet,), report = distributions(cast, task="two_afc")
    assert triplet.votes["color"].tolist() == pytest.approx([0.6, 0.4])
    assert report.removed == [("t", "pose", "a tie, 2 to 2")]


@pytest.mark.parametrize("text", ["can't tell", "Can\u2019t tell", "cant_tell", "cannot tell", "CAN NOT TELL"])
def test_spellings_of_cant_tell(text: str) -> None:
    assert parse_choice(text) is None


def test_choices() -> None:
    assert [parse_choice(c) for c in ("p0", "P2", "1")] == [0, 2, 1]
    assert [parse_choice(c, "two_afc") for c in ("left", "right", "p1")] == [0, 1, 1]
    for bad in ("p3", "left", "3", "maybe"):
        with pytest.raises(DataError, match="none of p0, p1, p2"):
            parse_choice(bad)


def table(folder: Path) -> Path:
    for name, color in (("a", 0), ("b", 80), ("c", 160)):
        Image.new("RGB", (8, 8), (color, 0, 0)).save(folder / f"{name}.png")
    (folder / "a2.png").write_bytes((folder / "a.png").read_bytes())
    lines = ["triplet,aspect,worker,session,choice,p0_path,p1_path,p2_path"]
    lines += [f"t1,car color,w{k},,p{k % 2},a.png,b.png,c.png" for k in range(5)]
    lines += [f"t1,lighting,w{k},,can't tell,a.png,b.png,c.png" for k in range(5)]
    lines += ["t2,overall,w0,,p1,a.png,b.png,a2.png", "t2,overall,w1,,p0,a.png,b.png,a2.png"]  # equal files
    lines += ["t1,pose,w2,,p7,a.png,b.png,c.png", "t1,,w2,,p1,a.png,b.png,c.png"]
    path = folder / "votes.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_table_becomes_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(table(tmp_path)), "--output", str(tmp_path / "set.jsonl")])
    text = capsys.readouterr().out
    assert "12 votes, 2 bad rows." in text and "line 14: the choice 'p7'" in text and "line 15: aspect missing" in text
    assert "session worker w1 left out (2 votes)" in text and "'lighting' removed: 4 of 4 can't tell" in text
    data = load_odd_one_out(tmp_path / "set.jsonl")
    (comparison,) = data.comparisons
    assert comparison.key == "t1" and comparison.aspects == ("car color",)
    assert comparison.votes.tolist() == [pytest.approx([0.75, 0.25, 0])]  # without w1


def test_strict_stops_at_the_first_bad_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(table(tmp_path)), "--output", str(tmp_path / "set.jsonl"), "--strict"])
    assert stop.value.code == 2 and "line 14" in capsys.readouterr().err
    assert not (tmp_path / "set.jsonl").exists()


def test_images_that_are_not_there_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path)
    main([str(path), "--output", str(tmp_path / "set.jsonl")])
    assert "not there" not in capsys.readouterr().out
    (tmp_path / "a2.png").unlink()  # t2 is no sentinel as far as its files tell
    main([str(path), "--output", str(tmp_path / "set.jsonl")])
    assert "images are not there, so that equal files could not be found: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("triplet,aspect,worker,choice\n", [], "leaves no triplet: it has no votes"),
        ("triplet,aspect,worker,choice\nt,pose,w,can't tell\n", [], "leaves no triplet: 1 votes"),
        ("a,b\n1,2\n", [], "leaves no triplet: 0 votes, 1 bad rows"),
        ("triplet,aspect,worker,choice\n", ["--image_root", "nowhere"], "The image root nowhere is no folder"),
    ],
)
def test_a_table_that_leaves_nothing_is_one_sentence(
    content: str, more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "votes.csv").write_text(content)
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "votes.csv"), "--output", str(tmp_path / "set.jsonl"), *more])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "set.jsonl").exists()


def test_jsonl_votes_on_two_candidates(tmp_path: Path) -> None:
    for name, color in (("r", 0), ("x", 80), ("y", 160)):
        Image.new("RGB", (8, 8), (color, 0, 0)).save(tmp_path / f"{name}.png")
    images = {"reference": "r.png", "p0_path": "x.png", "p1_path": "y.png"}
    cast = [{"triplet": 7, "aspect": "pose", "worker": k, "choice": c, **images} for k, c in enumerate("00100")]
    (tmp_path / "votes.jsonl").write_text("\n".join(map(json.dumps, cast)))
    found, problems, _ = read_votes(tmp_path / "votes.jsonl", task="two_afc")
    assert [v.choice for v in found] == [0, 0, 1, 0, 0] and not problems.found
    main([str(tmp_path / "votes.jsonl"), "--task", "two_afc", "--output", str(tmp_path / "set.jsonl")])
    (comparison,) = load_two_afc(tmp_path / "set.jsonl").comparisons
    assert comparison.votes.tolist() == [pytest.approx([0.8, 0.2])]


def test_images_must_be_named_to_write_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "votes.csv").write_text("triplet,aspect,worker,choice\nt,pose,w,p0\n")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "votes.csv"), "--output", str(tmp_path / "set.jsonl")])
    assert "does not name the images of t" in capsys.readouterr().err
