"""The names and forms of a user's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from zeroband.dropin.inner import frozen_items, parameters_of
from zeroband.errors import ConfigError
from zeroband.node.sharding import NamedParameters


def named(params: Any) -> NamedParameters:
    return parameters_of(torch.optim.SGD(params, lr=0.1).param_groups, ranks=1)


def test_names_are_those_of_the_model() -> None:
    model = nn.Linear(2, 3)
    found = named(model.named_parameters())
    assert found.named == dict(model.named_parameters())
    assert found.numel == 9
    assert found.shapes == {"parameter bias": "(3,)", "parameter weight": "(3, 2)"}


def test_names_are_those_of_the_model_whatever_it_is_wrapped_in() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    bare = set(named(model.named_parameters()).named)
    wrapped = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"_orig_mod": model})})  # DDP of a compiled one
    assert set(named(wrapped.named_parameters()).named) == bare == {"0.weight", "0.bias", "1.weight", "1.bias"}
    model[1] = torch.compile(model[1])
    assert set(named(model.named_parameters()).named) == bare
    mine = nn.ModuleDict({"module": nn.Linear(2, 3), "head": nn.Linear(3, 1)})
    assert "module.weight" in named(mine.named_parameters()).named


def test_parameters_without_names_are_called_by_their_places() -> None:
    first, second = nn.Linear(2, 3), nn.Linear(3, 1)
    groups = [{"params": list(first.parameters())}, {"params": list(second.parameters()), "lr": 1.0}]
    assert list(named(groups).named) == ["0.000000", "0.000001", "1.000000", "1.000001"]
    assert dict(named(groups).named_parameters())["1.000001"] is second.bias


def test_frozen_parameters_are_compared_and_stay_at_home() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False).bfloat16()
    groups = torch.optim.SGD(model.named_parameters(), lr=0.1).param_groups
    assert set(parameters_of(groups, ranks=1).named) == {"1.weight", "1.bias"}
    before = frozen_items(groups)
    assert set(before) == {"frozen parameters"} and frozen_items(groups) == before
    with torch.no_grad():
        model[0].bias += 1
    assert frozen_items(groups) != before
    assert frozen_items(torch.optim.SGD(model[1].parameters(), lr=0.1).param_groups) == {}


def sharing() -> Iterable[tuple[str, nn.Parameter]]:
    one = nn.Parameter(torch.zeros(2))
    return [("in", one), ("out", one)]


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ([("w", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))], "parameter w is torch.bfloat16"),
        ([("w", nn.Parameter(torch.zeros(2, dtype=torch.float64)))], "parameter w is torch.float64"),
        ([("w", nn.Parameter(torch.zeros(2), requires_grad=False))], "no parameter that has requires_grad"),
        ([("w", nn.Parameter(torch.zeros(2, device="meta")))], "parameter w is on the meta device"),
        ([("w", nn.Parameter(torch.zeros(2, 3).t()))], "parameter w is not contiguous"),
        ([("w", nn.Parameter(torch.zeros(1))), ("w", nn.Parameter(torch.zeros(1)))], "two parameters are called 'w'"),
    ],
)
def test_parameters_that_cannot_be_averaged_are_refused_by_name(params: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        named(params)


def test_one_tensor_under_two_names_is_refused() -> None:
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ConfigError, match="in and out are one"),
    ):
        named(sharing())
