"""Reductions that are aborted, retried, begun late, or lose a member."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.unit.elastic.conftest import (
    DEADLINE_S,
    EACH_SEALING,
    EACH_SHAPE,
    MakeNet,
    Net,
    ends_of,
    has_nothing_in_transit,
    noise,
    split_into,
    tcp_pair,
    until,
)
from torch import Tensor

from zeroband.elastic.transport.engine import Running, State
from zeroband.elastic.transport.handshake import NO_KEYS
from zeroband.elastic.transport.shape import Shape
from zeroband.kernels.codec import CODECS, Codec

N = 20_011
INT8, FP32 = CODECS["int8"], CODECS["fp32"]


def shape_for(world: int, *, is_ring: bool) -> Shape:
    return split_into(N, INT8, [1] * world, is_ring=is_ring)


def sources_for(world: int, *, seed: int = 0) -> list[Tensor]:
    return [noise(N, seed=seed + member) for member in range(world)]


def has_sent(reduction: Running, world: int) -> bool:
    return sum(reduction.traffic(member).sent_bytes for member in range(world)) > 0


def assert_works(net: Net, *, is_ring: bool) -> None:
    """Its links carry a reduction of all members, exactly as fresh ones do."""
    sources, shape = sources_for(net.world, seed=50), shape_for(net.world, is_ring=is_ring)
    fresh = Net(net.world)
    expected = fresh.mean(shape, sources)[0]
    fresh.close()
    assert all(torch.equal(result, expected) for result in net.mean(shape, sources))


@EACH_SHAPE
def test_abort_from_another_thread_ends_the_wait(make_net: MakeNet, is_ring: bool) -> None:
    net = make_net(2)
    source, result = noise(N), torch.zeros(N)
    reduction = net.operate(net.next_operation(), shape_for(2, is_ring=is_ring), 0, source, result)
    ends: list[State] = []
    waiting = threading.Thread(target=lambda: ends.append(reduction.wait(DEADLINE_S)))
    waiting.start()
    reduction.close()
    waiting.join(DEADLINE_S)
    assert ends == [State.ABORTED]


def test_wait_ends_when_its_time_is_over(make_net: MakeNet) -> None:
    net = make_net(2)
    reduction = net.operate(net.next_operation(), shape_for(2, is_ring=False), 0, noise(N), torch.zeros(N))
    assert [reduction.wait(0), reduction.wait(0.01)] == [State.RUNNING] * 2


@EACH_SEALING
@EACH_SHAPE
def test_nothing_is_written_after_an_abort(make_net: MakeNet, is_ring: bool, is_sealed: bool) -> None:
    """Frames of the others arrive all the same: all of them have when a later operation over the same links is done."""
    net, shape, sources = make_net(3, is_sealed=is_sealed), shape_for(3, is_ring=is_ring), sources_for(3)
    operation = net.next_operation()
    reductions, results = net.operate_all(operation, shape, sources, but=[2])
    until(lambda: has_sent(reductions[1], 3))
    reductions[0].close()
    results[0].fill_(7.0)
    net.operate(operation, shape, 2, sources[2], results[2])
    until(lambda: has_sent(net.started[-1], 3))
    for reduction in net.started:
        reduction.close()
    assert_works(net, is_ring=is_ring)
    assert torch.equal(results[0], torch.full((N,), 7.0))


@pytest.mark.parametrize("attempt", range(3))
def test_abort_waits_for_what_is_being_written(make_net: MakeNet, attempt: int) -> None:
    """It comes when a frame of megabytes is decoded, which takes a while in memory that was never touched.

    On a busy machine it may come too late to show anything; hence the attempts.
    """
    net, numel = make_net(2), 1 << 22
    shape = split_into(numel, FP32, [1, 1], is_ring=False, chunk_numel=1 << 21)
    source, results = torch.ones(numel), [torch.empty(numel) for _ in range(2)]
    operation = net.next_operation()
    reductions = [net.operate(operation, shape, member, source, results[member]) for member in range(2)]
    expected = reductions[0].traffic(1).to_receive_bytes
    while reductions[0].traffic(1).received_bytes < expected:
        pass
    reductions[0].close()
    results[0][-1] = 7.0
    reductions[1].close()
    assert_works(net, is_ring=False)
    assert results[0][-1] == 7.0


@EACH_SEALING
@EACH_SHAPE
def test_retry_goes_over_the_same_links_and_frames_of_the_old_plan_do_not_count(
    make_net: MakeNet, is_ring: bool, is_sealed: bool
) -> None:
    net, shape = make_net(3, is_sealed=is_sealed), shape_for(3, is_ring=is_ring)
    for seed in (0, 10):
        reductions, _ = net.operate_all(net.next_operation(), shape, sources_for(3, seed=seed), but=[2])
        until(lambda reductions=reductions: has_sent(reductions[0], 3))
        for reduction in reductions:
            reduction.close()
        assert [reduction.wait(0) for reduction in reductions] == [State.ABORTED] * 2
    assert_works(net, is_ring=is_ring)


@EACH_SHAPE
def test_member_that_still_runs_the_old_plan_is_waited_for(make_net: MakeNet, is_ring: bool) -> None:
    net, shape, sources = make_net(3), shape_for(3, is_ring=is_ring), sources_for(3)
    expected = net.mean(shape, sources)[0]
    old, new = net.next_operation(), net.next_operation()
    stale, _ = net.operate_all(old, shape, sources_for(3, seed=20), but=[0])
    reductions, results = net.operate_all(new, shape, sources, but=[1, 2])
    until(lambda: has_sent(reductions[0], 3))
    assert [reduction.wait(0) for reduction in stale] == [State.RUNNING] * 2
    for member, reduction in zip((1, 2), stale, strict=True):
        reduction.close()
        reductions.append(net.operate(new, shape, member, sources[member], results[member]))
    assert ends_of(reductions) == [State.DONE] * 3
    assert all(torch.equal(result, expected) for result in results)


@EACH_SEALING
@EACH_SHAPE
@pytest.mark.parametrize("is_first", [True, False], ids=["its first", "a later one"])
def test_member_that_starts_after_the_others_gets_the_right_result(
    make_net: MakeNet, is_first: bool, is_ring: bool, is_sealed: bool
) -> None:
    """What the others sent meanwhile is held."""
    net, shape, sources = make_net(4, is_sealed=is_sealed), shape_for(4, is_ring=is_ring), sources_for(4)
    reference = net if not is_first else make_net(4)
    expected = reference.mean(shape, sources)[0]
    until(lambda: has_nothing_in_transit(net.engines[2]))
    operation = net.next_operation()
    reductions, results = net.operate_all(operation, shape, sources, but=[2])
    until(lambda: all(has_sent(reduction, 4) for reduction in reductions))
    assert net.engines[2].peak_bytes == 0, "in the kernel's buffers, not in ours"
    reductions.append(net.operate(operation, shape, 2, sources[2], results[2]))
    assert ends_of(reductions) == [State.DONE] * 4
    assert all(torch.equal(result, expected) for result in results)


@EACH_SHAPE
@pytest.mark.parametrize("how", ["the link", "the node"])
def test_member_whose_link_breaks_is_named(make_net: MakeNet, how: str, is_ring: bool) -> None:
    net, shape, sources = make_net(3), shape_for(3, is_ring=is_ring), sources_for(3)
    reductions, _ = net.operate_all(net.next_operation(), shape, sources, but=[2])
    until(lambda: has_sent(reductions[0], 3))
    if how == "the link":
        net.engines[2].drop(0)
        net.engines[2].drop(1)
    else:
        net.engines[2].close()
    assert ends_of(reductions) == [State.PEER_LOST] * 2
    assert [reduction.detail for reduction in reductions] == [2, 2]
    assert net.engines[0].state(1).is_up, "the others still have each other"


@EACH_SHAPE
def test_link_that_this_node_drops_ends_what_needs_it(make_net: MakeNet, is_ring: bool) -> None:
    """A new session of the other member replaces it, perhaps before the end of the old one was read."""
    net = make_net(2)
    reduction = net.operate(
        net.next_operation(), shape_for(2, is_ring=is_ring), 0, noise(N), torch.full((N,), float("nan"))
    )
    net.engines[0].drop(1)
    assert (reduction.wait(0.2), reduction.detail) == (State.PEER_LOST, 1)


def test_reduction_without_a_link_is_lost_from_the_start(make_net: MakeNet) -> None:
    net = make_net(3)
    net.engines[0].drop(2)
    reductions, _ = net.operate_all(net.next_operation(), shape_for(3, is_ring=False), sources_for(3), but=[1, 2])
    assert (reductions[0].wait(DEADLINE_S), reductions[0].detail) == (State.PEER_LOST, 2)


def test_lost_stream_takes_its_link_with_it(make_net: MakeNet) -> None:
    net, (ours, theirs) = make_net(2, streams=2), tcp_pair()
    net.engines[0].add_stream(1, ours, NO_KEYS)
    reductions, _ = net.operate_all(net.next_operation(), shape_for(2, is_ring=False), sources_for(2), but=[1])
    theirs.close()
    assert (reductions[0].wait(DEADLINE_S), reductions[0].detail) == (State.PEER_LOST, 1)
    assert net.engines[0].state(1).is_up is False


def test_link_that_lost_a_stream_hangs_up_on_the_others_and_takes_no_more(make_net: MakeNet) -> None:
    """So its other end loses it too, and neither waits for a link that is up on one side only."""
    net, (ours, theirs) = make_net(2, streams=2), tcp_pair()
    net.engines[0].add_stream(1, ours, NO_KEYS)
    theirs.close()
    until(lambda: not net.engines[1].state(0).is_up)
    late, theirs = tcp_pair()
    net.engines[0].add_stream(1, late, NO_KEYS)
    with theirs:
        assert theirs.recv(1) == b""
    assert net.engines[0].state(1).is_up is False


def test_ring_goes_on_without_a_link_that_it_does_not_use(make_net: MakeNet) -> None:
    net, shape, sources = make_net(4), shape_for(4, is_ring=True), sources_for(4)
    expected = net.mean(shape, sources)[0]
    operation = net.next_operation()
    reductions, results = net.operate_all(operation, shape, sources, but=[3])
    net.engines[0].drop(2)
    until(lambda: not net.engines[2].state(0).is_up)
    assert [reduction.wait(0) for reduction in reductions] == [State.RUNNING] * 3
    reductions.append(net.operate(operation, shape, 3, sources[3], results[3]))
    assert ends_of(reductions) == [State.DONE] * 4
    assert all(torch.equal(result, expected) for result in results)


@EACH_SEALING
@EACH_SHAPE
def test_member_that_leaves_when_it_is_done_is_lost_to_nobody(
    make_net: MakeNet, is_ring: bool, is_sealed: bool
) -> None:
    """What it sent last is on the way while it hangs up."""
    net, shape, sources = make_net(3, is_sealed=is_sealed), shape_for(3, is_ring=is_ring), sources_for(3)
    reductions, results = net.operate_all(net.next_operation(), shape, sources)
    assert reductions[0].wait(DEADLINE_S) == State.DONE
    net.engines[0].drop(1)
    net.engines[0].drop(2)
    assert ends_of(reductions) == [State.DONE] * 3
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_end_of_a_reduction_stays_as_it_was(make_net: MakeNet) -> None:
    net, shape, sources = make_net(2), shape_for(2, is_ring=False), sources_for(2)
    reductions, _ = net.operate_all(net.next_operation(), shape, sources)
    assert ends_of(reductions) == [State.DONE] * 2
    net.engines[1].drop(0)
    until(lambda: not net.engines[0].state(1).is_up)
    reductions[0].close()
    assert reductions[0].wait(0) == State.DONE
    reductions[0].close()
    reductions[0].close()


@EACH_SHAPE
def test_closed_engine_and_its_operations_can_be_asked(make_net: MakeNet, is_ring: bool) -> None:
    """By threads that do not know of it yet."""
    net, shape, sources = make_net(2), shape_for(2, is_ring=is_ring), sources_for(2)
    (reduction,), _ = net.operate_all(net.next_operation(), shape, sources, but=[1])
    until(lambda: has_sent(reduction, 2))
    net.engines[0].close()
    assert (reduction.wait(0), has_sent(reduction, 2)) == (State.ABORTED, True)
    (late,), _ = net.operate_all(net.next_operation(), shape, sources, but=[1])
    late.allow(1.0)
    assert (late.wait(0), net.engines[0].state(1).is_up) == (State.PEER_LOST, False)
    ours, theirs = tcp_pair()
    net.engines[0].add_stream(1, ours, NO_KEYS)
    with theirs:
        assert theirs.recv(1) == b""


@EACH_SHAPE
@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("index", [0, 1, N // 2, N - 1])
def test_value_that_is_not_finite_ends_the_reduction_of_its_member_with_its_index(
    make_net: MakeNet, index: int, codec: Codec, is_ring: bool
) -> None:
    net, sources = make_net(3), sources_for(3)
    sources[1][index] = float("nan")
    shape = split_into(N, codec, [1, 1, 1], is_ring=is_ring)
    reductions, _ = net.operate_all(net.next_operation(), shape, sources)
    assert (reductions[1].wait(DEADLINE_S), reductions[1].detail) == (State.NOT_FINITE, index)
    for reduction in reductions:
        reduction.close()
    assert [reductions[0].wait(0), reductions[2].wait(0)] == [State.ABORTED] * 2
    assert_works(net, is_ring=is_ring)
