"""How a link comes to its congestion control, its number of streams, how many of them send, and its pace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from zeroband.elastic.transport.engine import LinkState
from zeroband.elastic.transport.tuning import (
    BBR,
    CUBIC,
    KEPT_TRANSFERS,
    WINDOW_S,
    Kind,
    LearnedRates,
    LinkTuning,
    Meter,
    MidTransfer,
    PacedKind,
    RateControl,
    Senders,
)

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


class Counters:
    """Of a link of eight streams, which goes on sending."""

    def __init__(self) -> None:
        self.sent = self.resent = 0

    def after(self, packets: int, lost: float, window: int) -> LinkState:
        """So many packets later, of which this share was sent again, with this window of a stream."""
        self.sent, self.resent = self.sent + packets, self.resent + round(lost * packets)
        return LinkState(True, 8, 0.02, 0.0, 0, window, self.sent, self.resent)


CROWDED, ALONE = (200, 0.1, 3), (200, 0.02, 8)
"""What eight streams and one show on a slow link: packets, the share sent again, window."""


def judged(counters: Counters, *looks: tuple[int, float, int], first: Senders | None = None) -> list[int]:
    """How many streams of eight send after each look."""
    senders, numbers = first or Senders(), list[int]()
    for look in looks:
        senders = senders.after(counters.after(*look))
        numbers.append(senders.of(8))
    return numbers


def test_streams_that_crowd_one_another_out_leave_the_link_to_one() -> None:
    assert judged(Counters(), CROWDED, CROWDED, ALONE, ALONE) == [1, 1, 1, 1]


def test_what_the_others_had_begun_is_not_held_against_one_alone() -> None:
    assert judged(Counters(), CROWDED, (200, 0.5, 1), ALONE, (200, 0.09, 5)) == [1, 1, 1, 1]


def test_losses_that_one_stream_alone_has_too_are_not_of_its_making() -> None:
    assert judged(Counters(), CROWDED, CROWDED, CROWDED, CROWDED, CROWDED) == [1, 1, 8, 8, 8]


def test_more_streams_send_again_as_there_is_room() -> None:
    roomy = (200, 0.0, 30)
    assert judged(Counters(), CROWDED, ALONE, ALONE, roomy, roomy, ALONE, roomy, CROWDED) == [1, 1, 1, 2, 4, 4, 8, 1]


def test_some_that_crowd_one_another_out_become_half_as_many() -> None:
    assert judged(Counters(), *[CROWDED] * 4, first=Senders(count=6)) == [3, 1, 1, 1]


@pytest.mark.parametrize(
    "look",
    [(100, 0.3, 2), (200, 0.04, 3), (200, 0.3, 40), (200, 0.3, 0)],
    ids=["few packets", "few losses", "large windows", "nothing under way"],
)
def test_streams_that_do_not_crowd_one_another_out_all_send(look: tuple[int, float, int]) -> None:
    assert judged(Counters(), look) == [8]


def test_few_packets_are_judged_with_those_that_follow() -> None:
    assert judged(Counters(), (100, 0.1, 3), (100, 0.1, 3)) == [8, 1]


def test_link_of_new_streams_goes_on_as_the_old_one() -> None:
    senders = Senders(count=1, sent_packets=10_000, resent_packets=900)
    assert judged(Counters(), CROWDED, ALONE, first=senders) == [1, 1]


@pytest.mark.parametrize(("bbr", "is_lossy"), [(20e6, True), (9e6, False)], ids=["loses packets", "loses none"])
def test_link_is_lossy_where_it_was_found_out(bbr: float, is_lossy: bool) -> None:
    tuning, seen = LinkTuning(), [False]
    for _ in range(4):
        tuning = tuning.after(64 * MB, 64 * MB / (bbr if tuning.congestion == BBR else 9e6))
        seen.append(tuning.is_lossy)
    assert seen == [False] * 4 + [is_lossy]


# -- what transfers show of the links ----------------------------------------------------------------------------------

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
    for _ in range(KEPT_TRANSFERS - 1):
        learned = learned.after(20, {"b": 10})
    assert learned.own_rate == 90 and learned.link_rates() == {"b": 70}
    learned = learned.after(20, {"b": 10})
    assert learned.own_rate == 20 and learned.link_rates() == {"b": 10}


def test_few_transfers_say_nothing() -> None:
    learned = LearnedRates()
    for _ in range(KEPT_TRANSFERS - 1):
        assert learned.own_rate == 0 and not any(learned.link_rates().values())
        learned = learned.after(90, {"b": 70})
    assert learned.own_rate == 0 and learned.link_rates() == {"b": 0}
    learned = learned.after(0, {"b": 0})
    assert learned.own_rate == 0 and learned.link_rates() == {"b": 0}


def test_transfer_that_says_nothing_forgets_no_rate_but_members_that_left() -> None:
    learned = LearnedRates((90,), {"b": (70,), "c": (60,)})
    for _ in range(2 * KEPT_TRANSFERS):
        learned = learned.after(0, {"b": 0, "d": 0})
    assert learned == LearnedRates((90,), {"b": (70,), "d": ()})


# -- the pace of transfers over shared access links, against made-up links that carry an even pace best ----------------

CARRIES_S, TOO_FAST_S, PROMISES_S = 4.0, 4.8, 4.3
REST = 32


def took(target_s: float | None) -> float:
    """What links that carry a transfer in CARRIES_S make of a pace, and what the middle promises of one without."""
    if target_s is None:
        return PROMISES_S
    return target_s if target_s >= CARRIES_S else TOO_FAST_S


@dataclass
class Run:
    """Transfers of one kind, one in each round."""

    takes: Callable[[float | None], float] = took
    pacing: PacedKind = field(default_factory=PacedKind)

    def go(self, rounds: int) -> list[float]:
        """So many more rounds; what each transfer took."""
        times: list[float] = []
        for _ in range(rounds):
            times.append(self.takes(self.pacing.target_s))
            self.pacing = self.pacing.after(times[-1])
        return times


def test_two_transfers_are_left_to_tcp_and_the_third_is_paced_as_the_better_one_promised() -> None:
    promises = iter((9.0, 4.2))
    run = Run(lambda target_s: next(promises) if target_s is None else target_s)
    run.go(1)
    assert run.pacing.target_s is None
    run.go(1)
    assert run.pacing.target_s == 4.2


@pytest.mark.parametrize("guess_s", [3.8, 3.95, 4.0, 4.3, 6.4, 12.0])
def test_pace_comes_close_to_what_the_links_carry_and_stays_there(guess_s: float) -> None:
    run = Run(lambda target_s: guess_s if target_s is None else took(target_s))
    searching = run.go(18)
    assert searching.count(TOO_FAST_S) <= 4, "much too fast is worse than what TCP does"
    assert set(run.go(REST - 18)) == {run.pacing.target_s}
    assert run.pacing.target_s == pytest.approx(1.02 * CARRIES_S, rel=0.02)


def test_what_was_found_is_tried_again_after_a_rest_at_the_cost_of_one_transfer() -> None:
    run = Run()
    run.go(14)
    found_s = run.pacing.target_s
    assert run.go(2 * REST).count(TOO_FAST_S) == 2
    assert run.pacing.target_s == found_s


def test_guess_that_is_too_fast_is_made_slower_until_it_is_kept() -> None:
    run = Run(lambda target_s: 3.8 if target_s is None else took(target_s))
    assert run.go(5)[2:] == [TOO_FAST_S, TOO_FAST_S, pytest.approx(3.8 * 1.03**2)]


def test_pace_that_does_not_pay_is_left_for_a_while() -> None:
    run = Run(lambda target_s: 4.3 if target_s is None else 5.2)
    assert run.go(5) == [4.3, 4.3, 5.2, 5.2, 5.2]
    assert set(run.go(REST + 2)) == {4.3}
    assert run.go(1) == [5.2], "and tried again after it"


def test_pace_that_one_stream_cannot_keep_is_left_at_once() -> None:
    run = Run(lambda target_s: 4.5 if target_s is None else 13.5)
    assert run.go(REST) == [4.5, 4.5, 13.5, 13.5, *[4.5] * (REST - 4)]


def test_search_begins_anew_where_links_carry_much_less_than_a_moment_before() -> None:
    run = Run()
    run.go(4)
    assert run.pacing.kept_s < 10
    run.takes = lambda target_s: 8.0
    run.go(2)
    assert run.pacing == PacedKind()


def test_one_transfer_that_something_else_held_up_changes_nothing_of_the_search() -> None:
    run = Run()
    run.go(4)
    searching = run.pacing
    assert searching.after(60.0).after(took(searching.target_s)) == searching.after(took(searching.target_s))


def test_links_that_carry_more_are_found_out() -> None:
    run = Run()
    run.go(REST)
    run.takes = lambda target_s: max(target_s or 0.0, 3.0)
    before_s = run.go(1)[-1]
    run.go(2 * REST)
    assert run.go(1)[-1] < 0.8 * before_s


def test_links_that_carry_less_are_learned_anew() -> None:
    run = Run()
    run.go(14)
    run.takes = lambda target_s: 2 * took(None if target_s is None else target_s / 2)
    run.go(2)
    assert run.pacing.target_s is not None
    run.go(1)
    assert run.pacing == PacedKind()
    run.go(14)
    assert run.pacing.target_s == pytest.approx(1.02 * 2 * CARRIES_S, rel=0.02)


def test_late_transfers_among_others_change_nothing() -> None:
    run = Run()
    run.go(14)
    found_s = run.pacing.target_s
    for late_s in (12.0, 4.1, 12.0, 12.0, 4.1):
        run.pacing = run.pacing.after(late_s)
    assert run.pacing.target_s == found_s


def test_short_transfer_is_left_to_tcp() -> None:
    run = Run(lambda target_s: 0.9 if target_s is None else 0.5)
    assert set(run.go(3 * REST)) == {0.9}


def test_middle_promises_what_its_rate_would_make_of_all() -> None:
    middle = MidTransfer(1000)
    for received, now_s in ((0, 0.0), (100, 3.0), (240, 5.0), (260, 5.5), (450, 6.5), (660, 7.5), (990, 20.0)):
        middle.see(received, now_s)
    assert middle.whole_s == pytest.approx(1000 * (7.5 - 5.5) / (660 - 260))


@pytest.mark.parametrize("seen", [(), ((1000, 1.0),), ((300, 1.0), (600, 2.0)), ((1000, 1.0), (1000, 2.0))])
def test_transfer_that_was_over_too_soon_promises_nothing(seen: tuple[tuple[int, float], ...]) -> None:
    middle = MidTransfer(1000)
    for received, now_s in seen:
        middle.see(received, now_s)
    assert middle.whole_s == 0


MEMBERS, KIND, LARGE = ("a", "b", "c", "d"), (5_000_000,), (6_000_000,)


@dataclass
class Asking:
    """Transfers of a node, one in each round unless it is said otherwise."""

    paces: RateControl = field(default_factory=RateControl)
    round: int = 0

    def target_s(
        self,
        last_took_s: float,
        kind: Kind = KIND,
        *,
        members: tuple[str, ...] = MEMBERS,
        epoch: int = 1,
        is_next: bool = True,
    ) -> float | None:
        self.round += is_next
        return self.paces.target_s(epoch, members, kind, self.round, last_took_s)


def learned(members: tuple[str, ...] = MEMBERS, kind: Kind = KIND) -> Asking:
    """After two transfers of which the middle promised ten seconds."""
    asking = Asking()
    for last_took_s in (0.0, 10.0):
        assert asking.target_s(last_took_s, kind, members=members) is None
        assert asking.target_s(last_took_s, kind, members=members, is_next=False) is None, "the same once more"
    return asking


def test_times_are_learned_from_the_round_after() -> None:
    asking = learned()
    assert asking.target_s(10.0) == 10.0
    assert asking.target_s(10.0) == 10.0 / 1.02


def test_time_that_is_not_known_to_all_changes_nothing() -> None:
    asking = learned()
    assert [asking.target_s(0.0), asking.target_s(10.0), asking.target_s(0.0)] == [None, 10.0, 10.0]


def test_kinds_of_transfers_are_paced_apart() -> None:
    asking = learned()
    assert asking.target_s(10.0) == 10.0
    assert asking.target_s(10.0, LARGE, is_next=False) is None, "a second one in the same round"
    assert asking.target_s(12.0, LARGE) is None
    assert asking.target_s(12.0, LARGE) == 12.0
    assert asking.target_s(12.0) == 10.0


@pytest.mark.parametrize("change", [{"members": MEMBERS[:3]}, {"epoch": 2}], ids=["other members", "they met again"])
def test_other_memberships_begin_anew(change: dict[str, int | tuple[str, ...]]) -> None:
    asking = learned()
    members, epoch = change.get("members", MEMBERS), change.get("epoch", 1)
    assert isinstance(members, tuple) and isinstance(epoch, int)
    assert [asking.target_s(10.0, members=members, epoch=epoch) for _ in range(3)] == [None, None, 10.0]


@pytest.mark.parametrize(("members", "kind"), [(("a", "b"), KIND), (MEMBERS, (900_000_000,))], ids=["two", "fast"])
def test_link_that_shares_nothing_or_is_fast_is_left_to_tcp(members: tuple[str, ...], kind: Kind) -> None:
    assert learned(members, kind).target_s(10.0, kind, members=members) is None
