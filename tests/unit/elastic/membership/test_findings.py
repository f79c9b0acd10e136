"""What a plan says of the ones before it: all come to the same, and to nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.membership.blame import NO_VOTE, REFUSED, findings_before, objection, refusal
from zeroband.elastic.membership.records import Attempt, Blame, Evidence, Peer, Ready, RoundPlan, Verdict, View
from zeroband.elastic.membership.round_rules import AttemptFindings, Rules, Wait, next_plan

A, B, C, D = FOUR = ("a#1", "b#1", "c#1", "d#1")
READY = Ready(3, 10, "s", 4, 6)


def committed_with(*blames: Blame) -> Verdict:
    return Verdict(RoundPlan(4, 2, 2, FOUR, (1,) * 4, blames=blames), "d")


def following(
    attempt: Attempt, past: Sequence[Attempt], committed: Verdict, alive: Sequence[str] = FOUR, **view: Any
) -> RoundPlan:
    """The plan that a member proposes behind this attempt; `past`: those before it."""
    ready = dict.fromkeys(FOUR, READY)
    seen = View(attempt.plan, committed, frozenset(alive), ready, attempt.votes, attempt.failed or None, **view)
    heard = AttemptFindings(attempt, findings_before(attempt.plan, past, committed), is_over=True)
    decision = next_plan(seen, 3, Rules(), inquiry=lambda _: heard)
    assert isinstance(decision, RoundPlan)
    return replace(decision, before=attempt.plan.id)


def in_another_order(attempt: Attempt) -> Attempt:
    said, votes = (dict(reversed(words.items())) for words in (attempt.evidence, attempt.votes))
    return replace(attempt, evidence=said, votes=votes)


def first_plan(committed: Verdict) -> RoundPlan:
    return following(Attempt(committed.plan), (), committed)


# -- honest members --------------------------------------------------------------------------------------------------

HELD = ("ha", "hb", "hc", "hd")
HASHES = st.tuples(*(st.sampled_from(["", h, "x"]) for h in HELD))
NAMES = st.lists(st.sampled_from(FOUR), max_size=2, unique=True).map(tuple)
WORDS = st.builds(Evidence, st.sampled_from([(), HELD]) | HASHES, NAMES, NAMES, NAMES, HASHES | st.just(()), NAMES)
REASONS = st.sampled_from(
    [f"{A}: a lane broke", f"1 {NO_VOTE}", "the members hold different results", f"{B}: {REFUSED}: x"]
)
FOUND = st.builds(
    Blame,
    st.sampled_from([(A,), (A, B), (C, D)]),
    st.just("why"),
    st.booleans(),
    st.sampled_from(["named", "apart"]),
    st.just(2),
)


@given(st.data())
def test_plan_of_an_honest_proposer_is_never_refused_however_often_its_round_failed(data: st.DataObject) -> None:
    """Members say, vote for and withhold whatever they like; some are lost on the way or do not reach each other."""
    committed = committed_with(*data.draw(st.lists(FOUND, max_size=2)))
    plan, past, alive = first_plan(committed), list[Attempt](), list(FOUR)
    assert objection(plan, past, committed) is None
    for _ in range(data.draw(st.integers(1, 5))):
        votes = data.draw(st.dictionaries(st.sampled_from(FOUR), st.sampled_from(["d", "e", refusal(A)]), max_size=4))
        said = data.draw(st.dictionaries(st.sampled_from(FOUR), WORDS, max_size=4))
        failed, peers = data.draw(REASONS), dict[str, Peer]()
        if len(alive) > 2 and data.draw(st.booleans()):
            gone = alive.pop()
            if data.draw(st.booleans()):
                failed = ""
                votes.pop(gone, None)
        elif data.draw(st.booleans()):
            peers = {alive[0]: Peer("n", "h", 1, False, (alive[1],)), alive[1]: Peer("n", "h", 1, False)}
        attempt = Attempt(plan, votes, said, failed)
        view = View(plan, committed, frozenset(alive), dict.fromkeys(FOUR, READY), votes, failed or None, peers)
        if view.can_finish(plan):
            return
        heard = AttemptFindings(attempt, findings_before(plan, past, committed), is_over=True)
        decision = next_plan(view, 3, Rules(), inquiry=lambda _, heard=heard: heard)
        if isinstance(decision, Wait):  # all were put out
            return
        plan, past = replace(decision, before=plan.id), [*past, attempt]
        assert objection(plan, [in_another_order(attempt) for attempt in past], committed) is None


# -- proposers that lie ----------------------------------------------------------------------------------------------

LIE = Blame((D,), "why", is_lie=True, consequence="out", round=2)
APART = Blame((A, B), "why", is_lie=True, consequence="apart", round=2)
COMMITTED = committed_with(APART)
TWO = {m: Evidence(HELD) for m in (A, B)}
WRONG_VOTE = Attempt(
    replace(first_plan(committed_with()), blames=()),
    {A: "d", B: "d", C: "odd", D: "d"},
    {m: Evidence(HELD) for m in FOUR},
    "the members hold different results",
)
"""C votes for what it does not hold, and all testify."""
SILENT = Attempt(WRONG_VOTE.plan, {}, {m: Evidence(lacks=(B,)) for m in (A, C)}, f"{A}: a lane broke")
"""B and D say nothing."""


def plan_behind(attempt: Attempt) -> RoundPlan:
    return following(attempt, (), committed_with())


FORGERIES: dict[str, tuple[Attempt, Callable[[RoundPlan], Mapping[str, Any]], str]] = {
    "an honest member lies": (
        WRONG_VOTE,
        lambda o: {"blames": (*o.blames, replace(LIE, round=3)), "members": o.members[:-1], "weights": (10, 10)},
        f"it says that {D} (out): why; no signed evidence supports that",
    ),
    "two honest members contradict each other": (
        WRONG_VOTE,
        lambda o: {"blames": (*o.blames, replace(APART, round=3))},
        f"it says that {A} and {B} (apart): why; no signed evidence supports that",
    ),
    "a gap, of no consequence yet": (
        WRONG_VOTE,
        lambda o: {"blames": (*o.blames, Blame((A,), "why", is_lie=False, consequence="named", round=3))},
        f"it says that {A} (named): why",
    ),
    "it was found earlier": (WRONG_VOTE, lambda o: {"blames": (LIE, *o.blames)}, f"it says that {D} (out): why"),
    "a gap has consequences at once": (
        SILENT,
        lambda o: {"blames": tuple(replace(b, consequence="out") for b in o.blames)},
        "(out): ",
    ),
    "a finding is left away": (WRONG_VOTE, lambda _: {"blames": ()}, f"it leaves out that {C} (out): {C} holds what 3"),
    "it takes part though it was put out": (
        WRONG_VOTE,
        lambda o: {"members": FOUR, "weights": (10,) * 4, **dict.fromkeys(("steps", "steps_requested"), (4,) * 4)},
        f"it lists {C}, which was excluded",
    ),
    "one was lost, and all are there": (
        SILENT,
        lambda _: {"blames": (), "retries": 0, "silent": ()},
        f"it leaves out that {B} ",
    ),
    "a member is silent that testified": (
        SILENT,
        lambda o: {"silent": (C, *o.silent)},
        f"its silent is ('{C}', '{B}', '{D}'); the attempts before it give ('{B}', '{D}')",
    ),
    "the round failed often": (WRONG_VOTE, lambda _: {"retries": 25}, "its retries is 25; the attempts"),
    "the next attempt shows nothing": (WRONG_VOTE, lambda _: {"is_flat": False}, "its is_flat is False"),
    "an attempt was not": (
        WRONG_VOTE,
        lambda o: {"version": o.version + 1},
        "version 7 and follows version 5",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_plan_that_says_something_else_is_refused(name: str) -> None:
    attempt, change, why = FORGERIES[name]
    plan = plan_behind(attempt)
    assert objection(plan, [attempt], committed_with()) is None
    forged = replace(plan, network=type(plan.network)(), **_fitting(change(plan)))
    assert why in (objection(forged, [attempt], committed_with()) or "")


def _fitting(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With lists as long as the members."""
    if "members" not in fields:
        return dict(fields)
    count = len(fields["members"])
    return {"steps": (4,) * count, "steps_requested": (6,) * count, "largest": (), **fields}


