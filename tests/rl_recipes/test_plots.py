"""Grids and curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rl_recipes.plots import sample_grid, save_curves, save_sample_grids


def test_a_grid_shows_each_image_in_its_place() -> None:
    colors = [(1.0, 0, 0), (0, 1.0, 0), (0, 0, 1.0)]
    row = [torch.tensor(c).view(3, 1, 1).expand(3, 8, 16) for c in colors]
    grid = np.asarray(sample_grid([row, row[:2]], ["a", "b", "c"], ["one", "a very long instruction " * 20], side=64))
    found = {tuple(int(v) for v in grid[60, x]) for x in (40, 112, 184)}
    assert found == {(255, 0, 0), (0, 255, 0), (0, 0, 255)}
    assert (grid[:, :, :] == [0, 0, 255]).all(-1).sum() == 64 * 32, "the ideal is missing in the second row only"


def test_scores_stand_below_their_image() -> None:
    row = [torch.ones(3, 8, 8)] * 3
    plain = sample_grid([row], ["a", "b", "c"], ["edit"], side=64)
    scored = sample_grid([row], ["a", "b", "c"], ["edit"], side=64, captions=[[[], [], ["background 0.97", "lighting 0.99"]]])
    assert scored.width == plain.width and scored.height == plain.height + 2 * 13
    added = np.asarray(scored)[plain.height - 8 : -8]
    assert (added[:, 8 + 2 * 72 :] < 255).any() and (added[:, : 8 + 2 * 72] == 255).all()


def test_grids_are_split_and_ideals_optional(tmp_path: Path) -> None:
    images = [torch.rand(3, 16, 16) for _ in range(10)]
    paths = save_sample_grids(tmp_path, images, images, images, [None] * 10, ["text"] * 10, rows_per_grid=8)
    assert [p.name for p in paths] == ["grid_00.png", "grid_01.png"]
    with Image.open(paths[0]) as first, Image.open(paths[1]) as second:
        assert first.width == second.width == 8 + 3 * 168 and first.height > second.height
    (path,) = save_sample_grids(tmp_path, images[:1], images[:1], images[:1], images[:1], ["text"])
    with Image.open(path) as grid:
        assert grid.width == 8 + 4 * 168
    assert save_sample_grids(tmp_path, [], [], [], [], []) == []


def test_curves_take_lines_with_and_without_values(tmp_path: Path) -> None:
    lines = [{"iteration": i, "reward_mean": 0.1 * i, **({"copy_rate": 0.5} if i % 2 else {})} for i in range(1, 5)]
    for name, content in (("some.png", lines), ("none.png", [])):
        save_curves(tmp_path / name, content)
        with Image.open(tmp_path / name) as curves:
            assert curves.format == "PNG" and curves.width > 1000
    assert (tmp_path / "some.png").stat().st_size > (tmp_path / "none.png").stat().st_size
