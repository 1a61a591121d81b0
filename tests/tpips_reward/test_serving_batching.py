"""Batching, queues and faults on real sockets: nothing is lost, nothing is answered wrongly."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from serving_workers import LocalWorker, encoded, expected_scores, picture, request_of, running

from tpips_reward.serving.batching import DEATHS_OF_AN_ITEM, Batcher
from tpips_reward.serving.items import Answer, Item, Scored
from tpips_reward.serving.limits import Limits
from tpips_reward.serving.metrics import ServerMetrics


def post(address: str, body: Any) -> httpx.Response:
    return httpx.post(f"{address}/score", json=body, timeout=20)


def scores(response: httpx.Response) -> list[float]:
    assert response.status_code == 200, response.text
    return [row["score"] for row in response.json()["results"]]


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def queued(address: str) -> float:
    text = httpx.get(f"{address}/metrics").text
    return float(next(line for line in text.splitlines() if line.startswith("tpips_reward_queued_items")).split()[1])


def test_requests_that_wait_become_one_batch():
    worker = LocalWorker()
    with running([worker]) as address, ThreadPoolExecutor(9) as pool:
        worker.gate.clear()
        first = pool.submit(post, address, request_of(1))  # keeps the worker busy
        wait_for(lambda: queued(address) == 1)
        others = [pool.submit(post, address, request_of(2)) for _ in range(8)]
        wait_for(lambda: queued(address) == 17)
        worker.gate.set()
        assert scores(first.result()) == pytest.approx(expected_scores(1))
        for other in others:
            assert scores(other.result()) == pytest.approx(expected_scores(2))
    assert worker.sizes == [1, 16]


def test_no_batch_is_larger_than_the_limit_and_a_request_may_be_cut():
    worker = LocalWorker()
    with running([worker], limits=Limits(batch=4)) as address:
        assert scores(post(address, request_of(10))) == pytest.approx(expected_scores(10))
    assert max(worker.sizes) == 4 and sum(worker.sizes) == 10


def test_one_bad_item_does_not_harm_the_batch_that_it_shares():
    worker = LocalWorker()
    with running([worker]) as address, ThreadPoolExecutor(5) as pool:
        worker.gate.clear()
        calls = [
            pool.submit(post, address, request_of(2, preserve=["explode" if n == 2 else "lighting"])) for n in range(5)
        ]
        wait_for(lambda: queued(address) == 10)
        worker.gate.set()
        for n, call in enumerate(calls):
            if n == 2:
                assert call.result().status_code == 500 and "failed on this item" in call.result().text
            else:
                assert scores(call.result()) == pytest.approx(expected_scores(2, preserve=["lighting"]))


def test_a_full_queue_is_429_with_retry_after_and_takes_requests_again():
    worker = LocalWorker()
    with running([worker], limits=Limits(queue=4, items=3)) as address, ThreadPoolExecutor(1) as pool:
        worker.gate.clear()
        first = pool.submit(post, address, request_of(3))
        wait_for(lambda: queued(address) == 3)
        refused = post(address, request_of(2))
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "busy"
        worker.gate.set()
        assert scores(first.result()) == pytest.approx(expected_scores(3))
        assert scores(post(address, request_of(2))) == pytest.approx(expected_scores(2))


def test_decoded_pixels_fill_the_queue_too():
    worker = LocalWorker()
    # 64 largest images of 24 x 24 fit; a request of 40 items holds 41 images
    with running([worker], limits=Limits(pixels=24 * 24)) as address, ThreadPoolExecutor(1) as pool:
        worker.gate.clear()
        first = pool.submit(post, address, request_of(40))
        wait_for(lambda: queued(address) == 40)
        assert post(address, request_of(40)).status_code == 429
        worker.gate.set()
        assert len(scores(first.result())) == 40
        assert post(address, request_of(64)).status_code == 413  # 65 images can never fit


def test_a_client_that_hangs_up_leaves_the_queue():
    worker = LocalWorker()
    with running([worker]) as address, ThreadPoolExecutor(2) as pool:
        worker.gate.clear()
        busy = pool.submit(post, address, request_of(1))
        wait_for(lambda: queued(address) == 1)
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{address}/score", json=request_of(5), timeout=0.3)
        wait_for(lambda: queued(address) == 1)
        last = pool.submit(post, address, request_of(2))
        wait_for(lambda: queued(address) == 3)
        worker.gate.set()
        assert scores(busy.result()) == pytest.approx(expected_scores(1))
        assert scores(last.result()) == pytest.approx(expected_scores(2))
        assert 'status="499"' in httpx.get(f"{address}/metrics").text
    assert sum(worker.sizes) == 3  # the five were never scored


def test_a_slow_client_gets_408_and_others_do_not_wait_for_it():
    with running([LocalWorker()], limits=Limits(body_seconds=0.5)) as address:
        parts = urlsplit(address)
        with socket.create_connection((parts.hostname, parts.port)) as slow:
            slow.sendall(
                b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            assert scores(post(address, request_of(2))) == pytest.approx(expected_scores(2))
            slow.settimeout(10)
            answer = b""
            while chunk := slow.recv(4096):
                answer += chunk
        assert b" 408 " in answer.split(b"\r\n")[0] and b'"type":"too_slow"' in answer


def test_garbage_on_the_socket_harms_nobody():
    with running([LocalWorker()]) as address:
        parts = urlsplit(address)
        for garbage in (b"\0\xff" * 500, b"POST /score HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"GET"):
            with socket.create_connection((parts.hostname, parts.port)) as line:
                line.sendall(garbage)
        assert scores(post(address, request_of(2))) == pytest.approx(expected_scores(2))


def test_a_dead_worker_is_started_again_and_its_items_are_scored(caplog):
    worker = LocalWorker()
    worker.deaths_left = 1
    with running([worker]) as address:
        assert scores(post(address, request_of(3))) == pytest.approx(expected_scores(3))
        assert "tpips_reward_worker_restarts_total 1.0" in httpx.get(f"{address}/metrics").text
    assert worker.sizes == [3, 1, 1, 1]  # alone, for one of them may be what it died of
    assert [text.partition(" after")[0] for text in caplog.messages if "worker" in text] == ["worker 0 died: killed", "worker 0 can score again"]


def test_a_worker_that_dies_idle_is_seen_and_started_again(caplog):
    """By nobody's request: until it can score again /health sends balancers elsewhere."""
    worker = LocalWorker()
    with running([worker]) as address:
        worker.start_gate.clear()
        worker.is_alive = False
        wait_for(lambda: worker.starts == 1)
        assert httpx.get(f"{address}/health").status_code == 503
        assert "tpips_reward_workers 0.0" in httpx.get(f"{address}/metrics").text
        worker.start_gate.set()
        wait_for(lambda: httpx.get(f"{address}/health").status_code == 200)
        assert "tpips_reward_worker_restarts_total 1.0" in httpx.get(f"{address}/metrics").text
        assert scores(post(address, request_of(3))) == pytest.approx(expected_scores(3))
    assert worker.sizes == [3]
    assert "worker 0 died: its process ended while it was idle" in caplog.messages
    assert any(line.startswith("worker 0 can score again after") for line in caplog.messages)


