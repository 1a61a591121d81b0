"""The command `tpips-reward serve`."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path

from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.gate import Gate
from tpips_reward.rewards.spec import parse_reward
from tpips_reward.serving.client import TOKEN_VARIABLE
from tpips_reward.serving.limits import Limits
from tpips_reward.serving.worker import RewardSource, WorkerDied, WorkerProcess


def run_serve(options: argparse.Namespace) -> None:
    """Serves until Ctrl-C or SIGTERM, and answers what it has accepted before it ends; they end the loading at once.

    `--device cuda:0,cuda:1` starts a worker on each.

    Raises:
        TPIPSError: an option that means nothing, an address that is taken, a metric that does not load, or a missing extra.
        KeyboardInterrupt: Ctrl-C or SIGTERM while the metric is loaded.
    """
    try:
        import fastapi  # noqa: F401

        from tpips_reward.serving.app import create_app
        from tpips_reward.serving.connections import http_server
    except ModuleNotFoundError as error:
        raise TPIPSError(
            f"serve needs {error.name}, which is not installed; pip install 'tpips-reward[serve]'."
        ) from None

    # everything that can be wrong before the metric is loaded
    parse_reward(options.reward)
    Gate(options.gate, 1.0 if options.gate_threshold is None else options.gate_threshold, options.gate_weight)
    limits = read_limits(options)
    token = read_token(options.token_file)
    listener = bind(options.host, options.port)
    workers = [
        WorkerProcess(
            RewardSource(
                options.metric, device, options.dtype, options.revision,
                options.gate, options.gate_threshold, options.gate_weight,
            ),
            limits.score_seconds,
        )
        for device in (options.device.split(",") if options.device else [None])
    ]  # fmt: skip
    # before the first worker: without the server nobody would end it
    old = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for worker in workers:
            try:
                worker.start()
            except WorkerDied as error:
                raise TPIPSError(f"The worker ended while it loaded {options.metric!r} ({error}).") from None
        app = create_app(workers, reward=options.reward, limits=limits, token=token)
        server = http_server(app, limits)

        def stop(*_: object) -> None:
            server.should_exit = True

        # From here on, so that no signal is lost; uvicorn stops at them too and raises them again when it has ended.
        for number in old:
            signal.signal(number, stop)
        listener.listen()  # who reads the next line may come at once, and waits until uvicorn takes him
        host, port = listener.getsockname()[:2]
        print(f"tpips-reward: {options.reward} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        if token is None and not ipaddress.ip_address(host).is_loopback:
            print("tpips-reward: anybody who reaches this address can use it; set a token.", file=sys.stderr)
        server.run(sockets=[listener])
    finally:
        for number in old:
            signal.signal(number, signal.SIG_IGN)  # the workers' end takes two seconds at most
        listener.close()
        for worker in workers:
            worker.stop()
        for number, handler in old.items():
            signal.signal(number, handler)


def read_limits(options: argparse.Namespace) -> Limits:
    """The limits that the options name.

    Raises:
        TPIPSError: a limit that is not positive, or two that do not go together.
    """
    body = int(options.max_body_mb * 2**20)
    return Limits(
        body_bytes=body,
        open_bytes=max(Limits().open_bytes, 2 * body),
        pixels=options.max_pixels,
        items=options.max_items,
        batch=options.max_batch,
        queue=options.max_queue,
        wait_seconds=options.batch_wait_ms / 1000,
        head_seconds=options.head_timeout,
        body_seconds=options.body_timeout,
        score_seconds=options.score_timeout,
        connections=options.max_connections,
    )


def read_token(path: Path | None) -> str | None:
    """The token of a file, or of the environment; None where there is none.

    Raises:
        TPIPSError: a file that cannot be read, or an empty token.
    """
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE)
        where = f"${TOKEN_VARIABLE}"
    else:
        where = str(path)
        try:
            token = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TPIPSError(f"The token file {path} cannot be read: {error}.") from None
    if token is None:
        return None
    if not token.strip() or not token.strip().isascii() or any(letter.isspace() for letter in token.strip()):
        raise TPIPSError(f"{where} holds no token; a token is one word of ASCII letters.")
    return token.strip()


def bind(host: str, port: int) -> socket.socket:
    """Takes the address; nobody can connect until somebody listens.

    Raises:
        TPIPSError: it is taken, or none of this machine's.
    """
    if not 0 <= port <= 65535:
        raise TPIPSError(f"--port is {port}; give one from 0 to 65535.")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise TPIPSError(f"{host}:{port} cannot be listened on: {error.strerror or error}.") from None
    return listener
