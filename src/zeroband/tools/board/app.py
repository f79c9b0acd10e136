"""The page's server: routes, security headers, and checks against requests from other sites."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import mimetypes
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zeroband.observe.history import Axis
from zeroband.observe.log import get_logger
from zeroband.tools.board.connections import STREAM_PATH
from zeroband.tools.board.document import Answer
from zeroband.tools.board.orders import OrderDesk, OrderRefused
from zeroband.tools.board.saved import STATIC, static_files
from zeroband.tools.board.state import RunWatch

STREAMS, STREAMS_OF_ADDRESS = 16, 8
"""Maximum number of open event streams, in total and per address."""
HEARTBEAT_S = 15.0
_LONGEST_ORDER_BYTES = 4096
_MOST_POINTS = 2000
_AXES: Mapping[str, Axis] = {"tokens": "tokens", "time": "time", "bytes": "bytes", "step": "step"}

HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Headers of every response."""

_log = get_logger(__name__)


class Guard:
    """Sets the headers and refuses foreign Host names, which protects against DNS rebinding."""

    def __init__(self, app: ASGIApp, *, is_ours: Callable[[str], bool]) -> None:
        self._app = app
        self._is_ours = is_ours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        if not self._is_ours(host_of(Request(scope).headers.get("host", ""))):
            refusal = JSONResponse({"error": "unknown host name"}, HTTPStatus.MISDIRECTED_REQUEST)
            await refusal(scope, receive, send_guarded)
            return
        with contextlib.suppress(Exception):  # handled by `_failed`
            await self._app(scope, receive, send_guarded)


def _failed(_request: Request, error: Exception) -> Response:
    """Log an exception; the client gets no traceback."""
    _log.warning("a request of the page failed", exc_info=error)
    return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the page's console")


