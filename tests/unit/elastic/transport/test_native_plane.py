"""The native data plane where a node is alone, reaches some of the others no more, or has a slow link to them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, permutations
from math import ceil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.unit.elastic.conftest import DEADLINE_S, HOST, make_silent, tcp_pair, until

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import DialRoute
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.membership.topology import LinkTable
from zeroband.elastic.transport import native_plane as native_module
from zeroband.elastic.transport.base import Gathering, MovedBytes, RoundRequest
from zeroband.elastic.transport.dial import Address
from zeroband.elastic.transport.engine import Encoded, Engine, LinkState
from zeroband.elastic.transport.handover import HandedOver
from zeroband.elastic.transport.handshake import NO_KEYS, new_session
from zeroband.elastic.transport.links import Links
from zeroband.elastic.transport.native_plane import NativePlane, PeerAccess
from zeroband.elastic.transport.shape import shape_of
from zeroband.elastic.transport.stalls import TransferBounds
from zeroband.elastic.transport.tuning import LinkTuning, MidTransfer
from zeroband.errors import PeerLost, TransferStalled
from zeroband.kernels.codec import CODECS
from zeroband.node.faults import FaultPoints
from zeroband.node.shared_flags import SharedFlags

N = 700
INT8 = CODECS["int8"]
PATIENT = TransferBounds(stall_s=DEADLINE_S, max_stall_s=DEADLINE_S, stream_s=DEADLINE_S, connect_s=DEADLINE_S)
BOUNDS = replace(PATIENT, stall_s=1.0)
SOURCE = torch.randn(N, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def reduce_alone(tmp_path: Path) -> Callable[..., torch.Tensor]:
    """The mean of one member with this weight."""

    def reduce(weight: int, **more: Any) -> torch.Tensor:
        flags = SharedFlags(tmp_path / "flags", create=True)
        reach = PeerAccess(links=cast(Any, None), routes=lambda own, members: {})
        plane = NativePlane("run", flags, INT8, reach, FaultPoints(()), streams=1, paced=True, bounds=PATIENT)
        plan = RoundPlan(1, 1, 1, ("a#1",), (weight,), (4,), (4,))
        result = torch.full((N,), 7.0)
        assert plane.reduce_mean(RoundRequest(plan, "a#1", SOURCE, result, **more)) == MovedBytes(0, 0)
        flags.close()
        return result

    return reduce


def test_mean_of_one_is_exact_and_takes_nothing(reduce_alone: Callable[..., torch.Tensor]) -> None:
    errors = torch.ones(N)
    assert torch.equal(reduce_alone(10, residual=errors), SOURCE)
    assert not errors.any()


def test_mean_of_one_that_comes_encoded_is_what_its_encoding_says(
    reduce_alone: Callable[..., torch.Tensor],
) -> None:
    encoded = Encoded(INT8.encode(-SOURCE), torch.zeros(INT8.encoded_size(N), dtype=torch.uint8))
    assert torch.equal(reduce_alone(10, encoded=encoded), INT8.decode(INT8.encode(-SOURCE), N))
    assert torch.equal(encoded.result, encoded.contribution)


def test_mean_of_nobody_is_zero_and_leaves_the_errors(reduce_alone: Callable[..., torch.Tensor]) -> None:
    errors = torch.ones(N)
    assert not reduce_alone(0, residual=errors).any()
    assert bool(errors.all())


# -- several nodes ----------------------------------------------------------------------------------------------------

PLAN = RoundPlan(1, 1, 1, ("a#1", "b#1", "c#1"), (1, 1, 1), (4, 4, 4), (4, 4, 4))


class Node:
    """A member of PLAN with a data plane of its own."""

    def __init__(
        self,
        member_id: str,
        folder: Path,
        links: type[Links] = Links,
        streams: int | None = 1,
        bounds: TransferBounds = PATIENT,
    ) -> None:
        self.member_id = member_id
        self.links = links(Engine(1, beat_s=bounds.beat_s), RunKey(b"k" * 32), is_sealed=False)
        self._flags = SharedFlags(folder / member_id, create=True)
        self._main = ThreadPoolExecutor(1)
        self.addresses: dict[str, Address] = {}
        self.partners: Iterable[str] = ("not told",)
        reach = PeerAccess(
            self.links,
            lambda own, members: {m: (DialRoute(*at),) for m, at in self.addresses.items()},
            partial(setattr, self, "partners"),
        )
        self.plane = NativePlane(
            "run", self._flags, CODECS["fp32"], reach, FaultPoints(()), streams=streams, paced=True, bounds=bounds
        )

    def reduce(self, plan: RoundPlan) -> Future[torch.Tensor]:
        """As the trainer's main thread does it."""

        def reduce() -> torch.Tensor:
            result = torch.full((N,), 7.0)
            self.plane.reduce_mean(RoundRequest(plan, self.member_id, SOURCE, result))
            return result

        return self._main.submit(reduce)

    def gather(self, plan: RoundPlan, gathering: Gathering) -> Future[tuple[torch.Tensor, MovedBytes]]:
        """All payloads, and the bytes that were moved; one's own is its place among the members, again and again."""
        place = plan.members.index(self.member_id)

        def gather() -> tuple[torch.Tensor, MovedBytes]:
            payload = torch.full((gathering.lengths[place],), place, dtype=torch.uint8)
            result = torch.full((gathering.total_bytes,), 0xEE, dtype=torch.uint8)
            return result, self.plane.gather(RoundRequest(plan, self.member_id, payload, result), gathering)

        return self._main.submit(gather)

    def abort(self, plan: RoundPlan) -> None:
        """As the watcher does that sees that a plan cannot be finished."""
        self._flags.abort(plan.version)

    @property
    def took_ms(self) -> int:
        """What the others are told of its last transfer."""
        return self.plane.measured().took_ms

    def close(self) -> None:
        self.plane.close()
        self._main.shutdown()
        self._flags.close()


