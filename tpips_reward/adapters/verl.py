"""verl and verl-omni: `compute_score(..., ground_truth, extra_info) -> {"score": float}`, one sample a call, by keyword.

verl-omni passes the image that its model made as `solution_image`; verl the text that its model wrote, as `solution_str`,
of which `to_image` makes the edit. The trainer does not pass the source image: put it in `extra_info` ("source_img", as
verl-omni's own edit reward has it). Calls come one sample at a time and from several threads; with a `RemoteReward` the
server makes batches of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from tpips_reward.adapters.core import EditScorer, RewardCall
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import decode
from tpips_reward.rewards.loading import load_reward
from tpips_reward.serving.client import RemoteReward


def compute_score_function(
    reward: str | RewardCall = "tpips:preserve",
    preserve: Sequence[str] = (),
    target: Sequence[str] = (),
    to_image: Callable[[str, Any], Any] | None = None,
    **options: Any,
) -> Callable[..., dict[str, float]]:
    """The function that `reward.custom_reward_function` names.

    Args:
        reward: for `load_reward`, or a reward that is loaded.
        preserve, target: aspects of samples whose extra_info names none.
        to_image: for verl, (text, source) -> the edit.
        **options: for `load_reward`.

    Returns:
        A function whose answer holds "score" and the terms of the reward, NaN where one was not measured: verl looks for
        the same names in all samples of a batch.
    """
    loaded = load_reward(reward, **options) if isinstance(reward, str) else reward
    scorer = EditScorer(loaded, preserve, target)
    # a model here takes one call at a time; a server is asked by all threads at once
    guard = nullcontext() if isinstance(loaded, RemoteReward) else threading.Lock()

    def compute_score(
        solution_image: Any = None,
        ground_truth: str | None = None,
        extra_info: Mapping[str, Any] | None = None,
        data_source: str | None = None,
        solution_str: str | None = None,
        **kwargs: Any,
    ) -> dict[str, float]:
        info = extra_info or {}
        source = image_of(info.get("source_img"), "source_img")
        if source is None:
            raise TPIPSError(
                "extra_info has no 'source_img'; put the image that was edited there when preparing the data."
            )
        if solution_image is None:
            if solution_str is None:
                raise TPIPSError("The sample has no answer: neither solution_image (verl-omni) nor solution_str (verl) was passed.")
            if to_image is None:
                raise TPIPSError("The answer is a text; give compute_score_function to_image=, which makes the edit of it.")
            solution_image = to_image(solution_str, source)
        edit = solution_image[0] if getattr(solution_image, "ndim", 3) == 4 else solution_image
        prompt = info.get("instruction") or ground_truth or ""
        ideal = image_of(info.get("target_img"), "target_img")
        with guard:
            output = scorer([edit], [source], [prompt], [info], None if ideal is None else [ideal])
        return {"score": float(output.scores[0]), **{name: float(values[0]) for name, values in output.terms.items()}}

    return compute_score


def image_of(given: Any, name: str) -> Any:
    """An image as parquet files hold it, `{"bytes": ...}`, decoded; anything else as it is.

    Args:
        name: of its column, for messages.

    Raises:
        TPIPSError: a dict without bytes; bytes that are no image.
    """
    if not isinstance(given, Mapping):
        return given
    if not isinstance(given.get("bytes"), bytes):
        raise TPIPSError(
            f"{name} of extra_info holds {sorted(given)} and no bytes; store the encoded image in the data."
        )
    return decode(given["bytes"], name)
