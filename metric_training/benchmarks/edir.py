"""EDIR: composed image retrieval. In a gallery, the image that a query image becomes by an edit.

Layouts: the authors' own (`EDIR-BENCH/EDIR`, as MTEB's conversion script reads it): `queries.jsonl` {"id", "image",
"text", "metadata": {"subcategory"}}, `corpus.jsonl` {"id", "image"}, `instances.jsonl` {"qid", "pos": [one id], "neg"},
and images by file name, anywhere below the folder once its tar is unpacked (or --image_root). Or MTEB's
(`EDIRIT2IRetrieval`): data sets `corpus` (id, image), `queries` (id, image, text, subcategory) and `qrels` (query-id,
corpus-id, score), as folders of Parquet files or as `save_to_disk` wrote them.

Protocol: recall at 1 over the whole corpus (at 5 and 10 too), by subcategory. Two kinds of query:
- "text": the backbone's own embedding of image and text, under MTEB's instruction for this task, against its embeddings
  of the corpus images. Fine-tuned weights answer too; `untrained:SOURCE` is the backbone itself.
- "aspects": a composition, no text encoder: what the edit is likely to keep and to change is proposed from the text
  (`tpips_reward.aspects`), and the score is the mean similarity to the query image in what stays, minus that in what
  changes. It ranks the :data:`SHORTLIST` images that are nearest overall; what is not among them is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from metric_training.benchmarks.composed_query import composed_embeddings
from metric_training.benchmarks.protocol import (
    Loaded,
    Settings,
    chunks,
    grouped,
    image_index,
    load_images,
    mean_figures,
    pairwise,
)
from metric_training.benchmarks.ranking import expected_recall
from metric_training.data.comparison import DataError, ImageSource, Problems, as_float, image_source, shortened
from metric_training.data.rows import read_rows
from metric_training.evaluation.judges import Judge, PairwiseJudge
from tpips_reward import TPIPSError
from tpips_reward.aspects import propose

INSTRUCTION = "Given an image, find a similar image satisfying the query."
SHORTLIST = 20
CUTOFFS = (1, 5, 10)
QUERIES = ("text", "aspects")
_MANIFESTS = ("queries.jsonl", "corpus.jsonl", "instances.jsonl")
_PARTS = ("queries", "corpus", "qrels")


@dataclass(frozen=True)
class Query:
    """One query.

    Attributes:
        image: the reference.
        text: how it is to be changed.
        targets: positions of the right images in the corpus.
        subcategory: the kind of edit.
    """

    image: ImageSource
    text: str
    targets: tuple[int, ...]
    subcategory: str


@dataclass(frozen=True)
class Content:
    """Queries, and the images that are searched."""

    queries: list[Query]
    corpus: list[ImageSource]


def load(folder: Path, settings: Settings) -> Loaded:
    """The benchmark in either layout.

    Raises:
        DataError: neither layout, an image or a target that is missing from the corpus, or no usable query.
    """
    if all((folder / name).is_file() for name in _MANIFESTS):
        root = Path(settings.image_root).expanduser() if settings.image_root else folder
        return _assemble(folder, settings, partial(_manifest, folder, settings, image_index(root), root), "pos")
    if all((folder / name).is_dir() for name in _PARTS):
        return _assemble(folder, settings, partial(_table, folder, settings), "corpus-id")
    raise DataError(
        f"{folder} is not EDIR's: it needs {', '.join(_MANIFESTS)}, or the folders {', '.join(_PARTS)} of MTEB's copy."
    )


def measure(judge: Judge, loaded: Loaded, settings: Settings) -> dict[str, Any]:
    """Recall, together and by subcategory; for a composition also "shortlisted", the recall of the shortlist."""
    scorer = pairwise(judge)
    content: Content = loaded.content
    if settings.query not in QUERIES:
        raise TPIPSError(f"The query {settings.query!r} is unknown; choose one of {', '.join(QUERIES)} (--query).")
    rank = _by_text if settings.query == "text" else by_aspects
    found: dict[str, list[float]] = {}
    for scores, query in zip(rank(scorer, content, settings), content.queries, strict=True):
        relevant = np.zeros(len(scores), bool)
        relevant[list(query.targets)] = True
        for k in CUTOFFS:
            found.setdefault(f"recall@{k}", []).append(expected_recall(scores, relevant, k))
        if settings.query == "aspects":
            found.setdefault("shortlisted", []).append(float(np.isfinite(scores[relevant]).any()))
    if "shortlisted" in found:
        # images outside the shortlist are no hits, however few are before them
        for k in CUTOFFS:
            found[f"recall@{k}"] = [r * s for r, s in zip(found[f"recall@{k}"], found["shortlisted"], strict=True)]
    values = {name: np.array(rows) for name, rows in found.items()}
    return mean_figures(values) | {"groups": {"subcategory": grouped(values, [q.subcategory for q in content.queries])}}


def _by_text(scorer: PairwiseJudge, content: Content, settings: Settings) -> Iterator[np.ndarray]:
    """(C,) scores of the corpus for each query."""
    metric = scorer.metric
    if metric is None:
        raise TPIPSError(
            f"{scorer.name} has no embedding of image and text; give a late-fusion metric, or --query aspects."
        )
    bar = tqdm(total=len(content.corpus) + len(content.queries), disable=not settings.progress, leave=False)
    vectors = []
    for part in chunks(len(content.corpus), settings.images_per_call):
        images = load_images([content.corpus[k] for k in part])
        vectors.append(_finite(composed_embeddings(metric, images, [None] * len(images)), scorer.name).cpu())
        bar.update(len(part))
    table = torch.cat(vectors)
    for part in chunks(len(content.queries), settings.images_per_call):
        chosen = [content.queries[k] for k in part]
        images = load_images([query.image for query in chosen])
        own = composed_embeddings(metric, images, [query.text for query in chosen], INSTRUCTION)
        yield from (_finite(own, scorer.name).cpu() @ table.T).double().numpy()
        bar.update(len(part))
    bar.close()


def by_aspects(scorer: PairwiseJudge, content: Content, settings: Settings) -> Iterator[np.ndarray]:
    """(C,) scores for each query, minus infinity outside its shortlist."""
    if not scorer.has_embedding:
        raise TPIPSError(
            f"{scorer.name} has no embedding, which a search of the whole corpus needs; give a late-fusion metric."
        )
    parts = chunks(len(content.corpus), settings.images_per_call)
    corpus = [
        scorer.embeddings(load_images([content.corpus[k] for k in part]), ["overall"])[:, 0].float() for part in parts
    ]
    table = torch.cat(corpus)
    for query in tqdm(content.queries, desc=scorer.name, disable=not settings.progress, leave=False):
        image = query.image.load()
        overall = table @ scorer.embeddings([image], ["overall"])[0, 0].float()
        near = overall.topk(min(SHORTLIST, len(table))).indices.tolist()
        proposal = propose(query.text, query.subcategory)
        sides = [(name, 1 / len(proposal.preserve)) for name in proposal.preserve]
        sides += [(name, -1 / len(proposal.target)) for name in proposal.target]
        candidates = load_images([content.corpus[k] for k in near])
        pairs = [(0, 1 + place, name) for name, _ in sides for place in range(len(near))]
        similar = scorer.similarities([image, *candidates], pairs).double().view(len(sides), len(near))
        scores = np.full(len(table), -np.inf)
        scores[near] = (torch.tensor([weight for _, weight in sides]).double() @ similar).numpy()
        yield scores


def _finite(vectors: Tensor, name: str) -> Tensor:
    if not bool(vectors.isfinite().all()):
        raise TPIPSError(f"{name} gave an embedding that is not finite; nothing was scored.")
    return vectors


#: part → its rows with line numbers, and where its problems go.
_Reader = Callable[[str], tuple[list[tuple[int, dict[str, Any]]], Problems]]


def _assemble(folder: Path, settings: Settings, read: _Reader, target: str) -> Loaded:
    """Joins queries, corpus and right answers by their ids."""
    rows, problems = read("corpus")
    position: dict[str, int] = {}
    corpus: list[ImageSource] = []
    for line, row in rows:
        if "id" not in row or not isinstance(row.get("image"), ImageSource):
            raise DataError(f"{folder}, corpus, {problems.unit} {line}: id or image missing.")
        position.setdefault(str(row["id"]), len(corpus))
        corpus.append(row["image"])
    answers: dict[str, list[str]] = {}
    rows, problems = read("qrels")
    for line, row in rows:
        ids = row.get(target)
        try:
            relevance = as_float(row.get("score", 1))
        except (TypeError, ValueError):
            raise DataError(
                f"{folder}, qrels, {problems.unit} {line}: score must be a number, not {shortened(repr(row['score']))}."
            ) from None
        if relevance > 0:
            query = str(row.get("qid", row.get("query-id")))
            answers.setdefault(query, []).extend(map(str, ids if isinstance(ids, list) else [ids]))
    rows, problems = read("queries")
    queries: list[Query] = []
    for line, row in rows:
        if settings.limit is not None and len(queries) >= settings.limit:
            break
        try:
            queries.append(_query(row, answers, position))
        except DataError as error:
            problems.add(line, str(error))
    if not queries:
        raise DataError(f"{folder} has no usable query: {problems.describe(3) or 'it is empty'}")
    return Loaded(Content(queries, corpus), {"queries": len(queries), "corpus images": len(corpus)}, problems)


def _query(row: dict[str, Any], answers: dict[str, list[str]], position: dict[str, int]) -> Query:
    name, text, image = str(row.get("id")), row.get("text"), row.get("image")
    if not isinstance(text, str) or not text.strip() or not isinstance(image, ImageSource):
        raise DataError("a query must have id, image and text.")
    ids = answers.get(name, [])
    missing = [target for target in ids if target not in position]
    if not ids or missing:
        raise DataError(
            f"the query {name!r} has no right image in the corpus ({', '.join(missing) or 'none is named'})."
        )
    metadata = row.get("metadata")
    kind = row.get("subcategory") or (metadata.get("subcategory") if isinstance(metadata, dict) else None)
    return Query(image, text, tuple(position[target] for target in ids), str(kind or "unknown"))


def _manifest(
    folder: Path, settings: Settings, index: dict[str, Path], root: Path, part: str
) -> tuple[list[tuple[int, dict[str, Any]]], Problems]:
    """Rows of the authors' manifest, images found by name."""
    path = folder / f"{'instances' if part == 'qrels' else part}.jsonl"
    rows = read_rows(path, image_root=root, strict=settings.strict)
    found = list(rows.rows)
    for line, row in found if part != "qrels" else []:
        name = Path(str(row.get("image"))).name
        if name not in index:
            raise DataError(
                f"{path}, line {line}: the image {name} is nowhere below {root}; unpack the tar, or give --image_root."
            )
        row["image"] = ImageSource(str(index[name]), index[name])
    return found, rows.problems


def _table(folder: Path, settings: Settings, part: str) -> tuple[list[tuple[int, dict[str, Any]]], Problems]:
    """Rows of MTEB's copy; images stay encoded."""
    rows = read_rows(folder / part, split=settings.split or "test", strict=settings.strict)
    found = [(line, dict(row)) for line, row in rows.rows]
    for _, row in found:
        if isinstance(row.get("image"), str):  # `save_to_disk` may have kept the path alone
            row["image"] = image_source(row["image"], rows.root)
    return found, rows.problems
