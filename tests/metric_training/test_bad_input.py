"""Bad input of every kind is one sentence that names the thing, and costs nothing that was there."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from metric_training import evaluate, search, train
from metric_training.benchmarks.protocol import Settings
from metric_training.benchmarks.registry import BENCHMARKS
from metric_training.builtin_model import build_late_fusion
from metric_training.data.photographs import load_photographs
from metric_training.data.raw_votes import read_votes
from metric_training.data.sources import load_data
from metric_training.evaluation.report import check_outputs
from metric_training.training.config import TrainConfig, parse_config
from metric_training.training.output import trained_metric
from metric_training.training.runs import finish
from metric_training.training.state import STATE, write_checkpoint
from tpips_reward import Metric, TPIPSError, load_metric

OVERFLOWING = 10**400


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.png to 8.png, and one image of every bad kind."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(4)
    for number in range(9):
        Image.fromarray(rng.integers(0, 255, (24, 24, 3), np.uint8)).save(folder / f"{number}.png")
    whole = (folder / "0.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no image")
    (folder / "folder.png").mkdir()
    Image.new("1", (20000, 20000)).save(folder / "bomb.png")
    Image.new("1", (10200, 10000)).save(folder / "large.png")
    Image.new("L", (900, 2)).save(folder / "strip.png")
    (folder / "none").mkdir()
    return folder


def row(*images: object, **changes: Any) -> dict[str, Any]:
    names = [f"{name}.png" if isinstance(name, int) else name for name in (*images, *range(6, 9))][:3]
    factor = {"name": "lighting", "label": "p1", "probs": [0.2, 0.6, 0.2]} | changes.pop("factor", {})
    return dict(zip(("p0_path", "p1_path", "p2_path"), names, strict=True)) | {"factors": [factor]} | changes


def written(folder: Path, *lines: Any, name: str = "set.jsonl") -> str:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / name).write_text(text)
    return str(folder / name)


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


NIGHTS = "id,left_vote,right_vote,votes,ref_path,left_path,right_path,split\n0,0,1,6,3.png,4.png,5.png,test\n"


@pytest.mark.parametrize("cells", ["nan,1,6", "inf,1,6", "0,1,nan", "0,many,6"])
def test_nights_votes_that_are_no_numbers(cells: str, pictures: Path) -> None:
    (pictures / "data.csv").write_text(f"{NIGHTS}1,{cells},0.png,1.png,2.png,test\n")
    loaded = BENCHMARKS["nights"].load(pictures, Settings())
    assert len(loaded.content.comparisons) == 1 and [line for line, _ in loaded.problems.found] == [3]


def genecis(folder: Path, **reference: Any) -> None:
    for number in range(3):
        Image.open(folder / f"{number}.png").save(folder / f"{number}.jpg")
    image = {"image_id": 0, "instance_bbox": [0, 0, 9, 9]}
    template = {"condition": "color", "reference": image, "target": image | {"image_id": 1}, "gallery": [image | {"image_id": 2}]}
    content = json.dumps([template, template | {"reference": image | reference}])
    (folder / "focus_attribute.json").write_text(content)


@pytest.mark.parametrize(
    "reference",
    [{"image_id": float("inf")}, {"instance_bbox": [0, 0, OVERFLOWING, 1]}, {"instance_bbox": [float("nan"), 0, 1, 1]},
     {"instance_bbox": None}, {"image_id": 99}],
)  # fmt: skip
def test_genecis_images_that_are_none(reference: dict[str, Any], pictures: Path) -> None:
    genecis(pictures, **reference)
    loaded = BENCHMARKS["genecis"].load(pictures, Settings())
    assert len(loaded.content) == 1 and len(loaded.problems.found) == 1


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("genecis", {"focus_attribute.json": f"[{'9' * 5000}]"}, "cannot be read"),
        ("edir", {"queries.jsonl": '{"id": "q", "image": "0.png", "text": "redder"}', "corpus.jsonl": '{"id": "c", "image": "1.png"}',
                  "instances.jsonl": '{"qid": "q", "pos": ["c"], "score": "abc"}'}, "score must be a number, not 'abc'"),
        ("subtle", {"test.jsonl": '{"image_1": "0.png", "image_2": "1.png", "category": ["action"]}'}, "category must be one of"),
    ],
)  # fmt: skip
def test_benchmarks_with_values_of_another_type(name: str, files: dict[str, str], message: str, pictures: Path) -> None:
    for file, content in files.items():
        (pictures / file).write_text(content + "\n")
    with pytest.raises(TPIPSError, match=message):
        BENCHMARKS[name].load(pictures, Settings())


def test_outputs_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_outputs(tmp_path / "new" / "folder", tmp_path / "file.json")
    (tmp_path / "file").touch()
    file, folder = "cannot be a folder, since .*file is a file", "is a folder; name a file"
    for arguments, message in (
        ((tmp_path / "file",), file), ((tmp_path / "file" / "below",), file), ((None, tmp_path / "file" / "x.json"), file),
        ((None, tmp_path), folder),
    ):  # fmt: skip
        with pytest.raises(TPIPSError, match=f"{message}.* for the output"):
            check_outputs(*arguments)  # type: ignore[arg-type]
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(TPIPSError, match=f"{tmp_path} may not be written to; mend its rights"):
        check_outputs(tmp_path / "new")


@pytest.mark.parametrize("seed", ["-3", "5"])
def test_the_seed_of_the_four_rows(seed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    monkeypatch.setattr(evaluate, "load_metric", lambda *_, **__: None)
    monkeypatch.setattr(evaluate, "compare", lambda metric, count, seed: seen.append(seed) or {})
    monkeypatch.setattr(evaluate, "as_markdown", str)
    if seed == "5":
        evaluate.main(["--seed", seed])
        assert seen == [5]
        return
    with pytest.raises(SystemExit):
        evaluate.main(["--seed", seed])
    assert "--seed must be at least 0, not -3" in capsys.readouterr().err


CONFIGS = {
    "a list": ("- 1\n", "it holds a list"),
    "nothing": ("", "it holds nothing"),
    "no YAML": ("a: [1\n", "is not YAML"),
    "bytes": (b"\xff\xfe\x01", "is not YAML"),
    "unknown": ("lora_rr: 3\n", "Unknown setting 'lora_rr' in the config file. Did you mean lora_r?"),
    "a key that is no text": ("3: 4\n", "Unknown setting 3"),
    "text for a number": ("max_aspects: many\n", "invalid int value: 'many'"),
    "a fraction": ("lora_r: 2.5\n", "lora_r must be of type int, not 2.5"),
    "null": ("max_aspects:\n", "max_aspects must be of type int, not None"),
    "NaN": ("learning_rate: .nan\n", "learning_rate must be a number above 0, not nan"),
    "a flag": ("resume: maybe\n", "Argument --resume"),
    "names": ("lora_target_modules: [3]\n", "lora_target_modules must be a list of names; it holds 3"),
    "weights": ("aspect_weights: {lighting: heavy}\n", "a number of at least 0 each; it holds 'heavy'"),
    "a weight below 0": ("aspect_weights: {lighting: -1}\n", "it holds -1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_config_files_that_are_none(case: str, tmp_path: Path) -> None:
    content, message = CONFIGS[case]
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TPIPSError) as found:
        parse_config(["--config", str(path)])
    assert message in str(found.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--config", "."], "cannot be read"),
        (["--config"], "--config needs a file name"),
        (["--learning_rat", "1"], "Did you mean --learning_rate?"),
        (["--max_aspects", "x"], "invalid int value: 'x'"),
    ],
)
def test_flags_that_are_none(flags: list[str], message: str) -> None:
    with pytest.raises(TPIPSError) as found:
        parse_config(flags)
    assert message in str(found.value)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("start")
    Metric(build_late_fusion(0, hidden=96, layers=2, vision_hidden=32)).save_pretrained(folder)
    return str(folder)


def tiny(start: str, folder: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model_name_or_path": start, "output_dir": str(folder), "dataset_name": "procedural", "train_samples": 2, "max_aspects": 2,
        "save_steps": 1, "eval_samples": 1, "eval_steps": 9, "logging_steps": 1, "lora_r": 2,
    }  # fmt: skip
    return TrainConfig(**(settings | changes))


@pytest.fixture(scope="module")
def finished(start: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    train.main(tiny(start, folder))
    return folder


def changed(**parts: Any) -> Callable[[Path], None]:
    """Replaces entries of a checkpoint; a function gets the old one."""

    def change(path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        for name, value in parts.items():
            saved[name] = value(saved[name]) if callable(value) else value
        torch.save(saved, path)

    return change


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:500]), "is damaged or none"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged or none"),
    "text": (lambda path: path.write_text("hello"), "is damaged or none"),
    "a folder": (become_a_folder, "is damaged or none (Is a directory)"),
    "settings of another type": (changed(config=3), "is no checkpoint"),
    "a step of another type": (changed(step="two"), "is no checkpoint"),
    "no weights": (changed(trained={}), "is missing"),
    "other shapes": (changed(trained=lambda old: {k: v[..., :1] for k, v in old.items()}), "has the shape"),
    "NaN": (changed(trained=lambda old: {k: v * float("nan") for k, v in old.items()}), "holds NaN"),
    "no optimizer": (changed(optimizer={}), "its optimizer"),
    "other settings": (changed(config=lambda old: old | {"seed": 7}), "was made with seed=7, not 0; use the same settings"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_checkpoints_that_no_run_goes_on_from(case: str, start: str, finished: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[case]
    shutil.copytree(finished, tmp_path / "run")
    damage(tmp_path / "run" / STATE)
    before = sorted((path.name, path.stat().st_size) for path in (tmp_path / "run").iterdir())
    with pytest.raises(TPIPSError) as found:
        train.main(tiny(start, tmp_path / "run", resume=True))
    assert message in str(found.value) and "start anew" in str(found.value) and len(str(found.value)) < 500
    assert sorted((path.name, path.stat().st_size) for path in (tmp_path / "run").iterdir()) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(config=lambda old: old | {"gone": 2}), "made by another version"),
        (changed(trained=lambda old: {k: v * float("nan") for k, v in old.items()}), "holds NaN"),
        (changed(trained=lambda old: {k: v[..., :1] for k, v in old.items()}), "does not fit"),
    ],
)
def test_checkpoints_of_which_no_metric_is_made(
    damage: Callable[[Path], None], message: str, finished: Path, tmp_path: Path
) -> None:
    shutil.copy(finished / STATE, tmp_path)
    damage(tmp_path / STATE)
    with pytest.raises(TPIPSError, match=message):
        trained_metric(tmp_path / STATE)


def test_settings_that_cannot_be_used_cost_no_earlier_run(start: str, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    with pytest.raises(TPIPSError, match="There is no data"):
        train.main(tiny(start, folder, overwrite=True, dataset_name="nowhere"))
    assert (folder / STATE).read_bytes() == (finished / STATE).read_bytes() and load_metric(folder / "last", device="cpu")


@pytest.mark.parametrize("flags", [{"overwrite": True}, {"resume": True}, {}])
@pytest.mark.parametrize("name", ["model_name_or_path", "teacher"])
def test_a_run_does_not_overwrite_its_own_start(finished: Path, tmp_path: Path, name: str, flags: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (tmp_path / "link").symlink_to(folder)
    changes = {"teacher": "builtin:late", "objective": "embeddings", "fusion": "mid"} if name == "teacher" else {}
    changes |= {name: str(tmp_path / "link" / "last"), **flags}
    with pytest.raises(TPIPSError, match=f"{name} .* lies in the output folder"):
        train.main(tiny("builtin:late", folder, **changes))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_start_beside_best_and_last_is_no_start_of_its_own(start: str, tmp_path: Path) -> None:
    shutil.copytree(start, tmp_path / "stage1" / "last")
    train.main(tiny(str(tmp_path / "stage1" / "last"), tmp_path, overwrite=True, max_steps=1))
    assert load_metric(tmp_path / "last", device="cpu") and load_metric(tmp_path / "stage1" / "last", device="cpu")


def test_overwriting_takes_away_what_would_pass_for_the_new_run(
    start: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / ".tmp-killed.pt").touch()
    (folder / "notes.txt").touch()
    seen: list[set[str]] = []
    monkeypatch.setattr(train, "open_tracker", lambda *_: seen.append({path.name for path in folder.iterdir()}))
    with pytest.raises(train.Interrupted):
        train.run(tiny(start, folder, overwrite=True), SimpleNamespace(requested=True))  # type: ignore[arg-type]
    assert seen == [{"config.yaml", "notes.txt"}]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_breaks_off_in_training_costs_no_step(start: str, pictures: Path, tmp_path: Path, workers: int) -> None:
    data = written(pictures, row(0, 1, 2), row("cut.png", 3, 4), name=f"cut_{workers}.jsonl")
    # with this seed the broken row comes second
    config = tiny(start, tmp_path / "run", dataset_name=data, eval_dataset_name="procedural", save_steps=99,
                  dataloader_num_workers=workers, seed=SEED_OF_THE_ORDER)  # fmt: skip
    with pytest.raises(TPIPSError, match=r"cut\.png does not open.*Mend it and go on with --resume") as found:
        train.main(config)
    assert "Traceback" not in str(found.value)
    assert torch.load(tmp_path / "run" / STATE, weights_only=True)["step"] == 1
    shutil.copy(pictures / "5.png", pictures / "whole.png")
    Path(data).write_text(Path(data).read_text().replace("cut.png", "whole.png"))
    train.main(replace(config, resume=True))
    assert torch.load(tmp_path / "run" / STATE, weights_only=True)["step"] == 2


SEED_OF_THE_ORDER = 0


def test_training_lists_bad_rows_and_strict_stops_at_the_first(
    start: str, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(pictures, row(0, 1, 2), row("nowhere.png"), name="strict.jsonl")
    config = tiny(start, tmp_path / "run", dataset_name=data, eval_dataset_name="procedural")
    with pytest.raises(TPIPSError, match=r"strict\.jsonl, line 2: the image .*nowhere\.png does not exist"):
        train.main(replace(config, strict=True))
    train.main(config)
    assert "strict.jsonl, line 2: the image" in capsys.readouterr().err


def test_a_tracker_that_writes_to_the_folder_is_opened_once_it_is_ours(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(train, "open_tracker", lambda *_: written(folder, "event", name="events"))
    train.main(tiny(start, folder))
    assert (folder / "events").exists() and (folder / STATE).exists()


def test_a_gradient_that_is_not_finite_reaches_no_weight(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.Accelerator.clip_grad_norm_", lambda *_, **__: torch.tensor(float("inf")))
    with pytest.raises(TPIPSError, match="gradient's norm became inf at step 1; start anew with a lower"):
        train.main(tiny(start, tmp_path / "run"))
    assert not (tmp_path / "run" / STATE).exists()


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / STATE, {"step": 1})

    def full(content: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TPIPSError, match="cannot be written .*is the disk full"):
        write_checkpoint(tmp_path / STATE, {"step": 2})
    assert torch.load(tmp_path / STATE, weights_only=True) == {"step": 1} and len(list(tmp_path.iterdir())) == 1


def test_a_finished_training_of_other_settings_is_none_of_this_one(start: str, finished: Path) -> None:
    assert finish(tiny(start, finished)) == finished
    with pytest.raises(TPIPSError, match=r"The finished training in .* was made with seed=0, not 1"):
        finish(tiny(start, finished, seed=1))


@pytest.mark.parametrize("launcher", ["no_such_command", "", "a 'b"])
def test_launchers_that_are_no_command(launcher: str, start: str, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="is no command"):
        finish(tiny(start, tmp_path / "run"), launcher)


SPACES = {
    "low above high": "learning_rate: {low: 1, high: 0.1}",
    "low of 0 and log": "learning_rate: {low: 0, high: 0.1, log: true}",
    "low of another type": "learning_rate: {low: a, high: 0.1}",
    "log of another type": "learning_rate: {low: 0.1, high: 0.2, log: sure}",
    "choices of another type": "lora_r: [[1, 2]]",
    "what no trial may change": "output_dir: [a, b]",
}


@pytest.mark.parametrize("case", SPACES)
def test_spaces_that_are_none(case: str, start: str, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACES[case])
    with pytest.raises(TPIPSError, match=r"space\.yaml"):
        search.read_space(tmp_path / "space.yaml", tiny(start, tmp_path))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"lora_r": ["a"]}, "lora_r must be of type int"),
        ({"lora_r": {"low": 1.5, "high": 8.0}}, "lora_r must be of type int"),
        ({search.BATCH: ["a"]}, "must be a whole number"),
        ({"learning_rate": [1e-3, -1.0]}, "learning_rate must be a number above 0"),
    ],
)
def test_values_are_checked_before_the_first_trial(space: dict[str, Any], message: str, start: str, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match=message):
        search.search(tiny(start, tmp_path), space, 1, tmp_path / "search")
    assert not (tmp_path / "search").exists()


def test_a_search_of_before_a_setting_was_there_goes_on(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "finish", lambda config, launcher: Path(config.output_dir))
    monkeypatch.setattr(search, "best_agreement", lambda folder: 0.5)
    real = search.asdict
    monkeypatch.setattr(search, "asdict", lambda config: {k: v for k, v in real(config).items() if k != "probe_layers"})
    config, folder = tiny(start, tmp_path, fusion="mid"), tmp_path / "search"
    search.search(config, {"lora_r": [2, 4]}, 1, folder)
    monkeypatch.setattr(search, "asdict", real)
    search.search(config, {"lora_r": [2, 4]}, 2, folder)
    with pytest.raises(TPIPSError, match=r"was begun with probe_layers=None, not \[1\]"):
        search.search(replace(config, probe_layers=[1]), {"lora_r": [2, 4]}, 2, folder)


def test_trials_of_two_searches_are_not_mixed(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "finish", lambda config, launcher: Path(config.output_dir))
    monkeypatch.setattr(search, "best_agreement", lambda folder: 0.5)
    config, folder = tiny(start, tmp_path), tmp_path / "search"
    search.search(config, {"lora_r": [2, 4]}, 1, folder)
    search.search(config, {"lora_r": [2, 4]}, 2, folder)
    for other, space, name in (
        (config, {"lora_r": [2, 8]}, "space"),
        (config, {"learning_rate": [1e-3]}, ""),
        (replace(config, seed=5), {"lora_r": [2, 4]}, "seed=0, not 5"),
    ):
        with pytest.raises(TPIPSError, match=f"was begun with {name}"):
            search.search(other, space, 3, folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "study.db").write_text("hello")
    with pytest.raises(TPIPSError, match=r"study\.db holds no search that can be read"):
        search.search(config, {"lora_r": [2, 4]}, 1, tmp_path / "other")


def test_errors_of_the_disk_name_the_file_and_not_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpips_reward.files import write_atomic

    def full(temporary: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: .*report\.md"):
        write_atomic(tmp_path / "report.md", full)

    def refused(dir: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", f"{dir}/.tmp-x")

    monkeypatch.setattr(tempfile, "mkstemp", refused)
    with pytest.raises(PermissionError) as found:
        write_atomic(tmp_path / "report.md", full)
    assert found.value.filename == str(tmp_path / "report.md")