def test_an_item_that_kills_the_worker_each_time_is_given_up():
    worker = LocalWorker()
    worker.deaths_left = 1 + DEATHS_OF_AN_ITEM
    with running([worker]) as address:
        rows = post(address, request_of(2)).json()["results"]
    assert (
        rows[0]["score"] is None
        and rows[0]["error"]["status"] == 500
        and "died each time" in rows[0]["error"]["message"]
    )
    assert rows[1]["score"] == pytest.approx(expected_scores(2)[1])


def test_two_workers_share_the_queue_and_one_may_die():
    workers = [LocalWorker(), LocalWorker()]
    workers[0].deaths_left = 2
    with running(workers, limits=Limits(batch=2)) as address, ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(post, address, request_of(3)) for _ in range(8)]
        for call in calls:
            assert scores(call.result()) == pytest.approx(expected_scores(3))
    assert all(worker.sizes for worker in workers)


def test_a_worker_that_cannot_start_again_is_503_and_not_a_score(monkeypatch, caplog):
    monkeypatch.setattr("tpips_reward.serving.batching.LONGEST_PAUSE", 0.01)
    worker = LocalWorker()
    worker.deaths_left, worker.starts_that_fail = 1, 10
    with running([worker]) as address:
        response = post(address, request_of(2))
        assert response.status_code == 503 and "Retry-After" in response.headers
        assert response.json()["error"]["type"] == "unavailable" and response.json()["results"][0]["score"] is None
        assert "/srv/metric" not in response.text and "/srv/metric" in caplog.text  # why is the server's own business
        wait_for(lambda: worker.starts_that_fail == 0)  # it goes on trying
        wait_for(lambda: httpx.get(f"{address}/health").status_code == 200)
        assert scores(post(address, request_of(2))) == pytest.approx(expected_scores(2))


@pytest.mark.parametrize("surprise", [OSError(24, "Too many open files"), MemoryError()])
def test_other_errors_are_deaths_too(surprise, monkeypatch, caplog):
    """Of a loop that ended nobody would get an answer any more."""
    monkeypatch.setattr("tpips_reward.serving.batching.LONGEST_PAUSE", 0.01)
    worker = LocalWorker()
    worker.deaths_left, worker.starts_that_fail, worker.surprise = 1, 2, surprise
    with running([worker]) as address:
        assert scores(post(address, request_of(2))) == pytest.approx(expected_scores(2))
    assert worker.starts == 3 and type(surprise).__name__ in caplog.text


def test_a_worker_whose_device_fails_is_replaced():
    worker = LocalWorker()
    with running([worker]) as address:
        response = post(address, request_of(1, preserve=["device"]))
        assert response.status_code == 500 and "died each time" in response.text
        assert scores(post(address, request_of(2))) == pytest.approx(expected_scores(2))
    assert worker.starts == 1 + DEATHS_OF_AN_ITEM


