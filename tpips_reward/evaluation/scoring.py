"""Rows and models -> similarities: the one place where an evaluation calls a metric."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tpips_reward.answers import checked_similarities, name_comparison
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.cache import Known, ScoreCache
from tpips_reward.evaluation.controls import COPY, NOISE, OTHER, noise_image, other_sources
from tpips_reward.evaluation.image_files import decode, digest, resized
from tpips_reward.evaluation.rows import Problem, Row
from tpips_reward.rewards.reward import PairMetric

Progress = Callable[[int, int], None]


@dataclass
class Scores:
    """Similarities to the source, and how they were had.

    Attributes:
        values: row's key -> model or control -> aspect -> f(output, source | aspect).
        sources: row's key -> digest of its source; rows of one source are no independent samples.
        problems: images that could not be decoded, aspects that the metric refused.
        measured, cached: numbers of (output, aspect) pairs.
        images: distinct images given to the metric, counted a call.
        seconds: spent in all.
    """

    values: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    measured: int = 0
    cached: int = 0
    images: int = 0
    seconds: float = 0.0


@dataclass
class _Job:
    """One row, with what is asked of it. `outputs`: name -> digest, or a control's stand-in for one."""

    row: Row
    source: str
    content: bytes
    other: Row | None
    outputs: dict[str, str] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)


def score_rows(
    rows: Sequence[Row],
    metric: PairMetric,
    *,
    controls: bool = True,
    cache: ScoreCache | None = None,
    sizes: str = "resize",
    batch_images: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> Scores:
    """Measures every output of every row against its source, in all the row's aspects.

    A source is encoded once for all models and aspects of its rows in a batch, an output once for all its aspects.

    Args:
        rows: with unique keys; rows without aspects get no scores.
        metric: anything with `similarity_pairs`; `tpips_reward.load_metric` gives one.
        controls: also score a copy of the source, another row's source, and noise (see `controls`).
        cache: what was measured before, and where it is kept; None measures everything.
        sizes: "resize" brings outputs of another size to their source's, "keep" leaves them as they are.
        batch_images: images in one call of the metric, about.
        seed: of the noise.
        progress: called with (rows done, rows) after every batch.

    Raises:
        NotFinite: the metric's answer to a pair; it names source, output and aspect, and its position counts in the batch.
        TPIPSError: a setting is wrong, the metric's answer is not one number a pair, or the cache cannot be written. A
            single bad image is no error: it is listed, and its scores are missing.
    """
    if sizes not in ("resize", "keep"):
        raise TPIPSError(f"Outputs of another size are scored by 'resize' or 'keep', not {sizes!r}.")
    if batch_images < 2:
        raise TPIPSError(f"batch_images is {batch_images}; a batch holds a source and an output at least, so 2.")
    begin = time.perf_counter()
    store = cache if cache is not None else ScoreCache(None, "")
    scores = Scores()
    usable = _usable(rows, metric, scores)
    jobs = _jobs(usable, controls, seed, sizes, scores)
    done = len(rows) - len(jobs)
    for batch in _batches(jobs, batch_images):
        _score_batch(batch, metric, store, sizes, seed, scores)
        done += len(batch)
        if progress is not None:
            progress(done, len(rows))
    scores.problems += store.problems
    scores.seconds = time.perf_counter() - begin
    return scores


def _usable(rows: Sequence[Row], metric: PairMetric, scores: Scores) -> list[Row]:
    """Rows with aspects that the metric takes."""
    check = getattr(metric, "check_aspect", None)
    refused: dict[str, str | None] = {}
    kept = []
    for row in rows:
        for aspect in row.aspects:
            if aspect not in refused:
                refused[aspect] = _refusal(aspect, check)
        bad = [refused[aspect] for aspect in row.aspects if refused.get(aspect)]
        scores.problems += [Problem("bad_aspects", str(text), row.key) for text in bad]
        if row.aspects and not bad:
            kept.append(row)
    return kept


def _refusal(aspect: str, check: Callable[[str], None] | None) -> str | None:
    try:
        if check is not None:
            check(aspect)
    except TPIPSError as error:
        return str(error)
    return None


def _jobs(rows: Sequence[Row], controls: bool, seed: int, sizes: str, scores: Scores) -> list[_Job]:
    found: list[_Job] = []
    for row in rows:
        try:
            content = row.source.read()
        except TPIPSError as error:
            scores.problems.append(Problem("unreadable_source", str(error), row.key))
            continue
        found.append(_Job(row, digest(content), b"", None))
    # rows of one source side by side, so that a batch encodes it once; otherwise in order, in which tables read fast
    first: dict[str, int] = {}
    for job in found:
        first.setdefault(job.source, len(first))
    found.sort(key=lambda job: first[job.source])
    digests = {job.row.key: job.source for job in found}
    others = other_sources([job.row for job in found], digests) if controls else {}
    for job in found:
        for model, ref in job.row.outputs.items():
            job.outputs[model] = ref.label  # replaced by the content's digest when the batch is read
        if controls:
            job.outputs[COPY] = "copy"
            job.outputs[NOISE] = f"noise {seed} {job.row.key}"
            job.other = others.get(job.row.key)
            if job.other is not None:
                job.outputs[OTHER] = f"other {digests[job.other.key]}"
    return found


def _batches(jobs: Sequence[_Job], limit: int) -> Iterator[list[_Job]]:
    batch: list[_Job] = []
    count = 0
    for job in jobs:
        size = 1 + len(job.outputs)
        if batch and count + size > limit:
            yield batch
            batch, count = [], 0
        batch.append(job)
        count += size
    if batch:
        yield batch


@dataclass
class _Call:
    """What one call of the metric is given, and where its answers go."""

    images: list[Tensor] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)
    pairs: list[tuple[int, int, str]] = field(default_factory=list)
    places: list[tuple[str, str, str]] = field(default_factory=list)  # (source digest, output id, aspect)
    owners: list[tuple[Row, str]] = field(default_factory=list)  # row, and model or control

    def label(self, position: int) -> str:
        """What an error calls a pair: the source, the model or control, and its output."""
        row, name = self.owners[position]
        file = f" ({row.outputs[name].label})" if name in row.outputs else ""
        return name_comparison(self.pairs[position][2], row.source.label, name + file)


