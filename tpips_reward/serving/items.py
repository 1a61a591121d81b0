"""What is scored: one item a sample. Every wire format ends in a `Wanted`, and every answer starts from an `Answer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from tpips_reward.rewards.reward import RewardOutput
from tpips_reward.serving.errors import RequestError


@dataclass(frozen=True)
class Item:
    """One edit to score, decoded.

    Attributes:
        reward: a spec such as "tpips:preserve".
        image, source: the edit and what it was made from; several items may hold the same object.
        target_image: the intended result, or None.
        preserve, target: aspects to keep and to change.
    """

    reward: str
    image: Image.Image
    source: Image.Image
    preserve: tuple[str, ...]
    target: tuple[str, ...]
    target_image: Image.Image | None = None


@dataclass(frozen=True)
class Scored:
    """The reward of one item, as `RewardOutput`; `terms` hold NaN where something was not measured."""

    score: float
    per_aspect: dict[str, dict[str, float]]
    terms: dict[str, float]
    parts: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """JSON has no NaN: null."""
        terms, parts = (
            {name: value if math.isfinite(value) else None for name, value in values.items()} for values in (self.terms, self.parts)
        )
        return {"score": self.score, "per_aspect": self.per_aspect, "terms": terms, "parts": parts, "error": None}


Answer = Scored | RequestError


@dataclass(frozen=True)
class WantedItem:
    """One item of a request: indices into its images, or what is wrong with it."""

    reward: str
    image: int
    source: int
    preserve: tuple[str, ...]
    target: tuple[str, ...]
    target_image: int | None = None
    error: RequestError | None = None

    @property
    def images(self) -> tuple[int, ...]:
        return tuple(index for index in (self.image, self.source, self.target_image) if index is not None)


@dataclass(frozen=True)
class Wanted:
    """A request in any wire format.

    Attributes:
        images: the encoded images, or what is wrong with one; a bad image fails only the items that name it.
        items: what to score.
        render: the answers, one an item -> the JSON of the response.
        partial: whether the format has room for errors of single items; otherwise one error fails the request.
    """

    images: Sequence[bytes | RequestError]
    items: Sequence[WantedItem]
    render: Callable[[Sequence[Answer]], dict[str, Any]]
    partial: bool = True


def split_output(output: RewardOutput) -> list[Answer]:
    """A reward's output -> one answer an item. A score that is not finite is an error, never an answer."""
    scores = output.scores.tolist()
    terms, parts = (
        {name: values.tolist() for name, values in named.items()} for named in (output.terms, output.parts)
    )
    answers: list[Answer] = []
    for index, score in enumerate(scores):
        if not math.isfinite(score):
            answers.append(RequestError(500, "not_finite", f"The reward gave {score}; no score is made of it."))
            continue
        mine, added = ({name: values[index] for name, values in named.items()} for named in (terms, parts))
        answers.append(Scored(score, output.per_aspect[index], mine, added))
    return answers
