"""Pauses that grow up to a longest one, of which a part may be left to chance."""

from __future__ import annotations

import pytest

from zeroband.node.backoff import Backoff


@pytest.mark.parametrize(
    ("pauses", "expected"),
    [
        (Backoff(0.5, 3.0), [0.5, 1.0, 2.0, 3.0, 3.0]),
        (Backoff(0.5, 3.0, factor=1.5), [0.5, 0.75, 1.125, 1.6875, 2.53125]),
        (Backoff(2.0, 2.0), [2.0, 2.0]),
    ],
)
def test_pauses_grow_up_to_the_longest(pauses: Backoff, expected: list[float]) -> None:
    assert [pauses.pause_s() for _ in expected] == expected


def test_pause_is_drawn_from_the_part_that_is_left_to_chance() -> None:
    drawn = [Backoff(1.0, 1.0, jitter=0.5).pause_s() for _ in range(200)]
    assert all(0.5 <= pause_s <= 1.0 for pause_s in drawn) and max(drawn) - min(drawn) > 0.25


def test_next_pause_is_known_at_its_longest_before_it_is_drawn() -> None:
    pauses = Backoff(1.0, 8.0, jitter=0.5)
    assert pauses.longest_s == 1.0
    pauses.pause_s()
    assert pauses.longest_s == 2.0
