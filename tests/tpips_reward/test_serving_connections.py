"""Below HTTP, on real sockets: JSON for what is no request, an end to all waiting, and a place for everybody."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from serving_workers import LocalWorker, address_of, expected_scores, request_of, running, serving

from tpips_reward import RemoteReward
from tpips_reward.serving import connections
from tpips_reward.serving.connections import NEW_SECONDS, SILENT_SECONDS
from tpips_reward.serving.limits import Limits

#: A request of some length with an answer of some length, so that a few fill what the machine keeps for a client.
LONG = b"GET /metrics HTTP/1.1\r\nHost: x\r\nCookie: " + b"x" * 12_000 + b"\r\n\r\n"
HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@contextmanager
def line(address: str) -> Iterator[socket.socket]:
    """A bare connection."""
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        yield connection


def everything(connection: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    answer = b""
    try:
        while chunk := connection.recv(65536):
            answer += chunk
    except ConnectionResetError:
        pass
    return answer


def more(connection: socket.socket) -> bytes:
    """What comes next; a connection that has ended would give nothing for ever."""
    chunk = connection.recv(65536)
    assert chunk, "the server has ended the connection in the middle of an answer"
    return chunk


def one_answer(connection: socket.socket) -> bytes:
    """One whole answer of a connection that stays open."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += more(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = next(int(entry.split(b":")[1]) for entry in head.lower().split(b"\r\n") if entry.startswith(b"content-length"))
    while len(body) < length:
        body += more(connection)
    return head + b"\r\n\r\n" + body


def error_of(answer: bytes) -> tuple[int, dict[str, str], dict[str, str]]:
    """Status, headers and error of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(entry.lower().split(": ", 1) for entry in lines)
    assert headers["content-type"] == "application/json" and int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert error["status"] == int(first.split()[1]) and headers["connection"] == "close"
    return error["status"], headers, error


def assert_unharmed(address: str) -> None:
    response = httpx.post(f"{address}/score", json=request_of(2), timeout=20)
    assert response.status_code == 200, response.text
    assert [row["score"] for row in response.json()["results"]] == pytest.approx(expected_scores(2))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running([LocalWorker()]) as url:
        yield url


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (b"\0\xff" * 500, 400, "bad_http"),
        (b"hello\r\n\r\n", 400, "bad_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "bad_http"),  # TLS
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "bad_http"),  # no Host
        (b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400, "bad_http"),
        (HEAD + b"Content-Length: x\r\n\r\n", 400, "bad_http"),
        (HEAD + b"Transfer-Encoding: magic\r\n\r\n", 501, "bad_http"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n", 400, "bad_http"),  # while the body is read
        (b"GET /" + b"x" * 300_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "too_large"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nCookie: " + b"x" * 300_000, 431, "too_large"),
    ],
)
def test_what_is_no_request_gets_json_too(address, sent, status, kind):
    with line(address) as stranger:
        stranger.sendall(sent)
        found, _, error = error_of(everything(stranger))
    assert (found, error["type"]) == (status, kind) and error["message"]
    assert_unharmed(address)


@pytest.mark.parametrize("begin", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_garbage_is_not_sent_back(address, begin):
    """20 KB of it would come five times enlarged."""
    with line(address) as stranger:
        stranger.sendall(begin + b"\xff\xfe" * 10_000 + b"\r\n\r\n")
        answer = everything(stranger)
    assert error_of(answer)[0] == 400 and len(answer) < 500


def test_garbage_after_a_request(address):
    """The first is answered as ever."""
    with line(address) as stranger:
        stranger.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + b"\0" * 100 + b"\r\n\r\n")
        answer = everything(stranger)
    first, again, rest = answer.partition(b"HTTP/1.1 400 ")
    assert first.startswith(b"HTTP/1.1 200 ") and b'"status":"ok"' in first and error_of(again + rest)[0] == 400


@pytest.mark.parametrize("begin", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_head_that_never_ends(begin):
    """A byte at a time, on a new connection and on one that has had an answer; others are answered meanwhile."""
    with running([LocalWorker()], limits=Limits(head_seconds=0.5)) as address, line(address) as slow:
        slow.sendall(begin)
        if begin:
            assert b'"status":"ok"' in one_answer(slow)
        since = time.monotonic()
        slow.settimeout(0.05)
        answer = b""
        for byte in HEAD * 10:
            try:
                slow.sendall(bytes([byte]))
                if not (chunk := slow.recv(65536)):
                    break
                answer += chunk
            except TimeoutError:
                continue
            except ConnectionError:
                break
            assert time.monotonic() - since < 8
        status, _, error = error_of(answer)
        assert (status, error["type"]) == (408, "too_slow") and 0.4 < time.monotonic() - since < 8
        assert_unharmed(address)


def test_silence_is_ended_without_an_answer():
    with running([LocalWorker()], limits=Limits(head_seconds=0.3)) as address, line(address) as silent:
        assert everything(silent) == b""


def test_a_request_after_a_pause_is_no_slow_head():
    """Between requests a connection may rest longer than a head may take."""
    with running([LocalWorker()], limits=Limits(head_seconds=0.3)) as address, line(address) as resting:
        for _ in range(2):
            resting.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b'"status":"ok"' in one_answer(resting)
            time.sleep(0.6)


def test_a_slow_body_and_slow_scoring_have_their_own_time():
    """The clock of the head stops at its end."""
    with running([LocalWorker()], limits=Limits(head_seconds=0.3, wait_seconds=0.001)) as address, line(address) as sender:
        body = json.dumps(request_of(1, preserve=["slow"])).encode()
        sender.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[:10])
        time.sleep(0.6)
        sender.sendall(body[10:])
        assert one_answer(sender).startswith(b"HTTP/1.1 200 ")


def test_a_refused_body_that_never_ends():
    """An answer that comes before the body's end does not let the client send for ever."""
    with running([LocalWorker()], limits=Limits(body_seconds=0.5), token="secret") as address, line(address) as endless:
        endless.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n")
        assert one_answer(endless).startswith(b"HTTP/1.1 401 ")
        end = time.monotonic() + 8
        with pytest.raises(ConnectionError):
            while time.monotonic() < end:
                endless.sendall(b"x")
                time.sleep(0.05)


