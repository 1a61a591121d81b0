"""Three edits, as trainers hand them to their rewards, and the scores that every adapter must give."""

from __future__ import annotations

from typing import Any

import pytest
from serving_workers import TroubleMetric, picture

from tpips_reward import TPIPSReward

EDITS, SOURCES = [picture(n) for n in (1, 2, 3)], [picture(n) for n in (7, 8, 9)]
PROMPTS = ["make the car red", "remove the dog", "make it night"]
ROWS = [{"preserve": ["background"], "target": ["color"]}, {"preserve": ["lighting"], "target": ["size"]},
        {"preserve": ["background", "lighting"], "target": ["color"]}]  # fmt: skip


def preserve_reward() -> TPIPSReward:
    return TPIPSReward("tpips:preserve", TroubleMetric())


def expected_scores(reward: TPIPSReward) -> Any:
    """What an adapter must give for the samples, for a comparison with ``==``."""
    out = reward(EDITS, SOURCES, [row["preserve"] for row in ROWS], [row["target"] for row in ROWS])
    return pytest.approx(out.scores.tolist())
