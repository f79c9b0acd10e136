"""When gradients tell one batch from another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zeroband.dropin.peer_checks import first_gradients


def parameters(*gradients: Tensor | None) -> list[nn.Parameter]:
    made: list[nn.Parameter] = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(20 if gradient is None else gradient.shape))
        parameter.grad = gradient
        made.append(parameter)
    return made


def test_equal_gradients_have_one_digest_and_one_other_bit_gives_another() -> None:
    values, other = torch.randn(3, 40), torch.randn(5)
    digest = first_gradients(parameters(values.clone(), None, other.clone()))
    assert digest is not None
    assert first_gradients(parameters(values.clone(), None, other.clone())) == digest
    values[1, 7] += 1e-6
    assert first_gradients(parameters(values, None, other)) != digest


@pytest.mark.parametrize(
    "gradient",
    [
        None,
        torch.zeros(100),
        torch.ones(100),
        torch.tensor([0.0, 1.0, -1.0]),
        torch.cat([torch.randn(50), torch.tensor([float("nan")])]),
        torch.cat([torch.randn(50), torch.tensor([float("inf")])]),
    ],
)
def test_gradients_that_would_be_equal_for_other_batches_have_none(gradient: Tensor | None) -> None:
    assert first_gradients(parameters(gradient)) is None
