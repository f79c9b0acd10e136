"""What a reduction says that its encodings took: bit for bit as in plain torch, and nothing is missing in it."""

from __future__ import annotations

import pytest
import torch
from tests.unit.elastic.conftest import EACH_SHAPE, KeptNet, Net, ends_of, noise, split_into
from tests.unit.elastic.transport.oracle import averaged
from torch import Tensor

from zeroband.elastic.transport.engine import State
from zeroband.kernels.codec import CODECS, Codec

INT4 = CODECS["int4"]
NUMEL = 2999


def reduce(
    net: Net, codec: Codec, sources: list[Tensor], weights: list[int], errors: list[Tensor], *, is_ring: bool
) -> list[Tensor]:
    """One reduction: what every member holds; the members' errors are written."""
    shape, operation = split_into(NUMEL, codec, weights, is_ring=is_ring), net.next_operation()
    results = [torch.empty(NUMEL) for _ in sources]
    reductions = [
        net.operate(operation, shape, member, sources[member], results[member], errors=errors[member])
        for member in range(net.world)
    ]
    assert ends_of(reductions) == [State.DONE] * net.world
    for reduction in reductions:
        reduction.close()
    return results


@EACH_SHAPE
@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("weights", [[1, 1], [3, 1, 2], [0, 5, 1, 0], [1, 1, 1, 1, 1], [0, 0]], ids=str)
def test_mean_and_errors_are_those_of_plain_torch_bit_for_bit(
    kept_net: KeptNet, name: str, weights: list[int], is_ring: bool
) -> None:
    codec, sources = CODECS[name], [noise(NUMEL, seed=member) for member in range(len(weights))]
    shape = split_into(NUMEL, codec, weights, is_ring=is_ring)
    errors = [torch.full((NUMEL,), float("nan")) for _ in sources]
    results = reduce(kept_net(len(weights), False), codec, sources, weights, errors, is_ring=is_ring)
    mean, taken = averaged(codec, sources, shape.shares, shape.bounds, is_ring=is_ring)
    assert all(torch.equal(result, mean) for result in results)
    for error, expected in zip(errors, taken, strict=True):
        assert torch.equal(error.view(torch.int32), expected.view(torch.int32))


@EACH_SHAPE
@pytest.mark.parametrize("weights", [[1, 1], [3, 1, 2], [1, 1, 1, 1, 1]], ids=str)
def test_twenty_rounds_lose_nothing_but_what_is_left_at_the_end(
    kept_net: KeptNet, weights: list[int], is_ring: bool
) -> None:
    """All means together are the true ones but for the last errors; the error does not grow with the rounds."""
    world, total = len(weights), sum(weights)
    residuals = [torch.zeros(NUMEL) for _ in weights]
    came, learned, plain = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(3))
    for round in range(20):
        updates = [noise(NUMEL, seed=100 * round + member) for member in range(world)]
        sources = [update + residual for update, residual in zip(updates, residuals, strict=True)]
        came += reduce(kept_net(world, False), INT4, sources, weights, residuals, is_ring=is_ring)[0].double()
        unused = [torch.empty(NUMEL) for _ in weights]
        plain += reduce(kept_net(world, False), INT4, updates, weights, unused, is_ring=is_ring)[0].double()
        learned += sum(update.double() * weight / total for update, weight in zip(updates, weights, strict=True))
    left = sum(residual.double() * weight / total for residual, weight in zip(residuals, weights, strict=True))
    assert torch.allclose(came + left, learned, atol=1e-4, rtol=0)
    assert float((plain - learned).norm()) > 2 * float((came - learned).norm())
