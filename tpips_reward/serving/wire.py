"""The server's own format of `POST /score`: a table of images, and items that name them by index.

    {"reward": "tpips:preserve", "images": ["<base64>", ...],
     "items": [{"image": 1, "source": 0, "preserve": ["background"], "target": ["car color"]}]}

An edit's source is sent once for a whole group. As multipart/form-data the part `request` holds that JSON without
`images`, and the files `images` follow in order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.samples import read_aspects
from tpips_reward.rewards.spec import parse_reward
from tpips_reward.serving.decoding import from_base64
from tpips_reward.serving.errors import RequestError, bad_field, bad_json, too_large
from tpips_reward.serving.items import Answer, Scored, Wanted, WantedItem

MAX_ASPECTS = 32
MAX_ASPECT_LETTERS = 200
Model = TypeVar("Model", bound=BaseModel)


class ScoreItem(BaseModel):
    """One edit: indices into the images, and aspects."""

    model_config = ConfigDict(extra="forbid", strict=True)
    image: int
    source: int
    target_image: int | None = None
    preserve: list[str] = []
    target: list[str] = []


class ScoreRequest(BaseModel):
    """The body of `POST /score`; `images` are files in multipart."""

    model_config = ConfigDict(extra="forbid", strict=True)
    reward: str | None = None
    images: list[str] = []
    items: list[ScoreItem]


#: Commas that one item may need: its fields and aspects, and texts such as a prompt or metadata.
COMMAS_AN_ITEM = 16 * MAX_ASPECTS
#: Images that one item may name: edit, source and target image.
IMAGES_AN_ITEM = 3


def read_json(text: bytes, limit: int) -> Any:
    """JSON; NaN and a depth that would exhaust the parser are refused.

    Every value but the first of its list or object has a comma before it, and base64 has none: counting them bounds what
    a small body can become in memory, before it is parsed.

    Args:
        limit: items of one request.

    Raises:
        RequestError: 400; 413 for more values than so many items can need.
    """
    most = COMMAS_AN_ITEM * limit
    if text.count(b",") > most:
        raise too_large(f"The body has more than {most} values; this server takes {limit} items at one time.")

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise bad_json(f"The body is not JSON: {str(error)[:200] or type(error).__name__}.") from None


def checked(model: type[Model], content: Any) -> Model:
    """A pydantic model of parsed JSON.

    Raises:
        RequestError: 422 that names the first field that is wrong.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise bad_field(f"{where}: {first['msg']} ({error.error_count()} errors in all).") from None


def check_count(count: int, limit: int) -> None:
    """Refuses an empty request (422) and one with too many items (413)."""
    if count == 0:
        raise bad_field("The request has no items; send at least one.")
    if count > limit:
        raise too_large(f"The request has {count} items; this server takes {limit} at one time: send it in parts.")


def check_reward(spec: str) -> str:
    """A reward's name, 422 where it is unknown."""
    try:
        return str(parse_reward(spec))
    except TPIPSError as error:
        raise bad_field(str(error)) from None


def attempt(text: object, label: str) -> bytes | RequestError:
    """An image of base64, or what is wrong with it: the others of the request do not suffer."""
    try:
        return from_base64(text, label)
    except RequestError as error:
        return error


def checked_item(
    reward: str,
    image: int,
    source: int,
    preserve: Sequence[str],
    target: Sequence[str],
    target_image: int | None = None,
) -> WantedItem:
    """An item whose aspects are cleaned; with the error in it where they cannot be scored."""
    try:
        kept, changed = read_aspects(parse_reward(reward), preserve, target)
        _check_sizes([*kept, *changed])
    except TPIPSError as error:
        refusal = error if isinstance(error, RequestError) else bad_field(str(error))
        return WantedItem(reward, image, source, (), (), target_image, refusal)
    return WantedItem(reward, image, source, tuple(kept), tuple(changed), target_image)


def _check_sizes(aspects: list[str]) -> None:
    if len(aspects) > MAX_ASPECTS:
        raise bad_field(f"The sample has {len(aspects)} aspects; at most {MAX_ASPECTS} are scored.")
    for aspect in aspects:
        if len(aspect) > MAX_ASPECT_LETTERS:
            raise bad_field(
                f"The aspect {aspect[:40]!r}... has {len(aspect)} letters; an aspect is a short noun phrase."
            )


def parse_score(content: Any, files: Sequence[bytes] | None, default_reward: str, limit: int) -> Wanted:
    """The format of this file.

    Args:
        content: parsed JSON.
        files: the images of a multipart body; None where they are in the JSON.
        default_reward: where the request names none.
        limit: items of one request.

    Raises:
        RequestError: what makes the whole request meaningless. A bad item or image is kept as its own error.
    """
    for name, most in (("items", limit), ("images", IMAGES_AN_ITEM * limit)):
        # before each entry is looked at: a million empty texts fit into a few megabytes
        entries = content.get(name) if isinstance(content, dict) else None
        if isinstance(entries, list) and len(entries) > most:
            raise too_large(f"The request has {len(entries)} {name}; this server takes {most} at one time: send it in parts.")
    request = checked(ScoreRequest, content)
    check_count(len(request.items), limit)
    reward = check_reward(request.reward) if request.reward is not None else default_reward
    if files is not None and request.images:
        raise bad_field("images: a multipart request sends its images as files, not in the JSON.")
    encoded = [attempt(text, f"images[{index}]") for index, text in enumerate(request.images)]
    images: list[bytes | RequestError] = list(files) if files is not None else encoded
    items = []
    for given in request.items:
        item = checked_item(reward, given.image, given.source, given.preserve, given.target, given.target_image)
        lost = next((index for index in item.images if not 0 <= index < len(images)), None)
        if lost is not None:
            refusal = bad_field(f"The item names image {lost}; the request has {len(images)} images.")
            item = WantedItem(reward, 0, 0, (), (), None, refusal)
        items.append(item)

    def render(answers: Sequence[Answer]) -> dict[str, Any]:
        rows = [
            answer.to_json() if isinstance(answer, Scored) else {"score": None, "error": answer.to_json()}
            for answer in answers
        ]
        return {"reward": reward, "results": rows}

    return Wanted(images, items, render)
