"""Checks on other members' records and plans. Pure.

A member with the token can write any record of the right types (`config.ranges`). Every other member refuses a `Ready`
that exceeds what its member was dealt, and a plan that does not follow from its members' records.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from zeroband.config.ranges import MOST_COUNT
from zeroband.data.ledger import count
from zeroband.elastic.membership.progress import Progress, RunShape, ledgers_after, valid_claims
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, Ready, RoundPlan, View
from zeroband.elastic.membership.resume_rules import restarts_with
from zeroband.elastic.membership.round_rules import (
    MemberColumns,
    Rules,
    carried_contribution,
    measured_gains,
    member_columns,
    ready_claims,
    trust_factors,
)
from zeroband.errors import ConfigError

MAX_PLANS = 1 << 20
"""Most plans between two committed rounds: version numbers must not overflow their range."""


_CHECKERS = 3
"""Members that read all records of a round to check its plan, in runs too large for all to do so."""


def limit_violation(ready: Ready, dealt_steps: int, shape: RunShape, heaviest: int = 0) -> str | None:
    """Describe the first number in a member's record that exceeds what it was dealt; None: none does.

    `dealt_steps`: inner steps for which it was dealt samples. `heaviest`: largest weight of the previous round, which
    bounds weights in closing rounds, as these have no steps. Requested steps are bounded only by the run's total.
    """
    if ready.steps > dealt_steps:
        return f"steps={ready.steps}, but it was dealt samples for {dealt_steps}"
    if ready.phase_steps is not None and not 0 < ready.phase_steps <= ready.steps:
        return f"phase_steps={ready.phase_steps}, but it contributes {ready.steps} steps"
    if ready.steps_requested > shape.total_steps:
        return f"steps_requested={ready.steps_requested}, but the run has {shape.total_steps}"
    most_weight = ready.steps * shape.batch_size * shape.sample_tokens
    if shape.closing_rounds and not ready.steps:
        most_weight = heaviest or MOST_COUNT
    if shape.sample_tokens and ready.weight > most_weight:
        return f"weight={ready.weight}, but {ready.steps} steps have at most {most_weight} tokens"
    return None


def refuse_excess(view: View, round: int, rules: Rules) -> View:
    """Move records of `round` that exceed the limits from the view's `ready` to `refused`.

    The previous round's verdict says what a member was dealt; in the bootstrap round that is nothing. A joiner's limit
    is its claim, but at most the run's total steps. Without the previous round's verdict nothing is moved.
    """
    shape, committed = rules.shape, view.committed
    if shape is None:
        return view
    dealt, heaviest = dict[str, int](), 0
    if not (round == BOOTSTRAP_ROUND or restarts_with(view, round)):
        if committed is None or committed.round != round - 1:
            return view
        try:
            progress = Progress.of_verdict(committed)
        except ConfigError:
            return view
        claimed = valid_claims(progress.ledgers, ready_claims(view))
        held = {member: (claim.span,) for member, claim in claimed.items()} | dict(progress.assigned)
        dealt = {member: min(count(spans) // shape.batch_size, shape.total_steps) for member, spans in held.items()}
        heaviest = max(committed.plan.weights)
    found = {
        member: limit_violation(ready, dealt.get(member, 0), shape, heaviest) for member, ready in view.ready.items()
    }
    beyond = {member: why for member, why in found.items() if why is not None}
    if not beyond:
        return view
    kept = {member: ready for member, ready in view.ready.items() if member not in beyond}
    return replace(view, ready=kept, refused={**view.refused, **beyond})


def checkers(plan: RoundPlan) -> tuple[str, ...]:
    """Draw by the plan's id the members that check it against all records.

    If all members did, the store's load per round would grow with the square of their number.
    """
    return tuple(sorted(plan.members, key=lambda m: hashlib.sha256(f"{plan.id} {m}".encode()).digest())[:_CHECKERS])


def is_checked_by_all(view: View) -> bool:
    """Whether the run is so small that nearly all members are among a plan's `checkers`."""
    return len(view.alive) <= _CHECKERS + 1


def plan_objection(plan: RoundPlan, view: View, rules: Rules) -> str | None:
    """Describe why a plan does not follow from its members' records; None: it does.

    `view`: of its round, with all ready records, after `refuse_excess`. Links are not compared, since they change.
    """
    return next(_objections(plan, view, rules), None)


