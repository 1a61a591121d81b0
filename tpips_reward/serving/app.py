"""The routes: a request is authorised, read within limits, decoded beside the event loop, scored and rendered."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import tpips_reward
from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.spec import parse_reward
from tpips_reward.serving.batching import Batcher, Worker
from tpips_reward.serving.body import Bodies, read_multipart
from tpips_reward.serving.decoding import decode_image, image_pixels
from tpips_reward.serving.errors import RequestError, bad_json, failed, unavailable
from tpips_reward.serving.foreign import parse_compute, parse_history, served_rewards
from tpips_reward.serving.items import Answer, Item, Wanted
from tpips_reward.serving.limits import Limits
from tpips_reward.serving.metrics import ServerMetrics
from tpips_reward.serving.wire import parse_score, read_json

DECODERS = 4
#: A client that hung up gets no answer; the status is for the logs and the metrics.
HUNG_UP = 499


def create_app(
    workers: Sequence[Worker],
    *,
    reward: str = "tpips:preserve",
    limits: Limits | None = None,
    token: str | None = None,
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        workers: started workers; the application ends them when it shuts down.
        reward: for requests that name none.
        limits: see `Limits`.
        token: what clients must send as `Authorization: Bearer ...`; None asks for none. With a token, /health tells
            others only whether a worker can score, and there is no /openapi.json.

    Raises:
        TPIPSError: no workers, an unknown reward, or an empty token.
    """
    if not workers:
        raise TPIPSError("A server needs at least one worker.")
    if token is not None and not token.strip():
        raise TPIPSError("The token is empty; give one, or None for a server without.")
    service = _Service(workers, str(parse_reward(reward)), limits or Limits(), token)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.open()
        try:
            yield
        except asyncio.CancelledError:  # stopped twice: nobody is waited for
            return
        await service.batcher.close()
        service.decoders.shutdown()

    # the interactive pages of FastAPI would load scripts from elsewhere
    app = FastAPI(
        title="tpips-reward", version=tpips_reward.__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False, openapi_url="/openapi.json" if token is None else None,
    )  # fmt: skip
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _own_error)
    app.state.service = service

    @app.get("/health")
    async def health(request: Request) -> Response:
        """Whether a worker can score, 200 or 503; and what is served, for those who may ask."""
        return service.health(request)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus' text format."""
        try:
            service.authorize(request)
        except RequestError as error:
            return _refusal(error)
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/score")
    async def score(request: Request) -> Response:
        """Scores of edits: this server's own format, or UniRL's."""
        return await service.answer(request, service.parse_any_score)

    @app.post("/compute")
    async def compute(request: Request) -> Response:
        """Rewards in Flow-Factory's format."""
        return await service.answer(request, service.parse_flow_factory)

    return app


