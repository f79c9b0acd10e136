"""Engines in one process, joined by TCP connections over loopback as nodes are by the network."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroband.elastic.transport.engine import Encoded, Engine, Operation, Running, State
from zeroband.elastic.transport.handshake import NO_KEYS, StreamKeys
from zeroband.elastic.transport.shape import Shape, shape_of
from zeroband.kernels.codec import CODECS, Codec

HOST = "127.0.0.1"
RUN = 7
DEADLINE_S = 10.0
_SO_ATTACH_FILTER = 26


def until(condition: Callable[[], bool], *, deadline_s: float = DEADLINE_S) -> None:
    """Wait for what other threads do."""
    pause, end_s = threading.Event(), time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s"
        pause.wait(0.001)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one connection over loopback."""
    with socket.create_server((HOST, 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=DEADLINE_S)
        theirs, _ = listener.accept()
    for end in (ours, theirs):
        end.settimeout(DEADLINE_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def make_silent(*ends: socket.socket) -> None:
    """Have what comes dropped before TCP sees it, as on a way that was closed without a word."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def key_pair(*, is_sealed: bool) -> tuple[StreamKeys, StreamKeys]:
    """What the two ends of one connection agreed on."""
    if not is_sealed:
        return NO_KEYS, NO_KEYS
    a, b = os.urandom(32), os.urandom(32)
    return StreamKeys(a, b), StreamKeys(b, a)


def ends_of(reductions: Sequence[Running]) -> list[State]:
    """How they ended, or RUNNING where one does not."""
    end_s = time.monotonic() + DEADLINE_S
    return [reduction.wait(max(0.0, end_s - time.monotonic())) for reduction in reductions]


def has_nothing_in_transit(engine: Engine) -> bool:
    """Its peak counts from here on."""
    engine.forget_peak()
    return engine.peak_bytes == 0


def noise(n: int, *, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, generator=torch.Generator().manual_seed(seed))


def split_into(numel: int, codec: Codec, weights: Sequence[int], *, is_ring: bool, chunk_numel: int = 512) -> Shape:
    """The shape of these members, in chunks so small that every shard has several."""
    shares = [weight / max(sum(weights), 1) for weight in weights]
    return replace(shape_of(numel, codec, shares), is_ring=is_ring, chunk_numel=chunk_numel)


@dataclass
class Net:
    """Members that are linked with each other; in every engine a member's link has the member's number.

    `operate` starts a member's part; what was started is closed with the net.
    """

    world: int
    is_sealed: bool = False
    streams: int = 1
    beat_s: float = 1.0
    engines: list[Engine] = field(default_factory=list[Engine])
    started: list[Running] = field(default_factory=list[Running])
    plan: int = 0

    def __post_init__(self) -> None:
        self.engines = [Engine(1, beat_s=self.beat_s) for _ in range(self.world)]
        for a, b in combinations(range(self.world), 2):
            for _ in range(self.streams):
                self.join(a, b)

    def join(self, a: int, b: int) -> None:
        """Give two members a stream between them."""
        ends, keys = tcp_pair(), key_pair(is_sealed=self.is_sealed)
        self.engines[a].add_stream(b, ends[0], keys[0])
        self.engines[b].add_stream(a, ends[1], keys[1])

    def next_operation(self) -> Operation:
        self.plan += 1
        return Operation(RUN, (self.plan << 16) + 0xFFFF - self.plan, epoch=3, round=4)

    def operate(
        self,
        operation: Operation,
        shape: Shape,
        member: int,
        source: Tensor,
        result: Tensor,
        *,
        allowed: float = 1.0,
        errors: Tensor | None = None,
        encoded: Encoded | None = None,
        **more: Any,
    ) -> Running:
        engine, place, how = self.engines[member], (operation, shape, member, range(self.world)), (source, result)
        reduction = engine.start(*place, *how, allowed=allowed, errors=errors, encoded=encoded, **more)
        self.started.append(reduction)
        return reduction

    def operate_all(
        self, operation: Operation, shape: Shape, sources: Sequence[Tensor], *, but: Sequence[int] = ()
    ) -> tuple[list[Running], list[Tensor]]:
        """Start it on all members (`but` some). What they will have lies in the tensors, which begin as NaN."""
        results = [torch.full_like(source, float("nan")) for source in sources]
        members = [member for member in range(self.world) if member not in but]
        return [self.operate(operation, shape, m, sources[m], results[m]) for m in members], results

    def mean(self, shape: Shape, sources: Sequence[Tensor]) -> list[Tensor]:
        """One operation from start to end: what every member has then."""
        reductions, results = self.operate_all(self.next_operation(), shape, sources)
        assert ends_of(reductions) == [State.DONE] * self.world
        for reduction in reductions:
            reduction.close()
        return results

    def close(self) -> None:
        for reduction in self.started:
            reduction.close()
        for engine in self.engines:
            engine.close()


MakeNet = Callable[..., Net]
KeptNet = Callable[[int, bool], Net]

EACH_CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
EACH_SHAPE = pytest.mark.parametrize("is_ring", [False, True], ids=["all-to-all", "ring"])
EACH_SEALING = pytest.mark.parametrize("is_sealed", [False, True], ids=["open", "sealed"])


@pytest.fixture
def make_net() -> Iterator[MakeNet]:
    """Nets of one test."""
    made: list[Net] = []

    def make(world: int, **options: Any) -> Net:
        made.append(Net(world, **options))
        return made[-1]

    yield make
    for net in made:
        net.close()


@pytest.fixture(scope="package")
def kept_net() -> Iterator[KeptNet]:
    """Nets that serve many tests, one reduction after the other, as links serve many rounds. A few at a time."""
    kept: dict[tuple[int, bool], Net] = {}

    def keep(world: int, is_sealed: bool) -> Net:
        if (world, is_sealed) not in kept:
            if len(kept) == 4:
                kept.pop(next(iter(kept))).close()
            kept[world, is_sealed] = Net(world, is_sealed)
        return kept[world, is_sealed]

    yield keep
    for net in kept.values():
        net.close()
