"""Runs judges over a data set; images are decoded and encoded once for each distinct file."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from metric_training.data.comparison import Comparison, Data, DataError, ImageSource
from metric_training.evaluation.judges import Judge, ReportingJudge
from metric_training.evaluation.statistics import Examples, describe_examples, figures
from tpips_reward import TPIPSError

DEFAULT_IMAGES_PER_CALL = 192
DEFAULT_CACHE_BYTES = 2 * 1024**3


class ImageCache:
    """Decoded images by key, the least recently used ones dropped beyond a size.

    Args:
        limit: bytes to keep.

    Attributes:
        broken: key → reason of every image that did not decode.
        decoded: how many times a file was decoded.
    """

    def __init__(self, limit: int = DEFAULT_CACHE_BYTES) -> None:
        self.limit = limit
        self.broken: dict[str, str] = {}
        self.decoded = 0
        self._images: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0

    def get(self, source: ImageSource) -> Tensor | None:
        """The image, or None where it does not decode."""
        if source.key in self._images:
            self._images.move_to_end(source.key)
            return self._images[source.key]
        if source.key in self.broken:
            return None
        try:
            image = source.load()
        except DataError as error:
            self.broken[source.key] = str(error)
            return None
        self.decoded += 1
        self._images[source.key] = image
        self._bytes += image.nbytes
        while self._bytes > self.limit and len(self._images) > 1:
            self._bytes -= self._images.popitem(last=False)[1].nbytes
        return image


def batches(comparisons: Sequence[Comparison], images_per_call: int) -> list[list[int]]:
    """Indices of comparisons for each call of a judge, so that those with a common file are in one call.

    Comparisons that hang together by common files stay together as long as they have at most ``images_per_call``
    distinct ones. Larger sets of them are cut; a file on both sides of a cut is encoded once a side.

    Returns:
        Every index once.
    """
    users: dict[str, list[int]] = {}
    for index, comparison in enumerate(comparisons):
        for image in comparison.images:
            users.setdefault(image.key, []).append(index)
    result: list[list[int]] = []
    current: list[int] = []
    keys: set[str] = set()
    seen: set[int] = set()
    for start in range(len(comparisons)):
        if start in seen:
            continue
        group = _connected(start, comparisons, users, seen)
        group_keys = {image.key for index in group for image in comparisons[index].images}
        if current and len(keys | group_keys) > images_per_call:
            result.append(current)
            current, keys = [], set()
        for index in group:
            more = {image.key for image in comparisons[index].images}
            if current and len(keys | more) > images_per_call:
                result.append(current)
                current, keys = [], set()
            current.append(index)
            keys |= more
    return [*result, current] if current else result


def _connected(start: int, comparisons: Sequence[Comparison], users: dict[str, list[int]], seen: set[int]) -> list[int]:
    """All comparisons reached from one over common files, near ones first."""
    seen.add(start)
    order, waiting = [], deque([start])
    while waiting:
        index = waiting.popleft()
        order.append(index)
        for image in comparisons[index].images:
            for other in users[image.key]:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
    return order


def score(
    judge: Judge, comparisons: Sequence[Comparison], cache: ImageCache, images_per_call: int, progress: bool = False
) -> list[Tensor | None]:
    """Scores of each comparison, (A, n); None where one of its images does not decode.

    Raises:
        TPIPSError: the judge's own, scores of a wrong shape, and NaN from a judge that may not abstain.
    """
    results: list[Tensor | None] = [None] * len(comparisons)
    for batch in tqdm(batches(comparisons, images_per_call), desc=judge.name, disable=not progress, leave=False):
        images = {image.key: cache.get(image) for index in batch for image in comparisons[index].images}
        usable = [i for i in batch if all(images[image.key] is not None for image in comparisons[i].images)]
        if not usable:
            continue
        loaded = {key: image for key, image in images.items() if image is not None}
        members = [comparisons[index] for index in usable]
        for index, table in zip(usable, judge(members, loaded), strict=True):
            if table.shape != comparisons[index].votes.shape:
                raise TPIPSError(
                    f"{judge.name} gave scores of shape {tuple(table.shape)} for {comparisons[index].key}, whose votes "
                    f"have {comparisons[index].votes.shape}."
                )
            if not bool(table.isfinite().all()) and not getattr(judge, "may_abstain", False):
                raise TPIPSError(
                    f"{judge.name} gave a similarity that is not finite on {comparisons[index].key}; nothing was scored."
                )
            results[index] = table
    return results


def answered_only(comparison: Comparison, answered: np.ndarray) -> Comparison:
    """The comparison with those of its aspects that every judge answered.

    Args:
        comparison: with A aspects.
        answered: (A,) bool, at least one True.
    """
    if answered.all():
        return comparison
    rows = np.flatnonzero(answered)
    return replace(
        comparison,
        aspects=tuple(comparison.aspects[row] for row in rows),
        names=tuple(comparison.names[row] for row in rows),
        votes=comparison.votes[rows],
    )


def examples_of(comparisons: Sequence[Comparison]) -> Examples:
    """One entry for each (comparison, aspect), in order."""
    counts = [len(c.aspects) for c in comparisons]
    return Examples(
        votes=np.concatenate([c.votes for c in comparisons]),
        names=tuple(name for c in comparisons for name in c.names),
        sources=tuple(c.source for c in comparisons for _ in c.aspects),
        clusters=np.repeat(np.arange(len(comparisons)), counts),
    )


def evaluate(
    judges: Sequence[Callable[[], Judge]],
    data: Data,
    *,
    images_per_call: int = DEFAULT_IMAGES_PER_CALL,
    cache: ImageCache | None = None,
    draws: int = 1000,
    seed: int = 0,
    strict: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Figures of several judges on one data set, side by side.

    Args:
        judges: called one after the other, so that only one model is in memory at a time.
        data: comparisons.
        images_per_call: distinct images that a judge gets at once.
        cache: of decoded images, shared by all judges.
        draws, seed: of the bootstrap.
        strict: an image that does not decode stops the evaluation; otherwise its comparisons are left out for all
            judges.
        progress: show a bar a judge.

    Returns:
        {"data": see `statistics.describe_examples`, with "name", "task", "dropped", "problems", "undecodable" and
        "unanswered" (examples without an answer, by judge; left out for all judges); "metrics": {judge: see
        `statistics.figures`, with the judge's own "facts" where it has some}}.

    Raises:
        TPIPSError: a judge's error, two judges of one name, nothing left to score, an undecodable image where strict.
    """
    cache = cache or ImageCache()
    tables: dict[str, list[Tensor | None]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for make in judges:
        judge = make()
        if judge.name in tables:
            raise TPIPSError(f"{judge.name} is there twice; give each metric once.")
        tables[judge.name] = score(judge, data.comparisons, cache, images_per_call, progress)
        facts[judge.name] = judge.facts() if isinstance(judge, ReportingJudge) else {}
        del judge
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if cache.broken and strict:
            raise DataError(f"{data.name}: {next(iter(cache.broken.values()))}")
    # every judge sees the same files, so that all leave out the same comparisons
    decoded = [k for k in range(len(data.comparisons)) if all(rows[k] is not None for rows in tables.values())]
    if not decoded:
        reason = next(iter(cache.broken.values()), "none is there")
        raise DataError(f"{data.name}: no comparison has images that all decode ({reason})")
    # and an aspect that one of them did not answer counts for none, so that all are measured on the same examples
    answers = {name: [_answered(rows[k]) for k in decoded] for name, rows in tables.items()}
    by_all = [np.logical_and.reduce(parts) for parts in zip(*answers.values(), strict=True)] if tables else []
    unanswered = {name: sum(int((~part).sum()) for part in parts) for name, parts in answers.items()}
    usable = [(k, by_all[i] if tables else np.ones(len(data.comparisons[k].aspects), bool)) for i, k in enumerate(decoded)]
    usable = [(k, rows) for k, rows in usable if rows.any()]
    if not usable:
        silent = ", ".join(f"{name} left {count} examples unanswered" for name, count in unanswered.items() if count)
        raise DataError(f"{data.name}: no example has an answer of every metric; {silent}.")
    examples = examples_of([answered_only(data.comparisons[k], rows) for k, rows in usable])
    return {
        "data": {
            "name": data.name,
            "task": data.task,
            **describe_examples(examples),
            "dropped": {what: count for what, count in data.dropped.items() if count},
            "problems": [[line, message] for line, message in data.problems.found],
            "undecodable": sorted(cache.broken),
            "unanswered": {name: count for name, count in unanswered.items() if count},
        },
        "metrics": {
            name: figures(_stacked(rows, usable), examples, draws=draws, seed=seed)
            | ({"facts": facts[name]} if facts[name] else {})
            for name, rows in tables.items()
        },
    }


def _answered(table: Tensor | None) -> np.ndarray:
    """(A, n) scores → (A,) bool."""
    return np.zeros(0, bool) if table is None else table.isfinite().all(dim=1).numpy()


def _stacked(rows: list[Tensor | None], usable: list[tuple[int, np.ndarray]]) -> np.ndarray:
    found = [(rows[index], answered) for index, answered in usable]
    return torch.cat([table[torch.from_numpy(answered)] for table, answered in found if table is not None]).numpy()
