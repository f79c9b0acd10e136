"""The native data plane: what a node alone does, which sends nothing, and how links are driven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.unit.plane.conftest import tcp_pair

from zeroband.elastic.board import NodeBoard
from zeroband.elastic.epoch import Opening
from zeroband.elastic.native import NativePlane, Reach
from zeroband.kernels.codec import CODECS
from zeroband.plane.engine import Encoded, Engine
from zeroband.plane.handover import HandedOver
from zeroband.plane.handshake import OPEN, RunKey
from zeroband.plane.links import Links
from zeroband.plane.topology import Network

N = 700
INT8 = CODECS["int8"]
SOURCE = torch.randn(N, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def reduce_alone(tmp_path: Path) -> Callable[..., torch.Tensor]:
    """The mean of one member with this weight."""

    def reduce(weight: int, **more: Any) -> torch.Tensor:
        board = NodeBoard(tmp_path / "board", create=True)
        reach = Reach(links=cast(Any, None), addresses=lambda members: {})
        plane = NativePlane("run", board, INT8, reach, streams=1, connect_s=1.0)
        opening = Opening(1, 1, 1, ("a#1",), (weight,), (4,), (4,))
        result = torch.full((N,), 7.0)
        assert plane.reduce_mean(SOURCE, result, opening, "a#1", lambda share: None, **more) == (0, 0)
        board.close()
        return result

    return reduce


def test_mean_of_one_is_exact_and_takes_nothing(reduce_alone: Callable[..., torch.Tensor]) -> None:
    errors = torch.ones(N)
    assert torch.equal(reduce_alone(10, errors=errors), SOURCE)
    assert not errors.any()


def test_mean_of_one_that_comes_encoded_is_what_its_encoding_says(
    reduce_alone: Callable[..., torch.Tensor],
) -> None:
    encoded = Encoded(INT8.encode(-SOURCE), torch.zeros(INT8.encoded_size(N), dtype=torch.uint8))
    assert torch.equal(reduce_alone(10, encoded=encoded), INT8.decode(INT8.encode(-SOURCE), N))
    assert torch.equal(encoded.result, encoded.contribution)


def test_mean_of_nobody_is_zero_and_leaves_the_errors(reduce_alone: Callable[..., torch.Tensor]) -> None:
    errors = torch.ones(N)
    assert not reduce_alone(0, errors=errors).any()
    assert bool(errors.all())


MEMBERS = ("a#1", "b#1")
STREAMS = 8


class DrivenLinks(Links):
    """Links that note over how many streams they are told to send."""

    def drive(self, member: str, congestion: str, senders: int) -> None:
        self.driven = {**getattr(self, "driven", {}), member: senders}
        super().drive(member, congestion, senders)


@pytest.fixture
def linked() -> Iterator[tuple[DrivenLinks, DrivenLinks]]:
    """Two members, with all streams between them that a link begins with."""
    both = DrivenLinks(Engine(1), RunKey(b""), False), DrivenLinks(Engine(1), RunKey(b""), False)
    for _ in range(STREAMS):
        for links, caller, end in zip(both, reversed(MEMBERS), tcp_pair(), strict=True):
            links.accept(end, HandedOver("data", caller, "session", OPEN))
    yield both
    for links in both:
        links.close()
        links.engine.close()


@pytest.mark.parametrize(
    ("rates", "chosen", "senders"),
    [((3, 100), None, 1), ((100, 100), None, STREAMS), ((), None, STREAMS), ((3, 3), STREAMS, STREAMS)],
    ids=["slow", "fast", "unknown", "chosen"],
)
def test_slow_link_sends_over_fewer_streams(
    linked: tuple[DrivenLinks, DrivenLinks],
    tmp_path: Path,
    rates: tuple[int, ...],
    chosen: int | None,
    senders: int,
) -> None:
    opening = Opening(1, 1, 1, MEMBERS, (1, 1), (4, 4), (4, 4), network=Network(rates, rtt_ms=20))

    def mean(at: int) -> torch.Tensor:
        board, result = NodeBoard(tmp_path / f"board{at}", create=True), torch.empty(N)
        plane = NativePlane("run", board, INT8, Reach(linked[at], lambda _: {}), streams=chosen, connect_s=5.0)
        plane.reduce_mean(SOURCE, result, opening, MEMBERS[at], lambda _: None)
        board.close()
        return result

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(mean, range(2))
    assert torch.equal(first, second)
    assert (linked[0].driven["b#1"], linked[1].driven["a#1"]) == (senders, senders)
