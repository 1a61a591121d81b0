"""What lies below the application: connections that must not wait for ever, and JSON where uvicorn answers in plain text."""

from __future__ import annotations

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any, ClassVar

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from tpips_reward.serving.errors import RequestError, excerpt, unavailable
from tpips_reward.serving.limits import Limits

KEEP_ALIVE_SECONDS = 30
#: For a client that is refused to read its answer; what it sends meanwhile is thrown away.
GOODBYE_SECONDS = 2.0
#: A body that has been silent for so long may lose its place to a newcomer.
SILENT_SECONDS = 1.0
#: So long a new connection keeps its place, for its first request is on the way.
NEW_SECONDS = 0.1


def http_server(app: FastAPI, limits: Limits, **options: Any) -> uvicorn.Server:
    """uvicorn for `create_app`, within `limits`.

    Args:
        **options: for `uvicorn.Config`, such as `port`.
    """

    limited = type("LimitedConnection", (Connection,), {"limits": limits, "leaving": set()})
    config = uvicorn.Config(
        app, http=limited, ws="none", log_level="error", access_log=False, timeout_keep_alive=KEEP_ALIVE_SECONDS, **options
    )
    return uvicorn.Server(config)


class Connection(H11Protocol):
    """uvicorn's connection, with an end to all waiting for its client.

    A client has `head_seconds` for the head of each request, and `body_seconds` to end a body that is no longer wanted or
    to read its answer. (The application itself waits `body_seconds` for a body that it reads.) Where there are as many
    connections as may be, a new one takes the place of one that only waits, or else of the one whose body has been silent
    for longest, which is told so; it is refused where all have whole requests, answers that are still going out, or only
    just come.
    """

    limits = Limits()
    leaving: ClassVar[set[Connection]] = set()  # refused, while they read their answer

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None  # for the client to send
        self._awaited = ""  # what that clock is for: "head" or "body"
        self._made = 0.0
        self._heard = 0.0  # when the client last sent something
        self._reading: asyncio.TimerHandle | None = None  # for the client to read
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        others = self.connections
        if len(others) >= self.limits.connections and not self._replace_one():
            self.transport = transport
            self._refuse(self._no_place())
            return
        super().connection_made(transport)
        self._made = self._heard = self.loop.time()
        transport.set_write_buffer_limits(0)  # whatever the client does not read starts the clock, and not 64 KiB of it
        self._wait("head", self.limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self.leaving.discard(self)
        self._reads_again()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        if not self._refused:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self.limits.body_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._reads_again()
        super().resume_writing()

    def _reads_again(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls while it handles h11's error, for bytes that are no HTTP and heads that are too large."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        kind = {431: "too_large"}.get(status, "bad_http")
        reason = excerpt(str(error or msg), 60)  # h11 repeats all the bytes that it cannot read
        self._refuse(RequestError(status, kind, f"The request is no HTTP that this server reads: {reason}."))

    def _watch(self) -> None:
        """Starts or stops the clock: it runs while a head is incomplete, and while an unwanted body comes in."""
        if self._refused or self.transport.is_closing():
            self._cancel()
            return
        if self.conn.their_state is h11.IDLE:
            if self.conn.trailing_data[0]:
                self._wait("head", self.limits.head_seconds)
            else:
                self._cancel()  # uvicorn's own clock runs between requests
        elif self.cycle is not None and self.cycle.response_complete:
            self._wait("body", self.limits.body_seconds)
        else:
            self._cancel()

    def _wait(self, awaited: str, seconds: float) -> None:
        if self._awaited != awaited:
            self._cancel()  # what is left of a body's time is not the next head's
        if self._deadline is None:
            self._awaited = awaited
            self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        """A head in part is answered; silence and a body that nobody reads are not."""
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"The head of the request did not arrive within {self.limits.head_seconds:g} s."
            self._refuse(RequestError(408, "too_slow", message))
        else:
            self.transport.abort()

    def _replace_one(self) -> bool:
        """Refuses the connection that only waits for its client and would have ended next, or else the one whose body has
        been silent for longest; False where there is none. An answer that is still going out is left to its own clock."""
        now = self.loop.time()
        ours = [
            other
            for other in self.connections
            if type(other) is type(self) and not other.transport.get_write_buffer_size()
        ]
        timers = {
            other: other.timeout_keep_alive_task if other._deadline is None else other._deadline
            for other in ours
            if other._deadline is None or now - other._made >= NEW_SECONDS
        }
        ends = {other: timer.when() for other, timer in timers.items() if timer is not None}
        if not ends:
            # an upload that is under way keeps its place, and the newcomer is told to come again
            bodies = [other for other in ours if other.conn.their_state is h11.SEND_BODY]
            ends = {other: other._heard for other in bodies if now - other._heard >= SILENT_SECONDS}
        if not ends:
            return False
        loser = min(ends, key=ends.__getitem__)
        if loser._awaited == "body" and loser._deadline is not None:
            loser.transport.abort()  # it has had its answer
        else:
            loser._refuse(self._no_place())  # a reset would look like a fault, and lose its request
        return True

    def _no_place(self) -> RequestError:
        return unavailable(f"All {self.limits.connections} connections are in use.")

    def _refuse(self, error: RequestError) -> None:
        """Answers with an error and ends; without h11, which may be in no state to answer."""
        self._cancel()
        self.connections.discard(self)
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()  # in the middle of another answer
                return
            self.cycle.disconnected = True  # the application reads a body that has no more meaning
            self.cycle.message_event.set()
        self._refused = True
        body = json.dumps({"error": error.to_json()}).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close", **error.headers}
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{k}: {v}" for k, v in fields.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        # closing at once, with bytes of the client unread, would reset the connection before it has read the answer
        try:
            self.transport.write_eof()
        except OSError:  # the client has ended it, and asyncio does not know yet
            self.transport.abort()
            return
        if len(self.leaving) >= self.limits.connections:  # their number has an end too
            self.transport.abort()
            return
        self.leaving.add(self)
        self.loop.call_later(GOODBYE_SECONDS, self.transport.abort)
