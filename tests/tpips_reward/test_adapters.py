"""The reward inside other trainers: the core of all adapters, and what they do when no score can be had.

Each trainer has a file of its own, with its own trainer or faithful stubs of the signatures that it publishes.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from adapter_samples import EDITS, PROMPTS, ROWS, SOURCES
from serving_workers import TroubleMetric

from tpips_reward import RemoteReward, TPIPSReward
from tpips_reward.adapters import EditScorer, aspects_of
from tpips_reward.adapters.flow_grpo import score_function
from tpips_reward.adapters.trl import TRLReward
from tpips_reward.adapters.verl import compute_score_function
from tpips_reward.aspects import propose
from tpips_reward.errors import TPIPSError


def test_aspects_are_the_samples_own_then_the_given_then_proposed():
    own = {"preserve": "background", "target": np.array(["color"])}
    assert aspects_of("make it red", own, ["x"], ["y"]).preserve == ("background",)
    assert aspects_of("make it red", json.dumps({"preserve": ["a"], "target": ["b"]})).target == ("b",)
    assert aspects_of("make it red", {"other": 1}, ["x"], ["y"]).target == ("y",)
    proposal, found = propose(PROMPTS[0]), aspects_of(PROMPTS[0], None)
    assert (found.preserve, found.target) == (proposal.preserve, proposal.target)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [("no json", "no JSON"), ("[1]", "list"), ({"preserve": [1]}, "preserve=[1]"), ({"target": 5}, "target=5")],
)
def test_metadata_that_are_none(metadata, words):
    with pytest.raises(TPIPSError) as caught:
        aspects_of("make it red", metadata)
    assert words in str(caught.value)


def test_one_string_is_one_aspect():
    assert aspects_of("", None, "background", "color") == aspects_of("", None, ["background"], ["color"])
    scorer = EditScorer(TPIPSReward(metric=TroubleMetric()), "background", None)
    assert (scorer.preserve, scorer.target) == (("background",), ())
    with pytest.raises(TPIPSError, match="target=5"):
        EditScorer(TPIPSReward(metric=TroubleMetric()), (), 5)


def test_neither_aspects_nor_an_instruction():
    with pytest.raises(TPIPSError, match="names no aspects"):
        aspects_of("  ", {})


def test_the_core_refuses_what_would_be_misaligned(reward):
    scorer = EditScorer(reward)
    for arguments in (
        (EDITS, SOURCES[:2], PROMPTS),
        (EDITS, SOURCES, PROMPTS[:2]),
        (EDITS, SOURCES, PROMPTS, ROWS[:1]),
    ):
        with pytest.raises(TPIPSError, match="for 3 images"):
            scorer(*arguments)
    with pytest.raises(TPIPSError, match="Sample 1 has no source"):
        scorer(EDITS, [SOURCES[0], None, SOURCES[2]], PROMPTS, ROWS)


def test_a_score_that_is_no_number_stops():
    class Broken:
        def __call__(self, images: Any, *_: Any, **__: Any) -> Any:
            from tpips_reward import RewardOutput

            return RewardOutput(torch.tensor([0.5, float("nan")]), [{}, {}], {})

    with pytest.raises(TPIPSError, match="nan for sample 1"):
        EditScorer(Broken())(EDITS[:2], SOURCES[:2], PROMPTS[:2], ROWS[:2])


def test_every_adapter_stops_when_the_server_is_gone():
    gone = RemoteReward("remote:http://127.0.0.1:9", patience=0.2)
    calls = [
        lambda: TRLReward(gone)(PROMPTS, EDITS, image=SOURCES),
        lambda: score_function(gone)(EDITS, PROMPTS, ROWS, SOURCES),
        lambda: compute_score_function(gone)(EDITS[0], PROMPTS[0], {"source_img": SOURCES[0]}),
    ]
    with ThreadPoolExecutor(3) as pool:
        for call in [pool.submit(call) for call in calls]:
            with pytest.raises(TPIPSError, match="No score is made of it"):
                call.result()
