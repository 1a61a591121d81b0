"""What ships: its size, and that both built-ins load and work from the package's own folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from metric_training.evaluate import compare
from rl_recipes.builtin.data import held_out_edits
from rl_recipes.editors import load_editor
from rl_recipes.rollout import sample_ode
from tpips_reward import load_metric
from tpips_reward.scenes import ASPECTS, measure_edit, render, sample_edit, to_tensor

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "tpips_reward" / "builtin", ROOT / "rl_recipes" / "builtin" / "editor")


def test_package_data_stay_within_16_megabytes() -> None:
    sizes = {p: p.stat().st_size for folder in FOLDERS for p in folder.rglob("*") if p.is_file()}
    assert len(sizes) > 10
    assert sum(sizes.values()) <= 16_000_000
    assert max(sizes.values()) <= 6_000_000


def test_nothing_shipped_is_a_pickle() -> None:
    assert not [p for folder in FOLDERS for p in folder.rglob("*") if p.suffix in (".pt", ".bin", ".pkl", ".ckpt")]


def test_no_config_names_the_folder_it_was_loaded_from() -> None:
    configs = [p for folder in FOLDERS for p in folder.rglob("*.json")]
    assert configs and not [p for p in configs if '"_name_or_path"' in p.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", ["late", "mid", "early"])
def test_the_built_in_metrics_tell_colors_apart(name: str) -> None:
    metric = load_metric(f"builtin:{name}", device="cpu")
    figures = json.loads((FOLDERS[0] / name / "figures.json").read_text())
    assert metric.change_scale == figures["change_scale"]
    rng = np.random.default_rng(0)
    edits = [sample_edit(rng, "test", "color") for _ in range(12)]
    sources, ideals = ([to_tensor(render(getattr(e, n))) for e in edits] for n in ("source", "ideal"))
    scores = metric.similarity(ideals, sources, ["object color", "background color"])
    assert scores.shape == (12, 2) and float((scores[:, 0] < scores[:, 1]).float().mean()) >= 0.9


def test_the_built_in_editor_loads_and_edits() -> None:
    editor = load_editor("builtin", "cpu", torch.float32)
    rng = np.random.default_rng(1)
    edits = [sample_edit(rng, "test", "background_color") for _ in range(4)]
    sources = [to_tensor(render(e.source)) for e in edits]
    conditions = editor.encode(sources, [e.instruction for e in edits])
    generators = [torch.Generator().manual_seed(i) for i in range(4)]
    images = editor.decode(sample_ode(editor, conditions, generators, num_steps=8), conditions)
    assert all(image.shape == (3, 64, 64) and 0 <= image.min() and image.max() <= 1 for image in images)
    # It has learnt something: an edit is nearer to its own source than to the others'.
    distances = torch.stack([torch.stack([(i - s).abs().mean() for s in sources]) for i in images])
    assert float(distances.diagonal().mean()) < float(distances.mean())


def test_the_built_in_editor_follows_instructions() -> None:
    """Its edit success before any RL is at least 0.70; README has it from three times as many edits."""
    editor = load_editor("builtin", "cpu", torch.float32)
    edits = held_out_edits(2001, 40)
    conditions = editor.encode([to_tensor(render(e.source)) for e in edits], [e.instruction for e in edits])
    generators = [torch.Generator().manual_seed(i) for i in range(40)]
    images = editor.decode(sample_ode(editor, conditions, generators, num_steps=8), conditions)
    success = [measure_edit(edit, image).success for edit, image in zip(edits, images, strict=True)]
    assert np.mean(success) >= 0.70


@pytest.mark.parametrize(("name", "triplets"), [("late", 60), ("mid", 25), ("early", 25)])
def test_the_built_in_metrics_agree_with_votes(name: str, triplets: int) -> None:
    """Within 3 points of consensus, and 20 above pixel L2 and its own untrained backbone; README has them from 600 triplets."""
    rows = compare(load_metric(f"builtin:{name}", device="cpu"), triplets, 0)
    assert len(rows) == 4
    agreement = {judge: row["agreement"] for judge, row in rows.items()}
    figures = json.loads((FOLDERS[0] / name / "figures.json").read_text())["results"]
    assert agreement == pytest.approx({judge: figures[judge]["agreement"] for judge in rows}, abs=0.06), "figures of other weights"
    known, new, *baselines = agreement.values()
    assert known >= rows["metric, known wordings"]["consensus"] - 0.03
    assert new >= known - 0.05
    assert all(known >= baseline + 0.20 for baseline in baselines)


@pytest.mark.parametrize("name", ["late", "mid", "early"])
def test_the_built_in_metrics_have_learnt_every_named_aspect(name: str) -> None:
    """As their figures say, which were measured on the files that ship (see the test before)."""
    figures = json.loads((FOLDERS[0] / name / "figures.json").read_text())
    for wordings in ("metric, known wordings", "metric, wordings never trained on"):
        rows = figures["results"][wordings]["per_aspect"]
        assert set(rows) == set(ASPECTS)
        below = {aspect: row["agreement"] for aspect, row in rows.items() if row["agreement"] < row["consensus"] - 0.1}
        assert below.keys() <= {"overall"}, below  # on which people agree the least
        errors = {aspect: (row["agreement"] * (1 - row["agreement"]) / row["count"]) ** 0.5 for aspect, row in rows.items()}
        assert min(row["agreement"] - 3 * errors[aspect] for aspect, row in rows.items() if aspect != "overall") > 1 / 3
