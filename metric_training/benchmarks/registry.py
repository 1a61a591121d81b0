"""The benchmarks by name. A new one is a file with `load` and `measure`, and an entry here."""

from __future__ import annotations

from metric_training.benchmarks import bapps, edir, genecis, nights, qare, subtle, votes
from metric_training.benchmarks.protocol import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    item.name: item
    for item in (
        Benchmark(
            "nights",
            "NIGHTS",
            "2AFC: share of the votes for the candidate that the metric finds nearer, without an aspect.",
            nights.load,
            votes.measure,
        ),
        Benchmark(
            "bapps",
            "BAPPS (2AFC)",
            "2AFC: share of the votes for the distortion that the metric finds nearer, without an aspect.",
            bapps.load,
            votes.measure,
        ),
        Benchmark(
            "genecis",
            "GeneCIS, Focus subsets",
            "Recall of the target in a gallery, the condition being the aspect.",
            genecis.load,
            genecis.measure,
        ),
        Benchmark(
            "qare",
            "QARE-Bench, synthetic",
            "mAP: retrieval by object, background and style. AIS: similarity of one image under two of them, lower is better.",
            qare.load,
            qare.measure,
        ),
        Benchmark(
            "edir",
            "EDIR",
            "Recall of the edited image in the whole corpus, from an image and an instruction.",
            edir.load,
            edir.measure,
        ),
        Benchmark(
            "subtle",
            "VLM-SubtleBench, as pairs",
            "Sensitivity: probability that a pair that differs in a category is farther apart under its aspect than a pair "
            "that differs in another one; 0.5 is chance.",
            subtle.load,
            subtle.measure,
        ),
    )
}
