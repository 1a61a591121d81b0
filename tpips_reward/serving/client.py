"""`remote:http://host:port`: the reward of a server, called as a `TPIPSReward` is.

A request that fails for a reason that may pass (no connection, a time-out, 408, 429, 502, 503, 504, also of one item) is
sent again, with growing pauses; no attempt begins later than `patience` seconds after the first. Then, and for every other
failure, the call raises: no error becomes a score.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tpips_reward.errors import TPIPSError
from tpips_reward.images import to_tensors
from tpips_reward.rewards.aspects import AspectsArgument
from tpips_reward.rewards.reward import RewardOutput
from tpips_reward.rewards.samples import read_aspects, read_samples
from tpips_reward.rewards.spec import RewardSpec, parse_reward

PREFIX = "remote:"
TOKEN_VARIABLE = "TPIPS_REWARD_TOKEN"
TERMS = ("preserve", "target", "change", "gate")
_MAY_PASS = (408, 429, 502, 503, 504)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 15.0


class RemoteRewardError(TPIPSError):
    """The server could not be reached, or answered with an error."""


class RemoteReward:
    """A reward on another machine.

    Pixels travel as 8-bit PNG: PIL and uint8 images score exactly as they would here, float images are rounded. No
    gradient comes back.

    Args:
        address: "remote:http://host:port" (or https). The user's own choice: never take it from a stranger.
        reward: a spec such as "tpips:edit"; None is what the server was started with.
        token: what the server asks for; default: the environment's TPIPS_REWARD_TOKEN.
        timeout: seconds for one answer; to connect it has five at most.
        patience: seconds for which a request is tried again before the call raises: no attempt begins later than that
            after the first.
        value_range: lowest and highest value of float images.

    Raises:
        TPIPSError: an address that is none, an unknown reward, times that are not positive.

    Example:
        reward = RemoteReward("remote:http://gpu-3:8000", reward="tpips:edit")
        out = reward(edits, source, preserve=[["background"]], target=[["car color"]])
        out.scores
    """

    def __init__(
        self,
        address: str,
        reward: str | None = None,
        *,
        token: str | None = None,
        timeout: float = 120.0,
        patience: float = 180.0,
        value_range: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.address = parse_address(address)
        self.reward = None if reward is None else str(parse_reward(reward))
        for name, seconds in (("timeout", timeout), ("patience", patience)):
            if not 0 < seconds < math.inf:
                raise TPIPSError(f"{name}={seconds!r} must be a positive number of seconds.")
        self.patience = patience
        self.value_range = value_range
        token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        if token and not (token.isascii() and token.isprintable()):
            raise TPIPSError(f"The token has letters that no header can hold; check token= or ${TOKEN_VARIABLE}.")
        self._info: dict[str, Any] | None = None
        self._client = httpx.Client(
            base_url=self.address,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout, connect=min(5.0, timeout)),
            follow_redirects=False,
        )

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    @property
    def info(self) -> dict[str, Any]:
        """What the server says about itself: reward, metric, limits ... Asked once; threads that come before the answer
        ask for themselves, for behind a lock the patience of each would wait for that of the one before.

        Raises:
            RemoteRewardError: it cannot be reached, or is no server of this reward.
        """
        if self._info is None:
            self._info = self._ask_info()
        return self._info

    def _ask_info(self) -> dict[str, Any]:
        answer = self._ask("GET", "/health")
        if answer.get("token") == "required":
            raise RemoteRewardError(f"{self.address} refuses: 401 it wants a token; give it in token= or ${TOKEN_VARIABLE}.")
        if not isinstance(answer.get("reward"), str) or not _are_limits(answer.get("limits")):
            raise RemoteRewardError(f"{self.address}/health is no tpips-reward server: {str(answer)[:200]}.")
        return answer

    @property
    def spec(self) -> RewardSpec:
        """The reward that calls get, as a `RewardSpec`."""
        return parse_reward(self.reward or self.info["reward"])

    def requires(self, kind: str) -> bool:
        """Whether every sample must have aspects of this kind ("preserve" or "target")."""
        return self.spec.requires(kind)

    def check_aspects(self, preserve: Sequence[str], target: Sequence[str] = ()) -> None:
        """Refuses aspects that no server would score: empty, doubled, contradictory, or none that the mode needs.

        Raises:
            TPIPSError: as said.
        """
        read_aspects(self.spec, preserve, target)

    def __call__(
        self,
        images: Any,
        references: Any,
        preserve: AspectsArgument = None,
        target: AspectsArgument = None,
        target_images: Any = None,
    ) -> RewardOutput:
        """Scores B edits; arguments and answer as `TPIPSReward`, scores on the CPU.

        Raises:
            RemoteRewardError: the server cannot be reached in time, refuses, or has an error for any item.
            TPIPSError: images or aspects that are no input, as there; an image that requires grad.
        """
        samples = read_samples(images, references, preserve, target, target_images)
        table = _Table(self.value_range)
        rows: list[dict[str, Any]] = []
        for index, (edit, source, ideal) in enumerate(zip(samples.edits, samples.sources, samples.ideals, strict=True)):
            row = {"image": table.add(edit, "images", index), "source": table.add(source, "references", index)}
            if ideal is not None:
                row["target_image"] = table.add(ideal, "target_images", index)
            rows.append({**row, "preserve": samples.kept[index], "target": samples.changed[index]})
        results: list[dict[str, Any]] = []
        for part in _parts(rows, table.pngs, self.info["limits"]):
            results += self._score(part, table.pngs, first=len(results))
        return _output(results)

    def _score(self, rows: list[dict[str, Any]], pngs: list[bytes], first: int) -> list[dict[str, Any]]:
        """One request; only the images that its rows name travel."""
        used = sorted({row[role] for row in rows for role in ("image", "source", "target_image") if role in row})
        place = {index: position for position, index in enumerate(used)}
        items = [
            {k: place[v] if k in ("image", "source", "target_image") else v for k, v in row.items()} for row in rows
        ]
        request: dict[str, Any] = {"items": items}
        if self.reward is not None:
            request["reward"] = self.reward
        files = [("images", (f"{index}.png", pngs[index], "image/png")) for index in used]
        answer = self._ask("POST", "/score", data={"request": json.dumps(request)}, files=files)
        results = answer.get("results")
        if not isinstance(results, list) or len(results) != len(rows):
            raise RemoteRewardError(f"{self.address} answered {str(answer)[:200]} for {len(rows)} items.")
        for index in sorted(range(len(results)), key=lambda index: _may_pass(results[index])):  # what is final says more
            self._check(results[index], f"sample {first + index}")
        return results

    def _check(self, result: Any, name: str) -> None:
        """Refuses what is no score with its terms."""
        if not isinstance(result, dict):
            raise RemoteRewardError(f"{self.address} gave {str(result)[:200]} for {name}; no score is made of it.")
        error = result.get("error")
        if error is not None:
            message = error.get("message") if isinstance(error, dict) else str(error)[:200]
            raise RemoteRewardError(f"{self.address} cannot score {name}: {message}")
        if not _is_number(result.get("score")):
            raise RemoteRewardError(f"{self.address} gave {str(result.get('score'))[:200]!r} for {name}; no score is made of it.")
        aspects = result.get("per_aspect", {})
        for kind in ("terms", "parts"):
            values = result.get(kind, {})
            if not (isinstance(values, dict) and all(value is None or _is_number(value) for value in values.values())):
                raise RemoteRewardError(f"{self.address} gave the {kind} {str(values)[:200]} for {name}, which are no numbers.")
        if not (isinstance(aspects, dict) and all(isinstance(values, dict) for values in aspects.values())):
            raise RemoteRewardError(f"{self.address} gave {str(aspects)[:200]} for the aspects of {name}.")

    def _ask(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """The JSON of an answer; tried again while the failure may pass, and patience lasts.

        Pauses grow, and start short again once: at the first answer after a failed connection, for the server is coming up.
        Seconds in a Retry-After are waited instead, one where it holds a date; no pause is longer than what patience is left.
        """
        begin = time.monotonic()
        pause = _FIRST_PAUSE
        was_away = came_up = False
        while True:
            asked = 0.0
            try:
                response = self._client.request(method, path, **content)
            except (httpx.TransportError, httpx.TimeoutException) as error:
                reason = f"{type(error).__name__}: {error}"
                was_away = True
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise RemoteRewardError(f"{self.address} cannot be asked: {error}.") from error
            else:
                status, asked = response.status_code, _retry_after(response)
                answer = self._json(response) if status == 200 else _failed_items(response)
                if answer is not None:
                    waiting = _waiting_item(answer)
                    if waiting is None:
                        return answer
                    reason = waiting
                else:
                    reason = _reason(response)
                    if status not in _MAY_PASS:
                        raise RemoteRewardError(f"{self.address}{path} refuses: {reason}")
                if was_away and not came_up:
                    pause, came_up = _FIRST_PAUSE, True
            passed = time.monotonic() - begin
            if passed >= self.patience:
                raise RemoteRewardError(
                    f"{self.address}{path} gave no answer for {passed:.1f} s ({reason}); start the server, or raise "
                    "patience. No score is made of it."
                )
            # not all clients at one time
            wait = asked + random.uniform(0.0, _FIRST_PAUSE) if asked else pause * random.uniform(1.0, 1.5)
            time.sleep(min(wait, self.patience - passed))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _json(self, response: Any) -> dict[str, Any]:
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise RemoteRewardError(f"{self.address} answered no JSON object: {response.text[:200]!r}.")
        return answer


def parse_address(address: str) -> str:
    """ "remote:http://host:port" -> "http://host:port".

    Raises:
        TPIPSError: anything else.
    """
    url = address.removeprefix(PREFIX).rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or not address.startswith(PREFIX):
        raise TPIPSError(f"{address!r} is no address of a reward server; write remote:http://HOST:PORT.")
    if parts.username is not None or parts.query or parts.fragment:
        raise TPIPSError(f"{address!r} holds more than an address; the token goes in token= or ${TOKEN_VARIABLE}.")
    return url


class _Table:
    """The images of a call as PNG, each object and each content once."""

    def __init__(self, value_range: tuple[float, float]) -> None:
        self.value_range = value_range
        self.pngs: list[bytes] = []
        self._objects: dict[int, int] = {}
        self._contents: dict[bytes, int] = {}

    def add(self, image: Any, name: str, index: int) -> int:
        if id(image) not in self._objects:
            if isinstance(image, Tensor) and image.requires_grad and torch.is_grad_enabled():
                raise TPIPSError(f"{name}[{index}] requires grad, and a remote reward has none; use TPIPSReward here.")
            png = encode_png(image, self.value_range, f"{name}[{index}]")
            self._objects[id(image)] = self._contents.setdefault(png, len(self.pngs))
            if self._objects[id(image)] == len(self.pngs):
                self.pngs.append(png)
        return self._objects[id(image)]


def encode_png(image: Any, value_range: tuple[float, float] = (0.0, 1.0), name: str = "image") -> bytes:
    """An image of any kind -> 8-bit RGB PNG, lossless for 8-bit images; transparency on white.

    Raises:
        TPIPSError: as `tpips_reward.images.to_tensors`.
    """
    pixels = to_tensors([image], value_range=value_range, name=name)[0].detach()
    array = (pixels * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(array)).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _parts(rows: list[dict[str, Any]], pngs: list[bytes], limits: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Rows in requests that the server takes: no more items and bytes than it says."""
    most, room = int(limits["items"]), int(limits["body_bytes"])
    parts: list[list[dict[str, Any]]] = [[]]
    held: set[int] = set()
    size = 0
    for row in rows:
        images = {row[role] for role in ("image", "source", "target_image") if role in row}
        cost = len(json.dumps(row)) + 64 + sum(len(pngs[index]) + 256 for index in images - held)
        if parts[-1] and (len(parts[-1]) >= most or size + cost > room):
            parts.append([])
            held, size = set(), 0
            cost = len(json.dumps(row)) + 64 + sum(len(pngs[index]) + 256 for index in images)
        parts[-1].append(row)
        held |= images
        size += cost
    return parts


