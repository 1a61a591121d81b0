"""Checkpoints rendered and scored: the same edits whoever renders them, nothing twice, and one column a checkpoint."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import METRIC
from PIL import Image
from safetensors.torch import load_file, save_file

from rl_recipes import evaluate_editor, procedural_edits
from rl_recipes.editor_checkpoints import Checkpoint, apply_checkpoint, find_checkpoints
from rl_recipes.editors import Editor, EditorError, load_editor
from rl_recipes.procedural_edits import procedural_rows
from rl_recipes.rendering import Sampling, render_checkpoint
from rl_recipes.rendering_folder import edit_path, source_path
from rl_recipes.rendering_sources import check_rows
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import read_manifest
from tpips_reward.stopping import Interrupted, StopSignal

Run = Callable[..., int]
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def adapters(editor_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `a` and `b` whose adapters change the tiny editor's edits, as training would leave them."""
    home = tmp_path_factory.mktemp("runs")
    for number, name in enumerate("ab"):
        editor = load_editor(editor_folder, device="cpu", resolution=32)
        generator = torch.Generator().manual_seed(number)
        editor.add_lora(2, 4, generator=generator)
        with torch.no_grad():
            for key, parameter in editor.transformer.named_parameters():
                if ".lora_B." in key:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        editor.save_lora(home / name / "adapter")
    return home


@pytest.fixture
def launch(editor_folder: Path, tmp_path: Path) -> Run:
    def call(*more: object, folder: Path = tmp_path / "out") -> int:
        flags = {"editor": editor_folder, "metric": METRIC, "output_dir": folder, "steps": 2, "guidance_scale": 1,
                 "resolution": 32, "threads": 1, "batch_size": 2, "examples": 1}  # fmt: skip
        given = [f"--{name}={value}" for name, value in flags.items() if f"--{name}" not in map(str, more)]
        return evaluate_editor.main([*given, *map(str, more)])

    return call


