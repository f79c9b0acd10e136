"""DeMo's transform in Triton: what plain torch chooses and makes of it, within float32's rounding.

test_gpu.py has Triton's interpreter run these. On a machine with a GPU: pytest tests/unit/kernels/test_dct_gpu.py
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.kernels.offline import dct_launches
from tests.unit.kernels.test_gpu import DEVICE, IS_INTERPRETED, needs_triton, runs_kernels
from torch import Tensor

from zeroband.kernels import dct_kernels
from zeroband.kernels.dct_kernels import DctKernels
from zeroband.outer.sparse import sparse_codec as codec_module
from zeroband.outer.sparse.residual import SparseResidual
from zeroband.outer.sparse.sparse_codec import SparseCodec, SparseRule
from zeroband.state.flat import FlatLayout, Slot

SHAPES = [(5, 64, 64, 4), (3, 52, 64, 32), (9, 1, 64, 4), (2, 1, 13, 13), (3, 16, 1, 3), (2, 7, 5, 1)]
"""Chunks, rows, columns, k."""
each_shape = pytest.mark.parametrize(("count", "rows", "columns", "k"), SHAPES)


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("zeroband.kernels.dct_gpu")


def noise(*shape: int) -> Tensor:
    """Every chunk of another size, as the momenta of different layers are."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(7))
    return values * 10.0 ** torch.arange(-3, len(values) - 3).view(-1, *[1] * (len(shape) - 1))


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest one, in parts of the largest value of its chunk."""
    off, size = (t.flatten(1).abs().amax(dim=1) for t in (found.cpu() - expected, expected))
    return float((off / size).max())


@runs_kernels
@each_shape
def test_largest_waves_are_those_of_plain_torch(
    kernels: DctKernels, count: int, rows: int, columns: int, k: int
) -> None:
    chunks = noise(count, rows, columns)
    places, values = kernels.choose(chunks.to(DEVICE), k)
    expected_places, expected_values = dct_kernels.choose(chunks, k)
    assert torch.equal(places.cpu().long(), expected_places)
    assert error_of(values, expected_values) < 2e-6


@runs_kernels
@each_shape
def test_chunks_of_waves_are_those_of_plain_torch(
    kernels: DctKernels, count: int, rows: int, columns: int, k: int
) -> None:
    places, values = dct_kernels.choose(noise(count, rows, columns), k)
    found = kernels.restore(places.int().to(DEVICE), values.to(DEVICE), rows, columns)
    assert error_of(found, dct_kernels.restore(places, values, rows, columns)) < 2e-6


@runs_kernels
def test_of_equal_waves_the_first_are_chosen(kernels: DctKernels) -> None:
    """A chunk of zeros has nothing but equal ones; the other's three waves are powers of two, and two of one size."""
    places, signs = torch.tensor([[3, 70, 900]]), torch.tensor([[4.0, -8.0, 4.0]])
    chunks = torch.cat([dct_kernels.restore(places, signs, 64, 64), torch.zeros(1, 64, 64)])
    found, values = kernels.choose(chunks.to(DEVICE), 5)
    assert set(places[0].tolist()) <= set(found[0].tolist()) and bool((found[0].diff() > 0).all())
    assert found[1].tolist() == [0, 1, 2, 3, 4] and not values[1].any()


@runs_kernels
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e34, 3e36])
def test_neither_large_nor_small_chunks_get_lost(kernels: DctKernels, scale: float) -> None:
    chunks = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1)).mul(scale)
    places, values = kernels.choose(chunks.to(DEVICE), 4)
    expected_places, expected = dct_kernels.choose(chunks, 4)
    assert scale < 1e-40 or torch.equal(places.cpu().long(), expected_places)
    assert values.isfinite().all()
    torch.testing.assert_close(values.cpu().abs().amax(), expected.abs().amax(), rtol=1e-5, atol=2e-44)


@runs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_chunk_that_is_not_finite_has_places_inside_itself(kernels: DctKernels, bad: float) -> None:
    chunks = noise(2, 13, 20)
    chunks[0, 3, 5] = bad
    places, values = kernels.choose(chunks.to(DEVICE), 7)
    assert bool((places.diff() > 0).all()) and int(places.min()) >= 0 and int(places.max()) < 13 * 20
    assert not values[0].isfinite().all() and values[1].isfinite().all()


@runs_kernels
@pytest.mark.parametrize("values", ["sign", "float32"])
def test_payload_is_that_of_plain_torch_and_nothing_is_lost(
    kernels: DctKernels, values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the matrix, what the chunks do not divide, and vectors; what is taken out can be put back."""
    layout = FlatLayout((Slot("a", (130, 70), 0), Slot("b", (100,), 9100), Slot("c", (64, 64), 9200)))
    codec = SparseCodec(layout, SparseRule(k=4, values=values), device=torch.device(DEVICE))
    feedback, memory = SparseResidual(codec, decay=0.9), noise(1, codec.numel)[0]
    plain, before = memory.clone(), memory.clone()
    expected = SparseResidual(SparseCodec(layout, codec.rule), decay=0.9).extract(plain)
    monkeypatch.setattr(codec_module, "dct_kernels_on", lambda device, longest: kernels)
    encoded = feedback.extract(memory)
    if values == "sign":
        assert torch.equal(encoded.payload, expected.payload)
    codec.check(encoded.payload)
    torch.testing.assert_close(memory, plain, rtol=0, atol=2e-8)
    feedback.restore(memory, encoded.taken)
    torch.testing.assert_close(memory, before, rtol=0, atol=2e-8)


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="Triton's interpreter compiles nothing")
def test_compiled_kernels_multiply_in_float32(kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFloat-32 would keep 11 of 24 bits."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for launch in dct_launches(kernels, 64, 64, 4):
        assert not re.search(r"tf32|\.ftz|\.approx", launch.compiled(90).asm["ptx"])


def test_chunks_that_are_too_long_for_a_gpu_are_left_to_plain_torch() -> None:
    assert dct_kernels.dct_kernels_on(torch.device("cuda"), longest=dct_kernels.MOST_IN_TRITON + 1) is dct_kernels
