"""Records that say anything: each is in range or refused, and the rules calculate with every one that is accepted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.test_records import (
    HOLDING,
    LINKS,
    LOSSES,
    MEMBER_REPORT,
    ORDERS,
    PEER,
    PLAN,
    PROGRESS,
    READY,
    RESTART_POINT,
    SEALS,
    VERDICT,
)
from tests.unit.elastic.store.test_foreign_records import changed, places_in

from zeroband.elastic.membership.ballots import electors
from zeroband.elastic.membership.loss_record import LossRecord
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.plan_checks import plan_objection, refuse_excess
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.records import (
    Carry,
    LinkRates,
    Peer,
    Ready,
    RestartPoint,
    RoundPlan,
    StoreTerm,
    Verdict,
    View,
    from_json,
    to_json,
)
from zeroband.elastic.membership.resume_rules import Holding
from zeroband.elastic.membership.round_rules import ElapsedWaits, Rules, must_leave, next_plan
from zeroband.elastic.membership.succession import MemberReport, handover_state
from zeroband.elastic.store.record_verifier import RecordVerifier
from zeroband.elastic.transport.shape import route_of, shape_of
from zeroband.kernels.codec import CODECS

A, B = PLAN.members
SHAPE = RunShape(total_steps=1000, batch_size=2, reads_ahead=True, sample_tokens=1024)
RULES = Rules(straggler_grace=0.1, transfer_bytes=1 << 20, sites="auto", shape=SHAPE)
PEERS = {A: PEER, B: Peer("b", "h", 1, True)}
ODD = st.one_of(
    st.integers(-2, 3),
    st.sampled_from([10**12, 1 << 31, 1 << 32, 1 << 47, (1 << 53) - 1, 1 << 53, 1 << 63, 10**400, -(10**9)]),
    st.sampled_from([0.0, -0.0, 5e-324, 1e-30, 0.5, 1e30, 1e60, 1.8e308, -1e308, float("nan"), float("inf")]),
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.just("x" * 70_000),
    st.lists(st.one_of(st.integers(-1, 3), st.floats(), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(-1, 3), max_size=2),
)


def view_of(**fields: Any) -> View:
    ready = {A: replace(READY, round=4), B: replace(READY, round=4, weight=0, site=None)}
    committed = replace(VERDICT, plan=replace(PLAN, rollback=None))
    usual: dict[str, Any] = {
        "plan": PLAN,
        "committed": committed,
        "alive": frozenset({A, B}),
        "ready": ready,
        "peers": PEERS,
    }
    return View(**{"votes": {}, "failed": None, **usual, **fields})


def open_with(view: View, links: Mapping[str, LinkRates]) -> None:
    """Decide a round on this view, and work with the plan as its members do."""
    for seen in (view, refuse_excess(view, 4, RULES)):
        for waits in (ElapsedWaits(phase_s=5.0), ElapsedWaits(True, True, frozenset(seen.refused), 5.0)):
            decision = next_plan(seen, 4, RULES, waits, lambda: links)
            must_leave(seen, A, 4)
            if isinstance(decision, RoundPlan):
                work_with(from_json(RoundPlan, to_json(decision)))
                plan_objection(decision, seen, RULES)


def work_with(plan: RoundPlan) -> None:
    """What members calculate from a plan: shares, sites, who reads what next, the shape of the transfer."""
    assert all(0 <= share < float("inf") for share in plan.shares)
    assert all(0 <= part <= 1.000001 for part in plan.divisor_parts)
    assert plan.max_value >= 0 and plan.total_weight >= 0
    assert all((plan.speakers() is not None, plan.corpus_of(), plan.dial_out_only is not None, plan.id))
    for member in plan.members:
        plan.is_same_site(member, plan.members[0])
        if plan.steps_requested:
            plan.expected_share(member, 10)
    progress = PROGRESS.after(plan, SHAPE)
    Progress.at_start().begin(plan, SHAPE, after_round=None)
    assert 0 <= progress.inner_step <= SHAPE.total_steps
    LossRecord().after(plan, 0)
    if len(plan.members) > 1:
        shape_of(10_000, CODECS["int8"], plan.shares, plan.network, plan.sites)
    for place in range(len(plan.members)):
        route_of(place, plan.sites or range(len(plan.members)), dial_out_only=plan.network.dial_out_only)


def use_verdict(verdict: Verdict) -> None:
    verifier = RecordVerifier(SEALS)
    if verifier.verdict("k", verifier.seal_verdict(verdict).encode()) is None:
        return
    work_with(verdict.plan)
    assert electors(verdict) and verdict.sessions is not None
    LossRecord.of(verdict.record).carried()
    if "progress" in verdict.record:
        Progress.of_verdict(verdict).after(PLAN, SHAPE)
    open_with(view_of(committed=verdict), {})


def go_on_from(progress: Progress) -> None:
    progress.after(PLAN, SHAPE)
    progress.begin(PLAN, SHAPE, after_round=1)


RECORDS: Mapping[str, tuple[object, Callable[[Any], object]]] = {
    "ready": (READY, lambda ready: open_with(view_of(ready={A: ready, B: READY}), {A: LINKS})),
    "plan": (PLAN, lambda plan: (work_with(plan), open_with(view_of(plan=plan), {}))),
    "verdict": (VERDICT, use_verdict),
    "peer": (PEER, lambda peer: open_with(view_of(peers={A: peer, B: PEER}), {})),
    "links": (LINKS, lambda links: open_with(view_of(), {A: links, B: LINKS})),
    "orders": (ORDERS, lambda orders: open_with(view_of(orders=orders), {})),
    "restart_point": (RESTART_POINT, lambda point: open_with(view_of(restart_point=point), {})),
    "progress": (PROGRESS, go_on_from),
    "losses": (LOSSES, lambda losses: losses.carried()),
    "holding": (HOLDING, lambda holding: None),
    "member_report": (MEMBER_REPORT, lambda member_report: handover_state({A: member_report, B: MEMBER_REPORT})),
}


@pytest.mark.parametrize("name", RECORDS)
@settings(max_examples=40, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_record_with_any_value_in_any_field_is_in_range_or_refused(name: str, data: st.DataObject) -> None:
    record, use = RECORDS[name]
    value = json.loads(to_json(record))
    _root, *places = places_in(value)
    path = data.draw(st.sampled_from(places))
    text = json.dumps(changed(value, path, data.draw(ODD)), sort_keys=True)
    accepted = None
    with contextlib.suppress(ValueError):
        accepted = from_json(type(record), text)
    if accepted is not None:
        use(accepted)


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(st.lists(st.tuples(*(st.sampled_from(range(6)) for _ in range(5))), min_size=2, max_size=5))
def test_rules_calculate_with_the_ends_of_every_range(numbers: list[tuple[int, ...]]) -> None:
    """Several members at once that say the least or the most that is accepted, or a little."""
    sizes = [0, 1, 3, 1280, 1 << 52, 1 << 53]
    parts, largest = [0.0, 5e-324, 1e-9, 0.5, 1.0, 1e6], [0.0, 5e-324, 1e-30, 1.0, 1e30, 1e60]
    ready = {
        f"m{i}#1": replace(
            Ready(4, sizes[w], "s", sizes[s], sizes[w], phase_fraction=parts[t]),
            largest=largest[n],
            took_ms=sizes[r] % 10**9,
            rate=sizes[r] % 10**9,
            offer="1-x" if r % 2 else "",
            carries=tuple(Carry(f"m{j}#1", "1-x", 1.0) for j in range(len(numbers))),
        )
        for i, (w, s, n, t, r) in enumerate(numbers)
    }
    members = tuple(ready)
    before = RoundPlan(4, 2, 3, members, (1,) * len(ready), (1,) * len(ready), (1,) * len(ready))
    committed = Verdict(before, "d", {"session": "s"})
    view = View(before, committed, frozenset(members), ready, {}, None)
    decision = next_plan(view, 4, replace(RULES, shape=None), ElapsedWaits(phase_s=1.0))
    assert isinstance(decision, RoundPlan)
    work_with(from_json(RoundPlan, to_json(decision)))


@pytest.mark.parametrize(
    "kind", [Ready, RoundPlan, Peer, LinkRates, Orders, RestartPoint, Progress, MemberReport, Holding, StoreTerm]
)
def test_every_number_and_text_of_a_record_has_a_range(kind: type[Any]) -> None:
    """A field that is added needs a type from `config.ranges`."""
    hints = get_type_hints(kind, include_extras=True)
    assert [part.name for part in fields(kind) if _is_unbounded(hints[part.name])] == []


def _is_unbounded(annotation: Any) -> bool:
    """Whether a number or text may be any, or a list have any length."""
    if annotation in (int, float, str):
        return True
    if hasattr(annotation, "__metadata__"):  # Annotated: bounded itself, and its parts are looked at
        return any(_is_unbounded(part) for part in get_args(get_args(annotation)[0]))
    if is_dataclass(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        return any(_is_unbounded(hints[part.name]) for part in fields(annotation))
    return any(_is_unbounded(part) for part in get_args(annotation))


TRICKY = st.one_of(
    st.text(max_size=20),
    st.sampled_from(['"signature": "x"', '\\"signature": "', "signature", '", "signature": "x']),
)


@given(st.lists(TRICKY, min_size=1, max_size=3, unique=True), TRICKY)
def test_signature_of_a_plan_is_over_all_of_it_but_itself(members: list[str], signature: str) -> None:
    ones = (1,) * len(members)
    plan = RoundPlan(1, 1, 0, tuple(members), ones, ones, ones, proposer=members[0], signature=signature)
    assert plan.unsigned_text == to_json(replace(plan, signature=""))
    assert from_json(RoundPlan, to_json(plan)).unsigned_text == plan.unsigned_text
