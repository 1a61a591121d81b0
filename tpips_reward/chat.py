"""Chat completions of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, OpenAI ...), with or without an image."""

from __future__ import annotations

import base64
import http.client
import io
import json
import math
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpips_reward.errors import TPIPSError

if TYPE_CHECKING:
    from PIL.Image import Image

#: Where the key may stand. The second is sent over https only, since it is there for other programs.
KEY_NAMES = ("TPIPS_API_KEY", "OPENAI_API_KEY")
#: Statuses of a server that may answer later.
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LONGEST_PAUSE = 60.0
_MAX_ANSWER = 1_000_000
#: Options that some servers refuse to take, with those that mean nothing without them. "top_logprobs must be at most 5 where
#: logprobs is true" is about the first.
_REFUSABLE = {"top_logprobs": ("top_logprobs",), "logprobs": ("logprobs", "top_logprobs"), "temperature": ("temperature",),
              "max_tokens": ("max_tokens",)}  # fmt: skip


class NoAnswer(TPIPSError):
    """A server that was busy, silent or down in every attempt; another question may still be answered."""


class Refused(TPIPSError):
    """A server or a model that does not answer this question; another one may be answered."""


@dataclass(frozen=True)
class Reply:
    """A completion.

    Attributes:
        text: the answer; None where it has another form.
        positions: for each token of the answer token -> log-probability, that of the answer first, then its alternatives;
            empty where the server gives none.
        refusal: why a completion has no text; None where it has some, and where the answer is no completion.
    """

    text: str | None
    positions: list[dict[str, float]] = field(default_factory=list)
    refusal: str | None = None


