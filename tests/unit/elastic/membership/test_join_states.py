"""The way of a joiner as a table: every pair is listed or refused, every state leads on, and every way ends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from zeroband.elastic.membership.join_states import (
    DESCRIPTIONS,
    ENDINGS,
    PAUSES,
    STATELESS,
    TABLE,
    JoinEvent,
    JoinState,
    JoinTimeouts,
    diagram,
    next_state,
)

ENTRIES = {JoinState.OUTSIDE, JoinState.MEMBER}
"""Where the loop begins: a node that starts, and a member that was fenced or goes back."""

ON_THE_WAY = set(JoinState) - {JoinState.OUTSIDE, JoinState.MEMBER, JoinState.ENDED}


def reached(state: JoinState) -> set[JoinState]:
    found, left = set[JoinState](), [state]
    while left:
        new = set(TABLE[left.pop()].values()) - found
        found |= new
        left += new
    return found


@pytest.mark.parametrize("state", JoinState)
def test_event_is_listed_for_a_state_or_refused_there(state: JoinState) -> None:
    for event in JoinEvent:
        if event in TABLE[state]:
            assert next_state(state, event) is TABLE[state][event]
        else:
            with pytest.raises(KeyError, match=f"cannot happen to a node that is {state}"):
                next_state(state, event)


def test_every_state_has_a_row_and_a_deed_and_every_event_happens_somewhere() -> None:
    assert set(TABLE) == set(DESCRIPTIONS) == set(JoinState)
    assert {event for row in TABLE.values() for event in row} == set(JoinEvent)


def test_every_state_is_reached_from_the_start() -> None:
    assert reached(JoinState.OUTSIDE) == set(JoinState) - {JoinState.OUTSIDE}


@pytest.mark.parametrize("state", sorted(ON_THE_WAY))
def test_every_state_on_the_way_leads_into_the_run_and_out_of_it(state: JoinState) -> None:
    assert {JoinState.MEMBER, JoinState.ENDED} <= reached(state)
    assert {TABLE[state][event] for event in ENDINGS} == {JoinState.ENDED}


def test_nothing_follows_the_end_and_training_ends_by_itself() -> None:
    assert TABLE[JoinState.ENDED] == {}
    assert JoinState.ENDED not in TABLE[JoinState.MEMBER].values()


def test_a_state_that_follows_itself_pauses_or_looks_again() -> None:
    """Else the loop would spin."""
    loops = {event for state, row in TABLE.items() for event, after in row.items() if after is state}
    assert loops == {JoinEvent.WAIT, JoinEvent.AGAIN} and JoinEvent.WAIT in PAUSES


@pytest.mark.parametrize("failing", [JoinState.FETCHING, JoinState.CATCHING_UP, JoinState.ROLL_BACK])
def test_what_fails_with_a_state_in_reach_is_looked_at_anew_after_a_pause(failing: JoinState) -> None:
    assert TABLE[failing][JoinEvent.FAILED] is JoinState.DISCOVER and JoinEvent.FAILED in PAUSES


def test_node_that_holds_nothing_of_the_run_may_leave_at_once() -> None:
    assert all(TABLE[state][JoinEvent.LEAVING] is JoinState.ENDED for state in STATELESS)
    assert not STATELESS & {
        JoinState.RESTORE_LOCAL,
        JoinState.ANNOUNCING,
        JoinState.CATCHING_UP,
        JoinState.ROLL_BACK,
    }


@pytest.mark.parametrize("entry", sorted(ENTRIES))
def test_random_ways_end(entry: JoinState) -> None:
    for seed in range(200):
        chance, state, steps = random.Random(seed), entry, 0
        while steps == 0 or state not in (JoinState.MEMBER, JoinState.ENDED):
            state = next_state(state, chance.choice(list(TABLE[state])))
            steps += 1
            assert steps < 200, f"seed {seed} is still {state}"


def test_join_times_out_where_nothing_progressed_for_so_long() -> None:
    timeouts = JoinTimeouts(300.0)
    assert timeouts.left_s(1e6) == 300.0
    timeouts.failed(10.0)
    timeouts.failed(200.0)
    assert timeouts.left_s(200.0) == 110.0
    assert timeouts.left_s(310.0) == 0.0
    timeouts.progressed()
    timeouts.failed(400.0)
    assert timeouts.left_s(400.0) == 300.0


def test_figure_in_the_docs_is_that_of_the_table() -> None:
    docs = (Path(__file__).parents[4] / "docs/architecture.md").read_text(encoding="utf-8")
    assert diagram() in docs, "paste the output of `python -m zeroband.elastic.membership.join_states`"
