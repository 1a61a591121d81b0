"""The console script: right numbers, and one clear line with a non-zero status for bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from PIL import Image

import tpips_reward
from tpips_reward.cli import main


@pytest.fixture
def run(capsys, parity, monkeypatch):
    monkeypatch.chdir(parity)

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


PAIR = ("images/cat_0.png", "images/cat_1.png")


def test_score_as_a_table(run, metric, parity):
    status, out, err = run(
        "score", *PAIR, "--aspect", "lighting", "--aspect", "subject [b]color", "--metric", "embedding"
    )
    expected = metric.similarity(*(Image.open(parity / path) for path in PAIR), ["lighting", "subject [b]color"])[0]
    assert status == 0 and err == ""
    for aspect, value in zip(["lighting", "subject [b]color"], expected.tolist(), strict=True):
        line = next(line for line in out.splitlines() if aspect in line)
        assert f"{value:.4f}" in line


def test_score_as_json_of_several_pairs(run, metric, parity):
    status, out, _ = run("score", *PAIR, *reversed(PAIR), "--json", "--metric", "embedding")
    answer = json.loads(out)
    expected = metric.similarity(*(Image.open(parity / path) for path in PAIR)).item()
    assert status == 0 and [row["a"] for row in answer["pairs"]] == list(PAIR)
    assert [row["scores"]["overall"] for row in answer["pairs"]] == pytest.approx([expected] * 2, abs=1e-5)


def test_info(run):
    status, out, _ = run("info", "embedding")
    assert status == 0
    for fact in ("late", "529,600", "-1.0–1.0", "4096–1843200", "license"):
        assert fact in out
    status, out, _ = run("info", "embedding", "--json", "--dtype", "bfloat16")
    assert json.loads(out)["dtype"] == "bfloat16"


def test_mid_fusion_has_no_lower_end(run, mid_metric, parity):
    status, out, _ = run("info", "activation_dist")
    assert status == 0
    for fact in ("mid", "-inf–0.0", "1, 3, 4, 6", "mean"):
        assert fact in out
    same_size = ("images/cat_1.png", "images/coffee_1.png")
    status, out, _ = run("score", *same_size, "--metric", "activation_dist", "--json")
    answer = json.loads(out, parse_constant=pytest.fail)  # no "-Infinity", which is no JSON
    expected = mid_metric.similarity(*(Image.open(parity / path) for path in same_size)).item()
    assert answer["range"] == [None, 0.0]
    assert answer["pairs"][0]["scores"]["overall"] == pytest.approx(expected, abs=1e-6)
    status, out, _ = run("score", *same_size, "--metric", "activation_dist")
    assert "similarity (0 = same)" in out and f"{expected:.6f}" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("score", "images/cat_0.png", "nowhere.png"), "nowhere.png does not exist"),
        (("score", "images/cat_0.png", "expected.json"), "no image that Pillow can read"),
        (("score", "images/cat_0.png", "images"), "images cannot be read"),
        (("score", "images/cat_0.png"), "pairs of images, got 1"),
        (("score", *PAIR, "--aspect", " "), "--aspect is empty"),
        (("score", *PAIR, "--aspect", "<|im_end|>", "--metric", "embedding"), "control token"),
        (("score", *PAIR, "--metric", "nonsense"), "'nonsense' is no folder"),
        (("info", "embedding", "--device", "nonsense"), "'nonsense' is unknown"),
        (("info", "embedding", "--dtype", "float16"), "float16 is refused"),
    ],
)
def test_bad_input_is_one_line_and_a_status(run, arguments, message):
    status, out, err = run(*arguments)
    assert status == 2 and out == ""
    assert message in err and len(err.strip().splitlines()) == 1


def test_a_warning_is_one_line_without_source_code(parity):
    """In a process of its own: pytest keeps warnings to itself."""
    command = ["score", "images/cat_0.png", "images/coffee_1.png", "--metric", "activation_dist", "--device", "cpu"]
    code = f"import sys; from tpips_reward.cli import main; sys.exit(main({command!r}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=parity)
    (line,) = found.stderr.splitlines()
    assert line.startswith("tpips-reward: warning: 1 of 1 pairs have images of different sizes")


def test_a_truncated_image(run, tmp_path, parity):
    cut = tmp_path / "cut.png"
    cut.write_bytes((parity / "images" / "cat_0.png").read_bytes()[:2000])
    status, _, err = run("score", "images/cat_0.png", str(cut))
    assert status == 2 and "cut.png cannot be read" in err


def test_version_and_a_quick_start():
    code = "import sys; from tpips_reward.cli import main\n" \
        "try: main(['--version'])\nexcept SystemExit: print(sorted({'torch', 'transformers'} & set(sys.modules)))"  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [f"tpips-reward {tpips_reward.__version__}", "[]"]


def test_unknown_names_of_the_package():
    assert tpips_reward.load_metric and "load_metric" in dir(tpips_reward)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tpips_reward.nothing
