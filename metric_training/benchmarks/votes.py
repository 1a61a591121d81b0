"""The protocol of benchmarks that are 2AFC votes: agreement, as `metric_training.evaluation` computes it."""

from __future__ import annotations

from typing import Any

from metric_training.benchmarks.protocol import Loaded, Settings
from metric_training.evaluation.judges import Judge
from metric_training.evaluation.runner import evaluate


def measure(judge: Judge, loaded: Loaded, settings: Settings) -> dict[str, Any]:
    """2AFC score: mean share of the votes for the metric's choice, ties counted half; by subset, and their mean."""
    results = evaluate(
        [lambda: judge],
        loaded.content,
        images_per_call=settings.images_per_call,
        draws=settings.draws,
        strict=True,  # every metric must see the same triplets
        progress=settings.progress,
    )
    row = results["metrics"][judge.name]
    subsets = {
        name: {"2AFC": part["agreement"], "examples": part["examples"]} for name, part in row["per_source"].items()
    }
    mean = sum(part["2AFC"] for part in subsets.values()) / len(subsets)
    figures = {"2AFC": row["agreement"], "mean of subsets": mean, "consensus": results["data"]["consensus"]}
    return {"figures": figures, "errors": {"2AFC": row["standard_error"]}, "groups": {"subset": subsets}}
