"""What a gathering gives: every member's bytes, in the order of the members; aborted, retried, or without a member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.unit.elastic.conftest import MakeNet, Net, ends_of, noise, split_into, until
from torch import Tensor

from zeroband.elastic.transport.engine import Operation, Running, State, Traffic
from zeroband.elastic.transport.shape import piece_bytes
from zeroband.kernels.codec import CODECS

KeptNet = Callable[[int, bool], Net]
EACH_SEALING = pytest.mark.parametrize("is_sealed", [False, True], ids=["open", "sealed"])
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
            payloads[member],
            results[member],
            receiver=receiver,
            chunk_bytes=PIECE,
            allowed=allowed,
        )
    net.started += running.values()
    return running, results


def gathered(net: Net, payloads: Sequence[Tensor], *, receiver: int | None = None) -> list[Tensor]:
    """One gathering from start to end."""
    running, results = gather_all(net, net.next_operation(), payloads, receiver=receiver)
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


def test_gathering_and_reduction_of_one_opening_go_on_beside_each_other(make_net: MakeNet) -> None:
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"payload": torch.zeros(9, dtype=torch.uint8)}, "a gathering needs 10 contiguous bytes"),
        ({"result": torch.zeros(19, dtype=torch.uint8)}, "a gathering needs 20 contiguous bytes"),
        ({"payload": torch.zeros(10)}, "a gathering needs 10 contiguous bytes"),
        ({"chunk_bytes": 0}, "no gathering of"),
        ({"chunk_bytes": 1 << 30}, "no gathering of"),
        ({"receiver": 2}, "no gathering of"),
    ],
    ids=["short payload", "short result", "values", "no piece", "large piece", "no such member"],
)
def test_gathering_that_does_not_fit_is_refused(make_net: MakeNet, wrong: dict[str, object], said: str) -> None:
    net = make_net(2)
    buffers = {"payload": torch.zeros(10, dtype=torch.uint8), "result": torch.zeros(20, dtype=torch.uint8)}
    arguments = {**buffers, "chunk_bytes": 5, "receiver": None, **wrong}
    with pytest.raises(ValueError, match=said):
        net.engines[0].gather(net.next_operation(), [10, 10], 0, [0, 1], **arguments)  # pyright: ignore


def test_pieces_are_many_and_neither_tiny_nor_huge() -> None:
    assert [piece_bytes(n) for n in (0, 1000, 1 << 20, 1 << 30)] == [1 << 14, 1 << 14, 1 << 16, 1 << 18]
