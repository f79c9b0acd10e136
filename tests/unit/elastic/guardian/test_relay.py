"""Relayed calls over loopback: the ends agree on keys that the relay does not have."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.elastic.conftest import DEADLINE_S, HOST, until

from zeroband.elastic.guardian import probes as probes_module
from zeroband.elastic.guardian import relay as relay_module
from zeroband.elastic.guardian.probes import Identity, LinkMonitor
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import INBOUND_ONLY, DialRoute
from zeroband.elastic.transport import dial as dial_module
from zeroband.elastic.transport.dial import Dialler, dial_member
from zeroband.elastic.transport.handover import HandedOver
from zeroband.elastic.transport.handshake import Introduction, Purpose
from zeroband.elastic.transport.sealed import Connection, wrap
from zeroband.errors import HandshakeFailed

KEY = RunKey(b"k" * 32)
RELAY, HIDDEN, CALLER = "relay#1", "hidden#1", "caller#1"
SECRET = b"what nobody between them sees " * 4000


class Scene:
    """A relay, and a member without a port that keeps a line to it and echoes what its callers send."""

    def __init__(self) -> None:
        self.seen = b""
        """All bytes that the relay copied."""
        self.change: Callable[[bytes], bytes] = lambda piece: piece
        self.relay = LinkMonitor(HOST, identity=Identity(RELAY, KEY), detect_s=5.0, on_gone=print)
        self.hidden = LinkMonitor(
            HOST, identity=Identity(HIDDEN, KEY), detect_s=5.0, on_gone=print, take=self._answer, listens=False
        )
        self.route = DialRoute(HOST, self.relay.port, RELAY)
        self.hidden.watch({RELAY: (DialRoute(HOST, self.relay.port),)})
        until(lambda: RELAY in self.hidden.dialled())
        self.taken: queue.SimpleQueue[HandedOver] = queue.SimpleQueue()

    async def _answer(self, connection: socket.socket, what: HandedOver) -> None:
        self.taken.put(what)
        copy = connection.dup()
        copy.setblocking(True)
        threading.Thread(target=self._say_back, args=(wrap(copy, what.keys),), daemon=True).start()

    def _say_back(self, end: Connection) -> None:
        with contextlib.suppress(OSError), end.makefile("rb") as file:
            while said := file.read1(1 << 16):
                end.sendall(said)
        end.close()

    def dial(self, *, key: RunKey = KEY, callee: str = HIDDEN) -> Connection:
        return Dialler(key, CALLER, is_sealed=True).dial(callee, (self.route,), DEADLINE_S)

    def close(self) -> None:
        self.hidden.close()
        self.relay.close()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(dial_module, "_failed_until_s", {})
    made, receive = Scene(), BaseSelectorEventLoop.sock_recv_into

    async def tapped(loop: BaseSelectorEventLoop, source: socket.socket, room: memoryview) -> int:
        """Only the relay uses this method."""
        came = await receive(loop, source, room)
        made.seen += bytes(room[:came])
        room[:came] = made.change(bytes(room[:came]))
        return came

    monkeypatch.setattr(BaseSelectorEventLoop, "sock_recv_into", tapped)
    yield made
    made.close()


def test_relayed_ends_talk_and_the_relay_sees_only_ciphertext(scene: Scene) -> None:
    with ThreadPoolExecutor(1) as threads:
        end = scene.dial()
        sending = threads.submit(lambda: end.sendall(SECRET))
        with end.makefile("rb") as file:
            assert file.read(len(SECRET)) == SECRET
        sending.result(DEADLINE_S)
        end.close()
    assert scene.taken.get(timeout=DEADLINE_S).caller == CALLER
    assert len(scene.seen) > 2 * len(SECRET)
    assert b"nobody between them" not in scene.seen
    until(lambda: not scene.relay.relay.connections)


@pytest.mark.parametrize("at", [600, 20_000], ids=["in the handshake", "in what was sealed"])
def test_byte_changed_in_transit_is_detected_at_the_ends(scene: Scene, at: int) -> None:
    passed = 0

    def change(piece: bytes) -> bytes:
        nonlocal passed
        start, passed = passed, passed + len(piece)
        if start <= at < passed:
            return piece[: at - start] + bytes([piece[at - start] ^ 1]) + piece[at - start + 1 :]
        return piece

    scene.change = change

    def talk() -> None:
        with ThreadPoolExecutor(1) as threads:
            end = scene.dial()
            sending = threads.submit(lambda: end.sendall(SECRET))
            with contextlib.closing(end), end.makefile("rb") as file:
                while file.read(1 << 16):
                    pass
            sending.result(DEADLINE_S)

    with pytest.raises((ConnectionError, HandshakeFailed)):
        talk()


def test_call_without_the_token_is_not_relayed(scene: Scene) -> None:
    with pytest.raises(HandshakeFailed):
        scene.dial(key=RunKey(b"x" * 32))
    assert (scene.taken.empty(), scene.seen) == (True, b"")


def test_call_to_a_member_without_a_line_is_closed(scene: Scene) -> None:
    with pytest.raises(HandshakeFailed):
        scene.dial(callee="somebody#1")
    assert (scene.taken.empty(), scene.seen) == (True, b"")


def test_relayed_calls_between_two_members_are_limited(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MAX_PER_PAIR", 2)
    ends = [scene.dial() for _ in range(2)]
    with pytest.raises(HandshakeFailed):
        scene.dial()
    for end in ends:
        end.close()
    until(lambda: not scene.relay.relay.connections)
    scene.dial().close()


def test_both_connections_close_when_one_end_does(scene: Scene) -> None:
    end = scene.dial()
    assert scene.relay.relay.connections == 1
    end.close()
    until(lambda: not scene.relay.relay.connections)


def test_next_route_is_tried_if_the_first_fails(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_module, "_NEXT_ROUTE_S", 0.01)
    with socket.create_server((HOST, 0)) as silent:
        routes = (DialRoute(*silent.getsockname()), DialRoute(HOST, 1, "gone#1"), scene.route)
        called = asyncio.run(dial_member(KEY, Introduction(CALLER, HIDDEN, "", True, Purpose.STATE), routes))
        with called.connection:
            assert called.route == scene.route


def test_relay_carries_no_data_after_hole_punching(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over loopback one of them must listen: SYNs arrive too fast to cross."""

    async def listen(own: tuple[str, int], _sight: bytes, _prepare: object) -> socket.socket:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(own)
            listener.listen()
            listener.setblocking(False)
            taken, _ = await asyncio.get_running_loop().sock_accept(listener)
            met.set()
            return taken

    def dial() -> Connection:
        """Another program may have a connection from the same port: then the ends keep the relay."""
        for _ in range(5):
            dial_module.note_outcome(HIDDEN, is_punched=True)
            scene.seen, end = b"", scene.dial()
            if met.is_set():
                return end
            end.close()
        pytest.fail("the ends did not meet")

    met = threading.Event()
    monkeypatch.setattr(probes_module, "punch", listen)
    monkeypatch.setattr(dial_module, "_MAX_REFUSALS", 1 << 30)
    end = dial()
    until(lambda: not scene.relay.relay.connections)
    with contextlib.closing(end), end.makefile("rb") as file:
        end.sendall(b"hello")
        assert file.read(5) == b"hello"
    assert scene.seen == b""


