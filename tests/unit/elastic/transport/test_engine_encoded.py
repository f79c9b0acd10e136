"""Contributions that come encoded, as a GPU makes them: sent as they are, and the mean is had encoded too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.unit.elastic.conftest import (
    DEADLINE_S,
    EACH_CODEC,
    EACH_SHAPE,
    KeptNet,
    MakeNet,
    Net,
    ends_of,
    noise,
    split_into,
)
from tests.unit.elastic.transport.oracle import averaged
from torch import Tensor

from zeroband.elastic.rounds.exchange import pack_mean
from zeroband.elastic.transport.engine import Encoded, State
from zeroband.elastic.transport.shape import Shape
from zeroband.kernels.codec import CODECS, Codec

NUMEL = 2999


def encoded_of(codec: Codec, source: Tensor) -> Encoded:
    return Encoded(codec.encode(source), torch.full((codec.encoded_size(source.numel()),), 77, dtype=torch.uint8))


def reduce(
    net: Net,
    shape: Shape,
    sources: Sequence[Tensor],
    encoded: Sequence[Encoded | None],
    errors: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """One reduction: what every member holds. Those who come with encodings show the engine nothing else."""
    operation, results = net.next_operation(), [torch.empty(NUMEL) for _ in sources]
    shown = [torch.full_like(s, float("nan")) if e else s for s, e in zip(sources, encoded, strict=True)]
    reductions = [
        net.operate(
            operation, shape, m, shown[m], results[m], errors=None if errors is None else errors[m], encoded=encoded[m]
        )
        for m in range(net.world)
    ]
    assert ends_of(reductions) == [State.DONE] * net.world
    for reduction in reductions:
        reduction.close()
    return results


@EACH_CODEC
@pytest.mark.parametrize("weights", [[1, 1], [3, 0, 2], [1, 1, 1, 1, 1]], ids=str)
def test_mean_has_the_bits_that_encoding_inside_gives(kept_net: KeptNet, codec: Codec, weights: list[int]) -> None:
    net, sources = kept_net(len(weights), False), [noise(NUMEL, seed=member) for member in range(len(weights))]
    shape = split_into(NUMEL, codec, weights, is_ring=False)
    expected = net.mean(shape, sources)[0]
    all_encoded = [encoded_of(codec, source) for source in sources]
    assert all(torch.equal(result, expected) for result in reduce(net, shape, sources, all_encoded))
    only_one: list[Encoded | None] = [encoded_of(codec, sources[0]), *[None] * (len(sources) - 1)]
    assert all(torch.equal(result, expected) for result in reduce(net, shape, sources, only_one))


@EACH_CODEC
def test_part_that_is_not_finite_ends_the_reduction_and_names_its_member(kept_net: KeptNet, codec: Codec) -> None:
    """No honest member sends one: it looks before. The owner of a shard is not to seem to have made it."""
    net, sources = kept_net(2, False), [noise(NUMEL, seed=member) for member in range(2)]
    shape, forged = split_into(NUMEL, codec, [1, 1], is_ring=False), encoded_of(codec, sources[1])
    forged.contribution[:4] = 255  # its first values, or their scale: all of the shard of the other member
    operation, results = net.next_operation(), [torch.empty(NUMEL) for _ in sources]
    reductions = [
        net.operate(operation, shape, m, sources[m], results[m], errors=None, encoded=forged if m == 1 else None)
        for m in range(net.world)
    ]
    assert reductions[0].wait(DEADLINE_S) == State.OUT_OF_RANGE
    assert reductions[0].detail == 1
    for reduction in reductions:
        reduction.close()


@EACH_CODEC
@EACH_SHAPE
def test_encoded_mean_is_what_the_mean_was_decoded_from(kept_net: KeptNet, codec: Codec, is_ring: bool) -> None:
    sources = [noise(NUMEL, seed=member) for member in range(3)]
    shape, encoded = split_into(NUMEL, codec, [1, 2, 1], is_ring=is_ring), [encoded_of(codec, s) for s in sources]
    before = [one.contribution.clone() for one in encoded]
    results = reduce(kept_net(3, False), shape, sources, encoded)
    for result, one, contribution in zip(results, encoded, before, strict=True):
        assert torch.equal(one.result, encoded[0].result)
        assert torch.equal(codec.decode(one.result, NUMEL), result)
        assert torch.equal(one.contribution, contribution)


@EACH_SHAPE
@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("weights", [[1, 1], [3, 0, 2], [1, 1, 1, 1]], ids=str)
def test_mean_and_errors_are_those_of_plain_torch_bit_for_bit(
    kept_net: KeptNet, name: str, weights: list[int], is_ring: bool
) -> None:
    codec, sources = CODECS[name], [noise(NUMEL, seed=member) for member in range(len(weights))]
    shape = split_into(NUMEL, codec, weights, is_ring=is_ring)
    errors = [torch.full((NUMEL,), float("nan")) for _ in sources]
    encoded = [encoded_of(codec, source) for source in sources]
    results = reduce(kept_net(len(weights), False), shape, sources, encoded, errors)
    mean, taken = averaged(codec, sources, shape.shares, shape.bounds, is_ring=is_ring, are_encoded=True)
    assert all(torch.equal(result, mean) for result in results)
    for error, expected in zip(errors, taken, strict=True):
        assert torch.equal(error.isnan(), expected.isnan())
        assert torch.equal(error.nan_to_num(), expected.nan_to_num())


@EACH_CODEC
@EACH_SHAPE
@pytest.mark.parametrize(("numel", "weights"), [(1, [1, 1]), (22, [1, 1]), (257, [1, 1, 1]), (NUMEL, [3, 0, 2])])
def test_mean_is_had_as_it_travelled_in_the_bytes_that_encoding_it_again_finds(
    kept_net: KeptNet, codec: Codec, is_ring: bool, numel: int, weights: list[int]
) -> None:
    net, sources = kept_net(len(weights), False), [noise(numel, seed=member) for member in range(len(weights))]
    shape, operation = split_into(numel, codec, weights, is_ring=is_ring), net.next_operation()
    results = [torch.empty(numel) for _ in sources]
    means = [torch.full((codec.encoded_size(numel),), 77, dtype=torch.uint8) for _ in sources]
    running = [
        net.operate(operation, shape, m, sources[m], results[m], encoded_mean=means[m]) for m in range(len(weights))
    ]
    assert ends_of(running) == [State.DONE] * net.world
    for result, mean in zip(results, means, strict=True):
        assert torch.equal(mean, pack_mean(result, codec))
        assert torch.equal(codec.decode(mean, numel).view(torch.int32), result.view(torch.int32))


@pytest.mark.parametrize("change", [-1, 1])
def test_encodings_of_another_size_are_refused(make_net: MakeNet, change: int) -> None:
    net, codec = make_net(2), CODECS["int8"]
    shape, source = split_into(NUMEL, codec, [1, 1], is_ring=False), noise(NUMEL)
    wrong = Encoded(codec.encode(source), torch.zeros(codec.encoded_size(NUMEL) + change, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"^2999 values take 3047 contiguous bytes in int8, not"):
        net.operate(net.next_operation(), shape, 0, source, source.clone(), encoded=wrong)


def test_shape_that_cuts_blocks_is_refused(make_net: MakeNet) -> None:
    net, codec = make_net(2), CODECS["int8"]
    source = noise(NUMEL)
    shape = split_into(NUMEL, codec, [1, 1], is_ring=False, chunk_numel=100)
    with pytest.raises(ValueError, match=r"^no reduction has this shape"):
        net.operate(net.next_operation(), shape, 0, source, source.clone(), encoded=encoded_of(codec, source))
