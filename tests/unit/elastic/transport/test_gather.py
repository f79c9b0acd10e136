"""What a gathering gives: every member's bytes, in the order of the members; aborted, retried, or without a member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.elastic.conftest import (
    EACH_SEALING,
    KeptNet,
    MakeNet,
    Net,
    ends_of,
    has_nothing_in_transit,
    noise,
    split_into,
    until,
)
from torch import Tensor

from zeroband.elastic.transport.engine import Operation, Running, State, Traffic
from zeroband.elastic.transport.shape import Route, piece_bytes, route_of
from zeroband.kernels.codec import CODECS
from zeroband.tools.plan.forecast import Job, Link, Method, forecasts

PIECE = 512
UNTOUCHED = 0xEE


def payloads_of(lengths: Sequence[int], *, seed: int = 0) -> list[Tensor]:
    """Bytes of each member, other ones for each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator) for length in lengths]


def gather_all(
    net: Net,
    operation: Operation,
    payloads: Sequence[Tensor],
    *,
    sites: Sequence[int] = (),
    receiver: int | None = None,
    but: Sequence[int] = (),
    allowed: float = 1.0,
) -> tuple[dict[int, Running], list[Tensor]]:
    """Start it on all members (`but` some); what they will have lies in the tensors."""
    lengths = [len(payload) for payload in payloads]
    results = [torch.full((sum(lengths),), UNTOUCHED, dtype=torch.uint8) for _ in payloads]
    running: dict[int, Running] = {}
    for member in set(range(net.world)) - set(but):
        running[member] = net.engines[member].gather(
            operation,
            lengths,
            member,
            range(net.world),
            route_of(member, sites or range(net.world), receiver=receiver),
            payloads[member],
            results[member],
            chunk_bytes=PIECE,
            allowed=allowed,
        )
    net.started += running.values()
    return running, results


def gathered(net: Net, payloads: Sequence[Tensor], **more: Any) -> list[Tensor]:
    """One gathering from start to end."""
    running, results = gather_all(net, net.next_operation(), payloads, **more)
    assert ends_of(list(running.values())) == [State.DONE] * net.world
    for one in running.values():
        one.close()
    return results


def traffic_of(running: Running, world: int) -> list[Traffic]:
    return [running.traffic(member) for member in range(world)]


@EACH_SEALING
@pytest.mark.parametrize("world", range(2, 6))
def test_all_members_hold_all_payloads(kept_net: KeptNet, world: int, is_sealed: bool) -> None:
    net = kept_net(world, is_sealed)
    for lengths in ([10_007] * world, [1] * world, [PIECE * 3 + member for member in range(world)], [0] * world):
        payloads = payloads_of(lengths)
        assert all(torch.equal(result, torch.cat(payloads)) for result in gathered(net, payloads))
        assert all(torch.equal(*pair) for pair in zip(payloads, payloads_of(lengths), strict=True)), "only read"


def test_member_without_a_payload_gets_the_others(kept_net: KeptNet) -> None:
    payloads = payloads_of([3000, 0, 3000])
    assert all(torch.equal(result, torch.cat(payloads)) for result in gathered(kept_net(3, True), payloads))


@pytest.mark.parametrize("receiver", [0, 2])
def test_one_receiver_gets_them_and_the_others_nothing(kept_net: KeptNet, receiver: int) -> None:
    payloads = payloads_of([3000] * 4)
    results = gathered(kept_net(4, True), payloads, receiver=receiver)
    assert torch.equal(results[receiver], torch.cat(payloads))
    assert all(bool((r == UNTOUCHED).all()) for member, r in enumerate(results) if member != receiver)


def test_payloads_are_counted_once_for_each_receiver(kept_net: KeptNet) -> None:
    payloads = payloads_of([3000, 2000, 1000])
    running, _ = gather_all(kept_net(3, True), kept_net(3, True).next_operation(), payloads)
    assert ends_of(list(running.values())) == [State.DONE] * 3
    for member in range(3):
        traffic = traffic_of(running[member], 3)
        sent = [0 if other == member else len(payloads[member]) for other in range(3)]
        received = [0 if other == member else len(payloads[other]) for other in range(3)]
        assert [t.sent_bytes for t in traffic] == [t.to_send_bytes for t in traffic] == sent
        assert [t.received_bytes for t in traffic] == [t.to_receive_bytes for t in traffic] == received


