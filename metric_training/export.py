"""A trained model → a folder that `load_metric` takes, with its figures and its card.

    python -m metric_training.export --run runs/builtin_late --output tpips_reward/builtin/late
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from metric_training.builtin_model import build_late_fusion
from metric_training.evaluate import as_markdown, compare
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.errors import exit_on_errors
from tpips_reward.files import write_text
from tpips_reward.rewards.effects import measure_change_scale

CARD = """---
license: apache-2.0
library_name: tpips-reward
pipeline_tag: image-feature-extraction
---

# builtin:late

A late-fusion TPIPS metric, small enough for a CPU: transformers' `Qwen3VLModel` with {parameters:.2f} million parameters, trained from
scratch on procedural scenes (`tpips_reward.scenes`) with simulated voters. It knows flat shapes on simple backgrounds and their
aspects. It is there to run, test and demonstrate everything without a download; for photographs use `released:late`.

- Images are brought to about 64 x 64 pixels' area. Similarity is a cosine, -1 to 1.
- `change_scale`, the 1 - f that nine in ten true edits exceed in the aspect that they change: {change_scale:.4f}.
- Training: {steps} steps, {minutes:.0f} minutes on one thread of a shared two-core CPU, seed {seed}:
  `accelerate launch metric_training/train.py --config metric_training/configs/builtin_late.yaml`, then
  `python -m metric_training.export --run runs/builtin_late --output tpips_reward/builtin/late`.
- Weights are stored in bfloat16; the figures are those of the stored weights.

Agreement with simulated voters on fresh scenes (`python -m metric_training.evaluate --metric builtin:late --triplets {triplets}`);
chance is 0.333:

{table}

"Wordings never trained on" are new combinations of words that training has seen apart ("hue of the cup" where "hue of the car" and
"cup color" were seen). Words that training has never seen are split into pieces and mean little to this model.
"""


def export(run: Path, output: Path, triplets: int = 1000, edits: int = 200) -> dict[str, Any]:
    """Writes weights (bfloat16), figures.json and README.md; returns the figures.

    Args:
        run: the training's output folder.
        output: folder to write.
        triplets: triplets in each test set.
        edits: true edits over which ``change_scale`` is measured.

    Raises:
        TPIPSError: when the run has no checkpoint.
    """
    checkpoint = run / "checkpoint.pt"
    if not checkpoint.exists():
        raise TPIPSError(f"{run} has no checkpoint.pt; give the output_dir of metric_training/train.py.")
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        late = build_late_fusion(saved["config"]["seed"])
        weights = {k.removeprefix("late."): v for k, v in saved["model"].items() if k.startswith("late.")}
        late.load_state_dict(weights)
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = " ".join(str(error).split())[:200]
        raise TPIPSError(f"{checkpoint} is no checkpoint of metric_training/train.py ({reason}).") from error
    late.to(torch.bfloat16).to(torch.float32)
    change_scale = measure_change_scale(Metric(late), samples=edits)
    info = {"name": "builtin:late", "license": "apache-2.0"}
    Metric(late, change_scale=change_scale, info=info).save_pretrained(output, dtype=torch.bfloat16)
    # The figures are those of the files, not of what was in memory.
    results = compare(load_metric(output, device="cpu"), triplets)
    figures = {
        "steps": saved["step"],
        "minutes": saved["seconds"] / 60,
        "change_scale": change_scale,
        "triplets": triplets,
        "results": results,
    }
    write_text(output / "figures.json", json.dumps(figures, indent=1) + "\n")
    card = CARD.format(
        parameters=sum(p.numel() for p in late.parameters()) / 1e6,
        change_scale=change_scale,
        steps=saved["step"],
        minutes=saved["seconds"] / 60,
        seed=saved["config"]["seed"],
        triplets=triplets,
        table=as_markdown(results),
    )
    write_text(output / "README.md", card)
    return figures


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Export a trained metric for load_metric.")
    parser.add_argument("--run", type=Path, required=True, help="output_dir of metric_training/train.py")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--triplets", type=int, default=1000, help="triplets in each test set")
    options = parser.parse_args(arguments)
    if options.triplets < 1:
        raise TPIPSError(f"--triplets must be at least 1, not {options.triplets}.")
    print(as_markdown(export(options.run, options.output, options.triplets)["results"]))


if __name__ == "__main__":
    main()
