"""Every Python block of README.md and docs/ runs, or says why it does not: a comment `<!-- not run: reason -->` before it."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tpips_reward.scenes import render, sample_edit

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "tpips_reward"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_EXCUSE = re.compile(r"<!-- not run: ([^>]+?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """code: of a fence; line: where it begins; excuse: why it does not run, or empty."""

    code: str
    line: int
    excuse: str


def python_blocks(text: str) -> list[Block]:
    found = []
    for match in _FENCE.finditer(text):
        if match[1] in ("python", "py", "python3", "pycon"):
            before = text[: match.start()]
            excuse = _EXCUSE.search(before)
            found.append(Block(match[2], before.count("\n") + 2, excuse[1] if excuse else ""))
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An address that answers, for the pages that ask one."""
    from serving_workers import LocalWorker, running

    with running([LocalWorker()]) as address:
        yield f"remote:{address}"


def names(tmp_path: Path, server: str) -> dict[str, Any]:
    """What the pages use without making it: images, instructions, and where the trainers keep things.

    The folder gets `photos/` and the manifest `edits.jsonl`.
    """
    from evaluation_files import write_edits

    rng = np.random.default_rng(0)
    edits = [sample_edit(rng) for _ in range(2)]
    sources = [Image.fromarray(render(edit.source, 64)) for edit in edits]
    results = [Image.fromarray(render(edit.ideal, 64)) for edit in edits]
    write_edits(tmp_path, 3)
    (tmp_path / "photos").mkdir()
    for number, image in enumerate([*sources, *results]):
        image.save(tmp_path / "photos" / f"{number}.png")
    return {
        "__name__": "docs",
        "edits": results, "source": sources[0], "sources": sources, "a": results, "b": sources,
        "prompts": ["make the car red"] * 2, "metadata": [{"preserve": ["background"], "target": ["car color"]}] * 2,
        "decoded": torch.rand(2, 3, 64, 64, requires_grad=True), "originals": torch.rand(2, 3, 64, 64),
        "score_functions": {}, "address": server,
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, tmp_path, server, monkeypatch):
    """The blocks of a page run in order, in one namespace, in an empty folder."""
    blocks = python_blocks(page.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    namespace = names(tmp_path, server)
    for block in blocks:
        ast.parse(block.code)  # also where it does not run
        if not block.excuse:
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)  # noqa: S102 - our own pages


def test_there_is_code_and_the_parser_finds_it():
    count = {page.name: len(python_blocks(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert count["README.md"] >= 2 and count["integrations.md"] >= 6 and sum(count.values()) >= 12
    text = "x\n\n<!-- not run: no GPU -->\n```python\n1/0\n```\n\n```bash\nls\n```\n\n```python\ny = 1\n```\n"
    assert [(block.code, block.excuse, block.line) for block in python_blocks(text)] == [
        ("1/0\n", "no GPU", 5),
        ("y = 1\n", "", 13),
    ]


def test_no_integration_takes_ten_lines():
    for block in python_blocks((ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")):
        assert len(block.code.strip().splitlines()) < 10


#: Commands that end by themselves and need no download, with the small stand-in for each metric of the Hub.
_RUNS = ("score", "evaluate", "index", "search", "video")


def shell_commands(text: str) -> list[list[str]]:
    """The commands of a page's shell blocks, without comments."""
    blocks = [match[2].replace("\\\n", " ") for match in _FENCE.finditer(text) if match[1] in ("bash", "sh")]
    return [words for block in blocks for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def write_files(folder: Path) -> None:
    """What the commands of the pages read."""
    import av
    from evaluation_files import write_edits

    write_edits(folder, 3)
    (folder / "outputs.jsonl").write_text((folder / "edits.jsonl").read_text())
    (folder / "photos").mkdir()
    rng = np.random.default_rng(0)
    images = [Image.fromarray(render(sample_edit(rng).source, 64)) for _ in range(4)]
    for name, image in zip(("photos/0.png", "photos/1.png", "a.png", "b.png"), images, strict=True):
        image.save(folder / name)
    images[0].save(folder / "sunset.jpg")
    images[1].save(folder / "poster.png")
    (folder / "pairs.csv").write_text("a,b,aspects\na.png,b.png,lighting\n")
    with av.open(str(folder / "teacup.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for image in [*images, None]:
            frame = None if image is None else av.VideoFrame.from_image(image)
            container.mux(stream.encode(frame))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch):
    """In order, in one folder; `released:*` is `builtin:late` here. A server's and a recipe's flags are read and no more."""
    from rl_recipes.parsing import parse_arguments
    from tpips_reward.cli import build_parser, main

    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in shell_commands(page.read_text(encoding="utf-8")):
        words = [re.sub(r"^released:\w+$", "builtin:late", word) for word in words]
        if words[0] == "tpips-reward" and words[1] in _RUNS:
            assert main(words[1:]) == 0, words
        elif words[0] == "tpips-reward":
            build_parser().parse_args(words[1:])
        elif "rl_recipes/grpo_edit.py" in words:
            parse_arguments(words[words.index("rl_recipes/grpo_edit.py") + 1 :])
        else:
            assert words[0] in ("pip", "pytest", "accelerate", "python"), words
