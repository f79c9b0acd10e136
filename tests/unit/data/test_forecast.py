from __future__ import annotations

from zeroband.data.forecast import Forecast


def test_first_assignment_is_all_that_is_known() -> None:
    forecast = Forecast(100)
    assert not forecast.is_due
    forecast.assign([(0, 10)])
    assert forecast.is_due and forecast.tell() == ((0, 10),)
    assert not forecast.is_due, "there is nothing more to tell"
    forecast.read(4)
    assert not forecast.is_due and forecast.tell() == ((4, 10),)


def test_assignment_of_a_node_that_joins_tells_nothing_of_its_next() -> None:
    forecast = Forecast(100)
    forecast.assign([(5000, 5010)])
    assert forecast.tell() == ((5000, 5010),)


def test_next_assignments_are_expected_as_far_away_as_the_last_one() -> None:
    forecast = Forecast(35)
    forecast.assign([(0, 10)])
    forecast.assign([(20, 30)])
    assert forecast.tell() == ((20, 30), (40, 50), (60, 70), (80, 85))


def test_what_was_foreseen_is_told_again_only_when_half_of_it_is_read() -> None:
    forecast = Forecast(40)
    forecast.assign([(0, 10)])
    forecast.assign([(20, 30)])
    forecast.tell()
    for start in (40, 60):
        forecast.read(10)
        forecast.assign([(start, start + 10)])
        assert not forecast.is_due
    forecast.read(10)
    forecast.assign([(80, 90)])
    assert forecast.is_due and forecast.tell() == ((80, 90), (100, 110), (120, 130), (140, 150))


def test_another_assignment_than_was_foreseen_is_told_at_once() -> None:
    forecast = Forecast(40)
    forecast.assign([(0, 10)])
    forecast.assign([(20, 30)])
    forecast.tell()
    forecast.assign([(5, 8), (50, 60)])
    assert forecast.is_due and forecast.tell()[:2] == ((5, 8), (50, 60))


def test_ranges_that_follow_each_other_are_as_foreseen_as_one() -> None:
    forecast = Forecast(40)
    forecast.assign([(0, 10)])
    forecast.assign([(10, 20)])
    forecast.tell()
    forecast.read(10)
    forecast.assign([(20, 25), (25, 30)])
    assert not forecast.is_due


def test_step_back_is_no_reason_to_expect_more() -> None:
    forecast = Forecast(40)
    forecast.assign([(100, 110)])
    forecast.assign([(0, 10)])
    assert forecast.tell() == ((0, 10),)
