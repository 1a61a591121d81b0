"""Columns of foreign trainers that are longer or shorter than the batch: the column is named, with both counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from serving_workers import TroubleMetric, picture

from tpips_reward import TPIPSReward
from tpips_reward.adapters.flow_factory import reward_model
from tpips_reward.adapters.trl import TRLReward
from tpips_reward.errors import TPIPSError

EDITS, SOURCES, PROMPTS = [picture(n) for n in range(4)], [picture(n) for n in range(4, 8)], ["make it red"] * 4
REWARD = TPIPSReward("tpips:preserve", TroubleMetric())


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"image": SOURCES[:2]}, "image has 2 entries for 4 completions"),
        ({"preserve": [["background"]] * 3}, "preserve has 3 entries for 4 completions"),
        ({"target": [["color"]] * 5}, "target has 5 entries for 4 completions"),  # or rows would get the aspects of others
        ({"prompts": PROMPTS[:1]}, "prompts has 1 entries for 4 completions"),
    ],
)
def test_trl_names_the_column(columns, words):
    given = {"prompts": PROMPTS, "completions": EDITS, "image": SOURCES, "preserve": [["background"]] * 4, **columns}
    with pytest.raises(TPIPSError, match=words):
        TRLReward(REWARD)(**given)


def test_flow_factory_names_the_field(monkeypatch):
    class Pointwise:
        def __init__(self, config: Any, accelerator: Any) -> None:
            self.device = "cpu"

    monkeypatch.setattr("tpips_reward.adapters.flow_factory.load_reward", lambda *_, **__: REWARD)
    model = reward_model(Pointwise, SimpleNamespace)(SimpleNamespace(extra_kwargs={}), None)
    with pytest.raises(TPIPSError, match="condition_images has 2 entries for 4 images"):
        model(prompt=PROMPTS, image=EDITS, condition_images=[[source] for source in SOURCES[:2]])
    assert model(prompt=PROMPTS, image=EDITS, condition_images=[[source] for source in SOURCES]).rewards.shape == (4,)
