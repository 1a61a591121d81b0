"""The tiny random metric in the released layout, and its images; edits of editors of known worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import expected_scores, preserve_reward
from evaluation_files import write_edits
from PIL import Image
from torch import Tensor

from tpips_reward import TPIPSReward
from tpips_reward.checkpoints import load_metric
from tpips_reward.images import to_tensors
from tpips_reward.metric import Metric

PARITY = Path(__file__).parents[1] / "data" / "parity"


@pytest.fixture(scope="session")
def parity() -> Path:
    return PARITY


@pytest.fixture(scope="session")
def metric() -> Metric:
    """Float32 on the CPU; tests must leave it as it is."""
    return load_metric(PARITY / "embedding", device="cpu")


@pytest.fixture(scope="session")
def mid_metric() -> Metric:
    """As `metric`, with mid fusion."""
    return load_metric(PARITY / "activation_dist", device="cpu")


@pytest.fixture(scope="session")
def early_metric() -> Metric:
    """As `metric`, with early fusion."""
    return load_metric(PARITY / "early_fusion", device="cpu")


@pytest.fixture
def reward() -> TPIPSReward:
    """What adapters are tried with."""
    return preserve_reward()


@pytest.fixture
def expected(reward: TPIPSReward) -> Any:
    """What every adapter must give for the samples."""
    return expected_scores(reward)


@pytest.fixture(scope="session")
def photos() -> dict[str, Image.Image]:
    return {path.stem: Image.open(path).convert("RGB") for path in sorted((PARITY / "images").glob("*.png"))}


@pytest.fixture(scope="session")
def crops(photos: dict[str, Image.Image]) -> list[Tensor]:
    """Float images of three sizes."""
    return to_tensors([photos[name] for name in ("cat_0", "coffee_1", "rocket_2", "astronaut_1")])


@pytest.fixture(scope="session")
def cases() -> list[dict[str, Any]]:
    """What the released package gives, for all fusions."""
    return json.loads((PARITY / "expected.json").read_text())["cases"]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Of twelve edits, by editors of known worth (`write_edits`)."""
    return write_edits(tmp_path / "data")


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)
