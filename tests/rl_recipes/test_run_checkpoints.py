"""Checkpoints: exact, complete or unseen, and damage is noticed."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_recipes import checkpoints
from rl_recipes.checkpoints import find_damage, latest_checkpoint, load_checkpoint, save_checkpoint
from rl_recipes.runs import RunError


def _model(seed: int = 0, width: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
    model[0].bias.requires_grad_(False)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.randn(5, 4) + random.random() + np.random.rand()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    model, optimizer = _model()
    _step(model, optimizer)
    path = save_checkpoint(tmp_path, 1, model, optimizer, {"seconds": 1.5})
    for _ in range(3):
        _step(model, optimizer)

    other, other_optimizer = _model(seed=9)
    other.load_state_dict({k: v for k, v in _model()[0].state_dict().items() if k == "0.bias"}, strict=False)
    assert load_checkpoint(path, other, other_optimizer) == (1, {"seconds": 1.5})
    for _ in range(3):
        _step(other, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_last_two_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    model, optimizer = _model()
    assert latest_checkpoint(tmp_path) is None
    for iteration in (5, 10, 15, 15):
        save_checkpoint(tmp_path, iteration, model, optimizer, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_000015"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000015"


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_that_was_passed_over_takes_no_place(keep: int, tmp_path: Path) -> None:
    model, optimizer = _model()
    for iteration in (10, 20):
        save_checkpoint(tmp_path, iteration, model, optimizer, {})
    (tmp_path / "step_000020" / "state.pt").write_bytes(b"")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000010"
    save_checkpoint(tmp_path, 15, model, optimizer, {}, keep)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_000015"][-keep:]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no manifest", "empty manifest", "odd manifest", "unlisted"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = _model()
    first = save_checkpoint(tmp_path, 1, model, optimizer, {})
    last = save_checkpoint(tmp_path, 2, model, optimizer, {})
    file, manifest = last / "state.pt", last / "manifest.json"
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text({"empty manifest": "", "odd manifest": "[1]", "unlisted": '{"files": {}}'}[damage])
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == first
    assert "step_000002 is damaged" in caplog.text
    (first / "manifest.json").unlink()
    with pytest.raises(RunError, match="All checkpoints .* are damaged"):
        latest_checkpoint(tmp_path)


def test_a_disk_that_fills_up_costs_nothing_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _model()
    first = save_checkpoint(tmp_path, 1, model, optimizer, {})

    def refuse(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(checkpoints, "sync", refuse)
    with pytest.raises(RunError, match="disk is full"):
        save_checkpoint(tmp_path, 2, model, optimizer, {})
    assert list(tmp_path.iterdir()) == [first] and find_damage(first) is None


def test_another_adapter_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, *_model(), {})
    with pytest.raises(RunError, match="another editor or adapter"):
        load_checkpoint(path, *_model(width=5))


def test_the_newest_goes_by_number_and_not_by_name(tmp_path: Path) -> None:
    model, optimizer = _model()
    for iteration in (999_999, 1_000_000):
        save_checkpoint(tmp_path, iteration, model, optimizer, {})
    (tmp_path / "step_of_mine").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1000000"


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_state_that_cannot_be_read_is_one_sentence(content: bytes | None, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, *_model(), {})
    if content is None:
        torch.save({"iteration": 1}, path / "state.pt")
    else:
        (path / "state.pt").write_bytes(content)
    with pytest.raises(RunError, match="cannot be read"):
        load_checkpoint(path, *_model())
