"""What an evaluation costs and what it can tell: scoring against each (output, source, aspect) alone, editors of known
worth, and the report of many samples.

    python tests/benchmarks/evaluation.py speed --metric builtin:late
    python tests/benchmarks/evaluation.py ranking --metric builtin:late
    python tests/benchmarks/evaluation.py report --samples 1000

Seconds are those of the processor, so that other work on the machine does not count; run with one thread
(OMP_NUM_THREADS=1) to compare figures. A browser's are those of the clock.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tpips_reward import load_metric
from tpips_reward.evaluation import Settings, evaluate, read_manifest, score_rows
from tpips_reward.evaluation.image_files import ImageFile, decode
from tpips_reward.evaluation.measures import MEASURES
from tpips_reward.evaluation.rows import Row

sys.path.insert(0, str(Path(__file__).parents[1] / "tpips_reward"))
from evaluation_files import save, write_edits, write_lines
from fake_metrics import RegionMetric

from tpips_reward.scenes import sample_edit, sample_scene, with_drift

ASPECTS = ("background", "lighting", "object color", "shape", "size", "position", "texture", "background pattern")


def speed(options: argparse.Namespace) -> None:
    """Outputs a second of `score_rows`, and of the metric called for each output and aspect."""
    rng = np.random.default_rng(0)
    metric = load_metric(options.metric, device="cpu")
    with tempfile.TemporaryDirectory() as name:
        rows = []
        for index in range(options.sources):
            paths = [Path(name) / f"{index}-{model}.png" for model in range(options.models + 1)]
            for path in paths:
                save(sample_scene(rng), path, options.size)
            source, *outputs = map(ImageFile, paths)
            rows.append(
                Row(str(index), source, "", {str(n): ref for n, ref in enumerate(outputs)}, ASPECTS[: options.aspects])
            )
        score_rows(rows[:2], metric, controls=False)  # the first call warms up
        begin = time.process_time()
        scores = score_rows(rows, metric, controls=False)
        together = time.process_time() - begin
        pairs = [(row, ref, aspect) for row in rows for ref in row.outputs.values() for aspect in row.aspects]
        chosen = [pairs[i] for i in rng.choice(len(pairs), min(options.alone, len(pairs)), replace=False)]
        begin = time.process_time()
        for row, ref, aspect in chosen:
            metric.similarity(decode(ref.read(), ref.label), decode(row.source.read(), row.source.label), aspect)
        alone = (time.process_time() - begin) / len(chosen) * len(pairs)
    count = options.sources * options.models
    print(
        json.dumps(
            {
                "metric": options.metric,
                "pairs": scores.measured,
                "together_seconds": round(together, 2),
                "together_outputs_per_second": round(count / together, 2),
                "alone_seconds": round(alone, 2),
                "alone_timed_pairs": len(chosen),
                "alone_outputs_per_second": round(count / alone, 2),
                "times_faster": round(alone / together, 1),
            }
        )
    )


def ranking(options: argparse.Namespace) -> None:
    """Editors of known worth on held-out procedural edits: their scores, and how many rows tell them apart."""
    rng = np.random.default_rng(1)
    metric = load_metric(options.metric, device="cpu")
    with tempfile.TemporaryDirectory() as name:
        home, lines = Path(name), []
        for index in range(options.samples):
            edit = sample_edit(rng, "test")
            scenes = {
                "true edit": edit.ideal,
                "drifts": with_drift(edit, rng, probability=1.0),
                "idles half the time": edit.ideal if index % 2 else edit.source,
            }
            outputs = {model: f"{model}/{index}.png" for model in scenes}
            for model, scene in scenes.items():
                save(scene, home / outputs[model], options.size)
            save(edit.source, home / f"in/{index}.png", options.size)
            row = {"key": str(index), "source": f"in/{index}.png", "instruction": edit.instruction, "outputs": outputs}
            lines.append({**row, "preserve": edit.preserve, "target": edit.target, "category": edit.kind})
        manifest = write_lines(home / "edits.jsonl", lines)
        found = evaluate(read_manifest(manifest), metric, home / "report", metric_name=options.metric)
    for entry in found["models"]:
        print(entry["model"], *[f"{measure} {entry[measure]['mean']:.3f}" for measure in MEASURES], sep="  ")
    for entry in found["comparisons"]:
        gap = entry["difference"]
        print(
            f"{entry['first']} - {entry['second']}, {entry['measure']}: {gap['mean']:.3f} [{gap['low']:.3f}, "
            f"{gap['high']:.3f}], p (Holm) {entry['p_holm']:.4f}, rows needed {entry['rows_needed']}"
        )


def report(options: argparse.Namespace) -> None:
    """Size of the page, and seconds of everything that is not the metric, with a metric that costs next to nothing."""
    with tempfile.TemporaryDirectory() as name:
        manifest = write_edits(Path(name) / "data", options.samples, size=options.size)
        begin = time.process_time()
        evaluate(read_manifest(manifest), RegionMetric(), Path(name) / "report", settings=Settings())
        seconds = time.process_time() - begin
        sizes = {path.name: path.stat().st_size for path in sorted((Path(name) / "report").glob("*.*"))}
        seen = _in_chromium(Path(name) / "report/report.html")
    found = {"samples": options.samples, "models": 3, "pixels": options.size, "seconds": round(seconds, 1), "bytes": sizes, "chromium": seen}
    print(json.dumps(found))


def _in_chromium(page: Path) -> dict[str, float] | str:
    """Milliseconds until the page is loaded and laid out (the median of five), and for sorting its longest table."""
    program, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    try:
        from selenium import webdriver
    except ImportError:
        return "not measured: selenium is not installed"
    if program is None or driver is None:
        return "not measured: no chromium with chromedriver on this machine"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as browser:
        loads, sorts = [], []
        for _ in range(5):
            browser.get(page.as_uri())
            loads.append(browser.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd"))
            sorts.append(browser.execute_script("""
                const begin = performance.now();
                document.querySelector("#row-table th:nth-child(4) button").click();
                document.querySelector("#row-table").offsetHeight;
                return performance.now() - begin;"""))
    return {"load_ms": round(float(np.median(loads))), "sort_ms": round(float(np.median(sorts)))}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What an evaluation costs.")
    commands = parser.add_subparsers(required=True)
    fast = commands.add_parser("speed", help="scoring together against alone")
    fast.add_argument("--metric", default="builtin:late")
    for option, default in (("sources", 32), ("models", 7), ("aspects", 8), ("size", 64), ("alone", 200)):
        fast.add_argument(f"--{option}", type=int, default=default)
    fast.set_defaults(run=speed)
    known = commands.add_parser("ranking", help="editors of known worth")
    known.add_argument("--metric", default="builtin:late")
    known.add_argument("--samples", type=int, default=64)
    known.add_argument("--size", type=int, default=64)
    known.set_defaults(run=ranking)
    page = commands.add_parser("report", help="the page of many samples")
    page.add_argument("--samples", type=int, default=1000)
    page.add_argument("--size", type=int, default=256, help="side of the pictures; the page shows at most 224 pixels of it")
    page.set_defaults(run=report)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
