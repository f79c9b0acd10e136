"""The pace of transfers over shared access links, against made-up links that carry an even pace best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from zeroband.elastic.transport.tuning import Kind, MidTransfer, PacedKind, RateControl

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
