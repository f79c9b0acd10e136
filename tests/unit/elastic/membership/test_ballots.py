"""Which verdicts follow from votes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.stores import an_opening

from zeroband.elastic.membership.ballots import digest_in, is_alike, is_voted_for, vote_for, vote_of
from zeroband.elastic.membership.records import Verdict

RECORD: dict[str, Any] = {"progress": {"inner_step": 8}, "weight": 3, "session": "s", "grad_norm": 2.0}
SCORED = {**RECORD, "agreement": {"a": 0.5, "b": -0.1}}
OWN = Verdict(an_opening("a", "b"), "d", RECORD)


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
        (replace(OWN, opening=an_opening("a", "b", version=2)), False),
    ],
)
def test_verdict_on_ones_own_opening_says_what_one_would_have_written(said: Verdict, counts: bool) -> None:
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
