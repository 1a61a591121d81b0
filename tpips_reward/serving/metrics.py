"""What Prometheus reads at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """The counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix, registry = "tpips_reward_", self.registry
        self.requests = Counter(
            prefix + "requests", "Requests answered", ["path", "status"], registry=registry
        )  # as tpips_reward_requests_total
        self.items = Counter(prefix + "items", "Items answered", ["outcome"], registry=registry)
        self.batches = Histogram(prefix + "batch_items", "Items in a batch", buckets=_SIZES, registry=registry)
        self.waiting = Histogram(
            prefix + "queue_seconds", "Time of an item in the queue", buckets=_SECONDS, registry=registry
        )
        self.scoring = Histogram(prefix + "score_seconds", "Time of a batch", buckets=_SECONDS, registry=registry)
        self.answering = Histogram(
            prefix + "request_seconds", "Time of a request", ["path"], buckets=_SECONDS, registry=registry
        )
        self.queued = Gauge(prefix + "queued_items", "Items that wait or are being scored", registry=registry)
        self.workers = Gauge(prefix + "workers", "Workers that can score", registry=registry)
        self.restarts = Counter(prefix + "worker_restarts", "Workers that were started again", registry=registry)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
