"""Durations under a clock that the test moves."""

from __future__ import annotations

import pytest

from zeroband.observe.spans import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.at_s = 100.0

    def __call__(self) -> float:
        return self.at_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stopwatch(clock: Clock) -> Stopwatch:
    return Stopwatch(clock)


def test_span_adds_up_over_a_lap(stopwatch: Stopwatch, clock: Clock) -> None:
    for took_s in (2.0, 3.0):
        with stopwatch.span("wait"):
            clock.at_s += took_s
        clock.at_s += 10
    spans = stopwatch.lap()
    assert (dict(spans.took_s), dict(spans.counts)) == ({"wait": 5.0}, {"wait": 2})


def test_span_counts_what_nested_ones_count_too(stopwatch: Stopwatch, clock: Clock) -> None:
    with stopwatch.span("step"):
        clock.at_s += 1
        with stopwatch.span("data"):
            clock.at_s += 4
    assert stopwatch.lap().took_s == {"step": 5.0, "data": 4.0}


def test_span_counts_when_its_block_raises(stopwatch: Stopwatch, clock: Clock) -> None:
    with pytest.raises(KeyError), stopwatch.span("transfer"):
        clock.at_s += 3
        raise KeyError
    assert stopwatch.lap().seconds("transfer") == 3.0


def test_span_open_at_a_lap_counts_in_the_next(stopwatch: Stopwatch, clock: Clock) -> None:
    with stopwatch.span("wait"):
        clock.at_s += 1
        first = stopwatch.lap()
        clock.at_s += 1
    assert (first.seconds("wait"), stopwatch.lap().seconds("wait")) == (0.0, 2.0)


def test_lap_is_not_changed_by_what_follows(stopwatch: Stopwatch) -> None:
    stopwatch.add("wait", 1.0)
    first = stopwatch.lap()
    stopwatch.add("wait", 7.0)
    assert first.took_s == {"wait": 1.0}
    with pytest.raises(TypeError):
        first.took_s["wait"] = 2.0  # type: ignore[index]
