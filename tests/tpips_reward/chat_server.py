"""A server on this machine that answers chat completions by a script, and misbehaves by it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def reply(text: str | None, logprobs: list[dict[str, float]] | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
    if logprobs is not None:
        choice["logprobs"] = {
            "content": [
                {
                    "token": next(iter(position)),
                    "logprob": next(iter(position.values())),
                    "top_logprobs": [{"token": t, "logprob": v} for t, v in position.items()],
                }
                for position in logprobs
            ]
        }
    return {"choices": [choice]}


class Server:
    """Answers the n-th request with the n-th of its answers (the last again and again): a dict, a (status, text,
    headers) triple, bytes, or a function that returns one."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.requests, self.keys = answers, [], []  # type: ignore[var-annotated]
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    answer = outer.answers[min(len(outer.requests), len(outer.answers) - 1)]
                    outer.requests.append((self.path, body))
                    outer.keys.append(self.headers.get("Authorization"))
                answer = answer() if callable(answer) else answer
                status, content, headers = answer if isinstance(answer, tuple) else (200, answer, {})
                payload = content if isinstance(content, bytes) else json.dumps(content).encode()
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(payload)
                except OSError:  # the client did not wait
                    pass

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@contextmanager
def serving() -> Iterator[Callable[..., Server]]:
    """What starts servers, which end with the block."""
    servers: list[Server] = []

    def start(*answers: Any) -> Server:
        servers.append(Server(list(answers)))
        return servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.http.shutdown()
            server.http.server_close()