def join(one: Node, other: Node, *, is_silent: bool = False, session: str = "") -> None:
    """Link two nodes by a stream.

    `is_silent`: nothing comes through, and neither end is told. `session`: of the link that it is to belong to;
    empty: a new one.
    """
    ends, session = tcp_pair(), session or new_session()
    if is_silent:
        make_silent(*ends)
    one.links.accept(ends[0], HandedOver("data", other.member_id, session, NO_KEYS))
    other.links.accept(ends[1], HandedOver("data", one.member_id, session, NO_KEYS))


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Node]]:
    """Of PLAN, without links; they wait no longer than BOUNDS says."""
    monkeypatch.setattr(native_module, "_CHECK_S", 0.01)
    made = [Node(member, tmp_path, bounds=BOUNDS) for member in PLAN.members]
    yield made
    for node in made:
        node.close()


def around(members: Sequence[str]) -> list[tuple[str, str]]:
    """Who stands before and behind each in a ring."""
    return list(zip((*members[-1:], *members[:-1]), (*members[1:], *members[:1]), strict=True))


def test_ring_takes_links_between_neighbours_alone(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = tuple(f"{name}#1" for name in "abcde")
    plan = replace(PLAN, members=members, weights=(1,) * 5, steps=(4,) * 5, steps_requested=(4,) * 5)
    five = [*nodes, *(Node(member, tmp_path, bounds=BOUNDS) for member in members[3:])]
    monkeypatch.setattr(native_module, "shape_of", lambda *given, **how: replace(shape_of(*given, **how), is_ring=True))
    try:
        for one, other in zip(five, [*five[1:], five[0]], strict=True):
            join(one, other)
        results = [node.reduce(plan) for node in five]
        means = [result.result(DEADLINE_S) for result in results]
        assert all(torch.equal(mean, means[0]) for mean in means)
        torch.testing.assert_close(means[0], SOURCE)
        assert [set(node.partners) for node in five] == [{before, after} for before, after in around(members)]
    finally:
        for node in five[3:]:
            node.close()


FOUR = RoundPlan(1, 1, 1, ("a#1", "b#1", "c#1", "d#1"), (1,) * 4, (4,) * 4, (4,) * 4, sites=(0, 0, 2, 2))


@pytest.fixture
def four(nodes: list[Node], tmp_path: Path) -> Iterator[list[Node]]:
    """Of FOUR, each linked to whom it exchanges payloads with."""
    d = Node("d#1", tmp_path, bounds=BOUNDS)
    a, b, c = nodes
    for one, other in ((a, b), (c, d), (a, c), (b, d)):
        join(one, other)
    yield [a, b, c, d]
    d.close()


def test_payloads_take_links_inside_the_site_and_to_one_member_of_each_other(four: list[Node]) -> None:
    gathered = [gathering.result(DEADLINE_S) for gathering in [n.gather(FOUR, Gathering((900,) * 4)) for n in four]]
    expected = torch.arange(4, dtype=torch.uint8).repeat_interleave(900)
    assert all(torch.equal(result, expected) for result, _ in gathered)
    assert [moved for _, moved in gathered] == [MovedBytes(3 * 900, 3 * 900, 900)] * 4
    assert [set(node.partners) for node in four] == [{"b#1", "c#1"}, {"a#1", "d#1"}, {"d#1", "a#1"}, {"c#1", "b#1"}]


def test_payloads_go_on_without_the_relay_that_was_lost(four: list[Node]) -> None:
    a, b, relay, d = four
    gatherings = {node: node.gather(FOUR, Gathering((900_000,) * 4)) for node in (a, b, d)}
    until(lambda: a.links.state("b#1").received_bytes > 0 and d.links.state("b#1").received_bytes > 0)
    relay.links.engine.close()
    for node in (a, d):
        with pytest.raises(PeerLost) as raised:
            gatherings[node].result(DEADLINE_S)
        assert raised.value.member_ids == ("c#1",)
    b.abort(FOUR)  # it exchanged nothing with the relay itself, or is done
    with suppress(PeerLost):
        gatherings[b].result(DEADLINE_S)
    join(a, d)
    left = RoundPlan(2, 2, 1, ("a#1", "b#1", "d#1"), (1,) * 3, (4,) * 3, (4,) * 3, sites=(0, 0, 2))
    again = [node.gather(left, Gathering((900,) * 3)) for node in (a, b, d)]
    expected = torch.arange(3, dtype=torch.uint8).repeat_interleave(900)
    assert all(torch.equal(gathering.result(DEADLINE_S)[0], expected) for gathering in again)


@pytest.mark.parametrize(
    ("more", "joined", "partners"),
    [
        ({"retries": 1}, ("ad", "bc"), ["bd", "ac", "bd", "ac"]),
        ({"network": LinkTable(dial_out_only=(1, 3))}, ("ad", "bc"), ["bcd", "ac", "abd", "ac"]),
    ],
    ids=["another one where results differed", "who is dialled for those who cannot be"],
)
def test_relay_follows_from_the_plan(
    four: list[Node], more: dict[str, Any], joined: Sequence[str], partners: Sequence[str]
) -> None:
    for one, other in joined:
        join(four["abcd".index(one)], four["abcd".index(other)])
    plan = replace(FOUR, version=2, **more)
    gathered = [gathering.result(DEADLINE_S) for gathering in [n.gather(plan, Gathering((900,) * 4)) for n in four]]
    assert all(torch.equal(result, gathered[0][0]) for result, _ in gathered)
    assert ["".join(sorted(member[0] for member in node.partners)) for node in four] == partners


def test_one_receiver_gets_payloads_directly_at_sites_too(four: list[Node]) -> None:
    a, b, c, d = four
    join(b, c)
    gatherings = [node.gather(FOUR, Gathering((900,) * 4, receiver="c#1")) for node in four]
    gathered = [gathering.result(DEADLINE_S) for gathering in gatherings]
    assert torch.equal(gathered[2][0], torch.arange(4, dtype=torch.uint8).repeat_interleave(900))
    moved = [(one.sent_bytes, one.received_bytes, one.wide_bytes) for _, one in gathered]
    assert moved == [(900, 0, 900), (900, 0, 900), (0, 2700, 0), (900, 0, 0)]
    assert set(a.partners) == set(d.partners) == {"c#1"}


def test_link_whose_packets_vanish_is_dropped_and_the_one_to_a_late_member_is_not(nodes: list[Node]) -> None:
    a, late, lost = nodes
    join(a, late)
    join(a, lost, is_silent=True)
    with pytest.raises(PeerLost, match=r"with c#1 failed: ") as raised:  # by its silence, or since no byte moves
        a.reduce(PLAN).result(DEADLINE_S)
    assert raised.value.member_ids == ("c#1",)
    assert (a.links.state("b#1").is_up, a.links.state("c#1").is_up) == (True, False)


def test_round_that_lost_a_link_without_a_word_goes_on_over_another_one(nodes: list[Node]) -> None:
    """Both ends see it by themselves, since neither can tell the other."""
    a, b, c = nodes
    join(a, b)
    join(b, c)
    join(a, c, is_silent=True)
    for reducing, other in [(node.reduce(PLAN), other) for node, other in ((a, c), (c, a))]:
        with pytest.raises(PeerLost) as raised:
            reducing.result(DEADLINE_S)
        assert raised.value.member_ids == (other.member_id,)
    join(a, c)
    again = replace(PLAN, version=2, epoch=2)
    results = [reducing.result(DEADLINE_S) for reducing in [node.reduce(again) for node in nodes]]
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.allclose(results[0], SOURCE)


class Box:
    """A middlebox between two ends: acknowledges all that comes, and forwards what it is not told to swallow."""

    def __init__(self) -> None:
        (self.one, mine), (self.other, theirs) = tcp_pair(), tcp_pair()
        self.there, self.back = threading.Event(), threading.Event()
        """Set: what goes there, or comes back, is swallowed."""
        for source, sink, swallows in ((mine, theirs, self.there), (theirs, mine, self.back)):
            threading.Thread(target=self._pour, args=(source, sink, swallows), daemon=True).start()

    def _pour(self, source: socket.socket, sink: socket.socket, swallows: threading.Event) -> None:
        source.settimeout(None)
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if not swallows.is_set():
                    sink.sendall(piece)
            if not swallows.is_set():
                sink.shutdown(socket.SHUT_RDWR)


def join_through(one: Node, other: Node) -> Box:
    box, session = Box(), new_session()
    one.links.accept(box.one, HandedOver("data", other.member_id, session, NO_KEYS))
    other.links.accept(box.other, HandedOver("data", one.member_id, session, NO_KEYS))
    return box


TWO = replace(PLAN, members=("a#1", "b#1"), weights=(1, 1), steps=(4, 4), steps_requested=(4, 4))


@pytest.mark.parametrize("is_both_ways", [True, False], ids=["both ways", "one way"])
def test_path_that_acknowledges_and_forwards_nothing_is_left_for_another_one(
    nodes: list[Node], is_both_ways: bool
) -> None:
    """TCP at either end sees everything acknowledged; who should get something sees that nothing comes."""
    a, b, _ = nodes
    box = join_through(a, b)
    box.there.set()
    if is_both_ways:
        box.back.set()
    reductions = [node.reduce(TWO) for node in (a, b)]
    with pytest.raises(TransferStalled, match="with a#1 failed") as raised:
        reductions[1].result(DEADLINE_S)
    stall = raised.value
    assert stall.member_ids == ("a#1",) and stall.since_s >= BOUNDS.stall_s and stall.at_byte == 0 < stall.of_bytes
    with pytest.raises(PeerLost):
        reductions[0].result(DEADLINE_S)
    assert not a.links.state("b#1").is_up and not b.links.state("a#1").is_up
    join(a, b)
    again = [node.reduce(replace(TWO, version=2, epoch=2)) for node in (a, b)]
    assert all(torch.allclose(reducing.result(DEADLINE_S), SOURCE) for reducing in again)


def test_link_that_went_silent_between_two_rounds_is_not_used_in_the_next(nodes: list[Node]) -> None:
    a, b, _ = nodes
    box = join_through(a, b)
    until(lambda: a.links.state("b#1").silent_s == 0)
    box.back.set()
    until(lambda: a.links.state("b#1").silent_s > BOUNDS.stall_s)
    with pytest.raises(PeerLost, match="left before the transfer"):  # it asks where the other one is, to dial again
        a.reduce(TWO).result(DEADLINE_S)
    assert not a.links.state("b#1").is_up


def test_member_that_is_late_costs_no_link_and_is_waited_for_longer_each_time(nodes: list[Node]) -> None:
    """The others wait for it and for one another: nobody's path is to blame, and the round is opened again."""
    for one, other in combinations(nodes, 2):
        join(one, other)
    waiting = nodes[:2]
    for reducing in [node.reduce(PLAN) for node in waiting]:
        with pytest.raises(TransferStalled, match="no byte of it moved") as raised:
            reducing.result(DEADLINE_S)
        assert raised.value.member_ids == ("c#1",), "those who wait themselves are not named"
    assert [(node.plane.gaps().lacks, node.plane.gaps().refused) for node in waiting] == [(("c#1",), ())] * 2
    assert all(one.links.state(other.member_id).is_up for one, other in permutations(nodes, 2))
    assert [node.plane.stall_limit_s for node in waiting] == [2 * BOUNDS.stall_s] * 2
    again = [node.reduce(replace(PLAN, version=2, epoch=2)) for node in nodes]
    assert all(torch.allclose(reducing.result(DEADLINE_S), SOURCE) for reducing in again)
    assert [node.plane.stall_limit_s for node in waiting] == [BOUNDS.stall_s] * 2


def test_connection_that_does_not_come_up_is_given_up(tmp_path: Path) -> None:
    """It takes connections and says nothing, for as long as anybody waits."""
    a = Node("a#1", tmp_path, bounds=replace(PATIENT, connect_s=0.3))
    with socket.create_server((HOST, 0)) as silent:
        a.addresses["b#1"] = silent.getsockname()
        with pytest.raises(TransferStalled, match=r"no connection to b#1 within 0.3 s") as raised:
            a.reduce(TWO).result(DEADLINE_S)
    assert raised.value.member_ids == ("b#1",)
    a.close()


@dataclass
class SlowLinks(Links):
    """Links of which TCP's counters tell that their streams crowd one another out."""

    asked: int = 0
    told: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def state(self, member: str) -> LinkState:
        self.asked += 1
        sent, resent = 200 * self.asked, 20 * self.asked
        return replace(super().state(member), streams=8, window=3, sent_packets=sent, resent_packets=resent)

    def set_senders(self, member: str, senders: int) -> None:
        self.told.append((member, senders))
        super().set_senders(member, senders)


@pytest.mark.parametrize("streams", [None, 8], ids=["ours to choose", "the user's"])
def test_crowded_link_is_left_to_one_stream_during_a_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: int | None
) -> None:
    monkeypatch.setattr(native_module, "_CHECK_S", 0.01)
    plan = replace(PLAN, members=("a#1", "b#1"), weights=(1, 1), steps=(4, 4), steps_requested=(4, 4))
    a, late = (Node(member, tmp_path, SlowLinks, streams) for member in plan.members)
    for _ in range(8):
        join(a, late, session="the same")
    links = cast(SlowLinks, a.links)
    reducing, before = a.reduce(plan), links.asked
    until(lambda: links.asked > before + 3)
    assert torch.equal(late.reduce(plan).result(DEADLINE_S), reducing.result(DEADLINE_S))
    assert links.told[:1] == ([("b#1", 1)] if streams is None else [])
    a.close()
    late.close()


