"""Calling a host that has several addresses, and two ends that dial one another at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.unit.elastic.conftest import DEADLINE_S, HOST, tcp_pair

from zeroband.elastic.guardian.port import read_exactly
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.transport import dial as calling
from zeroband.elastic.transport.dial import (
    OBSERVED_BYTES,
    call,
    keep_alive,
    may_punch,
    note_outcome,
    observed_address,
    punch,
    share_port,
)
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


# -- hole punching; that NATs let it through is shown in tests/faults/test_nat.py --------------------------------------

OWN_HOST = "127.84.3.1"


@pytest.fixture
def relayed() -> Iterator[socket.socket]:
    """A connection to a relay, from a port that others may leave from, too; of an address where no other program is."""
    with socket.create_server((HOST, 0)) as relay, socket.socket() as end:
        share_port(end)
        end.bind((OWN_HOST, 0))
        end.connect(relay.getsockname())
        yield end


def padded(sight: str) -> bytes:
    return sight.encode().ljust(OBSERVED_BYTES, b"\0")


def test_end_dials_from_the_port_that_the_relay_knows(relayed: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_PUNCH_S", DEADLINE_S)
    with socket.create_server((HOST, 0)) as other:
        met = asyncio.run(punch(relayed.getsockname(), padded(f"{HOST} {other.getsockname()[1]}"), keep_alive))
        assert met is not None
        with met, other.accept()[0] as taken:
            assert taken.getpeername() == relayed.getsockname()


def test_sight_names_the_other_end() -> None:
    one, other = tcp_pair()
    with one, other:
        assert observed_address(one) == padded("{} {}".format(*other.getsockname()))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs a socket for IPv6 and IPv4")
def test_sight_of_an_end_that_came_over_ipv4_names_it_so() -> None:
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection((HOST, listener.getsockname()[1])) as end,
        listener.accept()[0] as taken,
    ):
        assert observed_address(taken) == padded("{} {}".format(*end.getsockname()))


@pytest.mark.parametrize("sight", ["", "nowhere", f"{HOST} port", f"{HOST} 99999999", "name.example 1", f"{HOST} 0"])
def test_what_is_no_address_leads_nowhere(relayed: socket.socket, sight: str) -> None:
    assert asyncio.run(punch(relayed.getsockname(), padded(sight), keep_alive)) is None


def test_end_that_does_not_dial_is_given_up(relayed: socket.socket) -> None:
    with socket.create_server((HOST, 0)) as gone:
        at = gone.getsockname()[1]
    assert asyncio.run(punch(relayed.getsockname(), padded(f"{HOST} {at}"), keep_alive)) is None


def test_member_that_was_not_met_is_left_alone_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(calling, "_failed_until_s", {})
    monkeypatch.setattr(calling.time, "monotonic", lambda: now_s)
    assert may_punch("a#1")
    note_outcome("a#1", is_punched=False)
    assert not may_punch("a#1") and may_punch("b#1")
    note_outcome("a#1", is_punched=True)
    assert may_punch("a#1")
    note_outcome("a#1", is_punched=False)
    now_s += 1e6
    assert may_punch("a#1")
