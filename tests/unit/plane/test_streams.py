"""How the number of streams grows."""

from __future__ import annotations

from zeroband.plane.streams import StreamCount

MB = 1 << 20


def after(rate_of: dict[int, float]) -> StreamCount:
    """What a link comes to whose rate, in bytes per second, depends on the number of streams."""
    count = StreamCount()
    for _ in range(20):
        count = count.after(64 * MB, 64 * MB / rate_of[count.wanted])
    return count


def test_streams_are_doubled_while_each_doubling_pays() -> None:
    assert after({4: 1e6, 8: 1.9e6, 16: 3.6e6}).wanted == 16


def test_doubling_that_does_not_pay_is_the_last() -> None:
    assert after({4: 1e6, 8: 1.05e6, 16: 9e6}).wanted == 8


def test_numbers_stay_below_the_limit() -> None:
    assert after({4: 1.0e6, 8: 2e6, 16: 4e6, 32: 9e6}) == after({4: 1.0e6, 8: 2e6, 16: 4e6})


def test_one_slow_transfer_does_not_decide() -> None:
    count = StreamCount().after(64 * MB, 64.0).after(64 * MB, 1.0)
    assert count.wanted == 8 and count.before == 64 * MB


def test_short_transfers_teach_nothing() -> None:
    assert StreamCount().after(MB, 0.01) == StreamCount() == StreamCount().after(64 * MB, 0.0)


def test_number_that_the_user_chose_stays() -> None:
    count = StreamCount.fixed(3)
    assert count.after(64 * MB, 1.0) == count
