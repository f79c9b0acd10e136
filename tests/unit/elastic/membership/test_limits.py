"""What a member may announce and propose: by what the run dealt it, and by the records of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zeroband.data.ledger import SHARED, Ledger
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.plan_checks import MAX_PLANS, checkers, limit_violation, plan_objection, refuse_excess
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.records import Carry, Ready, RoundPlan, Verdict, View, from_json, to_json
from zeroband.elastic.membership.round_rules import ElapsedWaits, Rules, Wait, next_plan

A, B, C = "a#1", "b#1", "c#1"
SHAPE = RunShape(total_steps=1000, batch_size=4, sample_tokens=32)
RULES = Rules(shape=SHAPE)
HONEST = Ready(3, 1280, "s", 10, 10, loss=2.5, largest=0.5)
LEDGER = Ledger(120, (), {A: ((0, 40),), B: ((40, 80),), C: ((80, 120),)})


def view_of(**ready: Ready) -> View:
    """Round 2 is committed, and dealt ten steps to each of three members, who stand before round 3."""
    before = RoundPlan(4, 2, 2, (A, B, C), (1280,) * 3, (10,) * 3, (10,) * 3)
    verdict = Verdict(before, "d", {"progress": Progress(30, 3840, {SHARED: LEDGER}).to_record(), "session": "s"})
    told = {f"{name}#1": said for name, said in {"a": HONEST, "b": HONEST, "c": HONEST, **ready}.items()}
    return View(before, verdict, frozenset({A, B, C}), told, {}, None)


def plan_of(view: View, rules: Rules = RULES) -> RoundPlan:
    decision = next_plan(view, 3, rules)
    assert isinstance(decision, RoundPlan), decision
    return decision


ATTACKS: dict[str, dict[str, Any]] = {
    "weight of 1e12": {"weight": 10**12},
    "one token too many": {"weight": 1281},
    "steps x 1000": {"steps": 10_000},
    "one step too many": {"steps": 11},
    "requests 1e12": {"steps_requested": 10**12},
    "weight without steps": {"steps": 0},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_record_beyond_what_was_dealt_is_refused_by_its_number_and_bound(attack: str) -> None:
    said = replace(HONEST, **ATTACKS[attack])
    view = refuse_excess(view_of(c=said), 3, RULES)
    assert view.ready.keys() == {A, B} and view.refused.keys() == {C}
    field = next(iter(ATTACKS[attack])) if attack != "weight without steps" else "weight"
    assert view.refused[C].startswith(f"{field}={getattr(said, field)}, but ")


def test_record_of_what_was_dealt_counts() -> None:
    view = view_of()
    assert refuse_excess(view, 3, RULES) is view


def test_joiner_that_brings_nothing_counts_and_one_that_brings_something_does_not() -> None:
    view = view_of()
    joiners = {"d#1": replace(HONEST, weight=0, steps=0), "e#1": HONEST}
    limited = refuse_excess(replace(view, ready={**view.ready, **joiners}), 3, RULES)
    assert "d#1" in limited.ready and limited.refused.keys() == {"e#1"}


def test_node_chooses_its_steps_up_to_those_of_the_run() -> None:
    assert limit_violation(replace(HONEST, steps_requested=1000), 10, SHAPE) is None
    assert limit_violation(replace(HONEST, steps_requested=1001), 10, SHAPE) is not None


def test_closing_round_weighs_what_the_round_before_did_without_steps() -> None:
    closing = replace(SHAPE, closing_rounds=1)
    assert limit_violation(replace(HONEST, steps=0), 0, closing, 1280) is None
    assert limit_violation(replace(HONEST, steps=0, weight=1281), 0, closing, 1280) is not None
    assert limit_violation(replace(HONEST, steps=0), 0, closing, 0) is None, "what all members had was not finite"


def test_weight_of_samples_of_unknown_length_is_not_bounded() -> None:
    assert limit_violation(replace(HONEST, weight=10**12), 10, replace(SHAPE, sample_tokens=0)) is None


def test_founder_has_nothing_yet() -> None:
    founding = View(None, None, frozenset({A, B}), {A: Ready(0, 0, "s", 0, 10), B: Ready(0, 5, "s", 5, 10)}, {}, None)
    assert refuse_excess(founding, 0, RULES).refused.keys() == {B}


def test_limits_need_the_verdict_of_the_round_before() -> None:
    view = view_of(c=replace(HONEST, steps=10_000))
    assert refuse_excess(view, 4, RULES) is view
    assert refuse_excess(view, 3, Rules()) is view


def test_round_waits_for_refused_member_until_it_is_given_up_and_then_goes_without_it() -> None:
    view = refuse_excess(view_of(c=replace(HONEST, weight=10**12)), 3, RULES)
    assert isinstance(next_plan(view, 3, RULES), Wait)
    decision = next_plan(view, 3, RULES, ElapsedWaits(given_up=frozenset({C})))
    assert isinstance(decision, RoundPlan) and decision.members == (A, B) and decision.late == ()


def test_plan_of_the_rules_follows_from_its_records() -> None:
    view = view_of(b=replace(HONEST, loss=None, largest=0.25), c=replace(HONEST, weight=0, steps=0, largest=None))
    plan = plan_of(view)
    assert plan.largest == (0.5, 0.25, 0.0)
    assert plan_objection(plan, replace(view, plan=plan), RULES) is None
    assert plan_objection(from_json(RoundPlan, to_json(plan)), view, RULES) is None


FORGERIES: dict[str, tuple[Callable[[RoundPlan], dict[str, Any]], str]] = {
    "weights": (lambda o: {"weights": (1, *o.weights[1:])}, f"weights of {A} is 1, but the records"),
    "steps": (lambda o: {"steps": (*o.steps[:2], 10_000)}, f"steps of {C} is 10000"),
    "requests": (lambda o: {"steps_requested": (0, 10, 10)}, f"steps_requested of {A} is 0"),
    "trust": (lambda o: {"trust": (0.5, 1.0, 1.0)}, "trust factors do not follow"),
    "sizes": (lambda o: {"largest": (1e30,) * 3}, f"largest of {A} is 1e+30"),
    "loss": (lambda o: {"loss": 2.6}, "loss is 2.6"),
    "equal weights": (lambda o: {"is_equal": True}, "is_equal is True"),
    "training": (lambda o: {"phase_fraction": (0.1, 1.0, 1.0)}, "phase_fraction is (0.1"),
    "corpora": (lambda o: {"corpora": ("x", "", "")}, "corpora is"),
    "sites": (lambda o: {"sites": (0, 0, 2)}, "sites, but comm.sites is off"),
    "version": (lambda o: {"version": 5 + MAX_PLANS}, "version 1048581, epoch"),
    "epoch": (lambda o: {"epoch": 1}, "epoch 1 after"),
    "rollback": (lambda o: {"rollback": 10}, "rolls back to step 10, which was not ordered"),
    "late": (lambda o: {"late": (A,)}, f"lists {A} as a member and as late"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_plan_with_another_number_does_not_follow(name: str) -> None:
    view = view_of()
    plan = plan_of(view)
    change, why = FORGERIES[name]
    assert why in (plan_objection(replace(plan, **change(plan)), view, RULES) or "")


def with_carried() -> tuple[RoundPlan, View]:
    """A plan to a and b that counts what c offers, and the records that it follows from."""
    rules = replace(RULES, straggler_grace=0.1, transfer_bytes=125_000)
    words = {
        "a": replace(HONEST, rate=5, offer="", carries=(Carry(C, "3-x", 0.5),)),
        "b": replace(HONEST, rate=5, offer=""),
        "c": replace(HONEST, rate=0.1, offer="3-x"),
    }
    view = view_of(**words)
    plan = next_plan(view, 3, rules, ElapsedWaits(phase_s=12.0))
    assert isinstance(plan, RoundPlan) and plan.counted and plan.members == (A, B)
    return plan, view


def test_plan_that_counts_a_carried_contribution_follows_from_its_records() -> None:
    plan, view = with_carried()
    assert plan_objection(plan, view, RULES) is None
    away = replace(view, ready={m: r for m, r in view.ready.items() if m != C})
    assert "the records say" in str(plan_objection(plan, away, RULES))


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 1281},
        {"steps": 11},
        {"offer": "3-y"},
        {"carrier": B},
        {"largest": 0.25},
    ],
    ids=lambda change: next(iter(change)),
)
def test_plan_that_counts_another_contribution_than_was_offered_and_fetched_is_refused(
    change: dict[str, Any],
) -> None:
    plan, view = with_carried()
    forged = replace(plan, carried=(replace(plan.carried[0], **change),))
    assert "the records say" in str(plan_objection(forged, view, RULES))


def test_contribution_of_a_refused_record_is_not_carried() -> None:
    plan, view = with_carried()
    limited = replace(view, refused={C: "weight=10000"})
    assert "is invalid" in str(plan_objection(plan, limited, RULES))


@pytest.mark.parametrize("change", [{"carrier": C}, {"member": A}, {"member": "d#1"}])
def test_plan_that_has_members_carried_by_themselves_or_by_strangers_is_none(change: dict[str, Any]) -> None:
    plan, _ = with_carried()
    with pytest.raises(ValueError, match="cannot be carried by"):
        replace(plan, carried=(replace(plan.carried[0], **change),))


def test_plan_to_member_that_is_not_there_or_refused_does_not_follow() -> None:
    view = view_of()
    plan = plan_of(view)
    without = replace(view, ready={m: r for m, r in view.ready.items() if m != C})
    assert plan_objection(plan, without, RULES) == f"it lists {C}, which is not ready for round 3"
    limited = refuse_excess(view_of(c=replace(HONEST, weight=10**12)), 3, RULES)
    hostile = replace(plan, weights=(1280, 1280, 10**12))
    assert str(plan_objection(hostile, limited, RULES)).startswith(
        f"it lists {C}, whose record is refused: weight=10000"
    )


def test_ordered_rollback_follows_and_older_orders_are_not_compared() -> None:
    view = replace(view_of(), orders=Orders(3, rollback=10))
    plan = plan_of(view)
    assert plan.rollback == 10 and plan_objection(plan, view, RULES) is None
    assert plan_objection(plan, replace(view, orders=Orders(4)), RULES) is None


def test_sites_that_members_name_must_be_those_of_the_plan() -> None:
    rules = replace(RULES, sites="named")
    view = view_of(a=replace(HONEST, site="x"), b=replace(HONEST, site="x"))
    plan = plan_of(view, rules)
    assert plan.sites == (0, 0, 2) and plan_objection(plan, view, rules) is None
    assert f"speaks for {C}" in str(plan_objection(replace(plan, sites=(0, 0, 0)), view, rules))


@pytest.mark.parametrize(
    "fields",
    [
        {"sites": (9, 9, 9)},
        {"sites": (1, 0, 2)},
        {"weights": (1,)},
        {"steps": (1, 1)},
        {"members": (A, A, B)},
        {"members": (), "weights": (), "steps": (), "steps_requested": ()},
    ],
)
def test_plan_whose_lists_do_not_fit_together_is_none(fields: dict[str, Any]) -> None:
    plan = plan_of(view_of())
    text = to_json({**_record(plan), **{name: list(value) for name, value in fields.items()}})
    with pytest.raises(ValueError, match=r"must be|entries|sites"):
        from_json(RoundPlan, text)


def _record(plan: RoundPlan) -> dict[str, Any]:
    return json.loads(to_json(plan))


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"largest": (0.5, 0.25, 0.125)}, 1.0),
        ({}, float("inf")),
        ({"largest": (0.5, 0.25, 0.125), "phase_fraction": (1.0, 0.5, 0.5)}, 1.5),
    ],
)
def test_mean_is_bounded_by_the_largest_value_of_its_members(fields: dict[str, Any], bound: float) -> None:
    """Twice, since values are rounded; more where members count that have trained less."""
    plan = RoundPlan(1, 1, 1, (A, B, C), (10, 10, 10), **fields)
    assert plan.max_value == pytest.approx(bound)


def test_few_members_check_a_large_plan_and_another_plan_draws_others() -> None:
    members = tuple(f"m{number}#1" for number in range(64))
    weights = (1,) * len(members)
    drawn = [checkers(RoundPlan(version, 1, 3, members, weights)) for version in range(1, 9)]
    assert {len(of_one) for of_one in drawn} == {3} and len(set(drawn)) > 1
    assert all(set(of_one) <= set(members) for of_one in drawn)
