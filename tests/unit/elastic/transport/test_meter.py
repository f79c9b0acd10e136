"""What transfers teach of the links."""

from __future__ import annotations

import pytest

from zeroband.elastic.transport.tuning import KEPT, WINDOW_S, LearnedRates, Meter

MBIT = 125_000


def metered(sent: list[float], received: list[float]) -> Meter:
    """A transfer with these Mbit/s in each window."""
    meter, now_s, out, back = Meter(), 100.0, 0.0, 0.0
    meter.see(0, 0, now_s)
    for there, here in zip(sent, received, strict=True):
        now_s, out, back = now_s + WINDOW_S, out + there * MBIT * WINDOW_S, back + here * MBIT * WINDOW_S
        meter.see(round(out), round(back), now_s)
    return meter


def test_rate_is_the_best_of_a_window_in_the_slower_direction() -> None:
    assert metered([30, 90, 20], [10, 20, 40]).rate == 40


@pytest.mark.parametrize("windows", [0, 1])
def test_short_transfer_says_nothing(windows: int) -> None:
    assert metered([90] * windows, [90] * windows).rate == 0


def test_looks_between_windows_change_nothing() -> None:
    meter = metered([50, 50], [50, 50])
    for share in (0.2, 0.4, 0.9):
        meter.see(10**9, 10**9, 101.0 + share * WINDOW_S)
    assert meter.rate == 50


def test_best_of_the_last_transfers_counts_and_older_ones_are_forgotten() -> None:
    learned = LearnedRates().after(90, {"b": 70})
    for _ in range(KEPT - 1):
        learned = learned.after(20, {"b": 10})
    assert learned.own_rate == 90 and learned.link_rates() == {"b": 70}
    learned = learned.after(20, {"b": 10})
    assert learned.own_rate == 20 and learned.link_rates() == {"b": 10}


def test_few_transfers_say_nothing() -> None:
    learned = LearnedRates()
    for _ in range(KEPT - 1):
        assert learned.own_rate == 0 and not any(learned.link_rates().values())
        learned = learned.after(90, {"b": 70})
    assert learned.own_rate == 0 and learned.link_rates() == {"b": 0}
    learned = learned.after(0, {"b": 0})
    assert learned.own_rate == 0 and learned.link_rates() == {"b": 0}


def test_transfer_that_says_nothing_forgets_no_rate_but_members_that_left() -> None:
    learned = LearnedRates((90,), {"b": (70,), "c": (60,)})
    for _ in range(2 * KEPT):
        learned = learned.after(0, {"b": 0, "d": 0})
    assert learned == LearnedRates((90,), {"b": (70,), "d": ()})