def test_several_streams_carry_one_gathering(make_net: MakeNet) -> None:
    payloads = payloads_of([100_003] * 3)
    net = make_net(3, is_sealed=True, streams=4)
    assert all(torch.equal(result, torch.cat(payloads)) for result in gathered(net, payloads))


def test_gathering_and_reduction_of_one_plan_go_on_beside_each_other(make_net: MakeNet) -> None:
    net, sources, payloads = make_net(3), [noise(5003, seed=m) for m in range(3)], payloads_of([5003] * 3)
    shape = split_into(5003, CODECS["fp32"], [1, 1, 1], is_ring=False)
    operation = net.next_operation()
    reductions, means = net.operate_all(operation, shape, sources)
    running, results = gather_all(net, replace(operation, lane=1), payloads)
    assert ends_of([*running.values(), *reductions]) == [State.DONE] * 6
    assert all(torch.equal(result, torch.cat(payloads)) for result in results)
    assert all(torch.equal(mean, net.mean(shape, sources)[0]) for mean in means)


def test_no_more_is_sent_than_is_allowed(make_net: MakeNet) -> None:
    net, payloads = make_net(2), payloads_of([20 * PIECE] * 2)
    running, _ = gather_all(net, net.next_operation(), payloads, allowed=0.5)
    until(lambda: all(one.is_held() for one in running.values()))
    assert [running[0].traffic(1).sent_bytes, running[0].wait(0)] == [10 * PIECE, State.RUNNING]
    for one in running.values():
        one.allow(1.0)
    assert ends_of(list(running.values())) == [State.DONE] * 2


@EACH_SEALING
def test_aborted_gathering_writes_nothing_more_and_the_links_serve_the_retry(
    make_net: MakeNet, is_sealed: bool
) -> None:
    net, payloads = make_net(3, is_sealed=is_sealed), payloads_of([50_021] * 3)
    operation = net.next_operation()
    running, results = gather_all(net, operation, payloads, but=[2])
    until(lambda: running[1].traffic(0).sent_bytes > 0)
    running[0].close()
    results[0].fill_(UNTOUCHED)
    late, _ = gather_all(net, operation, payloads, but=[0, 1])
    until(lambda: late[2].traffic(0).sent_bytes > 0)
    for one in (*running.values(), *late.values()):
        one.close()
    again = payloads_of([50_021] * 3, seed=1)
    assert all(torch.equal(result, torch.cat(again)) for result in gathered(net, again))
    assert bool((results[0] == UNTOUCHED).all())


def test_gathering_that_nobody_holds_any_more_writes_nothing_more(make_net: MakeNet) -> None:
    net, payloads = make_net(2), payloads_of([50_021] * 2)
    operation = net.next_operation()
    running, results = gather_all(net, operation, payloads, but=[1])
    net.started.clear()
    running.clear()
    late, _ = gather_all(net, operation, payloads, but=[0])
    until(lambda: late[1].traffic(0).sent_bytes > 0)
    late[1].close()
    again = payloads_of([50_021] * 2, seed=1)
    assert all(torch.equal(result, torch.cat(again)) for result in gathered(net, again))
    assert bool((results[0][50_021:] == UNTOUCHED).all())


def test_member_that_is_lost_is_named(make_net: MakeNet) -> None:
    net = make_net(3)
    running, _ = gather_all(net, net.next_operation(), payloads_of([50_021] * 3), but=[2])
    until(lambda: running[0].traffic(1).received_bytes > 0)
    net.engines[2].close()
    assert ends_of([running[0], running[1]]) == [State.PEER_LOST] * 2
    assert [running[0].detail, running[1].detail] == [2, 2]


def test_member_that_starts_after_the_others_gets_everything(make_net: MakeNet) -> None:
    net, payloads = make_net(3), payloads_of([50_021] * 3)
    operation = net.next_operation()
    running, early = gather_all(net, operation, payloads, but=[2])
    until(lambda: running[0].traffic(1).received_bytes > 0)
    late, results = gather_all(net, operation, payloads, but=[0, 1])
    assert ends_of([*running.values(), *late.values()]) == [State.DONE] * 3
    assert all(torch.equal(result, torch.cat(payloads)) for result in (early[0], early[1], results[2]))


