"""A run's weights → a folder that ships: bfloat16, with a measured change_scale, its figures and its card.

    python -m metric_training.export --run runs/builtin_early --output tpips_reward/builtin/early --base builtin:late

`--base` stores only what differs from a built-in metric. best/ and last/ of the run itself are what `load_metric` takes
without any of this.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from metric_training.evaluate import as_markdown, compare
from metric_training.training.config import TrainConfig
from metric_training.training.examples import PROCEDURAL
from metric_training.training.output import describe_scores, saved_config, trained_metric
from metric_training.training.state import BEST, STATE, load_checkpoint
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.arguments import HelpFormatter, check_at_least
from tpips_reward.errors import exit_on_errors
from tpips_reward.files import check_writable, write_text
from tpips_reward.released import is_released_layout
from tpips_reward.rewards.effects import measure_change_scale

CHECKPOINTS = {"best": BEST, "last": STATE}
CARD = """---
license: apache-2.0
library_name: tpips-reward
pipeline_tag: image-feature-extraction
---

# {name}

{article} {fusion}-fusion TPIPS metric, small enough for a CPU: transformers' `Qwen3VLModel` with {parameters:.2f} million parameters, {start}, on
procedural scenes (`tpips_reward.scenes`) with simulated voters. It knows flat shapes on simple backgrounds and their
aspects. It is there to run, test and demonstrate everything without a download; for photographs use `released:{fusion}`.

- Images are brought to about 64 x 64 pixels' area. {scores}
- `change_scale`, a third of the median 1 - f of true edits in the aspect that they change: {change_scale:.4f}.
- Training: {stages}; weights of the {checkpoint}. On one thread of a shared two-core CPU, each by `accelerate launch metric_training/train.py --config
  metric_training/configs/NAME.yaml`; then `python -m metric_training.export --run runs/{config} --output
  tpips_reward/builtin/{fusion}{options}`.
- Weights are stored in bfloat16{base}; the figures are those of the stored weights.

Agreement with simulated voters on fresh scenes (`python -m metric_training.evaluate --metric {name} --triplets {triplets}`);
chance is 0.333:

{table}

"Wordings never trained on" are new combinations of words that training has seen apart ("hue of the cup" where "hue of the car" and
"cup color" were seen). Words that training has never seen are split into pieces and mean little to this model.
"""


def export(
    run: Path, output: Path, triplets: int = 1000, edits: int = 200, checkpoint: str = "best", base: str | None = None
) -> dict[str, Any]:
    """Writes weights (bfloat16), figures.json and README.md; returns the figures.

    Args:
        run: the training's output folder.
        output: folder to write.
        triplets: triplets in each test set.
        edits: true edits over which ``change_scale`` is measured.
        checkpoint: "best" or "last".
        base: a built-in metric whose weights are shared; see `Metric.save_pretrained`.

    Raises:
        TPIPSError: when the run has no checkpoint, or is none of a built-in metric, of which the card would say what is not so.
    """
    metric, saved = trained_metric(run / CHECKPOINTS[checkpoint])
    metric.fusion.to(torch.bfloat16).to(torch.float32)
    change_scale = measure_change_scale(metric, samples=edits)
    stages = _stages(saved, run / CHECKPOINTS[checkpoint])
    config = stages[-1][0]
    start = stages[0][0].model_name_or_path
    other = next((stage.dataset_name for stage, _ in stages if stage.objective != "scenes" and stage.dataset_name != PROCEDURAL), None)
    if other is not None or start.startswith("released:") or is_released_layout(Path(start)):
        raise TPIPSError(
            f"{run} was trained on {other or PROCEDURAL} from {start}; the files and the card that are exported are those of a built-in "
            f"metric, made of procedural scenes alone. {run / checkpoint} is what load_metric takes, with a card of its own: share that."
        )
    name = f"builtin:{config.fusion}"
    rounded = Metric(metric.fusion, change_scale=change_scale, info={"name": name, "license": "apache-2.0"})
    rounded.save_pretrained(output, dtype=torch.bfloat16, base=base)
    # The figures are those of the files, not of what was in memory.
    stored = load_metric(output, device="cpu")
    results = compare(stored, triplets)
    figures = {
        "steps": saved["step"],
        "minutes": saved["seconds"] / 60,
        "change_scale": change_scale,
        "triplets": triplets,
        "results": results,
    }
    write_text(output / "figures.json", json.dumps(figures, indent=1) + "\n")
    card = CARD.format(
        name=name,
        article="An" if config.fusion == "early" else "A",
        fusion=config.fusion,
        parameters=sum(p.numel() for p in stored.fusion.parameters()) / 1e6,
        start=f"trained from `{stages[0][0].model_name_or_path}`",
        scores=describe_scores(stored),
        change_scale=change_scale,
        stages=", then ".join(
            f"`{Path(stage.output_dir).name}` ({done['step']} steps, {done['seconds'] / 60:.0f} minutes, seed {stage.seed})"
            for stage, done in stages
        ),
        checkpoint="best validation" if checkpoint == "best" else "last step",
        config=Path(config.output_dir).name,
        options=("" if base is None else f" --base {base}") + f" --triplets {triplets}",
        base="" if base is None else f", and only those that differ from {base}'s",
        triplets=triplets,
        table=as_markdown(results),
    )
    write_text(output / "README.md", card)
    return figures


def _stages(saved: dict[str, Any], path: Path) -> list[tuple[TrainConfig, dict[str, Any]]]:
    """The settings and the state of each training of a checkpoint, those that it started from first."""
    found, seen = [(saved_config(saved, path), saved)], {path.resolve()}
    while True:
        start = Path(found[0][0].model_name_or_path)
        path = start.parent / CHECKPOINTS.get(start.name, "")
        if not path.is_file() or path.resolve() in seen:  # no run of ours, or one that was trained anew since
            return found
        seen.add(path.resolve())
        state = load_checkpoint(path, {"step", "seconds", "config"})
        found.insert(0, (saved_config(state, path), state))


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Export a run of metric_training/configs/builtin_*.yaml as the package ships it.", formatter_class=HelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="output_dir of metric_training/train.py")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--checkpoint", choices=list(CHECKPOINTS), default="best", help="which weights")
    parser.add_argument("--base", help="a built-in metric of which only the differences are stored")
    parser.add_argument("--triplets", type=int, default=1000, help="triplets in each test set")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "triplets")
    check_writable(options.output)
    figures = export(
        options.run, options.output, options.triplets, checkpoint=options.checkpoint, base=options.base
    )
    print(as_markdown(figures["results"]))


if __name__ == "__main__":
    main()
