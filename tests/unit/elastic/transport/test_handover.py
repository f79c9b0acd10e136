"""Connections that cross from the process that owns the port to the one that answers them."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.elastic.conftest import DEADLINE_S, tcp_pair, until

from zeroband.elastic.transport.handover import HandedOver, Inbox, channel, hand_over
from zeroband.elastic.transport.handshake import NO_KEYS, StreamKeys

STATE = HandedOver("state", "caller#1", "", NO_KEYS)
DATA = HandedOver("data", "caller#1", "session", StreamKeys(b"s" * 32, b"o" * 32))
Taken = queue.Queue[tuple[socket.socket, HandedOver]]


@pytest.fixture
def taken() -> Iterator[Taken]:
    """What the taker of both kinds got, in order."""
    taken: Taken = queue.Queue()
    yield taken
    while not taken.empty():
        taken.get()[0].close()


@pytest.fixture
def inbox(taken: Taken) -> Iterator[Inbox]:
    take = lambda connection, what: taken.put((connection, what))  # noqa: E731
    inbox = Inbox({"state": take, "data": take})
    yield inbox
    inbox.close()


@pytest.fixture
def guardian(inbox: Inbox) -> Iterator[socket.socket]:
    """The guardian's end of a channel to the inbox."""
    ours, theirs = channel()
    inbox.attach(theirs)
    with ours:
        yield ours


def is_running() -> bool:
    """Whether the thread of an inbox is there."""
    return "inbox" in {thread.name for thread in threading.enumerate()}


def send(guardian: socket.socket, what: HandedOver) -> socket.socket:
    """Hand over one end of a new connection, as the guardian does; the other end."""
    near, far = tcp_pair()
    assert hand_over(guardian, near, what)
    near.close()
    return far


@pytest.mark.parametrize("what", [STATE, DATA, HandedOver("data", "a", "b", NO_KEYS)], ids=["state", "sealed", "open"])
def test_connection_crosses_with_what_it_is_for(guardian: socket.socket, taken: Taken, what: HandedOver) -> None:
    with send(guardian, what) as far:
        connection, received = taken.get(timeout=DEADLINE_S)
        assert received == what
        with connection:
            far.sendall(b"there")
            assert connection.recv(5, socket.MSG_WAITALL) == b"there"
            connection.sendall(b"back")
            assert far.recv(4, socket.MSG_WAITALL) == b"back"


def test_bytes_that_nobody_has_read_cross_too(guardian: socket.socket, taken: Taken) -> None:
    near, far = tcp_pair()
    far.sendall(b"GET / ")
    assert near.recv(4, socket.MSG_PEEK) == b"GET "
    assert hand_over(guardian, near, STATE)
    near.close()
    connection, _ = taken.get(timeout=DEADLINE_S)
    with connection, far:
        assert connection.recv(6, socket.MSG_WAITALL) == b"GET / "


def test_connection_ends_when_its_taker_closes_it(guardian: socket.socket, taken: Taken) -> None:
    """No other copy of it is left open."""
    with send(guardian, STATE) as far:
        taken.get(timeout=DEADLINE_S)[0].close()
        assert far.recv(1) == b""


def test_connections_come_in_order(guardian: socket.socket, taken: Taken) -> None:
    sent = [HandedOver("data", f"caller#{i}", str(i), NO_KEYS) for i in range(20)]
    far = [send(guardian, what) for what in sent]
    assert [taken.get(timeout=DEADLINE_S)[1] for _ in sent] == sent
    for end in far:
        end.close()


def test_connection_that_nobody_takes_is_closed(guardian: socket.socket, taken: Taken) -> None:
    with send(guardian, HandedOver("telnet")) as far, send(guardian, STATE):
        assert far.recv(1) == b""
        assert taken.get(timeout=DEADLINE_S)[1] == STATE


def test_taker_that_fails_takes_the_next_one() -> None:
    """The caller may have broken the connection meanwhile, and anybody can do that: it must not end the inbox."""
    names: queue.Queue[object] = queue.Queue()
    inbox = Inbox({"state": lambda connection, _: names.put(connection.getpeername())})
    guardian, end = channel()
    near, far = tcp_pair()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()  # with a reset
    assert hand_over(guardian, near, STATE)
    near.close()
    inbox.attach(end)
    with guardian, send(guardian, STATE) as other:
        until(lambda: not names.empty() or not is_running())
        assert is_running()
        assert names.get(timeout=DEADLINE_S) == other.getsockname()
    inbox.close()


def test_inbox_takes_from_several_channels_one_after_the_other(inbox: Inbox, taken: Taken) -> None:
    """A guardian is replaced by another; the old one may still have something to hand over."""
    ends = [channel() for _ in range(3)]
    far: list[socket.socket] = []
    for ours, theirs in ends:
        inbox.attach(theirs)
        far.append(send(ours, DATA))
        assert taken.get(timeout=DEADLINE_S)[1] == DATA
    for ours, _ in ends:
        far.append(send(ours, STATE))
        assert taken.get(timeout=DEADLINE_S)[1] == STATE
    for end in [*far, *(ours for ours, _ in ends)]:
        end.close()


