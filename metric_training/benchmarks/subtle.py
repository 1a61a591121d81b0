"""VLM-SubtleBench as a test of sensitivity: is a pair far apart in what differs, and near in what does not?

Layout, from the data set's card (`KRAFTON/VLM-SubtleBench`) and `krafton-ai/VLM-SubtleBench` (dataset_adapters):
`data/test.jsonl` and `data/val.jsonl` with image_1, image_2, question, answer, distractors, category (one of ten kinds of
difference), domain and more. Images are paths relative to the folder, or addresses on the Hub whose part after
/resolve/main/ is that path.

The set asks questions; a metric answers none of them, so the protocol is this project's own. Each pair differs in one
category. A sensitive metric gives it a larger distance under that category's aspect than pairs that differ in something
else: for every two categories c and d, the probability that a pair of c is farther apart under the aspect of c than a
pair of d (the area under the curve, ties counted half). "sensitivity" is the mean over all c and d: 0.5 for a metric
that does not know aspects, 1 for a perfect one. Also: "rank", the mean over pairs of the share of the other aspects
under which a pair is nearer than under its own, each aspect's distances first replaced by their ranks over all pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from metric_training.benchmarks.protocol import Loaded, Settings, chunks, grouped, pairwise, require
from metric_training.benchmarks.ranking import area_under_curve
from metric_training.data.comparison import DataError, ImageSource, image_source, shortened
from metric_training.data.rows import read_rows
from metric_training.evaluation.judges import Judge
from metric_training.evaluation.statistics import standard_error

#: category → the aspect in which its pairs differ.
ASPECTS = {
    "action": "action and pose",
    "attribute": "color, size and shape of the objects",
    "emotion": "facial expression and emotion",
    "existence": "which objects are present",
    "quality": "image quality",
    "quantity": "number of objects",
    "spatial": "position of the objects",
    "state": "state and condition of the objects",
    "temporal": "moment of the event",
    "viewpoint": "camera viewpoint",
}
_MARKER = "/resolve/main/"


def load(folder: Path, settings: Settings) -> Loaded:
    """Pairs of a split (default "test"): (image, image, category, domain).

    Raises:
        DataError: no such file, or nothing usable in it; a bad row where strict.
    """
    split = settings.split or "test"
    places = (folder / "data" / f"{split}.jsonl", folder / f"{split}.jsonl")
    path = next((place for place in places if place.is_file()), places[0])
    require(path, "give the folder of VLM-SubtleBench that holds data/test.jsonl and images/ (--data).")
    rows = read_rows(path, image_root=settings.image_root or folder, strict=settings.strict)
    pairs: list[tuple[ImageSource, ImageSource, str, str]] = []
    for line, row in rows.rows:
        if settings.limit is not None and len(pairs) >= settings.limit:
            break
        try:
            category = row.get("category")
            if not isinstance(category, str) or category not in ASPECTS:
                raise DataError(f"category must be one of {', '.join(ASPECTS)}, not {shortened(repr(category))}.")
            first, second = (_image(row.get(name), name, rows.root) for name in ("image_1", "image_2"))
            pairs.append((first, second, category, str(row.get("domain") or "unknown")))
        except DataError as error:
            rows.problems.add(line, str(error))
    if len({category for _, _, category, _ in pairs}) < 2:
        reason = rows.problems.describe(3) or "the file is short"
        raise DataError(f"{path} has pairs of fewer than two categories, so nothing can be told apart ({reason}).")
    return Loaded(pairs, {"pairs": len(pairs)}, rows.problems)


def measure(judge: Judge, loaded: Loaded, settings: Settings) -> dict[str, Any]:
    """Sensitivity and rank, by category and domain."""
    scorer = pairwise(judge)
    pairs: list[tuple[ImageSource, ImageSource, str, str]] = loaded.content
    labels = np.array([category for _, _, category, _ in pairs])
    present = sorted(set(labels))
    parts = list(chunks(len(pairs), max(1, settings.images_per_call // 2)))
    distances = np.empty((len(present), len(pairs)))
    for part in tqdm(parts, desc=judge.name, disable=not settings.progress, leave=False):
        images = [image.load() for k in part for image in pairs[k][:2]]
        asked = [(2 * i, 2 * i + 1, ASPECTS[name]) for name in present for i in range(len(part))]
        scores = scorer.similarities(images, asked).numpy()
        distances[:, part.start : part.stop] = -scores.reshape(len(present), len(part))
    members = {name: labels == name for name in present}
    curves = {
        name: [area_under_curve(distances[k, members[name]], distances[k, members[d]]) for d in present if d != name]
        for k, name in enumerate(present)
    }
    ranks = np.stack([_midranks(row) for row in distances])  # comparable between aspects
    own = ranks[[present.index(label) for label in labels], np.arange(len(pairs))]
    beaten = ((ranks < own).sum(0) + ((ranks == own).sum(0) - 1) / 2) / (len(present) - 1)
    by_category = {
        name: {"sensitivity": float(np.mean(curves[name])), "rank": float(beaten[members[name]].mean()),
               "examples": int(members[name].sum())}
        for name in present
    }  # fmt: skip
    return {
        "figures": {"sensitivity": float(np.mean([np.mean(c) for c in curves.values()])), "rank": float(beaten.mean())},
        "errors": {"rank": standard_error(beaten)},
        "groups": {"category": by_category, "domain": grouped({"rank": beaten}, [domain for _, _, _, domain in pairs])},
    }


def _midranks(values: np.ndarray) -> np.ndarray:
    """(N,) → (N,) share of the values below each, ties counted half."""
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / (2 * len(values))


def _image(value: Any, name: str, root: Path | None) -> ImageSource:
    if isinstance(value, str) and _MARKER in value:
        value = value.split(_MARKER, 1)[1]
    if not isinstance(value, str | ImageSource):
        raise DataError(f"{name} must be a path, not {value!r}.")
    image = image_source(value, root)
    image.check()
    return image
