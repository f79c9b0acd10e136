"""Two ends that dial one another at once; that NATs let them is shown in tests/faults/test_nat.py."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
from tests.unit.elastic.conftest import DEADLINE_S, HOST, tcp_pair

from zeroband.elastic.transport import dial
from zeroband.elastic.transport.dial import (
    OBSERVED_BYTES,
    keep_alive,
    may_punch,
    note_outcome,
    observed_address,
    punch,
    share_port,
)

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
    monkeypatch.setattr(dial, "_PUNCH_S", DEADLINE_S)
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
    monkeypatch.setattr(dial, "_failed_until_s", {})
    monkeypatch.setattr(dial.time, "monotonic", lambda: now_s)
    assert may_punch("a#1")
    note_outcome("a#1", is_punched=False)
    assert not may_punch("a#1") and may_punch("b#1")
    note_outcome("a#1", is_punched=True)
    assert may_punch("a#1")
    note_outcome("a#1", is_punched=False)
    now_s += 1e6
    assert may_punch("a#1")
