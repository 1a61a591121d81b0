"""Flow-Factory: a `PointwiseRewardModel`, made from the trainer's own classes so that nothing of it is imported here.

Its remote variant needs no code at all: `tpips-reward serve` answers `POST /compute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpips_reward.adapters.core import EditScorer
from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.loading import load_reward
from tpips_reward.serving.client import PREFIX


def reward_model(pointwise: type, output: type) -> type:
    """A reward model class for Flow-Factory's config.

    Extra keys of the reward's YAML are read from `config.extra_kwargs`: `reward` ("tpips:preserve" where it is left out,
    or remote:http://...), `preserve` and `target` (aspects of samples that name none), and options of `load_reward`.

    Args:
        pointwise: flow_factory.rewards.PointwiseRewardModel.
        output: flow_factory.rewards.RewardModelOutput.

    Example:
        from flow_factory.rewards import PointwiseRewardModel, RewardModelOutput
        TPIPS = reward_model(PointwiseRewardModel, RewardModelOutput)   # reward_model: "my_rewards.TPIPS"
    """

    # The trainer gathers the fields that __call__ names, and with **kwargs all of a sample, its latents among them.
    class TPIPSRewardModel(pointwise):
        required_fields = ("prompt", "image", "condition_images")
        use_tensor_inputs = False

        def __init__(self, config: Any, accelerator: Any) -> None:
            super().__init__(config, accelerator)
            options = dict(getattr(config, "extra_kwargs", None) or {})
            name = options.pop("reward", "tpips:preserve")
            aspects = options.pop("preserve", ()), options.pop("target", ())
            if not name.startswith(PREFIX):
                options = {"device": self.device, **options}
            self.scorer = EditScorer(load_reward(name, **options), *aspects)

        def __call__(
            self,
            prompt: Sequence[str],
            image: Sequence[Any] | None = None,
            condition_images: Sequence[Sequence[Any]] | None = None,
            metadata: Sequence[str] | None = None,
        ) -> Any:
            if image is None or condition_images is None:
                raise TPIPSError("An edit needs image and condition_images; this reward scores images and no videos.")
            if len(condition_images) != len(image):
                raise TPIPSError(
                    f"condition_images has {len(condition_images)} entries for {len(image)} images; give a list of sources each."
                )
            sources = [conditions[0] if len(conditions) else None for conditions in condition_images]
            scores = self.scorer(image, sources, prompt, metadata).scores
            return output(rewards=scores.detach().to(self.device))

    return TPIPSRewardModel
