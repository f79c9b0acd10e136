"""The two passes in plain torch: what they send is what the codec sends, and their step is that of the outer SGD."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from tests.unit.kernels.passes import DIFFERENCES, INT8, encode, is_same, noise, step
from torch import Tensor

from zeroband.config.outer import OuterSGDConfig
from zeroband.kernels import fused
from zeroband.kernels.fused import BLOCK, OuterStep, passes_on
from zeroband.outer.outer_optimizer import OuterSGD

N = 12 * BLOCK
CPU = torch.device("cpu")


@pytest.mark.parametrize("make", DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_encoding_of_a_difference_is_that_of_the_codec(make: Callable[[int], Tensor]) -> None:
    difference = make(N)
    data, has_bad = encode(fused, difference, torch.zeros(N))
    assert torch.equal(data, INT8.encode(difference)) and not has_bad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_difference_is_taken_in_float32(dtype: torch.dtype) -> None:
    outer = noise(N)
    inner = (outer + 1e-2 * noise(N, seed=1)).to(dtype)
    assert torch.equal(encode(fused, outer, inner)[0], INT8.encode(outer - inner.float()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("index", [0, BLOCK, N - 1])
def test_difference_that_is_not_finite_is_told(bad: float, index: int) -> None:
    inner = noise(N)
    inner[index] = bad
    assert encode(fused, noise(N, seed=1), inner)[1]


@pytest.mark.parametrize(("start", "stop"), [(0, N), (0, 1), (3, 700), (BLOCK, 2 * BLOCK), (BLOCK - 1, N - 5)])
@pytest.mark.parametrize("is_nesterov", [True, False])
def test_step_is_that_of_the_outer_optimizer_bit_for_bit(start: int, stop: int, is_nesterov: bool) -> None:
    sgd = OuterSGD(OuterSGDConfig(lr=0.7, momentum=0.9, nesterov=is_nesterov, momentum_warmup_rounds=3))
    data = INT8.encode(1e-3 * noise(N))
    params, momentum = noise(stop - start, seed=1), 1e-3 * noise(stop - start, seed=2)
    sgd.apply(params, momentum, INT8.decode(data, N)[start:stop], outer_step=2)
    for dtype in (torch.float32, torch.bfloat16):
        stepped = step(fused, data, start, stop, sgd.step_at(2), dtype, "cpu")
        assert is_same(stepped.params, params) and is_same(stepped.momentum, momentum)
        assert is_same(stepped.inner, params.to(dtype))


def test_plain_torch_serves_on_a_cpu() -> None:
    assert passes_on(CPU) is sys.modules[fused.__name__]


def test_plain_torch_serves_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """That this is said, and what it costs: `checks/machine.py`."""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert passes_on(torch.device("cuda")) is sys.modules[fused.__name__]


def test_step_of_the_first_rounds_has_less_momentum() -> None:
    sgd = OuterSGD(OuterSGDConfig(lr=0.5, momentum=0.8, momentum_warmup_rounds=3))
    assert sgd.step_at(1) == OuterStep(0.5, 0.2, is_nesterov=True)
    assert sgd.step_at(9) == OuterStep(0.5, 0.8, is_nesterov=True)
