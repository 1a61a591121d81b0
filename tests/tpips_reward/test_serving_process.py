"""The worker's own process, and the command: killed workers, poison, silence, signals."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import torch
import uvicorn
from serving_workers import (
    LocalWorker,
    endless_rewards,
    expected_scores,
    interrupted_rewards,
    picture,
    request_of,
    running,
    trouble_rewards,
)

from tpips_reward import RemoteReward, TPIPSReward
from tpips_reward.cli import main
from tpips_reward.errors import TPIPSError
from tpips_reward.search.index import probe, write_index
from tpips_reward.serving.errors import RequestError
from tpips_reward.serving.items import Item, Scored
from tpips_reward.serving.limits import Limits
from tpips_reward.serving.worker import RewardSource, WorkerDied, WorkerProcess, _work, score_items, shown_name


def processes_of_workers() -> set[psutil.Process]:
    return {c for c in psutil.Process().children() if "spawn_main" in " ".join(c.cmdline())}


def process_of_worker() -> psutil.Process:
    (child,) = processes_of_workers()
    return child


def item(*preserve: str) -> Item:
    return Item("tpips:preserve", picture(1), picture(0), preserve or ("lighting",), ())


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """Dies in these tests now and then; `start` brings it back."""
    worker = WorkerProcess(trouble_rewards, seconds=20)
    worker.start()
    yield worker
    worker.stop()


def test_errors_come_back_whole(worker, capfd):
    worker.start()  # again, so that its process writes to where this test reads
    good, bad = worker.score([item(), item("explode")])
    assert isinstance(good, Scored) and isinstance(bad, RequestError)
    assert (bad.status, bad.kind) == (500, "failed") and "out of memory" not in str(bad)
    number = str(bad).rstrip(".").split()[-1]
    logged = capfd.readouterr().err  # the worker's own process writes it
    assert f"error {number}" in logged and "RuntimeError: out of memory" in logged


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: out of memory", False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False),
    ],
)
def test_too_little_memory_is_no_lost_device(text, lost):
    def reward(*_: object, **__: object) -> None:
        raise torch.AcceleratorError(text)

    rewards = SimpleNamespace(of=lambda spec: reward, facts={})
    if lost:
        with pytest.raises(torch.AcceleratorError):
            score_items(rewards, [item()])
    else:
        (answer,) = score_items(rewards, [item()])
        assert isinstance(answer, RequestError) and answer.kind == "failed"


def test_a_killed_worker_says_so_and_starts_again(worker):
    assert worker.facts == {"metric": "trouble"}
    expected = trouble_rewards().of("tpips:preserve")([picture(1)], picture(0), ["lighting"]).scores.item()
    (answer,) = worker.score([item()])
    assert isinstance(answer, Scored) and answer.score == pytest.approx(expected)
    child = process_of_worker()
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the server, which ends its workers itself
        child.send_signal(number)
    assert isinstance(worker.score([item()])[0], Scored)
    child.kill()
    with pytest.raises(WorkerDied):
        worker.score([item()])
    assert not worker.is_alive
    worker.start()
    assert worker.is_alive and isinstance(worker.score([item()])[0], Scored)


def test_a_process_with_a_broken_device_ends(worker):
    with pytest.raises(WorkerDied, match="ended"):
        worker.score([item(), item("device")])
    worker.start()
    assert isinstance(worker.score([item()])[0], Scored)


def test_a_start_without_room_for_a_process(worker, monkeypatch):
    def full(process: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.context.SpawnProcess.start", full)
        for _ in range(2):
            with pytest.raises(OSError, match="Too many"):
                worker.start()
    worker.start()
    assert isinstance(worker.score([item()])[0], Scored)


def test_a_silent_worker_is_ended(worker):
    worker.seconds = 0.05
    try:
        with pytest.raises(WorkerDied, match="within 0.05 s"):
            worker.score([item("slow")])
    finally:
        worker.seconds = 20
    with pytest.raises(WorkerDied):
        worker.score([item()])
    assert not worker.is_alive


def test_a_worker_that_is_killed_while_it_scores(worker):
    """Through the whole server: the batch is scored by the next process."""
    if not worker.is_alive:
        worker.start()
    limits = Limits(batch=1, wait_seconds=0.002)  # one slow item after the other, so that the end comes among them
    with running([worker], limits=limits) as address, ThreadPoolExecutor(1) as pool:
        call = pool.submit(httpx.post, f"{address}/score", json=request_of(8, preserve=["slow"]), timeout=120)
        while "tpips_reward_queued_items 0.0" in httpx.get(f"{address}/metrics").text:
            pass
        process_of_worker().kill()
        rows = call.result().json()["results"]
        assert "tpips_reward_worker_restarts_total 1.0" in httpx.get(f"{address}/metrics").text
    assert [row["score"] for row in rows] == pytest.approx(expected_scores(8, preserve=["slow"]))
    assert not worker.is_alive  # ended with the server


def test_a_worker_that_is_killed_while_it_is_idle(worker):
    """Nobody asks anything: it is replaced all the same, and leaves no zombie."""
    if not worker.is_alive:
        worker.start()
    child = process_of_worker()
    with running([worker]) as address:
        assert httpx.get(f"{address}/health").status_code == 200
        child.kill()
        end = time.monotonic() + 5
        while httpx.get(f"{address}/health").status_code == 200:
            assert time.monotonic() < end, "it was not seen"
            time.sleep(0.02)
        assert not psutil.pid_exists(child.pid)
        end = time.monotonic() + 120
        while httpx.get(f"{address}/health").status_code == 503:
            assert time.monotonic() < end, "it was not started again"
            time.sleep(0.05)
        assert process_of_worker() != child


def test_a_busy_worker_can_be_ended(worker):
    """As a second Ctrl-C does it: the thread that waits is told, and nobody waits for the answer."""
    if not worker.is_alive:
        worker.start()
    found: list[BaseException] = []

    def wait() -> None:
        try:
            worker.score([item("slow")] * 40)
        except WorkerDied as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not worker._busy:
        pass
    worker.stop()
    thread.join(10)
    assert len(found) == 1 and not worker.is_alive


def test_a_worker_that_loads_can_be_ended():
    """As a server does that closes: at once, for who loads sees no closed pipe."""
    worker = WorkerProcess(endless_rewards, seconds=20)
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(worker.start)
        while not worker._busy:
            assert not start.done(), start.result()
            time.sleep(0.01)
        worker.stop()
        with pytest.raises(WorkerDied, match="its process ended"):
            start.result()
    assert not worker.is_alive and not worker._busy


def test_the_command_from_start_to_sigterm(tmp_path: Path, parity, photos, metric):
    """Requests that are being scored when SIGTERM comes are answered; the process ends with 0."""
    (tmp_path / "token").write_text("secret\n")
    command = [sys.executable, "-m", "tpips_reward.cli", "serve", "--metric", str(parity / "embedding"), "--port", "0",
               "--token-file", str(tmp_path / "token"), "--device", "cpu", "--gate-threshold", "0.3"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        line = process.stdout.readline()
        remote = RemoteReward(f"remote:{line.split()[-1]}", token="secret", patience=30)
        edits, source = [photos["cat_1"], photos["cat_2"]], photos["cat_0"]
        given = {"preserve": [["background", "lighting"]], "target": [["color"]]}
        expected = TPIPSReward(metric=metric, gate_threshold=0.3)(edits, source, **given)
        torch.testing.assert_close(remote(edits, source, **given).scores, expected.scores, atol=1e-5, rtol=0)
        found: list[torch.Tensor] = []
        many = [photos[name] for name in photos] * 2
        thread = threading.Thread(target=lambda: found.append(remote(many, source, **given).scores))
        thread.start()
        health = httpx.get(f"{remote.address}/metrics", headers={"Authorization": "Bearer secret"})
        while "queued_items 0.0" in health.text:
            health = httpx.get(f"{remote.address}/metrics", headers={"Authorization": "Bearer secret"})
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert len(found) == 1 and found[0].shape == (len(many),)
        assert process.wait(30) == 0, process.stderr.read()
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """What comes to the test itself, which would be its end; afterwards all is as it was."""
    came: list[int] = []
    old = {
        number: signal.signal(number, lambda number, _: came.append(number)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield came
    for number, handler in old.items():
        signal.signal(number, handler)


def test_sigterm_while_the_metric_loads_ends_the_worker_too(monkeypatch, capsys, signals):
    monkeypatch.setattr("tpips_reward.serving.command.RewardSource", lambda *options: interrupted_rewards)
    before = processes_of_workers()
    assert main(["serve", "--port", "0"]) == 130 and signals == []
    assert capsys.readouterr().err == "tpips-reward: interrupted\n"
    assert processes_of_workers() <= before
    signal.raise_signal(signal.SIGTERM)
    assert signals == [signal.SIGTERM], "it is handled as before"


def test_a_signal_before_uvicorn_handles_them_is_not_lost(monkeypatch, signals):
    """The last moment in which the command's own handler counts."""
    worker, run, stopped = LocalWorker(), uvicorn.Server.run, []

    def stopped_at_once(server: uvicorn.Server, sockets: Any) -> None:
        socket.create_connection(sockets[0].getsockname(), timeout=10).close()  # the address has been said
        signal.raise_signal(signal.SIGTERM)
        stopped.append(server.should_exit)
        if server.should_exit:  # or it would serve for ever
            run(server, sockets)

    monkeypatch.setattr("tpips_reward.serving.command.WorkerProcess", lambda *arguments: worker)
    monkeypatch.setattr("uvicorn.Server.run", stopped_at_once)
    assert main(["serve", "--port", "0"]) == 0
    assert stopped == [True] and worker.stopped and signals == []


