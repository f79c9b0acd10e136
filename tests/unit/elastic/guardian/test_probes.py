"""Probes over loopback: members that answer, that do not, and that are gone."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from tests.unit.elastic.conftest import HOST, until

from zeroband.elastic.guardian import probes as links
from zeroband.elastic.guardian.link_report import LinkSeen
from zeroband.elastic.guardian.probes import Identity, LinkMonitor
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import DialRoute, DialRoutes
from zeroband.elastic.transport.dial import Address
from zeroband.elastic.transport.handshake import ANSWER_BYTES, HELLO_BYTES, PROOF_BYTES, Callee, Caller, Purpose

KEY = RunKey(b"k" * 32)
A, B, C = "a#1", "b#1", "c#1"
DETECT_S = 0.1
OpenMonitor = Callable[..., LinkMonitor]


class Clock:
    """Replaces the module's `time`: runs like the real clock, and jumps on request."""

    def __init__(self) -> None:
        self.jumped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.jumped_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    return clock


@pytest.fixture
def gone() -> queue.SimpleQueue[str]:
    """Members whose guardian has ended, as the monitors report."""
    return queue.SimpleQueue()


Measure = Callable[[str, DialRoutes], Awaitable[int]]


@pytest.fixture
def open_monitor(gone: queue.SimpleQueue[str]) -> Iterator[OpenMonitor]:
    monitors: list[LinkMonitor] = []

    def open_one(member: str = A, *, detect_s: float = DETECT_S, measure: Measure | None = None) -> LinkMonitor:
        identity = Identity(member, KEY)
        monitors.append(LinkMonitor(HOST, identity=identity, detect_s=detect_s, on_gone=gone.put, measure=measure))
        return monitors[-1]

    yield open_one
    for monitor in monitors:
        monitor.close()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Accepts and never answers, as a stopped machine does."""
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(10)
        yield listener


def address_of(listener: socket.socket) -> tuple[str, int]:
    return HOST, listener.getsockname()[1]


def at(address: Address) -> DialRoutes:
    """The only route to a member: its own address."""
    return (DialRoute(*address),)


def has_answered(monitor: LinkMonitor, member: str, after_s: float) -> bool:
    answered_at_s = monitor.answered_at_s(member)
    return answered_at_s is not None and answered_at_s > after_s


def probe(port: int, *, of: str = A, by: str = B, key: RunKey = KEY) -> socket.socket:
    """A connection for probes, after its handshake."""
    connection = socket.create_connection((HOST, port), timeout=10)
    caller = Caller(key, Identity(by, key).introduction(of, Purpose.PROBE))
    connection.sendall(caller.hello)
    connection.sendall(caller.take(connection.recv(ANSWER_BYTES, socket.MSG_WAITALL))[0])
    return connection


def ask(connection: socket.socket) -> bytes:
    connection.sendall(b"12345678")
    return connection.recv(8, socket.MSG_WAITALL)


def is_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def accept_probes(listener: socket.socket) -> socket.socket:
    """Accept the next connection for probes and answer its handshake, as a guardian does."""
    connection, _ = listener.accept()
    connection.settimeout(10)
    callee = Callee(KEY, connection.recv(HELLO_BYTES, socket.MSG_WAITALL))
    assert callee.introduction.purpose == Purpose.PROBE
    connection.sendall(callee.answer)
    callee.take(connection.recv(PROOF_BYTES, socket.MSG_WAITALL))
    return connection


def test_monitor_listens_when_it_is_made(open_monitor: OpenMonitor) -> None:
    with probe(open_monitor().port) as connection:
        assert ask(connection) == b"12345678"


@pytest.mark.parametrize("said", [b"", b"zbp112345678"], ids=["nothing", "a probe without a handshake"])
def test_crowd_of_strangers_at_two_nodes_does_not_exclude_a_third(open_monitor: OpenMonitor, said: bytes) -> None:
    """They hold their connections as long as possible, many more than a node has peers."""
    monitors, idle = {member: open_monitor(member, detect_s=1.0) for member in (A, B)}, list[socket.socket]()
    for monitor in monitors.values():
        for _ in range(300):
            idle.append(socket.create_connection((HOST, monitor.port), timeout=10))
            idle[-1].sendall(said)
    monitors[C] = open_monitor(C, detect_s=1.0)
    from_s = time.monotonic()
    for member, monitor in monitors.items():
        monitor.watch({other: at((HOST, m.port)) for other, m in monitors.items() if other != member})
    pairs = [(monitor, other) for member, monitor in monitors.items() for other in monitors if other != member]
    until(lambda: all(has_answered(monitor, other, from_s) for monitor, other in pairs))
    for connection in idle:
        connection.close()


def test_strangers_do_not_evict_answered_probes(open_monitor: OpenMonitor) -> None:
    monitor = open_monitor(detect_s=10.0)
    with probe(monitor.port) as connection:
        idle = [socket.create_connection((HOST, monitor.port), timeout=10) for _ in range(300)]
        assert all(is_hung_up(stranger) for stranger in idle[:-64]), "64 are heard"
        assert ask(connection) == b"12345678"
        for stranger in idle:
            stranger.close()


def test_silent_prober_is_disconnected(open_monitor: OpenMonitor) -> None:
    with probe(open_monitor().port) as connection:
        assert ask(connection) == b"12345678"
        assert is_hung_up(connection)


def test_member_that_calls_again_is_answered_on_its_newest_connection(open_monitor: OpenMonitor) -> None:
    monitor = open_monitor(detect_s=10.0)
    with probe(monitor.port) as old, probe(monitor.port, by=C) as other, probe(monitor.port) as new:
        assert ask(new) == ask(other) == b"12345678"
        assert is_hung_up(old)
        assert ask(new) == ask(other) == b"12345678"


def test_dialling_pauses_where_connections_are_taken_and_closed_at_once(
    open_monitor: OpenMonitor, silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guardian cannot answer; dialling it must not loop without a pause."""
    pauses, sleep = list[float](), links.asyncio.sleep

    async def note(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(pause_s)

    monitor = open_monitor(B)
    monkeypatch.setattr(links.asyncio, "sleep", note)
    monitor.watch({A: at(address_of(silent))})
    accept_probes(silent).close()
    accept_probes(silent).close()
    assert monitor.probe_s in pauses


def test_members_that_answer_are_not_cut_off(open_monitor: OpenMonitor) -> None:
    monitors = {member: open_monitor(member) for member in (A, B, C)}
    from_s = time.monotonic()
    for member, monitor in monitors.items():
        monitor.watch({other: at((HOST, m.port)) for other, m in monitors.items() if other != member})
    pairs = [(monitor, other) for member, monitor in monitors.items() for other in monitors if other != member]
    until(lambda: all(has_answered(monitor, other, from_s + 2 * DETECT_S) for monitor, other in pairs))
    assert [monitor.cut_off() for monitor in monitors.values()] == [(), (), ()]


def test_member_that_never_answers_is_cut_off(open_monitor: OpenMonitor, silent: socket.socket) -> None:
    monitor, other = open_monitor(A), open_monitor(C)
    from_s = time.monotonic()
    monitor.watch({B: at(address_of(silent)), C: at((HOST, other.port))})
    until(lambda: monitor.cut_off() == (B,))
    assert time.monotonic() - from_s > DETECT_S, "not sooner"
    seen = monitor.seen()
    assert (seen[B], seen[C].is_cut_off, seen[C].mbit_s) == (LinkSeen(None, None, is_cut_off=True), False, None)
    assert seen[C].rtt_ms is not None and 0 < seen[C].rtt_ms < 1e3 * DETECT_S


def test_link_is_seen_when_there_was_an_answer(open_monitor: OpenMonitor, silent: socket.socket) -> None:
    monitor = open_monitor()
    monitor.watch({B: at(address_of(silent))})
    connection = accept_probes(silent)
    assert monitor.seen() == {}
    connection.sendall(connection.recv(8, socket.MSG_WAITALL))
    until(lambda: list(monitor.seen()) == [B])


def test_member_whose_machine_does_not_exist_is_cut_off(open_monitor: OpenMonitor) -> None:
    monitor = open_monitor()
    with socket.create_server((HOST, 0)) as listener:
        address = address_of(listener)
    monitor.watch({B: at(address)})
    until(lambda: monitor.cut_off() == (B,))


def test_member_that_stops_answering_is_cut_off_and_back_when_it_answers(
    open_monitor: OpenMonitor, silent: socket.socket
) -> None:
    monitor = open_monitor()
    monitor.watch({B: at(address_of(silent))})
    connection = accept_probes(silent)
    connection.sendall(connection.recv(8, socket.MSG_WAITALL))
    until(lambda: monitor.cut_off() == (B,))
    again = accept_probes(silent)
    stop = threading.Event()

    def echo() -> None:
        while not stop.is_set() and (probe := again.recv(8)):
            again.sendall(probe)

    echoing = threading.Thread(target=echo, daemon=True)
    echoing.start()
    until(lambda: monitor.cut_off() == ())
    stop.set()
    echoing.join(timeout=10)
    for end in (connection, again):
        end.close()


def test_answer_with_other_bytes_does_not_count(open_monitor: OpenMonitor, silent: socket.socket) -> None:
    """Another program may have taken the port of a guardian that ended."""
    monitor, stop = open_monitor(), threading.Event()
    silent.settimeout(0.01)

    def answer_wrongly() -> None:
        while not stop.is_set():
            try:
                connection, _ = silent.accept()
            except TimeoutError:
                continue
            with connection:
                connection.sendall(b"no probe")

    answering = threading.Thread(target=answer_wrongly, daemon=True)
    answering.start()
    monitor.watch({B: at(address_of(silent))})
    until(lambda: monitor.cut_off() == (B,))
    stop.set()
    answering.join(timeout=10)


def test_member_whose_guardian_ended_is_reported_gone_once(
    open_monitor: OpenMonitor, gone: queue.SimpleQueue[str], silent: socket.socket
) -> None:
    """Its machine closes the connection and refuses another one."""
    monitor = open_monitor()
    monitor.watch({B: at(address_of(silent))})
    connection = accept_probes(silent)
    silent.close()
    connection.close()
    assert gone.get(timeout=10) == B
    until(lambda: monitor.cut_off() == (B,))
    assert gone.empty()


def test_broken_connection_reports_no_member_gone_if_it_accepts_another(
    open_monitor: OpenMonitor, gone: queue.SimpleQueue[str], silent: socket.socket
) -> None:
    monitor = open_monitor()
    monitor.watch({B: at(address_of(silent))})
    for _ in range(3):
        accept_probes(silent).close()
    assert gone.empty()


def test_member_that_was_never_reached_is_not_gone(open_monitor: OpenMonitor, gone: queue.SimpleQueue[str]) -> None:
    """A firewall that refuses is no proof that a guardian ended."""
    with socket.create_server((HOST, 0)) as listener:
        address = address_of(listener)
    monitor = open_monitor()
    monitor.watch({B: at(address)})
    until(lambda: monitor.cut_off() == (B,))
    assert gone.empty()


def test_own_stall_cuts_off_no_member(open_monitor: OpenMonitor, silent: socket.socket, clock: Clock) -> None:
    """It was stopped for a minute, so that all answers are a minute old."""
    monitor = open_monitor()
    monitor.watch({B: at(address_of(silent))})
    until(lambda: monitor.answered_at_s(B) is not None)
    monitor.cut_off()
    clock.jumped_s = 60.0
    assert monitor.cut_off() == ()
    until(lambda: monitor.cut_off() == (B,))


def test_member_is_doubted_before_it_is_cut_off(open_monitor: OpenMonitor, silent: socket.socket) -> None:
    monitor, address = open_monitor(detect_s=1000.0), address_of(silent)
    assert (monitor.doubt_s, monitor.doubted()) == (pytest.approx(1000 / 3), ())
    monitor.watch({B: at(address), C: at(address)}, silent_s={B: 400.0, "d#1": 2000.0})
    until(lambda: monitor.doubted() == (B,))
    assert monitor.cut_off() == ()


def test_node_that_few_members_answer_doubts_none(open_monitor: OpenMonitor, silent: socket.socket) -> None:
    monitor, address = open_monitor(detect_s=1000.0), address_of(silent)
    monitor.watch(dict.fromkeys((B, C, "d#1", "e#1"), at(address)), silent_s=dict.fromkeys((B, C, "d#1"), 1001.0))
    until(lambda: monitor.cut_off() == (B, C, "d#1"))
    assert monitor.doubted() == ()


def test_member_that_others_probed_without_answer_is_cut_off_sooner(
    open_monitor: OpenMonitor, silent: socket.socket
) -> None:
    monitor, sound = open_monitor(detect_s=1000.0), open_monitor(C)
    monitor.watch({B: at(address_of(silent)), C: at((HOST, sound.port))}, silent_s={B: 1001.0, C: 1001.0})
    until(lambda: monitor.cut_off() == (B,))
    monitor.watch({B: at(address_of(silent)), C: at((HOST, sound.port))}, silent_s={C: 1001.0})
    assert not monitor.cut_off() or C not in monitor.cut_off(), "it has answered since"


def test_links_are_measured_one_by_one_as_started(open_monitor: OpenMonitor) -> None:
    asked, may_end = list[str](), threading.Event()

    async def measure(member: str, address: Address) -> int:
        asked.append(member)
        while not may_end.is_set():
            await asyncio.sleep(0.001)
        return 7

    monitor, others = open_monitor(measure=measure), {member: open_monitor(member) for member in (B, C)}
    monitor.watch({member: at((HOST, other.port)) for member, other in others.items()})
    until(lambda: monitor.wants_to_measure)
    assert asked == []
    monitor.start_measuring()
    until(lambda: len(asked) == 1)
    assert monitor.is_measuring and not monitor.wants_to_measure, "it waits for the end of the first"
    may_end.set()
    until(lambda: not monitor.is_measuring and monitor.wants_to_measure)
    monitor.start_measuring()
    until(lambda: [link.mbit_s for link in monitor.seen().values()] == [7, 7])
    assert sorted(asked) == [B, C] and not monitor.wants_to_measure


def test_unwatched_member_is_not_cut_off(open_monitor: OpenMonitor, silent: socket.socket) -> None:
    monitor = open_monitor()
    monitor.watch({B: at(address_of(silent))})
    until(lambda: monitor.cut_off() == (B,))
    monitor.watch({})
    until(lambda: monitor.cut_off() == ())


def test_member_that_moved_is_probed_at_its_new_address(open_monitor: OpenMonitor, silent: socket.socket) -> None:
    monitor, other = open_monitor(A), open_monitor(B)
    monitor.watch({B: at(address_of(silent))})
    until(lambda: monitor.cut_off() == (B,))
    monitor.watch({B: at((HOST, other.port))})
    until(lambda: monitor.cut_off() == ())
    from_s = time.monotonic()
    until(lambda: has_answered(monitor, B, from_s))


def test_closed_monitor_ends_its_thread_and_ignores_calls(open_monitor: OpenMonitor) -> None:
    monitor = open_monitor()
    monitor.close()
    monitor.watch({B: at((HOST, 1))})
    monitor.close()
    assert "links" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, monitor.port), timeout=10)


def test_closed_monitor_disconnects_silently(open_monitor: OpenMonitor, caplog: pytest.LogCaptureFixture) -> None:
    """Its probers must notice its end at once, and no error of a stopped loop may be logged."""
    monitor = open_monitor()
    with probe(monitor.port) as connection:
        assert ask(connection) == b"12345678"
        monitor.close()
        connection.settimeout(1)
        assert connection.recv(8) == b""
    assert caplog.records == []
