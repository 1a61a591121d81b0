"""A training loss: minus the reward, with the gradient to the edited pixels (DRaFT, ReFL, AlignProp, a pixel loss)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tpips_reward.adapters.core import EditScorer
from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.pairs import image_list
from tpips_reward.rewards.reward import RewardOutput, TPIPSReward


class LossAdapter:
    """`loss(edits, sources, ...)` -> a scalar to minimise. The metric's own weights are frozen.

    Args:
        reward: on the device of the images; a `RemoteReward` has no gradient and is refused.
        weight: of the loss.
        preserve, target: aspects of samples that name none.

    Raises:
        TPIPSError: a reward without gradients, a weight that is not positive.
    """

    def __init__(
        self, reward: TPIPSReward, weight: float = 1.0, preserve: Sequence[str] = (), target: Sequence[str] = ()
    ) -> None:
        if not isinstance(reward, TPIPSReward):
            raise TPIPSError(f"A loss needs gradients, and {type(reward).__name__} has none; give a TPIPSReward.")
        if not 0 < weight < float("inf"):
            raise TPIPSError(f"The weight of the loss is {weight!r}; give a positive number.")
        fusion = getattr(reward.metric, "fusion", None)
        if isinstance(fusion, torch.nn.Module):
            fusion.requires_grad_(False)
        self.scorer = EditScorer(reward, preserve, target)
        self.weight = weight
        self.output: RewardOutput | None = None

    def __call__(
        self,
        images: Tensor | Sequence[Tensor],
        sources: Any,
        prompts: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        target_images: Any = None,
    ) -> Tensor:
        """Minus the mean score, times the weight; the last `RewardOutput` stays in `output`, for logs.

        Args:
            images: (B, 3, H, W), one (3, H, W), or a list of those: floats in the reward's value_range; must require grad where autograd
                is on.
            sources: the same, one each.

        Raises:
            TPIPSError: no gradient could flow to an image, and whatever the reward raises.
        """
        edits = image_list(images)
        if torch.is_grad_enabled():
            for index, edit in enumerate(edits):
                if not (isinstance(edit, Tensor) and edit.requires_grad):
                    raise TPIPSError(
                        f"images[{index}] carries no gradient; decode the latents with autograd on, or call the loss inside "
                        "of torch.no_grad() to measure only."
                    )
        ideals = None if target_images is None else image_list(target_images)
        texts = list(prompts) if prompts is not None else [""] * len(edits)
        self.output = self.scorer(edits, image_list(sources), texts, metadata, ideals)
        return -self.weight * self.output.scores.mean()
