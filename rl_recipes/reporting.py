"""What an iteration's edits were like: one line of ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from rl_recipes.grpo import Batch
from tpips_reward.scenes import measure_edit


def report(batches: Sequence[Batch]) -> dict[str, Any]:
    """What the edits of an iteration were like, over all processes.

    ``copy_rate``, ``edit_success`` and ``object_lost`` are those of one edit a group, where scenes are known.
    """
    rows: list[dict[str, Any]] = []
    for batch in batches:
        measured = set(batch.first_of_each_group())
        for i, group in enumerate(batch.groups.tolist()):
            row = {"group": group, "score": float(batch.output.scores[i]), "advantage": float(batch.advantages[i])}
            row["aspects"] = batch.output.per_aspect[i]
            row["terms"] = {name: float(values[i]) for name, values in batch.output.terms.items()}
            edit = batch.prompts[i].edit
            if edit is not None and i in measured:
                measures = measure_edit(edit, batch.edits[i])
                row["known"] = {
                    "copy_rate": measures.copied, "edit_success": measures.success, "object_lost": measures.object_lost
                }  # fmt: skip
            rows.append(row)
    return summarise_rows(gather_object(rows))


def summarise_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the edits of an iteration, for one line of ``metrics.jsonl``; what is not known is left out."""
    scores = np.array([row["score"] for row in rows])
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["score"])
    zero = [max(map(abs, (r["advantage"] for r in rows if r["group"] == group))) == 0 for group in groups]
    line: dict[str, Any] = {
        "reward_mean": float(scores.mean()),
        "reward_std": float(scores.std()),
        "group_std": float(np.mean([np.std(v) for v in groups.values()])),
        "zero_std_share": float(np.mean(zero)),
    }
    for name in rows[0]["terms"]:
        line |= _known_mean(f"term_{name}", [row["terms"][name] for row in rows])
    for name in ("copy_rate", "edit_success", "object_lost"):
        line |= _known_mean(name, [float(row["known"][name]) for row in rows if "known" in row])
    line["aspects"] = {}
    for kind in ("preserve", "target"):
        by_name: dict[str, list[float]] = {}
        for row in rows:
            for name, value in row["aspects"].get(kind, {}).items():
                by_name.setdefault(name, []).append(value)
        line["aspects"][kind] = {name: float(np.mean(by_name[name])) for name in sorted(by_name)}
    return line


def _known_mean(name: str, values: Sequence[float]) -> dict[str, float]:
    known = [v for v in values if math.isfinite(v)]
    return {name: float(np.mean(known))} if known else {}
