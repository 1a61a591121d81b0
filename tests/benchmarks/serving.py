"""What serving costs, and whether it holds: throughput and latency against this process, and 64 clients beside faults.

    python tests/benchmarks/serving.py compare --clients 1 8 64
    python tests/benchmarks/serving.py faults --clients 64 --seconds 60
    python tests/benchmarks/serving.py adapters

The server is a process of its own (`tpips-reward serve`), on the same machine: it shares its cores with the clients. An
item is one edit of 64 x 64 pixels with three aspects; a request holds four edits of one source, as a piece of a GRPO
group does.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np
import psutil
import torch
from PIL import Image

from tpips_reward import RemoteReward, RewardOutput, TPIPSReward
from tpips_reward.adapters.core import EditScorer
from tpips_reward.adapters.flow_factory import reward_model
from tpips_reward.adapters.flow_grpo import score_function
from tpips_reward.adapters.loss import LossAdapter
from tpips_reward.adapters.trl import TRLReward
from tpips_reward.adapters.verl import compute_score_function
from tpips_reward.scenes import render, sample_edit, with_drift
from tpips_reward.serving.foreign import parse_compute, parse_history

GROUP = 4
TOLERANCE = 1e-4


def groups(count: int, size: int = 64) -> list[dict[str, Any]]:
    """Arguments of a reward: four edits of one source, of which three have drifted."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        edit = sample_edit(rng)
        scenes = [edit.ideal, *(with_drift(edit, rng, probability=1.0) for _ in range(GROUP - 1))]
        made.append(
            {
                "images": [Image.fromarray(render(scene, size)) for scene in scenes],
                "references": Image.fromarray(render(edit.source, size)),
                "preserve": [["background", "lighting"]],
                "target": [["object color"]],
            }
        )
    return made


