"""Bits, chunks, the exact transform, and the choice of values."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles.problem import layout_of
from tests.oracles.sparse import cosine, smaller_divisor
from tests.oracles.sparse import dct as plain_dct
from tests.unit.outer.sparse.layouts import LAYOUT, noise
from torch import Tensor

from zeroband.kernels import dct, dct_kernels
from zeroband.kernels.select import largest, place
from zeroband.outer.sparse.bits import has_clean_ends, pack, packed_size, unpack
from zeroband.outer.sparse.chunks import ChunkLayout, chunk_length, share_of


@given(bits=st.integers(0, 16), rows=st.integers(0, 3), count=st.integers(0, 40), seed=st.integers(0, 999))
def test_packed_numbers_come_back_and_take_no_more_bits_than_they_have(
    bits: int, rows: int, count: int, seed: int
) -> None:
    numbers = torch.randint(0, 1 << bits, (rows, count), generator=torch.Generator().manual_seed(seed))
    data = pack(numbers, bits)
    assert data.shape == (rows, math.ceil(count * bits / 8))
    assert torch.equal(unpack(data, count, bits).long(), numbers)
    stream = [sum(int(n) << (i * bits) for i, n in enumerate(row)) for row in numbers]
    assert [int.from_bytes(bytes(row.tolist()), "little") for row in data] == stream


def test_bits_behind_the_last_number_are_seen() -> None:
    data = pack(torch.tensor([[1, 2, 3]]), 3)
    assert packed_size(3, 3) == 2
    assert has_clean_ends(data, 3, 3)
    assert not has_clean_ends(data | torch.tensor([0, 2], dtype=torch.uint8), 3, 3)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 65, 96, 97, 100, 128, 257, 1009, 2688, 50257])
def test_chunk_length_divides_as_demos_source_or_pads_little(length: int) -> None:
    assert chunk_length(length, 64, "divide") == smaller_divisor(length, 64)
    size = chunk_length(length, 64, "pad")
    count = -(-length // size)
    assert size <= 64
    assert count == -(-length // 64)  # as few chunks as there can be
    assert size * count - length < count  # less than one value for each


@pytest.mark.parametrize("uneven", ["pad", "divide"])
@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_cover_every_value_once_whatever_range_is_read(chunk: int, uneven: str) -> None:
    layout = ChunkLayout.of(LAYOUT, chunk, uneven="pad" if uneven == "pad" else "divide")
    numbers = torch.arange(1, LAYOUT.numel + 1).float()
    rebuilt, added = torch.zeros(LAYOUT.numel), torch.ones(LAYOUT.numel)
    seen: list[torch.Tensor] = []
    for group in layout.groups:
        whole = group.read(numbers, 0, group.chunks)
        seen.append(whole.flatten())
        bounds = sorted({0, 1, group.chunks // 3, group.chunks // 2, group.chunks})
        for first, stop in pairwise(bounds):
            part = group.read(numbers, first, stop)
            assert torch.equal(part, whole[first:stop])
            group.write(part, rebuilt, first, stop)
            group.add(part, added, first, stop)
    assert torch.equal(torch.cat(seen)[torch.cat(seen) > 0].sort().values, numbers)
    assert torch.equal(rebuilt, numbers)
    assert torch.equal(added, numbers + 1)


def test_chunk_is_a_tile_of_its_parameter() -> None:
    layout = layout_of({"w": (6, 10)})
    (group,) = ChunkLayout.of(layout, 5).groups
    matrix = noise(0, 60).view(6, 10)
    assert (group.chunk_rows, group.chunk_columns, group.chunks) == (3, 5, 4)
    assert torch.equal(group.read(matrix.view(-1), 1, 3), torch.stack([matrix[:3, 5:], matrix[3:, :5]]))
    assert group.name_of(3) == "w"


@pytest.mark.parametrize("chunks", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_of_the_ranks_cover_all_chunks_and_end_at_whole_bytes(chunks: int, world_size: int) -> None:
    shares = [share_of(chunks, rank, world_size) for rank in range(world_size)]
    assert [i for first, stop in shares for i in range(first, stop)] == list(range(chunks))
    assert all(stop % 8 == 0 or stop == chunks for _, stop in shares)


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (2, 3), (5, 1), (64, 64), (7, 31), (128, 128)])
def test_transform_is_the_orthonormal_cosine_transform(shape: tuple[int, int]) -> None:
    numel = shape[0] * shape[1]
    chunks = noise(0, 3 * numel).view(3, *shape)
    places, coefficients = dct_kernels.choose(chunks, numel)
    expected = torch.tensor([plain_dct(chunk) for chunk in chunks.tolist()])
    largest_value = float(chunks.abs().max()) * math.sqrt(numel)
    torch.testing.assert_close(coefficients.view(3, *shape), expected, rtol=0, atol=2**-20 * largest_value)
    torch.testing.assert_close(dct.inverse(expected), chunks, rtol=0, atol=2**-20 * largest_value)
    restored = dct_kernels.restore(places, coefficients, *shape)
    torch.testing.assert_close(restored, chunks, rtol=0, atol=2**-20 * largest_value)


def in_whole_numbers(chunks: Tensor) -> Tensor:
    """The inverse transform with int64 for the sums, which cannot round."""
    _, rows, columns = chunks.shape
    left, right = (torch.tensor(whole_cosine(n)) for n in (rows, columns))
    exponent = torch.tensor([math.frexp(float(chunk.abs().max()))[1] - 22 for chunk in chunks])
    unit = torch.tensor(2.0, dtype=torch.float64).pow(exponent)[:, None, None]
    whole = (chunks.double() / unit).round().long() @ right
    whole = (whole.double() / 2**23).round().long()
    whole = left.T @ whole
    return (whole.double() / 2**23 * unit).float()


def whole_cosine(n: int) -> list[list[int]]:
    return [[round(2**23 * value) for value in wave] for wave in cosine(n)]


@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100])
@pytest.mark.parametrize("size", [31, 64, 128])
def test_transform_is_exact_so_no_order_of_additions_changes_a_bit(size: int, scale: float) -> None:
    worst = torch.full((1, size, size), 1.9999999)
    chunks = torch.cat([worst, noise(1, 3 * size * size).view(3, size, size)]) * scale
    whole = dct.inverse(chunks)
    assert torch.equal(whole, in_whole_numbers(chunks))
    assert torch.equal(torch.cat([dct.inverse(part) for part in chunks.split(1)]), whole)


@pytest.mark.parametrize("values", [0, 1, 4, 40, 2000])
def test_transform_of_a_few_values_has_the_bits_of_all_sums(values: int) -> None:
    chunks = torch.zeros(5, 52, 64)
    at = torch.randperm(chunks.numel(), generator=torch.Generator().manual_seed(values))[:values]
    chunks.view(-1)[at] = noise(2, values)
    chunks[3] *= 2.0**30
    assert torch.equal(dct.inverse(chunks), in_whole_numbers(chunks))


def test_transform_of_zeros_is_zeros() -> None:
    zeros = torch.zeros(2, 8, 8)
    assert torch.equal(dct.inverse(zeros), zeros) and not dct_kernels.choose(zeros, 3)[1].any()


def test_too_long_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="chunks of 129 are too long"):
        dct.inverse(torch.zeros(1, 1, 129))


@given(st.lists(st.lists(st.sampled_from([0.0, -1.0, 1.0, 2.0, -2.0]), min_size=6, max_size=6), max_size=5), st.data())
def test_largest_takes_the_first_of_equal_values(rows: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 6))
    values = torch.tensor(rows).view(-1, 6)
    expected = [sorted(sorted(range(6), key=lambda i, row=row: (-abs(row[i]), i))[:k]) for row in rows]
    got = largest(values, k)
    assert got.tolist() == expected
    dense = place(got, values.gather(1, got), 6)
    assert torch.equal(dense, torch.where(dense != 0, values, 0.0))