class _Service:
    """What the routes share."""

    def __init__(self, workers: Sequence[Worker], reward: str, limits: Limits, token: str | None) -> None:
        self.reward = reward
        self.limits = limits
        self.token = token
        self.metrics = ServerMetrics()
        self.batcher = Batcher(workers, limits, self.metrics)
        self.bodies = Bodies(limits)
        self.decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")

    def health(self, request: Request) -> Response:
        """A balancer asks without a token and needs the status; the rest is for those who have it."""
        ready = self.batcher.is_ready
        content: dict[str, Any] = {"status": "ok" if ready else "unavailable"}
        if self.token is not None and "authorization" not in request.headers:
            content["token"] = "required"
        else:
            try:
                self.authorize(request)
            except RequestError as error:
                return _refusal(error)
            content |= {
                "version": tpips_reward.__version__,
                "reward": self.reward,
                "rewards": served_rewards(),
                "limits": {"body_bytes": self.limits.body_bytes, "pixels": self.limits.pixels, "items": self.limits.items},
                **self.batcher.workers[0].facts,
            }
        return JSONResponse(content, 200 if ready else 503, headers=None if ready else {"Retry-After": "5"})

    def authorize(self, request: Request) -> None:
        """Refuses a request without the token (401)."""
        if self.token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            raise RequestError(
                401, "unauthorized", "The token is missing or wrong; send 'Authorization: Bearer TOKEN'."
            )

    async def answer(self, request: Request, parse: Callable[[bytes, list[bytes] | None], Wanted]) -> Response:
        """A request's whole way; every failure is a JSON error with its status."""
        begin = time.monotonic()
        try:
            response = await self._answer(request, parse)
        except RequestError as error:
            response = _refusal(error)
        except asyncio.CancelledError:  # a server that is stopped twice does not wait for its requests
            response = _refusal(unavailable("The server is stopping."))
        except ClientDisconnect:
            response = _refusal(RequestError(HUNG_UP, "hung_up", "The client is gone."))
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not take the format of errors away
            response = _refusal(failed("The server failed on this request.", error))
        self.metrics.requests.labels(request.url.path, str(response.status_code)).inc()
        self.metrics.answering.labels(request.url.path).observe(time.monotonic() - begin)
        return response

    async def _answer(self, request: Request, parse: Callable[[bytes, list[bytes] | None], Wanted]) -> Response:
        self.authorize(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("application/json", "multipart/form-data"):
            raise RequestError(
                415, "bad_body", f"Content-Type is {kind!r}; send application/json or multipart/form-data."
            )
        async with self.bodies.read(request) as body:
            files = None
            if kind == "multipart/form-data":
                body, files = await read_multipart(request, body, self.limits.items)
            wanted = await self._beside(lambda: parse(body, files))
            pixels = await self._beside(lambda: _sizes(wanted, self.limits.pixels))
            total = sum(size for size in pixels if isinstance(size, int))
            self.batcher.admit(len(wanted.items), total)
            try:
                prepared = await self._beside(lambda: _decode(wanted, pixels, self.limits.pixels))
                answers = await _unless_gone(request, self._score(prepared))
            finally:
                self.batcher.release(len(wanted.items), total)
        return _rendered(wanted, answers)

    async def _score(self, prepared: list[Item | RequestError]) -> list[Answer]:
        good = [item for item in prepared if isinstance(item, Item)]
        found = iter(await self.batcher.score(good)) if good else iter(())
        return [next(found) if isinstance(entry, Item) else entry for entry in prepared]

    async def _beside(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.decoders, call)

    def parse_any_score(self, body: bytes, files: list[bytes] | None) -> Wanted:
        """`POST /score`: UniRL's body has `requests`, ours `items`."""
        content = read_json(body, self.limits.items)
        if isinstance(content, dict) and "requests" in content:
            if files is not None:
                raise bad_json("A body with `requests` is plain JSON.")
            return parse_history(content, self.limits.items)
        return parse_score(content, files, self.reward, self.limits.items)

    def parse_flow_factory(self, body: bytes, files: list[bytes] | None) -> Wanted:
        """`POST /compute`."""
        if files is not None:
            raise bad_json("/compute takes JSON with base64 images.")
        return parse_compute(read_json(body, self.limits.items), self.reward, self.limits.items)


def _sizes(wanted: Wanted, limit: int) -> list[int | RequestError]:
    """Pixels of each image, from its head; nothing is decoded before the queue has room for it."""
    sizes: list[int | RequestError] = []
    for index, content in enumerate(wanted.images):
        try:
            sizes.append(
                content if isinstance(content, RequestError) else image_pixels(content, f"image {index}", limit)
            )
        except RequestError as error:
            sizes.append(error)
    return sizes


def _decode(wanted: Wanted, sizes: list[int | RequestError], limit: int) -> list[Item | RequestError]:
    """The items with their images, or what is wrong with each."""
    decoded: dict[int, Image.Image | RequestError] = {}
    prepared: list[Item | RequestError] = []
    for want in wanted.items:
        if want.error is not None:
            prepared.append(want.error)
            continue
        for index in want.images:
            if index not in decoded:
                decoded[index] = _decoded(wanted, sizes, index, limit)
        bad = next((image for index in want.images if isinstance(image := decoded[index], RequestError)), None)
        if bad is not None:
            prepared.append(bad)
            continue
        target: Any = None if want.target_image is None else decoded[want.target_image]
        edit: Any = decoded[want.image]
        source: Any = decoded[want.source]
        prepared.append(Item(want.reward, edit, source, want.preserve, want.target, target))
    return prepared


def _decoded(wanted: Wanted, sizes: list[int | RequestError], index: int, limit: int) -> Image.Image | RequestError:
    size, content = sizes[index], wanted.images[index]
    if isinstance(size, RequestError) or isinstance(content, RequestError):
        return size if isinstance(size, RequestError) else content  # type: ignore[return-value]
    try:
        return decode_image(content, f"image {index}", limit)
    except RequestError as error:
        return error


async def _unless_gone(request: Request, work: Awaitable[list[Answer]]) -> list[Answer]:
    """The answers, unless the client hangs up first: then its items leave the queue."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    scoring, watching = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({scoring, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not scoring.done():
            raise ClientDisconnect
        return scoring.result()
    finally:
        scoring.cancel()
        watching.cancel()


def _rendered(wanted: Wanted, answers: Sequence[Answer]) -> Response:
    """200 where any item has a score (where all have, in formats without room for errors), else the first error's."""
    errors = [answer for answer in answers if isinstance(answer, RequestError)]
    if errors and (len(errors) == len(answers) or not wanted.partial):
        first = errors[0]
        content = {"error": first.to_json(), **(wanted.render(answers) if wanted.partial else {})}
        return JSONResponse(content, first.status, headers=first.headers)
    return JSONResponse(wanted.render(answers))


def _refusal(error: RequestError) -> Response:
    return JSONResponse({"error": error.to_json()}, error.status, headers=error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    kind = {404: "not_found", 405: "wrong_method"}.get(error.status_code, "refused")
    message = (
        f"{request.method} {request.url.path}: {error.detail}; there are GET /health, /metrics, POST /score, /compute."
    )
    refusal = _refusal(RequestError(error.status_code, kind, message))
    refusal.headers.update(error.headers or {})  # 405 says which methods there are
    return refusal


async def _own_error(request: Request, error: Exception) -> Response:
    """A mistake of ours outside of the scoring routes."""
    return _refusal(failed("The server failed on this request.", error))