def _score_batch(
    batch: Sequence[_Job], metric: PairMetric, cache: ScoreCache, sizes: str, seed: int, scores: Scores
) -> None:
    call = _Call()
    decoded: dict[str, Tensor] = {}
    asked: set[tuple[str, str, str]] = set()
    ready = []
    for job in batch:
        if _read_outputs(job, sizes, scores) and _prepare(job, call, asked, decoded, cache, sizes, seed, scores):
            ready.append(job)
    if call.pairs:
        with torch.no_grad():
            answers = checked_similarities(metric, call.images, call.references, call.pairs, call.label).double().tolist()
        found: dict[str, Known] = {}
        for (source, output, aspect), value in zip(call.places, answers, strict=True):
            found.setdefault(source, {}).setdefault(output, {})[aspect] = value
        for source, known in found.items():
            cache.add(source, known)
        scores.measured += len(call.pairs)
        scores.images += len({id(image) for image in (*call.images, *call.references)})
    for job in ready:
        known = cache.known(job.source)
        scores.sources[job.row.key] = job.source
        scores.values[job.row.key] = {
            name: {aspect: known[output][aspect] for aspect in job.row.aspects} for name, output in job.outputs.items()
        }
        for output in job.outputs.values():
            scores.cached += sum((job.source, output, aspect) not in asked for aspect in job.row.aspects)
        job.contents.clear()


def _read_outputs(job: _Job, sizes: str, scores: Scores) -> bool:
    """Reads a row's files; False where the source is gone. Digests say what is known without decoding anything."""
    try:
        job.content = job.row.source.read()
    except TPIPSError as error:
        scores.problems.append(Problem("unreadable_source", str(error), job.row.key))
        return False
    for model, ref in job.row.outputs.items():
        try:
            job.contents[model] = ref.read()
        except TPIPSError as error:
            scores.problems.append(Problem("unreadable_output", str(error), job.row.key, model))
            del job.outputs[model]
            continue
        job.outputs[model] = f"{digest(job.contents[model])} {sizes}"
    return True


def _prepare(
    job: _Job,
    call: _Call,
    asked: set[tuple[str, str, str]],
    decoded: dict[str, Tensor],
    cache: ScoreCache,
    sizes: str,
    seed: int,
    scores: Scores,
) -> bool:
    """Adds what is not known of a row to the call. False where the row's source cannot be decoded."""
    known = cache.known(job.source)
    missing = {
        name: [a for a in job.row.aspects if a not in known.get(output, {}) and (job.source, output, a) not in asked]
        for name, output in job.outputs.items()
    }
    content, job.content = job.content, b""
    if not any(missing.values()):
        return True
    try:
        if job.source not in decoded:
            decoded[job.source] = decode(content, job.row.source.label)
    except TPIPSError as error:
        scores.problems.append(Problem("unreadable_source", str(error), job.row.key))
        return False
    source = decoded[job.source]
    reference = None
    for name, aspects in missing.items():
        if not aspects:
            continue
        try:
            image = _image(job, name, source, decoded, seed, sizes)
        except TPIPSError as error:
            if name == OTHER:  # the other row says so itself; this row only has no such control
                del job.outputs[name]
                continue
            scores.problems.append(Problem("unreadable_output", str(error), job.row.key, name))
            del job.outputs[name]
            continue
        if reference is None:
            reference = _index(call.references, source)
        position = _index(call.images, image)
        for aspect in aspects:
            place = (job.source, job.outputs[name], aspect)
            asked.add(place)
            call.pairs.append((position, reference, aspect))
            call.places.append(place)
            call.owners.append((job.row, name))
    return True


def _image(job: _Job, name: str, source: Tensor, decoded: dict[str, Tensor], seed: int, sizes: str) -> Tensor:
    size = (source.shape[1], source.shape[2])
    if name == COPY:
        return source
    if name == NOISE:
        return noise_image(size, job.row.key, seed)
    if name == OTHER:
        assert job.other is not None
        identity = job.outputs[OTHER].removeprefix("other ")
        if identity not in decoded:
            decoded[identity] = decode(job.other.source.read(), job.other.source.label)
        return resized(decoded[identity], size)
    image = decode(job.contents[name], job.row.outputs[name].label)
    return resized(image, size) if sizes == "resize" else image


def _index(images: list[Tensor], image: Tensor) -> int:
    for position, known in enumerate(images):
        if known is image:
            return position
    images.append(image)
    return len(images) - 1


def with_scored_outputs(rows: Sequence[Row], scores: Scores) -> list[Row]:
    """Rows whose outputs are those that have scores; rows without any scores are left out."""
    return [
        replace(row, outputs={name: ref for name, ref in row.outputs.items() if name in scores.values[row.key]})
        for row in rows
        if row.key in scores.values
    ]