def test_slow_strangers_do_not_take_the_places_of_others():
    """As many half requests as there may be connections, again and again: everybody else is served at once."""
    limits = Limits(connections=4, head_seconds=60)
    with running([LocalWorker()], limits=limits) as address, ExitStack() as strangers:
        for _ in range(3):
            for _ in range(4):
                strangers.enter_context(line(address)).sendall(b"GET /hea")
            time.sleep(NEW_SECONDS + 0.1)
            assert_unharmed(address)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /hea", HEAD + b"Content-Length: 9\r\n\r\n{", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"]
)
def test_who_loses_its_place_is_told(monkeypatch, sent):
    """A reset would look like a fault, where 503 says to come again."""
    monkeypatch.setattr(connections, "NEW_SECONDS", 0.0)
    monkeypatch.setattr(connections, "SILENT_SECONDS", 0.0)
    with running([LocalWorker()], limits=Limits(connections=1)) as address, line(address) as waits:
        waits.sendall(sent)
        if sent.endswith(b"x\r\n\r\n"):
            one_answer(waits)  # and rests
        time.sleep(0.2)
        assert httpx.get(f"{address}/health").status_code == 200
        status, headers, error = error_of(everything(waits))
        assert status == 503 and headers["retry-after"] and error["type"] == "unavailable"


def test_who_takes_the_place_of_one_that_is_gone_is_answered(monkeypatch):
    """An end that asyncio has not seen yet, for it does not read from the connection at this moment."""
    monkeypatch.setattr(connections, "NEW_SECONDS", 0.0)
    with serving([LocalWorker()], limits=Limits(connections=1)) as (server, _), line(address_of(server)) as gone:
        gone.sendall(b"GET /hea")
        for _ in range(100):
            if server.server_state.connections:
                break
            time.sleep(0.1)
        (connection,) = server.server_state.connections
        connection.loop.call_soon_threadsafe(connection.transport.pause_reading)
        time.sleep(0.2)
        gone.close()
        assert httpx.get(f"{address_of(server)}/health", timeout=10).status_code == 200


def test_a_newcomer_is_not_replaced_before_its_request_can_be_there(monkeypatch):
    """Of many that come at once some are answered and the others told to come again; none is reset."""
    monkeypatch.setattr(connections, "NEW_SECONDS", 60.0)
    with running([LocalWorker()], limits=Limits(connections=2)) as address, ExitStack() as stack:
        crowd = [stack.enter_context(line(address)) for _ in range(8)]
        for client in crowd:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        found = [one_answer(client)[:13] for client in crowd]
    assert found[:2] == [b"HTTP/1.1 200 "] * 2 and set(found[2:]) <= {b"HTTP/1.1 200 ", b"HTTP/1.1 503 "}


def test_refused_connections_do_not_add_up(monkeypatch):
    """Each keeps a descriptor while it reads its answer, so that there are no more of them than there are places."""
    monkeypatch.setattr(connections, "NEW_SECONDS", 0.0)
    monkeypatch.setattr(connections, "GOODBYE_SECONDS", 60.0)
    with serving([LocalWorker()], limits=Limits(connections=2)) as (server, _), ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(line(address_of(server))).sendall(b"GET /hea")
            time.sleep(0.05)
        leaving = server.config.http_protocol_class.leaving
        assert 0 < len(leaving) <= 2
        assert httpx.get(f"{address_of(server)}/health", timeout=10).status_code == 200


def test_connections_that_rest_make_room():
    with running([LocalWorker()], limits=Limits(connections=2)) as address, ExitStack() as clients:
        for _ in range(5):
            client = clients.enter_context(httpx.Client())
            assert client.get(f"{address}/health").status_code == 200


