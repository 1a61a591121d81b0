"""The reward inside the flow_grpo family, with PaCo-RL: stubs of the signatures that they publish."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from adapter_samples import EDITS, PROMPTS, ROWS, SOURCES
from serving_workers import TroubleMetric, picture

from tpips_reward import TPIPSReward
from tpips_reward.adapters.flow_grpo import score_factory, score_function
from tpips_reward.errors import TPIPSError


def multi_score(device: str, score_dict: dict[str, float], factories: dict[str, Any], with_sources: tuple[str, ...]) -> Any:
    """As flow_grpo's own (yifan123/flow_grpo at 94e23ee, flow_grpo/rewards.py; Edit-R1's at 244883c is alike).

    It looks into the factory's code for `device`, multiplies scores one by one, and passes `ref_images` only to the
    scores of its own branches, as the branch is that docs/integrations.md adds.
    """
    functions = {
        name: factories[name](device) if "device" in factories[name].__code__.co_varnames else factories[name]()
        for name in score_dict
    }

    def score(images: Any, prompts: Any, metadata: Any, ref_images: Any = None, only_strict: bool = True) -> Any:
        total: list[Any] = []
        all_scores = {}
        for name, weight in score_dict.items():
            sources = (ref_images,) if name in with_sources else ()
            scores, _ = functions[name](images, prompts, metadata, *sources)
            all_scores[name] = scores
            weighted = [weight * one for one in scores]
            total = weighted if not total else [a + b for a, b in zip(total, weighted, strict=True)]
        return {**all_scores, "avg": total}, {}

    return score


def test_flow_grpo_takes_all_its_kinds_of_images(reward, expected):
    score = multi_score("cpu", {"tpips": 1.0}, {"tpips": score_factory(reward)}, ("tpips",))
    arrays = np.stack([np.array(edit) for edit in EDITS])
    tensors = torch.from_numpy(arrays).permute(0, 3, 1, 2) / 255
    refs = torch.stack([torch.from_numpy(np.array(s)).permute(2, 0, 1) / 255 for s in SOURCES])
    for images in (EDITS, arrays, tensors):
        assert score(images, PROMPTS, ROWS, refs)[0]["avg"] == expected
    assert score(EDITS, tuple(PROMPTS), tuple(ROWS), SOURCES)[0]["avg"] == expected
    both = {"tpips": score_factory(reward), "more": score_factory(reward)}
    half = multi_score("cpu", {"tpips": 0.5, "more": 0.5}, both, ("tpips", "more"))
    assert half(EDITS, PROMPTS, ROWS, SOURCES)[0]["avg"] == expected


def test_flow_grpo_without_its_branch_stops(reward):
    """The metadata of its edit sets name the source's file, which is no image."""
    score = multi_score("cpu", {"tpips": 1.0}, {"tpips": score_factory(reward)}, ())
    rows = [{**row, "image": "images/1.png"} for row in ROWS]
    with pytest.raises(TPIPSError, match="Sample 0 has no source image"):
        score(EDITS, PROMPTS, rows, SOURCES)


def test_paco_rls_own_way_to_call(reward, expected):
    """As X-GenGroup/PaCo-RL at 08caac6 does it: named options that the factory takes, PIL images, sources in the metadata."""
    factory = score_factory(reward)
    given = {"device": "cpu", "port": 8000}
    function = factory(**{name: value for name, value in given.items() if name in inspect.signature(factory).parameters})
    metadata = [dict(row) for row in ROWS]
    for row, source in zip(metadata, SOURCES, strict=True):
        row["ref_image"] = source
    scores, details = function(EDITS, PROMPTS, metadata)
    assert isinstance(scores, np.ndarray) and scores.tolist() == expected and details == {}


@pytest.mark.parametrize("key", ["ref_image", "image", "source"])
def test_paco_rl_keeps_the_source_in_the_metadata(reward, expected, key):
    rows = [{**row, key: source} for row, source in zip(ROWS, SOURCES, strict=True)]
    scores, details = score_function(reward)(EDITS, PROMPTS, rows)
    assert scores.tolist() == expected and scores.dtype == np.float32 and details == {}


def test_flow_grpo_loads_the_reward_on_the_trainers_device(parity):
    factory = score_factory("tpips:preserve", metric=str(parity / "embedding"), gate="none")
    images = [picture(n, 64) for n in (1, 2)]
    scores, _ = factory("cpu")(images, PROMPTS[:2], ROWS[:2], [picture(3, 64)] * 2)
    assert scores.shape == (2,) and np.isfinite(scores).all()
    with pytest.raises(TPIPSError, match="Sample 0 has no source"):
        score_function(TPIPSReward(metric=TroubleMetric()))(EDITS, PROMPTS, ROWS)
    with pytest.raises(TPIPSError, match="metadata has 1 entries"):
        score_function(TPIPSReward(metric=TroubleMetric()))(EDITS, PROMPTS, ROWS[:1])
