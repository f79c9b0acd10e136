"""What arrives on a connection that is no frame, not the right one, or not from who has the keys."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tests.unit.elastic.conftest import DEADLINE_S, RUN, ends_of, key_pair, noise, tcp_pair, until
from torch import Tensor

from zeroband.elastic.transport.engine import Engine, Operation, Running, State
from zeroband.elastic.transport.handshake import NO_KEYS, StreamKeys
from zeroband.elastic.transport.shape import Shape
from zeroband.kernels.codec import CODECS

FP32 = CODECS["fp32"]
SHARD = 256
SHAPE = Shape(FP32, (0, SHARD, 2 * SHARD), (0.5, 0.5), (0, 1), is_ring=False, chunk_numel=SHARD, chain=(0, 1))
NUMBER = 5
OPERATION = Operation(RUN, plan=NUMBER << 16, epoch=3, round=4)
HEADER = struct.Struct("<IBBHQQIIIII4x")
MAGIC = 0x31425A02
PARTIAL, FINAL = 1, 2
MEANT_BYTES = 44
"""Of a header; the rest of it says nothing."""
TAG_BYTES = 16
FRAME_BYTES = HEADER.size + 4 * SHARD
SEALED_BYTES = FRAME_BYTES + 2 * TAG_BYTES
"""The header and the payload each have a tag."""

few = settings(max_examples=40, phases=[Phase.explicit, Phase.generate])  # one that fails is slow


def header(kind: int, shard: int, /, **changes: int) -> bytes:
    fields = {
        "magic": MAGIC,
        "kind": kind,
        "codec": FP32.number,
        "lane": OPERATION.lane,
        "run": OPERATION.run,
        "plan": OPERATION.plan,
        "epoch": OPERATION.epoch,
        "round": OPERATION.round,
        "shard": shard,
        "chunk": 0,
        "payload_bytes": 4 * SHARD,
    }
    assert changes.keys() <= fields.keys()
    return HEADER.pack(*(fields | changes).values())


def frame(kind: int, shard: int, values: Tensor) -> bytes:
    return header(kind, shard) + FP32.encode(values).numpy().tobytes()


@dataclass
class Duel:
    """A reduction of two members, of which the test plays the second one by hand; a third node looks on.

    `peer`: the test's end of the stream, link 1 of `engine`. Link 2 joins it with `onlooker`, where it is link 0.
    """

    engine: Engine
    onlooker: Engine
    peer: socket.socket
    source: Tensor
    result: Tensor
    reduction: Running

    def assert_ends_as_lost(self) -> None:
        assert self.reduction.wait(DEADLINE_S) in (State.PEER_LOST, State.FOREIGN_FRAME)
        assert self.reduction.detail == 1
        self.assert_others_are_well()

    def assert_others_are_well(self) -> None:
        """The link with the node that looks on carries a reduction of the two."""
        sources, results = [noise(2 * SHARD, seed=seed) for seed in (5, 6)], [torch.zeros(2 * SHARD) for _ in range(2)]
        later = replace(OPERATION, plan=(NUMBER + 1) << 16)
        both = [
            self.engine.start(later, SHAPE, 0, [0, 2], sources[0], results[0]),
            self.onlooker.start(later, SHAPE, 1, [0, 1], sources[1], results[1]),
        ]
        states = ends_of(both)
        for reduction in both:
            reduction.close()
        assert states == [State.DONE] * 2
        assert torch.equal(results[0], 0.5 * sources[0] + 0.5 * sources[1])


@contextmanager
def duel() -> Iterator[Duel]:
    engine, onlooker = (Engine(1, beat_s=3600) for _ in range(2))  # no beats between the frames that are compared
    (ours, peer), (mine, theirs) = tcp_pair(), tcp_pair()
    engine.add_stream(1, ours, NO_KEYS)
    engine.add_stream(2, mine, NO_KEYS)
    onlooker.add_stream(0, theirs, NO_KEYS)
    source, result = noise(2 * SHARD), torch.full((2 * SHARD,), float("nan"))
    reduction = engine.start(OPERATION, SHAPE, 0, [0, 1], source, result)
    try:
        yield Duel(engine, onlooker, peer, source, result, reduction)
    finally:
        reduction.close()
        peer.close()
        engine.close()
        onlooker.close()


def test_peer_that_sends_the_right_frames_takes_part() -> None:
    """So the frames that the other tests spoil are right before that."""
    with duel() as d:
        theirs = noise(2 * SHARD, seed=1)
        mean = 0.5 * d.source + 0.5 * theirs
        d.peer.sendall(frame(PARTIAL, 0, theirs[:SHARD]) + frame(FINAL, 1, mean[SHARD:]))
        assert d.reduction.wait(DEADLINE_S) == State.DONE
        assert torch.equal(d.result, mean)
        sent = d.peer.recv(2 * FRAME_BYTES, socket.MSG_WAITALL)
        assert sent == frame(PARTIAL, 1, d.source[SHARD:]) + frame(FINAL, 0, mean[:SHARD])


def test_same_frame_twice_names_the_member() -> None:
    with duel() as d:
        d.peer.sendall(2 * frame(FINAL, 1, noise(SHARD)))
        assert (d.reduction.wait(DEADLINE_S), d.reduction.detail) == (State.FOREIGN_FRAME, 1)
        d.assert_others_are_well()


@few
@given(st.binary(min_size=HEADER.size, max_size=300).filter(lambda data: data[:4] != MAGIC.to_bytes(4, "little")))
def test_garbage_takes_down_the_link_it_came_on_and_no_other(data: bytes) -> None:
    with duel() as d:
        d.peer.sendall(data)
        d.assert_ends_as_lost()


@few
@given(
    kind=st.sampled_from([PARTIAL, FINAL]),
    at=st.integers(0, MEANT_BYTES - 1),
    change=st.integers(1, 255),
    data=st.binary(max_size=3000),
)
def test_frame_with_a_changed_header_does_not_count(kind: int, at: int, change: int, data: bytes) -> None:
    """It is refused, left out, or held for an operation that may come; garbage follows, and the caller hangs up."""
    theirs = noise(2 * SHARD, seed=1)
    right = [frame(PARTIAL, 0, theirs[:SHARD]), frame(FINAL, 1, theirs[SHARD:])]
    wrong = bytearray(right[kind - 1])
    wrong[at] ^= change
    fields = HEADER.unpack_from(wrong)
    is_held = fields[:1] + fields[4:5] == (MAGIC, RUN) and fields[1] in (PARTIAL, FINAL) and 0 < fields[10] <= 1 << 24
    is_held = is_held and (fields[5] >> 16, fields[3]) > (NUMBER, 0)
    with duel() as d:
        with suppress(OSError):  # it may have hung up already
            d.peer.sendall(right[2 - kind] + wrong + data)
            d.peer.shutdown(socket.SHUT_WR)
        if is_held:
            d.reduction.wait(0.01)
            assert d.reduction.wait(0) != State.DONE
            d.assert_others_are_well()
        else:
            d.assert_ends_as_lost()


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": 0},
        {"kind": 0},
        {"kind": 3},
        {"codec": CODECS["int8"].number},
        {"codec": 99},
        {"run": RUN + 1},
        {"shard": 1},
        {"shard": 2},
        {"shard": 0xFFFFFFFF},
        {"chunk": 1},
        {"chunk": 0xFFFFFFFF},
        {"payload_bytes": 0},
        {"payload_bytes": 4 * SHARD - 1},
        {"payload_bytes": 4 * SHARD + 1},
        {"payload_bytes": 1 << 24},
        {"payload_bytes": 0xFFFFFFFF},
        {"payload_bytes": (1 << 24) + 1, "round": 3},
    ],
    ids=str,
)
def test_frame_that_does_not_belong_here_is_refused_before_it_takes_memory(changes: dict[str, int]) -> None:
    with duel() as d:
        assert d.peer.recv(FRAME_BYTES, socket.MSG_WAITALL)
        d.engine.forget_peak()
        d.peer.sendall(header(PARTIAL, 0, **changes))
        d.assert_ends_as_lost()
        assert d.engine.peak_bytes <= 6 * SHARD * 4, "what the reduction with the onlooker took"


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": (NUMBER - 1) << 16},
        {"plan": (NUMBER << 16) + 1},
        {"epoch": 2},
        {"epoch": 4},
        {"round": 3},
        {"round": 5},
    ],
    ids=str,
)
def test_frame_of_another_operation_is_left_out(changes: dict[str, int]) -> None:
    """And what follows on the same connection counts. Such a frame may be of any size."""
    with duel() as d:
        theirs = noise(2 * SHARD, seed=1)
        mean = 0.5 * d.source + 0.5 * theirs
        late = header(PARTIAL, 0, payload_bytes=200_000, **changes) + bytes(200_000)
        d.peer.sendall(late + frame(PARTIAL, 0, theirs[:SHARD]) + late + frame(FINAL, 1, mean[SHARD:]))
        assert d.reduction.wait(DEADLINE_S) == State.DONE
        assert torch.equal(d.result, mean)
        assert d.engine.peak_bytes < 200_000


def test_frame_that_ends_early_is_lost_with_its_link() -> None:
    with duel() as d:
        d.peer.sendall(frame(PARTIAL, 0, noise(SHARD))[:-1])
        d.peer.close()
        d.assert_ends_as_lost()


def test_member_that_sends_nan_where_it_is_no_encoding_spoils_no_result() -> None:
    with duel() as d:
        spoilt = header(PARTIAL, 0) + torch.full((SHARD,), float("nan")).numpy().tobytes()
        d.peer.sendall(spoilt)
        assert (d.reduction.wait(DEADLINE_S), d.reduction.detail) == (State.OUT_OF_RANGE, 1)


# -- sealed -------------------------------------------------------------------------------------------------------


Pair = tuple[list[Running], list[Engine]]


@contextmanager
def sealed_pair(ends: tuple[socket.socket, socket.socket], keys: tuple[StreamKeys, StreamKeys]) -> Iterator[Pair]:
    """Two members in a reduction over a connection with these ends."""
    engines = [Engine(1), Engine(1)]
    engines[0].add_stream(1, ends[0], keys[0])
    engines[1].add_stream(0, ends[1], keys[1])
    buffers = [torch.zeros(2 * SHARD) for _ in engines]
    reductions = [
        engine.start(OPERATION, SHAPE, member, [0, 1], noise(2 * SHARD, seed=member), buffers[member])
        for member, engine in enumerate(engines)
    ]
    try:
        yield reductions, engines
    finally:
        for reduction in reductions:
            reduction.close()
        for engine in engines:
            engine.close()


@contextmanager
def on_the_way(change: Callable[[bytes], bytes]) -> Iterator[Pair]:
    """Two members of which somebody stands between; `change` is done to the first one's first frame."""
    (first, near), (far, second) = tcp_pair(), tcp_pair()
    with near, far, sealed_pair((first, second), key_pair(is_sealed=True)) as pair:
        far.sendall(change(near.recv(SEALED_BYTES, socket.MSG_WAITALL)))
        yield pair