def _is_number(value: Any) -> bool:
    """A finite number of JSON that float32 can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 3.4e38


def _are_limits(limits: Any) -> bool:
    names = ("items", "body_bytes")
    return isinstance(limits, dict) and all(_is_number(limits.get(name)) and limits[name] >= 1 for name in names)


def _may_pass(result: Any) -> bool:
    """Whether an item has an error, and one that may pass."""
    error = result.get("error") if isinstance(result, dict) else None
    return isinstance(error, dict) and error.get("status") in _MAY_PASS


def _waiting_item(answer: dict[str, Any]) -> str | None:
    """What an item of an answer says that may be scored later, such as 503 while the worker is started again.

    None where no item says so, and where another has an error that will not pass.
    """
    results = answer.get("results")
    failed = [result for result in results if isinstance(result, dict) and result.get("error")] if isinstance(results, list) else []
    if not failed or not all(map(_may_pass, failed)):
        return None
    error = failed[0]["error"]
    return f"{error['status']} {error.get('message')}"


def _failed_items(response: Any) -> dict[str, Any] | None:
    """The answer of a request whose items have all failed, which says what each has; None for all other errors."""
    try:
        answer = response.json()
        failed = bool(answer["results"]) and all(result["error"] for result in answer["results"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return answer if failed else None


def _output(results: list[dict[str, Any]]) -> RewardOutput:
    def column(kind: str, name: str) -> Tensor:
        values = [result.get(kind, {}).get(name) for result in results]
        return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)

    scores = torch.tensor([result["score"] for result in results], dtype=torch.float32)
    terms = {name: column("terms", name) for name in TERMS}
    parts = {name: column("parts", name) for name in results[0].get("parts", {})}
    return RewardOutput(scores, [result.get("per_aspect", {}) for result in results], terms, parts)


def _reason(response: Any) -> str:
    try:
        error = response.json()["error"]
        return f"{response.status_code} {error['message']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{response.status_code} {response.text[:200]!r}"


def _retry_after(response: Any) -> float:
    """Seconds after which the server wants to be asked again; 0 where it does not say."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # a date
        return 1.0