def test_plan_that_takes_the_place_of_one_that_neither_failed_nor_lost_a_member_is_refused() -> None:
    attempt = Attempt(WRONG_VOTE.plan)
    plan = replace(attempt.plan, version=6, before=attempt.plan.id)
    assert "replaces version 5" in (objection(plan, [attempt], committed_with()) or "")


def test_what_a_verdict_has_found_is_neither_left_away_nor_added_to() -> None:
    plan = first_plan(COMMITTED)
    assert plan.blames == (APART,) and objection(plan, (), COMMITTED) is None
    assert objection(replace(plan, blames=()), (), COMMITTED) == f"it leaves out that {A} and {B} (apart): why"
    assert objection(replace(plan, blames=(APART, LIE)), (), COMMITTED) is not None


def test_what_a_refused_plan_made_up_goes_no_further() -> None:
    """The next proposer counts the attempt, and none of what it said."""
    made_up = replace(plan_behind(SILENT), blames=(replace(LIE, round=3),), is_flat=True)
    refused = Attempt(made_up, {}, dict.fromkeys(FOUR, Evidence()), f"{A}: {REFUSED}: it says that {D} lies")
    again = following(refused, (SILENT,), committed_with())
    assert LIE.members not in [b.members for b in again.blames] and set(again.members) == set(FOUR)
    assert again.retries == 2 and objection(again, (SILENT, refused), committed_with()) is None


def test_attempts_that_the_store_lost_are_as_if_they_had_not_been() -> None:
    second = plan_behind(WRONG_VOTE)
    assert "no signed evidence supports that" in (objection(second, (), committed_with()) or "")
    failed = Attempt(second, {}, dict.fromkeys(second.members, Evidence()), f"{A}: a lane broke")
    third = following(failed, (), committed_with())
    assert (third.blames, third.retries) == ((), 1) and objection(third, (failed,), committed_with()) is None


def test_whose_member_was_lost_is_judged_no_more_and_goes_without_one() -> None:
    plan = following(SILENT, (), committed_with(), alive=(A, B, C))
    assert (plan.members, plan.blames, plan.retries) == ((A, B, C), (), 0)
    assert objection(plan, [SILENT], committed_with()) is None