def test_where_all_connections_have_requests_a_new_one_is_503_and_may_come_again():
    worker = LocalWorker()
    with running([worker], limits=Limits(connections=2)) as address, ExitStack() as stack:
        worker.gate.clear()
        body = json.dumps(request_of(2)).encode()
        busy = [stack.enter_context(line(address)) for _ in range(2)]
        for client in busy:
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.3)
        for _ in range(3):
            with line(address) as late:
                late.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                status, headers, error = error_of(everything(late))
            assert status == 503 and int(headers["retry-after"]) >= 1 and error["type"] == "unavailable"
        response = httpx.post(f"{address}/score", content=body * 50, timeout=20)  # it reads its answer after sending
        assert response.status_code == 503 and response.headers["Retry-After"]
        worker.gate.set()
        for client in busy:
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")


def test_a_client_waits_for_a_place():
    worker = LocalWorker()
    body = json.dumps(request_of(1)).encode()
    with running([worker], limits=Limits(connections=1)) as address, line(address) as busy:
        worker.gate.clear()
        busy.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.2)
        assert httpx.get(f"{address}/health").status_code == 503
        threading.Timer(0.5, worker.gate.set).start()
        assert RemoteReward(f"remote:{address}", patience=20).info["metric"] == "trouble"


def test_a_client_that_does_not_read_its_answers():
    with running([LocalWorker()], limits=Limits(body_seconds=0.5)) as address, socket.socket() as deaf:
        parts = urlsplit(address)
        deaf.settimeout(20)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((parts.hostname, parts.port))
        with pytest.raises(ConnectionError):
            for _ in range(5000):
                deaf.sendall(LONG)
        assert_unharmed(address)


def test_a_small_answer_that_nobody_reads_does_not_hold_the_server():
    """Less than what asyncio keeps by itself: the connection ends all the same, and so does the server."""
    limits = Limits(body_seconds=0.5)
    with serving([LocalWorker()], limits=limits) as (server, thread), socket.socket() as deaf:
        connect_deaf(server, deaf)
        server.should_exit = True
        thread.join(8)
        assert not thread.is_alive()


def connect_deaf(server, deaf: socket.socket) -> None:
    """A client that asks and never reads, until some of its answers are left in the server's own memory."""
    parts = urlsplit(address_of(server))
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((parts.hostname, parts.port))
    for _ in range(5000):
        deaf.sendall(LONG)
        time.sleep(0.002)
        if any(c.transport.get_write_buffer_size() for c in list(server.server_state.connections)):
            return
    raise AssertionError("everything was sent")


def test_an_answer_that_goes_out_keeps_its_connection():
    """What is unsent is read later, whole; a newcomer is refused meanwhile."""
    with serving([LocalWorker()], limits=Limits(connections=1)) as (server, _), socket.socket() as slow:
        connect_deaf(server, slow)
        assert httpx.get(f"{address_of(server)}/health").status_code == 503
        slow.shutdown(socket.SHUT_WR)
        slow.settimeout(10)
        head, _, body = everything(slow).rpartition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(body) in head.rpartition(b"HTTP/1.1 200 ")[2]


def test_half_sent_bodies_do_not_take_the_places_of_others():
    with running([LocalWorker()], limits=Limits(connections=4)) as address, ExitStack() as strangers:
        for _ in range(2):
            for _ in range(4):
                strangers.enter_context(line(address)).sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
            time.sleep(SILENT_SECONDS + 0.2)
            assert_unharmed(address)


def test_an_upload_that_is_under_way_keeps_its_place():
    body = json.dumps(request_of(1)).encode()
    with running([LocalWorker()], limits=Limits(connections=1, head_seconds=3)) as address, line(address) as client:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for part in (body[:10], body[10:20]):
            client.sendall(part)
            time.sleep(0.1)
            with line(address) as newcomer:
                assert one_answer(newcomer).startswith(b"HTTP/1.1 503 ")
        client.sendall(body[20:])
        assert one_answer(client).startswith(b"HTTP/1.1 200 ")


def test_the_time_of_an_unwanted_body_is_not_the_next_heads():
    limits = Limits(body_seconds=1.0, head_seconds=30)
    with running([LocalWorker()], limits=limits, token="secret") as address, line(address) as client:
        client.sendall(HEAD + b"Content-Length: 10\r\n\r\n12345")
        assert one_answer(client).startswith(b"HTTP/1.1 401 ")
        time.sleep(0.3)
        client.sendall(b"67890GET /health HT")
        time.sleep(1.5)
        client.sendall(b"TP/1.1\r\nHost: x\r\n\r\n")
        assert one_answer(client).startswith(b"HTTP/1.1 200 ")


def test_a_server_that_is_stopped_twice_says_503(capfd):
    """A client that waits takes 500 for final, and 503 not; and whoever stopped it wants no traceback."""
    worker = LocalWorker()
    with serving([worker]) as (server, _), line(address_of(server)) as client:
        worker.gate.clear()
        body = json.dumps(request_of(1)).encode()
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.3)
        server.should_exit = True
        time.sleep(0.3)
        server.force_exit = True
        answer = everything(client)
        worker.gate.set()
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"unavailable"' in answer
    assert "Traceback" not in capfd.readouterr().err
