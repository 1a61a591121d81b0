"""The benchmark of the metric at its smallest size: both ways score alike, and the command says what it measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from tpips_reward.errors import TPIPSError

FILE = Path(__file__).parents[1] / "benchmarks" / "metric.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("metric_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("fusion", ["late", "mid", "early"])
def test_speed_at_the_smallest_size(benchmark, fusion, capsys, monkeypatch):
    arguments = ["speed", "--size", "tiny", "--fusion", fusion, "--edits", "3", "--aspects", "4", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["metric.py", *arguments])
    benchmark.main()
    found = json.loads(capsys.readouterr().out)
    assert found["largest_difference"] <= 1e-4 and found["times_faster"] > 0 and found["peak_gib"] > 0
    # late: 2 x 3 x 4 full passes against 4 images and 16 suffixes; mid: 24 against 4 x vision and 16; early: 12 against 12
    assert found["bound_by_flops"] > {"late": 3, "mid": 1.4, "early": 1.05}[fusion]


@pytest.mark.parametrize(
    "command, size, edits", [("speed", "8b", 16), ("gradient", "8b", 4), ("memory", "8b", 4), ("gradient", "small", 16)]
)
def test_fewer_edits_where_activations_of_the_largest_size_are_kept(benchmark, capsys, monkeypatch, command, size, edits):
    def asked(options):
        """Says what was asked."""
        return {"edits": options.edits}

    asked.__name__ = command
    monkeypatch.setattr(benchmark, command, asked)
    monkeypatch.setattr(sys, "argv", ["metric.py", command, "--size", size])
    benchmark.main()
    assert json.loads(capsys.readouterr().out) == {"edits": edits}


def test_a_full_gpu_and_a_child_that_fails_end_the_benchmark_with_one_line(benchmark, capfd, monkeypatch):
    def full(options):
        """Needs too much."""
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    full.__name__ = "speed"
    monkeypatch.setattr(benchmark, "speed", full)
    monkeypatch.setattr(sys, "argv", ["metric.py", "speed", "--device", "cpu"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "Tried to allocate 9 GiB); give fewer --edits" in capfd.readouterr().err
    with pytest.raises(TPIPSError, match="'memory' ended with status 2; what it said stands above"):
        benchmark.child("memory", "--size", "none")
    assert "invalid choice: 'none'" in capfd.readouterr().err


def test_unequal_scores_end_the_benchmark(benchmark):
    benchmark.check(9e-5, torch.float32)
    for difference in (2e-4, float("nan")):
        with pytest.raises(TPIPSError, match="must give equal scores"):
            benchmark.check(difference, torch.float32)


def test_the_real_size_is_that_of_qwen3_vl_8b(benchmark):
    with torch.device("meta"):
        model = benchmark.Qwen3VLModel(benchmark.build_config("8b"))
    embeddings = 384 * 4096  # the test files' vocabulary; the real one has 151,936 tokens
    count = sum(value.numel() for value in model.parameters()) - embeddings + 151936 * 4096
    assert count == pytest.approx(8.14e9, rel=0.01)
