"""A tiny random editor and metric on the disk, and a short run's flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_recipes.builtin import components

METRIC = Path(__file__).parents[1] / "data" / "parity" / "embedding"


@pytest.fixture(scope="session")
def editor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder with one layer and weights large enough that the adapter's gradients are."""
    tokenizer = components.build_tokenizer()
    transformer = components.build_transformer(num_layers=1, num_heads=2, head_dim=16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5)
    pipe = components.build_pipeline(
        vae=components.build_vae(base_dim=4),
        transformer=transformer,
        text_encoder=components.build_text_encoder(tokenizer, num_layers=1),
        tokenizer=tokenizer,
    )
    folder = tmp_path_factory.mktemp("editor")
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def flags(editor_folder: Path) -> Callable[..., list[str]]:
    """Flags of a run of a few seconds into a folder; keyword arguments change or add some."""

    def build(run: Path, *switches: str, **changes: Any) -> list[str]:
        settings = {
            "preset": "none", "editor": editor_folder, "metric": METRIC, "resolution": 32, "lora_rank": 2,
            "prompts_per_iteration": 2, "num_generations": 2, "num_inference_steps": 3, "sde_window": 2, "train_steps": 1,
            "max_steps": 4, "eval_samples": 3, "sample_grids": 2, "threads": 1, "save_steps": 2,
            "output_dir": run, **changes,
        }  # fmt: skip
        return [*switches, *(f"--{name}={value}" for name, value in settings.items())]

    return build
