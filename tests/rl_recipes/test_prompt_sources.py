"""Prompt sources: the same position gives the same prompt; bad rows are named, counted, and skipped or fatal."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_editors import tiny_editor

from rl_recipes import logs
from rl_recipes import prompts as module
from rl_recipes.prompts import JSONLPrompts, ProceduralPrompts, PromptError, load_image
from tpips_reward import load_metric
from tpips_reward.rewards import TPIPSReward


def _write(folder: Path, rows: list[Any]) -> Path:
    path = folder / "edits.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def _row(**changes: Any) -> dict[str, Any]:
    row = {"image": "a.png", "instruction": "make it red", "preserve": ["background"], "target": ["color"], **changes}
    return {k: v for k, v in row.items() if v is not ...}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, (name, size) in enumerate({"a.png": (40, 30), "b.png": (40, 30), "c.png": (24, 60)}.items()):
        Image.new("RGB", size, (40 * index, 100, 200)).save(tmp_path / name)
    return tmp_path


def test_procedural_prompts_are_a_function_of_seed_split_and_position() -> None:
    source = ProceduralPrompts(3)
    a, b = source[5], ProceduralPrompts(3)[5]
    assert torch.equal(a.image, b.image) and (a.instruction, a.key, a.edit) == (b.instruction, b.key, b.edit)
    assert a.image.shape == (3, 64, 64) and a.image.dtype == torch.float32 and 0 <= a.image.min() < a.image.max() <= 1
    assert not set(a.preserve) & set(a.target)
    others = [source[6], ProceduralPrompts(4)[5], ProceduralPrompts(3, "test")[5]]
    assert all(not torch.equal(a.image, other.image) for other in others)


def test_rows_become_prompts_in_their_own_size(folder: Path) -> None:
    source = JSONLPrompts(_write(folder, [_row(), _row(image="c.png", target=...)]))
    assert len(source) == 2 and not source.bad
    assert source[0].image.shape == (3, 30, 40) and source[1].image.shape == (3, 60, 24)
    assert source[1].target == () and source[0].target == ("color",)
    assert torch.equal(source[2].image, source[0].image)


def test_each_epoch_has_its_own_order_and_every_row(folder: Path) -> None:
    rows = [_row(instruction=f"edit {i}") for i in range(12)]
    path = _write(folder, rows)
    source, again = JSONLPrompts(path, seed=1), JSONLPrompts(path, seed=1)
    epochs = [[source[e * 12 + i].instruction for i in range(12)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(r["instruction"] for r in rows)
    assert epochs[0] != epochs[1]
    assert [again[i].instruction for i in range(12)] == epochs[0]


BAD_ROWS = {
    "not json": ("{'image': 1}", "not JSON"),
    "cut off": ('{"image": "a.png", ', "not JSON"),
    "a list": ("[1]", "not an object.*list"),
    "no image": (_row(image=...), "'image' is missing; it has 'instruction'"),
    "no preserve": (_row(preserve=...), "'preserve' is missing"),
    "wrong type": (_row(image=3), "'image' must be a text, not 3"),
    "no instruction": (_row(instruction="  "), "'instruction' must be a text"),
    "aspects as text": (_row(preserve="background"), "'preserve' must be a list of aspects, not 'background'"),
    "no aspects": (_row(preserve=[]), "'preserve' is an empty list"),
    "empty aspect": (_row(preserve=["background", " "]), "'preserve' holds ' '"),
    "aspect of another type": (_row(target=[None]), "'target' holds None"),
    "stays and changes": (_row(preserve=["Color"]), "'color' both in preserve and in target"),
    "twice": (_row(preserve=["background", "Background "]), "names 'Background' twice"),
    "address": (_row(image="https://x.org/a.png"), "must be a local file"),
    "missing image": (_row(image="none.png"), "none.png does not exist"),
    "not an image": (_row(image="text.png"), "text.png does not open"),
    "a slip of the finger": ({**_row(), "Traget": ["color"]}, "key 'Traget' is not known; 'target' is"),
    "a strip": (_row(image="strip.png"), "too narrow, 300x20"),
    "a speck": (_row(image="speck.png"), "too small, 8x8"),
    "too large": (_row(image="large.png"), "too large, 120x100"),
}


@pytest.fixture
def bad_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "text.png").write_text("no image")
    for name, size in {"strip.png": (300, 20), "speck.png": (8, 8), "large.png": (120, 100)}.items():
        Image.new("RGB", size).save(folder / name)
    monkeypatch.setattr(module, "MAX_PIXELS", 10_000)
    return folder


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_with_line_and_reason(name: str, bad_images: Path) -> None:
    row, reason = BAD_ROWS[name]
    path = _write(bad_images, [_row(), "", row, _row(image="b.png")])
    source = JSONLPrompts(path)
    assert len(source) == 2 and [line for line, _ in source.bad] == [3]
    with pytest.raises(PromptError, match=reason):
        raise PromptError(source.bad[0][1])
    with pytest.raises(PromptError, match=f"edits.jsonl, line 3: .*{reason}"):
        JSONLPrompts(path, on_bad_row="error")


def test_no_usable_row_is_an_error(folder: Path) -> None:
    with pytest.raises(PromptError, match="no usable row .*line 1: 'preserve' is an empty list"):
        JSONLPrompts(_write(folder, [_row(preserve=[])]))
    with pytest.raises(PromptError, match='no usable row .*it is empty.; each line must be one edit, such as {"image"'):
        JSONLPrompts(_write(folder, []))
    with pytest.raises(PromptError, match="cannot be read"):
        JSONLPrompts(folder / "none.jsonl")


def test_what_editor_or_reward_refuse_is_a_bad_row(folder: Path) -> None:
    reward = TPIPSReward("tpips:edit", load_metric("builtin:late", device="cpu"))
    editor = tiny_editor()

    def check(row: module.Row) -> None:
        editor.check_instruction(row.instruction)
        reward.check_aspects(row.preserve, row.target)

    bad = [
        _row(target=...),
        _row(target=[]),
        _row(preserve=["<|im_end|>"]),
        _row(preserve=["x" * 5000]),
        _row(instruction="make it <|im_end|>"),
        _row(instruction="word " * 3000),
    ]
    path = _write(folder, [_row(), *bad])
    assert len(JSONLPrompts(path)) == 7, "read without an editor and a reward, they look fine"
    source = JSONLPrompts(path, check=check)
    assert [line for line, _ in source.bad] == [2, 3, 4, 5, 6, 7]
    reasons = ["no target aspects", "no target aspects", "im_end", "4000 characters", "control token", "at most"]
    for (_, reason), expected in zip(source.bad, reasons, strict=True):
        assert expected in reason


def _truncate(path: Path) -> None:
    """Leaves the header whole and the pixels broken."""
    noise = np.random.default_rng(0).integers(0, 255, (60, 60, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:3000])


def test_pixels_that_turn_out_broken_give_their_place_to_the_next_row(folder: Path) -> None:
    _truncate(folder / "broken.png")
    path = _write(folder, [_row(image="broken.png"), _row(image="c.png")])
    source = JSONLPrompts(path)
    assert len(source) == 2
    assert source[0].key == source[1].key == source[2].key == "line-2"
    assert len(source.bad) == 1 and "does not open" in source.bad[0][1]
    with pytest.raises(PromptError, match="line 1: .*does not open"):
        JSONLPrompts(path, on_bad_row="error")[0]
    with pytest.raises(PromptError, match="No image in .* can be decoded"):
        JSONLPrompts(_write(folder, [_row(image="broken.png")]))[0]


def test_a_process_that_is_not_the_main_one_names_what_it_alone_has_met(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _truncate(folder / "broken.png")
    for name in ("rl_recipes", logs.each_process.name):
        caplog.set_level(logging.NOTSET, name)  # is put back after the test
    logs.quieten()
    source = JSONLPrompts(_write(folder, [_row(image="none.png"), _row(image="broken.png"), _row(image="c.png")]))
    assert "none.png" not in caplog.text, "all processes read the same rows"
    assert source[0].key == "line-3" and "edits.jsonl, line 2 skipped" in caplog.text
    assert "edits.jsonl: now 2 of 3 rows skipped" in caplog.text


def test_images_of_other_kinds(folder: Path) -> None:
    Image.new("L", (20, 20), 100).save(folder / "gray.png")
    Image.new("RGBA", (20, 20), (255, 0, 0, 0)).save(folder / "clear.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(folder / "turned.jpg", exif=exif)
    Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(folder / "deep.png")
    assert torch.allclose(load_image(folder / "gray.png"), torch.tensor(100 / 255))
    assert load_image(folder / "clear.png").min() == 1.0
    assert load_image(folder / "turned.jpg").shape == (3, 40, 20)
    assert module.image_size(folder / "turned.jpg") == (20, 40)
    assert torch.allclose(load_image(folder / "deep.png"), torch.tensor(40_000 / 65_535))


def test_the_fingerprint_knows_file_and_images(folder: Path) -> None:
    path = _write(folder, [_row(), _row(image="b.png")])
    first = JSONLPrompts(path).fingerprint
    assert JSONLPrompts(path).fingerprint == first
    Image.new("RGB", (44, 30), (1, 2, 3)).save(folder / "b.png")
    assert JSONLPrompts(path).fingerprint != first


def test_a_pipe_is_no_image(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    with pytest.raises(PromptError, match=r"pipe\.png is no file"):
        JSONLPrompts(_write(folder, [_row(image="pipe.png")]), "error")


def test_a_number_of_thousands_of_digits_is_a_bad_row(folder: Path) -> None:
    source = JSONLPrompts(_write(folder, ['{"image": ' + "9" * 5000 + "}", _row()]))
    assert [line for line, _ in source.bad] == [1] and "not JSON" in source.bad[0][1]
