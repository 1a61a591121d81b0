"""Errors with an HTTP status. A failed item is one as well, so that the others of its request keep their answers."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from tpips_reward.errors import TPIPSError

_log = logging.getLogger("tpips_reward.serving")
#: Of a message: it may repeat what the client sent, which may be megabytes.
MAX_LETTERS = 400


class RequestError(TPIPSError):
    """A request, or one item of it, that cannot be answered.

    Attributes:
        status: the HTTP status.
        kind: a short name that programs can compare, such as "too_large".
        retry_after: seconds after which the same request may succeed; None where it never will.
    """

    def __init__(self, status: int, kind: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(excerpt(message, MAX_LETTERS))
        self.status = status
        self.kind = kind
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:  # between the worker and the server
        return type(self), (self.status, self.kind, str(self), self.retry_after)

    def to_json(self) -> dict[str, Any]:
        """What a client gets to see."""
        return {"status": self.status, "type": self.kind, "message": str(self)}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def excerpt(text: str, most: int) -> str:
    """A text of at most so many letters: its begin and, where a remedy stands, its end."""
    if len(text) <= most:
        return text
    end = (most - 5) // 2
    return f"{text[: most - 5 - end]} ... {text[len(text) - end :]}"


def bad_json(message: str) -> RequestError:
    """400: the body is not what its content type says."""
    return RequestError(400, "bad_body", message)


def bad_field(message: str) -> RequestError:
    """422: the body is well formed and means nothing."""
    return RequestError(422, "bad_request", message)


def too_large(message: str) -> RequestError:
    """413: more bytes, pixels or items than the server takes."""
    return RequestError(413, "too_large", message)


def busy(message: str, retry_after: float) -> RequestError:
    """429: the same request may be taken later."""
    return RequestError(429, "busy", message, retry_after)


def failed(sentence: str, cause: BaseException | str, status: int = 500, retry_after: float | None = None) -> RequestError:
    """500, or 503: something of ours failed. A client gets the sentence and an id; the server's log has the cause by it.

    The cause may name paths, addresses and libraries of the server, which are no business of strangers.
    """
    number = secrets.token_hex(4)
    _log.error("error %s: %s (%s)", number, sentence, cause, exc_info=cause if isinstance(cause, BaseException) else None)
    kind = "unavailable" if status == 503 else "failed"
    return RequestError(status, kind, f"{sentence} The server's log has the reason as error {number}.", retry_after)


def unavailable(message: str, retry_after: float = 5.0) -> RequestError:
    """503: no worker can score now."""
    return RequestError(503, "unavailable", message, retry_after)