def pixels(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*.png"))}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five edits of photographs of two sizes; one file is cut off, and one row has no instruction."""
    home = tmp_path_factory.mktemp("photos")
    generator = torch.Generator().manual_seed(0)
    lines: list[dict[str, Any]] = []
    for number, (width, height) in enumerate([(48, 48), (64, 32), (48, 48), (48, 48), (64, 32)]):
        noise = torch.randint(0, 255, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(home / f"{number}.png")
        lines.append({"key": f"k{number}", "image": f"{number}.png", "instruction": "make the car red"})
    lines[0] |= {"preserve": ["background"], "target": ["car color"]}
    (home / "3.png").write_bytes((home / "3.png").read_bytes()[:3000])
    lines[4]["instruction"] = ""
    lines.append({"key": "k5", "image": "missing.png", "instruction": "make the car red"})
    (home / "edits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home / "edits.jsonl"


def test_procedural_edits_of_two_checkpoints(
    launch: Run, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--count", 3, "--lora", adapters / "a/adapter", "--lora", f"other={adapters / 'b'}")
    assert launch(*flags) == 0
    out = tmp_path / "out"
    report = json.loads((out / "report/report.json").read_text())
    assert {entry["model"] for entry in report["models"] if not entry["control"]} == {"base", "a", "other"}
    assert report["counts"]["outputs_scored"] == 9 and report["problems"]["list"] == []
    assert report["aspect_origins"] == {"named": 3}, "procedural edits bring their aspects"
    images = pixels(out)
    assert len(images) == 12 and len(set(images.values())) == 12, "every checkpoint edits otherwise"
    truth = json.loads((out / "truth.json").read_text())
    assert truth.keys() == {"base", "a", "other"} and truth["a"] != truth["base"]
    shown = capsys.readouterr().out
    assert "| other | 3 of 3 |" in shown and "| other | 0." in shown.split("Known from")[1]
    dataset = read_manifest(out / "manifest.jsonl")
    assert dataset.models == ("base", "a", "other") and dataset.problems == () and len(dataset.rows) == 3

    # the same again: nothing is rendered, nothing is measured, and the report is the same
    assert launch(*flags, "--resume") == 0
    again = json.loads((out / "report/report.json").read_text())
    assert pixels(out) == images and again["work"]["pairs_measured"] == 0 and again["models"] == report["models"]
    with pytest.raises(SystemExit):
        launch(*flags)
    assert "give --resume to go on" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        launch(*flags, "--resume", "--steps", 3)
    assert "was rendered with steps = 2, and now it is 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        launch("--count", 3, "--lora", f"a={adapters / 'b'}", "--resume")
    assert "'a' is another one" in capsys.readouterr().err


def test_further_checkpoints_join_those_that_are_there(launch: Run, adapters: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert launch("--count", 2, "--lora", adapters / "a") == 0
    assert launch("--count", 2, "--lora", adapters / "b", "--resume") == 0
    report = json.loads((out / "report/report.json").read_text())
    assert {entry["model"]: entry["scored"] for entry in report["models"] if not entry["control"]} == {"base": 2, "a": 2, "b": 2}
    assert list(json.loads((out / "truth.json").read_text())) == ["base", "a", "b"]
    assert read_manifest(out / "manifest.jsonl").models == ("base", "a", "b")

    (out / "edits/a/test-000001.png").unlink()  # as if a's run had been stopped before it
    assert launch("--count", 2, "--resume") == 0
    report = json.loads((out / "report/report.json").read_text())
    assert {entry["model"]: entry["scored"] for entry in report["models"] if not entry["control"]} == {"base": 2, "a": 1, "b": 2}
    assert report["problems"]["counts"] == {"missing_output": 1}
    assert list(json.loads((out / "truth.json").read_text())) == ["base", "b"]


def test_the_first_ctrl_c_stops_the_scoring(
    launch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs between two of these
            pass
        raise AssertionError("it went on")

    monkeypatch.setattr(evaluate_editor, "_score", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        with pytest.raises(SystemExit) as stop:
            launch("--count", 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.value.code == 130 and "interrupted" in capsys.readouterr().err
    monkeypatch.undo()
    assert launch("--count", 1, "--resume") == 0


def test_a_users_own_edits(launch: Run, adapters: Path, photos: Path, tmp_path: Path) -> None:
    assert launch("--data", photos, "--lora", adapters / "a") == 0
    report = json.loads((tmp_path / "out/report/report.json").read_text())
    counts = report["problems"]["counts"]
    assert counts == {"missing_source": 1, "unreadable_source": 1, "bad_row": 1}
    assert [row["key"] for row in report["rows"]] == ["k0", "k1", "k2"] and report["counts"]["rows"] == 6
    assert report["aspect_origins"] == {"named": 1, "instruction": 2}
    with Image.open(tmp_path / "out/edits/a/k1.png") as edit, Image.open(tmp_path / "out/sources/k1.png") as source:
        assert edit.size == source.size and edit.width == 2 * edit.height, "sources are at the size of their edits"
    assert not (tmp_path / "out/truth.json").exists()


@pytest.fixture
def parts(editor_folder: Path, tmp_path: Path) -> tuple[Editor, Any, dict[str, Any]]:
    editor = load_editor(editor_folder, device="cpu", resolution=32)
    dataset = procedural_rows(tmp_path / "whole", 5, 7, 32, True)
    _, sizes = check_rows(editor, dataset)
    return editor, dataset, sizes


def render(
    parts: tuple[Editor, Any, dict[str, Any]], folder: Path, checkpoint: Checkpoint, rank: int, world: int
) -> int:
    editor, dataset, sizes = parts
    shared = SimpleNamespace(process_index=rank, num_processes=world)
    sampling = Sampling(steps=2, guidance_scale=1.0, seed=0, batch_size=2)
    return render_checkpoint(
        editor, checkpoint, dataset.rows, sizes, folder, sampling, shared, StopSignal()  # type: ignore[arg-type]
    )


def test_processes_and_interruptions_change_no_pixel(
    parts: tuple[Editor, Any, dict[str, Any]], adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = find_checkpoints([str(adapters / "a")])
    assert render(parts, tmp_path / "whole", tuned, 0, 1) == 5
    assert render(parts, tmp_path / "whole", base, 0, 1) == 5, "taking the adapter off leaves the editor itself"
    assert render(parts, tmp_path / "first", base, 0, 1) == 5
    whole = pixels(tmp_path / "whole/edits")
    assert {name: whole[name] for name in whole if name.startswith("base/")} == pixels(tmp_path / "first/edits")

    shared = [render(parts, tmp_path / "shared", checkpoint, rank, 2) for checkpoint in (base, tuned) for rank in (1, 0)]
    assert shared == [2, 3, 2, 3] and pixels(tmp_path / "shared/edits") == whole

    (tmp_path / "whole/edits/a/test-000002.png").unlink()  # its batch is made anew, in the same shape
    assert render(parts, tmp_path / "whole", tuned, 0, 1) == 2 and pixels(tmp_path / "whole/edits") == whole

    class Stops(StopSignal):
        requested = True

    monkeypatch.setattr("test_evaluate_editor.StopSignal", Stops)
    with pytest.raises(Interrupted):
        render(parts, tmp_path / "none", base, 0, 1)
    assert not (tmp_path / "none").exists()


def test_noise_goes_by_the_key(parts: tuple[Editor, Any, dict[str, Any]], tmp_path: Path) -> None:
    editor, dataset, sizes = parts
    base = Checkpoint("base")
    render(parts, tmp_path / "whole", base, 0, 1)
    fewer = dataset.with_rows(dataset.rows[2:4], ())  # the third and fourth were a batch before
    render((editor, fewer, sizes), tmp_path / "fewer", base, 0, 1)
    whole, part = pixels(tmp_path / "whole/edits"), pixels(tmp_path / "fewer/edits")
    assert len(part) == 2 and all(whole[name] == part[name] for name in part)


@pytest.fixture(scope="module")
def trained(editor_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Editor, Path]:
    """An editor after a step with `--train full`, and its run as the recipes leave it."""
    run = tmp_path_factory.mktemp("runs") / "tuned"
    editor = load_editor(editor_folder, device="cpu", dtype="float32", resolution=32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in editor.train_all():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    editor.save_lora(run / "adapter")
    return editor, run


def test_all_weights_of_a_run_edit_as_the_trained_editor_does(
    launch: Run, trained: tuple[Editor, Path], adapters: Path, parts: tuple[Editor, Any, dict[str, Any]], tmp_path: Path
) -> None:
    editor, run = trained
    assert launch("--count", 5, "--data_seed", 7, "--lora", adapters / "a", "--full", run) == 0
    report = json.loads((tmp_path / "out/report/report.json").read_text())
    assert {entry["model"] for entry in report["models"] if not entry["control"]} == {"base", "a", "tuned"}
    # the trained editor itself, as it stood at the end of its training
    _, dataset, sizes = parts
    assert render((editor, dataset, sizes), tmp_path / "direct", Checkpoint("base"), 0, 1) == 5
    rendered, direct = pixels(tmp_path / "out/edits"), pixels(tmp_path / "direct/edits")
    names = sorted(direct)
    assert len(names) == 5 and [rendered[name.replace("base/", "tuned/")] for name in names] == [direct[n] for n in names]
    assert all(rendered[name] != direct[name] for name in names), "the editor as it is edits otherwise"
    # and once more, from a copy whose weights lie in shards
    shards = tmp_path / "other/transformer"
    editor.transformer.save_pretrained(shards, max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    (checkpoint,) = find_checkpoints([], [str(tmp_path / "other")])[1:]
    assert checkpoint.name == "other" and render(parts, tmp_path / "shards", checkpoint, 0, 1) == 5
    again = pixels(tmp_path / "shards/edits")
    assert [again[name.replace("base/", "other/")] for name in names] == [direct[name] for name in names]


def test_weights_that_cannot_be_used(
    trained: tuple[Editor, Path], adapters: Path, editor_folder: Path, tmp_path: Path
) -> None:
    run, file = trained[1], WEIGHTS
    for lora, weights, message in [
        ([], ["nothing"], "--full nothing holds no weights of a run with --train full"),
        ([], [str(adapters / "a")], "holds an adapter, which --lora takes"),
        ([str(run)], [], "holds all weights of a transformer, which --full takes"),
        ([f"tuned={adapters / 'a'}"], [str(run)], "--full .*'tuned' is there twice"),
        ([], [f"base={run}"], "'base' is the editor as it is"),
    ]:
        with pytest.raises(TPIPSError, match=message):
            find_checkpoints(lora, weights)
    content = load_file(run / "adapter/transformer" / file)
    name = next(iter(content))
    editor = load_editor(editor_folder, device="cpu", resolution=32)
    before = {key: value.clone() for key, value in editor.transformer.state_dict().items()}
    for case, changed in (
        ("less", {key: value for key, value in content.items() if key != name}),
        ("more", {**content, "else": torch.zeros(2)}),
        ("shape", {**content, name: torch.zeros(3, 5, 7)}),
    ):
        (tmp_path / case).mkdir()
        save_file(changed, tmp_path / case / file)
        (checkpoint,) = find_checkpoints([], [str(tmp_path / case)])[1:]
        with pytest.raises(EditorError, match="do not fit this editor's transformer .1 of "):
            apply_checkpoint(editor, checkpoint)
        assert all(torch.equal(value, before[key]) for key, value in editor.transformer.state_dict().items())
    (tmp_path / "less" / file).write_bytes((run / "adapter/transformer" / file).read_bytes()[:2000])
    with pytest.raises(TPIPSError, match="cannot be read"):
        find_checkpoints([], [str(tmp_path / "less")])
    (tmp_path / "more" / f"{file}.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    with pytest.raises(EditorError, match="lacks gone.safetensors"):
        find_checkpoints([], [str(tmp_path / "more")])

    base, tuned = find_checkpoints([], [str(run)])
    assert tuned.digest() != Checkpoint("x", weights=tmp_path / "shape").digest() != base.digest() == ""
    apply_checkpoint(editor, tuned)
    with pytest.raises(EditorError, match="were replaced before 'base'"):
        apply_checkpoint(editor, base)


def test_adapters_that_cannot_be_used(adapters: Path, editor_folder: Path, tmp_path: Path) -> None:
    file = adapters / "a/adapter/pytorch_lora_weights.safetensors"
    for given, message in [
        (["nothing"], "is no adapter"),
        ([str(adapters / "a"), str(adapters / "a/adapter")], "'a' is there twice"),
        ([f"base={adapters / 'a'}"], "'base' is the editor as it is"),
        ([f"x/y={adapters / 'a'}"], "cannot name a folder"),
        ([f"control: x={adapters / 'a'}"], "names its controls"),
    ]:
        with pytest.raises(TPIPSError, match=message):
            find_checkpoints(given)
    assert [c.name for c in find_checkpoints([str(file), f"b={adapters / 'b'}"])] == ["base", "a", "b"]
    broken = tmp_path / "cut.safetensors"
    broken.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(TPIPSError, match="cannot be read"):
        find_checkpoints([str(broken)])

    editor = load_editor(editor_folder, device="cpu", resolution=32)
    spoil(file, tmp_path / "elsewhere.safetensors", "attn.to_q", "attn.to_elsewhere")
    (checkpoint,) = find_checkpoints([str(tmp_path / "elsewhere.safetensors")])[1:]
    with pytest.raises(EditorError, match="fit this editor"):
        apply_checkpoint(editor, checkpoint)


def test_bad_settings_are_one_line(launch: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    for flags, folder, message in [
        (("--count", 0), "out", "count is 0"),
        (("--overwrite", "--resume"), "out", "give one of the two"),
        (("--steps", 0), "out", "steps is 0"),
        (("--data", tmp_path / "no.jsonl"), "out", "no.jsonl does not exist"),
        ((), "full", "is not empty"),
    ]:
        with pytest.raises(SystemExit) as stop:
            launch(*flags, folder=tmp_path / folder)
        err = capsys.readouterr().err
        assert stop.value.code == 2 and message in err and len(err.strip().splitlines()) == 1
    assert [p.name for p in (tmp_path / "full").iterdir() if not p.name.startswith(".")] == ["mine.txt"]


def test_nothing_that_is_read_is_written(
    launch: Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in photos.read_text().splitlines()][:2]
    text = "".join(json.dumps(row | {"image": str(photos.parent / row["image"])}) + "\n" for row in rows)
    outside, inside = tmp_path / "edits.jsonl", tmp_path / "out/manifest.jsonl"
    inside.parent.mkdir()
    for path in (outside, inside):
        path.write_text(text)
    for flags, remedy in [
        (("--data", outside, "--aspects", outside), "give another --aspects"),
        (("--count", 1, "--aspects", inside), "give another --aspects"),
        (("--data", inside), "give another --output_dir"),
    ]:
        with pytest.raises(SystemExit):
            launch("--resume", *flags)
        assert remedy in capsys.readouterr().err
    assert outside.read_text() == inside.read_text() == text and pixels(tmp_path / "out") == {}


def spoil(file: Path, target: Path, name: str, other: str) -> None:
    """A copy of weights with layers of other names."""
    target.parent.mkdir(exist_ok=True)
    save_file({key.replace(name, other): value for key, value in load_file(file).items()}, target)


def test_overwrite_costs_nothing_but_an_earlier_rendering(
    launch: Run, photos: Path, adapters: Path, trained: tuple[Editor, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(message: str, *flags: object, folder: Path = tmp_path / "out") -> None:
        with pytest.raises(SystemExit):
            launch("--overwrite", *flags, folder=folder)
        assert message in capsys.readouterr().err

    mine = tmp_path / "mine"
    for name in ("sources/1.png", "edits/base/1.png", "manifest.jsonl"):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("mine")
    refused("no rendering of this command has written sources/1.png", "--count", 1, folder=mine)
    assert sum(path.is_file() for path in mine.rglob("*")) == 3

    (tmp_path / "reports/report").mkdir(parents=True)
    (tmp_path / "reports/report/report.md").write_text("mine")
    refused("has written report/report.md", "--count", 1, folder=tmp_path / "reports")

    assert launch("--count", 1) == 0
    before = pixels(tmp_path / "out")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    rows = [json.loads(line) for line in photos.read_text().splitlines()]
    bad = photos.parent / "bad.jsonl"
    bad.write_text(json.dumps(rows[-1]) + "\n")
    ours = tmp_path / "ours.jsonl"
    ours.write_text(json.dumps(rows[0] | {"image": str(tmp_path / "out/sources/test-000000.png")}) + "\n")
    refused("no.jsonl does not exist", "--data", tmp_path / "no.jsonl")
    refused("bad.jsonl has no edit that can be rendered", "--data", bad)
    refused("the source of 'k0'", "--data", ours)
    refused("there is no metric 'builtin:lat'".capitalize(), "--metric", "builtin:lat")
    refused("has no calibration", "--calibrated")
    refused("steps is 0", "--steps", 0)
    adapter, weights = adapters / "a/adapter/pytorch_lora_weights.safetensors", trained[1] / "adapter/transformer"
    spoil(adapter, tmp_path / "elsewhere.safetensors", "attn.to_q", "attn.to_elsewhere")
    refused("weights fit this editor's transformer", "--count", 1, "--lora", adapter, "--lora", tmp_path / "elsewhere.safetensors")
    spoil(weights / WEIGHTS, tmp_path / "tuned" / WEIGHTS, "attn.to_q", "attn.to_elsewhere")
    refused("do not fit this editor's transformer", "--count", 1, "--lora", adapter, "--full", tmp_path / "tuned")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()} == stamps
    (tmp_path / "out/sources/mine.jpg").write_text("mine")
    refused("has written sources/mine.jpg", "--count", 1)
    (tmp_path / "out/sources/mine.jpg").unlink()
    assert pixels(tmp_path / "out") == before and len(before) == 2

    assert launch("--overwrite", "--data", photos) == 0
    assert sorted(pixels(tmp_path / "out")) == [f"{home}/k{n}.png" for home in ("edits/base", "sources") for n in range(3)]


def test_a_drift_that_cannot_be_known_is_not_the_best_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Checkpoint("base")
    for row in procedural_rows(tmp_path, 2, 0, 32, True).rows:
        edit = edit_path(tmp_path, base, row.key)
        edit.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path(tmp_path, row.key), edit)
    measure = procedural_edits.measure_edit
    monkeypatch.setattr(procedural_edits, "measure_edit", lambda *given: replace(measure(*given), drift=math.nan))
    evaluate_editor.tell_truth(SimpleNamespace(count=2, data_seed=0), tmp_path, [base])  # type: ignore[arg-type]
    truth = json.loads((tmp_path / "truth.json").read_text())["base"]
    assert truth["drift"] is None and truth["copy_rate"] == 1.0
    assert "| base | 0.0000 | – |" in capsys.readouterr().out
