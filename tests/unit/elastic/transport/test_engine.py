"""What a reduction gives: the same bits on all members, near the true mean, whatever the codec and the shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from select import select
from socket import SOL_SOCKET

import pytest
import torch
from tests.unit.elastic.conftest import (
    DEADLINE_S,
    EACH_CODEC,
    EACH_SEALING,
    EACH_SHAPE,
    KeptNet,
    MakeNet,
    Net,
    ends_of,
    has_nothing_in_transit,
    make_silent,
    noise,
    split_into,
    tcp_pair,
    until,
)
from torch import Tensor

from zeroband.elastic.transport.engine import Encoded, Engine, State
from zeroband.elastic.transport.handshake import NO_KEYS
from zeroband.elastic.transport.shape import Shape, shape_of
from zeroband.kernels.codec import CODECS, Codec

INT8 = CODECS["int8"]
FP32 = CODECS["fp32"]
SO_MAX_PACING_RATE = 47
"""Of Linux; `socket` does not have it."""

EACH_WORLD = pytest.mark.parametrize("world", [2, 3, 4, 5, 9])


def true_mean(sources: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """In float64."""
    total = sum(weights)
    return sum(
        (source.double() * (weight / total) for source, weight in zip(sources, weights, strict=True) if weight),
        torch.zeros(sources[0].numel(), dtype=torch.float64),
    )


def bound_of(codec: Codec, sources: Sequence[Tensor], weights: Sequence[int], *, is_ring: bool) -> Tensor:
    """How far a value of the result may be from the true mean, as the codec's own bound says.

    All-to-all: every contribution is encoded once, and the mean once more. Ring: a partial sum, which is nowhere
    larger than the sum of all absolute values, is encoded by every member and once more as the mean.
    """
    total = sum(weights)
    shares = [
        (source.double().abs(), weight / total) for source, weight in zip(sources, weights, strict=True) if weight
    ]
    largest = sum((x * share for x, share in shares), torch.zeros(sources[0].numel(), dtype=torch.float64))
    if is_ring:
        error = torch.zeros_like(largest)
        for _ in sources:
            error = error + codec.error_bound((largest + error).float())
        return error + 1e-6 * largest
    error = sum((share * codec.error_bound(x.float()) for x, share in shares), torch.zeros_like(largest))
    return error + codec.error_bound((true_mean(sources, weights).abs() + error).float()) + 1e-6 * largest


def assert_all_hold_the_mean(
    net: Net, codec: Codec, numel: int, weights: Sequence[int], *, is_ring: bool
) -> list[Tensor]:
    sources = [noise(numel, seed=member) for member in range(net.world)]
    results = net.mean(split_into(numel, codec, weights, is_ring=is_ring), sources)
    for result in results[1:]:
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32)), "members hold different bits"
    off = (results[0].double() - true_mean(sources, weights)).abs()
    assert bool((off <= bound_of(codec, sources, weights, is_ring=is_ring)).all())
    return results


@EACH_SEALING
@EACH_SHAPE
@EACH_CODEC
@EACH_WORLD
def test_all_members_hold_the_same_bits_within_the_error_of_the_codec(
    kept_net: KeptNet, world: int, codec: Codec, is_ring: bool, is_sealed: bool
) -> None:
    for numel in (1, world - 1, 257, 10007):
        assert_all_hold_the_mean(kept_net(world, is_sealed), codec, numel, [1] * world, is_ring=is_ring)


@EACH_SHAPE
@EACH_CODEC
@pytest.mark.parametrize(
    "weights", [(0, 1), (5, 1), (0, 0, 7), (0, 3, 1), (3, 0, 1, 0), (1, 2, 3, 4), (0, 0, 9, 0, 1)], ids=str
)
def test_members_count_by_their_weight(
    kept_net: KeptNet, weights: tuple[int, ...], codec: Codec, is_ring: bool
) -> None:
    assert_all_hold_the_mean(kept_net(len(weights), False), codec, 2999, weights, is_ring=is_ring)


@EACH_SHAPE
def test_float32_gives_the_mean_that_torch_gives(kept_net: KeptNet, is_ring: bool) -> None:
    sources = [noise(5003, seed=member) for member in range(4)]
    results = kept_net(4, False).mean(split_into(5003, FP32, [1, 2, 3, 4], is_ring=is_ring), sources)
    expected = sum(share * source for share, source in zip((0.1, 0.2, 0.3, 0.4), sources, strict=True))
    assert torch.allclose(results[0], expected, rtol=1e-5, atol=1e-6)


@EACH_SHAPE
def test_shares_need_not_add_up_to_one(kept_net: KeptNet, is_ring: bool) -> None:
    """As those of a round do where a joiner has trained less than the others what it contributes."""
    sources = [noise(5003, seed=member) for member in range(3)]
    shape = replace(shape_of(5003, FP32, (0.5, 0.5, 0.25)), is_ring=is_ring, chunk_numel=512)
    results = kept_net(3, False).mean(shape, sources)
    expected = 0.5 * sources[0] + 0.5 * sources[1] + 0.25 * sources[2]
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.allclose(results[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 5, 9])
@pytest.mark.parametrize(("is_ring", "most"), [(False, 0.011), (True, 0.02)], ids=["all-to-all", "ring"])
def test_int8_is_off_by_a_percent_for_gaussian_values(
    kept_net: KeptNet, world: int, is_ring: bool, most: float
) -> None:
    """In a ring partial sums are encoded again and again, so more members make it worse."""
    sources = [noise(100_003, seed=member) for member in range(world)]
    mean = true_mean(sources, [1] * world)
    result = kept_net(world, False).mean(
        split_into(100_003, INT8, [1] * world, is_ring=is_ring, chunk_numel=4096), sources
    )[0]
    assert float((result.double() - mean).norm() / mean.norm()) < most


@EACH_SHAPE
@EACH_CODEC
def test_member_without_weight_may_hold_anything(kept_net: KeptNet, codec: Codec, is_ring: bool) -> None:
    net, sources = kept_net(3, False), [noise(2999, seed=member) for member in range(3)]
    shape = split_into(2999, codec, [2, 0, 1], is_ring=is_ring)
    expected = net.mean(shape, [sources[0], torch.zeros(2999), sources[2]])
    for anything in (float("nan"), float("inf")):
        results = net.mean(shape, [sources[0], torch.full((2999,), anything), sources[2]])
        assert all(torch.equal(result, expected[0]) for result in results)


@EACH_SHAPE
@EACH_CODEC
def test_mean_of_members_without_weight_is_zero(kept_net: KeptNet, codec: Codec, is_ring: bool) -> None:
    sources = [torch.full((2999,), float("nan"))] * 3
    results = kept_net(3, False).mean(split_into(2999, codec, [0, 0, 0], is_ring=is_ring), sources)
    assert all(torch.equal(result, torch.zeros(2999)) for result in results)


@EACH_SHAPE
def test_contributions_are_only_read(kept_net: KeptNet, is_ring: bool) -> None:
    sources = [noise(5003, seed=member) for member in range(3)]
    kept_net(3, True).mean(split_into(5003, INT8, [1, 2, 3], is_ring=is_ring), sources)
    assert all(torch.equal(source, noise(5003, seed=member)) for member, source in enumerate(sources))


@EACH_SEALING
@EACH_SHAPE
def test_several_streams_carry_one_reduction(make_net: MakeNet, is_ring: bool, is_sealed: bool) -> None:
    """Frames overtake one another on them."""
    net = make_net(3, is_sealed=is_sealed, streams=4)
    assert [net.engines[0].state(member).streams for member in (1, 2)] == [4, 4]
    for numel in (1, 50_021):
        assert_all_hold_the_mean(net, INT8, numel, [1, 2, 3], is_ring=is_ring)


def test_as_many_streams_send_as_are_told_to(make_net: MakeNet) -> None:
    net, far_ends = make_net(2, streams=0), [tcp_pair() for _ in range(4)]
    engine = net.engines[0]
    for ours, _ in far_ends:
        engine.add_stream(1, ours, NO_KEYS)
    shape = split_into(2 * 80 * 512, INT8, [1, 1], is_ring=False)  # 80 frames for the other member, 16 in one turn
    source = noise(shape.bounds[-1])

    def senders_when(told: int) -> int:
        engine.set_senders(1, told)
        running = net.operate(net.next_operation(), shape, 0, source, torch.empty_like(source))
        until(lambda: running.traffic(1).sent_bytes == INT8.encoded_size(80 * 512))
        running.close()
        return sum(bool(select([theirs], [], [], 0)[0]) and len(theirs.recv(1 << 20)) > 0 for _, theirs in far_ends)

    try:
        assert [senders_when(told) for told in (1, 3, 8)] == [1, 3, 4]
    finally:
        for _, theirs in far_ends:
            theirs.close()


def test_streams_that_may_send_now_begin_at_once(make_net: MakeNet) -> None:
    source, result = noise(1 << 24), torch.empty(1 << 24)  # before there are streams, which soon show that they live
    net, far_ends = make_net(2, streams=0), [tcp_pair() for _ in range(2)]
    engine = net.engines[0]
    for ours, _ in far_ends:
        engine.add_stream(1, ours, NO_KEYS)
    engine.set_senders(1, 1)
    shape = split_into(1 << 24, FP32, [1, 1], is_ring=False)  # more than a connection holds that nobody reads
    net.operate(net.next_operation(), shape, 0, source, result)
    readable = lambda: select([theirs for _, theirs in far_ends], [], [], DEADLINE_S)[0]  # noqa: E731
    assert len(readable()) == 1
    engine.set_senders(1, 2)
    until(lambda: len(readable()) == 2)
    for _, theirs in far_ends:
        theirs.close()


def test_streams_of_a_link_are_paced_until_they_are_told_otherwise(make_net: MakeNet) -> None:
    net, far_ends = make_net(2, streams=0), [tcp_pair() for _ in range(2)]
    engine = net.engines[0]
    seen = [ours.dup() for ours, _ in far_ends]
    for ours, _ in far_ends:
        engine.add_stream(1, ours, NO_KEYS)

    def limits() -> set[int]:
        return {int.from_bytes(end.getsockopt(SOL_SOCKET, SO_MAX_PACING_RATE, 8), "little") for end in seen}

    engine.set_pace(1, 112_000)
    engine.set_pace(7, 1)  # a link that there is not
    assert limits() == {112_000}
    engine.set_pace(1, 0)
    assert limits() == {(1 << 64) - 1}
    for end in (*seen, *(theirs for _, theirs in far_ends)):
        end.close()


@EACH_SHAPE
def test_two_operations_on_different_lanes_go_on_at_the_same_time(kept_net: KeptNet, is_ring: bool) -> None:
    """Both wait for a member."""
    net = kept_net(3, True)
    sources = [[noise(5003, seed=10 * lane + member) for member in range(3)] for lane in (0, 1)]
    shapes = [split_into(5003, codec, [1, 1, 1], is_ring=is_ring) for codec in (FP32, INT8)]
    expected = [net.mean(shape, values)[0] for shape, values in zip(shapes, sources, strict=True)]
    first = net.next_operation()
    waiting, late_results = net.operate_all(first, shapes[0], sources[0], but=[2])
    others, results = net.operate_all(replace(first, lane=1), shapes[1], sources[1], but=[2])
    waiting.append(net.operate(first, shapes[0], 2, sources[0][2], late_results[2]))
    others.append(net.operate(replace(first, lane=1), shapes[1], 2, sources[1][2], results[2]))
    assert ends_of([*others, *waiting]) == [State.DONE] * 6
    assert all(torch.equal(result, expected[0]) for result in late_results)
    assert all(torch.equal(result, expected[1]) for result in results)


@EACH_SHAPE
def test_traffic_is_what_the_shape_needs(kept_net: KeptNet, is_ring: bool) -> None:
    """Everybody sends all shards but one on, or to their owners, and as many means."""
    world, numel = 4, 4 * 2048
    net = kept_net(world, False)
    sources = [noise(numel, seed=member) for member in range(world)]
    reductions, _ = net.operate_all(
        net.next_operation(), split_into(numel, INT8, [1] * world, is_ring=is_ring), sources
    )
    assert ends_of(reductions) == [State.DONE] * 4
    traffic = [[reductions[a].traffic(b) for b in range(world)] for a in range(world)]
    for a in range(world):
        assert sum(t.sent_bytes for t in traffic[a]) == 2 * (world - 1) * INT8.encoded_size(numel // world)
        for b in range(world):
            there = traffic[a][b]
            assert there.sent_bytes == there.to_send_bytes == traffic[b][a].received_bytes
            assert there.received_bytes == there.to_receive_bytes
            assert (there.silent_s is None) == (there.received_bytes == 0)


def test_frames_in_transit_take_less_than_two_bytes_a_parameter(make_net: MakeNet) -> None:
    net, numel = make_net(4), 400_009
    sources = [noise(numel, seed=member) for member in range(4)]
    shape = split_into(numel, INT8, [1] * 4, is_ring=False, chunk_numel=4096)
    operation = net.next_operation()
    reductions, results = net.operate_all(operation, shape, sources, but=[3])
    until(lambda: all(r.traffic(3).sent_bytes > 0 for r in reductions))  # the others are done with each other
    reductions.append(net.operate(operation, shape, 3, sources[3], results[3]))
    assert ends_of(reductions) == [State.DONE] * 4
    for engine in net.engines:
        assert 0.1 * numel < engine.peak_bytes < 2 * numel
        until(partial(has_nothing_in_transit, engine))


@EACH_SHAPE
def test_no_more_is_sent_than_is_allowed(kept_net: KeptNet, is_ring: bool) -> None:
    net, sources = kept_net(3, False), [noise(20_011, seed=member) for member in range(3)]
    shape = split_into(20_011, INT8, [1, 2, 3], is_ring=is_ring)
    expected, operation = net.mean(shape, sources)[0], net.next_operation()
    results = [torch.full_like(source, float("nan")) for source in sources]
    reductions = [
        net.operate(operation, shape, member, sources[member], results[member], allowed=float(member != 0))
        for member in range(3)
    ]
    for allowed in (0.0, 0.1, 0.25):
        reductions[0].allow(allowed)
        until(reductions[0].is_held)
        traffic = [reductions[0].traffic(member) for member in (1, 2)]
        share = sum(t.sent_bytes for t in traffic) / sum(t.to_send_bytes for t in traffic)
        assert allowed - 0.05 < share < allowed + 0.05
        assert reductions[0].wait(0) == State.RUNNING
    reductions[0].allow(1.0)
    assert ends_of(reductions) == [State.DONE] * 3
    assert all(torch.equal(result, expected) for result in results)


def test_reduction_of_nothing_is_done_at_once(kept_net: KeptNet) -> None:
    assert [
        result.numel()
        for result in kept_net(2, False).mean(
            split_into(0, INT8, [1, 1], is_ring=False), [torch.empty(0), torch.empty(0)]
        )
    ] == [0, 0]


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(99), torch.zeros(101), torch.zeros(100, dtype=torch.float64), torch.zeros(200)[::2]],
    ids=["too short", "too long", "float64", "with gaps"],
)
@pytest.mark.parametrize("which", ["source", "result"])
def test_buffer_that_does_not_fit_the_shape_is_refused(make_net: MakeNet, wrong: Tensor, which: str) -> None:
    net, shape = make_net(2), split_into(100, FP32, [1, 1], is_ring=False)
    buffers = {"source": torch.zeros(100), "result": torch.zeros(100), which: wrong}
    with pytest.raises(ValueError, match="100 contiguous float32 values"):
        net.operate(net.next_operation(), shape, 0, buffers["source"], buffers["result"])


@pytest.mark.parametrize("chunk_numel", [0, 1 << 30])
def test_shape_that_no_reduction_has_is_refused(make_net: MakeNet, chunk_numel: int) -> None:
    net = make_net(2)
    shape = Shape(FP32, (0, 50, 100), (0.5, 0.5), (0, 1), False, chunk_numel, chain=(0, 1))
    with pytest.raises(ValueError, match="no reduction has this shape"):
        net.operate(net.next_operation(), shape, 0, torch.zeros(100), torch.zeros(100))


def test_link_is_up_while_its_streams_are(make_net: MakeNet) -> None:
    net = make_net(2, streams=2)
    engine = net.engines[0]
    assert (engine.state(1).is_up, engine.state(1).streams) == (True, 2)
    assert engine.state(2).is_up is False
    net.engines[1].drop(0)
    until(lambda: not engine.state(1).is_up)
    engine.drop(1)
    assert (engine.state(1).is_up, engine.state(1).streams) == (False, 0)


def test_machine_that_does_not_acknowledge_is_told_from_one_whose_process_does_not_read(make_net: MakeNet) -> None:
    net, far = make_net(1), [tcp_pair() for _ in range(2)]
    (engine,) = net.engines
    make_silent(*far[1])
    for link, (ours, _) in enumerate(far, start=1):
        engine.add_stream(link, ours, NO_KEYS)
    shape, result = split_into(300, FP32, [1, 1, 1], is_ring=False), torch.zeros(300)
    net.started.append(engine.start(net.next_operation(), shape, 0, range(3), noise(300), result))
    until(lambda: engine.state(2).unanswered_s > 0.1)
    assert engine.state(1).unanswered_s == 0
    until(lambda: engine.state(2).resent_packets > 0)
    assert engine.state(2).sent_packets > engine.state(1).sent_packets > 0
    assert (engine.state(1).resent_packets, engine.state(1).window) == (0, 0) and engine.state(2).window > 0
    for _, theirs in far:
        theirs.close()


def test_closed_engine_hangs_up() -> None:
    engine, (ours, theirs) = Engine(2), tcp_pair()
    engine.add_stream(1, ours, NO_KEYS)
    engine.close()
    engine.close()
    with theirs:
        assert theirs.recv(1) == b""


# -- sites ------------------------------------------------------------------------------------------------------------

EACH_SITES = pytest.mark.parametrize(
    ("sites", "weights"),
    [
        ((0, 0, 2, 2, 4, 4, 6, 6), (1, 1, 1, 1, 1, 1, 1, 1)),
        ((2, 2, 2, 3, 5, 5), (1, 2, 3, 4, 5, 6)),
        ((3, 1, 3, 3, 3), (2, 1, 0, 0, 1)),
        ((1, 1, 2, 2), (3, 1, 0, 0)),
        ((0, 0, 2), (0, 5, 1)),
    ],
    ids=str,
)


def at_sites(codec: Codec, sites: Sequence[int], weights: Sequence[int], *, is_ring: bool, numel: int = 5003) -> Shape:
    shares = [weight / sum(weights) for weight in weights]
    return replace(shape_of(numel, codec, shares, sites=sites), is_ring=is_ring, chunk_numel=512)


def means_of_sites(
    sources: Sequence[Tensor], sites: Sequence[int], weights: Sequence[int]
) -> tuple[list[Tensor], list[int]]:
    """Mean and weight of each site, in float64."""
    means, sums = list[Tensor](), list[int]()
    for speaker in sorted(set(sites)):
        own = [weight if site == speaker else 0 for site, weight in zip(sites, weights, strict=True)]
        sums.append(sum(own))
        means.append(true_mean(sources, own) if sum(own) else torch.zeros(sources[0].numel(), dtype=torch.float64))
    return means, sums


@EACH_SEALING
@EACH_SHAPE
@EACH_CODEC
@EACH_SITES
def test_members_at_sites_hold_the_same_bits_and_only_what_sites_send_is_encoded(
    kept_net: KeptNet, sites: tuple[int, ...], weights: tuple[int, ...], codec: Codec, is_ring: bool, is_sealed: bool
) -> None:
    sources = [noise(5003, seed=member) for member in range(len(sites))]
    results = kept_net(len(sites), is_sealed).mean(at_sites(codec, sites, weights, is_ring=is_ring), sources)
    for result in results[1:]:
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32)), "members hold different bits"
    means, sums = means_of_sites(sources, sites, weights)
    off = (results[0].double() - true_mean(sources, weights)).abs()
    assert bool((off <= bound_of(codec, means, sums, is_ring=is_ring) + 1e-6).all())


@EACH_SHAPE
@EACH_SITES
def test_what_encoding_took_from_sites_comes_back_to_those_who_speak(
    kept_net: KeptNet, sites: tuple[int, ...], weights: tuple[int, ...], is_ring: bool
) -> None:
    net, codec = kept_net(len(sites), False), CODECS["int4"]
    sources = [noise(5003, seed=member) for member in range(len(sites))]
    errors = [torch.zeros(5003) for _ in sources]
    shape, results = at_sites(codec, sites, weights, is_ring=is_ring), [torch.empty(5003) for _ in sources]
    operation = net.next_operation()
    running = [net.operate(operation, shape, m, sources[m], results[m], errors=errors[m]) for m in range(len(sites))]
    assert ends_of(running) == [State.DONE] * len(sites)
    taken = sum(share * error.double() for share, error in zip(shape.shares, errors, strict=True))
    for member, (site, weight) in enumerate(zip(sites, weights, strict=True)):
        assert member == site or not weight or not errors[member].any()
    if all(weights[site] for site in sites) or not is_ring:
        missing = (results[0].double() + taken - true_mean(sources, weights)).abs()
        silent = [site for site in set(sites) if not weights[site]]  # they cannot keep what their encodings took
        assert bool(silent) or float(missing.max()) < 1e-5


@EACH_SHAPE
def test_wide_traffic_of_sites_is_that_of_as_many_nodes(kept_net: KeptNet, is_ring: bool) -> None:
    """What moves inside: float32 to the speaker, and the mean as it came back."""
    sites, numel = (0, 0, 2, 2, 4, 4, 6, 6), 4 * 2048
    shape = at_sites(INT8, sites, [1] * 8, is_ring=is_ring, numel=numel)
    net, sources = kept_net(8, False), [noise(numel, seed=member) for member in range(8)]
    running, _ = net.operate_all(net.next_operation(), shape, sources)
    assert ends_of(running) == [State.DONE] * 8
    sent = [[running[a].traffic(b).sent_bytes for b in range(8)] for a in range(8)]
    wide = sum(sent[a][b] for a in range(8) for b in range(8) if sites[a] != sites[b])
    assert wide == 4 * 2 * 3 * INT8.encoded_size(numel // 4)
    assert [sent[m][m - 1] for m in (1, 3, 5, 7)] == [4 * numel] * 4
    assert [sent[m][m + 1] for m in (0, 2, 4, 6)] == [4 * INT8.encoded_size(numel // 4)] * 4
    for member in range(8):
        partners = {other for other in range(8) if sent[member][other] or sent[other][member]}
        assert partners == set(shape.partners(member))


@EACH_SHAPE
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_value_that_is_not_finite_is_found_where_it_is_at_sites_too(
    make_net: MakeNet, culprit: int, is_ring: bool
) -> None:
    net, sources = make_net(4), [noise(5003, seed=member) for member in range(4)]
    sources[culprit][4321] = float("nan")
    running, _ = net.operate_all(net.next_operation(), at_sites(INT8, (2, 2, 2, 3), [1] * 4, is_ring=is_ring), sources)
    assert running[culprit].wait(DEADLINE_S) == State.NOT_FINITE
    assert running[culprit].detail == 4321
    assert all(one.wait(0) == State.RUNNING for member, one in enumerate(running) if member != culprit)


def test_contribution_that_comes_encoded_is_summed_up_at_its_site(kept_net: KeptNet) -> None:
    net, sources = kept_net(4, False), [noise(5120, seed=member) for member in range(4)]
    shape = at_sites(INT8, (1, 1, 3, 3), [1] * 4, is_ring=False, numel=5120)
    decoded = [INT8.decode(INT8.encode(source), 5120) for source in sources]
    expected, operation = net.mean(shape, decoded), net.next_operation()
    means = [torch.zeros(INT8.encoded_size(5120), dtype=torch.uint8) for _ in sources]
    results = [torch.empty(5120) for _ in sources]
    running = [
        net.operate(operation, shape, m, sources[m], results[m], encoded=Encoded(INT8.encode(sources[m]), means[m]))
        for m in range(4)
    ]
    assert ends_of(running) == [State.DONE] * 4
    assert all(torch.allclose(result, expected[0], atol=1e-6) for result in results)
    assert all(torch.equal(INT8.decode(mean, 5120), results[0]) for mean in means)


@pytest.mark.parametrize("chain", [(1, 0, 2), (2, 2, 2), (0, 3, 2), (0, 0, 0)], ids=str)
def test_chain_that_leads_nowhere_is_refused(kept_net: KeptNet, chain: tuple[int, ...]) -> None:
    shape = replace(split_into(5003, FP32, [1, 1, 1], is_ring=False), chain=chain)
    net = kept_net(3, False)
    with pytest.raises(ValueError, match="no reduction has this shape"):
        net.operate(net.next_operation(), shape, 0, noise(5003), torch.empty(5003))
