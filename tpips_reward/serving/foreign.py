"""Other trainers' wire formats: Flow-Factory's `POST /compute`, and UniRL's `POST /score`.

Both send an instruction and not aspects; those come from the sample's metadata or from rules (`adapters.core`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

import tpips_reward
from tpips_reward.adapters.core import aspects_of
from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.spec import parse_reward
from tpips_reward.serving.errors import RequestError, bad_field
from tpips_reward.serving.items import Answer, Scored, Wanted, WantedItem
from tpips_reward.serving.wire import attempt, check_count, check_reward, checked, checked_item

#: Of an instruction; the rules that read it know no more than a few clauses.
MAX_PROMPT_LETTERS = 2000
_IDENTITY = ("request_id", "sample_id", "group_id", "source_rank", "policy_version", "idempotency_key")


class ComputeRequest(BaseModel):
    """Flow-Factory's body. Its client and its example server name the fields differently; both are read."""

    model_config = ConfigDict(extra="ignore", strict=True)
    prompt: list[str] | None = None
    prompts: list[str] | None = None
    image: list[Any] | None = None
    images: list[Any] | None = None
    condition_images: list[list[Any]] | None = None
    kwargs: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None


class Turn(BaseModel):
    """One turn of UniRL's history."""

    model_config = ConfigDict(extra="ignore", strict=True)
    text: str | None = None
    image_b64: str | None = None


class HistoryItem(BaseModel):
    """One sample of UniRL's body: the source, then the edit."""

    model_config = ConfigDict(extra="allow", strict=True)
    history: list[Turn]
    required_rewards: list[str]
    metadata: dict[str, Any] | None = None


class HistoryRequest(BaseModel):
    """UniRL's body."""

    model_config = ConfigDict(extra="ignore", strict=True)
    requests: list[HistoryItem]


def parse_compute(content: Any, reward: str, limit: int) -> Wanted:
    """Flow-Factory: one prompt, one image and a list of condition images a sample; the first of these is the source.

    `metadata` (one JSON text or object a sample), or the lists `preserve` and `target`, may come in `kwargs`. The answer
    is `{"rewards": [...]}` and has no room for single errors: one bad sample fails the request.

    Raises:
        RequestError: 422.
    """
    body = checked(ComputeRequest, content)
    prompts = body.prompt if body.prompt is not None else body.prompts
    edits = body.image if body.image is not None else body.images
    if prompts is None or edits is None or body.condition_images is None:
        raise bad_field(
            "The request needs prompt, image and condition_images (the source of each edit); in Flow-Factory, name "
            'them in required_fields = ("prompt", "image", "condition_images").'
        )
    check_count(len(edits), limit)
    if not len(prompts) == len(edits) == len(body.condition_images):
        raise bad_field(
            f"The request has {len(prompts)} prompts, {len(edits)} images and {len(body.condition_images)} "
            "condition_images; send one each."
        )
    extra = body.kwargs or body.extra or {}
    images = _Images()
    items = []
    for index, (prompt, edit, conditions) in enumerate(zip(prompts, edits, body.condition_images, strict=True)):
        if not conditions:
            raise bad_field(f"condition_images[{index}] is empty; send the source of the edit.")
        metadata = _row(extra, index, len(edits))
        items.append(_item(images, reward, prompt, edit, conditions[0], metadata, index))

    def render(answers: Sequence[Answer]) -> dict[str, Any]:
        return {"rewards": [answer.score for answer in answers if isinstance(answer, Scored)]}

    return Wanted(images.encoded, items, render, partial=False)


def parse_history(content: Any, limit: int) -> Wanted:
    """UniRL: a history of two turns a sample, and the names of rewards; answers and errors are dicts a sample.

    Raises:
        RequestError: 422; 413 where samples times rewards are too many.
    """
    body = checked(HistoryRequest, content)
    names = [[(name, check_reward(name)) for name in given.required_rewards] for given in body.requests]
    check_count(sum(map(len, names)), limit)
    images = _Images()
    items = []
    for index, (given, wanted) in enumerate(zip(body.requests, names, strict=True)):
        turns = [turn for turn in given.history if turn.image_b64 is not None]
        if len(turns) != 2:
            raise bad_field(
                f"requests.{index}.history has {len(turns)} images; an edit is scored from two turns, source and edit."
            )
        prompt = turns[1].text or turns[0].text or ""
        for _, reward in wanted:
            items.append(_item(images, reward, prompt, turns[1].image_b64, turns[0].image_b64, given.metadata, index))
    version = tpips_reward.__version__

    def render(answers: Sequence[Answer]) -> dict[str, Any]:
        rest = iter(answers)
        results: list[dict[str, Any]] = []
        errors: list[dict[str, str]] = []
        for wanted in names:
            mine = [(name, next(rest)) for name, _ in wanted]
            results.append({name: {"score": a.score} for name, a in mine if isinstance(a, Scored)})
            errors.append({name: str(a) for name, a in mine if isinstance(a, RequestError)})
        extras = [request.model_extra or {} for request in body.requests]
        identities = [{**{key: e.get(key) for key in _IDENTITY}, "scorer_version": version} for e in extras]
        return {"protocol_version": "1", "results": results, "errors": errors, "identities": identities}

    return Wanted(images.encoded, items, render)


class _Images:
    """The images of a request, each distinct text once."""

    def __init__(self) -> None:
        self.encoded: list[bytes | RequestError] = []
        self._index: dict[str, int] = {}

    def add(self, text: Any, label: str) -> int:
        key = text if isinstance(text, str) else f"\0{label}"
        if key not in self._index:
            self._index[key] = len(self.encoded)
            self.encoded.append(attempt(text, label))
        return self._index[key]


def _item(images: _Images, reward: str, prompt: str, edit: Any, source: Any, metadata: Any, index: int) -> WantedItem:
    places = images.add(edit, f"image {index}"), images.add(source, f"the source of image {index}")
    if len(prompt) > MAX_PROMPT_LETTERS:
        refusal = bad_field(f"The instruction of image {index} has {len(prompt)} letters; at most {MAX_PROMPT_LETTERS} are read.")
        return WantedItem(reward, *places, (), (), None, refusal)
    try:
        aspects = aspects_of(prompt, metadata)
    except TPIPSError as error:
        return WantedItem(reward, *places, (), (), None, bad_field(f"Image {index}: {error}"))
    item = checked_item(reward, *places, aspects.preserve, aspects.target)
    # one bad sample may be all that the answer speaks of
    return item if item.error is None else replace(item, error=bad_field(f"Image {index}: {item.error}"))


def _row(extra: dict[str, Any], index: int, count: int) -> Any:
    """A sample's own of the columns that Flow-Factory passes on."""
    row: dict[str, Any] = {}
    for name in ("metadata", "preserve", "target"):
        column = extra.get(name)
        if column is None:
            continue
        if not isinstance(column, list) or len(column) != count:
            raise bad_field(f"kwargs.{name} must be a list with one entry a sample ({count}).")
        if name == "metadata" and column[index] is not None:
            return column[index]
        row[name] = column[index]
    return row


def served_rewards() -> dict[str, list[str]]:
    """What UniRL asks /health for: the rewards by name, and the figures of each."""
    from tpips_reward.rewards.spec import FAMILIES

    names = [f"{family}:{mode}" for family, modes in FAMILIES.items() for mode in modes]
    return {str(parse_reward(name)): ["score"] for name in names}