@contextmanager
def server(*options: str) -> Iterator[tuple[str, psutil.Process]]:
    """`tpips-reward serve` on a free port: its address and its process."""
    command = [sys.executable, "-m", "tpips_reward.cli", "serve", "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit("the server did not start")
        yield line.split()[-1], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def drive(
    call: Callable[[dict[str, Any]], Any], work: list[dict[str, Any]], clients: int, seconds: float
) -> dict[str, float]:
    """Calls from so many threads for so long: items a second, and the percentiles of a call."""
    taken: list[float] = []
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        turn = number
        while time.monotonic() < end:
            begin = time.monotonic()
            call(work[turn % len(work)])
            taken.append(time.monotonic() - begin)
            turn += clients

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.monotonic() - begin
    p50, p99 = np.percentile(taken, [50, 99])
    return {
        "items_per_second": round(GROUP * len(taken) / spent, 1),
        "p50_ms": round(1000 * p50, 1),
        "p99_ms": round(1000 * p99, 1),
    }


def compare(options: argparse.Namespace) -> None:
    """The same calls in this process (one at a time, as a model has to be called) and by the server."""
    work = groups(16)
    here, lock = TPIPSReward(metric=options.metric, device="cpu"), threading.Lock()

    def local(arguments: dict[str, Any]) -> None:
        with lock:
            here(**arguments)

    local(work[0])  # the first call warms up
    for clients in options.clients:
        inside = drive(local, work, clients, options.seconds)
        with server("--metric", options.metric) as (address, _):
            remote = RemoteReward(f"remote:{address}")
            remote(**work[0])
            served = drive(lambda arguments, r=remote: r(**arguments), work, clients, options.seconds)
        ratio = round(served["items_per_second"] / inside["items_per_second"], 2)
        print(
            json.dumps({"clients": clients, "in_process": inside, "served": served, "throughput_ratio": ratio}),
            flush=True,
        )


def faults(options: argparse.Namespace) -> None:
    """Clients that must each get their own right answer, while workers are killed and strangers misbehave."""
    work = groups(16)
    here = TPIPSReward(metric=options.metric, device="cpu")
    wanted = [here(**arguments).scores for arguments in work]
    counts: Counter[str] = Counter()
    taken: list[float] = []
    stop = threading.Event()
    with server("--metric", options.metric, "--body-timeout", "5", "--head-timeout", "3") as (address, process):
        remote = RemoteReward(f"remote:{address}", timeout=300, patience=600)
        remote(**work[0])

        def client(number: int) -> None:
            turn = number
            while not stop.is_set():
                index = turn % len(work)
                turn += 1
                counts["sent"] += 1
                begin = time.monotonic()
                try:
                    scores = remote(**work[index]).scores
                except Exception as error:  # noqa: BLE001 - counted, and told below
                    counts[f"lost: {error}"] += 1
                    continue
                taken.append(time.monotonic() - begin)
                right = torch.allclose(scores, wanted[index], atol=TOLERANCE, rtol=0)
                counts["right" if right else "WRONG"] += 1

        def killer() -> None:
            """Ends the worker four times; one that is still loading scores nothing that could be lost."""
            while not stop.wait(options.seconds / 5):
                while httpx.get(f"{address}/health").status_code != 200 and not stop.wait(1):
                    pass
                for child in process.children():
                    if "spawn_main" in " ".join(child.cmdline()):
                        child.kill()
                        counts["workers killed"] += 1

        threads = [threading.Thread(target=client, args=(number,)) for number in range(options.clients)]
        strangers = [threading.Thread(target=killer)]
        for act in (slow_client, half_head, garbage, bad_requests, hang_up):
            strangers.append(threading.Thread(target=repeat, args=(act, address, stop, counts)))
        for thread in [*threads, *strangers]:
            thread.start()
        time.sleep(options.seconds)
        stop.set()
        for thread in [*threads, *strangers]:
            thread.join()
        text = httpx.get(f"{address}/metrics").text
    restarts = next(
        line.split()[-1] for line in text.splitlines() if line.startswith("tpips_reward_worker_restarts_total")
    )
    lost = sum(number for name, number in counts.items() if name.startswith("lost"))
    p50, p99 = np.percentile(taken, [50, 99])
    print(json.dumps({"clients": options.clients, "seconds": options.seconds, **counts, "lost": lost, "restarts": float(restarts),
                      "p50_ms": round(1000 * p50, 1), "p99_ms": round(1000 * p99, 1)}, indent=1))  # fmt: skip
    if (
        lost
        or counts["WRONG"]
        or counts["misjudged"]
        or counts["right"] != counts["sent"]
        or not counts["workers killed"]
    ):
        sys.exit("failed: something was lost, answered wrongly, or no fault was injected")


def repeat(act: Callable[[str], str | None], address: str, stop: threading.Event, counts: Counter[str]) -> None:
    while not stop.wait(0.2):
        try:
            problem = act(address)
        except (OSError, httpx.TransportError):
            problem = None  # the server hung up on a stranger
        counts[act.__name__] += 1
        if problem:
            counts["misjudged"] += 1
            print(f"{act.__name__}: {problem}", file=sys.stderr)


def connect(address: str) -> socket.socket:
    parts = urlsplit(address)
    return socket.create_connection((parts.hostname, parts.port), timeout=20)


def slow_client(address: str) -> str | None:
    """A byte now and then, until the server has had enough: 408."""
    with connect(address) as line:
        line.sendall(
            b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
        )
        for _ in range(4):
            line.sendall(b" ")
            time.sleep(1)
        answer = line.recv(4096)
    return None if b" 408 " in answer else f"expected 408, got {answer[:80]!r}"


def garbage(address: str) -> str | None:
    """Bytes that are no HTTP: 400 as JSON."""
    with connect(address) as line:
        line.sendall(b"\0" + random.randbytes(2000))
        answer = line.recv(4096)
    return None if b" 400 " in answer and b'"bad_http"' in answer else f"expected 400 as JSON, got {answer[:80]!r}"


def half_head(address: str) -> str | None:
    """The head of a request, a byte now and then: 408."""
    with connect(address) as line:
        for byte in b"POST /score":
            line.sendall(bytes([byte]))
            time.sleep(0.1)
        answer = line.recv(4096)
    return None if b" 408 " in answer and b'"too_slow"' in answer else f"expected 408 as JSON, got {answer[:80]!r}"


def bad_requests(address: str) -> str | None:
    """Requests with a mistake each; each has its status."""
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "PNG")
    good = ("images", ("a.png", buffer.getvalue(), "image/png"))
    item = '{"items": [{"image": 0, "source": 0, "preserve": ["background"], "target": ["color"]}]%s}'
    kind = {"Content-Type": "application/json"}
    for status, arguments in (
        (400, {"content": b"{", "headers": kind}),
        (415, {"content": b"{}"}),
        (422, {"data": {"request": item % ', "reward": "tpips:best"'}, "files": [good]}),
        (415, {"data": {"request": item % ""}, "files": [("images", ("a.png", b"no image", "image/png"))]}),
        (413, {"content": b" " * (65 * 2**20), "headers": kind}),
    ):
        answer = httpx.post(f"{address}/score", timeout=60, **arguments)
        if answer.status_code != status or answer.json()["error"]["status"] != status:
            return f"expected {status}, got {answer.status_code} {answer.text[:200]}"
    return None


