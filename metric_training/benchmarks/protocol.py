"""What every benchmark is: a loader for its own layout, and a protocol that turns a metric into figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from metric_training.data.comparison import DataError, ImageSource, Problems
from metric_training.evaluation.judges import Judge, PairwiseJudge
from metric_training.evaluation.runner import DEFAULT_IMAGES_PER_CALL
from metric_training.evaluation.statistics import standard_error
from tpips_reward import TPIPSError


@dataclass(frozen=True)
class Settings:
    """How a benchmark is read and run.

    Attributes:
        split: where it has several; None: the one that its authors report.
        image_root: where its images are, if not in the folder itself.
        strict: stop at the first bad row.
        limit: at most so many queries, pairs or comparisons; None: all.
        images_per_call: distinct images that a metric gets at once.
        draws: of the bootstrap, where there is one.
        query: EDIR's query, see `edir`.
        progress: show a bar.
    """

    split: str | None = None
    image_root: str | None = None
    strict: bool = False
    limit: int | None = None
    images_per_call: int = DEFAULT_IMAGES_PER_CALL
    draws: int = 1000
    query: str = "text"
    progress: bool = False


@dataclass(eq=False)
class Loaded:
    """A benchmark's content.

    Attributes:
        content: what its protocol takes.
        size: counts for the report ("queries": 2000).
        problems: bad rows.
    """

    content: Any
    size: dict[str, int]
    problems: Problems = field(default_factory=lambda: Problems("benchmark"))


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        name: as the command takes it.
        title: for reports.
        about: one sentence on the protocol, for reports.
        load: folder and settings → content; raises DataError where the layout does not fit.
        measure: judge, content and settings → {"figures": {measure: number}, "errors": {measure: standard error},
            "groups": {kind of group: {group: {measure: number}}}}.
    """

    name: str
    title: str
    about: str
    load: Callable[[Path, Settings], Loaded]
    measure: Callable[[Judge, Loaded, Settings], dict[str, Any]]


def pairwise(judge: Judge) -> PairwiseJudge:
    """The judge, where it gives similarities of two images.

    Raises:
        TPIPSError: it sees three images at once, or may leave pairs without an answer.
    """
    if not isinstance(judge, PairwiseJudge) or judge.may_abstain:
        raise TPIPSError(
            f"{judge.name} cannot run this benchmark, which needs a similarity of every two images; give a metric or a "
            "baseline such as pixel_l2 or dreamsim."
        )
    return judge


def load_images(sources: Sequence[ImageSource]) -> list[Tensor]:
    """Decodes images; one that does not open ends the run, since a gallery without it would be easier.

    Raises:
        DataError: naming the file.
    """
    return [source.load() for source in sources]


def chunks(count: int, size: int) -> Iterator[range]:
    """0…count−1 in parts of at most ``size``."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def mean_figures(values: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """{"figures": means, "errors": standard errors over the entries} of (N,) arrays by measure."""
    return {
        "figures": {name: float(rows.mean()) for name, rows in values.items()},
        "errors": {name: standard_error(rows) for name, rows in values.items()},
    }


def grouped(values: dict[str, np.ndarray], labels: Sequence[str]) -> dict[str, dict[str, float]]:
    """Means by label, the most frequent first, with the count as "examples"."""
    names, index, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    order = sorted(range(len(names)), key=lambda k: (-counts[k], names[k]))
    return {
        str(names[k]): {name: float(rows[index == k].mean()) for name, rows in values.items()}
        | {"examples": int(counts[k])}
        for k in order
    }


def require(path: Path, what: str) -> Path:
    """The path, where it exists.

    Raises:
        DataError: saying what was expected there.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; {what}")
    return path


def image_index(root: Path, suffixes: Sequence[str] = (".jpg", ".png")) -> dict[str, Path]:
    """All images below a folder by file name; the first in sorted order where a name is there twice."""
    found: dict[str, Path] = {}
    for path in sorted(root.rglob("*")):
        if path.suffix.casefold() in suffixes:
            found.setdefault(path.name, path)
    return found
