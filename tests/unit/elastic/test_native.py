"""The native data plane where a node is alone: nothing is sent, and the mean is what it contributes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from zeroband.elastic.board import NodeBoard
from zeroband.elastic.epoch import Opening
from zeroband.elastic.native import NativePlane, Reach
from zeroband.kernels.codec import CODECS
from zeroband.plane.engine import Encoded

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
