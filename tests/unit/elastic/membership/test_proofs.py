"""Which signatures a member may leave unverified, and how it notices what somebody else said in its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroband.elastic.membership.plan_checks import (
    has_only_quoted_fields,
    is_undisputed,
    misquote,
    omits_ready_member,
    required_members,
)
from zeroband.elastic.membership.records import Blame, Claim, Ready, RoundPlan, View

A, B, C = "a#1", "b#1", "c#1"
SAID = Ready(3, 1280, "s", 10, 8, loss=2.5, phase_fraction=0.5, corpus="x", largest=0.5)
PLAN = RoundPlan(
    *(5, 2, 3, (A, B, C), (1280, 640, 0), (10, 5, 0), (8, 8, 8)),
    phase_fraction=(0.5, 1.0, 1.0),
    corpora=("x", "", ""),
    largest=(0.5, 0.25, 0.0),
    proposer=B,
)


def test_plan_that_quotes_a_member_as_it_spoke() -> None:
    assert misquote(PLAN, A, SAID) is None
    plain = replace(PLAN, phase_fraction=(), corpora=(), largest=())
    assert misquote(plain, A, replace(SAID, corpus="")) is None
    assert misquote(plain, C, Ready(3, 0, "s", 0, 8, largest=9.0)) is None
    assert misquote(PLAN, C, Ready(3, 0, "s", 0, 8, largest=9.0)) is None, "one without weight sends no values"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("weight", 1281), ("steps", 11), ("steps_requested", 0), ("phase_fraction", 1.0), ("corpus", "")),
        *(("largest", 0.25), ("largest", None), ("claim", Claim(0, 8))),
    ],
)
def test_member_notices_any_number_that_it_did_not_say(field: str, value: Any) -> None:
    why = misquote(PLAN, A, replace(SAID, **{field: value}))
    assert why is not None and why.endswith(f"but that member's record says {value!s}") and A in why


def test_joiner_notices_another_claim_than_its_own() -> None:
    joiner, own = replace(SAID, claim=Claim(96, 104)), replace(PLAN, claims=((A, Claim(96, 104)),))
    assert misquote(own, A, joiner) is None
    assert "its claims of a#1" in (misquote(own, A, replace(SAID, claim=Claim(104, 112))) or "")
    assert misquote(own, A, SAID) is not None, "it was dealt its samples"
    assert misquote(replace(PLAN, rollback=10), A, joiner) is None, "nothing counts in a return to a checkpoint"


def test_members_without_weight_and_those_that_go_back_to_a_checkpoint_send_nothing() -> None:
    assert required_members(PLAN) == {A, B}
    assert required_members(replace(PLAN, rollback=10)) == frozenset()


BLAME = Blame((C,), "why", True, "out", 2)


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({}, True),
        ({"late": ("d#1",)}, True),
        ({"proposer": "d#1"}, False),
        ({"proposer": C}, False),
        ({"retries": 1}, False),
        ({"blames": (BLAME,)}, False),
        ({"rollback": 10}, False),
        ({"members": (B, C, "d#1"), "proposer": B}, False),
    ],
    ids=["usual", "late", "stranger", "weightless", "retried", "blames", "rollback", "without this member"],
)
def test_plan_is_taken_of_a_proposer_that_takes_part(changes: dict[str, Any], *, is_taken: bool) -> None:
    assert is_undisputed(replace(PLAN, **changes), A, {B, C}) is is_taken


def test_plan_of_a_member_that_is_new_is_not_taken() -> None:
    assert not is_undisputed(PLAN, A, {C})


def test_only_what_a_plan_quotes_is_taken_of_a_member_that_brings_something() -> None:
    assert has_only_quoted_fields(SAID)
    assert not has_only_quoted_fields(replace(SAID, offer="1-abc")), "another member may bring it"
    assert not has_only_quoted_fields(replace(SAID, weight=0)) and not has_only_quoted_fields(
        replace(SAID, gains=(0.5,))
    )


def test_plan_leaves_out_the_living_that_are_ready() -> None:
    view = View(None, None, frozenset({A, B, C, "d#1"}), {A: SAID, B: SAID, C: SAID}, {}, None)
    assert not omits_ready_member(PLAN, view)
    assert omits_ready_member(PLAN, replace(view, ready={**view.ready, "d#1": SAID}))
    assert not omits_ready_member(PLAN, replace(view, ready={**view.ready, "e#1": SAID})), "it is gone"