def test_health_says_when_no_worker_can_score(monkeypatch):
    monkeypatch.setattr("tpips_reward.serving.batching.LONGEST_PAUSE", 0.05)
    worker = LocalWorker()
    worker.deaths_left, worker.starts_that_fail = 1, 10**6
    with running([worker]) as address:
        assert post(address, request_of(1)).status_code == 503
        health = httpx.get(f"{address}/health")
        assert (
            health.status_code == 503 and health.json()["status"] == "unavailable" and "Retry-After" in health.headers
        )


def test_a_server_that_stops_answers_what_it_accepted():
    worker = LocalWorker()
    answers: list[httpx.Response] = []
    threads = []
    with running([worker], limits=Limits(batch=2)) as address:
        worker.gate.clear()
        for _ in range(4):
            threads.append(threading.Thread(target=lambda: answers.append(post(address, request_of(3)))))
            threads[-1].start()
        wait_for(lambda: queued(address) == 12)
        threading.Timer(0.5, worker.gate.set).start()
    for thread in threads:
        thread.join(10)
    assert len(answers) == 4 and worker.stopped
    for answer in answers:
        assert scores(answer) == pytest.approx(expected_scores(3))
    with pytest.raises(httpx.TransportError):
        post(address, request_of(1))


def test_a_start_that_nobody_waits_for_ends_with_the_server():
    worker = LocalWorker()
    worker.is_alive = False
    worker.start_gate.clear()

    async def serve() -> None:
        batcher = Batcher([worker], Limits(), ServerMetrics())
        batcher.open()
        while not worker.starts:
            await asyncio.sleep(0.01)
        await batcher.close()

    asyncio.run(serve())
    assert worker.starts == 1 and not worker.is_alive  # the start did not come to its end


def test_a_pause_between_starts_ends_with_the_server(monkeypatch, caplog):
    """And no start follows."""
    worker = LocalWorker()
    worker.is_alive, worker.starts_that_fail = False, 100

    def failures() -> int:
        return caplog.text.count("could not be started again")

    async def serve() -> int:
        monkeypatch.setattr("tpips_reward.serving.batching.LONGEST_PAUSE", 0.01)
        batcher = Batcher([worker], Limits(), ServerMetrics())
        batcher.open()
        while failures() < 6:
            await asyncio.sleep(0.01)
        monkeypatch.setattr("tpips_reward.serving.batching.LONGEST_PAUSE", 60.0)
        short = failures()
        while failures() == short:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(batcher.close(), 20)
        return short + 1

    expected = asyncio.run(serve())
    assert worker.starts == expected


def test_a_start_that_items_wait_for_is_waited_for_by_a_server_that_closes():
    worker = LocalWorker()
    worker.deaths_left = 1
    worker.start_gate.clear()

    async def serve() -> list[Answer]:
        batcher = Batcher([worker], Limits(), ServerMetrics())
        batcher.open()
        scoring = asyncio.create_task(batcher.score([Item("tpips:preserve", picture(1), picture(0), ("lighting",), ())]))
        while not worker.starts:
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.1)  # in which it could end the start
        worker.start_gate.set()
        answers = await scoring
        await closing
        return answers

    (answer,) = asyncio.run(serve())
    assert isinstance(answer, Scored) and answer.score == pytest.approx(expected_scores(1, preserve=["lighting"])[0])


def test_many_clients_get_their_own_answers():
    """Eight clients with different requests at one time, among them bad ones."""
    bodies = [request_of(1 + n % 4, preserve=[("lighting", "background", "color x")[n % 3]]) for n in range(8)]
    wanted = [expected_scores(1 + n % 4, preserve=[("lighting", "background", "color x")[n % 3]]) for n in range(8)]
    with running([LocalWorker()], limits=Limits(batch=5)) as address, ThreadPoolExecutor(8) as pool:

        def client(n: int) -> None:
            with httpx.Client(base_url=address, timeout=20) as connection:
                for turn in range(2):
                    if (n + turn) % 4 == 0:
                        bad = connection.post("/score", content=b"{", headers={"Content-Type": "application/json"})
                        assert bad.status_code == 400
                    assert scores(connection.post("/score", json=bodies[n])) == pytest.approx(wanted[n])

        for done in [pool.submit(client, n) for n in range(8)]:
            done.result()


def test_bodies_together_are_limited():
    body = json.dumps(request_of(2)).encode()
    files = len(encoded(picture(0)))
    assert files < len(body)
    limits = Limits(body_bytes=len(body), open_bytes=len(body) + 10)
    worker = LocalWorker()
    with running([worker], limits=limits) as address, ThreadPoolExecutor(1) as pool:
        worker.gate.clear()
        first = pool.submit(post, address, request_of(2))
        wait_for(lambda: queued(address) == 2)
        second = post(address, request_of(2))
        assert second.status_code == 429 and second.headers["Retry-After"] == "1"
        worker.gate.set()
        assert len(scores(first.result())) == 2
        assert len(scores(post(address, request_of(2)))) == 2
