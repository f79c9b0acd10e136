import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.rounds.phase import PhaseLength, TransferWindow, Uncounted

MANY = 1_000_000
seconds = st.floats(0.01, 1000.0)


def steps_of_a_round(pace: PhaseLength, step_s: float, began_at_s: float = 0.0) -> int:
    """Inner steps of this length until the round's time is over."""
    pace.begin(began_at_s)
    return next(n for n in itertools.count(1) if pace.is_over(began_at_s + n * step_s, n))


def test_fixed_pace_wants_the_same_steps_whatever_they_take() -> None:
    pace = PhaseLength(500)
    assert pace.wanted_steps() == 500
    pace.begin(10.0)
    pace.learn(1e6, 500)
    assert pace.wanted_steps() == 500
    assert not pace.is_over(1e9, 499)


@given(began_s=st.lists(st.floats(0.0, 50.0), min_size=2, max_size=4), step_s=st.floats(0.1, 5.0))
def test_rounds_of_members_end_together_however_early_each_began(began_s: list[float], step_s: float) -> None:
    """Within a step: all of them count from when the round before was opened."""
    ends_s = list[float]()
    for began in began_s:
        pace = PhaseLength(MANY, round_s=60.0)
        pace.begin(began)
        pace.count_from(50.0)
        steps = next(n for n in itertools.count(1) if pace.is_over(began + n * step_s, n))
        ends_s.append(began + steps * step_s)
    assert all(abs(end - 110.0) <= 0.5 * step_s + 1e-6 for end in ends_s)


def test_plan_from_before_a_round_began_moves_its_end_not() -> None:
    pace, other = PhaseLength(MANY, round_s=60.0), PhaseLength(MANY, round_s=60.0)
    for one in (pace, other):
        one.begin(100.0)
    pace.count_from(95.0)
    assert [pace.is_over(100.0 + n, n) for n in (59, 60)] == [other.is_over(100.0 + n, n) for n in (59, 60)] == [0, 1]


def test_first_timed_round_only_shows_how_fast_the_node_is() -> None:
    assert PhaseLength(MANY, round_s=60.0).wanted_steps() == 8


def test_later_timed_rounds_ask_for_half_as_much_again_as_fits() -> None:
    pace = PhaseLength(MANY, round_s=60.0)
    pace.begin(100.0)
    pace.learn(104.0, 8)
    assert pace.wanted_steps() == 181  # 1.5 * 60 s / 0.5 s, and one for the rounding


def test_pace_goes_by_the_newest_round() -> None:
    pace = PhaseLength(MANY, round_s=60.0)
    for began_at_s, took_s in [(0.0, 4.0), (10.0, 16.0)]:
        pace.begin(began_at_s)
        pace.learn(began_at_s + took_s, 8)
    assert pace.wanted_steps() == 46


def test_round_without_a_step_teaches_nothing() -> None:
    pace = PhaseLength(MANY, round_s=60.0)
    pace.begin(0.0)
    pace.learn(50.0, 0)
    assert pace.wanted_steps() == 8


@pytest.mark.parametrize(("limit", "first", "later"), [(5, 5, 5), (20, 8, 20)])
def test_limit_of_steps_holds_in_timed_rounds_too(limit: int, first: int, later: int) -> None:
    pace = PhaseLength(limit, round_s=60.0)
    assert pace.wanted_steps() == first
    pace.learn(0.0, 8)  # no time at all
    assert pace.wanted_steps() == later


@pytest.mark.parametrize(("step_s", "steps"), [(1.0, 10), (3.0, 3), (4.0, 2), (6.6, 2), (7.0, 1), (90.0, 1)])
def test_timed_round_ends_with_the_step_that_is_nearest_to_the_time(step_s: float, steps: int) -> None:
    assert steps_of_a_round(PhaseLength(MANY, round_s=10.0), step_s, began_at_s=1000.0) == steps


def test_timed_round_has_a_step_at_least() -> None:
    assert not PhaseLength(MANY, round_s=1.0).is_over(1e9, 0)


@given(round_s=seconds, share=st.floats(0.002, 5.0))
def test_no_other_number_of_steps_is_nearer_to_the_time_and_samples_suffice(round_s: float, share: float) -> None:
    pace, step_s = PhaseLength(MANY, round_s), share * round_s
    steps = steps_of_a_round(pace, step_s)
    nearest = min(abs(n * step_s - round_s) for n in range(1, steps + 3))
    assert abs(steps * step_s - round_s) == pytest.approx(nearest, abs=1e-9 * round_s)
    pace.learn(steps * step_s, steps)
    assert steps <= pace.wanted_steps() <= 1.5 * round_s / step_s * (1 + 1e-9) + 2


def test_travel_has_the_link_as_long_as_others_had_it_before() -> None:
    travel = TransferWindow(began_at_s=100.0, before_at_s=90.0)
    assert [travel.owns_link(now_s) for now_s in (100.0, 109.9, 110.0, 200.0)] == [True, True, False, False]
    assert TransferWindow(100.0, -math.inf).owns_link(1e9)


def test_phases_that_are_over_are_contributed_with_the_next_one() -> None:
    learned = Uncounted()
    for steps in (3, 5, 2):
        learned.steps += steps
        assert learned.steps_of_phase == steps
        learned.end_phase()
    assert (learned.steps, learned.phase_steps, learned.steps_ahead) == (10, 5, 10)
    learned.catch_up()
    learned.steps += 4
    assert (learned.steps_ahead, learned.steps_of_phase) == (4, 4), "rounds passed beside the other ten"
    learned.offer()
    assert (learned.offered_steps, learned.offered_phase_steps) == (14, 5)
    assert (learned.steps, learned.steps_ahead, learned.phase_steps) == (0, 0, 0)
    learned.steps += 6
    learned.take_back()
    assert (learned.steps, learned.phase_steps, learned.steps_of_phase) == (20, 6, 0)
