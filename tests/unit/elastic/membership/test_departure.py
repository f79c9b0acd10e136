"""Departure: asked once, overdue after its grace."""

from __future__ import annotations

import math

import pytest

from zeroband.elastic.membership.departure import Departure


def test_node_stays_until_it_is_asked() -> None:
    departure = Departure(grace_s=0.0)
    assert not departure.is_asked and not departure.is_overdue(1e9)


def test_node_has_no_work_to_hand_over_at_first() -> None:
    assert not Departure(grace_s=1.0).holds_work


@pytest.mark.parametrize(("now_s", "expected"), [(100.0, False), (124.9, False), (125.0, True), (1e9, True)])
def test_node_must_go_when_its_grace_is_over(now_s: float, expected: bool) -> None:
    departure = Departure(grace_s=25.0)
    departure.ask(100.0)
    assert departure.is_asked and departure.is_overdue(now_s) is expected


def test_time_that_is_left_is_that_of_the_grace() -> None:
    departure = Departure(grace_s=25.0)
    departure.drain()
    assert departure.time_left_s(100.0) == math.inf  # an operator has time
    departure.ask(100.0)
    assert [departure.time_left_s(now_s) for now_s in (100.0, 124.0, 126.0)] == [25.0, 1.0, 0.0]


def test_asking_again_gives_no_more_time() -> None:
    departure = Departure(grace_s=25.0)
    departure.ask(100.0)
    departure.ask(120.0)
    assert departure.is_overdue(125.0)


def test_node_without_grace_goes_at_once() -> None:
    departure = Departure(grace_s=0.0)
    departure.ask(100.0)
    assert departure.is_overdue(100.0)