# -- sites ------------------------------------------------------------------------------------------------------------

EACH_SITES = pytest.mark.parametrize(
    "sites",
    [(0, 0, 2, 2), (1, 1, 3, 3, 1, 3, 6), (0, 0, 0, 3, 4, 4, 4, 4), (0,) * 4],
    ids=["two of two", "three, one, three", "three, one, four", "all at one"],
)


@EACH_SEALING
@EACH_SITES
def test_members_at_sites_hold_what_they_would_without(
    kept_net: KeptNet, sites: tuple[int, ...], is_sealed: bool
) -> None:
    net = kept_net(len(sites), is_sealed)
    for lengths in ([10_007] * len(sites), [0, *(PIECE * 3 + member for member in range(1, len(sites)))]):
        payloads = payloads_of(lengths)
        assert all(torch.equal(result, torch.cat(payloads)) for result in gathered(net, payloads, sites=sites))


@EACH_SITES
def test_each_payload_crosses_once_into_each_other_site(kept_net: KeptNet, sites: tuple[int, ...]) -> None:
    world, far = len(sites), len(set(sites)) - 1
    payloads = payloads_of([3000 + PIECE * member for member in range(world)])
    net = kept_net(world, False)
    running, _ = gather_all(net, net.next_operation(), payloads, sites=sites)
    assert ends_of(list(running.values())) == [State.DONE] * world
    sent = [[t.sent_bytes for t in traffic_of(running[member], world)] for member in range(world)]
    for member in range(world):
        wide = [other for other in range(world) if sites[other] != sites[member]]
        assert sum(sent[member][other] for other in wide) == far * len(payloads[member])
        inside = sum(sent[other][member] for other in range(world) if other not in wide)
        assert inside + sum(sent[other][member] for other in wide) == sum(map(len, payloads)) - len(payloads[member])
        partners = {other for other in range(world) if sent[member][other] or sent[other][member]}
        assert partners == route_of(member, sites).partners(member, [len(payload) for payload in payloads])


@pytest.mark.parametrize(("nodes", "at_each"), [(8, 2), (8, 4), (6, 1)])
@pytest.mark.parametrize("method", ["demo", "sparseloco"])
def test_node_sends_over_the_wide_network_what_plan_foresees(
    kept_net: KeptNet, method: Method, nodes: int, at_each: int
) -> None:
    sites = tuple(member - member % at_each for member in range(nodes))
    job = Job(params=1e6, nodes=nodes, step_s=1.0, sites=len(set(sites)))
    forecast = next(f for f in forecasts(job, Link(1e6, 1e6, 0.01)) if f.method == method)
    net, payloads = kept_net(nodes, False), payloads_of([forecast.payload_bytes] * nodes)
    running, _ = gather_all(net, net.next_operation(), payloads, sites=sites)
    assert ends_of(list(running.values())) == [State.DONE] * nodes
    for member, one in running.items():
        wide = [t for other, t in enumerate(traffic_of(one, nodes)) if sites[other] != sites[member]]
        assert sum(t.sent_bytes for t in wide) == forecast.sent_bytes
        assert sum(t.received_bytes for t in wide) == forecast.received_bytes


def test_pieces_are_passed_on_as_they_come(make_net: MakeNet) -> None:
    net, payloads = make_net(3, beat_s=100.0), payloads_of([40 * PIECE, 0, 0])  # no beat has anything sent
    operation = net.next_operation()
    running, results = gather_all(net, operation, payloads, sites=(0, 1, 1), but=[0], allowed=0.5)
    sending, _ = gather_all(net, operation, payloads, sites=(0, 1, 1), but=[1, 2], allowed=0.5)
    until(lambda: running[2].traffic(1).received_bytes == 20 * PIECE)
    assert [one.wait(0) for one in (*running.values(), *sending.values())] == [State.RUNNING] * 3
    for one in (*running.values(), *sending.values()):
        one.allow(1.0)
    assert ends_of([*running.values(), *sending.values()]) == [State.DONE] * 3
    assert all(torch.equal(result, payloads[0]) for result in results[1:])


