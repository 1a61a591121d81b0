"""Fits what a metric's similarities mean to people: a monotone map from raw score to probability, from votes.

    python -m metric_training.calibrate --metric builtin:late --output calibration
    python -m metric_training.calibrate --metric runs/metric/best --data sywang/tpips-odd-one-out --per_aspect 500

In odd-one-out votes, the share of voters who name image k is the share who leave the pair of the other two together; in
2AFC votes the share of a candidate is that of its pair with the reference. So every pair has a similarity and a share, and
isotonic regression fits the one to the other (tpips_reward/calibration.py). How well it fits is measured on comparisons
that it was not fitted to: the set is cut in two, each half is predicted by the other's map, and the map that is kept is
fitted to all.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metric_training.data.comparison import Comparison, show_problems
from metric_training.data.procedural import KINDS, TEST_SEED
from metric_training.data.sources import load_data
from metric_training.evaluation.arguments import add_run_arguments, add_vote_arguments, check_run, data_options
from metric_training.evaluation.judges import metric_judge
from metric_training.evaluation.report import write_file
from metric_training.evaluation.runner import ImageCache, score
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.arguments import HelpFormatter, check_at_least
from tpips_reward.calibration import CALIBRATION_NAME, Calibration, MonotoneMap, probe_answers
from tpips_reward.errors import exit_on_errors
from tpips_reward.files import check_writable

#: Pairs in one step of the fit; fewer would follow the noise of five votes.
PAIRS_PER_STEP = 30
MAX_STEPS = 64
#: Pairs without which no map is fitted.
MIN_PAIRS = 4 * PAIRS_PER_STEP


@dataclass(frozen=True)
class Votes:
    """Pairs of images with what people said, N of them.

    Attributes:
        raw: (N,) similarities.
        share: (N,) shares of the voters in [0, 1].
        names: N aspects, under which maps are kept.
        phrases: N wordings in which they were asked.
        halves: (N,) 0 or 1; pairs of one comparison have the same.
    """

    raw: np.ndarray
    share: np.ndarray
    names: tuple[str, ...]
    phrases: tuple[str, ...]
    halves: np.ndarray


def collect(metric: Metric, comparisons: Sequence[Comparison], images_per_call: int, progress: bool = False) -> Votes:
    """Similarities of all pairs that were voted on. Comparisons whose images do not decode are left out.

    Raises:
        TPIPSError: the metric's answer is not finite, or no image decodes.
    """
    cache = ImageCache()
    tables = score(metric_judge("metric", metric), comparisons, cache, images_per_call, progress)
    raw, share, names, phrases, halves = [], [], [], [], []
    for number, (comparison, table) in enumerate(zip(comparisons, tables, strict=True)):
        if table is None:
            continue
        choices = table.shape[1]
        raw.append(table.double().numpy().ravel())
        share.append(comparison.votes.astype(np.float64).ravel())
        for name, phrase in zip(comparison.names, comparison.aspects, strict=True):
            names += [name] * choices
            phrases += [phrase] * choices
        halves += [number % 2] * table.numel()
    if not raw:
        raise TPIPSError(f"No comparison has images that all decode ({next(iter(cache.broken.values()), 'none')}).")
    return Votes(np.concatenate(raw), np.concatenate(share), tuple(names), tuple(phrases), np.array(halves))


def fit_map(raw: np.ndarray, share: np.ndarray, highest: float) -> MonotoneMap:
    """Isotonic regression of shares on similarities, linear between the means of its steps; 1 for two equal images.

    Args:
        raw, share: (N,) of N pairs.
        highest: the similarity of two equal images.

    Raises:
        TPIPSError: too few pairs, or shares that do not rise with the similarity.
    """
    try:
        from sklearn.isotonic import IsotonicRegression
    except ImportError:
        raise TPIPSError("Calibration needs scikit-learn: pip install 'tpips-reward[calibrate]'.") from None
    if len(raw) < MIN_PAIRS:
        raise TPIPSError(f"There are {len(raw)} pairs with votes, but a calibration needs {MIN_PAIRS}; use more votes.")
    order = np.argsort(raw, kind="stable")
    steps = np.array_split(order, min(MAX_STEPS, len(raw) // PAIRS_PER_STEP))
    weights = np.array([len(step) for step in steps], float)
    centers = np.array([raw[step].mean() for step in steps])
    means = np.array([share[step].mean() for step in steps])
    fitted = IsotonicRegression(y_min=0.0, y_max=1.0).fit_transform(centers, means, sample_weight=weights)
    knots: dict[float, tuple[float, float]] = {}  # probability -> where it lies: steps of one value are one knot
    for value in np.unique(fitted):
        members = fitted == value
        center = float(np.average(centers[members], weights=weights[members]))
        if center < highest - 1e-9 and value < 1:
            knots[float(value)] = (center, float(value))
    points = sorted([*knots.values(), (float(highest), 1.0)])
    if len(points) < 3:
        raise TPIPSError(
            "The votes do not rise with the metric's similarities, so they say nothing about what these mean; check that "
            "the metric and the votes belong together."
        )
    return MonotoneMap(tuple(x for x, _ in points), tuple(y for _, y in points))


def fit(metric: Metric, votes: Votes, per_aspect: int = 0, facts: dict[str, Any] | None = None) -> Calibration:
    """A calibration of all votes.

    Args:
        per_aspect: aspects with at least so many pairs get a map of their own; 0: none does.
        facts: kept in the file.

    Raises:
        TPIPSError: as `fit_map`, for the map of all aspects. An aspect whose own votes give none shares that map.
    """
    highest = metric.range[1]
    maps: dict[str, MonotoneMap] = {}
    phrases: dict[str, str] = {}
    for name, members in _by_name(votes).items():
        if per_aspect and len(members) >= max(per_aspect, MIN_PAIRS):
            try:
                maps[name.casefold()] = fit_map(votes.raw[members], votes.share[members], highest)
            except TPIPSError:
                continue
            phrases |= {votes.phrases[index].strip().casefold(): name.casefold() for index in members}
    overall = fit_map(votes.raw, votes.share, highest)
    return Calibration(overall, maps, phrases, tuple(probe_answers(metric)), facts or {})


def _by_name(votes: Votes) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(votes.names):
        groups[name].append(index)
    return groups


def cross_fitted(metric: Metric, votes: Votes, per_aspect: int = 0) -> np.ndarray:
    """(N,) probabilities of pairs, each by the map of the half of the comparisons to which it does not belong."""
    import torch

    predicted = np.empty(len(votes.raw))
    for half in (0, 1):
        inside = np.flatnonzero(votes.halves != half)
        part = Votes(votes.raw[inside], votes.share[inside], tuple(votes.names[i] for i in inside),
                     tuple(votes.phrases[i] for i in inside), votes.halves[inside])  # fmt: skip
        found = fit(metric, part, per_aspect // 2)
        asked = np.flatnonzero(votes.halves == half)
        predicted[asked] = found.apply(torch.from_numpy(votes.raw[asked]), [votes.phrases[i] for i in asked]).numpy()
    return predicted


def reliability(predicted: np.ndarray, share: np.ndarray, bins: int = 15) -> dict[str, Any]:
    """How far predictions are from what people said.

    Args:
        predicted, share: (N,) in [0, 1].
        bins: of equal width.

    Returns:
        "error": the mean over pairs of |mean prediction - mean share| of their bin (expected calibration error);
        "brier": mean squared difference to the shares; "bins": prediction, share and count of each bin that has pairs.
    """
    place = np.minimum((predicted * bins).astype(int), bins - 1)
    found, error = [], 0.0
    for index in np.unique(place):
        members = place == index
        said, meant = float(predicted[members].mean()), float(share[members].mean())
        found.append({"predicted": said, "share": meant, "count": int(members.sum())})
        error += abs(said - meant) * members.sum() / len(share)
    return {"error": float(error), "brier": float(((predicted - share) ** 2).mean()), "bins": found}


def diagram_png(raw: dict[str, Any], fitted: dict[str, Any], calibration: Calibration, title: str) -> bytes:
    """The reliability diagram (raw similarities taken for probabilities, and calibrated), and the maps beside it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], "k--", linewidth=1, label="perfect")
    for found, label in ((raw, "raw"), (fitted, "calibrated")):
        points = found["bins"]
        sizes = [12 + 100 * p["count"] / max(q["count"] for q in points) for p in points]
        x, y = [p["predicted"] for p in points], [p["share"] for p in points]
        (line,) = left.plot(x, y, linewidth=1, label=f"{label}: error {found['error']:.3f}, Brier {found['brier']:.3f}")
        left.scatter(x, y, s=sizes, color=line.get_color())
    left.set(xlabel="predicted", ylabel="share of the votes", title=title, xlim=(0, 1), ylim=(0, 1))
    for name, fitted_map in calibration.aspects.items():
        right.plot(fitted_map.raw, fitted_map.probability, linewidth=0.8, alpha=0.7, label=name)
    right.plot(calibration.overall.raw, calibration.overall.probability, "k", linewidth=2, label="all aspects")
    right.set(xlabel="raw similarity", ylabel="probability", title="maps", ylim=(0, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=120)
    return target.getvalue()


def as_probabilities(raw: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """Raw similarities read as if they were probabilities, as the rewards read them without a calibration: clamped
    cosines; minus distances, whose scale is arbitrary, as their rank in the set."""
    if np.isfinite(bounds[0]) and bounds[1] > 0:
        return np.clip(raw / bounds[1], 0, 1)
    return np.argsort(np.argsort(raw)) / max(1, len(raw) - 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--metric", default="builtin:late", help="anything that load_metric takes")
    add("--data", default="procedural", help=f"{', '.join(KINDS)}, a JSONL, CSV or Parquet file, a folder, a Hub id")
    add("--output", type=Path, help=f"folder for {CALIBRATION_NAME} and its diagram (default: the metric's own folder)")
    add("--per_aspect", type=int, default=0, help="aspects with so many pairs get a map of their own; 0: none (default)")
    add("--count", type=int, default=1000, help="comparisons of a procedural set")
    add_vote_arguments(parser, "train", TEST_SEED + 1, "of a procedural set; not that of the test sets")
    add_run_arguments(parser)
    add("--overwrite", action="store_true", help="replace a calibration that is there")
    return parser


@exit_on_errors("calibrate")
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = _parser().parse_args(arguments)
    check_run(options, "count")
    check_at_least(options, 0, "per_aspect")
    folder = options.output or (Path(options.metric) if Path(options.metric).is_dir() else None)
    if folder is None:
        raise TPIPSError(f"{options.metric} is no folder of yours; say with --output where its calibration belongs.")
    target = folder / CALIBRATION_NAME
    if target.exists() and not options.overwrite:
        raise TPIPSError(f"{target} is there already; give --overwrite to replace it.")
    check_writable(folder)
    data = show_problems(load_data(options.data, data_options(options, options.count)))
    metric = load_metric(options.metric, device=options.device, dtype=options.dtype)
    votes = collect(metric, data.comparisons, options.images_per_call, sys.stderr.isatty())
    before = reliability(as_probabilities(votes.raw, metric.range), votes.share)
    after = reliability(cross_fitted(metric, votes, options.per_aspect), votes.share)
    facts = {
        "metric": options.metric, "data": data.name, "task": data.task, "comparisons": len(data.comparisons),
        "pairs": len(votes.raw), "error_raw": round(before["error"], 5), "error": round(after["error"], 5),
        "brier_raw": round(before["brier"], 5), "brier": round(after["brier"], 5),
    }  # fmt: skip
    calibration = fit(metric, votes, options.per_aspect, facts)
    write_file(folder / "calibration.png", diagram_png(before, after, calibration, f"{options.metric} on {data.name}"))
    calibration.save(target)
    low, high = np.quantile(votes.raw, [0.05, 0.95])
    print(f"{len(votes.raw)} pairs of {len(data.comparisons)} comparisons; raw similarities {low:.3f} to {high:.3f}")
    print("| | calibration error | Brier |\n|---|---|---|")
    print(f"| raw | {before['error']:.4f} | {before['brier']:.4f} |")
    print(f"| calibrated, on comparisons not fitted to | {after['error']:.4f} | {after['brier']:.4f} |")
    print(f"{len(calibration.aspects)} aspects have a map of their own. Written to {target}")


if __name__ == "__main__":
    main()