@pytest.mark.parametrize("ends", ["hangs up", "is silent"])
def test_ends_stay_with_the_relay_where_the_met_one(scene: Scene, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Only the caller's end is connected, or to another program."""
    monkeypatch.setattr(dial_module, "_PUNCHED_S", 0.1)
    with socket.create_server((HOST, 0)) as other:

        async def meet_another(*_: object) -> socket.socket:
            connection = socket.create_connection(other.getsockname())
            connection.setblocking(False)
            if ends == "hangs up":
                other.accept()[0].close()
            return connection

        monkeypatch.setattr(dial_module, "punch", meet_another)
        end = scene.dial()
    assert scene.relay.relay.connections == 1
    with contextlib.closing(end), end.makefile("rb") as file:
        end.sendall(b"hello")
        assert file.read(5) == b"hello"


def test_dial_out_only_member_is_detected_and_its_probes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It probes an open member, which cannot dial it."""
    monkeypatch.setattr("zeroband.elastic.guardian.probes._LEAST_CALL_S", 0.1)
    with socket.create_server((HOST, 0)) as reserved:
        closed = (DialRoute(HOST, reserved.getsockname()[1]),)
    open_one = LinkMonitor(HOST, identity=Identity(RELAY, KEY), detect_s=1.0, on_gone=print)
    hidden = LinkMonitor(HOST, identity=Identity(HIDDEN, KEY), detect_s=1.0, on_gone=print, listens=False)
    try:
        hidden.watch({RELAY: (DialRoute(HOST, open_one.port),)})
        open_one.watch({HIDDEN: closed})
        until(lambda: open_one.undialled() == (HIDDEN,))
        open_one.watch({HIDDEN: INBOUND_ONLY})
        until(lambda: HIDDEN in open_one.seen())
        assert (open_one.seen()[HIDDEN].way, open_one.cut_off()) == ("reversed", ())
        hidden.close()
        until(lambda: open_one.cut_off() == (HIDDEN,))
    finally:
        hidden.close()
        open_one.close()
