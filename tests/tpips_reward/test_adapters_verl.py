"""The reward inside verl and verl-omni: stubs of verl-project/verl-omni at a1139ba, which needs vLLM-Omni and so a GPU.

test_adapters_installed.py asks the manager of verl 0.9.1 itself.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from adapter_samples import EDITS, PROMPTS, ROWS, SOURCES
from serving_workers import LocalWorker, TroubleMetric, encoded, running

from tpips_reward import RemoteReward, TPIPSReward
from tpips_reward.adapters.verl import compute_score_function
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import decode


def verl_calls(function: Any, info: list[dict[str, Any]]) -> list[Any]:
    """As verl-omni's VisualRewardManager does: single samples, a plain function in threads of an event loop."""

    async def run_all() -> list[Any]:
        loop = asyncio.get_running_loop()
        assert not inspect.iscoroutinefunction(function)

        def one(index: int) -> Any:
            image = torch.from_numpy(np.array(EDITS[index])).permute(2, 0, 1)
            return function(
                data_source="edits", solution_image=image, ground_truth=PROMPTS[index], extra_info=info[index]
            )

        return list(await asyncio.gather(*(loop.run_in_executor(None, one, index) for index in range(len(EDITS)))))

    answers = asyncio.run(run_all())
    for name in answers[0]:  # the reward loop makes a column of each name that the first sample has
        np.array([answer[name] for answer in answers])
    return answers


def test_verl_scores_single_samples_from_threads(reward, expected):
    info = [{**row, "source_img": source, "num_turns": None} for row, source in zip(ROWS, SOURCES, strict=True)]
    answers = verl_calls(compute_score_function(reward), info)
    assert [answer["score"] for answer in answers] == expected
    assert all(isinstance(value, float) for answer in answers for value in answer.values())
    ungated = [{**row, "target": [] if n else row["target"]} for n, row in enumerate(info)]
    ungated[1]["preserve"] = ungated[2]["preserve"] = ["background"]
    assert [np.isnan(answer["gate"]) for answer in verl_calls(compute_score_function(reward), ungated)] == [False, True, True]
    stored = [{**row, "source_img": {"bytes": encoded(row["source_img"]), "path": None}} for row in info]
    assert [answer["score"] for answer in verl_calls(compute_score_function(reward), stored)] == expected


def test_verl_with_a_server_makes_batches():
    worker = LocalWorker()
    with running([worker]) as address:
        function = compute_score_function(RemoteReward(f"remote:{address}"))
        info = [{**row, "source_img": source} for row, source in zip(ROWS, SOURCES, strict=True)]
        wanted = verl_calls(compute_score_function(TPIPSReward(metric=TroubleMetric())), info)
        assert [a["score"] for a in verl_calls(function, info)] == pytest.approx([a["score"] for a in wanted])


def test_verl_names_the_image_that_is_bad(reward):
    info = {"source_img": SOURCES[0], "target_img": {"bytes": b"no image"}, "preserve": ["lighting"], "target": ["color"]}
    with pytest.raises(TPIPSError, match="^target_img is no image"):
        compute_score_function(reward)(EDITS[0], "make it red", info)


def test_decoding_leaves_the_warning_filters_of_the_process_alone(monkeypatch):
    """They belong to all threads, and verl calls a reward from many."""

    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("the filters were changed")

    content = encoded(SOURCES[0])
    for name in ("catch_warnings", "simplefilter", "filterwarnings"):
        monkeypatch.setattr(f"warnings.{name}", touched)
    assert decode(content, "source_img").shape[0] == 3


def test_verl_without_a_source_stops(reward):
    function = compute_score_function(reward)
    with pytest.raises(TPIPSError, match="source_img"):
        function(EDITS[0], "make it red", {})
    with pytest.raises(TPIPSError, match="no bytes"):
        function(EDITS[0], "make it red", {"source_img": {"path": "/x.png"}})
    with pytest.raises(TPIPSError, match="to_image"):
        function(data_source="edits", solution_str="a text", ground_truth="", extra_info={"source_img": SOURCES[0]})
    with pytest.raises(TPIPSError, match="no answer: neither solution_image"):
        function(ground_truth="", extra_info={"source_img": SOURCES[0]})
    answer = function(
        torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "make it red", {"source_img": SOURCES[0], "target_img": SOURCES[1]}
    )
    assert set(answer) >= {"score", "preserve"}
