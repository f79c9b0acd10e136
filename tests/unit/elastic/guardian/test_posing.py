"""A call in a member's name needs that member's key; a banned key gets no answer."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Generator, Iterator

import pytest
from tests.unit.elastic.conftest import HOST

from zeroband.elastic.guardian.probes import Identity, LinkMonitor
from zeroband.elastic.membership.keys import NodeKey, RunKey
from zeroband.elastic.transport.handover import POSES, HandedOver
from zeroband.elastic.transport.handshake import ANSWER_BYTES, Caller, Introduction, Purpose

A, B, X = (NodeKey(bytes([at] * 32)) for at in range(3))
MEMBER, OTHER = A.new_member_id("a"), B.new_member_id("b")


class Guarded:
    """A monitor of member a, and the connections that it hands over."""

    def __init__(self) -> None:
        self.taken: queue.SimpleQueue[HandedOver] = queue.SimpleQueue()
        identity = Identity(MEMBER, RunKey(b"k" * 32, A))
        self.monitor = LinkMonitor(HOST, identity=identity, detect_s=5.0, on_gone=print, take=self._take)

    async def _take(self, connection: socket.socket, what: HandedOver) -> None:
        self.taken.put(what)

    @contextlib.contextmanager
    def called(self, by: NodeKey, purpose: Purpose, name: str = OTHER) -> Generator[socket.socket]:
        """A connection with the caller's part of a handshake sent."""
        caller = Caller(RunKey(b"k" * 32, by), Introduction(name, MEMBER, MEMBER, True, purpose))
        with socket.create_connection((HOST, self.monitor.port), timeout=10) as connection:
            connection.sendall(caller.hello)
            if len(answer := connection.recv(ANSWER_BYTES, socket.MSG_WAITALL)) == ANSWER_BYTES:
                connection.sendall(caller.take(answer)[0])
            yield connection


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    guarded = Guarded()
    yield guarded
    guarded.monitor.close()


def said_on(connection: socket.socket) -> bytes:
    try:
        connection.sendall(b"12345678")
        return connection.recv(8, socket.MSG_WAITALL)
    except ConnectionError:
        return b""


@pytest.mark.parametrize("purpose", [purpose for purpose in Purpose if purpose is not Purpose.STORE])
def test_call_in_another_members_name_is_closed_and_reported_once(guarded: Guarded, purpose: Purpose) -> None:
    """For any purpose: it takes over no probe, relay line, stream or state."""
    for _ in range(2):
        with guarded.called(X, purpose) as connection:
            assert said_on(connection) == b""
            address = "{}:{}".format(*connection.getsockname())
            if not guarded.taken.empty():
                assert guarded.taken.get() == HandedOver(POSES, OTHER, address)
                break
    else:
        raise AssertionError("it was not told")
    with guarded.called(X, purpose) as connection:
        assert said_on(connection) == b"" and guarded.taken.empty()


def test_impersonator_does_not_replace_a_member(guarded: Guarded) -> None:
    """A member's newest connection for probes is kept, and is its line for relayed calls."""
    with guarded.called(B, Purpose.PROBE) as mine:
        assert said_on(mine) == b"12345678"
        with guarded.called(X, Purpose.PROBE) as theirs:
            assert said_on(theirs) == b""
        assert said_on(mine) == b"12345678"


def test_banned_key_is_disconnected_under_any_name(guarded: Guarded) -> None:
    with guarded.called(B, Purpose.PROBE) as before, guarded.called(X, Purpose.PROBE, X.new_member_id("x")) as other:
        assert said_on(before) == said_on(other) == b"12345678"
        banned = B.name("b")
        guarded.monitor.ban(lambda name: name.endswith(banned.rpartition("#")[2]))
        assert before.recv(1) == b""
        assert said_on(other) == b"12345678"
    for name in (OTHER, B.new_member_id("b"), B.name("c")):
        with guarded.called(B, Purpose.STATE, name) as after:
            assert said_on(after) == b""
    assert guarded.taken.empty()
