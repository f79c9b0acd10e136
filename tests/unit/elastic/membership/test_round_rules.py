"""The rules of membership, branch by branch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.membership.blame import Findings, refusal
from zeroband.elastic.membership.records import (
    BOOTSTRAP_ROUND,
    Attempt,
    Blame,
    Carried,
    Carry,
    Evidence,
    LinkRates,
    Peer,
    Ready,
    RoundPlan,
    Verdict,
    View,
    from_json,
    from_record,
    to_json,
    to_record,
)
from zeroband.elastic.membership.round_rules import (
    MIN_GRACE_S,
    AttemptFindings,
    ElapsedWaits,
    Inquiry,
    Rules,
    Wait,
    has_quorum,
    must_leave,
    next_plan,
    next_verdict,
)
from zeroband.elastic.membership.topology import all_to_all_time

A, B, C, D = "a#1", "b#1", "c#1", "d#1"
PATIENT, LATE = ElapsedWaits(), ElapsedWaits(stragglers_are_late=True)


def a_plan(*members: str, version: int = 5, epoch: int = 2, round: int = 3, **fields: Any) -> RoundPlan:
    each: dict[str, Any] = {"weights": 10, "steps": 4, "steps_requested": 6}
    usual = {name: (value,) * len(members) for name, value in each.items()}
    return RoundPlan(version, epoch, round, members, **{**usual, "loss": 2.5, **fields})


def a_verdict(*members: str, round: int = 2, version: int = 4, **fields: Any) -> Verdict:
    return Verdict(a_plan(*members, version=version, round=round, **fields), "digest")


def a_view(**fields: Any) -> View:
    empty: dict[str, Any] = {
        "plan": None,
        "committed": None,
        "alive": frozenset(),
        "ready": {},
        "votes": {},
        "failed": None,
    }
    return View(**{**empty, **fields})


def ready(
    *members: str, round: int = 3, weight: int = 10, state_digest: str = "s", steps_requested: int = 6
) -> dict[str, Ready]:
    return {member: Ready(round, weight, state_digest, 4, steps_requested, loss=2.5) for member in members}


def cut(**from_to: str) -> dict[str, Peer]:
    """Peers of which some do not reach others: `cut(a="bc")`."""
    names = {**dict.fromkeys("abcd", ""), **from_to}
    return {
        f"{name}#1": Peer(name, "host", 1, False, tuple(f"{other}#1" for other in others))
        for name, others in names.items()
    }


def boundary(*members: str, **fields: Any) -> View:
    """Round 2 is committed and all its members stand before round 3."""
    usual: dict[str, Any] = {
        "plan": a_plan(*members, version=4, round=2),
        "committed": a_verdict(*members),
        "alive": frozenset(members),
        "ready": ready(*members),
    }
    return a_view(**{**usual, **fields})


def decide(
    view: View, round: int = 3, waits: ElapsedWaits = PATIENT, inquiry: Inquiry | None = None, **rules: Any
) -> RoundPlan | Wait:
    return next_plan(view, round, Rules(**rules), waits, inquiry=inquiry)


def members_of(decision: RoundPlan | Wait) -> tuple[str, ...]:
    assert isinstance(decision, RoundPlan), decision
    return decision.members


# -- next_plan -----------------------------------------------------------------------------------------------------


def test_next_plan_keeps_the_current_one_while_it_can_be_finished() -> None:
    current = a_plan(A, B)
    assert decide(boundary(A, B, plan=current)) is current


def test_next_plan_keeps_one_whose_lost_member_has_voted() -> None:
    current = a_plan(A, B)
    view = boundary(A, B, plan=current, alive=frozenset({A}), votes={B: "digest"})
    assert decide(view) is current


def test_next_plan_replaces_one_whose_member_was_lost_before_its_vote() -> None:
    view = boundary(A, B, plan=a_plan(A, B), alive=frozenset({A}))
    assert decide(view) == a_plan(A, version=6, epoch=3)


def test_next_plan_replaces_one_whose_members_all_voted_and_died() -> None:
    """Nobody is left who would write its verdict; a late member or a joiner would wait for it for ever."""
    view = boundary(A, B, C, plan=a_plan(A, B, late=(C,)), alive=frozenset({C}), votes={A: "d", B: "d"})
    assert decide(view) == a_plan(C, version=6, epoch=3)


def test_next_plan_replaces_a_failed_one_with_new_groups_even_for_the_same_members() -> None:
    view = boundary(A, B, plan=a_plan(A, B), failed="a lane broke")
    assert decide(view) == a_plan(A, B, version=6, epoch=3, retries=1)


def test_next_plan_keeps_epoch_and_groups_when_nobody_came_or_went() -> None:
    assert decide(boundary(A, B)) == a_plan(A, B, version=5, epoch=2)


@pytest.mark.parametrize("members", [(A,), (A, B, C)])
def test_next_plan_starts_an_epoch_when_somebody_came_or_went(members: tuple[str, ...]) -> None:
    view = boundary(A, B, alive=frozenset(members), ready=ready(*members))
    assert decide(view) == a_plan(*members, version=5, epoch=3)


def test_next_plan_waits_for_living_members_and_names_them() -> None:
    view = boundary(A, B, C, ready=ready(A))
    assert decide(view) == Wait("2 of 3 members have not reached round 3", (B, C))


@pytest.mark.defect(7)
def test_next_plan_waits_for_nobody_who_only_joins() -> None:
    view = boundary(A, B, alive=frozenset({A, B, C}))
    assert decide(view) == a_plan(A, B)


@pytest.mark.defect(1)
def test_next_plan_leaves_out_a_ready_member_whose_lease_ran_out() -> None:
    """Predecessors compared integer ranks with string ids here, and evicted nobody."""
    assert members_of(decide(boundary(A, B, C, alive=frozenset({A, C})))) == (A, C)


def test_next_plan_takes_the_words_in_the_order_of_members() -> None:
    view = boundary(A, B, ready={B: Ready(3, 7, "s", 2, 5, loss=3.5), A: Ready(3, 0, "s", 1, 0)})
    assert decide(view) == a_plan(A, B, weights=(0, 7), steps=(1, 2), steps_requested=(0, 5), loss=3.5)


def test_next_plan_goes_with_the_state_of_most_members() -> None:
    states = {**ready(A, state_digest="odd"), **ready(B, C)}
    assert decide(boundary(A, B, C, ready=states)) == a_plan(B, C, epoch=3)


def test_next_plan_never_outvotes_members_by_joiners() -> None:
    joiners = ("x#1", "y#1")
    view = boundary(B, alive=frozenset({B, *joiners}), ready={**ready(B), **ready(*joiners, state_digest="odd")})
    assert decide(view) == a_plan(B)


def test_next_plan_breaks_a_tie_of_states_by_the_lowest_id() -> None:
    view = boundary(A, B, ready={**ready(A, state_digest="z"), **ready(B, state_digest="a")})
    assert decide(view) == a_plan(A, epoch=3)


def test_next_plan_waits_while_fewer_than_min_nodes_are_alive() -> None:
    decision = decide(boundary(A, B, alive=frozenset({A})), min_nodes=2)
    assert decision == Wait("1 of at least 2 nodes can take part (elastic.min_nodes)")


def test_next_plan_waits_while_the_newest_verdict_is_lost() -> None:
    """A joiner that looks just then must not open a round of its own."""
    decision = decide(a_view(alive=frozenset({A, C}), ready=ready(C), plan=a_plan(A, B)))
    assert isinstance(decision, Wait) and "lost the newest verdict" in decision.reason


def test_nobody_founds_a_run_whose_members_live() -> None:
    view = a_view(alive=frozenset({A, C}), ready=ready(C, round=0), plan=a_plan(A, B))
    decision = decide(view, BOOTSTRAP_ROUND)
    assert isinstance(decision, Wait) and "lost the newest verdict" in decision.reason


def test_plan_belongs_to_the_session_of_the_newest_verdict() -> None:
    committed = Verdict(a_plan(A, B), "d", {"session": "s"})
    decision = decide(replace(boundary(A, B), committed=committed))
    assert isinstance(decision, RoundPlan) and decision.sessions == ("s",)


def test_next_plan_waits_when_nobody_is_there() -> None:
    assert decide(a_view(), BOOTSTRAP_ROUND) == Wait("0 of 1 nodes are here (elastic.start_nodes)")


def test_next_plan_waits_while_the_store_gets_its_record_back() -> None:
    """Also where the current plan could be finished: a newer one may not be there again yet."""
    current = a_plan(A, B)
    decision = decide(boundary(A, B, plan=current, is_settling=True))
    assert isinstance(decision, Wait) and "lost its record" in decision.reason


def founders(*members: str, state_digest: str = "s") -> View:
    return a_view(
        alive=frozenset(members), ready=ready(*members, round=BOOTSTRAP_ROUND, weight=0, state_digest=state_digest)
    )


def test_founding_waits_for_start_nodes() -> None:
    decision = decide(founders(A), BOOTSTRAP_ROUND, start_nodes=2)
    assert decision == Wait("1 of 2 nodes are here (elastic.start_nodes)")


def test_founding_opens_with_all_who_are_there() -> None:
    decision = decide(founders(A, B, C), BOOTSTRAP_ROUND, start_nodes=2)
    assert decision == a_plan(A, B, C, version=1, epoch=1, round=0, weights=(0, 0, 0), loss=None)


def test_founding_goes_on_with_fewer_after_its_time_out() -> None:
    decision = decide(founders(A), BOOTSTRAP_ROUND, ElapsedWaits(start_is_over=True), start_nodes=2)
    assert members_of(decision) == (A,)


def test_founding_needs_min_nodes_even_after_its_time_out() -> None:
    decision = decide(founders(A), BOOTSTRAP_ROUND, ElapsedWaits(start_is_over=True), start_nodes=3, min_nodes=2)
    assert isinstance(decision, Wait)


def test_start_nodes_is_of_no_concern_after_the_founding() -> None:
    assert isinstance(decide(boundary(A), start_nodes=9), RoundPlan)


@pytest.mark.parametrize("order", [(A, B, C), (C, A, B)])
def test_any_member_makes_the_same_proposal(order: tuple[str, ...]) -> None:
    """A predecessor's run ended with its leader; here nobody's death stops a proposal, and all propose the same."""
    view = boundary(A, B, C, alive=frozenset(order), ready=ready(*order))
    assert decide(view) == a_plan(A, B, C)


# -- members that are late --------------------------------------------------------------------------------------------


def test_late_member_is_left_behind_and_named() -> None:
    assert decide(boundary(A, B, C, ready=ready(A, B)), waits=LATE) == a_plan(A, B, epoch=3, late=(C,))


def test_member_that_stays_late_is_named_again() -> None:
    """It is no member of the round that went without it, but its samples still wait for it."""
    view = boundary(A, B, committed=a_verdict(A, B, late=(C,)), alive=frozenset({A, B, C}))
    assert decide(view) == a_plan(A, B, late=(C,))


@pytest.mark.parametrize(
    "fields",
    [{"alive": frozenset({A, B})}, {"alive": frozenset({A, B, C}), "ready": ready(A, B, C)}],
    ids=["died", "came back"],
)
def test_late_member_that_died_or_came_back_is_late_no_more(fields: dict[str, Any]) -> None:
    decision = decide(boundary(A, B, committed=a_verdict(A, B, late=(C,)), **fields))
    assert isinstance(decision, RoundPlan) and decision.late == ()


def test_members_that_all_leave_wait_for_those_who_are_late() -> None:
    """Who is late keeps its samples for the next round, and there is none."""
    view = boundary(A, B, ready=ready(A, steps_requested=0))
    assert decide(view, waits=LATE) == Wait("1 of 2 members have not reached round 3", (B,))


def test_one_that_goes_on_is_enough_to_leave_the_late_behind() -> None:
    view = boundary(A, B, C, ready={**ready(A, steps_requested=0), **ready(B)})
    assert members_of(decide(view, waits=LATE)) == (A, B)


@pytest.mark.parametrize(
    ("at_boundary", "alive", "expected"),
    [("a", "abcd", False), ("ab", "abcd", True), ("a", "abc", False), ("a", "ab", True), ("", "ab", False)],
)
def test_quorum_is_half_of_the_living_members(at_boundary: str, alive: str, expected: bool) -> None:
    living = frozenset(f"{name}#1" for name in alive)
    view = boundary(A, B, C, D, alive=living, ready=ready(*(f"{name}#1" for name in at_boundary)))
    assert has_quorum(view) is expected


def test_quorum_counts_no_joiner_and_is_never_there_before_the_founding() -> None:
    assert not has_quorum(boundary(A, B, C, alive=frozenset({A, B, C, D}), ready=ready(D)))
    assert not has_quorum(founders(A, B))


@pytest.mark.parametrize(
    ("weights", "at_boundary", "expected"),
    [((1, 1, 7), "ab", False), ((1, 1, 7), "c", True), ((7, 1, 1), "a", True), ((0, 0, 5), "ab", False)],
)
def test_quorum_is_one_of_weight(weights: tuple[int, ...], at_boundary: str, expected: bool) -> None:
    view = boundary(
        A, B, C, committed=a_verdict(A, B, C, weights=weights), ready=ready(*(f"{n}#1" for n in at_boundary))
    )
    assert has_quorum(view) is expected
    assert isinstance(decide(view, waits=LATE), RoundPlan) is expected


def test_quorum_of_members_that_a_look_does_not_show_goes_by_their_number() -> None:
    view = boundary(A, B, C, committed=a_verdict(A, B, C, weights=(1, 1, 7)), ready=ready(A), unseen_ready=1)
    assert has_quorum(view), "whoever proposes looks again"


def test_quorum_may_be_larger_than_half() -> None:
    view = boundary(A, B, C, D, ready=ready(A, B))
    assert has_quorum(view, Rules(quorum=0.5)) and not has_quorum(view, Rules(quorum=0.75))


@pytest.mark.parametrize(
    ("deadline_s", "grace", "phase_s", "straggler_wait_s"),
    [
        (None, None, 100.0, math.inf),
        (3.0, None, 100.0, 3.0),
        (None, 0.1, 100.0, 10.0),
        (3.0, 0.1, 100.0, 3.0),
        (3.0, 0.1, 10.0, 1.0),
        (None, 0.1, 0.5, MIN_GRACE_S),
    ],
)
def test_wait_for_stragglers_is_the_shorter_of_the_deadline_and_the_grace(
    deadline_s: float | None, grace: float | None, phase_s: float, straggler_wait_s: float
) -> None:
    rules = Rules(straggler_deadline_s=deadline_s, straggler_grace=grace)
    assert rules.straggler_wait_s(phase_s) == pytest.approx(straggler_wait_s)


def test_last_round_waits_for_members_that_an_earlier_one_went_without() -> None:
    view = boundary(A, B, committed=a_verdict(A, B, late=(C,)), alive=frozenset({A, B, C}))
    ending = replace(view, ready=ready(A, B, steps_requested=0))
    assert decide(ending, waits=LATE) == Wait("1 of 3 members have not reached round 3", (C,))
    assert members_of(decide(replace(ending, ready=ready(A, B, C, steps_requested=0)))) == (A, B, C)


# -- members with slow links ------------------------------------------------------------------------------------------


MEGABIT = 125_000
"""Bytes of it, with which all-to-all times are those of rates in states a second."""


def at_rates(*mbit: float, offer: str | None = "") -> dict[str, Ready]:
    """Members that stand at the boundary with access links of these rates, in the order of their ids."""
    names = [f"{chr(97 + n)}#1" for n in range(len(mbit))]
    return {n: replace(r, rate=m, offer=offer) for (n, r), m in zip(ready(*names).items(), mbit, strict=True)}


def a_meeting(*mbit: float, offer: str | None = "", phase_s: float = 12.0, **rules: Any) -> tuple[str, ...]:
    """Who is not in the exchange, of members that stand at the boundary after a phase, with these links."""
    words = at_rates(*mbit, offer=offer)
    rules = {"straggler_grace": 0.1, "transfer_bytes": MEGABIT, **rules}
    plan = decide(boundary(*words, ready=words), waits=ElapsedWaits(phase_s=phase_s), **rules)
    assert isinstance(plan, RoundPlan) and sorted((*plan.members, *plan.late)) == [*words]
    assert tuple(carried.member for carried in plan.carried) == plan.late
    return plan.late


def test_member_whose_link_would_stretch_the_round_is_carried() -> None:
    """Seven move a state in 0.09 s; the eighth takes 2 s to send one, and the grace is 1.2 s."""
    assert a_meeting(*[20] * 7, 20) == ()
    assert a_meeting(*[20.0] * 7, 1 / 2) == ("h#1",)


@pytest.mark.parametrize("mbit", [1, 4, 20])
def test_member_whose_link_costs_less_than_the_grace_takes_part(mbit: int) -> None:
    assert a_meeting(*[20] * 7, mbit) == ()


@pytest.mark.parametrize(
    ("mbit", "more"),
    [
        ((5, 5, 5, 0), {}),
        ((0, 0, 0, 0), {}),
        ((5, 5, 5, 0.1), {"phase_s": 0.0}),
        ((5, 5, 5, 0.1), {"transfer_bytes": 0}),
        ((5, 5, 5, 0.1), {"straggler_grace": None}),
        ((5, 5, 5, 0.1), {"min_nodes": 4}),
        ((0.1, 0.1, 0.1, 0.1), {}),
        ((5, 0.1, 0.1, 0.1), {}),
        ((5, 5, 5, 0.1), {"hidden": 1.0}),
        ((5, 5, 5, 0.1), {"offer": None}),
    ],
    ids=[
        "rate",
        "no rate known",
        "first",
        "size unknown",
        "off",
        "needed",
        "all slow",
        "most slow",
        "hidden",
        "no way",
    ],
)
def test_nobody_is_carried_where_it_helps_nobody_or_nothing_is_known(
    mbit: tuple[float, ...], more: dict[str, Any]
) -> None:
    assert a_meeting(*mbit, **more) == ()


@pytest.mark.parametrize(
    ("mbit", "took_ms", "is_carried"),
    [(2, 10_100, True), (2, 500, False), (5, 10_100, False)],
    ids=["by the last round", "not long", "no slow link"],
)
def test_what_the_last_round_with_a_slow_link_took_counts_more_than_its_rate(
    mbit: int, took_ms: int, is_carried: bool
) -> None:
    words = {n: replace(r, took_ms=took_ms) for n, r in at_rates(*[5] * 7, mbit).items()}
    rules = Rules(straggler_grace=0.1, transfer_bytes=MEGABIT)
    plan = next_plan(boundary(*words, ready=words), 3, rules, ElapsedWaits(phase_s=12.0))
    assert isinstance(plan, RoundPlan) and plan.late == (("h#1",) if is_carried else ())


def test_member_that_leaves_or_joins_takes_part() -> None:
    words = {n: replace(r, rate=5) for n, r in ready(A, B, C).items()}
    slow = {D: replace(ready(D)[D], rate=0.1, offer="")}
    rules = {"straggler_grace": 0.1, "transfer_bytes": MEGABIT, "waits": ElapsedWaits(phase_s=12.0)}
    assert members_of(decide(boundary(A, B, C, D, ready=words | slow), **rules)) == (A, B, C)
    leaving = {D: replace(slow[D], steps_requested=0)}
    assert members_of(decide(boundary(A, B, C, D, ready=words | leaving), **rules)) == (A, B, C, D)
    joining = boundary(A, B, C, alive=frozenset({A, B, C, D}), ready=words | {D: replace(slow[D], weight=0)})
    assert members_of(decide(joining, **rules)) == (A, B, C, D)


def test_rate_of_a_member_is_that_of_its_slower_direction_as_links_show_it() -> None:
    links = {A: LinkRates({B: 500, C: 500, D: 4}), D: LinkRates({A: 500, B: 90})}
    view = boundary(A, B, C, D, ready={m: replace(r, offer="") for m, r in ready(A, B, C, D).items()})
    rules = Rules(straggler_grace=0.1, transfer_bytes=40 * MEGABIT)
    plan = next_plan(view, 3, rules, ElapsedWaits(phase_s=12.0), lambda: links)
    assert members_of(plan) == (A, B, C)


# -- sites ------------------------------------------------------------------------------------------------------------


def at_sites(**site_of: str) -> dict[str, Ready]:
    return {f"{n}#1": replace(ready(f"{n}#1")[f"{n}#1"], site=site) for n, site in site_of.items()}


def test_plan_says_who_speaks_for_the_sites_that_members_name() -> None:
    words = at_sites(a="x", b="y", c="x", d="y")
    links = {C: LinkRates({A: 900, B: 30}), D: LinkRates({B: 900, A: 20}), B: LinkRates({A: 30})}
    view = boundary(A, B, C, D, ready=words)
    for rule, sites in (("named", (0, 1, 0, 1)), ("off", ())):
        plan = next_plan(view, 3, Rules(sites=rule), PATIENT, lambda: links)
        assert isinstance(plan, RoundPlan) and plan.sites == sites
    assert from_json(RoundPlan, to_json(plan)) == plan


def test_links_inside_a_site_do_not_count_among_the_links_of_a_round() -> None:
    words = at_sites(a="x", b="y", c="x", d="y")
    links = {m: LinkRates({o: 900 if (m, o) in ((A, C), (B, D)) else 30}) for m, o in ((A, C), (B, D), (A, B))}
    links[A] = LinkRates({C: 900, B: 30})
    links[D] = LinkRates({C: 3})
    plan = next_plan(boundary(A, B, C, D, ready=words), 3, Rules(sites="named"), PATIENT, lambda: links)
    assert isinstance(plan, RoundPlan)
    assert plan.sites == (0, 1, 0, 1) and plan.network.slowest_link == 30


def test_lost_speaker_is_replaced_in_the_next_plan_of_the_round() -> None:
    words = at_sites(a="x", b="y", c="x", d="y")
    current = a_plan(A, B, C, D, sites=(2, 1, 2, 1))
    view = boundary(A, B, C, D, ready=words, plan=current, alive=frozenset({A, B, D}))
    plan = next_plan(view, 3, Rules(sites="named"))
    assert isinstance(plan, RoundPlan)
    assert plan.members == (A, B, D) and plan.sites == (0, 1, 1)


def test_members_of_a_site_behind_a_slow_link_are_all_carried() -> None:
    words = {m: replace(r, rate=0, offer="") for m, r in at_sites(a="x", b="y", c="z", d="z").items()}
    links = {A: LinkRates({B: 50, C: 1, D: 1}), B: LinkRates({A: 50}), C: LinkRates({D: 900, A: 1}), D: LinkRates()}
    rules = Rules(straggler_grace=0.1, transfer_bytes=40 * MEGABIT, sites="named")
    plan = next_plan(boundary(A, B, C, D, ready=words), 3, rules, ElapsedWaits(phase_s=12.0), lambda: links)
    assert isinstance(plan, RoundPlan)
    assert plan.members == (A, B) and plan.late == (C, D)


@given(
    mbit=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    can=st.lists(st.booleans(), min_size=8, max_size=8),
    weights=st.lists(st.integers(0, 9), min_size=8, max_size=8),
    grace=st.floats(0.01, 2.0),
    quorum=st.floats(0.1, 1.0),
)
def test_whoever_is_carried_is_slower_than_a_quorum_that_stays(
    mbit: list[int], can: list[bool], weights: list[int], grace: float, quorum: float
) -> None:
    each = zip(at_rates(*mbit).items(), can, weights, strict=False)
    words = {n: replace(r, offer="" if c else None, weight=w) for (n, r), c, w in each}
    rules = Rules(straggler_grace=grace, quorum=quorum, transfer_bytes=10 * MEGABIT)
    plan = next_plan(boundary(*words, ready=words), 3, rules, ElapsedWaits(phase_s=5.0))
    assert isinstance(plan, RoundPlan)
    assert sorted((*plan.members, *plan.late)) == [*words] and not {*plan.members} & {*plan.late}
    assert sum(plan.weights) >= quorum * sum(w for _, w in zip(words, weights, strict=False)) - 1e-9
    slowest = min((words[m].rate for m in plan.members if words[m].rate), default=0)
    assert all(0 < words[m].rate <= slowest and words[m].offer is not None for m in plan.late)
    assert all(carried.carrier in plan.members for carried in plan.carried)


@given(mbit=st.lists(st.integers(1, 100), min_size=2, max_size=7), slow=st.integers(1, 9), grace=st.floats(0.02, 0.5))
def test_no_round_costs_more_than_the_grace_for_slow_members(mbit: list[int], slow: int, grace: float) -> None:
    """A round whose transfer takes what the links say, beside one without anybody slower than a quorum."""
    rates = [*(100 + m for m in mbit), slow / 10, slow / 20]
    phase_s, words = 10.0, at_rates(*rates)
    usual_s = all_to_all_time([max(r, sorted(rates)[-(len(rates) + 1) // 2]) for r in rates])
    late = a_meeting(*rates, phase_s=phase_s, straggler_grace=grace)
    took_s = all_to_all_time([ready.rate for name, ready in words.items() if name not in late])
    assert took_s - usual_s <= grace * (phase_s + usual_s) + 1e-9


# -- contributions that are carried -----------------------------------------------------------------------------------


GRACE = Rules(straggler_grace=0.1, transfer_bytes=MEGABIT)
AFTER = ElapsedWaits(phase_s=12.0)


def opened_with(words: Mapping[str, Ready], **more: Any) -> RoundPlan:
    plan = next_plan(boundary(*words, ready=words, **more), 3, GRACE, AFTER)
    assert isinstance(plan, RoundPlan)
    return plan


def before(words: Mapping[str, Ready]) -> RoundPlan:
    """The plan of the round before, with these records."""
    return replace(opened_with(words), round=2, version=4)


def carriers(plan: RoundPlan) -> dict[str, str]:
    return {carried.member: carried.carrier for carried in plan.carried}


def test_fastest_member_with_the_fewest_carries() -> None:
    assert carriers(opened_with(at_rates(5, 9, 7, 5, 0.1))) == {"e#1": "b#1"}
    assert carriers(opened_with(at_rates(5, 9, 7, 5, 8, 0.1, 0.1))) == {"f#1": "b#1", "g#1": "e#1"}


def test_carrier_stays_while_it_is_a_member_that_can() -> None:
    words, current = at_rates(5, 9, 7, 5, 0.1), before(at_rates(5, 9, 7, 5, 0.1))
    faster = {**words, C: replace(words[C], rate=20)}
    assert carriers(opened_with(faster, plan=current)) == {"e#1": B}
    assert carriers(opened_with({**faster, B: replace(words[B], offer=None)}, plan=current)) == {"e#1": C}
    assert carriers(opened_with(faster, plan=current, alive=frozenset({A, C, D, "e#1"}))) == {"e#1": C}


def test_member_that_holds_it_carries_it_though_another_one_was_named_meanwhile() -> None:
    words = at_rates(5, 9, 7, 5, 0.1)
    words["e#1"] = replace(words["e#1"], offer="7-x", largest=1.0)
    words[D] = replace(words[D], carries=(Carry("e#1", "7-x", 1.0),))
    plan = opened_with(words, plan=before(at_rates(5, 9, 7, 5, 0.1)))
    assert carriers(plan) == {"e#1": D} and plan.counted == plan.carried


def with_offer(size: float | None = 2.0, held: float = 2.0, *, has: str = "7-x", offer: str = "7-x") -> RoundPlan:
    """A plan after e offered something of this size, and b said what it has of e."""
    words = at_rates(5, 9, 7, 5, 0.1)
    words["e#1"] = replace(words["e#1"], offer=offer, largest=size, weight=30, steps=3, loss=4.0)
    words[B] = replace(words[B], carries=(Carry("e#1", has, held),), largest=1.0)
    others = {m: replace(words[m], largest=1.0) for m in (A, C, D)}
    return opened_with({**words, **others})


def test_contribution_counts_once_its_carrier_has_it_whole() -> None:
    plan = with_offer()
    assert plan.carried == (Carried("e#1", B, "7-x", 30, 3, 2.0, None, counts=True),)
    assert plan.total_weight == sum(plan.weights) + 30
    assert plan.contributors() == {**dict.fromkeys((A, B, C, D), 4), "e#1": 3}
    total = plan.total_weight
    assert plan.shares == pytest.approx([w / total for w in (10, 40, 10, 10)])
    assert plan.largest == (1.0, 2.0, 1.0, 1.0) and plan.loss == pytest.approx((4 * 10 * 2.5 + 30 * 4.0) / 70)
    assert from_json(RoundPlan, to_json(plan)) == plan
    assert plan.is_counted("e#1", "7-x") and not plan.is_counted("e#1", "8-y")


@pytest.mark.parametrize(
    "more",
    [{"has": "6-w"}, {"held": 4.1}, {"size": None}, {"offer": ""}],
    ids=["an earlier one", "larger than its member says", "size unknown", "nothing offered"],
)
def test_contribution_that_is_not_there_as_its_member_says_does_not_count(more: dict[str, Any]) -> None:
    plan = with_offer(**more)
    assert [carried.counts for carried in plan.carried] == [False]
    assert plan.total_weight == sum(plan.weights) and "e#1" not in plan.contributors()


def test_equal_weights_count_a_carried_contribution_like_another_one() -> None:
    assert replace(with_offer(), is_equal=True).shares == pytest.approx([0.2, 0.4, 0.2, 0.2])


def test_member_that_is_behind_and_offers_is_late_and_not_left() -> None:
    """It replays at its own pace: its state is an earlier one, and its record is of this round."""
    words = at_rates(5, 9, 7, 5, 0.1)
    words["e#1"] = replace(words["e#1"], offer="7-x", state_digest="an earlier one")
    plan = opened_with(words)
    assert plan.late == ("e#1",) and carriers(plan) == {"e#1": B}
    view = replace(boundary(*words, ready=words), plan=plan)
    assert must_leave(view, "e#1", 3) is None
    silent = opened_with({**words, "e#1": replace(words["e#1"], offer="")})
    assert silent.late == () and must_leave(replace(view, plan=silent), "e#1", 3) is not None


def test_carrier_keeps_what_it_fetches_while_its_member_is_on_its_way_to_the_boundary() -> None:
    words, current = at_rates(5, 9, 7, 5), before(at_rates(5, 9, 7, 5, 0.1))
    plan = opened_with(
        words, plan=current, committed=a_verdict(A, B, C, D, late=("e#1",)), alive=frozenset({*words, "e#1"})
    )
    assert plan.carried == (Carried("e#1", B, "", 0, 0, None, None, counts=False),)


def test_last_round_carries_nothing() -> None:
    words = {m: replace(r, steps_requested=0) for m, r in at_rates(5, 9, 7, 5, 0.1).items()}
    plan = opened_with(words)
    assert plan.members == (*words,) and plan.carried == plan.late == ()


def test_member_that_saw_no_phase_begin_leaves_slow_links_as_they_were() -> None:
    words, current = at_rates(5, 9, 7, 5, 0.1), before(at_rates(5, 9, 7, 5, 0.1))
    view = boundary(*words, ready=words, plan=current)
    plan = next_plan(view, 3, GRACE, ElapsedWaits())
    assert isinstance(plan, RoundPlan) and carriers(plan) == {"e#1": B}
    assert members_of(next_plan(boundary(*words, ready=words), 3, GRACE, ElapsedWaits())) == (*words,)


# -- links that are cut -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peers", [cut(a="b"), cut(b="a"), cut(a="b", b="a")], ids=["one way", "other way", "both"])
def test_link_is_cut_when_one_end_says_so(peers: Mapping[str, Peer]) -> None:
    view = a_view(peers=peers)
    assert view.cuts_among((A, B, C)) == {A: {B}, B: {A}} and view.cuts_among((A, C)) == {}


def test_plan_is_lost_when_two_of_its_members_do_not_reach_each_other() -> None:
    view = a_view(alive=frozenset({A, B, C}), plan=a_plan(A, B, C), peers=cut(a="b"))
    assert view.lost(a_plan(A, B, C)) == (A, B) and not view.can_finish(a_plan(A, B, C))


def test_plan_is_not_lost_when_those_who_are_cut_off_have_voted_or_are_not_in_it() -> None:
    voted = a_view(alive=frozenset({A, B}), votes={A: "d", B: "d"}, peers=cut(a="b"))
    assert voted.lost(a_plan(A, B)) == ()
    assert a_view(alive=frozenset({A, B}), peers=cut(a="c")).lost(a_plan(A, B)) == ()


def test_plan_is_lost_while_one_of_two_that_are_cut_off_has_not_voted() -> None:
    view = a_view(alive=frozenset({A, B}), votes={A: "d"}, peers=cut(a="b"))
    assert view.lost(a_plan(A, B)) == (B,)


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        (cut(c="abd"), (A, B, D)),
        (cut(a="c", b="c", d="c"), (A, B, D)),
        (cut(a="b"), (A, C, D)),
        (cut(a="b", c="d"), (A, C)),
        (cut(b="cd", c="b"), (A, C, D)),
    ],
    ids=["reaches nobody", "reached by nobody", "the later id of a pair", "two pairs", "most cuts"],
)
def test_next_plan_drops_those_who_are_cut_off_most(peers: Mapping[str, Peer], expected: tuple[str, ...]) -> None:
    assert members_of(decide(boundary(A, B, C, D, peers=peers))) == expected


def test_next_plan_drops_a_joiner_before_a_member() -> None:
    everybody = {"alive": frozenset({A, B, C, D}), "ready": ready(A, B, C, D)}
    assert members_of(decide(boundary(B, C, D, peers=cut(a="bc", b="d"), **everybody))) == (B, C)


def test_next_plan_drops_of_two_the_one_with_less_to_lose() -> None:
    """Its tokens go back to the run and are trained again."""
    words = {**ready(A, weight=20), **ready(B, weight=10)}
    view = boundary(A, B, ready=words, peers=cut(a="b"))
    assert members_of(decide(view)) == (A,)
    assert members_of(decide(boundary(A, B, ready={**words, **ready(B, weight=30)}, peers=cut(a="b")))) == (B,)


def test_next_plan_drops_of_two_the_one_that_leaves() -> None:
    """The other one would have nobody left to take the state from, and the run would end."""
    words = {**ready(A, weight=20, steps_requested=0), **ready(B, weight=10)}
    assert members_of(decide(boundary(A, B, ready=words, peers=cut(a="b")))) == (B,)


# -- results that differ ----------------------------------------------------------------------------------------------


def disputed(votes: Mapping[str, str], retries: int) -> View:
    current = a_plan(*votes, retries=retries)
    return boundary(*votes, plan=current, votes=votes, failed="the members hold different results")


def inquiry(*silent: str, is_over: bool = False) -> Inquiry:
    """All members but these have testified that they saw nothing."""

    def hear(view: View) -> AttemptFindings:
        current = view.plan
        assert current is not None
        said = {m: Evidence() for m in current.members if m not in silent}
        attempt = Attempt(current, view.votes, said, view.failed or "")
        return AttemptFindings(attempt, Findings(current.blames, current.retries), is_over)

    return hear


def test_round_whose_results_differed_is_tried_again_with_all_so_that_parts_tell() -> None:
    decision = decide(disputed({A: "d", B: "d", C: "odd"}, retries=0))
    assert decision == a_plan(A, B, C, version=6, epoch=3, retries=1, is_flat=True)


def test_round_that_fails_waits_for_what_its_members_saw() -> None:
    view = boundary(A, B, C, plan=a_plan(A, B, C), failed="a lane broke")
    decision = decide(view, inquiry=inquiry(B))
    assert isinstance(decision, Wait) and decision.waiting_for == (B,)
    assert members_of(decide(view, inquiry=inquiry())) == (A, B, C)


def test_who_does_not_testify_is_named_and_put_out_in_the_end() -> None:
    decisions = [
        decide(
            boundary(A, B, C, plan=a_plan(A, B, C, retries=retries), failed="a lane broke"),
            inquiry=inquiry(B, is_over=True),
        )
        for retries in (0, 1, 2)
    ]
    assert [members_of(decision) for decision in decisions] == [(A, B, C), (A, B, C), (A, C)]
    found = [decision.blames[0] for decision in decisions if isinstance(decision, RoundPlan)]
    assert [(b.members, b.consequence) for b in found] == [((B,), "named"), ((B,), "named"), ((B,), "out")]


def test_two_whose_words_differ_sit_out_in_turn() -> None:
    apart = Blame((A, B), "why", is_lie=True, consequence="apart", round=2)
    plans = [
        decide(
            boundary(
                *(A, B, C),
                plan=a_plan(A, B, C, version=4, round=round - 1, blames=(apart,)),
                committed=a_verdict(A, B, C, round=round - 1),
            ),
            round=round,
        )
        for round in (3, 4)
    ]
    assert {(members_of(plan), plan.late) for plan in plans if isinstance(plan, RoundPlan)} == {
        ((B, C), (A,)),
        ((A, C), (B,)),
    }


def test_who_was_put_out_for_a_lie_does_not_come_back_as_another_member() -> None:
    out = Blame(("a#0",), "why", is_lie=True, consequence="out", round=2)
    view = boundary("a#1", B, C, plan=a_plan(B, C, version=4, round=2, blames=(out,)))
    assert members_of(decide(view)) == (B, C)


def test_failure_counts_in_its_own_round_only() -> None:
    view = boundary(A, B, plan=a_plan(A, B, version=4, round=2, retries=1), votes={A: "d", B: "odd"})
    assert decide(view) == a_plan(A, B)


def test_round_that_loses_a_member_keeps_its_count() -> None:
    view = boundary(A, B, plan=a_plan(A, B, C, retries=1), failed="a lane broke")
    assert decide(view, inquiry=inquiry()) == a_plan(A, B, version=6, epoch=3, retries=1)


def test_round_that_fails_again_is_flat_every_second_time() -> None:
    flat = [
        decide(boundary(A, B, plan=a_plan(A, B, retries=n, is_flat=was_flat), failed="a lane broke"))
        for n, was_flat in ((0, False), (1, False), (2, True), (3, False))
    ]
    assert [plan.is_flat for plan in flat if isinstance(plan, RoundPlan)] == [False, True, False, True]


# -- next_verdict -----------------------------------------------------------------------------------------------------


def test_next_verdict_waits_for_votes_and_names_the_missing() -> None:
    decision = next_verdict(a_view(votes={A: "d"}), a_plan(A, B), {})
    assert decision == Wait("1 of 2 members have not voted on round 3", (B,))


def test_next_verdict_commits_equal_digests_with_the_payload() -> None:
    plan = a_plan(A, B, weights=(3, 4))
    decision = next_verdict(a_view(votes={A: "d", B: "d"}), plan, {"norm": 1.5})
    assert decision == Verdict(plan, "d", {"norm": 1.5})


def test_next_verdict_is_none_when_results_differ() -> None:
    assert next_verdict(a_view(votes={A: "d", B: "e"}), a_plan(A, B), {}) is None


def test_next_verdict_is_none_where_a_member_refuses_whatever_the_others_vote() -> None:
    plan = a_plan(A, B)
    assert next_verdict(a_view(votes={A: "d", B: refusal(B)}), plan, {}) is None
    assert next_verdict(a_view(votes={A: refusal(B), B: refusal(B)}), plan, {}) is None


def test_next_verdict_waits_while_the_store_gets_its_record_back() -> None:
    decision = next_verdict(a_view(votes={A: "d"}, is_settling=True), a_plan(A), {})
    assert isinstance(decision, Wait) and "lost its record" in decision.reason


def test_next_verdict_counts_no_vote_of_a_stranger() -> None:
    decision = next_verdict(a_view(votes={A: "d", C: "e"}), a_plan(A), {})
    assert isinstance(decision, Verdict) and decision.digest == "d"


# -- must_leave -------------------------------------------------------------------------------------------------------


def test_member_stays_at_the_boundary_after_the_committed_round() -> None:
    assert must_leave(boundary(A, B), A, 3) is None


def test_member_stays_before_the_founding() -> None:
    assert must_leave(founders(A), A, BOOTSTRAP_ROUND) is None


@pytest.mark.parametrize("members", [(A, B), (B,)])
@pytest.mark.parametrize("committed_round", [3, 4])
def test_member_leaves_when_the_round_before_it_was_committed(members: tuple[str, ...], committed_round: int) -> None:
    """Also when it is one of those who committed it: it dropped the result, and can only come back by the join path."""
    excluded = must_leave(boundary(A, B, committed=a_verdict(*members, round=committed_round)), A, 3)
    assert excluded is not None and f"round {committed_round} was committed" in excluded


def test_member_leaves_when_its_round_was_opened_without_it() -> None:
    excluded = must_leave(boundary(A, B, plan=a_plan(B)), A, 3)
    assert excluded is not None and "opened without a#1" in excluded


@pytest.mark.parametrize("committed_round", [3, 4])
def test_member_that_was_only_late_stays(committed_round: int) -> None:
    """It catches up by the journal, and contributes later."""
    assert must_leave(boundary(A, B, committed=a_verdict(B, round=committed_round, late=(A,))), A, 3) is None


def test_member_that_is_late_in_the_current_plan_stays() -> None:
    assert must_leave(boundary(A, B, plan=a_plan(B, late=(A,))), A, 3) is None


def test_member_that_arrives_late_stays_when_the_round_after_is_not_opened_yet() -> None:
    """It is no member of the last round, and stands before the next one like a joiner."""
    assert must_leave(boundary(A, B, committed=a_verdict(B, late=(A,))), A, 3) is None


def test_member_stays_when_an_older_round_was_opened_without_it() -> None:
    assert must_leave(boundary(A, B, plan=a_plan(B, round=2)), A, 3) is None


@pytest.mark.parametrize(
    "fields",
    [{"committed": a_verdict(B)}, {"alive": frozenset({B})}, {"ready": ready(B)}, {"committed": None}],
    ids=["joiner", "lease ran out", "not ready yet", "founder"],
)
def test_a_plan_without_it_sends_away_only_living_ready_members(fields: dict[str, Any]) -> None:
    assert must_leave(boundary(A, B, plan=a_plan(B), **fields), A, 3) is None


# -- records ----------------------------------------------------------------------------------------------------------


def test_share_is_the_weight_in_the_mean() -> None:
    plan = a_plan(A, B, C, weights=(30, 10, 0), steps=(3, 1, 5), steps_requested=(2, 0, 7))
    assert [plan.share(m) for m in plan.members] == [0.75, 0.25, 0.0]
    assert plan.contributors() == {A: 3, B: 1} and plan.total_weight == 40
    assert plan.wanted() == {A: 2, B: 0, C: 7}


def test_share_is_zero_when_nobody_contributes() -> None:
    assert a_plan(A, B, weights=(0, 0)).share(A) == 0.0


@pytest.mark.parametrize(
    ("weights", "asked", "share"),
    [
        ((10, 30, 60), (4, 4, 4), 0.1),
        ((40, 30, 60), (4, 4, 4), 0.1),
        ((0, 0, 0), (1, 2, 7), 0.1),
        ((10, 30, 0), (8, 24, 16), 1 / 6),
        ((10, 30, 60), (4, 4, 0), 0.25),
    ],
    ids=["weights of this round", "its own weight now", "founding", "joiner", "one leaves"],
)
def test_share_of_the_next_round_follows_from_what_is_known_of_this_one(
    weights: tuple[int, ...], asked: tuple[int, ...], share: float
) -> None:
    plan = a_plan(A, B, C, weights=weights, steps_requested=asked)
    assert plan.expected_share(A, 10) == pytest.approx(share)
    staying = sum(steps > 0 for steps in asked)
    assert replace(plan, is_equal=True).expected_share(A, 10) == pytest.approx(1 / staying)
    assert plan.expected_share(A, 0) == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"members": (A, C)},
        {"version": 6},
        {"weights": (1, 2)},
        {"late": (C,)},
        {"retries": 1},
        {"steps_requested": (0, 6)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_plan_that_differs_in_anything_has_another_id(change: dict[str, Any]) -> None:
    """A store that came back with old data gives a version twice; votes for one must not count for the other."""
    plan = a_plan(A, B)
    assert replace(plan, **change).id != plan.id
    assert replace(plan).id == plan.id and plan.id.startswith("5-")


def test_records_survive_json() -> None:
    plan = a_plan(A, B, late=(C,), retries=1)
    verdict = Verdict(plan, "digest", {"norm": 0.1, "ranges": [[0, 4]]})
    word = Ready(3, 10, "s", 4, 6)
    peer = Peer("a", "host", 1, False, (B,))
    for record in (plan, verdict, word, peer):
        assert from_json(type(record), to_json(record)) == record
        assert from_record(type(record), to_record(record)) == record


def test_equal_records_have_equal_text() -> None:
    """The store compares plans by it, and one that was read back must be equal to the one that was written."""
    plan = a_plan(A, B, late=(C,))
    assert to_json(from_json(RoundPlan, to_json(plan))) == to_json(plan)


def plan_of(weights: Sequence[int], trust: Sequence[float] = (), phase_fraction: Sequence[float] = ()) -> RoundPlan:
    members = tuple(f"m{i}" for i in range(len(weights)))
    return RoundPlan(1, 1, 1, members, tuple(weights), trust=tuple(trust), phase_fraction=tuple(phase_fraction))


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_shares_are_in_proportion_to_the_weights(weights: list[int]) -> None:
    shares = plan_of(weights).shares
    assert sum(shares) == pytest.approx(1.0 if any(weights) else 0.0)
    assert list(shares) == pytest.approx([weight / max(sum(weights), 1) for weight in weights])
    assert [share == 0 for share in shares] == [weight == 0 for weight in weights]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.01, 1.0)), min_size=1, max_size=20))
def test_shares_are_those_of_equal_weights_where_members_count_equally(members: list[tuple[int, float]]) -> None:
    weights, phase_fraction = [weight for weight, _ in members], [part for _, part in members]
    equally = replace(plan_of(weights, phase_fraction=phase_fraction), is_equal=True)
    assert equally.shares == plan_of([int(weight > 0) for weight in weights], phase_fraction=phase_fraction).shares
    assert equally.total_weight == sum(weights)


def test_plan_names_the_documents_of_its_members_where_they_have_their_own() -> None:
    view = boundary(A, B)
    plain = next_plan(view, 3, Rules())
    assert isinstance(plain, RoundPlan) and (plain.corpora, plain.is_equal) == ((), False)
    assert plain.corpus_of() == {A: "", B: ""}
    own = replace(view, ready=view.ready | {B: replace(view.ready[B], corpus="b/7")})
    plan = next_plan(own, 3, Rules(counts_equally=True))
    assert isinstance(plan, RoundPlan) and (plan.corpora, plan.is_equal) == (("", "b/7"), True)
    assert plan.corpus_of() == {A: "", B: "b/7"}


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.0, 1.0)), min_size=1, max_size=9))
def test_no_member_says_for_itself_that_it_counts_more_than_the_median_one(members: list[tuple[int, float]]) -> None:
    weights, trust = [weight for weight, _ in members], [part for _, part in members]
    shares = plan_of(weights, trust).shares
    counted = sorted(weight for weight in weights if weight)
    most = counted[(len(counted) - 1) // 2] if counted else 0
    expected = [min(weight, most) * part for weight, part in members]
    assert list(shares) == pytest.approx([count / (sum(expected) or 1.0) for count in expected])
    assert plan_of(weights, [1.0] * len(weights)).total_weight == sum(weights)


def test_members_count_by_the_trust_that_the_last_verdict_recorded() -> None:
    view = boundary(A, B)
    assert view.committed is not None
    record = {**view.committed.record, "agreement": {A: 0.5, B: -0.08, C: -1.0}}
    told = replace(view, committed=replace(view.committed, record=record))
    plan = next_plan(told, 3, Rules(is_robust=True))
    assert isinstance(plan, RoundPlan) and plan.trust == pytest.approx((1.0, 0.7))
    plain = next_plan(told, 3, Rules())
    assert isinstance(plain, RoundPlan) and plain.trust == ()


def test_nobody_is_believed_how_much_it_trained_where_members_may_lie() -> None:
    """One that claims a thousand phases would take all others out of the mean."""
    view = boundary(A, B)
    claims = replace(view, ready=view.ready | {B: replace(view.ready[B], weight=5, phase_fraction=1000.0)})
    honest, lying = next_plan(claims, 3, Rules()), next_plan(claims, 3, Rules(is_robust=True))
    assert isinstance(honest, RoundPlan) and honest.phase_fraction[1] == 1000.0
    assert isinstance(lying, RoundPlan) and lying.phase_fraction == ()


@pytest.mark.parametrize(
    ("weights", "phase_fraction", "went_on"),
    [
        ((10, 10), (1.0, 0.5), 1.0),
        ((10, 10), (0.25, 0.75), 0.75),  # nobody has a whole turn behind it
        ((10, 10), (1.0, 1.5), 1.0),
        ((30, 10, 0), (1.0, 0.25, 0.5), 1.0),
    ],
)
def test_mean_of_contributions_is_as_long_as_a_turn_whatever_a_member_has_trained(
    weights: tuple[int, ...], phase_fraction: tuple[float, ...], went_on: float
) -> None:
    shares = plan_of(weights, phase_fraction=phase_fraction).shares
    assert sum(share * part for share, part in zip(shares, phase_fraction, strict=True)) == pytest.approx(went_on)
    counted = [weight / sum(weights) for weight in weights]
    assert [share / sum(shares) for share in shares] == pytest.approx(counted)


@pytest.mark.parametrize("phase_fraction", [(), (0.0, 0.0), (0.5, 0.5, 0.5)], ids=str)
def test_members_that_trained_alike_have_shares_that_add_up_to_one(phase_fraction: tuple[float, ...]) -> None:
    shares = plan_of((1,) * (len(phase_fraction) or 2), phase_fraction=phase_fraction).shares
    assert sum(shares) == pytest.approx(1.0)


def test_plan_says_what_members_trained_only_where_it_differs() -> None:
    words = {A: Ready(3, 5, "s", phase_fraction=0.5), B: Ready(3, 5, "s", phase_fraction=0.5), C: Ready(3, 0, "s")}
    plan = next_plan(boundary(A, B, C, ready=words), 3, Rules())
    assert isinstance(plan, RoundPlan) and plan.phase_fraction == ()
    plan = next_plan(boundary(A, B, C, ready=words | {B: Ready(3, 5, "s")}), 3, Rules())
    assert isinstance(plan, RoundPlan) and plan.phase_fraction == (0.5, 1.0, 1.0)
