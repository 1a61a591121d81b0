"""What one server accepts: bytes, pixels, items, a queue, and seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tpips_reward.errors import TPIPSError

#: Decoded images that may wait, in images of the largest size; they are what fills the memory.
QUEUED_LARGEST_IMAGES = 64


@dataclass(frozen=True)
class Limits:
    """Limits of a server; each must be positive.

    Attributes:
        body_bytes: of one request; a larger body is refused with 413 before it is read.
        open_bytes: of all bodies that are being read or decoded; above it requests are refused with 429.
        pixels: of one image, checked in the file's head before anything is decoded; 413 above it.
        items: of one request; 413 above it.
        batch: items that one call of the reward scores.
        queue: items that wait or are being scored; 429 above it.
        wait_seconds: how long an idle worker waits for a batch to fill.
        head_seconds: for a client to send a request's head; 408 after that.
        body_seconds: for a client to send its body, 408 after that; and to read its answer.
        score_seconds: for one batch; a worker that takes longer is replaced.
        connections: that are open at one time; 503 above it, where none of them only waits.
    """

    body_bytes: int = 64 * 2**20
    open_bytes: int = 512 * 2**20
    pixels: int = 4096 * 4096
    items: int = 256
    batch: int = 32
    queue: int = 1024
    wait_seconds: float = 0.005
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    score_seconds: float = 300.0
    connections: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not 0 < value < float("inf"):
                raise TPIPSError(f"The limit {field.name} must be a positive number, got {value!r}.")
        if self.open_bytes < self.body_bytes:
            raise TPIPSError(f"open_bytes={self.open_bytes} is less than one body of body_bytes={self.body_bytes}.")
        if self.queue < self.items:
            raise TPIPSError(f"queue={self.queue} is shorter than one request of items={self.items}.")

    @property
    def queue_pixels(self) -> int:
        """Pixels of all decoded images that wait or are being scored; 429 above it."""
        return QUEUED_LARGEST_IMAGES * self.pixels
