"""What a run leaves: its best and its last weights as folders for `load_metric`, with a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from metric_training.training.config import TrainConfig, check_config
from metric_training.training.model import build_fusion
from metric_training.training.state import BEST, LOG, STATE, check_same_origin, frozen_digest, load_checkpoint
from tpips_reward import Metric, TPIPSError
from tpips_reward.files import write_text

_PREFIX = "fusion."
_CARD = """---
library_name: tpips-reward
pipeline_tag: image-feature-extraction
---

# {name}

A {fusion} fusion TPIPS metric, `load_metric("{folder}")`. {scores}

- Started from `{start}`; trained on `{data}`{share}.
- {steps} steps, {minutes:.0f} minutes; {examples} a step, all aspects of each at once.
- The licence is that of what training started from and of the data; state it before you pass the weights on.

| validation after step | agreement | standard error | consensus |
|---|---|---|---|
{rows}

The command: `accelerate launch metric_training/train.py --config config.yaml` with

```yaml
{settings}```
"""


def trained_metric(path: Path) -> tuple[Metric, dict[str, Any]]:
    """The metric of a checkpoint file on the CPU, and the checkpoint.

    Raises:
        TPIPSError: no checkpoint, or one that does not fit what its training started from, or what that has become since.
    """
    saved = load_checkpoint(path, {"trained", "step", "seconds", "config"})
    config = saved_config(saved, path)
    fusion = build_fusion(config)
    check_same_origin(saved, {"start": frozen_digest(fusion)}, config, path)
    for name, value in saved["trained"].items():
        if not bool(value.isfinite().all()):
            raise TPIPSError(f"{path}: {name} holds NaN or infinite numbers; take the other checkpoint of the run, or train anew.")
    weights = {k.removeprefix(_PREFIX): v for k, v in saved["trained"].items() if k.startswith(_PREFIX)}
    try:
        unknown = fusion.load_state_dict(weights, strict=False).unexpected_keys
    except RuntimeError as error:  # shapes
        reason = " ".join(str(error).split())[:200]
        raise TPIPSError(f"{path} does not fit {config.model_name_or_path} ({reason}).") from error
    missing = {name for name, value in fusion.named_parameters() if value.requires_grad} - weights.keys()
    if unknown or missing:
        raise TPIPSError(f"{path} does not fit {config.model_name_or_path} ({min([*unknown, *missing])}).")
    fusion.requires_grad_(False)
    return Metric(fusion, info={"name": config.name or f"{config.fusion} fusion"}), saved


def saved_config(saved: dict[str, Any], path: Path) -> TrainConfig:
    """The settings of a checkpoint.

    Raises:
        TPIPSError: they are those of another version.
    """
    try:
        config = TrainConfig(**saved["config"])
    except TypeError as error:
        raise TPIPSError(f"{path} was made by another version of metric_training/train.py ({error}); train anew.") from error
    check_config(config)
    return config


def write_metrics(folder: Path) -> list[Path]:
    """Writes best/ (where there was a validation) and last/ from a run's checkpoints; returns those written."""
    written = []
    for name, file in (("best", BEST), ("last", STATE)):
        if (folder / file).exists():
            metric, saved = trained_metric(folder / file)
            dtype = torch.bfloat16 if saved["config"]["bf16"] else None
            metric.save_pretrained(folder / name, dtype=dtype)
            write_text(folder / name / "README.md", card(metric, saved, validations(folder), folder / name))
            written.append(folder / name)
    return written


def _comparisons(config: TrainConfig, processes: int) -> str:
    count = config.per_device_train_batch_size * config.gradient_accumulation_steps * processes
    return "1 comparison" if count == 1 else f"{count} comparisons"


def _learnt(config: TrainConfig) -> str:
    if config.objective == "scenes":
        return "the parameters of procedural scenes and the parts of the image that the object covers"
    return config.dataset_name if config.teacher is None else f"{config.dataset_name} with embeddings of {config.teacher}"


def validations(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log that have a validation."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if "validation_agreement" in record]


def describe_scores(metric: Metric) -> str:
    """What a metric's numbers are, in a sentence."""
    if metric.fusion.range is None:
        return "It judges which of three images is the odd one, and has no similarity of two."
    return "Similarity is a cosine, -1 to 1." if metric.fusion.range[0] == -1 else "Similarity is minus a distance, at most 0."


def card(metric: Metric, saved: dict[str, Any], records: list[dict[str, Any]], folder: Path) -> str:
    """The model card of a trained metric."""
    config = TrainConfig(**saved["config"])
    rows = [
        f"| {r['step']} | {r['validation_agreement']:.4f} | {r['validation_standard_error']:.4f} | "
        f"{r['validation_consensus']:.4f} |"
        for r in records
        if r["step"] <= saved["step"]
    ]
    kept = {k: v for k, v in saved["config"].items() if k not in ("resume", "overwrite")}
    return _CARD.format(
        name=metric.info["name"],
        fusion=config.fusion,
        folder=folder,
        scores=describe_scores(metric),
        start=config.model_name_or_path,
        data=_learnt(config),
        share="" if config.train_share == 1 else f", {config.train_share:.0%} of it",
        steps=saved["step"],
        minutes=saved["seconds"] / 60,
        examples=_comparisons(config, saved.get("processes", 1)),
        rows="\n".join(rows) or "| – | – | – | – |",
        settings=yaml.safe_dump(kept, sort_keys=False),
    )
