"""Rewards of a user's own, for --reward module:function."""

from __future__ import annotations

import torch
from torch import Tensor

from tpips_reward.rewards import RewardOutput

CALLS: list[int] = []


def brightness(images: list[Tensor]) -> Tensor:
    return torch.stack([image.mean() for image in images])


def brightness_without_gradient(images: list[Tensor], instructions: list[str]) -> list[float]:
    assert len(instructions) == len(images)
    return [float(image.detach().mean()) for image in images]


def everything(**given: object) -> list[float]:
    assert set(given) == {"images", "sources", "instructions", "preserve", "target"}
    return [float(len(aspects)) for aspects in given["preserve"]]  # type: ignore[attr-defined]


def fails_twice(images: list[Tensor]) -> list[float]:
    CALLS.append(len(images))
    if len(CALLS) < 3:
        raise ConnectionError("the server is down")
    return [1.0] * len(images)


def whitens_in_place(images: list[Tensor], sources: list[Tensor]) -> list[float]:
    for image in (*images, *sources):
        image.fill_(1.0)
    return [1.0] * len(images)


def fails_in_two_lines(images: list[Tensor]) -> list[float]:
    raise RuntimeError("out of memory\nTry again with less")


def not_a_number(images: list[Tensor]) -> list[float]:
    return [float("nan")] * len(images)


def too_few(images: list[Tensor]) -> list[float]:
    return [0.5]


def asks_for_more(images: list[Tensor], masks: list[Tensor]) -> list[float]:
    return []


def asks_for_nothing() -> list[float]:
    return []


def whole_output(images: list[Tensor]) -> RewardOutput:
    scores = torch.full((len(images),), 0.5)
    aspects = [{"preserve": {"background": 0.25}} for _ in images]
    return RewardOutput(scores, aspects, {"preserve": scores}, {"a part of its own": scores})


def full_device(images: list[Tensor]) -> list[float]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def output_without_aspects(images: list[Tensor]) -> RewardOutput:
    return RewardOutput(torch.ones(len(images)), [], {})


def output_with_a_bad_term(images: list[Tensor]) -> RewardOutput:
    return RewardOutput(torch.ones(len(images)), [{} for _ in images], {"gate": torch.full((len(images),), torch.inf)})


def output_with_a_bad_aspect(images: list[Tensor]) -> RewardOutput:
    return RewardOutput(torch.ones(len(images)), [{"preserve": {"x": float("nan")}} for _ in images], {})


NUMBER = 3
