"""How nodes come into a run that may be dead, in any view that the store can show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.membership.records import Ready, RestartPoint, RoundPlan, Verdict, View, from_json, to_json
from zeroband.elastic.membership.resume_rules import (
    begins_on_checkpoint,
    is_abandoned,
    pending_restart,
    propose_restart,
    restarts_with,
    rounds_since,
    way_in,
)
from zeroband.elastic.membership.round_rules import Rules, Wait, next_plan

A, B, C = "a#1", "b#1", "c#1"
ALIVE = st.frozensets(st.sampled_from([A, B, C]))


def a_plan(*members: str, round: int = 4, late: tuple[str, ...] = ()) -> RoundPlan:
    zeros = tuple(0 for _ in members)
    return RoundPlan(round + 1, 1, round, members, zeros, zeros, zeros, late)


def a_view(
    *members: str,
    alive: frozenset[str] = frozenset(),
    plan: RoundPlan | None = None,
    restart_point: RestartPoint | None = None,
    late: tuple[str, ...] = (),
    **fields: object,
) -> View:
    """A run whose members committed round 4; without members, no run."""
    committed = Verdict(a_plan(*members, late=late), "d") if members else None
    current = plan or (committed.plan if committed else None)
    return View(current, committed, alive, {}, {}, None, restart_point=restart_point, **fields)  # pyright: ignore[reportArgumentType]


def a_restart_point(round: int = 5, member: str = C) -> RestartPoint:
    return RestartPoint(round, 40, "s", member)


def test_first_nodes_found_a_new_run_or_begin_on_what_there_is() -> None:
    assert way_in(a_view(), resumes=False) == "found"
    assert way_in(a_view(), resumes=True) == "begin"


@pytest.mark.parametrize("resumes", [True, False])
def test_nobody_founds_a_run_anew_whose_newest_verdict_is_lost_while_a_member_lives(resumes: bool) -> None:
    assert way_in(a_view(plan=a_plan(A, B), alive=frozenset({A})), resumes=resumes) == "wait"
    assert way_in(a_view(plan=a_plan(A, B)), resumes=resumes) == ("begin" if resumes else "found")


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("living", [A, B])
def test_run_with_a_living_member_is_joined(resumes: bool, living: str) -> None:
    assert way_in(a_view(A, B, alive=frozenset({living, C})), resumes=resumes) == "join"


@pytest.mark.parametrize(
    "view",
    [
        a_view(A, late=(B,), alive=frozenset({B})),
        a_view(A, plan=a_plan(A, B, round=5), alive=frozenset({B})),
        a_view(A, plan=a_plan(A, round=5, late=(B,)), alive=frozenset({B})),
    ],
)
def test_run_with_a_living_late_member_or_joiner_is_not_abandoned(view: View) -> None:
    assert not is_abandoned(view) and way_in(view, resumes=True) == "join"


def test_dead_run_begins_again_only_where_that_is_asked_for() -> None:
    view = a_view(A, B, alive=frozenset({C}))
    assert way_in(view, resumes=True) == "begin"
    assert way_in(view, resumes=False) == "join"


def test_agreement_is_followed_while_its_proposer_lives() -> None:
    agreed = a_restart_point()
    assert way_in(a_view(A, alive=frozenset({C}), restart_point=agreed), resumes=True) == agreed
    assert way_in(a_view(A, alive=frozenset({C}), restart_point=agreed), resumes=False) == "join"
    assert way_in(a_view(A, alive=frozenset({B}), restart_point=agreed), resumes=True) == "begin"


@pytest.mark.parametrize("resumes", [True, False])
def test_agreement_that_was_made_up_beside_a_living_member_is_not_followed(resumes: bool) -> None:
    view = a_view(A, alive=frozenset({A, C}), restart_point=a_restart_point())
    assert way_in(view, resumes=resumes) == "join"


def test_agreement_is_spent_with_its_round() -> None:
    assert pending_restart(a_view(A, restart_point=a_restart_point(round=5))) is not None
    assert pending_restart(a_view(A, restart_point=a_restart_point(round=4))) is None
    assert way_in(a_view(A, alive=frozenset({A, C}), restart_point=a_restart_point(round=4)), resumes=True) == "join"


def test_store_that_settles_is_asked_again() -> None:
    assert way_in(a_view(A, is_settling=True), resumes=True) == "wait"


@given(st.none() | st.integers(0, 9), st.integers(0, 9), ALIVE, ALIVE, st.booleans())
def test_two_nodes_that_look_at_once_never_take_part_in_different_runs(
    begun: int | None, saved: int, members: frozenset[str], alive: frozenset[str], others_resume: bool
) -> None:
    """Of what one node begins with, another makes the same, joins it, or looks again."""
    restart_point = None if begun is None else a_restart_point(round=begun)
    view = a_view(*sorted(members), alive=alive, restart_point=restart_point)
    mine, theirs = way_in(view, resumes=True), way_in(view, resumes=others_resume)
    if isinstance(mine, RestartPoint):
        assert theirs in (mine, "join")
        assert restarts_with(view, mine.round)
    if mine == "join":
        assert theirs == "join"
    if mine == "begin":
        proposed = propose_restart(view, round=saved, step=40, state_digest="s", member="d#1")
        assert proposed.round > saved and (view.committed is None or proposed.round > view.committed.round)
        after = a_view(*sorted(members), alive=alive | {"d#1"}, restart_point=proposed)
        assert pending_restart(after) == proposed


def test_founders_of_a_restart_point_wait_for_one_another() -> None:
    ready = {A: Ready(5, 0, "s", 0, 3)}
    rules = Rules(start_nodes=2)
    view = View(None, Verdict(a_plan(C), "d"), frozenset({A}), ready, {}, None, restart_point=a_restart_point())
    assert isinstance(next_plan(view, 5, rules), Wait)
    both = View(
        None, view.committed, frozenset({A, B}), {**ready, B: ready[A]}, {}, None, restart_point=a_restart_point()
    )
    decision = next_plan(both, 5, rules)
    assert isinstance(decision, RoundPlan) and decision.members == (A, B)


def test_member_of_the_dead_run_that_comes_back_is_preferred_to_the_checkpoint() -> None:
    ready = {A: Ready(5, 9, "live", 3, 3), B: Ready(5, 0, "s", 0, 3), C: Ready(5, 0, "s", 0, 3)}
    view = View(None, Verdict(a_plan(A), "d"), frozenset({A, B, C}), ready, {}, None, restart_point=a_restart_point())
    decision = next_plan(view, 5, Rules())
    assert isinstance(decision, RoundPlan) and decision.members == (A,)


def test_beginning_comes_back_from_its_record() -> None:
    assert from_json(RestartPoint, to_json(a_restart_point())) == a_restart_point()


@pytest.mark.parametrize(
    ("session", "round", "missed"),
    [("s1", 4, 0), ("s1", 1, 3), ("s1", 5, None), ("s0", 4, None), ("", 4, None)],
    ids=["newest", "earlier", "ahead of the run", "another line of rounds", "no session"],
)
def test_rounds_lead_on_from_a_checkpoint_of_their_session(session: str, round: int, missed: int | None) -> None:
    view = View(None, Verdict(a_plan(A), "d", {"session": "s1"}), frozenset(), {}, {}, None)
    assert rounds_since(view, session=session, round=round) == missed


def test_no_rounds_lead_on_where_no_verdict_is_known() -> None:
    assert rounds_since(a_view(), session="s1", round=4) is None


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 99))
def test_joiner_begins_on_a_checkpoint_where_that_is_less_to_fetch(missed: int, entry: int, state: int) -> None:
    begins = begins_on_checkpoint(missed, entry_bytes=entry, state_bytes=state)
    assert begins == (sum([entry] * missed) < state)
    assert begins or missed > 0
