"""Calling a host that has several addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.elastic.conftest import HOST

from zeroband.elastic.guardian.port import read_exactly
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.transport import dial as calling
from zeroband.elastic.transport.dial import call
from zeroband.elastic.transport.handshake import HELLO_BYTES, Introduction

KEY = RunKey(b"k" * 32)
INTRODUCTION = Introduction("a#1", "b#1", "session", is_sealed=True)
REFUSING = "127.0.0.2"
NO_SUCH_FAMILY = -1


@pytest.fixture
def resolve_to(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have every name mean these addresses."""

    def resolve(*addresses: tuple[int, Any]) -> None:
        found = [(family, socket.SOCK_STREAM, 0, "", at) for family, at in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)

    return resolve


def is_called(listener: socket.socket) -> bool:
    """Whether the listener is what the name leads to."""

    async def scene() -> bool:
        async def hear() -> bool:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            with connection:
                return len(await read_exactly(connection, HELLO_BYTES)) == HELLO_BYTES

        listener.setblocking(False)
        hearing = asyncio.create_task(hear())
        with contextlib.suppress(OSError, EOFError):  # nobody answers
            await call(KEY, INTRODUCTION, ("name", 1))
        return hearing.done() and hearing.result()

    return asyncio.run(scene())


@pytest.mark.parametrize("family", [socket.AF_INET, NO_SUCH_FAMILY], ids=["refuses", "not on this machine"])
def test_next_address_is_called_where_the_first_one(resolve_to: Callable[..., None], family: int) -> None:
    with socket.create_server((HOST, 0)) as listener:
        at = listener.getsockname()
        resolve_to((family, (REFUSING, at[1])), (socket.AF_INET, at))
        assert is_called(listener)


def test_address_that_is_silent_leaves_time_for_the_next(
    resolve_to: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full backlog drops what comes."""
    monkeypatch.setattr(calling, "_ANSWER_S", 0.1)
    with socket.create_server((HOST, 0), backlog=0) as silent, socket.create_server((HOST, 0)) as listener:
        filling = [socket.socket() for _ in range(2)]
        for connection in filling:
            connection.setblocking(False)
            connection.connect_ex(silent.getsockname())
        resolve_to((socket.AF_INET, silent.getsockname()), (socket.AF_INET, listener.getsockname()))
        assert is_called(listener)
        for connection in filling:
            connection.close()


def test_error_is_that_of_the_last_address(resolve_to: Callable[..., None]) -> None:
    with socket.create_server((HOST, 0)) as reserved:
        refusing = (REFUSING, reserved.getsockname()[1])
    resolve_to((NO_SUCH_FAMILY, refusing), (socket.AF_INET, refusing))
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(call(KEY, INTRODUCTION, ("name", 1)))
