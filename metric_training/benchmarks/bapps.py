"""BAPPS, 2AFC part (LPIPS): which of two distortions of a patch is nearer to it, without an aspect.

Layout, from the README and loader of `richzhang/PerceptualSimilarity` (data/dataset/twoafc_dataset.py): each subset
(val: traditional, cnn, superres, deblur, color, frameinterp) is a folder with `ref/`, `p0/`, `p1/` (PNG) and `judge/`
(NumPy files with one number, the share of people who preferred p1), paired by their sorted names. The 2AFC score is the
share of people who agree with the metric, equal distances counted half. The aspect is "overall" (paper, §B.1, table 3).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from metric_training.benchmarks.protocol import Loaded, Settings
from metric_training.data.comparison import Comparison, Data, DataError, ImageSource, Problems

_PARTS = ("ref", "p0", "p1")


def load(folder: Path, settings: Settings) -> Loaded:
    """The comparisons of all subsets below a folder (`2afc`, `2afc/val`, or one subset); sources are their names.

    ``settings.split`` is "val" by default, where the folder holds several.

    Raises:
        DataError: no subset, or parts of it that do not pair; a bad judgement where strict.
    """
    subsets = _subsets(folder, settings.split or "val")
    problems = Problems(str(folder), settings.strict, unit="comparison")
    data = Data("BAPPS", "two_afc", [], problems)
    number = 0
    for subset in subsets:
        for name, images, judge in _members(subset):
            number += 1
            if settings.limit is not None and len(data.comparisons) >= settings.limit:
                break
            try:
                share = _share(judge)
            except DataError as error:
                problems.add(number, str(error))
                continue
            first, second, third = (ImageSource(str(path), path) for path in images)
            votes = np.array([[1 - share, share]], np.float32)
            key = f"{subset.name}/{name}"
            data.comparisons.append(
                Comparison(key, "two_afc", (first, second, third), ("overall",), votes, source=subset.name)
            )
    data.require_any()
    return Loaded(data, {"triplets": len(data.comparisons), "subsets": len(subsets)}, problems)


def _subsets(folder: Path, split: str) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; give BAPPS' 2afc folder, or one subset of it (--data).")
    found = sorted(path.parent for path in folder.rglob("judge") if path.is_dir())
    if folder / "judge" not in [path / "judge" for path in found] and len({p.parent for p in found}) > 1:
        found = [path for path in found if path.parent.name == split]
    if not found:
        raise DataError(f"{folder} holds no subset of BAPPS ({', '.join((*_PARTS, 'judge'))}) in the split {split!r}.")
    return found


def _members(subset: Path) -> list[tuple[str, list[Path], Path]]:
    """(name, [ref, p0, p1], judgement) of a subset."""
    columns = [sorted((subset / part).glob("*.png")) for part in _PARTS] + [sorted((subset / "judge").glob("*.npy"))]
    counts = {part: len(files) for part, files in zip((*_PARTS, "judge"), columns, strict=True)}
    if len(set(counts.values())) != 1:
        described = ", ".join(f"{count} in {part}" for part, count in counts.items())
        raise DataError(f"{subset} does not pair by sorted names: {described} files; is the download complete?")
    members = []
    for *images, judge in zip(*columns, strict=True):
        if len({path.stem for path in (*images, judge)}) != 1:
            raise DataError(f"{subset} does not pair by sorted names: {judge.name} meets {images[0].name}.")
        members.append((judge.stem, list(images), judge))
    return members


def _share(path: Path) -> float:
    try:
        value = np.load(path, allow_pickle=False)
        share = float(np.asarray(value).reshape(()))
    except Exception as error:  # numpy raises several kinds for a damaged file
        reason = " ".join(str(error).split())[:150]
        raise DataError(f"the judgement {path} must be a NumPy file with one number ({reason}).") from error
    if not 0 <= share <= 1:
        raise DataError(f"the judgement {path} must be a share in [0, 1], not {share}.")
    return share