def host_of(header: str) -> str:
    """Return the name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def names_of(host: str) -> Callable[[str], bool]:
    """Return the check of Host names for a server that listens on `host`.

    On loopback: only loopback names. Otherwise: this machine's names and any address, since a rebound page sends
    its own name.
    """
    loopback = {"localhost", "127.0.0.1", "::1", host.lower()}
    if is_loopback(host):
        return lambda name: name in loopback
    names = {*loopback, socket.gethostname().lower(), socket.getfqdn().lower()}
    return lambda name: name in names or _is_address(name)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def build_app(watch: RunWatch, desk: OrderDesk, *, host: str = "127.0.0.1", static: Path = STATIC) -> ASGIApp:
    """Return the page's ASGI app. `host`: listening address; `static`: the page's files."""
    page = _Page(watch, desk, static_files(static))
    routes = [
        Route("/", page.index),
        Route("/static/{name}", page.file),
        Route("/healthz", page.healthz),
        Route("/api/state", page.state),
        Route("/api/series", page.series),
        Route(STREAM_PATH, page.stream),
        Route("/api/orders", page.order, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={Exception: _failed}), is_ours=names_of(host))


class _Stream:
    """An open event stream of a page."""

    def __init__(self, address: str) -> None:
        self.address, self.news, self.is_over = address, asyncio.Event(), False

    def end(self) -> None:
        self.is_over = True
        self.news.set()


class _Page:
    def __init__(self, watch: RunWatch, desk: OrderDesk, files: Mapping[str, Path]) -> None:
        self._watch = watch
        self._desk = desk
        self._files = files
        self._kept: dict[str, tuple[int, Answer]] = {}
        self._streams: list[_Stream] = []

    async def index(self, request: Request) -> Response:
        return await self._send_file(request, "index.html")

    async def file(self, request: Request) -> Response:
        return await self._send_file(request, cast(str, request.path_params["name"]))

    async def _send_file(self, request: Request, name: str) -> Response:
        path = self._files.get(name)
        if path is None:
            return _refusal(HTTPStatus.NOT_FOUND, f"there is no file {name[:100]}")
        changed = path.stat().st_mtime_ns
        known = self._kept.get(name)
        if known is None or known[0] != changed:
            known = self._kept[name] = (changed, Answer.of(path.read_bytes()))
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return _answer(request, known[1], f"{kind}; charset=utf-8" if kind.startswith("text/") else kind)

    async def healthz(self, _request: Request) -> Response:
        return PlainTextResponse("ok")

    async def state(self, request: Request) -> Response:
        self._watch.touch()
        at_s: float | None = None
        if "at" in request.query_params:
            try:
                at_s = float(request.query_params["at"])
            except ValueError:
                at_s = math.nan
            if not 0 <= at_s < 1e11:
                return _refusal(HTTPStatus.BAD_REQUEST, "at must be a time in seconds since 1970")
        return _answer(request, await run_in_threadpool(self._watch.state, at_s), "application/json")

    async def series(self, request: Request) -> Response:
        self._watch.touch()
        by = _AXES.get(request.query_params.get("by", "tokens"))
        points = request.query_params.get("points", "400")
        if by is None or not re.fullmatch(r"[0-9]{1,9}", points) or not 2 <= int(points) <= _MOST_POINTS:
            why = f"by must be one of {', '.join(_AXES)}, points between 2 and {_MOST_POINTS}"
            return _refusal(HTTPStatus.BAD_REQUEST, why)
        return _answer(request, await run_in_threadpool(self._watch.series, by, int(points)), "application/json")

    async def stream(self, request: Request) -> Response:
        address = "" if request.client is None else request.client.host
        living = [stream for stream in self._streams if not stream.is_over]
        of_address = Counter(stream.address for stream in living)
        if of_address[address] >= STREAMS_OF_ADDRESS:
            refusal = f"{STREAMS_OF_ADDRESS} pages are already open from {address}; close one"
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, refusal)
        if len(living) >= STREAMS:  # close the oldest of the address with the most streams
            max(living, key=lambda stream: of_address[stream.address]).end()
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._changes(_Stream(address)), media_type="text/event-stream", headers=headers)

    async def _changes(self, stream: _Stream) -> AsyncIterator[bytes]:
        """Yield an event for each new document, and heartbeats."""
        loop, news, told = asyncio.get_running_loop(), stream.news, -1

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(news.set)

        self._streams.append(stream)
        try:
            with self._watch.telling(tell):
                while not stream.is_over:
                    news.clear()
                    if self._watch.edition != told:
                        told = self._watch.edition
                        data = json.dumps({"to_s": self._watch.to_s, "version_of_state": told})
                        yield f"event: state\ndata: {data}\n\n".encode()
                    else:
                        yield b": heartbeat\n\n"
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(news.wait(), HEARTBEAT_S)
        finally:
            self._streams.remove(stream)

    async def order(self, request: Request) -> Response:
        """Give an order to the run; only for pages of this server."""
        origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
        if origin not in (f"http://{host}", f"https://{host}"):
            return _refusal(HTTPStatus.FORBIDDEN, "only this server's own page may give orders")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "an order must be application/json")
        try:
            asked: object = json.loads(await _body(request))
        except (ValueError, RecursionError):
            return _refusal(HTTPStatus.BAD_REQUEST, "an order must be a JSON object")
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)
        client = "" if request.client is None else request.client.host
        take = partial(self._desk.take, client=client)
        try:
            words = await run_in_threadpool(take, request.headers.get("authorization"), asked)
        except OrderRefused as refused:
            return _refusal(refused.status, str(refused))
        return JSONResponse({"words": words})


async def _body(request: Request) -> bytes:
    """Return the body of a request. Raises ValueError if it is too long for an order."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LONGEST_ORDER_BYTES:
            raise ValueError("too long")
    return body


def _refusal(status: HTTPStatus, why: str) -> Response:
    return JSONResponse({"error": why}, status)


def _answer(request: Request, answer: Answer, kind: str) -> Response:
    headers = {"etag": answer.etag, "vary": "accept-encoding"}
    if answer.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(answer.gzipped, headers={**headers, "content-encoding": "gzip"}, media_type=kind)
    return Response(answer.body, headers=headers, media_type=kind)
