"""A run on a user's own photographs: those that scikit-image ships, at their own, non-square sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from rl_recipes import grpo_edit, session

skimage_data = pytest.importorskip("skimage.data", reason="needs the extra data: pip install 'tpips-reward[data]'")

ROWS = [
    ("astronaut", "make the suit green", ["background", "face"], ["suit color"]),
    ("coffee", "make the cup red", ["table", "lighting"], ["cup color"]),
    ("chelsea", "make the fur black", ["pose", "background"], ["fur color"]),
    ("rocket", "make it night", ["rocket"], ["lighting"]),
]


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four photographs, each downsized by its own factor, and their edits; the second row is spoilt."""
    folder = tmp_path_factory.mktemp("photos")
    lines = []
    for index, (name, instruction, preserve, target) in enumerate(ROWS):
        photo = Image.fromarray(getattr(skimage_data, name)())
        photo.thumbnail((160 + 16 * index, 160 + 16 * index))
        photo.save(folder / f"{name}.{'jpg' if index % 2 else 'png'}")
        row = {"image": f"{name}.{'jpg' if index % 2 else 'png'}", "instruction": instruction}
        lines.append(json.dumps({**row, "preserve": preserve, "target": target}))
    lines.insert(1, json.dumps({"image": "missing.jpg", "instruction": "x", "preserve": ["y"], "target": []}))
    (folder / "edits.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "edits.jsonl"


def test_photographs_of_several_sizes(
    flags: Callable[..., list[str]], edits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    others = [
        (str(edits), 4, "found broken by another process"),
        (str(edits), 2, f"the image {edits.parent / 'missing.jpg'} does not exist."),
    ]
    monkeypatch.setattr(session, "gather_object", lambda own: own + others)
    assert grpo_edit.main(flags(run, data=edits, max_steps=2, resolution=48, eval_samples=10, sample_grids=9)) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["evaluated"] == 4 and not summary["held_out"]
    assert [row["line"] for row in summary["bad_rows"]] == [2, 4] and "missing.jpg" in summary["bad_rows"][0]["reason"]
    page = (run / "report.html").read_text()
    assert "2 bad rows were skipped:" in page and "missing.jpg does not exist." in page
    for when in ("before", "after"):
        means = summary[when]
        assert means["preserve"] is not None and means["target"] is not None and means["copy_rate"] is not None
        assert means["drift"] is means["edit_success"] is means["object_lost"] is means["l1_to_ideal"] is None
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["ratio_max_deviation"] == 0.0 and line["grad_norm"] > 0 for line in lines)
    with Image.open(run / "samples" / "grid_00.png") as grid:
        assert grid.width == 8 + 3 * 168, "source, before and after; no ideal is known"


@pytest.mark.parametrize("own", [True, False], ids=["own edits", "procedural edits"])
def test_a_run_is_evaluated_on_a_file_of_other_edits(
    own: bool, flags: Callable[..., list[str]], edits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = edits.read_text().splitlines()
    train, test = edits.parent / "train.jsonl", edits.parent / "test.jsonl"
    train.write_text("\n".join(lines[:3]))  # one photograph, the missing one, and another
    test.write_text("\n".join([lines[3], lines[1], lines[0], lines[4]]))
    run, data = tmp_path / "run", {"data": train} if own else {}
    assert grpo_edit.main(flags(run, **data, eval_data=test, max_steps=2, eval_samples=2, sample_grids=9, save_steps=1)) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["held_out"] and summary["evaluated"] == 2, "no more than --eval_samples"
    rows = json.loads((run / "before.json").read_text())["rows"]
    asked = ["make the fur black", "make it night"] if own else ["make the fur black", "make the suit green"]
    assert [row["instruction"] for row in rows] == asked
    bad = [(Path(row["file"]).name, row["line"]) for row in summary["bad_rows"]]
    assert bad == ([("test.jsonl", 2), ("test.jsonl", 3), ("train.jsonl", 2)] if own else [("test.jsonl", 2)])
    if own:
        assert summary["bad_rows"][1]["reason"] == "it is line 1 of --data too, which is trained on."
    shown = capsys.readouterr().out
    assert "2 held-out edits" in shown and "trained on" not in shown
    assert "2 held-out edits" in (run / "report.html").read_text()
    for changed in [*data.values(), test]:
        kept = changed.read_text()
        changed.write_text(kept + "\n")
        assert grpo_edit.main(["--resume", f"--output_dir={run}", "--max_steps=3"]) == 2
        error = capsys.readouterr().err
        assert f"{f'{train} or ' if own else ''}{test}, or one of their images, has changed since the checkpoint" in error
        changed.write_text(kept)


def test_aspect_ratios_are_kept(edits: Path, editor_folder: Path) -> None:
    from rl_recipes.editors import load_editor
    from rl_recipes.prompts import JSONLPrompts

    editor = load_editor(editor_folder, device="cpu", resolution=64)
    prompts = JSONLPrompts(edits)
    sizes = {editor.output_size(prompts[i].image) for i in range(4)}
    assert len(sizes) > 1
    for i in range(4):
        height, width = prompts[i].image.shape[-2:]
        out_height, out_width = editor.output_size(prompts[i].image)
        assert out_width / out_height == pytest.approx(width / height, rel=0.15)
        assert out_height * out_width == pytest.approx(64 * 64, rel=0.15)


def test_a_bad_row_can_stop_the_run(
    flags: Callable[..., list[str]], edits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grpo_edit.main(flags(tmp_path / "run", data=edits, on_bad_row="error")) == 2
    assert "edits.jsonl, line 2: the image" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("*"))
