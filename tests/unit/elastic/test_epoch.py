"""The rules of membership, branch by branch."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from zeroband.elastic.epoch import (
    FOUNDING_ROUND,
    Opening,
    Ready,
    Verdict,
    View,
    Wait,
    must_leave,
    next_opening,
    next_verdict,
    opening_from,
    ready_from,
    to_record,
    verdict_from,
)

A, B, C = "a#1", "b#1", "c#1"


def an_opening(*members: str, version: int = 5, epoch: int = 2, round: int = 3, weights: Any = None) -> Opening:
    return Opening(version, epoch, round, members, weights or tuple(10 for _ in members))


def a_verdict(*members: str, round: int = 2, version: int = 4) -> Verdict:
    return Verdict(round, version, 2, members, tuple(10 for _ in members), "digest", {})


def a_view(**fields: Any) -> View:
    empty: dict[str, Any] = {
        "opening": None,
        "committed": None,
        "alive": frozenset(),
        "ready": {},
        "votes": {},
        "failed": None,
    }
    return View(**{**empty, **fields})


def ready(*members: str, round: int = 3, weight: int = 10, state: str = "s") -> dict[str, Ready]:
    return {member: Ready(round, weight, state) for member in members}


def boundary(*members: str, **fields: Any) -> View:
    """Round 2 is committed and all its members stand before round 3."""
    usual: dict[str, Any] = {
        "opening": an_opening(*members, version=4, round=2),
        "committed": a_verdict(*members),
        "alive": frozenset(members),
        "ready": ready(*members),
    }
    return a_view(**{**usual, **fields})


def decide(view: View, round: int = 3, **rules: Any) -> Opening | Wait:
    return next_opening(view, round, **{"min_nodes": 1, "start_nodes": 1, "start_timed_out": False, **rules})


# -- next_opening -----------------------------------------------------------------------------------------------------


def test_next_opening_keeps_the_current_one_while_it_can_be_finished() -> None:
    current = an_opening(A, B)
    assert decide(boundary(A, B, opening=current)) is current


def test_next_opening_keeps_one_whose_lost_member_has_voted() -> None:
    current = an_opening(A, B)
    view = boundary(A, B, opening=current, alive=frozenset({A}), votes={B: "digest"})
    assert decide(view) is current


def test_next_opening_replaces_one_whose_member_was_lost_before_its_vote() -> None:
    view = boundary(A, B, opening=an_opening(A, B), alive=frozenset({A}))
    assert decide(view) == an_opening(A, version=6, epoch=3)


def test_next_opening_replaces_a_failed_one_with_new_groups_even_for_the_same_members() -> None:
    view = boundary(A, B, opening=an_opening(A, B), failed="a lane broke")
    assert decide(view) == an_opening(A, B, version=6, epoch=3)


def test_next_opening_keeps_epoch_and_groups_when_nobody_came_or_went() -> None:
    assert decide(boundary(A, B)) == an_opening(A, B, version=5, epoch=2)


@pytest.mark.parametrize("members", [(A,), (A, B, C)])
def test_next_opening_starts_an_epoch_when_somebody_came_or_went(members: tuple[str, ...]) -> None:
    view = boundary(A, B, alive=frozenset(members), ready=ready(*members))
    assert decide(view) == an_opening(*members, version=5, epoch=3)


def test_next_opening_waits_for_living_members_and_names_them() -> None:
    view = boundary(A, B, C, ready=ready(A))
    assert decide(view) == Wait("2 of 3 members have not reached round 3", (B, C))


def test_next_opening_waits_for_nobody_who_only_joins() -> None:
    view = boundary(A, B, alive=frozenset({A, B, C}))
    assert decide(view) == an_opening(A, B)


def test_next_opening_leaves_out_a_ready_member_whose_lease_ran_out() -> None:
    """Predecessors compared integer ranks with string ids here, and evicted nobody."""
    view = boundary(A, B, C, alive=frozenset({A, C}))
    decision = decide(view)
    assert isinstance(decision, Opening) and decision.members == (A, C)


def test_next_opening_takes_weights_in_the_order_of_members() -> None:
    view = boundary(A, B, ready={B: Ready(3, 7, "s"), A: Ready(3, 0, "s")})
    assert decide(view) == an_opening(A, B, weights=(0, 7))


def test_next_opening_goes_with_the_state_of_most_members() -> None:
    states = {**ready(A, state="odd"), **ready(B, C)}
    assert decide(boundary(A, B, C, ready=states)) == an_opening(B, C, epoch=3)


def test_next_opening_never_outvotes_members_by_joiners() -> None:
    joiners = ("x#1", "y#1")
    view = boundary(B, alive=frozenset({B, *joiners}), ready={**ready(B), **ready(*joiners, state="odd")})
    assert decide(view) == an_opening(B)


def test_next_opening_breaks_a_tie_of_states_by_the_lowest_id() -> None:
    view = boundary(A, B, ready={**ready(A, state="z"), **ready(B, state="a")})
    assert decide(view) == an_opening(A, epoch=3)


def test_next_opening_waits_while_fewer_than_min_nodes_are_alive() -> None:
    decision = decide(boundary(A, B, alive=frozenset({A})), min_nodes=2)
    assert decision == Wait("1 of at least 2 nodes are alive (elastic.min_nodes)")


def test_next_opening_waits_when_nobody_is_there() -> None:
    assert decide(a_view()) == Wait("0 of at least 1 nodes are alive (elastic.min_nodes)")


def founders(*members: str, state: str = "s") -> View:
    return a_view(alive=frozenset(members), ready=ready(*members, round=FOUNDING_ROUND, weight=0, state=state))


def test_founding_waits_for_start_nodes() -> None:
    decision = decide(founders(A), FOUNDING_ROUND, start_nodes=2)
    assert decision == Wait("1 of 2 nodes are here (elastic.start_nodes)")


def test_founding_opens_with_all_who_are_there() -> None:
    decision = decide(founders(A, B, C), FOUNDING_ROUND, start_nodes=2)
    assert decision == an_opening(A, B, C, version=1, epoch=1, round=0, weights=(0, 0, 0))


def test_founding_goes_on_with_fewer_after_its_time_out() -> None:
    decision = decide(founders(A), FOUNDING_ROUND, start_nodes=2, start_timed_out=True)
    assert isinstance(decision, Opening) and decision.members == (A,)


def test_founding_needs_min_nodes_even_after_its_time_out() -> None:
    decision = decide(founders(A), FOUNDING_ROUND, start_nodes=3, min_nodes=2, start_timed_out=True)
    assert isinstance(decision, Wait)


def test_start_nodes_is_of_no_concern_after_the_founding() -> None:
    assert isinstance(decide(boundary(A), start_nodes=9), Opening)


@pytest.mark.parametrize("order", [(A, B, C), (C, A, B)])
def test_any_member_makes_the_same_proposal(order: tuple[str, ...]) -> None:
    """A predecessor's run ended with its leader; here nobody's death stops a proposal, and all propose the same."""
    view = boundary(A, B, C, alive=frozenset(order), ready=ready(*order))
    assert decide(view) == an_opening(A, B, C)


# -- next_verdict -----------------------------------------------------------------------------------------------------


def test_next_verdict_waits_for_votes_and_names_the_missing() -> None:
    decision = next_verdict(a_view(votes={A: "d"}), an_opening(A, B), {})
    assert decision == Wait("1 of 2 members have not voted on round 3", (B,))


def test_next_verdict_commits_equal_digests_with_the_payload() -> None:
    opening = an_opening(A, B, weights=(3, 4))
    decision = next_verdict(a_view(votes={A: "d", B: "d"}), opening, {"norm": 1.5})
    assert decision == Verdict(3, 5, 2, (A, B), (3, 4), "d", {"norm": 1.5})


def test_next_verdict_is_none_when_results_differ() -> None:
    assert next_verdict(a_view(votes={A: "d", B: "e"}), an_opening(A, B), {}) is None


def test_next_verdict_counts_no_vote_of_a_stranger() -> None:
    decision = next_verdict(a_view(votes={A: "d", C: "e"}), an_opening(A), {})
    assert isinstance(decision, Verdict) and decision.digest == "d"


# -- must_leave -------------------------------------------------------------------------------------------------------


def test_member_stays_at_the_boundary_after_the_committed_round() -> None:
    assert must_leave(boundary(A, B), A, 3) is None


def test_member_stays_before_the_founding() -> None:
    assert must_leave(founders(A), A, FOUNDING_ROUND) is None


@pytest.mark.parametrize("members", [(A, B), (B,)])
@pytest.mark.parametrize("committed_round", [3, 4])
def test_member_leaves_when_the_round_before_it_was_committed(members: tuple[str, ...], committed_round: int) -> None:
    """Also when it is one of those who committed it: it dropped the result, and can only come back by the join path."""
    excluded = must_leave(boundary(A, B, committed=a_verdict(*members, round=committed_round)), A, 3)
    assert excluded is not None and f"round {committed_round} was committed" in excluded.reason


def test_member_leaves_when_its_round_was_opened_without_it() -> None:
    excluded = must_leave(boundary(A, B, opening=an_opening(B)), A, 3)
    assert excluded is not None and "opened without a#1" in excluded.reason


def test_member_stays_when_an_older_round_was_opened_without_it() -> None:
    assert must_leave(boundary(A, B, opening=an_opening(B, round=2)), A, 3) is None


@pytest.mark.parametrize(
    "fields",
    [{"committed": a_verdict(B)}, {"alive": frozenset({B})}, {"ready": ready(B)}, {"committed": None}],
    ids=["joiner", "lease ran out", "not ready yet", "founder"],
)
def test_an_opening_without_it_sends_away_only_living_ready_members(fields: dict[str, Any]) -> None:
    assert must_leave(boundary(A, B, opening=an_opening(B), **fields), A, 3) is None


# -- records ----------------------------------------------------------------------------------------------------------


def test_share_is_the_weight_in_the_mean() -> None:
    opening = an_opening(A, B, C, weights=(30, 10, 0))
    assert [opening.share(m) for m in opening.members] == [0.75, 0.25, 0.0]
    assert opening.contributors() == (A, B) and opening.total_weight == 40


def test_share_is_zero_when_nobody_contributes() -> None:
    assert an_opening(A, B, weights=(0, 0)).share(A) == 0.0


def test_records_survive_json() -> None:
    opening = an_opening(A, B)
    verdict = replace(a_verdict(A, B), payload={"norm": 0.1, "ranges": [[0, 4]]})
    word = Ready(3, 10, "s")
    assert opening_from(json.loads(json.dumps(to_record(opening)))) == opening
    assert verdict_from(json.loads(json.dumps(to_record(verdict)))) == verdict
    assert ready_from(json.loads(json.dumps(to_record(word)))) == word
