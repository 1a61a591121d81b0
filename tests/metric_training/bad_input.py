"""Rows, pictures and a start of trainings, of which tests of bad input break one thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from metric_training.builtin_model import build_late_fusion
from metric_training.training.config import TrainConfig
from tpips_reward import Metric

OVERFLOWING = 10**400


def draw_pictures(folder: Path) -> None:
    """0.png to 8.png, and cut.png, which breaks off."""
    rng = np.random.default_rng(4)
    for number in range(9):
        Image.fromarray(rng.integers(0, 255, (24, 24, 3), np.uint8)).save(folder / f"{number}.png")
    whole = (folder / "0.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])


def detailed_picture(width: int = 180, height: int = 120) -> Image.Image:
    """Something with color, detail and a left and right side."""
    v, u = np.mgrid[0:height, 0:width] / height
    wave = 60 * np.sin(70 * u) * np.sin(60 * v)
    pixels = np.stack([90 + 80 * u + wave, 60 + 90 * v + wave, 160 - 70 * u + wave], -1)
    pixels[: height // 2, : width // 4] = (230, 40, 30)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def row(*images: object, **changes: Any) -> dict[str, Any]:
    names = [f"{name}.png" if isinstance(name, int) else name for name in (*images, *range(6, 9))][:3]
    factor = {"name": "lighting", "label": "p1", "probs": [0.2, 0.6, 0.2]} | changes.pop("factor", {})
    return dict(zip(("p0_path", "p1_path", "p2_path"), names, strict=True)) | {"factors": [factor]} | changes


def written(folder: Path, *lines: Any, name: str = "set.jsonl") -> str:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / name).write_text(text)
    return str(folder / name)


def save_start(folder: Path) -> str:
    """A tiny random metric of late fusion, of which `tiny` trains; its path."""
    Metric(build_late_fusion(0, hidden=96, layers=2, vision_hidden=32)).save_pretrained(folder)
    return str(folder)


def tiny(start: str, folder: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model_name_or_path": start, "output_dir": str(folder), "dataset_name": "procedural", "train_samples": 2, "max_aspects": 2,
        "save_steps": 1, "eval_samples": 1, "eval_steps": 9, "logging_steps": 1, "lora_r": 2,
    }  # fmt: skip
    return TrainConfig(**(settings | changes))
