"""The pace of transfers over shared access links, against made-up links that carry an even pace best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from zeroband.plane.pacing import Paces, Pacing

CARRIES_S, AS_TCP_HAS_IT_S = 4.0, 4.5
STRETCH = 32


def took(target_s: float | None) -> float:
    """Of a transfer that the links carry in CARRIES_S: what is to be faster than that is as TCP has it."""
    return target_s if target_s is not None and target_s >= CARRIES_S else AS_TCP_HAS_IT_S


@dataclass
class Run:
    """Transfers of one kind, one in each round."""

    takes: Callable[[float | None], float] = took
    pacing: Pacing = field(default_factory=Pacing)
    round: int = 0

    def go(self, rounds: int) -> list[float]:
        """So many more rounds; what each transfer took."""
        times: list[float] = []
        for _ in range(rounds):
            times.append(self.takes(self.pacing.target_s))
            self.pacing = self.pacing.after(times[-1], self.round)
            self.round += 1
        return times


def test_pace_comes_close_to_what_the_links_carry_and_stays_there() -> None:
    run = Run()
    assert run.go(2) == [AS_TCP_HAS_IT_S] * 2, "as TCP has it, to begin with"
    run.go(10)
    assert set(run.go(STRETCH - run.round)) == {run.pacing.target_s}
    assert run.pacing.target_s == pytest.approx(CARRIES_S, rel=0.03)


def test_times_that_had_other_reasons_are_soon_left_behind() -> None:
    run = Run(lambda target_s: 40.0 if target_s is None else took(target_s))
    assert len([took_s for took_s in run.go(STRETCH) if took_s > AS_TCP_HAS_IT_S]) <= 16, "not 70"
    assert run.pacing.target_s == pytest.approx(CARRIES_S, rel=0.03)


def test_pace_that_does_not_pay_is_left_for_the_rest_of_the_stretch() -> None:
    run = Run(lambda target_s: 4.5 if target_s is None else 4.48)
    run.go(4)
    assert run.pacing.target_s is None
    assert set(run.go(STRETCH - run.round)) == {4.5}
    assert 4.48 in run.go(4), "and tried again in the next"


def test_pace_is_tried_by_all_in_the_same_rounds_whatever_became_of_it_before() -> None:
    paid, gave_up = Run(), Run(lambda target_s: 4.5)
    paid.go(STRETCH + 1)
    gave_up.go(STRETCH + 1)
    assert paid.pacing.settled_in is None and gave_up.pacing.settled_in is None


def test_links_that_carry_more_are_found_out() -> None:
    run = Run()
    run.go(STRETCH)
    run.takes = lambda target_s: max(target_s or 0.0, 3.0)
    before_s = run.go(1)[-1]
    run.go(2 * STRETCH)
    assert run.go(1)[-1] < 0.8 * before_s


def test_links_that_carry_less_are_given_up_and_learned_anew() -> None:
    run = Run()
    run.go(STRETCH // 2)
    run.takes = lambda target_s: 2 * took(None if target_s is None else target_s / 2)
    assert len(set(run.go(5))) == 1, "as bad as without a pace"
    assert run.pacing.target_s is not None and run.pacing.target_s > CARRIES_S
    run.go(20)
    assert run.go(1)[-1] < 1.05 * 2 * CARRIES_S


def test_one_late_transfer_changes_nothing() -> None:
    run = Run()
    run.go(STRETCH // 2)
    settled = run.pacing
    for late_s in (12.0, 4.0, 12.0, 12.0, 4.0):
        run.pacing = run.pacing.after(late_s, run.round)
        assert run.pacing.target_s == settled.target_s
    assert run.pacing == settled


def test_short_transfer_is_left_to_tcp() -> None:
    run = Run(lambda target_s: 0.9 if target_s is None else 0.5)
    assert set(run.go(3 * STRETCH)) == {0.9}


TO_SEND = {"b": 3_000_000, "c": 1_000_000, "d": 1_000_000}


def learned(to_send: dict[str, int], took_s: float) -> Paces:
    paces = Paces()
    for number in range(2):
        assert paces.of(to_send) == {}
        paces.after(to_send, took_s, number)
    return paces


def test_all_links_are_to_end_together() -> None:
    paces = learned(TO_SEND, 10.0)
    assert paces.of(TO_SEND) == {"b": 315_790, "c": 105_264, "d": 105_264}  # in 9.5 s


def test_kinds_of_transfers_are_paced_apart() -> None:
    paces, other = learned(TO_SEND, 10.0), dict(TO_SEND, b=1)
    assert paces.of(other) == {}
    paces.after(other, 2.0, 2)
    assert paces.of(TO_SEND)


def test_other_members_begin_anew() -> None:
    paces = learned(TO_SEND, 10.0)
    fewer = {"b": 3_000_000, "c": 1_000_000}
    assert paces.of(fewer) == {} and paces.of(TO_SEND) == {}


@pytest.mark.parametrize(
    ("to_send", "took_s"), [({"b": 3_000_000}, 10.0), ({"b": 90_000_000, "c": 1}, 10.0)], ids=["no other", "fast"]
)
def test_link_that_shares_nothing_or_is_fast_is_left_to_tcp(to_send: dict[str, int], took_s: float) -> None:
    assert learned(to_send, took_s).of(to_send) == {}
