"""Errors with an HTTP status. A failed item is one as well, so that the others of its request keep their answers."""

from __future__ import annotations

from typing import Any

from tpips_reward.errors import TPIPSError


class RequestError(TPIPSError):
    """A request, or one item of it, that cannot be answered.

    Attributes:
        status: the HTTP status.
        kind: a short name that programs can compare, such as "too_large".
        retry_after: seconds after which the same request may succeed; None where it never will.
    """

    def __init__(self, status: int, kind: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:  # between the worker and the server
        return type(self), (self.status, self.kind, str(self), self.retry_after)

    def to_json(self) -> dict[str, Any]:
        """What a client gets to see."""
        return {"status": self.status, "type": self.kind, "message": str(self)}


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


def unavailable(message: str, retry_after: float = 5.0) -> RequestError:
    """503: no worker can score now."""
    return RequestError(503, "unavailable", message, retry_after)
