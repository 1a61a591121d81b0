"""Odd-one-out files: the layout, its bad rows, and local copies in the formats of `datasets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from metric_training.data.comparison import DataError, ImageSource, show_problems, vote_shares
from metric_training.data.odd_one_out import NO_TARGET, load_odd_one_out, odd_one_out_row, write_rows
from metric_training.data.rows import read_rows, split_of
from metric_training.data.sources import DataOptions, load_data


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with the pictures 0.png to 5.png, of which 5 has the contents of 0."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(5):
        Image.new("RGB", (8, 6), (40 * number, 10, 90)).save(folder / f"{number}.png")
    (folder / "5.png").write_bytes((folder / "0.png").read_bytes())
    return folder


def row(images: str = "012", **changes: Any) -> dict[str, Any]:
    factors = [
        {"name": "lighting", "label": "p1", "probs": [0.2, 0.6, 0.2]},
        {"name": "overall", "label": "p0", "probs": [1, 0, 0]},
    ]
    return {**{f"p{k}_path": f"{n}.png" for k, n in enumerate(images)}, "factors": factors} | changes


def factor(**changes: Any) -> dict[str, Any]:
    return {"name": "pose", "label": "p2", "probs": [0.25, 0.25, 0.5]} | changes


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_the_layout_is_read(pictures: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", [row(id="a", source="flux"), "", row("342", factors=[factor()])])
    data = load_odd_one_out(path, image_root=pictures)
    first, second = data.comparisons
    assert (first.key, first.source, first.aspects) == ("a", "flux", ("lighting", "overall"))
    assert first.votes.dtype == np.float32 and first.votes.tolist() == [
        pytest.approx([0.2, 0.6, 0.2]),
        pytest.approx([1, 0, 0]),
    ]
    assert [Path(i.key).name for i in second.images] == ["3.png", "4.png", "2.png"] and second.key == "line 3"
    assert first.images[2].key == second.images[2].key
    pixels = second.images[1].load()
    assert pixels.shape == (3, 6, 8) and pixels[:, 0, 0].tolist() == pytest.approx([160 / 255, 10 / 255, 90 / 255])
    assert not data.problems.found


BAD = {
    "a missing file": (row("019"), "9.png does not exist"),
    "two equal files": (row("015"), "p0 and p2 are the same image"),
    "one path twice": (row("011"), "p1 and p2 are the same image"),
    "no factors": ({k: v for k, v in row().items() if k != "factors"}, "'factors' missing"),
    "a label against the votes": (row(factors=[factor(label="p0")]), "most voted for 'p2'"),
    "a label that is no text": (row(factors=[factor(label=2)]), "label of 'pose' must be one of p0, p1, p2"),
    "a sum of 0.9": (row(factors=[factor(probs=[0.2, 0.2, 0.5])]), "sum to 0.9, not to 1"),
    "two probs": (row(factors=[factor(probs=[0.5, 0.5])]), "must be 3 numbers"),
    "a negative prob": (row(factors=[factor(probs=[-0.5, 0.5, 1.0])]), "at least 0"),
    "an aspect twice": (row(factors=[factor(), factor(name="Pose ")]), "is there twice"),
    "no name": (row(factors=[factor(name=" ")]), "must have a name"),
    "no Unicode": (row(factors=[factor(name="\ud800")]), "lone surrogate"),
    "a novel for a name": (row(factors=[factor(name="x" * 5000)]), "at most 4000 characters"),
    "not JSON": ("{", "not JSON"),
    "a list": ("[1]", "must be an object"),
    "an address": (row(p0_path="https://x.org/a.png"), "download it first"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_listed_with_their_line(case: str, pictures: Path, tmp_path: Path) -> None:
    bad, message = BAD[case]
    path = write(tmp_path / "set.jsonl", [row(), bad, row("234")])
    data = load_odd_one_out(path, image_root=pictures)
    assert [line for line, _ in data.problems.found] == [2] and message in data.problems.found[0][1]
    assert f"{path}, line 2: " in data.problems.describe()
    assert len(data.comparisons) == (3 if case == "an aspect twice" else 2)
    with pytest.raises(DataError, match="line 2"):
        load_odd_one_out(path, image_root=pictures, strict=True)


def test_strict_stops_at_the_first_bad_line_whatever_is_wrong_with_it(pictures: Path, tmp_path: Path) -> None:
    missing, broken = row("019"), "{"
    for bad, message in (([missing, broken], "9.png does not exist"), ([broken, missing], "not JSON")):
        path = write(tmp_path / "set.jsonl", [row(), *bad])
        with pytest.raises(DataError, match=f"set.jsonl, line 2: .*{message}"):
            load_odd_one_out(path, image_root=pictures, strict=True)
        shown = load_odd_one_out(path, image_root=pictures).problems.describe().splitlines()
        assert len(shown) == 2 and message in shown[0] and "line 3" in shown[1]


def test_what_was_asked_of_the_same_images_before_is_listed(pictures: Path, tmp_path: Path) -> None:
    again = row("201", factors=[factor(name="Lighting"), factor()])
    data = load_odd_one_out(write(tmp_path / "set.jsonl", [row(), row("234"), again]), image_root=pictures)
    assert [c.aspects for c in data.comparisons] == [("lighting", "overall"), ("lighting", "overall"), ("pose",)]
    ((line, message),) = data.problems.found
    assert line == 3 and "'Lighting' is there twice for the same images; the first, in line 1, is kept" in message


def test_a_bad_factor_does_not_stand_for_a_good_one_after_it(pictures: Path, tmp_path: Path) -> None:
    bad, silent, good = factor(probs=[1, 1, 1]), factor(label="p9"), factor()
    for rows in ([row(factors=[bad]), row(factors=[good])], [row(factors=[silent, good])], [row(factors=[bad, good])]):
        data = load_odd_one_out(write(tmp_path / "set.jsonl", rows), image_root=pictures)
        assert [c.aspects for c in data.comparisons] == [("pose",)] and len(data.problems.found) == (bad in rows[0]["factors"])
        assert data.dropped["triplets without a target"] == 0, "a row whose factors are all bad is listed, and not counted again"


def test_problems_are_shown_with_what_is_left(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "set.jsonl", [row(), "{", row("234"), row("019")])
    show_problems(load_odd_one_out(path, image_root=pictures))
    assert capsys.readouterr().err.splitlines()[-1] == f"{path}: problems: 2; comparisons used: 2."
    show_problems(load_odd_one_out(write(path, [row(factors=[factor(), factor(name="b", label="p9")])]), image_root=pictures))
    assert capsys.readouterr().err == f"{path}: problems: 0; comparisons used: 1; left out: 1 {NO_TARGET}.\n"
    show_problems(load_odd_one_out(write(path, [row()]), image_root=pictures))
    assert not capsys.readouterr().err


def test_a_bad_factor_leaves_the_others_of_its_row(pictures: Path, tmp_path: Path) -> None:
    mixed = row(factors=[factor(probs=[1, 1, 1]), factor(name="color")])
    data = load_odd_one_out(write(tmp_path / "set.jsonl", [mixed]), image_root=pictures)
    assert data.comparisons[0].aspects == ("color",) and len(data.problems.found) == 1


def test_factors_with_other_labels_carry_no_target(pictures: Path, tmp_path: Path) -> None:
    silent = [factor(name="a", label="can't tell", probs=None), factor(name="b", label=None), factor(name="c")]
    path = write(tmp_path / "set.jsonl", [row(factors=silent), row("234", factors=silent[:2])])
    data = load_odd_one_out(path, image_root=pictures)
    assert [c.aspects for c in data.comparisons] == [("c",)] and not data.problems.found
    assert data.dropped == {NO_TARGET: 4, "triplets without a target": 1}


def test_nothing_usable_is_an_error_with_reasons(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no usable comparison.*line 1.*9.png"):
        load_odd_one_out(write(tmp_path / "set.jsonl", [row("019")]), image_root=pictures)
    with pytest.raises(DataError, match="There is no data"):
        load_odd_one_out(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="image root"):
        load_odd_one_out(tmp_path / "set.jsonl", image_root=tmp_path / "none")


def test_rounded_probs_become_exact_shares() -> None:
    shares = vote_shares([0.33, 0.33, 0.33], 3)
    assert shares.tolist() == pytest.approx([1 / 3] * 3, abs=1e-7)
    for value in ("abc", None, [1, 0], [True, 0, 0], [float("nan"), 0, 1], [0.5, 0.3, 0.1]):
        with pytest.raises(DataError, match="probs"):
            vote_shares(value, 3)


def test_written_rows_are_read_back(pictures: Path, tmp_path: Path) -> None:
    votes = {"pose": np.array([0.2, 0.2, 0.6], np.float32)}
    write_rows(tmp_path / "new" / "set.jsonl", [odd_one_out_row(("0.png", "1.png", "2.png"), votes)])
    data = load_odd_one_out(tmp_path / "new" / "set.jsonl", image_root=pictures)
    assert np.allclose(data.comparisons[0].votes, [[0.2, 0.2, 0.6]], atol=1e-6)


def test_a_folder_is_searched_for_its_split(pictures: Path, tmp_path: Path) -> None:
    write(pictures / "train.jsonl", [row()])
    (pictures / "data").mkdir()
    write(pictures / "data" / "test-00000.jsonl", [row("234")])
    assert [c.images[0].key[-5:] for c in load_odd_one_out(pictures, split="test").comparisons] == ["2.png"]
    assert len(load_odd_one_out(pictures, split="train").comparisons) == 1
    with pytest.raises(DataError, match="splits test, train, not 'validation'"):
        load_odd_one_out(pictures, split="validation")
    write(pictures / "data" / "test-00001.jsonl", ["{", row("134"), row("019")])
    (first, _), (second, _) = load_odd_one_out(pictures, split="test").problems.found
    assert (first, second) == (2, 4)  # lines are counted through the files of a split
    assert split_of(Path("a/latest.jsonl"), Path("a")) is None


def test_csv_rows_hold_factors_as_json(pictures: Path) -> None:
    text = json.dumps([factor()]).replace('"', '""')
    (pictures / "set.csv").write_text(f'p0_path,p1_path,p2_path,factors\n0.png,1.png,2.png,"{text}"\n0.png,1.png\n')
    data = load_odd_one_out(pictures / "set.csv")
    assert data.comparisons[0].aspects == ("pose",)
    assert [line for line, _ in data.problems.found] == [3]


def test_a_file_that_is_no_image_is_found_before_anything_runs(pictures: Path, tmp_path: Path) -> None:
    (pictures / "1.png").write_text("no picture")
    data = load_odd_one_out(write(tmp_path / "set.jsonl", [row(), row("234")]), image_root=pictures)
    assert "1.png does not open" in data.problems.found[0][1] and len(data.comparisons) == 1
    with pytest.raises(DataError, match="does not open"):
        ImageSource("x", b"no picture").load()


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_local_copies_through_datasets(form: str, pictures: Path, tmp_path: Path, monkeypatch: Any) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra data: pip install 'tpips-reward[data]'")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [row(), row("234"), row("015")]
    for number, record in enumerate(rows):
        for k in range(3):
            name = record[f"p{k}_path"]
            picture = {"bytes": (pictures / name).read_bytes(), "path": name}
            # sets on the Hub have either the pictures themselves or their paths
            record[f"p{k}_path"] = picture if form == "parquet" else name
        record["source"] = f"s{number}"
    table = datasets.Dataset.from_list(rows)
    folder = tmp_path / "copy"
    if form == "saved":
        datasets.DatasetDict({"test": table}).save_to_disk(folder)
    else:
        for k in range(3):
            table = table.cast_column(f"p{k}_path", datasets.Image())
        folder.mkdir()
        table.to_parquet(folder / "test.parquet")
    data = load_odd_one_out(folder, split="test", image_root=pictures)
    assert [c.source for c in data.comparisons] == ["s0", "s1"]
    assert [line for line, _ in data.problems.found] == [3] and "row 3" in data.problems.describe()
    assert data.comparisons[0].images[2].key == data.comparisons[1].images[0].key  # the same picture
    assert data.comparisons[1].images[1].load()[0, 0, 0].item() == pytest.approx(120 / 255)


@pytest.mark.parametrize("name", ["set.parquet", "saved/state.json", "saved/dataset_dict.json"])
def test_damaged_copies_are_one_sentence(name: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the extra 'data' is not installed")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b'{"splits": ["test"]}')
    with pytest.raises(DataError, match="cannot be read by the package datasets .*is it whole"):
        load_odd_one_out(path if path.suffix == ".parquet" else path.parent)


def test_without_datasets_the_message_says_what_to_install(pictures: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    (pictures / "test.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"tpips-reward\[data\]"):
        read_rows(pictures / "test.parquet")


def test_a_hub_id_is_fetched_and_read_like_a_folder(pictures: Path, monkeypatch: Any) -> None:
    import huggingface_hub

    write(pictures / "test.jsonl", [row()])
    asked = []

    def fetch(repo: str, **options: Any) -> str:
        asked.append((repo, options["repo_type"], options["revision"]))
        if repo == "no/set":
            raise OSError("not found")
        return str(pictures)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    data = load_data("sywang/tpips-odd-one-out", DataOptions(revision="v1"))
    assert data.task == "odd_one_out" and len(data.comparisons) == 1
    assert asked == [("sywang/tpips-odd-one-out", "dataset", "v1")]
    with pytest.raises(DataError, match="could not be had from the Hub"):
        load_data("no/set")