def test_sealed_frames_do_not_show_what_they_carry() -> None:
    seen: list[bytes] = []

    def look(data: bytes) -> bytes:
        seen.append(data)
        return data

    with on_the_way(look) as (reductions, _):
        until(lambda: reductions[1].traffic(0).received_bytes == 4 * SHARD)
    values = noise(2 * SHARD)[SHARD:].numpy().tobytes()
    assert seen[0][: HEADER.size] == header(PARTIAL, 1)
    assert values[:16] not in seen[0]


@few
@given(at=st.integers(HEADER.size + TAG_BYTES, SEALED_BYTES - 1), change=st.integers(1, 255))
def test_sealed_frame_that_was_changed_on_the_way_takes_its_link_down(at: int, change: int) -> None:
    with on_the_way(lambda data: data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]) as (reductions, engines):
        assert (reductions[1].wait(DEADLINE_S), reductions[1].detail) == (State.PEER_LOST, 0)
        assert reductions[1].traffic(0).received_bytes == 0
        assert not engines[1].state(0).is_up


@few
@given(at=st.integers(0, HEADER.size + TAG_BYTES - 1), bit=st.integers(0, 7), is_all=st.booleans())
@example(at=6, bit=1, is_all=False)  # a later lane
@example(at=18, bit=0, is_all=False)  # a later plan
@example(at=42, bit=7, is_all=False)  # more bytes than will ever come
def test_sealed_frame_with_a_changed_header_takes_its_link_down_at_once(at: int, bit: int, is_all: bool) -> None:
    """Also where it would be left out, or held until another operation begins; and before the payload has come."""

    def change(data: bytes) -> bytes:
        changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        return changed if is_all else changed[: HEADER.size + TAG_BYTES]

    with on_the_way(change) as (reductions, engines):
        assert (reductions[1].wait(DEADLINE_S), reductions[1].detail) == (State.PEER_LOST, 0)
        assert reductions[1].traffic(0).received_bytes == 0
        assert not engines[1].state(0).is_up


@pytest.mark.parametrize(
    "change",
    [lambda data: data + data, lambda data: header(PARTIAL, 1) + bytes(len(data) - HEADER.size)],
    ids=["repeated", "made up"],
)
def test_sealed_frame_that_its_sender_did_not_send_now_is_refused(change: Callable[[bytes], bytes]) -> None:
    with on_the_way(change) as (reductions, _):
        assert (reductions[1].wait(DEADLINE_S), reductions[1].detail) == (State.PEER_LOST, 0)


def test_frames_sealed_with_another_key_are_refused() -> None:
    with sealed_pair(tcp_pair(), (key_pair(is_sealed=True)[0], key_pair(is_sealed=True)[1])) as (reductions, engines):
        assert ends_of(reductions) == [State.PEER_LOST] * 2
        assert [reduction.detail for reduction in reductions] == [1, 0]
        assert not engines[0].state(1).is_up and not engines[1].state(0).is_up
