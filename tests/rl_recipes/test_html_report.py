"""The page of a run: what is in it, and that a user's text is text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_recipes import html_report
from rl_recipes.evaluation import MEASURES, Evaluation, compare

#: A reward of several, with a name that is no HTML.
PART = "reward/my_module:<lambda>"


def _page(path: Path, **changes: Any) -> str:
    row = {"key": "a", "kind": None, "instruction": "x", "aspects": {}, **dict.fromkeys(MEASURES), "reward": 0.25, PART: 0.5}
    before, after = Evaluation([row]), Evaluation([{**row, "reward": 0.75, PART: 0.625}])
    summary = {
        "recipe": "grpo_edit", "editor": "builtin", "reward": "r", "held_out": True, "iterations": 1, "seconds": 60, "seed": 0,
        "evaluated": 1, "warnings": [], "bad_rows": [], "before": before.means(), "after": after.means(),
        "difference": compare(before, after), **changes,
    }  # fmt: skip
    html_report.write(path / "report.html", summary, {}, before, after, [], [])
    return (path / "report.html").read_text(encoding="utf-8")


def test_the_reward_and_its_parts_stand_in_the_table(tmp_path: Path) -> None:
    page = _page(tmp_path)
    assert "<td>reward ↑</td><td>0.2500</td><td>0.7500</td><td>+0.5000</td>" in page
    assert "<td>reward/my_module:&lt;lambda&gt; ↑</td><td>0.5000</td><td>0.6250</td><td>+0.1250</td>" in page


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, None), (1, "1 bad row was skipped:"), (5, "5 bad rows were skipped:"), (7, "7 bad rows were skipped; the first 5, all")],
)
def test_skipped_rows_are_counted_and_the_first_ones_named(count: int, said: str | None, tmp_path: Path) -> None:
    bad = [{"file": "my <edits>.jsonl", "line": i, "reason": f"<script>{i}</script>"} for i in range(1, count + 1)]
    page = _page(tmp_path, bad_rows=bad)
    if said is None:
        assert "bad row" not in page
        return
    assert said in page
    assert "<td>my &lt;edits&gt;.jsonl</td><td>1</td><td>&lt;script&gt;1&lt;/script&gt;</td>" in page
    assert page.count("&lt;script&gt;") == min(count, 5) and "<script>" not in page
