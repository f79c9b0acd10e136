"""When a pause is a stall: on fake time."""

from __future__ import annotations

from zeroband.elastic.transport.stalls import StallLimit, StallLimits, StallWatch, TransferBounds

BOUNDS = TransferBounds(stall_s=10.0, max_stall_s=150.0, stream_s=60.0, connect_s=15.0)


def test_limit_doubles_with_every_stall_up_to_its_most() -> None:
    limit, seen = StallLimit(10.0, 150.0), list[float]()
    for _ in range(6):
        seen.append(limit.limit_s)
        limit.stalled()
    assert seen == [10.0, 20.0, 40.0, 80.0, 150.0, 150.0]


def test_limit_comes_back_when_a_transfer_succeeds_and_leaves_slow_ones_their_pauses() -> None:
    limit = StallLimit(10.0, 150.0)
    for _ in range(3):
        limit.stalled()
    limit.succeeded(35.0)
    assert limit.limit_s == 70.0, "it is not too short again in the next round"
    limit.succeeded(1.0)
    assert limit.limit_s == 10.0


def test_slow_transfer_gets_through_after_a_few_attempts() -> None:
    """Its longest pause is known to nobody, and it has to begin anew with each attempt."""
    limit, attempts = StallLimit(10.0, 150.0), 1
    while limit.limit_s < 70.0:
        limit.stalled()
        attempts += 1
    assert attempts == 4


def test_progress_counts_the_time_in_which_nothing_grew() -> None:
    progress = StallWatch(look_s=1.0, at_s=0.0)
    assert [progress.see(value, now_s) for now_s, value in enumerate([5, 5, 5, 6, 6], start=1)] == [0, 1, 2, 0, 1]
    assert progress.longest_s == 2


def test_pause_of_this_process_is_nobodys_fault() -> None:
    """It was stopped for a minute; what came meanwhile is still to be read."""
    progress = StallWatch(look_s=1.0, at_s=0.0)
    assert [progress.see(5, now_s) for now_s in (1.0, 61.0, 62.0)] == [0, 0, 1]


def test_links_have_limits_of_their_own_which_members_that_left_do_not_keep() -> None:
    limits = StallLimits(BOUNDS)
    limits.of_link("a#1").stalled()
    assert (limits.of_link("a#1").limit_s, limits.of_link("b#1").limit_s, limits.transfer.limit_s) == (20.0, 10.0, 10.0)
    limits.forget_all_but(["b#1"])
    assert limits.of_link("a#1").limit_s == 10.0