def hang_up(address: str) -> str | None:
    """A good request whose client does not wait."""
    arguments = groups(1)[0]
    try:
        RemoteReward(f"remote:{address}", timeout=0.05, patience=0.1)(**arguments)
    except ValueError:
        pass
    return None


class _Pointwise:
    """Flow-Factory's base class, as far as a call needs it."""

    device = torch.device("cpu")


class _Free(TPIPSReward):
    """A reward that costs nothing."""

    def __init__(self, answer: RewardOutput) -> None:
        self.metric, self.answer = None, answer  # type: ignore[assignment]

    def __call__(self, *_: Any, **__: Any) -> RewardOutput:
        return self.answer


def adapters(options: argparse.Namespace) -> None:
    """Milliseconds that an adapter adds to a batch, with a reward that costs nothing."""
    count = options.batch
    image = Image.new("RGB", (512, 512))
    answer = RewardOutput(torch.zeros(count), [{}] * count, {"preserve": torch.zeros(count)})
    one = RewardOutput(torch.zeros(1), [{}], {"preserve": torch.zeros(1)})

    def reward(images: Any, references: Any, **_: Any) -> RewardOutput:
        return answer if len(images) == count else one

    images, prompts = [image] * count, ["make the car red"] * count
    rows = [{"preserve": ["background", "lighting"], "target": ["car color"], "ref_image": image}] * count
    columns = {"image": images, "preserve": [["background"]] * count, "target": [["car color"]] * count}
    verl = compute_score_function(reward)
    info = {**rows[0], "source_img": image}
    flow_factory = reward_model(_Pointwise, SimpleNamespace)
    model = flow_factory.__new__(flow_factory)  # its constructor would load a metric
    model.scorer = EditScorer(reward)
    loss, pixels = LossAdapter(_Free(answer)), [torch.zeros(3, 64, 64)] * count
    file = io.BytesIO()
    image.save(file, "PNG")
    picture = base64.b64encode(file.getvalue()).decode()
    named = {"preserve": ["background"], "target": ["car color"]}
    turns = [{"image_b64": picture}, {"image_b64": picture, "text": prompts[0]}]
    sample = {"history": turns, "required_rewards": ["tpips:preserve"], "metadata": named}
    body = {"prompt": prompts, "image": [picture] * count, "condition_images": [[picture]] * count,
            "kwargs": {"metadata": [named] * count}}  # fmt: skip

    def without_gradient() -> None:
        with torch.no_grad():
            loss(pixels, pixels, prompts, rows)

    calls = {
        "core": lambda: EditScorer(reward)(images, images, prompts, rows),
        "core, aspects proposed": lambda: EditScorer(reward)(images, images, prompts),
        "trl": lambda: TRLReward(reward)(prompts, images, **columns),
        "flow_grpo, paco_rl": lambda: score_function(reward)(images, prompts, rows),
        "verl": lambda: [verl(image, prompts[0], info) for _ in range(count)],
        "flow_factory": lambda: model(prompts, images, [[image]] * count, [json.dumps(named)] * count),
        "loss": without_gradient,
        "flow_factory, a body of /compute": lambda: parse_compute(body, "tpips:preserve", 256),
        "unirl, a body of /score": lambda: parse_history({"requests": [sample] * count}, 256),
    }
    for name, call in calls.items():
        call()
        begin = time.process_time()
        for _ in range(50):
            call()
        print(
            json.dumps({"adapter": name, "batch": count, "ms_per_batch": round(20 * (time.process_time() - begin), 3)})
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What serving costs, and whether it holds.")
    commands = parser.add_subparsers(required=True)
    ratio = commands.add_parser("compare", help="served against in-process")
    ratio.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    ratio.add_argument("--seconds", type=float, default=15)
    ratio.add_argument("--metric", default="builtin:late")
    ratio.set_defaults(run=compare)
    load = commands.add_parser("faults", help="clients beside faults")
    load.add_argument("--clients", type=int, default=64)
    load.add_argument("--seconds", type=float, default=60)
    load.add_argument("--metric", default="builtin:late")
    load.set_defaults(run=faults)
    cost = commands.add_parser("adapters", help="what each adapter adds to a batch")
    cost.add_argument("--batch", type=int, default=16)
    cost.set_defaults(run=adapters)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.run(options)


if __name__ == "__main__":
    main()
