"""What a rank keeps in its GPU's memory, by size."""

from __future__ import annotations

import pytest

from zeroband.config.placement import Placement, placement
from zeroband.config.training import TrainConfig

GB = 10**9
KEEPS_ALL, KEEPS_PARAMETERS, KEEPS_NOTHING = Placement(False, False), Placement(False, True), Placement(True, True)


@pytest.mark.parametrize(
    ("params", "ranks", "gpu_bytes", "expected"),
    [
        (0.2e9, 1, 16 * GB, KEEPS_ALL),
        (1.1e9, 1, 24 * GB, KEEPS_NOTHING),
        (1.1e9, 1, 80 * GB, KEEPS_ALL),
        (10.2e9, 8, 80 * GB, KEEPS_PARAMETERS),
        (10.2e9, 8, 40 * GB, KEEPS_NOTHING),
        (10.2e9, 8, None, Placement(True, False)),
    ],
)
def test_what_is_left_open_is_kept_where_it_fits(
    params: float, ranks: int, gpu_bytes: int | None, expected: Placement
) -> None:
    assert placement(TrainConfig(), params=int(params), ranks=ranks, gpu_bytes=gpu_bytes) == expected


@pytest.mark.parametrize("gpu_bytes", [None, GB, 1000 * GB])
def test_what_the_configuration_says_is_done(gpu_bytes: int | None) -> None:
    train = TrainConfig(reshard_after_forward=False, reduce_gradients="micro_batch")
    assert placement(train, params=10**9, ranks=2, gpu_bytes=gpu_bytes) == KEEPS_PARAMETERS
