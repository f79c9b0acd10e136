from __future__ import annotations

from zeroband.data.loader import AssignmentForecast


def told_two(samples: int, *first: tuple[int, int]) -> AssignmentForecast:
    """A forecast that reaches so far, after these assignments, which was asked once."""
    forecast = AssignmentForecast(samples)
    for ranges in first:
        forecast.assign([ranges])
    forecast.upcoming()
    return forecast


def test_first_assignment_is_all_that_is_known_wherever_it_lies() -> None:
    forecast = AssignmentForecast(100)
    assert not forecast.is_due
    forecast.assign([(5000, 5010)])
    assert forecast.is_due and forecast.upcoming() == ((5000, 5010),)
    assert not forecast.is_due, "there is nothing more to tell"
    forecast.read(4)
    assert not forecast.is_due and forecast.upcoming() == ((5004, 5010),)


def test_next_assignments_are_expected_as_far_away_as_the_last_one_and_none_after_a_step_back() -> None:
    assert told_two(35, (0, 10), (20, 30)).upcoming() == ((20, 30), (40, 50), (60, 70), (80, 85))
    assert told_two(40, (100, 110), (0, 10)).upcoming() == ((0, 10),)


def test_what_was_foreseen_is_told_again_only_when_half_of_it_is_read() -> None:
    forecast = told_two(40, (0, 10), (20, 30))
    for start in (40, 60):
        forecast.read(10)
        forecast.assign([(start, start + 10)])
        assert not forecast.is_due
    forecast.read(10)
    forecast.assign([(80, 90)])
    assert forecast.is_due and forecast.upcoming() == ((80, 90), (100, 110), (120, 130), (140, 150))


def test_another_assignment_than_was_foreseen_is_told_at_once_and_the_same_in_two_ranges_is_not() -> None:
    forecast = told_two(40, (0, 10), (20, 30))
    forecast.assign([(5, 8), (50, 60)])
    assert forecast.is_due and forecast.upcoming()[:2] == ((5, 8), (50, 60))
    forecast = told_two(40, (0, 10), (10, 20))
    forecast.read(10)
    forecast.assign([(20, 25), (25, 30)])
    assert not forecast.is_due
