"""Small folders of procedural edits, as editors of known worth would leave them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tpips_reward.scenes import Edit, Scene, render, sample_edit, sample_scene

SIZE = 24


def save(scene: Scene, path: Path, size: int = SIZE) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(render(scene, size)).save(path)
    return str(path)


def drifted(edit: Edit) -> Scene:
    """The ideal on a lighter or darker background: edits well and keeps badly."""
    shift = 0.1 if sum(edit.ideal.background_color) < 1.5 else -0.1
    color = tuple(min(1.0, max(0.0, channel + shift)) for channel in edit.ideal.background_color)
    return replace(edit.ideal, background_color=color)  # type: ignore[arg-type]


def write_edits(folder: Path, count: int = 12, seed: int = 0, size: int = SIZE) -> Path:
    """A manifest with the editors good (the ideal), drifting, and destroying (another scene); all edits of colors."""
    rng = np.random.default_rng(seed)
    lines = []
    for index in range(count):
        edit = sample_edit(rng, "test", "color")
        key = f"{index:03d}"
        save(edit.source, folder / f"in/{key}.png", size)
        save(edit.ideal, folder / f"good/{key}.png", size)
        save(drifted(edit), folder / f"drifting/{key}.png", size)
        save(sample_scene(rng), folder / f"destroying/{key}.png", size)
        outputs = {name: f"{name}/{key}.png" for name in ("drifting", "good", "destroying")}
        lines.append(
            {
                "key": key,
                "source": f"in/{key}.png",
                "instruction": edit.instruction,
                "category": "color" if index % 2 else "paint",
                "preserve": ["background"],
                "target": ["object color"],
                "outputs": outputs,
            }
        )
    return write_lines(folder / "edits.jsonl", lines)


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
