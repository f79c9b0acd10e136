"""One pass over values: whether all are finite, and their norm."""

from __future__ import annotations

import math

import pytest
import torch

from zeroband.kernels.scan import all_finite, norm


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [1, 2, 15, 16, 17, 1000, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(bad: float, numel: int, dtype: torch.dtype) -> None:
    values = torch.linspace(-1, 1, numel).to(dtype)
    assert all_finite(values)
    for place in {0, numel // 2, numel - 1}:
        spoilt = values.clone()
        spoilt[place] = bad
        assert not all_finite(spoilt), place


def test_the_largest_values_are_finite_and_so_are_none() -> None:
    most = torch.finfo(torch.float32).max
    assert all_finite(torch.tensor([most, -most, most]))
    assert all_finite(torch.empty(0))
    assert all_finite(torch.zeros(3, 4)) and not all_finite(torch.full((3, 4), math.nan))


@pytest.mark.parametrize("numel", [0, 1, 65_536, 200_003])
def test_norm_is_that_of_torch_in_float64(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    assert norm(values) == pytest.approx(float(torch.linalg.vector_norm(values.double())), rel=1e-12)


def test_norm_of_values_whose_squares_float32_does_not_hold() -> None:
    assert norm(torch.full((4,), 1e30)) == pytest.approx(2e30)
    assert math.isnan(norm(torch.tensor([1.0, math.nan])))
