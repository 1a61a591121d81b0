"""Reading a request's body within limits: bytes, seconds, and all bodies together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from tpips_reward.serving.errors import RequestError, bad_json, busy, too_large
from tpips_reward.serving.limits import Limits

#: The JSON beside the files of a multipart body.
MAX_FIELD_BYTES = 4 * 2**20


class Bodies:
    """Counts the bytes of all bodies that are held at one time."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, which counts as held inside of the block.

        Raises:
            RequestError: 413 for too many bytes, 408 for a client that is too slow, 429 where other bodies fill the
                memory, 400 for a wrong Content-Length.
        """
        self._check_announced(request)
        chunks: list[bytes] = []
        size = 0
        try:
            try:
                async with asyncio.timeout(self.limits.body_seconds):
                    async for chunk in request.stream():
                        size += len(chunk)
                        self.held += len(chunk)
                        self._check(size)
                        chunks.append(chunk)
            except TimeoutError:
                message = f"The body did not arrive within {self.limits.body_seconds:g} s."
                raise RequestError(408, "too_slow", message) from None
            yield b"".join(chunks)
        finally:
            self.held -= size

    def _check_announced(self, request: Request) -> None:
        announced = request.headers.get("content-length")
        if announced is None:
            return
        if not announced.isascii() or not announced.isdigit():
            raise bad_json(f"Content-Length is {announced!r}, which is no number.")
        self._check(int(announced))

    def _check(self, size: int) -> None:
        if size > self.limits.body_bytes:
            raise too_large(f"The body is larger than {self.limits.body_bytes} bytes; send it in parts.")
        if self.held > self.limits.open_bytes:
            raise busy("Other requests are being read.", 1.0)


async def read_multipart(request: Request, body: bytes, items: int) -> tuple[bytes, list[bytes]]:
    """The field `request` and the files `images` of a multipart body.

    Args:
        items: of one request; three images each at most.

    Raises:
        RequestError: 400 for a body that is no multipart/form-data, 413 for too many files or a part `request` that is too large,
            422 for other parts.
    """

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(
        request.headers, stream(), max_files=3 * items, max_fields=1, max_part_size=MAX_FIELD_BYTES
    )  # fmt: skip
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError, UnicodeDecodeError) as error:
        message = getattr(error, "message", "")
        if message.startswith("Too many files"):
            raise too_large(f"The body has more than {3 * items} images; send it in parts.") from None
        if message.startswith("Part exceeded"):
            raise too_large(f"The part `request` is larger than {MAX_FIELD_BYTES} bytes; send images as files, or in parts.") from None
        raise bad_json(f"The body is no multipart/form-data: {getattr(error, 'message', error)}.") from None
    try:
        fields: list[bytes] = []
        files: list[bytes] = []
        for name, part in form.multi_items():
            content = part.encode() if isinstance(part, str) else await part.read()
            target: Any = {"request": fields, "images": files}.get(name)
            if target is None or (name == "images" and isinstance(part, str)):
                raise RequestError(
                    422, "bad_request", f"The part {name!r} is unknown; send `request` and files `images`."
                )
            target.append(content)
    finally:
        await form.close()
    if len(fields) != 1:
        raise RequestError(422, "bad_request", "The part `request` with the JSON is missing or there twice.")
    return fields[0], files
