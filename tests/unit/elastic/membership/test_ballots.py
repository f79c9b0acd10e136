"""Which verdicts follow from votes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.stores import a_peer, a_plan

from zeroband.elastic.membership.ballots import (
    Present,
    digest_in,
    is_alike,
    is_voted_for,
    may_leave_out,
    vote_for,
    vote_of,
)
from zeroband.elastic.membership.records import Ready, Verdict

RECORD: dict[str, Any] = {"progress": {"inner_step": 8}, "weight": 3, "session": "s", "grad_norm": 2.0}
SCORED = {**RECORD, "agreement": {"a": 0.5, "b": -0.1}}
OWN = Verdict(a_plan("a", "b"), "d", RECORD)


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (OWN, True),
        (replace(OWN, record={**RECORD, "grad_norm": 2.0000001}), True),
        (replace(OWN, record={**RECORD, "grad_norm": 2.1}), False),
        (replace(OWN, record={**RECORD, "grad_norm": float("nan")}), False),
        (replace(OWN, record={**RECORD, "grad_norm": "2.0"}), False),
        (replace(OWN, record={**RECORD, "progress": {"inner_step": 9}}), False),
        (replace(OWN, record={**RECORD, "session": "another"}), False),
        (replace(OWN, record=SCORED), False),
        (replace(OWN, digest="another"), False),
        (replace(OWN, plan=a_plan("a", "b", version=2)), False),
    ],
)
def test_verdict_on_ones_own_plan_says_what_one_would_have_written(said: Verdict, counts: bool) -> None:
    assert is_alike(said, OWN) is counts


@pytest.mark.parametrize(("score", "counts"), [(0.5, True), (0.65, True), (0.1, False), (-1.0, False)])
def test_scores_differ_by_no_more_than_one_round_may_move_them(score: float, counts: bool) -> None:
    own = replace(OWN, record=SCORED)
    assert is_alike(replace(own, record={**SCORED, "agreement": {"a": score, "b": -0.1}}), own) is counts


def test_scores_of_other_members_are_refused() -> None:
    own = replace(OWN, record=SCORED)
    assert not is_alike(replace(own, record={**SCORED, "agreement": {"a": 0.5}}), own)


def test_vote_names_its_digest_and_hides_what_is_measured() -> None:
    assert digest_in(vote_for("d", RECORD)) == digest_in("d") == "d"
    assert vote_for("d", RECORD) == vote_for("d", {**RECORD, "grad_norm": 5.0})
    assert vote_for("d", RECORD) != vote_for("d", {**RECORD, "weight": 4})


@pytest.mark.parametrize(
    ("votes", "known", "counts"),
    [
        ({"a": "for", "b": "for"}, "ab", True),
        ({"a": "for"}, "ab", False),
        ({"a": "for", "b": "against"}, "ab", False),
        ({"a": "for", "c": "for"}, "a", True),
        ({"c": "for"}, "ab", False),
        ({}, "", True),
    ],
)
def test_more_than_half_of_the_members_that_one_knows_have_voted(
    votes: dict[str, str], known: str, counts: bool
) -> None:
    said = {member: vote_of(OWN) if vote == "for" else vote for member, vote in votes.items()}
    assert is_voted_for(OWN, said, known) is counts


FOUR = Verdict(a_plan("a", "b", "c", "x"), "d")
LATE = a_plan("x", version=2, round=1, late=("a", "b", "c"))
ALONE = a_plan("x", version=2, round=1)
APART = {member: a_peer(member, *{"a", "b", "c", "x"} - {member}) for member in "abcx"}
STATES = {member: Ready(1, 1, f"state of {member}") for member in "abc"}
HEAVY = {member: Ready(1, 9 if member == "x" else 1, "state") for member in "abcx"}


@pytest.mark.parametrize(
    ("plan", "here", "counts"),
    [
        (ALONE, Present("abcx"), False),
        (a_plan("x", "j", version=2, round=1), Present("abcxj"), False),
        (a_plan("j", version=2, round=1), Present("abcxj"), False),
        (LATE, Present("abcx"), False),
        (ALONE, Present("abcx", {"x": a_peer("x", "a", "b", "c")}), False),
        (a_plan("b", "x", version=2, round=1), Present("abcx"), True),
        (a_plan("a", version=2, round=1), Present("abcx"), True),
        (ALONE, Present("ax"), None),
        (ALONE, Present("x"), None),
        (ALONE, Present("abcx", APART), True),
        (ALONE, Present("abcx", ready=STATES), True),
        (ALONE, Present("abcx", ready={**STATES, "b": STATES["a"]}), False),
        (LATE, Present("abcx", ready=HEAVY), True),
        (LATE, Present("abcx", quorum=0.2, ready=dict(list(HEAVY.items())[:1])), False),
    ],
)
def test_one_member_goes_without_others_only_where_these_are_gone_apart_different_or_light(
    plan: Any, here: Present, counts: bool | None
) -> None:
    """As member "a" sees it, of a round of four."""
    assert may_leave_out(plan, FOUR, "a", here, here.alive) is counts


def test_round_of_two_may_go_on_with_one() -> None:
    pair = Verdict(a_plan("a", "x"), "d")
    assert may_leave_out(ALONE, pair, "a", Present("ax"), "ax")
