"""QARE-Bench, the synthetic part: object, background and style of 48 images that combine 4 x 4 x 3 of them.

Layout, from the data set's card (`sudeepk/QARE-Bench`) and the TF-QARE repository (README, eval_ais.py, and the loader
of the retrieval evaluation): PNG files {object}_{background}_{style}.png, in `AttriVerse/A/` or the folder itself.

Protocols, as published there:
- mAP: every image under every attribute is a query; the candidates are all images under all three attributes (144, the
  query among them), of which those are relevant that share the query's value and are seen under the same attribute.
- AIS (average intra-image similarity): cosine of one image's embeddings under two attributes, mean over the three pairs
  and the images. Lower is better: the attributes are told apart.
Both need embeddings. "mAP of one attribute" has the 47 other images under the query's attribute as candidates, so it is
there for every metric and gives nothing for the query itself. The aspects are the paper's (§B.1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metric_training.benchmarks.protocol import Loaded, Settings, chunks, load_images, mean_figures, pairwise
from metric_training.benchmarks.ranking import average_precision
from metric_training.data.comparison import DataError, ImageSource, Problems
from metric_training.evaluation.judges import Judge

#: attribute → the aspect that stands for it, in the order of the names in a file's name.
ASPECTS = {"object": "main subject type", "background": "background scene", "style": "artistic medium"}


def load(folder: Path, settings: Settings) -> Loaded:
    """Images and their values; files whose names have other than three parts are listed as problems.

    Raises:
        DataError: no folder, or fewer than two images.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; give QARE-Bench's, or its AttriVerse/A (--data).")
    root = next((path for path in (folder / "AttriVerse" / "A", folder / "A") if path.is_dir()), folder)
    problems = Problems(str(root), settings.strict, unit="file")
    found: list[tuple[ImageSource, tuple[str, ...]]] = []
    for number, path in enumerate(sorted(root.glob("*.png")), 1):
        values = tuple(path.stem.split("_"))
        if len(values) == len(ASPECTS) and all(values):
            found.append((ImageSource(str(path), path), values))
        else:
            problems.add(number, f"{path.name} is not called {{object}}_{{background}}_{{style}}.png.")
    found = found[: settings.limit]
    if len(found) < 2:
        reason = problems.describe(3) or "it has no PNG files"
        raise DataError(f"{root} holds fewer than two images of QARE-Bench ({reason}).")
    return Loaded(found, {"images": len(found)}, problems)


def measure(judge: Judge, loaded: Loaded, settings: Settings) -> dict[str, Any]:
    """mAP and AIS (lower is better) where there are embeddings, and the mAP of one attribute."""
    scorer = pairwise(judge)
    sources = [source for source, _ in loaded.content]
    values = np.array([names for _, names in loaded.content])
    count, kinds = len(sources), len(ASPECTS)
    same = np.stack([values[:, k, None] == values[None, :, k] for k in range(kinds)])  # (K, N, N)
    figures: dict[str, np.ndarray] = {}
    if scorer.has_embedding:
        aspects = list(ASPECTS.values())
        parts = chunks(count, settings.images_per_call)
        vectors = torch.cat([scorer.embeddings(load_images([sources[i] for i in part]), aspects) for part in parts])
        table = torch.einsum("iad,jbd->aibj", vectors, vectors).numpy()  # attribute and image of query, of candidate
        within = np.stack([table[k, :, k] for k in range(kinds)])
        relevant = np.zeros((kinds, count, kinds, count), bool)
        for k in range(kinds):
            relevant[k, :, k] = same[k]
        figures["mAP"] = _precisions(table.reshape(kinds * count, -1), relevant.reshape(kinds * count, -1))
        figures["AIS"] = _intra_image(vectors)
    else:
        within = _within(scorer, sources)
    others = ~np.eye(count, dtype=bool)
    rows = [(within[k, i][others[i]], same[k, i][others[i]]) for k in range(kinds) for i in range(count)]
    usable = [(k // count, scores, hits) for k, (scores, hits) in enumerate(rows) if hits.any()]
    if not usable:
        raise DataError("No two images of QARE-Bench share an object, a background or a style; is the folder complete?")
    alone = np.array([average_precision(scores, hits) for _, scores, hits in usable])
    figures["mAP of one attribute"] = alone
    groups = {
        name: {"mAP of one attribute": float(alone[[k for k, (a, *_) in enumerate(usable) if a == kind]].mean())}
        for kind, name in enumerate(ASPECTS)
        if any(a == kind for a, *_ in usable)
    }
    if "mAP" in figures:
        for kind, name in enumerate(ASPECTS):
            groups.setdefault(name, {})["mAP"] = float(figures["mAP"][kind * count : (kind + 1) * count].mean())
    return mean_figures(figures) | {"groups": {"attribute": groups}}


def _within(scorer: Any, sources: list[ImageSource]) -> np.ndarray:
    """(K, N, N) similarities under each attribute, by pairs; NaN on the diagonal."""
    images = load_images(sources)
    table = np.full((len(ASPECTS), len(images), len(images)), np.nan)
    places = [(i, j) for i in range(len(images)) for j in range(i)]
    for kind, aspect in enumerate(ASPECTS.values()):
        scores = scorer.similarities(images, [(i, j, aspect) for i, j in places]).numpy()
        for (i, j), score in zip(places, scores, strict=True):
            table[kind, i, j] = table[kind, j, i] = score
    return table


def _precisions(table: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    # equal vectors differ in their last digit, which must not decide a tie
    return np.array([average_precision(row.round(9), hits) for row, hits in zip(table, relevant, strict=True)])


def _intra_image(vectors: Tensor) -> np.ndarray:
    """(N, K, D) unit vectors → (N,) mean cosine of two attributes."""
    first, second = torch.triu_indices(vectors.shape[1], vectors.shape[1], offset=1)
    return (vectors[:, first] * vectors[:, second]).sum(-1).mean(1).numpy()