def _objections(plan: RoundPlan, view: View, rules: Rules) -> Iterator[str]:
    for member in plan.members:
        if member in view.refused:
            yield f"it lists {member}, whose record is refused: {view.refused[member]}"
        elif member not in view.ready:
            yield f"it lists {member}, which is not ready for round {plan.round}"
    yield from _carried_objections(plan, view)
    ready = {member: view.ready[member] for member in plan.members if member in view.ready}
    if len(ready) == len(plan.members) and all(carried.member in view.ready for carried in plan.counted):
        yield from _number_objections(plan, member_columns(plan.members, plan.carried, view.ready, rules))
        yield from _site_objections(plan, [record.site for record in ready.values()], rules)
        if plan.gains != measured_gains(plan.members, view, rules):
            yield "its gains do not follow from the records of its members"
    if plan.trust != trust_factors(plan.members, view, rules):
        yield "its trust factors do not follow from the previous rounds"
    if plan.orders == view.orders.version and plan.rollback not in (None, view.orders.rollback):
        yield f"it rolls back to step {plan.rollback}, which was not ordered"
    before = view.committed.plan if view.committed is not None else None
    version, epoch = (0, 0) if before is None else (before.version, before.epoch)
    if not (0 < plan.version - version <= MAX_PLANS and 0 <= plan.epoch - epoch <= MAX_PLANS):
        yield f"it is version {plan.version}, epoch {plan.epoch} after version {version}, epoch {epoch}"
    if both := set(plan.late) & set(plan.members):
        yield f"it lists {min(both)} as a member and as late"
    yield from _claim_objections(plan, view)


def _claim_objections(plan: RoundPlan, view: View) -> Iterator[str]:
    """Find claims that differ from the members' records or cannot be dealt.

    Claims of joiners that still train are not compared, since their records may change. A proposer that omits or alters
    one only makes that joiner start again.
    """
    listed = dict(plan.claims)
    has_none = plan.rollback is not None or plan.round == BOOTSTRAP_ROUND or restarts_with(view, plan.round)
    own = {} if has_none else {m: c for m, c in ready_claims(view).items() if m in plan.members}
    joining = {m: c for m, c in listed.items() if m in plan.late and not has_none}
    expected = valid_claims(ledgers_after(view.committed), own, joining) if own or joining else {}
    for member in sorted(listed.keys() | expected.keys()):
        if listed.get(member) != expected.get(member):
            yield f"its claim of {member} is {listed.get(member)}, but {expected.get(member)} can be dealt"


def _carried_objections(plan: RoundPlan, view: View) -> Iterator[str]:
    """Find carried contributions that differ from the records of their members and carriers."""
    for carried in plan.carried:
        if carried.member in view.refused or carried.carrier not in view.ready:
            yield f"it lists {carried.member} as carried, whose record for round {plan.round} is invalid"
            continue
        actual = carried_contribution(carried.member, carried.carrier, view.ready)
        if carried != replace(actual, counts=carried.counts and actual.counts):
            yield f"it lists {carried!s:.200}, but the records say {actual!s:.200}"


def _number_objections(plan: RoundPlan, wanted: MemberColumns) -> Iterator[str]:
    """Find numbers that differ from the members' records, as collected in `wanted`."""
    for name in (part.name for part in fields(wanted)):
        actual, expected = getattr(plan, name), getattr(wanted, name)
        if actual == expected or (name == "loss" and _is_close(actual, expected)):
            continue
        if isinstance(expected, tuple) and len(actual) == len(expected):
            place = next(place for place, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1])
            of, actual, expected = f" of {plan.members[place]}", actual[place], expected[place]
        else:
            of = ""
        yield f"its {name}{of} is {actual!s:.80}, but the records of its members say {expected!s:.80}"


def _is_close(one: float | None, other: float | None) -> bool:
    """Whether two means of the same losses differ only by summation order."""
    return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def _site_objections(plan: RoundPlan, names: Sequence[str | None], rules: Rules) -> Iterator[str]:
    """Find sites that differ from the names in the records. Unnamed sites follow from links, which change."""
    if not plan.sites:
        return
    if rules.sites == "off":
        yield "it has sites, but comm.sites is off"
    elif any(names):
        for name, place, member in zip(names, plan.sites, plan.members, strict=True):
            if names[place] != name or (name is None and plan.members[place] != member):
                yield f"{plan.members[place]} speaks for {member}, which is of another site"
