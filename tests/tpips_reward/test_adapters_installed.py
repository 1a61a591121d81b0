"""The adapters inside the trainers themselves, where they are installed. None of them is one of our dependencies.

verl is on PyPI and wants an older transformers than this project; Flow-Factory and UniRL are installed from their
repositories. flow_grpo and PaCo-RL keep their scores in a dict inside of a function, which only an edit of their file
reaches, and verl-omni needs vLLM-Omni: test_adapters_flow_grpo.py and test_adapters_verl.py have stubs of these.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from serving_workers import LocalWorker, TroubleMetric, picture, running

from tpips_reward import TPIPSReward
from tpips_reward.adapters.flow_factory import reward_model
from tpips_reward.adapters.verl import compute_score_function

EDITS, SOURCES = [picture(n) for n in (1, 2, 3)], [picture(n) for n in (7, 8, 9)]
PROMPTS = ["make the car red", "remove the dog", "make it night"]
ROWS: list[dict[str, Any]] = [
    {"preserve": ["background"], "target": ["color"]},
    {"preserve": ["lighting"], "target": []},
    {"preserve": ["background", "lighting"], "target": ["color"]},
]


def installed(module: str, how: str) -> Any:
    return pytest.importorskip(module, reason=f"{module} is not installed; {how}", exc_type=ImportError)


@pytest.fixture
def expected() -> Any:
    out = TPIPSReward(metric=TroubleMetric())(EDITS, SOURCES, [r["preserve"] for r in ROWS], [r["target"] for r in ROWS])
    return pytest.approx(out.scores.tolist(), abs=1e-6)


def tensor(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def test_verls_reward_manager(expected):
    """The model writes a number; `to_image` draws the picture of that number."""
    managers = installed("verl.experimental.reward_loop.reward_manager", "pip install --no-deps verl, and what it imports")
    from verl import DataProto

    class Tokenizer:
        def decode(self, ids: torch.Tensor, skip_special_tokens: bool = True) -> str:
            return str(int(ids[0]))

    def batch() -> Any:
        objects = {
            "data_source": ["edits"] * 3,
            "reward_model": [{"ground_truth": prompt} for prompt in PROMPTS],
            "extra_info": [{**row, "source_img": source} for row, source in zip(ROWS, SOURCES, strict=True)],
        }
        return DataProto.from_dict(
            tensors={"responses": torch.tensor([[1], [2], [3]]), "attention_mask": torch.ones(3, 1, dtype=torch.long)},
            non_tensors={name: np.array(values, dtype=object) for name, values in objects.items()},
        )

    asyncio.set_event_loop(asyncio.new_event_loop())
    function = compute_score_function(
        TPIPSReward(metric=TroubleMetric()), to_image=lambda text, source: picture(int(text))
    )
    manager = managers.get_reward_manager_cls("naive")(SimpleNamespace(), Tokenizer(), function)
    data = batch()
    answers = [manager.loop.run_until_complete(manager.run_single(data[index : index + 1])) for index in range(3)]
    assert [answer["reward_score"] for answer in answers] == expected
    infos = [answer["reward_extra_info"] for answer in answers]
    assert np.isnan([info["gate"] for info in infos]).tolist() == [False, True, False]
    assert all(set(info) == set(infos[0]) for info in infos)  # verl makes a column of each


def flow_factory() -> Any:
    return installed("flow_factory.rewards", "pip install git+https://github.com/X-GenGroup/Flow-Factory")


def flow_factory_rewards(model: Any, **fields: Any) -> list[float]:
    """What the trainer's own processor makes of samples."""
    from flow_factory.rewards import RewardProcessor
    from flow_factory.samples import I2ISample

    samples = [
        I2ISample(prompt=prompt, image=tensor(edit), condition_images=[tensor(source)], all_latents=torch.zeros(2, 4),
                  extra_kwargs={"metadata": row})
        for prompt, edit, source, row in zip(PROMPTS, EDITS, SOURCES, ROWS, strict=True)
    ]  # fmt: skip
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), is_local_main_process=False, wait_for_everyone=lambda: None
    )
    processor = RewardProcessor(accelerator, {"tpips": model}, verbose=False)
    return processor.compute_rewards(samples, split="pointwise")["tpips"].tolist()


def test_flow_factorys_processor(expected):
    rewards = flow_factory()
    from flow_factory.hparams import RewardArguments

    with running([LocalWorker()]) as address:
        config = RewardArguments.from_dict({"name": "tpips", "device": "cpu", "batch_size": 2, "reward": f"remote:{address}"})
        model = reward_model(rewards.PointwiseRewardModel, rewards.RewardModelOutput)(config=config, accelerator=None)
        assert flow_factory_rewards(model) == expected


def test_flow_factorys_remote_model():
    """Its own client asks /compute; aspects are proposed by rules, for it sends nothing but prompts."""
    flow_factory()
    remote = installed("flow_factory.rewards.my_reward_remote", "it is part of Flow-Factory")
    from flow_factory.hparams import RewardArguments

    from tpips_reward.adapters import EditScorer

    class Remote(remote.RemotePointwiseRewardModel):
        required_fields = ("prompt", "image", "condition_images")

    with running([LocalWorker()]) as address:
        config = RewardArguments.from_dict({"name": "tpips", "device": "cpu", "batch_size": 2, "server_url": address})
        found = flow_factory_rewards(Remote(config, None))
    wanted = EditScorer(TPIPSReward(metric=TroubleMetric()))(EDITS, SOURCES, PROMPTS)
    assert found == pytest.approx(wanted.scores.tolist(), abs=1e-6)


class Pixels:
    """A batch of images as UniRL carries them."""

    def __init__(self, images: list[Any]) -> None:
        self.pixels = torch.stack([tensor(image) for image in images])

    def __len__(self) -> int:
        return len(self.pixels)


def test_unirls_backend(expected):
    remote = installed("unirl.reward.remote", "pip install git+https://github.com/Tencent-Hunyuan/UniRL")
    from unirl.types.reward import RewardRequest

    with running([LocalWorker()]) as address:
        spec = remote.RemoteRewardSpec(base_url=address, required_rewards=("tpips:preserve",), image_format="PNG")
        backend = remote.RemoteRewardBackend(config=spec, base_device="cpu")
        assert backend.is_available()

        request = RewardRequest(
            primitives={"text": SimpleNamespace(texts=PROMPTS), "image": Pixels(SOURCES)},
            generated={"image": Pixels(EDITS)},
            metadata=ROWS,
        )
        response = backend.compute_rewards(request)
        assert response.rewards == expected and response.successes == [True] * 3
