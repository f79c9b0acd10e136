"""Sealed streams over loopback, with and without somebody on the way; and calls to other nodes."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.elastic.conftest import DEADLINE_S, key_pair, tcp_pair

from zeroband.elastic.guardian.port import shake_hands
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import DialRoute
from zeroband.elastic.transport.dial import Dialler
from zeroband.elastic.transport.handshake import ANSWER_BYTES, NO_KEYS, Caller, Introduction
from zeroband.elastic.transport.sealed import RECORD_BYTES, SealedSocket, wrap
from zeroband.errors import HandshakeFailed

FRAME_BYTES = 4 + 16
"""Of a record, around what it carries."""

KEY = RunKey(b"k" * 32)


def sealed_pair() -> tuple[SealedSocket, SealedSocket]:
    (ours, theirs), keys = tcp_pair(), key_pair(is_sealed=True)
    a, b = wrap(ours, keys[0]), wrap(theirs, keys[1])
    assert isinstance(a, SealedSocket) and isinstance(b, SealedSocket)
    return a, b


@pytest.fixture
def pair() -> Iterator[tuple[SealedSocket, SealedSocket]]:
    ends = sealed_pair()
    yield ends
    for end in ends:
        end.close()


@contextmanager
def recorded(*messages: bytes, is_over: bool = True) -> Iterator[tuple[list[bytes], socket.socket, SealedSocket]]:
    """What one end sent, record by record, kept from the other: its raw connection, and the one who is to read it."""
    (ours, near), (far, theirs), keys = tcp_pair(), tcp_pair(), key_pair(is_sealed=True)
    sender, reader = wrap(ours, keys[0]), wrap(theirs, keys[1])
    assert isinstance(sender, SealedSocket) and isinstance(reader, SealedSocket)
    with near, far:
        records: list[bytes] = []
        for message in messages:
            sender.sendall(message)
            records.append(near.recv(FRAME_BYTES + len(message), socket.MSG_WAITALL))
        if is_over:
            sender.shutdown(socket.SHUT_WR)
            records.append(near.recv(FRAME_BYTES, socket.MSG_WAITALL))
        try:
            yield records, far, reader
        finally:
            sender.close()
            reader.close()


def test_read_that_is_given_up_half_way_in_a_record_is_repeated() -> None:
    with recorded(b"first", b"second") as (records, far, reader):
        reader.settimeout(0.0)
        came = b""
        for byte in b"".join(records[:2]):
            with pytest.raises(BlockingIOError):
                reader.recv(100)
            far.sendall(bytes([byte]))
            if len(came) == 0:
                with suppress(BlockingIOError):
                    came = reader.recv(100)
        reader.settimeout(DEADLINE_S)
        assert (came, reader.recv(3), reader.recv(100)) == (b"first", b"sec", b"ond")


def all_of(reader: SealedSocket) -> bytes:
    with reader.makefile() as file:
        return file.read()


def what_arrives(reader: SealedSocket) -> tuple[bytes, bool]:
    """And whether it was all that was sent."""
    room, arrived = bytearray(100), b""
    try:
        while n := reader.recv_into(room):
            arrived += room[:n]
    except ConnectionAbortedError:
        return arrived, False
    return arrived, True


def test_what_is_sent_arrives_and_ends(pair: tuple[SealedSocket, SealedSocket]) -> None:
    data = os.urandom(3 * RECORD_BYTES + 17)
    with ThreadPoolExecutor(1) as threads:
        arrived = threads.submit(all_of, pair[1])
        pair[0].sendall(data)
        pair[0].sendall(memoryview(data)[:5])
        pair[0].shutdown(socket.SHUT_WR)
        assert arrived.result(DEADLINE_S) == data + data[:5]
    pair[1].sendall(b"both ways")
    assert pair[0].makefile().read(9) == b"both ways"


@settings(max_examples=20)
@given(sent=st.lists(st.binary(min_size=1, max_size=300), max_size=6), wanted=st.integers(1, 100))
def test_reader_gets_the_bytes_in_order_however_they_were_cut(sent: list[bytes], wanted: int) -> None:
    a, b = sealed_pair()
    for data in sent:
        a.sendall(data)
    a.shutdown(socket.SHUT_WR)
    room, arrived = bytearray(wanted), b""
    while n := b.recv_into(room):
        arrived += room[:n]
    assert arrived == b"".join(sent)
    assert b.recv_into(room) == 0
    a.close()
    b.close()


def test_bytes_on_the_way_do_not_show_what_they_carry_and_no_record_is_like_another() -> None:
    with recorded(b"secret" * 100, b"secret" * 100) as (records, _, _):
        assert b"secret" not in b"".join(records)
        assert records[0][4:] != records[1][4:]


def test_recorded_stream_opens_as_it_was_sent() -> None:
    """So what the other tests spoil is right before that."""
    with recorded(b"one", b"two") as (records, wire, reader):
        wire.sendall(b"".join(records))
        assert all_of(reader) == b"onetwo"


@settings(max_examples=60)
@given(at=st.integers(0, 2 * FRAME_BYTES + 6 - 1), change=st.integers(1, 255))
def test_changed_byte_ends_the_stream_before_it_is_believed(at: int, change: int) -> None:
    """Also in the length, and in the record that says that the stream is over."""
    with recorded(b"secret") as (records, wire, reader):
        data = bytearray(b"".join(records))
        data[at] ^= change
        wire.sendall(data)
        wire.shutdown(socket.SHUT_WR)
        arrived, is_whole = what_arrives(reader)
        assert not is_whole
        assert arrived == (b"" if at < FRAME_BYTES + 6 else b"secret")


@pytest.mark.parametrize(
    ("change", "arrives"),
    [
        (lambda one, two, end: one + one, b"one"),
        (lambda one, two, end: two + one, b""),
        (lambda one, two, end: two + end, b""),
        (lambda one, two, end: one + end, b"one"),
        (lambda one, two, end: one + two, b"onetwo"),
        (lambda one, two, end: one + two[:-1], b"one"),
        (lambda one, two, end: one + two + end[:3], b"onetwo"),
        (lambda one, two, end: b"", b""),
        (lambda one, two, end: b"\xff\xff\xff\xff" + one, b""),
        (lambda one, two, end: b"\0\0\0\0" + one, b""),
    ],
    ids=[
        *("repeated", "moved", "left out at first", "left out", "cut", "cut in a record", "cut in the end", "nothing"),
        *("of 4 GB", "without a tag"),
    ],
)
def test_stream_that_is_not_the_one_that_was_sent_is_noticed(
    change: Callable[[bytes, bytes, bytes], bytes], arrives: bytes
) -> None:
    with recorded(b"one", b"two") as (records, wire, reader):
        wire.sendall(change(*records))
        wire.shutdown(socket.SHUT_WR)
        assert what_arrives(reader) == (arrives, False)
        with pytest.raises(ConnectionAbortedError, match="broke before"):
            reader.recv_into(bytearray(1))


def test_stream_of_another_connection_does_not_open() -> None:
    with recorded(b"one") as (records, _, _), recorded(b"one") as (_, wire, reader):
        wire.sendall(b"".join(records))
        with pytest.raises(ConnectionAbortedError, match="failed authentication"):
            all_of(reader)


def test_own_records_sent_back_do_not_open(pair: tuple[SealedSocket, SealedSocket]) -> None:
    (ours, mirror), keys = tcp_pair(), key_pair(is_sealed=True)
    end = wrap(ours, keys[0])
    with mirror:
        end.sendall(b"mine")
        mirror.sendall(mirror.recv(FRAME_BYTES + 4, socket.MSG_WAITALL))
        with pytest.raises(ConnectionAbortedError):
            end.makefile("rb").read(4)
    end.close()


def test_nothing_more_is_sent_after_a_record_that_stopped_half_way(pair: tuple[SealedSocket, SealedSocket]) -> None:
    pair[0].settimeout(0.01)
    with pytest.raises(TimeoutError):
        pair[0].sendall(bytes(64 << 20))
    with pytest.raises(ConnectionAbortedError, match="broke before"):
        pair[0].sendall(b"more")
    with pytest.raises(ConnectionAbortedError, match="broke before"):
        pair[0].shutdown(socket.SHUT_WR)


def test_cut_wakes_a_reader(pair: tuple[SealedSocket, SealedSocket]) -> None:
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(pair[0].recv_into, bytearray(1))
        pair[0].shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionAbortedError):
            waits.result(DEADLINE_S)


def test_connection_lives_as_long_as_a_file_of_it(pair: tuple[SealedSocket, SealedSocket]) -> None:
    file = pair[0].makefile()
    pair[0].close()
    pair[0].close()
    pair[1].sendall(b"late")
    assert file.read(4) == b"late"
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        pair[0].settimeout(1.0)


# -- calls ------------------------------------------------------------------------------------------------------------


@contextmanager
def guardian(*, is_sealed: bool = True, callee: str = "donor") -> Iterator[tuple[tuple[str, int], list[object]]]:
    """Answers one call as a guardian does, and says back what comes; what it made of the call."""
    made: list[object] = []

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        try:
            what = asyncio.run(shake_hands(connection, KEY, callee=callee, is_sealed=is_sealed))
        except (HandshakeFailed, EOFError, OSError) as error:
            made.append(error)
            return connection.close()
        made.append(what)
        connection.setblocking(True)
        end = wrap(connection, what.keys)
        with suppress(OSError), end.makefile("rb") as file:
            end.sendall(file.read(5))
        end.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        yield listener.getsockname(), made
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("is_sealed", [True, False])
def test_node_of_the_run_is_connected(is_sealed: bool) -> None:
    with guardian(is_sealed=is_sealed) as (address, made):
        connection = Dialler(KEY, "joiner", is_sealed).dial("donor", (DialRoute(*address),), DEADLINE_S)
        assert isinstance(connection, SealedSocket) == is_sealed
        connection.sendall(b"hello")
        with connection.makefile("rb") as file:
            assert file.read(5) == b"hello"
        connection.close()
    (what,) = made
    assert (what.kind, what.caller, what.keys == NO_KEYS) == ("state", "joiner", not is_sealed)


@pytest.mark.parametrize(
    ("key", "callee", "is_sealed"),
    [(RunKey(b"o" * 32), "donor", True), (KEY, "who it was before", True), (KEY, "donor", False)],
    ids=["another token", "an old name", "unsealed"],
)
def test_call_that_is_not_taken_says_what_may_be_wrong(key: RunKey, callee: str, is_sealed: bool) -> None:
    with guardian() as (address, made), pytest.raises(HandshakeFailed, match=r"are run\.token and comm\.encryption"):
        Dialler(key, "joiner", is_sealed).dial(callee, (DialRoute(*address),), DEADLINE_S)
    assert isinstance(made[0], HandshakeFailed)


def test_call_that_was_recorded_gets_nobody_in() -> None:
    """The answer has another key each time, and the proof is over both."""
    with guardian() as (address, made):
        caller = Caller(KEY, Introduction("joiner", "donor", "", is_sealed=True))
        with socket.create_connection(address) as connection:
            connection.sendall(caller.hello)
            recorded_proof, _ = caller.take(connection.recv(ANSWER_BYTES, socket.MSG_WAITALL))
            connection.sendall(recorded_proof)
    with guardian() as (address, again), socket.create_connection(address) as connection:
        connection.sendall(caller.hello + recorded_proof)
        connection.shutdown(socket.SHUT_WR)
        assert len(connection.recv(2 * ANSWER_BYTES, socket.MSG_WAITALL)) == ANSWER_BYTES
    assert not isinstance(made[0], HandshakeFailed) and isinstance(again[0], HandshakeFailed)


def test_callee_that_says_nothing_or_drips_costs_the_time_of_a_call_and_no_more() -> None:
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def drip() -> None:
            with listener.accept()[0] as connection, suppress(OSError):
                while not is_over.wait(0.005):
                    connection.sendall(b"x")

        dripping = threads.submit(drip)
        with pytest.raises(TimeoutError):
            Dialler(KEY, "joiner", is_sealed=True).dial("donor", (DialRoute(*listener.getsockname()),), 0.05)
        is_over.set()
        dripping.result(DEADLINE_S)
