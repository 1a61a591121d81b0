"""What an index costs: building and asking it, and the memory, against the number of embeddings.

    python tests/benchmarks/search.py --counts 1000 10000 100000 --width 1024

The embeddings are random unit vectors; the time of the metric (which an image costs once) is printed beside them. Each
count is measured in a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from tpips_reward.search.index import Index, write_index
from tpips_reward.search.ranking import OVERALL, Query, combine, scores


def unit(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    vectors = rng.standard_normal((count, width), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def measure(count: int, width: int, queries: int) -> dict[str, float]:
    """One count: seconds to write and to open for the first search, milliseconds of later ones, and bytes."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        vectors = {aspect: unit(rng, count, width) for aspect in (OVERALL, "lighting")}
        folder = Path(name) / "index"
        begin = time.monotonic()
        write_index(
            folder, [f"{n}.png" for n in range(count)], vectors, metric_name="random", probe_vector=vectors[OVERALL][0]
        )
        written = time.monotonic() - begin
        asked = [combine([Query("lighting", *unit(rng, 2, width))]) for _ in range(queries)]
        truth = np.argmax(scores(asked[0], vectors))
        del vectors
        process = psutil.Process()
        before = process.memory_info().rss
        begin = time.monotonic()
        index = Index(folder)
        found = index.search(asked[0], 10)
        opened = time.monotonic() - begin
        held = process.memory_info().rss - before
        times = []
        for query in asked[1:]:
            begin = time.monotonic()
            index.search(query, 10)
            times.append(time.monotonic() - begin)
        plain = {aspect: np.array(index.vectors(aspect)) for aspect in (OVERALL, "lighting")}
        begin = time.monotonic()
        for query in asked[1:]:
            np.argpartition(scores(query, plain), -10)[-10:]
        numpy_time = (time.monotonic() - begin) / len(asked[1:])
        size = sum(path.stat().st_size for path in folder.iterdir())
    if found[0].row != truth:
        sys.exit("the nearest neighbour is not the nearest")
    return {
        "embeddings": count,
        "width": width,
        "write_seconds": round(written, 2),
        "first_search_seconds": round(opened, 3),
        "search_ms": round(1000 * float(np.median(times)), 2),
        "numpy_ms": round(1000 * numpy_time, 2),
        "memory_mb": round(held / 2**20, 1),
        "disk_mb": round(size / 2**20, 1),
    }


def embed_seconds(metric_name: str, count: int) -> float:
    """Seconds of the processor for one image in two aspects."""
    from tpips_reward import load_metric
    from tpips_reward.scenes import render, sample_scene

    metric = load_metric(metric_name, device="cpu")
    rng = np.random.default_rng(0)
    images = [render(sample_scene(rng), 64) for _ in range(count)]
    metric.embed(images[:2], [OVERALL, "lighting"])
    begin = time.process_time()
    metric.embed(images, [OVERALL, "lighting"])
    return (time.process_time() - begin) / count


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What an index costs.")
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--metric", default="builtin:late")
    parser.add_argument("--one", action="store_true", help="measure here (each count gets a process that has this)")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.counts[0], options.width, options.queries)))
        return
    for count in options.counts:
        command = [sys.executable, __file__, "--one", "--counts", str(count), "--width", str(options.width)]
        subprocess.run([*command, "--queries", str(options.queries)], check=True)
    seconds = embed_seconds(options.metric, 32)
    print(json.dumps({"metric": options.metric, "embed_ms_per_image": round(1000 * seconds, 1)}))


if __name__ == "__main__":
    main()
