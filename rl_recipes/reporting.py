"""What an iteration's edits were like: one line of ``metrics.jsonl``."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from rl_recipes.algorithms import hacks
from rl_recipes.collecting import Batch, Edits
from rl_recipes.rewards import Rewards
from tpips_reward.errors import TPIPSError, reason
from tpips_reward.scenes import measure_edit

log = logging.getLogger(__name__)

#: Measures of known scenes, taken on one edit a group.
KNOWN = ("edit_success", "object_lost", "drift", "l1_to_ideal")


@torch.no_grad()
def edit_rows(batches: Sequence[Edits], judge: Rewards | None = None) -> list[dict[str, Any]]:
    """A dict for each edit of an iteration, those of all processes in the same order in each.

    The judge, and the measures of known scenes, look at the first edit of each group alone.
    """
    rows: list[dict[str, Any]] = []
    own = judge is not None  # where it fails, what is known of a scene must not fill in: it is on another scale
    for batch in batches:
        output, advantages = batch.output, batch.advantages.tolist() if isinstance(batch, Batch) else None
        copied = hacks.copies(batch.edits, batch.sources).tolist()
        degenerate = hacks.degenerate(batch.edits).any().tolist()
        edges = [hacks.edge_density(images).tolist() for images in (batch.edits, batch.sources)]
        change = hacks.largest_change(batch.edits, batch.sources).tolist()
        judged = _judge(batch, judge)
        if judged is None:  # a server that is down is waited for once an iteration, and not once a batch
            judge, judged = None, {}
        for i, item in enumerate(batch.drawn):
            row: dict[str, Any] = {
                "group": item.group,
                "key": item.prompt.key,
                "score": float(output.scores[i]),
                "parts": {name: float(values[i]) for name, values in output.parts.items()},
                "aspects": output.per_aspect[i],
                "terms": {name: float(values[i]) for name, values in output.terms.items()},
                "looks": {
                    "copy_rate": float(copied[i]),
                    "degenerate": float(degenerate[i]),
                    "edge_density": edges[0][i],
                    "edge_density_source": edges[1][i],
                    "pixel_change": change[i],
                },
            }
            if advantages is not None:
                row["advantage"] = advantages[i]
            if item.sample == 0:
                known = _known(item.prompt.edit, batch.edits[i])
                row |= ({k: v for k, v in known.items() if k != "judge"} if own else known) | judged.get(i, {})
            rows.append(row)
    return gather_object(rows)


def _known(edit: Any, image: torch.Tensor) -> dict[str, Any]:
    """The measures of a known scene, of which the nearness to the ideal edit is a judge that no reward knows."""
    if edit is None:
        return {}
    measures = measure_edit(edit, image)
    return {"known": {name: float(getattr(measures, _FIELD.get(name, name))) for name in KNOWN},
            "judge": 1.0 - float(measures.l1_to_ideal)}  # fmt: skip


_FIELD = {"edit_success": "success"}


def _judge(batch: Edits, judge: Rewards | None) -> dict[int, dict[str, float]] | None:
    """What the judge says of the first edit of each group; None where it fails, for training does not depend on it."""
    first = [i for i, item in enumerate(batch.drawn) if item.sample == 0]
    if judge is None or not first:
        return {}
    try:
        scores = judge(
            [batch.edits[i] for i in first], [batch.sources[i] for i in first], [batch.drawn[i].prompt for i in first]
        ).scores.tolist()
    except Exception as error:  # noqa: BLE001  whatever it is, training does not depend on it
        kind = "" if isinstance(error, TPIPSError) else f"{type(error).__name__}: "
        _say_once(f"The judge failed ({kind}{reason(error).rstrip('.')}); iterations where it does lack its judgement.")
        return None
    return {i: {"judge": score} for i, score in zip(first, scores, strict=True)}


@cache
def _say_once(sentence: str) -> None:
    log.error(sentence)


def summarise_rows(rows: Sequence[dict[str, Any]], weights: dict[str, float] | None = None) -> dict[str, Any]:
    """Means over the edits of an iteration, for one line of ``metrics.jsonl``; what is not known is left out.

    Args:
        weights: of several rewards, by name; each is then logged as ``reward/name``, not weighted.
    """
    scores = np.array([row["score"] for row in rows])
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["score"])
    line: dict[str, Any] = {
        "reward_mean": float(scores.mean()),
        "reward_std": float(scores.std()),
        "group_std": float(np.mean([np.std(v) for v in groups.values()])),
    }
    if "advantage" in rows[0]:
        largest = {group: max(abs(r["advantage"]) for r in rows if r["group"] == group) for group in groups}
        line["zero_std_share"] = float(np.mean([size == 0 for size in largest.values()]))
    for name in weights if weights and len(weights) > 1 else ():
        line |= _known_mean(f"reward/{name}", [row["parts"][name] for row in rows])
    for name in dict.fromkeys(name for row in rows for name in row["terms"]):  # a function of the user's may name others
        line |= _known_mean(f"term_{name}", [row["terms"].get(name, math.nan) for row in rows])
    for name in rows[0].get("looks", {}):
        line |= _known_mean(name, [row["looks"][name] for row in rows])
    for name in KNOWN:
        line |= _known_mean(name, [row["known"][name] for row in rows if "known" in row])
    line |= _known_mean("judge", [row["judge"] for row in rows if "judge" in row])
    line["aspects"] = {"preserve": {}, "target": {}}
    by_name: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for kind, values in row["aspects"].items():
            for name, value in values.items():
                by_name.setdefault(kind, {}).setdefault(name, []).append(value)
    for kind, found in by_name.items():
        line["aspects"][kind] = {name: float(np.mean(found[name])) for name in sorted(found)}
    return line


def _known_mean(name: str, values: Sequence[float]) -> dict[str, float]:
    known = [v for v in values if math.isfinite(v)]
    return {name: float(np.mean(known))} if known else {}