def test_what_is_passed_on_to_a_late_member_takes_no_memory_besides(make_net: MakeNet) -> None:
    net, payloads = make_net(4), payloads_of([4_000_000, 0, 0, 0])
    operation = net.next_operation()
    assert has_nothing_in_transit(net.engines[2])
    running, early = gather_all(net, operation, payloads, sites=(0, 0, 2, 2), but=[3])
    until(lambda: running[2].traffic(0).received_bytes == 4_000_000)
    assert net.engines[2].peak_bytes < 64 * PIECE
    late, results = gather_all(net, operation, payloads, sites=(0, 0, 2, 2), but=[0, 1, 2])
    assert ends_of([*running.values(), *late.values()]) == [State.DONE] * 4
    assert all(torch.equal(result, payloads[0]) for result in (*early[:3], results[3]))


def test_relay_that_is_lost_is_named_by_those_who_need_it_and_the_others_go_on_without_it(make_net: MakeNet) -> None:
    """Who needs nothing of it waits until it is told, and all gather again over the links that are left."""
    net, payloads = make_net(5), payloads_of([100_003] * 5)
    running, _ = gather_all(net, net.next_operation(), payloads, sites=(0, 0, 2, 2, 4), allowed=0.5)
    until(lambda: running[3].traffic(2).received_bytes > 0)
    net.engines[2].close()  # passes on to 3 what comes from 0 and 4
    assert ends_of([running[0], running[3], running[4]]) == [State.PEER_LOST] * 3
    assert [running[member].detail for member in (0, 3, 4)] == [2] * 3
    assert running[1].wait(0) == State.RUNNING
    for one in running.values():
        one.close()
    left = (0, 1, 3, 4)
    payloads = [payloads[member] for member in left]
    operation, lengths = net.next_operation(), [100_003] * 4
    results = [torch.zeros(4 * 100_003, dtype=torch.uint8) for _ in left]
    for place, member in enumerate(left):
        route = route_of(place, (0, 0, 2, 3))
        buffers = payloads[place], results[place]
        again = net.engines[member].gather(operation, lengths, place, left, route, *buffers, chunk_bytes=PIECE)
        net.started.append(again)
    assert ends_of(net.started[-4:]) == [State.DONE] * 4
    assert all(torch.equal(result, torch.cat(payloads)) for result in results)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"payload": torch.zeros(9, dtype=torch.uint8)}, "a gathering needs 10 contiguous bytes"),
        ({"result": torch.zeros(19, dtype=torch.uint8)}, "a gathering needs 20 contiguous bytes"),
        ({"payload": torch.zeros(10)}, "a gathering needs 10 contiguous bytes"),
        ({"chunk_bytes": 0}, "no gathering of"),
        ({"chunk_bytes": 1 << 30}, "no gathering of"),
        ({"route": Route((0, 2), frozenset({1}), frozenset())}, "no gathering of"),
        ({"route": Route((0, 0), frozenset({1}), frozenset())}, "no gathering of"),
        ({"route": Route((1, 1), frozenset({1}), frozenset())}, "no gathering of"),
        ({"route": Route((0, 1), frozenset({0, 1}), frozenset())}, "no gathering of"),
        ({"route": Route((0, 1), frozenset({1}), frozenset({0}))}, "no gathering of"),
    ],
    ids=[
        *("short payload", "short result", "values", "no piece", "large piece", "no such member"),
        *("from another one by itself", "its own from another one", "to itself", "near itself"),
    ],
)
def test_gathering_that_does_not_fit_is_refused(make_net: MakeNet, wrong: dict[str, object], said: str) -> None:
    net = make_net(2)
    buffers = {"payload": torch.zeros(10, dtype=torch.uint8), "result": torch.zeros(20, dtype=torch.uint8)}
    arguments = {**buffers, "chunk_bytes": 5, "route": route_of(0, (0, 1)), **wrong}
    with pytest.raises(ValueError, match=said):
        net.engines[0].gather(net.next_operation(), [10, 10], 0, [0, 1], **arguments)  # pyright: ignore


def test_pieces_are_many_and_neither_tiny_nor_huge() -> None:
    assert [piece_bytes(n) for n in (0, 1000, 1 << 20, 1 << 30)] == [1 << 14, 1 << 14, 1 << 16, 1 << 18]
