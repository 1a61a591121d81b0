"""Agreement of a metric with odd-one-out votes (paper, §5): vote share of the image that the metric calls odd.

    python -m metric_training.evaluate --metric builtin:late --triplets 1000
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metric_training.builtin_model import build_late_fusion
from metric_training.data.triplets import Triplet, sample_triplet
from metric_training.data.votes import PAIRS, Voters
from metric_training.losses import agreement, consensus
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.scenes import to_tensor

#: Triplet → (A, 3) similarities in the order of the image left out.
Judge = Callable[[Triplet], Tensor]

#: The seed of the test set; training data come from other streams, whatever their seed.
TEST_SEED = 2607


def held_out_triplets(count: int, *, seed: int = TEST_SEED, split: str = "train", size: int = 64) -> list[Triplet]:
    """Fresh triplets, from a stream that training never draws from.

    Args:
        count: how many.
        seed: of the set.
        split: whether aspects are named in wordings of training ("train") or in ones never trained on ("test").
        size: side in pixels.
    """
    if count < 1:
        raise TPIPSError(f"A test set needs at least one triplet, not {count}.")
    return [
        sample_triplet(np.random.default_rng([seed, 7, i]), split=split, voters=Voters(), size=size) for i in range(count)
    ]


def metric_judge(metric: Metric) -> Judge:
    """Judges with a metric's own pairwise similarities, whatever its fusion."""

    def judge(triplet: Triplet) -> Tensor:
        images = [to_tensor(i) for i in triplet.images]
        asked = [(i, j, wording) for wording in triplet.wordings for i, j in PAIRS]
        return metric.similarity_pairs(images, images, asked).view(-1, 3)

    return judge


def pixel_judge(triplet: Triplet) -> Tensor:
    """Minus the mean squared pixel difference, the same for every aspect."""
    images = [to_tensor(i) for i in triplet.images]
    row = torch.stack([-((images[i] - images[j]) ** 2).mean() for i, j in PAIRS])
    return row.expand(len(triplet.aspects), 3)


@torch.no_grad()
def score_triplets(judge: Judge, triplets: Sequence[Triplet]) -> dict[str, Any]:
    """Agreement and consensus over all (triplet, aspect) examples.

    Returns:
        "agreement", "standard_error", "consensus", "examples", and "per_aspect": agreement, consensus and count by plain name.

    Raises:
        TPIPSError: when the judge gives a similarity that is not finite.
    """
    scores, crowds, names = [], [], []
    for number, triplet in enumerate(triplets):
        votes = torch.from_numpy(triplet.votes)
        similarities = judge(triplet).cpu()
        if not torch.isfinite(similarities).all():
            raise TPIPSError(f"The metric gave a similarity that is not finite on triplet {number}; nothing was scored.")
        scores.append(agreement(similarities, votes))
        crowds.append(consensus(votes))
        names += list(triplet.aspects)
    agreed, crowd = torch.cat(scores).double(), torch.cat(crowds).double()
    groups: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        groups[name].append(index)
    return {
        "agreement": float(agreed.mean()),
        "standard_error": float(agreed.std() / len(agreed) ** 0.5),
        "consensus": float(crowd.mean()),
        "examples": len(agreed),
        "per_aspect": {
            name: {"agreement": float(agreed[rows].mean()), "consensus": float(crowd[rows].mean()), "count": len(rows)}
            for name, rows in sorted(groups.items())
        },
    }


def compare(metric: Metric, count: int) -> dict[str, dict[str, Any]]:
    """A metric on known and on new wordings, beside pixel L2 and the built-in architecture untrained."""
    known, new = (held_out_triplets(count, split=split) for split in ("train", "test"))
    return {
        "metric, known wordings": score_triplets(metric_judge(metric), known),
        "metric, wordings never trained on": score_triplets(metric_judge(metric), new),
        "pixel L2": score_triplets(pixel_judge, known),
        "untrained backbone": score_triplets(metric_judge(Metric(build_late_fusion(seed=0))), known),
    }


def as_markdown(results: dict[str, dict[str, Any]]) -> str:
    """The results as two Markdown tables: overall, and per aspect on known wordings."""
    lines = ["| judge | agreement | standard error | consensus | examples |", "|---|---|---|---|---|"]
    for name, r in results.items():
        lines.append(
            f"| {name} | {r['agreement']:.3f} | {r['standard_error']:.3f} | {r['consensus']:.3f} | {r['examples']} |"
        )
    known, new = (results[f"metric, {w}"]["per_aspect"] for w in ("known wordings", "wordings never trained on"))
    lines += ["", "| aspect | agreement | on new wordings | consensus |", "|---|---|---|---|"]
    for name, r in known.items():
        other = f"{new[name]['agreement']:.3f}" if name in new and name != "overall" else "–"
        lines.append(f"| {name} | {r['agreement']:.3f} | {other} | {r['consensus']:.3f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Agreement of a metric with simulated odd-one-out votes.")
    parser.add_argument("--metric", default="builtin:late", help="anything that load_metric takes")
    parser.add_argument("--triplets", type=int, default=1000, help="triplets in each test set")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args(arguments)
    try:
        results = compare(load_metric(options.metric), options.triplets)
    except TPIPSError as error:
        parser.exit(2, f"error: {error}\n")
    print(as_markdown(results))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
