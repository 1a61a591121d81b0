"""Checkpoints and folders of runs: what cannot be used costs nothing that was there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bad_input import save_start, tiny, written

from metric_training import train
from metric_training.builtin_model import build_late_fusion
from metric_training.training.output import trained_metric
from metric_training.training.runs import finish
from metric_training.training.state import STATE, write_checkpoint
from tpips_reward import Metric, TPIPSError, load_metric


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_start(tmp_path_factory.mktemp("start"))


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
    "more processes": (changed(processes=2), "was made by 2 processes, not 1"),
    "processes of another type": (changed(processes="two"), "is no checkpoint"),
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


def test_a_checkpoint_of_before_there_was_a_setting_is_gone_on_from(start: str, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    saved = torch.load(finished / STATE, weights_only=True)
    for name in ("data", "start", "processes"):
        del saved[name]
    del saved["config"]["optim"]
    torch.save(saved | {"step": 1}, folder / STATE)
    train.main(tiny(start, folder, resume=True))
    again = torch.load(folder / STATE, weights_only=True)
    assert again["step"] == 2 and again["processes"] == 1 and load_metric(folder / "last", device="cpu")


@pytest.mark.parametrize("name", ["model_name_or_path", "teacher"])
def test_weights_that_were_trained_anew_are_another_start(name: str, start: str, tmp_path: Path) -> None:
    place, folder = tmp_path / "place", tmp_path / "run"
    shutil.copytree(start, place)
    changes: dict[str, Any] = {"train_samples": 1}
    if name == "teacher":
        changes |= {"teacher": start, "objective": "embeddings", "fusion": "mid", "probe_layers": [1, 2]}
    config = tiny(start, folder, **(changes | {name: str(place)}))
    train.main(config)
    made = torch.load(folder / STATE, weights_only=True)
    Metric(build_late_fusion(1, hidden=96, layers=2, vision_hidden=32)).save_pretrained(place)
    with pytest.raises(TPIPSError, match=r"The weights of .*place are not those that the checkpoint .* bring them back"):
        train.main(replace(config, resume=True))
    if name == "model_name_or_path":
        with pytest.raises(TPIPSError, match=r"The weights of .*place are not those that the checkpoint .* was trained beside"):
            trained_metric(folder / STATE)
    shutil.rmtree(place)
    shutil.copytree(start, place)
    train.main(replace(config, resume=True))
    assert made["start"] == torch.load(folder / STATE, weights_only=True)["start"]


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


@pytest.mark.parametrize("name", ["best", "last"])
def test_another_model_where_the_metric_is_to_be_saved_is_found_first(name: str, start: str, tmp_path: Path) -> None:
    other = tmp_path / "run" / name / "model.safetensors"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"another model's")
    with pytest.raises(TPIPSError, match=f"{name} holds model.safetensors, and no metric was saved there"):
        train.main(tiny(start, tmp_path / "run", overwrite=True))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [other]


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


def test_a_tracker_that_writes_to_the_folder_is_opened_once_it_is_ours(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(train, "open_tracker", lambda *_: written(folder, "event", name="events"))
    train.main(tiny(start, folder))
    assert (folder / "events").exists() and (folder / STATE).exists()


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
