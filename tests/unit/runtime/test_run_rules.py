"""What a run asks of a round, from its settings."""

from __future__ import annotations

import pytest

from zeroband.config import load_config
from zeroband.runtime.run_rules import rules_of


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        (["--outer.inner-seconds=60", "--outer.overlap=full"], True),
        (["--outer.inner-seconds=60", "--outer.overlap=full", "--outer.fragments=2"], False),
        (["--outer.inner-seconds=60"], False),
        (["--outer.overlap=full"], False),
    ],
)
def test_joiners_are_called_where_phases_by_time_train_through_their_rounds(settings: list[str], calls: bool) -> None:
    environ = {"ZERO_BAND_STORE__URL": "redis://h", "ZERO_BAND_OUTER__TYPE": "diloco"}
    assert rules_of(load_config(settings, environ)).syncs_on_demand is calls