def test_channel_whose_guardian_is_gone_is_dropped(inbox: Inbox, guardian: socket.socket, taken: Taken) -> None:
    other, theirs = channel()
    inbox.attach(theirs)
    other.close()
    until(lambda: theirs.fileno() == -1)
    with send(guardian, STATE):
        assert taken.get(timeout=DEADLINE_S)[1] == STATE


def test_what_was_handed_over_before_the_guardian_ended_is_taken(inbox: Inbox, taken: Taken) -> None:
    ours, theirs = channel()
    with send(ours, DATA), send(ours, STATE):
        ours.close()
        inbox.attach(theirs)
        assert [taken.get(timeout=DEADLINE_S)[1] for _ in range(2)] == [DATA, STATE]


def test_channel_that_is_closed_takes_nothing() -> None:
    guardian, trainer = channel()
    near, far = tcp_pair()
    trainer.close()
    with guardian, near, far:
        assert hand_over(guardian, near, STATE) is False
        far.sendall(b"x")
        assert near.recv(1) == b"x", "the caller's copy is open"


def test_channel_that_is_full_takes_nothing_and_does_not_wait() -> None:
    """The trainer stands still. What is handed over later, when there is room, arrives."""
    guardian, trainer = channel()
    near, far = tcp_pair()
    with guardian, trainer, near, far:
        handed_over = 0
        while hand_over(guardian, near, DATA):
            handed_over += 1
            assert handed_over < 10_000
        assert handed_over > 8
        message, descriptors, _, _ = socket.recv_fds(trainer, 4096, 1)
        socket.socket(fileno=descriptors[0]).close()
        assert HandedOver.of(message) == DATA
        while not hand_over(guardian, near, DATA):  # the kernel counts room in pages
            _, descriptors, _, _ = socket.recv_fds(trainer, 4096, 1)
            socket.socket(fileno=descriptors[0]).close()


def test_closed_inbox_ends_its_thread_and_its_channels(inbox: Inbox, guardian: socket.socket, taken: Taken) -> None:
    with send(guardian, STATE):
        assert taken.get(timeout=DEADLINE_S)[1] == STATE
    inbox.close()
    assert not is_running()
    near, far = tcp_pair()
    with near, far:
        assert hand_over(guardian, near, STATE) is False


def test_inbox_that_a_connection_wakes_while_it_is_closed_is_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread may be over before it is told."""
    ours, theirs = channel()
    read, write = socket.socketpair()
    attached = threading.Event()

    class LateWake:
        close = write.close

        def send(self, data: bytes) -> int:
            if attached.is_set():
                send(ours, STATE).close()
                until(lambda: not is_running())
            return write.send(data)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", lambda: (read, LateWake()))
        inbox = Inbox({})
    with ours:
        inbox.attach(theirs)
        with send(ours, STATE) as far:
            assert far.recv(1) == b"", "nobody takes it, so the inbox has looked"
        attached.set()
        inbox.close()
    assert not is_running()


def test_inbox_is_closed_while_connections_come(inbox: Inbox, guardian: socket.socket) -> None:
    """Each of them is taken, or its other end learns that it is not."""
    stop = threading.Event()
    far: list[socket.socket] = []

    def call() -> None:
        while not stop.is_set():
            near, other = tcp_pair()
            hand_over(guardian, near, HandedOver("telnet"))
            near.close()
            far.append(other)

    calling = threading.Thread(target=call)
    calling.start()
    until(lambda: len(far) > 5)
    inbox.close()
    stop.set()
    calling.join(DEADLINE_S)
    assert not is_running()
    assert [end.recv(1) for end in far] == [b""] * len(far)
    for end in far:
        end.close()


keys = st.none() | st.binary(min_size=32, max_size=32)
names = st.text('aZ0#-. "\\\0\n{}[]ä€😀', max_size=60)


@given(kind=names, caller=names, session=names, seal=keys, open_=keys)
def test_what_a_connection_is_for_survives_the_way(
    kind: str, caller: str, session: str, seal: bytes | None, open_: bytes | None
) -> None:
    what = HandedOver(kind, caller, session, StreamKeys(seal, open_))
    assert HandedOver.of(what.to_bytes()) == what


def test_longest_introduction_fits_into_a_message() -> None:
    """Names come out of a call of 512 bytes, and are written with escapes."""
    assert len(HandedOver("data", '"' * 250, "\0" * 250, DATA.keys).to_bytes()) < 4096


def test_connection_for_which_the_trainer_has_no_descriptor_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel takes it away and gives the message alone."""
    guardian, trainer = channel()
    inbox = Inbox({})
    inbox.attach(trainer)
    guardian.send(HandedOver("data", "b#1").to_bytes())
    until(lambda: bool(caplog.messages))
    assert caplog.messages[0].startswith("a connection of b#1 cannot be taken: too many open files (the limit is ")
    inbox.close()
    guardian.close()