@dataclass
class ToldLinks(Links):
    """Links that write down how they are to send."""

    paces: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    senders: dict[str, int] = field(default_factory=dict[str, int])

    def set_pace(self, member: str, bytes_per_s: int) -> None:
        self.paces.append((member, bytes_per_s))
        super().set_pace(member, bytes_per_s)

    def set_senders(self, member: str, senders: int) -> None:
        self.senders[member] = senders
        super().set_senders(member, senders)


@pytest.fixture
def paced_links(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The first node's links, and what makes round N.

    It has so many nodes make the round; of the plans before it says that the last transfer took two seconds.
    """
    nodes = [Node(member, tmp_path, ToldLinks, request.param) for member in PLAN.members]
    for one, other in combinations(nodes, 2):
        session = new_session()
        for _ in range(8):
            join(one, other, session=session)

    def reduce(number: int, members: int) -> None:
        ones = (1,) * members
        numbers = {"weights": ones, "steps": ones, "steps_requested": ones, "network": LinkTable(took_ms=2000)}
        plan = replace(PLAN, version=number, round=number, members=PLAN.members[:members], **numbers)
        for reducing in [node.reduce(plan) for node in nodes[:members]]:
            assert torch.allclose(reducing.result(DEADLINE_S), SOURCE)

    yield cast(ToldLinks, nodes[0].links), reduce
    for node in nodes:
        node.close()


@pytest.mark.parametrize("paced_links", [None], indirect=True, ids=["ours to choose"])
def test_transfer_is_sent_at_the_pace_that_was_found_for_it(
    paced_links: tuple[ToldLinks, Callable[[int, int], None]],
) -> None:
    links, reduce = paced_links
    reduce(1, 3)
    reduce(2, 3)
    assert links.paces == []
    reduce(3, 3)
    to_b, to_c = 4 * (256 + 256), 4 * (188 + 256)  # float32 of their shards and of its own
    assert links.paces == [("b#1", ceil(to_b / 2)), ("c#1", ceil(to_c / 2))]
    assert links.senders == {"b#1": 1, "c#1": 1}
    reduce(4, 2)  # a transfer between other members is another one
    assert set(links.paces[2:]) == {("b#1", 0), ("c#1", 0)}
    assert links.senders == {"b#1": 8, "c#1": 8}
    reduce(5, 2)
    assert len(links.paces) == 4, "and they stay as TCP has them"


@pytest.mark.parametrize("is_lossy", [False, True])
def test_time_of_a_transfer_is_not_told_where_links_lose_packets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lossy: bool
) -> None:
    monkeypatch.setattr(LinkTuning, "is_lossy", is_lossy)
    monkeypatch.setattr(MidTransfer, "whole_s", 1.5)
    a, b = Node("a#1", tmp_path), Node("b#1", tmp_path)
    join(a, b)
    plan = replace(PLAN, members=PLAN.members[:2], weights=(1, 1), steps=(1, 1), steps_requested=(1, 1))
    for reducing in (a.reduce(plan), b.reduce(plan)):
        reducing.result(DEADLINE_S)
    assert a.took_ms == (0 if is_lossy else 1500)
    a.close()
    b.close()


@pytest.mark.parametrize("paced_links", [8], indirect=True, ids=["the user's"])
def test_streams_that_the_user_chose_are_not_paced(
    paced_links: tuple[ToldLinks, Callable[[int, int], None]],
) -> None:
    links, reduce = paced_links
    for number in (1, 2, 3, 4):
        reduce(number, 3)
    assert links.paces == [] and links.senders == {}
