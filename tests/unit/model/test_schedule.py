"""Learning-rate schedules at their exact points."""

import pytest

from zeroband.config.optim import (
    AdamWConfig,
    CosineSchedule,
    LinearSchedule,
    LrSchedule,
    OptimConfig,
    WarmupStableDecaySchedule,
)
from zeroband.model.optim import learning_rate

PEAK, WARMUP, TOTAL = 2.0, 10, 110


def rate(step: int, schedule: LrSchedule, warmup_steps: int = WARMUP) -> float:
    optim = OptimConfig(adamw=AdamWConfig(lr=PEAK), schedule=schedule, warmup_steps=warmup_steps)
    return learning_rate(step, optim=optim, total_steps=TOTAL)


@pytest.mark.parametrize(
    "schedule", [CosineSchedule(), LinearSchedule(type="linear"), WarmupStableDecaySchedule(type="wsd")]
)
def test_warmup_grows_linearly_to_the_peak(schedule: LrSchedule) -> None:
    assert [rate(step, schedule) for step in (0, 4, 9, 10)] == pytest.approx([0.2, 1.0, PEAK, PEAK])


def test_cosine_passes_its_quarter_points() -> None:
    schedule = CosineSchedule(final_ratio=0.1)
    mean = PEAK * 0.55
    swing = PEAK * 0.45 * 0.5**0.5
    expected = [PEAK, mean + swing, mean, mean - swing, PEAK * 0.1]
    assert [rate(step, schedule) for step in (10, 35, 60, 85, 110)] == pytest.approx(expected)


def test_linear_falls_by_equal_parts() -> None:
    schedule = LinearSchedule(type="linear", final_ratio=0.2)
    assert [rate(step, schedule) for step in (10, 60, 85, 110)] == pytest.approx([2.0, 1.2, 0.8, 0.4])


def test_wsd_holds_the_peak_until_its_decay() -> None:
    schedule = WarmupStableDecaySchedule(type="wsd", decay_ratio=0.2)  # the last 22 of 110 steps
    assert [rate(step, schedule) for step in (10, 50, 88, 99, 110)] == pytest.approx([2.0, 2.0, 2.0, 1.0, 0.0])


def test_wsd_decay_longer_than_what_warmup_leaves_starts_after_warmup() -> None:
    schedule = WarmupStableDecaySchedule(type="wsd", decay_ratio=1.0)
    assert [rate(step, schedule) for step in (9, 10, 60, 110)] == pytest.approx([2.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize("schedule", [CosineSchedule(), LinearSchedule(type="linear", final_ratio=0.1)])
def test_rate_stays_at_its_end_after_the_last_step(schedule: LrSchedule) -> None:
    assert rate(TOTAL + 1000, schedule) == rate(TOTAL, schedule) == pytest.approx(0.2)


def test_last_step_of_a_decay_to_zero_still_learns() -> None:
    assert rate(TOTAL - 1, LinearSchedule(type="linear")) == pytest.approx(PEAK / 100)


def test_no_warmup_starts_at_the_peak() -> None:
    assert rate(0, CosineSchedule(), warmup_steps=0) == PEAK


def test_warmup_as_long_as_the_run_never_divides_by_zero() -> None:
    assert rate(TOTAL - 1, CosineSchedule(), warmup_steps=TOTAL) == PEAK
    assert rate(TOTAL, CosineSchedule(), warmup_steps=TOTAL) == pytest.approx(0.2)
