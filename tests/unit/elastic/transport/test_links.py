"""Links of members that call each other over loopback, each with a port, an inbox and an engine of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import pytest
import torch
from tests.unit.elastic.conftest import DEADLINE_S, HOST, ends_of, noise, split_into, tcp_pair, until

from zeroband.elastic.guardian.port import Port, shake_hands
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import DialRoute, dials
from zeroband.elastic.transport import links as links_module
from zeroband.elastic.transport.dial import DialledConnection, dial_member
from zeroband.elastic.transport.engine import Engine, Operation, State
from zeroband.elastic.transport.handover import HandedOver, Inbox, channel, hand_over
from zeroband.elastic.transport.handshake import DATA_CALL, NO_KEYS
from zeroband.elastic.transport.links import Links, LinkTarget
from zeroband.kernels.codec import CODECS

KEY = RunKey(b"k" * 32)
NO_LINK = 0xFFFFFFFF


def in_thread(work: Callable[[], tuple[str, ...]]) -> Future[tuple[str, ...]]:
    """Of a kind that does not keep the process alive."""
    future: Future[tuple[str, ...]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
            raise

    threading.Thread(target=run, daemon=True).start()
    return future


class Node:
    """What a node has to be linked with others. `open` has it listen."""

    def __init__(self, name: str, *, key: RunKey = KEY, is_sealed: bool = True) -> None:
        self.name = name
        self.links = Links(Engine(1), key, is_sealed)
        self._key, self._is_sealed = key, is_sealed
        self._calls, theirs = channel()
        self._inbox = Inbox({"data": self.links.accept})
        self._inbox.attach(theirs)
        self._loop = asyncio.new_event_loop()
        self._port = Port({DATA_CALL: self._pass_on})
        self._reserved = socket.socket()  # until it listens, nobody else gets the port
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((HOST, 0))
        self.address = (HOST, int(self._reserved.getsockname()[1]))
        self._connecting: list[Future[tuple[str, ...]]] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    async def _pass_on(self, connection: socket.socket) -> None:
        hand_over(
            self._calls,
            connection,
            await shake_hands(connection, self._key, callee=self.name, is_sealed=self._is_sealed),
        )

    def open(self) -> Node:
        async def listen() -> None:
            self._port.open(*self.address)

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(DEADLINE_S)
        return self

    def connect(
        self, *others: Node, streams: int = 1, is_aborted: Callable[[], bool] | None = None
    ) -> Future[tuple[str, ...]]:
        """As the trainer's main thread does it."""
        end_s = time.monotonic() + DEADLINE_S
        wanted = {
            other.name: LinkTarget((DialRoute(*other.address),), streams, dials(self.name, other.name, ()))
            for other in others
        }
        is_over = lambda: self._is_closing or (is_aborted() if is_aborted else time.monotonic() > end_s)  # noqa: E731
        self._connecting.append(in_thread(lambda: self.links.connect(self.name, wanted, is_over)))
        return self._connecting[-1]

    def is_linked(self, other: Node, *, streams: int = 1) -> bool:
        state = self.links.state(other.name)
        return state.is_up and state.streams == streams

    def lose(self, other: Node) -> None:
        """Close all connections with it, as a break of the network does."""
        self.links.engine.drop(self.links.number(other.name))

    def close(self) -> None:
        self._is_closing = True
        assert not wait(self._connecting, DEADLINE_S).not_done, f"{self.name} does not stop to connect"

        async def hang_up() -> None:
            self._port.close()
            await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(hang_up(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()
        self._reserved.close()
        self._inbox.close()
        self._calls.close()
        self.links.close()
        self.links.engine.close()


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNode]:
    """Nodes that do not listen yet; they dial again soon."""
    monkeypatch.setattr(links_module, "_REDIAL_S", 0.01)
    nodes: list[Node] = []

    def make(name: str, **options: Any) -> Node:
        nodes.append(Node(name, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def connect_all(nodes: Sequence[Node], *, streams: int = 1) -> None:
    """Each with all others, at the same time."""
    connecting = [node.connect(*(n for n in nodes if n is not node), streams=streams) for node in nodes]
    assert [future.result(2 * DEADLINE_S) for future in connecting] == [()] * len(nodes)
    pairs = [(a, b) for a in nodes for b in nodes if a is not b]
    until(lambda: all(a.is_linked(b, streams=streams) for a, b in pairs))


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "open"])
@pytest.mark.parametrize("streams", [1, 3])
def test_members_are_linked_by_as_many_streams_as_are_wanted(
    make_node: MakeNode, streams: int, is_sealed: bool
) -> None:
    """And a mean goes over them: both ends have the right keys."""
    nodes = [make_node(name, is_sealed=is_sealed).open() for name in "abc"]
    connect_all(nodes, streams=streams)
    shape = split_into(5003, CODECS["fp32"], [1, 1, 1], is_ring=False)
    results = [torch.zeros(5003) for _ in nodes]
    reductions = [
        node.links.engine.start(
            Operation(run=1, plan=1, epoch=1, round=1),
            shape,
            member,
            [node.links.number(other.name) for other in nodes],
            noise(5003, seed=member),
            results[member],
        )
        for member, node in enumerate(nodes)
    ]
    states = ends_of(reductions)
    for reduction in reductions:
        reduction.close()
    assert states == [State.DONE] * 3
    assert torch.allclose(results[0], sum(noise(5003, seed=seed) for seed in range(3)) / 3, atol=1e-6)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_links_are_kept_from_one_call_to_the_next(make_node: MakeNode) -> None:
    a, b = make_node("a").open(), make_node("b").open()
    connect_all([a, b])
    numbers = a.links.number("b"), b.links.number("a")
    connect_all([a, b])
    assert (a.links.number("b"), b.links.number("a")) == numbers


def test_streams_that_are_missing_are_added_to_the_same_link(make_node: MakeNode) -> None:
    a, b = make_node("a").open(), make_node("b").open()
    connect_all([a, b], streams=1)
    number = b.links.number("a")
    connect_all([a, b], streams=4)
    assert b.links.number("a") == number


@pytest.mark.parametrize("loser", ["the caller", "the called one"])
def test_lost_link_is_dialled_again_as_another_session(make_node: MakeNode, loser: str) -> None:
    a, b = make_node("a").open(), make_node("b").open()
    connect_all([a, b], streams=2)
    numbers, session = (a.links.number("b"), b.links.number("a")), b.links.session("a")
    a.lose(b) if loser == "the caller" else b.lose(a)
    until(lambda: not a.links.state("b").is_up and not b.links.state("a").is_up)
    connect_all([a, b], streams=2)
    assert a.links.number("b") != numbers[0] and b.links.number("a") != numbers[1]
    assert b.links.session("a") == a.links.session("b") != session


def test_link_of_which_the_called_one_alone_lost_a_stream_is_dialled_again(make_node: MakeNode) -> None:
    """As when the caller is stopped between its last word and taking the stream."""
    a, b = make_node("a").open(), make_node("b").open()
    connect_all([a, b], streams=2)
    ours, theirs = tcp_pair()
    b.links.accept(ours, HandedOver("data", "a", b.links.session("a"), NO_KEYS))
    theirs.close()
    until(lambda: not a.links.state("b").is_up and not b.links.state("a").is_up)
    connect_all([a, b], streams=3)


def test_abort_keeps_the_streams_that_were_there_already(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end has taken them: thrown away, they would take its link down."""
    a, b = make_node("a").open(), make_node("b").open()
    connect_all([a, b], streams=1)
    number, calls, aborted = a.links.number("b"), list[object](), threading.Event()

    async def second_is_silent(*args: Any) -> DialledConnection:
        calls.append(args)
        if len(calls) == 2:
            await asyncio.Event().wait()
        return await dial_member(*args)

    with monkeypatch.context() as patched:
        patched.setattr(links_module, "dial_member", second_is_silent)
        connecting = a.connect(b, streams=3, is_aborted=aborted.is_set)
        until(lambda: b.is_linked(a, streams=2) and len(calls) == 2)
        aborted.set()
        assert connecting.result(DEADLINE_S) == ()
    connect_all([a, b], streams=3)
    assert a.links.number("b") == number


def test_links_are_made_in_a_thread_that_has_a_loop_at_work_as_a_notebook_has(make_node: MakeNode) -> None:
    a, b = make_node("a").open(), make_node("b").open()
    end_s = time.monotonic() + DEADLINE_S

    async def cell() -> tuple[str, ...]:
        return a.links.connect(
            "a", {"b": LinkTarget((DialRoute(*b.address),), 1, is_dialled=True)}, lambda: time.monotonic() > end_s
        )

    of_b = b.connect(a)
    assert asyncio.run(cell()) == of_b.result(DEADLINE_S) == ()
    until(lambda: a.is_linked(b) and b.is_linked(a))


def test_link_that_is_lost_while_others_are_awaited_is_dialled_again(make_node: MakeNode) -> None:
    a, b, late = make_node("a").open(), make_node("b").open(), make_node("late")
    connecting = a.connect(b, late)
    until(lambda: a.is_linked(b) and b.is_linked(a))
    number = a.links.number("b")
    b.lose(a)
    until(lambda: a.links.number("b") != number and a.is_linked(b), deadline_s=2)
    late.open()
    assert connecting.result(DEADLINE_S) == ()


def test_member_that_is_not_wanted_any_more_is_dropped(make_node: MakeNode) -> None:
    a, b, c = (make_node(name).open() for name in "abc")
    connect_all([a, b, c])
    assert a.connect(b).result(DEADLINE_S) == ()
    assert (a.links.number("c"), a.links.state("c").is_up) == (NO_LINK, False)
    until(lambda: not c.links.state("a").is_up)
    assert a.is_linked(b) and c.is_linked(b)


def test_closed_links_are_all_dropped(make_node: MakeNode) -> None:
    a, b, c = (make_node(name).open() for name in "abc")
    connect_all([a, b, c])
    a.links.close()
    until(lambda: not b.links.state("a").is_up and not c.links.state("a").is_up)
    assert [a.links.number(name) for name in "bc"] == [NO_LINK] * 2


def test_stream_that_comes_when_the_links_are_closed_is_hung_up_on(make_node: MakeNode) -> None:
    """Other nodes dial until this one's guardian has ended, which is after its engine."""
    node, (ours, theirs) = make_node("m"), tcp_pair()
    node.links.close()
    node.links.engine.close()
    node.links.accept(ours, HandedOver("data", "a", "session", NO_KEYS))
    with theirs:
        assert theirs.recv(1) == b""


def test_member_that_listens_late_is_reached(make_node: MakeNode) -> None:
    a, b = make_node("a").open(), make_node("b")
    connecting = [a.connect(b), b.connect(a)]
    assert not a.is_linked(b)
    b.open()
    assert [future.result(DEADLINE_S) for future in connecting] == [(), ()]


@pytest.mark.parametrize("own", ["a", "z"], ids=["who dials", "who is dialled"])
def test_abort_ends_the_wait_and_tells_who_is_away(make_node: MakeNode, own: str) -> None:
    node, there, away = make_node(own).open(), make_node("m").open(), make_node("n")
    aborted = threading.Event()
    connecting = [node.connect(there, away, is_aborted=aborted.is_set), there.connect(node)]
    assert connecting[1].result(DEADLINE_S) == ()
    until(lambda: node.is_linked(there))
    assert not connecting[0].done()
    aborted.set()
    assert connecting[0].result(DEADLINE_S) == ("n",)


def test_abort_ends_a_call_that_is_not_answered(make_node: MakeNode) -> None:
    """A machine that stands still takes connections and says nothing."""
    a, b = make_node("a"), make_node("b")
    aborted = threading.Event()
    with socket.create_server(b.address) as silent:
        connecting = a.connect(b, is_aborted=aborted.is_set)
        connection, _ = silent.accept()
        connection.settimeout(DEADLINE_S)
        assert connection.recv(4, socket.MSG_WAITALL) == DATA_CALL
        aborted.set()
        assert connecting.result(DEADLINE_S) == ("b",)
        with connection:
            while connection.recv(4096):
                pass


@pytest.mark.parametrize(
    "options", [{"key": RunKey(b"o" * 32)}, {"is_sealed": False}], ids=["another token", "not sealed"]
)
@pytest.mark.parametrize("own", ["a", "z"], ids=["who dials", "who is dialled"])
def test_node_that_does_not_belong_here_is_never_linked(make_node: MakeNode, own: str, options: dict[str, Any]) -> None:
    """It has been refused several times, when another node that came later is there."""
    stranger, node, last = make_node(own, **options).open(), make_node("m").open(), make_node("n").open()
    aborted, calls = threading.Event(), [0]

    def is_aborted() -> bool:
        calls[0] += 1
        return aborted.is_set()

    connecting = [
        stranger.connect(node, is_aborted=aborted.is_set),
        node.connect(stranger, last, is_aborted=is_aborted),
        last.connect(node),
    ]
    assert connecting[2].result(DEADLINE_S) == ()
    until(lambda: calls[0] > 20)
    assert not node.links.state(own).is_up and not stranger.links.state("m").is_up
    aborted.set()
    assert connecting[0].result(DEADLINE_S) == ("m",)
    assert connecting[1].result(DEADLINE_S) == (own,)


def test_call_to_a_name_that_the_node_had_before_leads_nowhere(make_node: MakeNode) -> None:
    """A node that was fenced and came back listens where it did."""
    a, b, before = make_node("a").open(), make_node("b#2").open(), make_node("b#1")
    before.address = b.address
    aborted = threading.Event()
    connecting = a.connect(b, before, is_aborted=aborted.is_set)
    until(lambda: a.is_linked(b))
    aborted.set()
    assert connecting.result(DEADLINE_S) == ("b#1",)


def test_stream_of_another_session_replaces_the_link(make_node: MakeNode) -> None:
    """What is left of the old one is closed; streams of the same session add up."""
    node, numbers, far = make_node("m"), list[int](), list[socket.socket]()
    for session in ("first", "first", "second"):
        ours, theirs = tcp_pair()
        node.links.accept(ours, HandedOver("data", "a", session, NO_KEYS))
        numbers.append(node.links.number("a"))
        far.append(theirs)
    assert numbers[0] == numbers[1] != numbers[2]
    assert node.links.state("a").streams == 1
    assert [end.recv(1) for end in far[:2]] == [b"", b""]
    for end in far:
        end.close()


def test_stream_sends_at_once_and_shows_itself_while_it_is_idle(make_node: MakeNode) -> None:
    node, (ours, theirs) = make_node("m"), tcp_pair()
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
    with ours.dup() as seen, theirs:
        node.links.accept(ours, HandedOver("data", "a", "session", NO_KEYS))
        assert seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert seen.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
