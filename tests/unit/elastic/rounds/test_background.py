"""What goes on during training: a round on its way, and a look at the boundary of the next one."""

from __future__ import annotations

import threading

from tests.unit.conftest import DEADLINE_S

from zeroband.elastic.rounds.background import BackgroundRound, BoundaryWatch
from zeroband.errors import StoreLost


def test_outcome_of_a_round_is_there_once_it_is_over() -> None:
    go_on = threading.Event()
    round = BackgroundRound(lambda: go_on.wait(DEADLINE_S))
    assert round.outcome is None
    go_on.set()
    assert round.is_over(DEADLINE_S) and round.outcome is True and round.wait() is True


def test_watch_looks_until_the_others_stand_at_the_boundary() -> None:
    """A store that is away for a while is no answer."""
    answers = [False, StoreLost("away"), True, True, False]

    def is_reached() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, StoreLost):
            raise answer
        return answer

    watch = BoundaryWatch(is_reached, look_s=0.001)
    watch.thread.join(DEADLINE_S)
    assert answers == [True, False] and watch.is_called
    assert not watch.is_called, "their round was committed meanwhile"


def test_watch_that_is_closed_looks_no_more() -> None:
    watch = BoundaryWatch(lambda: False, look_s=0.001)
    watch.close()
    watch.thread.join(DEADLINE_S)
    assert not watch.thread.is_alive() and not watch.is_called
