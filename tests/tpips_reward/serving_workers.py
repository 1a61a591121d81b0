"""Servers for tests: a quick metric whose aspects can also make things go wrong, and workers with and without a process."""

from __future__ import annotations

import base64
import io
import os
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvicorn
from fake_metrics import RegionMetric
from PIL import Image

from tpips_reward.errors import TPIPSError
from tpips_reward.images import to_tensors
from tpips_reward.serving.app import create_app
from tpips_reward.serving.connections import http_server
from tpips_reward.serving.items import Answer, Item
from tpips_reward.serving.limits import Limits
from tpips_reward.serving.worker import MetricRewards, WorkerDied, score_items


class TroubleMetric(RegionMetric):
    """Takes PIL images. The aspects "slow", "explode", "device" (an error of it) and "nan" do what they say."""

    def similarity_pairs(self, images: Sequence[Any], references: Sequence[Any], pairs: Any, **options: Any) -> Any:
        aspects = {aspect for _, _, aspect in pairs}
        if "slow" in aspects:
            time.sleep(0.3)
        if "explode" in aspects:
            raise RuntimeError("out of memory")
        if "device" in aspects:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        values = super().similarity_pairs(to_tensors(list(images)), to_tensors(list(references)), pairs, **options)
        for index, (_, _, aspect) in enumerate(pairs):
            if aspect == "nan":
                values[index] = float("nan")
        return values


def trouble_rewards() -> MetricRewards:
    """What a worker process is started with."""
    return MetricRewards(TroubleMetric(), {}, {"metric": "trouble"})


def interrupted_rewards() -> MetricRewards:
    """Loading that takes long, in which a scheduler ends the server; it is no metric in the end, lest the server stays."""
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(20)
    raise TPIPSError("nobody has ended the loading")


def endless_rewards() -> MetricRewards:
    """Loading that somebody else has to end."""
    time.sleep(60)
    raise TPIPSError("nobody has ended the loading")


class LocalWorker:
    """A worker in the test's own process, which dies when it is told to."""

    def __init__(self) -> None:
        self.rewards = trouble_rewards()
        self.facts = self.rewards.facts
        self.sizes: list[int] = []
        self.deaths_left = 0
        self.starts_that_fail = 0
        self.surprise: Exception | None = None  # instead of a WorkerDied
        self.starts = 0
        self.stopped = False
        self.is_alive = True
        self.start_gate = threading.Event()
        self.start_gate.set()
        self.gate = threading.Event()
        self.gate.set()

    def start(self) -> None:
        self.stopped = False
        self.starts += 1
        self.start_gate.wait(20)
        if self.stopped:
            raise WorkerDied("its process ended")
        if self.starts_that_fail:
            self.starts_that_fail -= 1
            raise self.surprise or WorkerDied("/srv/metric cannot be read")
        self.is_alive = True

    def score(self, items: Sequence[Item]) -> list[Answer]:
        self.gate.wait(20)
        self.sizes.append(len(items))
        if self.deaths_left:
            self.deaths_left -= 1
            raise self.surprise or WorkerDied("killed")
        return score_items(self.rewards, items)

    def stop(self) -> None:
        self.stopped = True
        self.start_gate.set()


@contextmanager
def running(workers: Sequence[Any], **options: Any) -> Iterator[str]:
    """A server on a port of its own, in a thread; its address."""
    with serving(workers, **options) as (server, _):
        yield address_of(server)


def address_of(server: uvicorn.Server) -> str:
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


@contextmanager
def serving(workers: Sequence[Any], **options: Any) -> Iterator[tuple[uvicorn.Server, threading.Thread]]:
    """The same, for tests that look into the server or end it."""
    limits = options.pop("limits", Limits(wait_seconds=0.002))
    server = http_server(create_app(workers, limits=limits, **options), limits, port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
            assert thread.is_alive(), "the server did not start"
        yield server, thread
    finally:
        server.should_exit = True
        thread.join(20)


def picture(seed: int, size: int = 24) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()


def with_exif(image: Image.Image, exif: bytes) -> bytes:
    """A PNG with these bytes as its EXIF, which need not be any."""
    png, body = encoded(image), b"eXIf" + exif
    return png[:33] + struct.pack(">I", len(exif)) + body + struct.pack(">I", zlib.crc32(body)) + png[33:]


#: Of which Pillow says struct.error.
BROKEN_EXIF = b"II*\0"


def b64(image: Image.Image, kind: str = "PNG") -> str:
    return base64.b64encode(encoded(image, kind)).decode()


def request_of(count: int = 2, **item: Any) -> dict[str, Any]:
    """A body of `POST /score`: `count` edits of one source."""
    fields = {"preserve": ["background", "lighting"], "target": ["color"], **item}
    return {
        "images": [b64(picture(n)) for n in range(count + 1)],
        "items": [{"image": n + 1, "source": 0, **fields} for n in range(count)],
    }


def expected_scores(count: int = 2, reward: str = "tpips:preserve", **item: Any) -> list[float]:
    """What the reward says here of `request_of`."""
    fields = {"preserve": ["background", "lighting"], "target": ["color"], **item}
    edits = [picture(n + 1) for n in range(count)]
    call = trouble_rewards().of(reward)
    return call(edits, picture(0), [fields["preserve"]] * count, [fields["target"]] * count).scores.tolist()
