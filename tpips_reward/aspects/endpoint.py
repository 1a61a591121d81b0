"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp, OpenAI ...), asked over its chat completions."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tpips_reward.errors import TPIPSError

if TYPE_CHECKING:
    from PIL.Image import Image

#: Where the key may stand. The second is sent over https only, since it is there for other programs.
KEY_NAMES = ("TPIPS_API_KEY", "OPENAI_API_KEY")
_BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MAX_ANSWER = 1_000_000


class Endpoint:
    """Chat completions of one model at one address.

    Args:
        url: the part before "/chat/completions", such as http://localhost:8000/v1.
        model: its name there.
        timeout: seconds that one answer may take.
        attempts: requests for one answer, at most; a server that is busy or silent is asked again, after 1, 2, 4 ... s.
        wait: sleeps; for tests.

    Raises:
        TPIPSError: an address or a model that is none.
    """

    def __init__(
        self, url: str, model: str, *, timeout: float = 120.0, attempts: int = 4, wait: Callable[[float], None] = time.sleep
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
            raise TPIPSError(f"{url!r} is no address of an endpoint; give one such as http://localhost:8000/v1.")
        if not model.strip():
            raise TPIPSError(f"The endpoint {url} needs the name of a model; write endpoint:MODEL@URL.")
        self.url, self.model = url.rstrip("/") + "/chat/completions", model.strip()
        self.timeout, self.attempts, self.wait = timeout, attempts, wait
        self.key = api_key(url)

    def ask(self, question: str, image: Image | None) -> str:
        """The answer to a question about an image, which is sent as a JPEG.

        Raises:
            TPIPSError: the server refuses, does not answer after all attempts, or answers something else.
        """
        content: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if image is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": _data_uri(image)}})
        body = json.dumps({"model": self.model, "messages": [{"role": "user", "content": content}]}).encode()
        answer = self._post(body)
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise TPIPSError(f"{self.url} answered something that is no chat completion; check the address.")
        return text

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(self.url, body, headers, method="POST")
        why = ""
        for attempt in range(self.attempts):
            if attempt:
                self.wait(2.0 ** (attempt - 1))
            try:
                with OPENER.open(request, timeout=self.timeout) as response:
                    answer: bytes = response.read(_MAX_ANSWER + 1)
                if len(answer) > _MAX_ANSWER:
                    raise TPIPSError(f"{self.url} answered more than {_MAX_ANSWER:,} bytes; check the address.")
                return answer
            except urllib.error.HTTPError as error:
                why = f"status {error.code}, {_reason(error)}"
                if error.code not in _BUSY:
                    raise TPIPSError(
                        f"{self.url} refused the request for {self.model!r} ({why}); check the address, the model, and the "
                        f"key in {KEY_NAMES[0]}."
                    ) from None
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                why = str(getattr(error, "reason", error)) or type(error).__name__
        raise TPIPSError(f"{self.url} did not answer in {self.attempts} attempts ({why}); is the server running?")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key and the image to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


#: Opens requests to an endpoint; follows no redirect.
OPENER = urllib.request.build_opener(_NoRedirects)


def api_key(url: str) -> str | None:
    """The key that the environment has for an address: TPIPS_API_KEY, or OPENAI_API_KEY where it would be encrypted."""
    encrypted = urllib.parse.urlsplit(url).scheme == "https"
    return os.environ.get(KEY_NAMES[0]) or (os.environ.get(KEY_NAMES[1]) if encrypted else None)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(error.read(300).decode("utf-8", "replace").split()) or str(error.reason)
    except OSError:
        return str(error.reason)


def _data_uri(image: Image) -> str:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
