"""How a link comes to its congestion control and its number of streams."""

from __future__ import annotations

from collections.abc import Callable

from zeroband.plane.tuning import BBR, CUBIC, LinkTuning

MB = 1 << 20


def after(rate_of: Callable[[int, str], float], first: LinkTuning | None = None) -> LinkTuning:
    """What a link comes to whose rate, in bytes per second, depends on how it is driven."""
    tuning = first or LinkTuning()
    for _ in range(20):
        tuning = tuning.after(64 * MB, 64 * MB / rate_of(tuning.streams, tuning.congestion))
    return tuning


def growing(*rates: float) -> Callable[[int, str], float]:
    """A link of which only the number of streams matters: its rates with 8, 16 and 32."""
    return lambda streams, congestion: dict(zip((8, 16, 32), rates, strict=True))[streams]


def test_streams_are_doubled_while_each_doubling_pays() -> None:
    assert after(growing(1e6, 1.9e6, 3.6e6)).streams == 32


def test_doubling_that_does_not_pay_is_the_last() -> None:
    assert after(growing(1e6, 1.05e6, 9e6)).streams == 16


def test_numbers_stay_below_the_limit() -> None:
    settled = after(growing(1.0e6, 2e6, 4e6))
    assert settled.is_settled and settled.after(64 * MB, 1e-3) == settled


def test_link_that_loses_packets_gets_the_control_that_does_not_mind() -> None:
    settled = after(lambda streams, congestion: 9e6 if congestion == BBR else streams * 1e5)
    assert settled.is_settled and settled.congestion == BBR and settled.streams == 16


def test_link_that_loses_none_keeps_the_control_that_shares_best() -> None:
    settled = after(lambda streams, congestion: 8e6 if congestion == BBR else 9e6)
    assert settled.is_settled and settled.congestion == CUBIC


def test_as_fast_is_no_reason_for_another_control() -> None:
    assert after(lambda streams, congestion: 9.5e6 if congestion == BBR else 9e6).congestion == CUBIC


def test_streams_are_compared_with_the_better_control() -> None:
    """A doubling that only makes up for what the worse control had lost does not pay."""
    settled = after(lambda streams, congestion: (5e6 if congestion == BBR else 9e6) * (1.02 if streams > 8 else 1))
    assert settled.streams == 16 and settled.congestion == CUBIC


def test_one_slow_transfer_does_not_decide() -> None:
    tuning = LinkTuning().after(64 * MB, 64.0).after(64 * MB, 1.0)
    assert tuning.congestion == BBR and tuning.before == 64 * MB


def test_short_transfers_teach_nothing() -> None:
    assert LinkTuning().after(MB, 0.01) == LinkTuning() == LinkTuning().after(64 * MB, 0.0)


def test_number_that_the_user_chose_stays() -> None:
    settled = after(lambda streams, congestion: 9e6 if congestion == BBR else 1e6, LinkTuning.fixed(3))
    assert settled.streams == 3 and settled.congestion == BBR and settled.is_settled
