"""Bursts between two nodes, and callers that break the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest
from tests.unit.elastic.conftest import HOST

from zeroband.elastic.guardian import rate as rate_module
from zeroband.elastic.guardian.port import Port, shake_hands
from zeroband.elastic.guardian.rate import answer_rate, measure_rate
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import DialRoute
from zeroband.elastic.transport.handshake import DATA_CALL, Introduction, Purpose
from zeroband.errors import HandshakeFailed

KEY = RunKey(b"k" * 32)
ME, OTHER = "me#1", "other#1"
PIECE = 1 << 16


def burst(answer: Callable[[socket.socket], Awaitable[None]], *, key: RunKey = KEY, callee: str = OTHER) -> int:
    """The rate that a caller gets from a node with this answer."""

    async def meet() -> int:
        async def pass_on(connection: socket.socket) -> None:
            handed_over = await shake_hands(connection, KEY, callee=OTHER, is_sealed=True)
            assert handed_over.kind == Purpose.RATE
            await answer(connection)

        port = Port({DATA_CALL: pass_on})
        try:
            address = HOST, port.open(HOST, 0)
            return await measure_rate(
                key, Introduction(ME, callee, "session", True, Purpose.RATE), (DialRoute(*address),)
            )
        finally:
            port.close()

    return asyncio.run(meet())


def test_caller_gets_the_callees_measurement() -> None:
    assert 1 < burst(answer_rate) < 10**6


def test_slow_link_is_measured_as_slow() -> None:
    """The callee reads a piece every 20 ms: 26 Mbit/s, plus its buffers at once."""

    async def slowly(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        loop = asyncio.get_running_loop()

        async def relay() -> None:
            while part := await loop.sock_recv(connection, PIECE):
                await asyncio.sleep(0.02)
                await loop.sock_sendall(near, part)
            near.shutdown(socket.SHUT_WR)

        relaying = asyncio.create_task(relay())
        with near, far:
            await answer_rate(far)
            await relaying
            await loop.sock_sendall(connection, await loop.sock_recv(near, 4))

    assert burst(slowly) < 100


def test_burst_ends_when_the_rate_stops_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callee gets 4 KB every 5 ms, five seconds for the whole burst."""
    monkeypatch.setattr(rate_module, "BURST_S", 60.0)
    monkeypatch.setattr(rate_module, "_TIMEOUT_S", 60.0)
    taken = 0

    async def slowly(connection: socket.socket) -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        loop = asyncio.get_running_loop()

        async def relay() -> None:
            nonlocal taken
            with near, contextlib.suppress(ConnectionResetError):
                while part := await loop.sock_recv(connection, PIECE // 16):
                    await asyncio.sleep(0.005)
                    taken += len(part)
                    await loop.sock_sendall(near, part)

        async def relay_back() -> None:
            await loop.sock_sendall(connection, await loop.sock_recv(near, 4))

        with far:
            await asyncio.gather(relay(), relay_back(), answer_rate(far))

    assert burst(slowly) < 100
    assert taken < rate_module.BURST_BYTES / 4


def test_closed_connection_measures_nothing() -> None:
    async def hang_up(connection: socket.socket) -> None:
        connection.close()

    with pytest.raises((OSError, EOFError)):
        burst(hang_up)


def test_silent_node_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_module, "_TIMEOUT_S", 0.1)
    with pytest.raises(TimeoutError):
        burst(lambda connection: asyncio.sleep(30))


@pytest.mark.parametrize(("answer", "learned"), [(0, 1), (1, 1), (250, 250), (2**32 - 1, 10**6)])
def test_answer_is_clamped(answer: int, learned: int) -> None:
    async def claim(connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while await loop.sock_recv(connection, PIECE):
            pass
        await loop.sock_sendall(connection, answer.to_bytes(4, "big"))

    assert burst(claim) == learned


def test_caller_without_the_token_measures_nothing() -> None:
    with pytest.raises((OSError, EOFError, HandshakeFailed)):
        burst(answer_rate, key=RunKey(b"x" * 32))


def test_endless_burst_is_refused() -> None:
    async def flood(connection: socket.socket) -> None:
        while True:
            await asyncio.get_running_loop().sock_sendall(connection, bytes(PIECE))

    async def meet() -> None:
        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)
            far.setblocking(False)
            flooding = asyncio.create_task(flood(near))
            with pytest.raises(EOFError, match="more than a burst"):
                await answer_rate(far)
            flooding.cancel()

    asyncio.run(meet())
