"""What each reward mode pays for known edits and known cheats, as a table.

    python -m tpips_reward.rewards.effects --metric builtin:late --samples 64

Each sample is a held-out procedural edit; each row replaces its result by something known: the true edit, the same with
drift in other aspects, a copy of the source, another image, black, noise. `--write docs/rewards.md` puts the table
between the marks in that file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tpips_reward.arguments import HelpFormatter
from tpips_reward.errors import TPIPSError
from tpips_reward.files import write_text
from tpips_reward.rewards.reward import PairMetric, TPIPSReward
from tpips_reward.scenes import Edit, render, sample_edit, sample_scene, to_tensor, with_drift

Control = Callable[[Edit, np.random.Generator, int], Tensor]

CONTROLS: dict[str, Control] = {
    "true edit": lambda edit, rng, size: to_tensor(render(edit.ideal, size)),
    "true edit, drifted": lambda edit, rng, size: to_tensor(render(with_drift(edit, rng, probability=1.0), size)),
    "copy of the source": lambda edit, rng, size: to_tensor(render(edit.source, size)),
    "another image": lambda edit, rng, size: to_tensor(render(sample_scene(rng), size)),
    "black": lambda edit, rng, size: torch.zeros(3, size, size),
    "noise": lambda edit, rng, size: torch.from_numpy(rng.random((3, size, size), dtype=np.float32)),
}
"""What stands in for the edit's result: (edit, generator, size in pixels) -> (3, size, size) float32 in [0, 1]."""

BEGIN, END = "<!-- effects: begin -->", "<!-- effects: end -->"
COLUMNS = ("p", "t", "g", "tpips:preserve", "wins", "tpips:edit", "wins (edit)")


def measure_effects(
    metric: PairMetric, samples: int = 64, seed: int = 0, size: int = 64, gate_threshold: float | None = None
) -> dict[str, dict[str, float]]:
    """Means by control and column over `samples` held-out procedural edits.

    p: mean preserve similarity, which is `tpips:preserve` with gate="none"; t: mean target change, which is
    `tpips:target`; g: mean gate; "wins": share of samples in which the true edit's `tpips:preserve` (`tpips:edit`) is
    above this result's.
    """
    rng = np.random.default_rng(seed)
    edits = [sample_edit(rng, split="test") for _ in range(samples)]
    sources = [to_tensor(render(edit.source, size)) for edit in edits]
    kept = [list(edit.preserve) for edit in edits]
    changed = [list(edit.target) for edit in edits]
    rewards = [TPIPSReward(name, metric, gate_threshold=gate_threshold) for name in ("tpips:preserve", "tpips:edit")]
    outputs = {}
    for row, control in CONTROLS.items():
        images = [control(edit, rng, size) for edit in edits]
        outputs[row] = [reward(images, sources, preserve=kept, target=changed) for reward in rewards]
    best = outputs["true edit"]
    table = {}
    for row, (preserve, edit_output) in outputs.items():
        numbers = (
            preserve.terms["preserve"],
            preserve.terms["change"],
            preserve.terms["gate"],
            preserve.scores,
            best[0].scores > preserve.scores,
            edit_output.scores,
            best[1].scores > edit_output.scores,
        )
        table[row] = {column: float(number.float().mean()) for column, number in zip(COLUMNS, numbers, strict=True)}
    return table


def measure_change_scale(metric: PairMetric, samples: int = 200, seed: int = 0, size: int = 64) -> float:
    """A third of the median target change of true procedural edits (training split): a metric's `change_scale`.

    The gate opens fully at this change, so that it tells edits from copies and has little say among edits. At the median
    it would vary between edits that are all well done, and drown what the reward is about: what has stayed. Far below,
    a run would find edits that are hardly done.
    """
    rng = np.random.default_rng(seed)
    edits = [sample_edit(rng) for _ in range(samples)]
    sources, ideals = ([to_tensor(render(getattr(e, name), size)) for e in edits] for name in ("source", "ideal"))
    out = TPIPSReward("tpips:target", metric)(ideals, sources, target=[list(edit.target) for edit in edits])
    return float(out.terms["change"].double().median() / 3)


def markdown_table(table: dict[str, dict[str, float]]) -> str:
    """The table as Markdown, three decimals."""
    lines = ["| result | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    for row, values in table.items():
        lines.append(f"| {row} | " + " | ".join(f"{values[column]:.3f}" for column in COLUMNS) + " |")
    return "\n".join(lines)


def replace_between_marks(text: str, block: str) -> str:
    """`text` with everything between the marks replaced by `block`.

    Raises:
        TPIPSError: a mark is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise TPIPSError(f"The file has no place for the table; put the lines {BEGIN} and {END} where it belongs.")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 0 on success, 2 with one line on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--metric", default="builtin:late", help="what load_metric takes")
    parser.add_argument("--samples", type=int, default=64, help="edits")
    parser.add_argument("--seed", type=int, default=0, help="of the edits")
    parser.add_argument("--size", type=int, default=64, help="pixels a side")
    parser.add_argument("--gate_threshold", type=float, help="default: the metric's change_scale")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a Markdown file with marks, for the table")
    given = parser.parse_args(arguments)
    try:
        report = _report(given)
        if given.write is not None:
            _rewrite(given.write, report)
    except (TPIPSError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0


def _report(given: argparse.Namespace) -> str:
    if given.samples < 1:
        raise TPIPSError(f"--samples {given.samples} must be at least 1.")
    from tpips_reward.checkpoints import load_metric

    metric = load_metric(given.metric)
    table = measure_effects(metric, given.samples, given.seed, given.size, given.gate_threshold)
    threshold = metric.change_scale if given.gate_threshold is None else given.gate_threshold
    return (
        f"`{given.metric}`, {given.samples} held-out procedural edits, seed {given.seed}, {given.size} px, gate "
        f"threshold {threshold:.3f}:\n\n{markdown_table(table)}"
    )


def _rewrite(path: Path, block: str) -> None:
    text = replace_between_marks(path.read_text(encoding="utf-8"), block)
    write_text(path, text)


if __name__ == "__main__":
    raise SystemExit(main())