class ChatClient:
    """Chat completions of one model at one address; may be used by several threads.

    Args:
        url: the part before "/chat/completions", such as http://localhost:8000/v1.
        model: its name there.
        key: sent as a bearer token, never printed; default: that of `api_key`.
        options: further fields of every request, such as {"temperature": 0}. Where the server's refusal names one, the
            question is asked without it, and once that is answered so are all later ones; max_tokens becomes
            max_completion_tokens.
        timeout: seconds of silence after which an answer is given up; one that keeps coming in may take longer.
        attempts: requests for one answer, at most; a server that is busy or silent is asked again, after the seconds that it
            asks for, or after 1, 2, 4 ... s.
        wait: sleeps; for tests.

    Attributes:
        counts: how many "retries" and "time-outs" there were, and 1 for "without temperature" and the like where an option
            was left out.

    Raises:
        TPIPSError: an address or a model that is none, a key that cannot be sent.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        options: Mapping[str, Any] | None = None,
        timeout: float = 120.0,
        attempts: int = 4,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
            raise TPIPSError(f"{url!r} is no address of an endpoint; give one such as http://localhost:8000/v1.")
        if not model.strip():
            raise TPIPSError(f"The endpoint {url} needs the name of a model.")
        self.url, self.model = url.rstrip("/") + "/chat/completions", model.strip()
        self.timeout, self.attempts, self.wait = timeout, attempts, wait
        self.counts: Counter[str] = Counter()
        self._key = _checked_key(api_key(url) if key is None else key, url)
        self._options: dict[str, Any] = dict(options or {})
        self._lock = threading.Lock()

    def ask(self, question: str, image: Image | None = None) -> str:
        """The answer to a question, about an image where one is given.

        Raises:
            NoAnswer: as `complete`.
            Refused: as `complete`, or the completion has no text.
            TPIPSError: as `complete`, or the answer is no completion.
        """
        reply = self.complete(question, image)
        text = reply.text
        if reply.refusal is not None:
            raise Refused(f"{self.model!r} at {self.url} gave no text ({reply.refusal}).")
        if text is None:
            raise TPIPSError(f"{self.url} answered something that is no chat completion; check the address.")
        return text

    def complete(self, question: str, image: Image | None = None) -> Reply:
        """The answer with what the server says beside it. The image is sent as a PNG.

        Raises:
            NoAnswer: all attempts failed for a passing reason.
            Refused: the server does not take this request (status 400, 413, 415, 422 or 451).
            TPIPSError: the server refuses (wrong key, unknown model), or answers without end.
        """
        content: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if image is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": _data_uri(image)}})
        why, tried = "", 0
        refused: list[str] = []  # options that the server named
        while True:
            with self._lock:
                options = _without(self._options, refused)
            try:
                reply = _read(self._post({"model": self.model, "messages": [{"role": "user", "content": content}], **options}))
                self._leave_out(refused)  # it was the options, and not a question that has such a word in it
                return reply
            except TPIPSError:
                raise
            except urllib.error.HTTPError as error:
                said = _said(error)
                if self._key:  # some servers repeat it
                    said = said.replace(self._key, "…")
                why = f"status {error.code}, {said}"
                if error.code in (400, 413, 415, 422, 451):
                    named = [name for name in _REFUSABLE if name in options and re.search(rf"\b{name}\b", said)]
                    if named:
                        refused.append(named[0])
                        continue
                    raise Refused(f"{self.url} did not take the request for {self.model!r} ({why}).") from None
                if error.code not in _PASSING:
                    raise TPIPSError(
                        f"{self.url} refused the request for {self.model!r} ({why}); check the address, the model, and the "
                        f"key in {KEY_NAMES[0]}."
                    ) from None
                pause = _pause(error.headers.get("Retry-After"), tried)
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:  # the latter from what is no JSON
                late = any(isinstance(cause, TimeoutError) for cause in (error, getattr(error, "reason", None)))
                if late:
                    self._count("time-outs")
                said = " ".join(str(getattr(error, "reason", error)).split())[:300]
                why = f"none within {self.timeout:g} s" if late else said or type(error).__name__
                pause = _pause(None, tried)
            tried += 1
            if tried >= self.attempts:
                raise NoAnswer(f"{self.url} did not answer in {tried} attempts ({why}); is the server running?")
            self._count("retries")
            self.wait(pause)

    def _post(self, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        with _OPENER.open(request, timeout=self.timeout) as response:
            answer: bytes = response.read(_MAX_ANSWER + 1)
        if len(answer) > _MAX_ANSWER:
            raise TPIPSError(f"{self.url} answered more than {_MAX_ANSWER:,} bytes; check the address.")
        return json.loads(answer)

    def _leave_out(self, names: list[str]) -> None:
        """Sends options no more."""
        with self._lock:
            for name in names:
                self.counts[f"without {name}"] = 1
            self._options = _without(self._options, names)

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key and the image to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def api_key(url: str) -> str | None:
    """The key that the environment has for an address: TPIPS_API_KEY, or OPENAI_API_KEY where it would be encrypted."""
    encrypted = urllib.parse.urlsplit(url).scheme == "https"
    return os.environ.get(KEY_NAMES[0]) or (os.environ.get(KEY_NAMES[1]) if encrypted else None)


def _checked_key(key: str | None, url: str) -> str | None:
    """The key without blanks around it.

    Raises:
        TPIPSError: no header can carry it. The key is not shown.
    """
    text = (key or "").strip()
    if any(ord(letter) < 32 or 127 <= ord(letter) < 160 or ord(letter) > 255 for letter in text):
        raise TPIPSError(
            f"The key for {url} holds a line break or a letter that no header can carry; copy it anew into {KEY_NAMES[0]}."
        )
    return text or None


def _without(options: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    dropped = {other for name in names for other in _REFUSABLE[name]}
    left = {name: value for name, value in options.items() if name not in dropped}
    return left | ({"max_completion_tokens": options["max_tokens"]} if "max_tokens" in dropped & options.keys() else {})


def _read(answer: Any) -> Reply:
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text = message.get("content")
    except (KeyError, IndexError, TypeError, AttributeError):
        return Reply(None)
    if text is None and ("content" in message or message.get("refusal") or choice.get("finish_reason") == "content_filter"):
        said = " ".join(str(message.get("refusal") or choice.get("finish_reason") or "its content is null").split())
        return Reply(None, refusal=said[:300])
    try:
        tokens = choice["logprobs"]["content"]
        positions = [{token["token"]: float(token["logprob"])} for token in tokens]
        for own, token in zip(positions, tokens, strict=True):
            for other in token.get("top_logprobs") or []:
                own.setdefault(other["token"], float(other["logprob"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        positions = []
    if any(not isinstance(token, str) or not logprob <= 1e-6 for own in positions for token, logprob in own.items()):
        positions = []  # NaN, or no log-probabilities at all
    return Reply(text if isinstance(text, str) else None, positions)


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(error.read(4096).decode("utf-8", "replace").split())[:300] or str(error.reason)
    except (OSError, http.client.HTTPException):
        return str(error.reason)


def _pause(wanted: str | None, tried: int) -> float:
    try:
        seconds = float(wanted or "")
    except ValueError:
        seconds = math.nan
    return min(seconds if seconds >= 0 else 2.0**tried, _LONGEST_PAUSE)


def _data_uri(image: Image) -> str:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
