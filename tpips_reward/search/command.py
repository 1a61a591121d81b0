"""The commands `tpips-reward index` and `search`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tpips_reward.answers import name_comparison, named
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import ImageFile, decode
from tpips_reward.metric import Metric
from tpips_reward.search.index import Found, Index, build_index, check_aspects, check_output, image_files
from tpips_reward.search.ranking import OVERALL, Query, combine
from tpips_reward.stopping import StopSignal


def run_index(options: argparse.Namespace, load: Callable[[], Metric]) -> None:
    """Builds an index; the input is checked before the metric is loaded.

    Raises:
        TPIPSError: as `build_index`.
        KeyboardInterrupt: Ctrl-C or SIGTERM; nothing is written then.
    """
    check_aspects(options.aspect)
    image_files(options.images)
    check_output(options.output, options.overwrite)
    metric = load()
    with StopSignal(first="nothing is written") as stop:

        def progress(done: int, total: int) -> None:
            if stop.requested:
                raise KeyboardInterrupt
            if sys.stderr.isatty():
                print(f"\r{done} of {total} images", end="\n" if done == total else "", file=sys.stderr, flush=True)

        index = build_index(
            options.images,
            options.aspect,
            metric,
            options.output,
            metric_name=options.metric,
            batch_images=options.batch_images,
            overwrite=options.overwrite,
            progress=progress,
        )
    print(f"{len(index)} images in {len(index.aspects)} aspects ({', '.join(index.aspects)}): {options.output}")
    for label, reason in index.info["skipped"].items():
        print(f"skipped {label}: {reason}", file=sys.stderr)


def run_search(options: argparse.Namespace, load: Callable[[str], Metric]) -> None:
    """Searches an index; index, aspects and images are checked before the metric is loaded.

    Raises:
        TPIPSError: a query that is none, an aspect that is not indexed, other weights than the index's.
    """
    index = Index(options.index)
    queried = [parse_query(words, index) for words in options.query]
    if options.top < 1:
        raise TPIPSError(f"--top is {options.top}; ask for at least one image.")
    opened = [decode(ImageFile(path).read(), str(path)) for path, _, _ in queried]
    metric = load(options.metric or index.metric)
    index.check_metric(metric)
    queries = []
    for image, (path, aspect, weight) in zip(opened, queried, strict=True):
        labels = [name_comparison(name, str(path)) for name in (aspect, OVERALL)]
        with named(labels.__getitem__):
            vectors = metric.embed(image, [aspect, OVERALL])[0].float().cpu().numpy()
        queries.append(Query(aspect, vectors[0], vectors[1], weight))
    found = index.search(combine(queries, options.overall_weight), options.top)
    likenesses = similarities(index, queries, found)
    if options.json:
        rows = [
            {"file": item.file, "score": item.score, "similarities": mine}
            for item, mine in zip(found, likenesses, strict=True)
        ]
        print(json.dumps({"index": str(options.index), "metric": index.metric, "results": rows}, indent=2))
        return
    for item, mine in zip(found, likenesses, strict=True):
        details = "  ".join(f"{query.aspect} {value:.4f}" for query, value in zip(queries, mine, strict=True))
        print(f"{item.score:8.4f}  {item.file}  ({details})")


def similarities(index: Index, queries: Sequence[Query], found: Sequence[Found]) -> list[list[float]]:
    """f(query, image | its aspect) of each image found, one a query."""
    rows = [item.row for item in found]
    columns = [(index.vectors(query.aspect)[rows] @ query.vector).tolist() for query in queries]
    return [list(row) for row in zip(*columns, strict=True)]


def parse_query(words: Sequence[str], index: Index) -> tuple[Path, str, float]:
    """IMAGE ASPECT [WEIGHT] -> its three values.

    Raises:
        TPIPSError: another number of words, a weight that is none, an aspect that is not indexed.
    """
    if len(words) not in (2, 3):
        raise TPIPSError(f"--query {' '.join(words)!r} has {len(words)} words; write --query IMAGE ASPECT [WEIGHT] "
                         "and put an aspect of several words in quotes.")  # fmt: skip
    try:
        weight = float(words[2]) if len(words) == 3 else 1.0
    except ValueError:
        raise TPIPSError(f"The weight {words[2]!r} of --query {words[0]} is no number.") from None
    return Path(words[0]), index.check_aspect(words[1]), weight
