"""A whole evaluation by a cheap metric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_metrics import RegionMetric

from tpips_reward.evaluation import Settings, evaluate, read_manifest

FAST = Settings(resamples=300, examples=2)


def run(manifest: Path, output: Path, **options: Any) -> dict[str, Any]:
    options.setdefault("settings", FAST)
    return evaluate(read_manifest(manifest), RegionMetric(), output, metric_name="region", **options)
