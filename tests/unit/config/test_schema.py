"""Rules of the schema that no single value breaks."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from zeroband.config.schema import FaultConfig, ModelConfig


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"d_model": 10, "n_heads": 4}, "model.d_model=10 is not a multiple of model.n_heads=4"),
        ({"d_model": 12, "n_heads": 4}, "model.d_model / model.n_heads = 3 is odd"),
        ({"d_model": 64, "n_heads": 8, "n_kv_heads": 3}, "model.n_heads=8 is not a multiple of model.n_kv_heads=3"),
    ],
)
def test_heads_that_do_not_divide_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig(**sizes)


def test_sizes_left_out_follow_from_the_others() -> None:
    assert (ModelConfig(d_model=128).kv_heads, ModelConfig(d_model=128).ff_width) == (4, 384)
    assert (ModelConfig(n_kv_heads=2).kv_heads, ModelConfig(d_ff=100).ff_width) == (2, 100)


@pytest.mark.parametrize("detect_s", [0.5, 1.0, 5.0, 60.0, 600.0])
def test_time_outs_derived_from_detect_s_are_in_order(detect_s: float) -> None:
    fault = FaultConfig(detect_s=detect_s)
    assert fault.watch_s < fault.detect_s
    assert 3 * fault.renew_s < fault.lease_s < fault.hung_s < fault.transfer_s


@pytest.mark.parametrize("detect_s", [0.4, 601.0, float("nan")])
def test_detect_s_out_of_its_range_is_refused(detect_s: float) -> None:
    with pytest.raises(ValidationError, match="detect_s"):
        FaultConfig(detect_s=detect_s)
