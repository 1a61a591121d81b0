"""From measured rows to the report's content: one dict of plain values, from which every file is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tpips_reward.evaluation.agreement import agreement, ranking_agreement
from tpips_reward.evaluation.controls import CONTROLS, is_control
from tpips_reward.evaluation.differences import Resampling, differences_within, overall_differences
from tpips_reward.evaluation.measures import FORMULA, MEASURES, Measured
from tpips_reward.evaluation.rows import PROBLEMS, Dataset, Problem
from tpips_reward.evaluation.statistics import Interval, bootstrap_weights, mean_intervals


def summarize(
    dataset: Dataset, measured: Measured, sources: dict[str, str], problems: Sequence[Problem], how: Resampling
) -> dict[str, Any]:
    """Everything in the report that follows from the scores.

    Args:
        dataset: with the rows that were to be scored.
        measured: of rows that have scores, with models and controls as columns.
        sources: row's key -> digest of its source; resampling draws sources.
        problems: all of them.
        how: the settings of the resampling.
    """
    rng = np.random.default_rng(how.seed)
    clusters, count = _clusters(measured, sources)
    weights = bootstrap_weights(rng, count, how.resamples)
    shared = _shared_rows(measured, dataset.models)
    paired = () if dataset.anonymous else dataset.models  # candidates of one place are not one editor
    return {
        "format": 1,
        "name": dataset.name,
        "formula": FORMULA,
        "anonymous": dataset.anonymous,
        "counts": _counts(dataset, measured, count, shared, problems),
        "models": _models(dataset, measured, clusters, weights, shared, how),
        "categories": _categories(measured, clusters, weights, how),
        "aspects": _aspects(measured, clusters, weights, how),
        "comparisons": overall_differences(measured, paired, clusters, weights, how),
        "differences": differences_within(measured, paired, clusters, weights, how),
        "votes": _votes(dataset, measured, sources, rng, how),
        "problems": {
            "counts": dict(Counter(problem.kind for problem in problems)),
            "meaning": {kind: PROBLEMS[kind] for kind in dict.fromkeys(problem.kind for problem in problems)},
            "list": [asdict(problem) for problem in problems],
        },
        "rows": _rows(measured),
    }


def _clusters(measured: Measured, sources: dict[str, str]) -> tuple[np.ndarray, int]:
    names: dict[str, int] = {}
    index = [names.setdefault(sources[row.key], len(names)) for row in measured.rows]
    return np.array(index, dtype=np.int64), len(names)


def _shared_rows(measured: Measured, models: Sequence[str]) -> np.ndarray:
    """(R,) bool: rows that every model has a score for; only on these are means of several models comparable."""
    columns = [measured.column(model) for model in models]
    there = [~np.isnan(measured.values[name][:, columns]) for name in ("preservation", "change")]
    return (there[0] | there[1]).all(axis=1)


def _counts(
    dataset: Dataset, measured: Measured, sources: int, shared: np.ndarray, problems: Sequence[Problem]
) -> dict[str, int]:
    scored = sum(len(row.outputs) for row in measured.rows)
    rows = sum(bool(row.outputs) for row in measured.rows)  # of the others only the controls have scores
    expected = dataset.total_rows * len(dataset.models)
    if dataset.anonymous:  # a row has as many candidates as it has
        expected = sum(len(row.outputs) for row in dataset.rows)
    return {
        "rows": dataset.total_rows,
        "rows_scored": rows,
        "rows_left_out": dataset.total_rows - rows,
        "rows_all_models_have": int(shared.sum()),
        "sources": sources,
        "models": len(dataset.models),
        "outputs_expected": expected,
        "outputs_scored": scored,
        "rows_with_proposed_aspects": sum(bool(row.proposed) for row in measured.rows),
        "problems": len(problems),
    }


def _models(
    dataset: Dataset, measured: Measured, clusters: np.ndarray, weights: np.ndarray, shared: np.ndarray, how: Resampling
) -> list[dict[str, Any]]:
    stacked = np.concatenate([measured.values[name] for name in MEASURES], axis=1)
    own = mean_intervals(stacked, clusters, weights, how.level)
    common = mean_intervals(np.where(shared[:, None], stacked, np.nan), clusters, weights, how.level)
    width = len(measured.columns)
    models = []
    for column, model in enumerate(measured.columns):
        scored = sum(model in row.outputs for row in measured.rows)
        entry: dict[str, Any] = {"model": model, "control": is_control(model)}
        if not is_control(model):
            expected = scored if dataset.anonymous else dataset.total_rows
            entry |= {"expected": expected, "scored": scored, "missing": expected - scored}
        for position, name in enumerate(MEASURES):
            entry[name] = asdict(own[position * width + column])
            entry[f"{name}_common"] = asdict(common[position * width + column])
        models.append(entry)
    # best first, on the rows that all have; controls after the models
    return sorted(models, key=lambda entry: (entry["control"], -_rank_value(entry)))


def _rank_value(entry: dict[str, Any]) -> float:
    if entry["control"]:
        return -CONTROLS.index(entry["model"])
    for name in ("overall_common", "overall"):
        if entry[name]["mean"] is not None:
            return entry[name]["mean"]
    return -math.inf


def _categories(measured: Measured, clusters: np.ndarray, weights: np.ndarray, how: Resampling) -> list[dict[str, Any]]:
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(measured.rows):
        groups.setdefault(row.category, []).append(index)
    result = []
    for category, members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        cells: dict[str, dict[str, Any]] = {model: {} for model in measured.columns}
        for name in MEASURES:
            intervals = _within(measured.values[name][members], clusters[members], weights, how)
            for model, interval in zip(measured.columns, intervals, strict=True):
                cells[model][name] = asdict(interval)
        result.append({"category": category, "rows": len(members), "cells": cells})
    return result


def _aspects(measured: Measured, clusters: np.ndarray, weights: np.ndarray, how: Resampling) -> list[dict[str, Any]]:
    result = []
    for role, tables in measured.aspects.items():
        for aspect, table in tables.items():
            members = np.flatnonzero(~np.isnan(table).all(axis=1))
            intervals = _within(table[members], clusters[members], weights, how)
            cells = {model: asdict(interval) for model, interval in zip(measured.columns, intervals, strict=True)}
            result.append({"role": role, "aspect": aspect, "rows": len(members), "cells": cells})
    return sorted(result, key=lambda entry: (entry["role"], -entry["rows"], entry["aspect"]))


def _within(values: np.ndarray, clusters: np.ndarray, weights: np.ndarray, how: Resampling) -> list[Interval]:
    """Intervals over a part of the rows; only the clusters that occur there are carried along."""
    present, index = np.unique(clusters, return_inverse=True)
    return mean_intervals(values, index, weights[:, present], how.level)


def _votes(
    dataset: Dataset, measured: Measured, sources: dict[str, str], rng: np.random.Generator, how: Resampling
) -> dict[str, Any] | None:
    if not dataset.votes:
        return None
    place = {row.key: index for index, row in enumerate(measured.rows)}

    def score(key: str, model: str, measure: str) -> float | None:
        if key not in place:
            return None
        value = float(measured.values[measure][place[key], measured.column(model)])
        return None if math.isnan(value) else value

    overall = [vote for vote in dataset.votes if vote.dimension == "overall"]
    tau = None
    if not dataset.anonymous:
        means = [_mean(measured.values["overall"][:, measured.column(model)]) for model in dataset.models]
        tau = ranking_agreement(overall, dataset.models, means)
    return {
        "rule": dataset.vote_rule,
        "agreement": agreement(dataset.votes, score, sources, dataset.vote_rule, rng, how.resamples, how.level),
        "kendall_tau_of_models": tau,
    }


def _mean(values: np.ndarray) -> float | None:
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else None


def _rows(measured: Measured) -> list[dict[str, Any]]:
    result = []
    for index, row in enumerate(measured.rows):
        outputs: dict[str, Any] = {}
        for column, model in enumerate(measured.columns):
            values = {name: _number(measured.values[name][index, column]) for name in MEASURES}
            roles = {}
            for role, names in (("preserve", row.preserve), ("target", row.target)):
                found = {name: _number(measured.aspects[role][name][index, column]) for name in names
                         if name in measured.aspects[role]}  # fmt: skip
                roles[role] = {name: value for name, value in found.items() if value is not None}
            if not any(roles.values()):
                continue
            label = row.outputs[model].label if model in row.outputs else None
            outputs[model] = {"file": label, **values, **roles}
        result.append(
            {
                "key": row.key,
                "category": row.category,
                "instruction": row.instruction,
                "source": row.source.label,
                "preserve": list(row.preserve),
                "target": list(row.target),
                "proposed": sorted(row.proposed),
                "outputs": outputs,
            }
        )
    return result


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
