"""The reward inside Flow-Factory: stubs of X-GenGroup/Flow-Factory at a0b2bc5 (0.1.0).

test_adapters_installed.py asks its own classes.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from adapter_samples import EDITS, PROMPTS, ROWS, SOURCES
from serving_workers import LocalWorker, TroubleMetric, picture, running

from tpips_reward import TPIPSReward
from tpips_reward.adapters.flow_factory import reward_model
from tpips_reward.errors import TPIPSError


@dataclass
class RewardModelOutput:
    rewards: Any
    extra_info: dict[str, Any] | None = None


@dataclass
class RewardArguments:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: str = "float32"
    extra_kwargs: dict[str, Any] = field(default_factory=dict)


class PointwiseRewardModel:
    """The part of the trainer's class that subclasses meet."""

    required_fields: tuple[str, ...] = ("image", "prompt")
    use_tensor_inputs = False

    def __init__(self, config: RewardArguments, accelerator: Any) -> None:
        self.accelerator, self.config, self.device = accelerator, config, config.device


def filtered(model: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Arguments are chosen by the names of parameters, as the trainer does it; **kwargs would take every field."""
    parameters = inspect.signature(model.__call__).parameters
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: fields[name] for name in parameters if name in fields}


def test_flow_factory_makes_and_calls_the_model(parity):
    options = {"reward": "tpips:edit", "metric": str(parity / "embedding"), "gate_threshold": 0.3}
    model = reward_model(PointwiseRewardModel, RewardModelOutput)(RewardArguments(extra_kwargs=options), None)
    assert set(model.required_fields) == {"prompt", "image", "condition_images"}
    edits, sources = [picture(n, 64) for n in (1, 2, 3)], [picture(n, 64) for n in (7, 8, 9)]
    fields = {"prompt": PROMPTS, "image": edits, "condition_images": [[source] for source in sources], "audio": None,
              "metadata": [json.dumps(row) for row in ROWS]}  # fmt: skip
    answer = model(**filtered(model, fields))
    wanted = TPIPSReward("tpips:edit", str(parity / "embedding"), gate_threshold=0.3, device="cpu")(
        edits, sources, [row["preserve"] for row in ROWS], [row["target"] for row in ROWS]
    )
    torch.testing.assert_close(answer.rewards, wanted.scores)
    with pytest.raises(TPIPSError, match="condition_images"):
        model(prompt=PROMPTS, image=edits)
    with pytest.raises(TPIPSError, match="Sample 2 has no source"):
        model(prompt=PROMPTS, image=edits, condition_images=[[sources[0]], [sources[1]], []])


def test_flow_factory_with_a_server():
    with running([LocalWorker()]) as address:
        options = {"reward": f"remote:{address}", "preserve": "background", "target": ["color"]}
        model = reward_model(PointwiseRewardModel, RewardModelOutput)(RewardArguments(extra_kwargs=options), None)
        answer = model(prompt=PROMPTS, image=EDITS, condition_images=[[source] for source in SOURCES])
    wanted = TPIPSReward(metric=TroubleMetric())(EDITS, SOURCES, [["background"]] * 3, [["color"]] * 3)
    torch.testing.assert_close(answer.rewards, wanted.scores)
