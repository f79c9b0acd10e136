"""The page's server over real sockets: what idle, slow and many connections cost the others."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AbstractContextManager, ExitStack

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from tests.board_run import served

from zeroband.tools.board.app import STREAMS, STREAMS_OF_ADDRESS, build_app
from zeroband.tools.board.connections import MOST, SILENT_S, Connections
from zeroband.tools.board.orders import OrderDesk
from zeroband.tools.board.state import RunWatch

IDLE = 300
DEADLINE_S = 10.0


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Say `ok` once the request is whole."""
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def served_page(app: object = answer, *, silent_s: float = SILENT_S) -> AbstractContextManager[tuple[str, int]]:
    """Serve an app on loopback as the page is served; gives the address."""
    return served(app, http=type("Quicker", (Connections,), {"silent_s": silent_s}))


def connected(stack: ExitStack, address: tuple[str, int], sends: bytes = b"") -> socket.socket:
    connection = stack.enter_context(socket.create_connection(address, timeout=DEADLINE_S))
    connection.sendall(sends)
    return connection


def is_ended(connection: socket.socket) -> bool:
    """Whether the server has closed or reset it, or does so soon."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_others_get_answers_while_hundreds_of_connections_are_idle() -> None:
    with ExitStack() as stack, served_page() as address:
        idle = [connected(stack, address) for _ in range(IDLE)]
        url = f"http://{address[0]}:{address[1]}/"
        with httpx.Client(timeout=DEADLINE_S, trust_env=False) as client:
            assert [client.get(url).text for _ in range(3)] == ["ok"] * 3
        assert all(is_ended(connection) for connection in idle[: IDLE - MOST])


@pytest.mark.parametrize(
    "sends",
    [b"", b"GET / HTTP/1.1\r\nHost: a", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf"],
    ids=["nothing", "half a head", "half a body"],
)
def test_connection_without_a_whole_request_ends(sends: bytes) -> None:
    with ExitStack() as stack, served_page(silent_s=0.05) as address:
        assert is_ended(connected(stack, address, sends))


def test_connection_that_was_answered_and_is_silent_ends() -> None:
    with ExitStack() as stack, served_page(silent_s=0.05) as address:
        connection = connected(stack, address, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        assert is_ended(connection)


def test_answer_that_takes_longer_than_silence_may_last_is_given() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.2)
        await answer(scope, receive, send)

    with ExitStack() as stack, served_page(slow, silent_s=0.05) as address:
        connection = connected(stack, address, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_streams_of_one_address_leave_room_for_those_of_others() -> None:
    """The address is the one that a proxy of this machine tells."""
    watch = RunWatch(lambda: None)
    with ExitStack() as stack, served_page(build_app(watch, OrderDesk(None, None))) as address:

        def open_stream(client: str) -> socket.socket:
            head = f"GET /api/stream HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: {client}\r\n\r\n"
            return connected(stack, address, head.encode())

        first = [open_stream("10.0.0.1") for _ in range(STREAMS_OF_ADDRESS)]
        assert all(b" 200 " in stream.recv(4096) for stream in first)
        assert b" 503 " in open_stream("10.0.0.1").recv(4096)
        second = [open_stream("10.0.0.2") for _ in range(STREAMS - STREAMS_OF_ADDRESS)]
        assert all(b" 200 " in stream.recv(4096) for stream in second)
        assert b" 200 " in open_stream("10.0.0.3").recv(4096)
        first[0].settimeout(DEADLINE_S)
        data = b""
        while b"0\r\n\r\n" not in data:  # the last chunk: it made room
            data += first[0].recv(4096)
