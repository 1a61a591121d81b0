"""The flow_grpo family (flow_grpo, DanceGRPO, DiffusionNFT, Edit-R1, ddpo-pytorch, PaCo-RL, TRL's former DDPO trainer).

A score is a factory `name(device)` whose function takes `(images, prompts, metadata)` and answers `(scores, {})`. The
source of an edit is in `ref_images`, or in a sample's metadata. flow_grpo and Edit-R1 pass `ref_images` only to scores that
their `multi_score` names, so that it needs a line for ours; PaCo-RL puts the sources into the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tpips_reward.adapters.core import EditScorer, RewardCall
from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.loading import load_reward
from tpips_reward.rewards.pairs import image_list
from tpips_reward.serving.client import PREFIX

#: Where the family's data sets keep the source image.
SOURCE_KEYS = ("ref_image", "image", "source")
ScoreFunction = Callable[..., tuple[np.ndarray, dict[str, Any]]]


def score_factory(
    reward: str | RewardCall = "tpips:preserve",
    preserve: Sequence[str] = (),
    target: Sequence[str] = (),
    **options: Any,
) -> Callable[..., ScoreFunction]:
    """A factory as the family's dict of scores holds them: `score_functions["tpips"] = score_factory(...)`.

    Args:
        reward: for `load_reward` (loaded on the device that the trainer gives), or a reward that is loaded.
        preserve, target: aspects of samples whose metadata name none.
        **options: for `load_reward`.
    """

    def tpips_score(device: Any = None) -> ScoreFunction:
        if isinstance(reward, str):
            here = {} if reward.startswith(PREFIX) else {"device": device}
            return score_function(load_reward(reward, **{**here, **options}), preserve, target)
        return score_function(reward, preserve, target)

    return tpips_score


def score_function(reward: RewardCall, preserve: Sequence[str] = (), target: Sequence[str] = ()) -> ScoreFunction:
    """`(images, prompts, metadata, ref_images=None) -> (scores (B,) float32, {})`; also for the old DDPO trainer.

    Images are tensors (B, 3, H, W) in [0, 1], arrays (B, H, W, 3) of uint8, or a list of PIL images.
    """
    scorer = EditScorer(reward, preserve, target)

    def score(
        images: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None, ref_images: Any = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        edits = image_list(images)
        if metadata is not None and len(metadata) != len(edits):
            raise TPIPSError(f"metadata has {len(metadata)} entries for {len(edits)} images; give one each.")
        rows: list[Mapping[str, Any]] = list(metadata) if metadata is not None else [{} for _ in edits]
        sources = image_list(ref_images) if ref_images is not None else [_source(row) for row in rows]
        output = scorer(edits, sources, list(prompts), rows)
        return output.scores.detach().cpu().numpy(), {}

    return score


def _source(row: Mapping[str, Any]) -> Any:
    """The source in a sample's metadata. A text there is the name of a file, as flow_grpo's data sets have it: no image."""
    return next((row[key] for key in SOURCE_KEYS if row.get(key) is not None and not isinstance(row[key], str)), None)