def test_a_worker_whose_server_is_gone_ends_without_a_word(signals):
    """It can be ended while it loads, and finds nobody to tell when it has."""
    handlers: list[Any] = []

    def fails() -> Any:
        handlers.append(signal.getsignal(signal.SIGTERM))
        raise TPIPSError("no such metric")

    for source in (fails, trouble_rewards):
        ours, theirs = multiprocessing.Pipe()
        ours.close()
        _work(theirs, source)
    assert handlers[0] != signal.SIG_IGN and signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--reward", "tpips:best"], "Unknown mode"),
        (["--gate", "maybe"], "Unknown gate"),
        (["--port", "70000"], "--port is 70000"),
        (["--host", "203.0.113.1", "--port", "0"], "cannot be listened on"),
        (["--max-batch", "0"], "batch must be a positive number"),
        (["--token-file", "/no/such/file"], "cannot be read"),
        (["--port", "0", "--metric", "/no/such/metric"], "/no/such/metric"),
    ],
)
def test_what_the_command_refuses(capsys, options, words):
    assert main(["serve", *options]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [
        ("fastapi", ["serve"], "tpips-reward[serve]"),
        ("faiss", ["search", "INDEX", "--query", "IMAGE", "overall"], "tpips-reward[search]"),
        ("av", ["video", "IMAGE", "--aspect", "x", "--output", "out"], "tpips-reward[video]"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch, capsys, tmp_path, metric, module, command, extra):
    picture(0, 64).save(tmp_path / "image.png")
    vector = probe(metric)[None]
    write_index(tmp_path / "index", ["a.png"], {"overall": vector}, metric_name="x", probe_vector=vector[0])
    monkeypatch.setattr("tpips_reward.cli._load", lambda options: metric)
    monkeypatch.setitem(sys.modules, module, None)
    known = {"INDEX": str(tmp_path / "index"), "IMAGE": str(tmp_path / "image.png"), "out": str(tmp_path / "out")}
    assert main([known.get(word, word) for word in command]) == 2
    assert extra in capsys.readouterr().err


def test_a_token_file_without_a_token(capsys, tmp_path):
    (tmp_path / "token").write_text("two words")
    assert main(["serve", "--token-file", str(tmp_path / "token")]) == 2
    assert "holds no token" in capsys.readouterr().err


def test_names_of_metrics_that_clients_may_know(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "metric").mkdir(parents=True)
    for name in ("builtin:late", "released:mid", "owner/name"):
        assert shown_name(name) == name
    for path in ("runs/metric", "./runs/metric", str(tmp_path / "runs" / "metric"), "/gone/metric", "~/gone/metric"):
        assert shown_name(path) == "metric"


def test_the_worker_loads_what_it_is_told(parity):
    rewards = RewardSource(str(parity / "embedding"), device="cpu", gate="none")()
    assert rewards.facts["fusion"] == "late" and json.dumps(rewards.facts)
    assert rewards.facts["metric"] == "embedding"  # not where it lies
    out = rewards.of("tpips:preserve")([picture(1, 64)], picture(0, 64), ["lighting"], ["color"])
    assert out.scores.item() == pytest.approx(out.terms["preserve"].item())
    assert rewards.of("tpips:edit") is rewards.of("tpips:edit")
