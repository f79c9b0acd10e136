"""Limits of what members say: what the run dealt them bounds their numbers, and a plan repeats their records. Pure.

A member that has the token can write any record of the right types (`config.ranges`). Every other member refuses a
`Ready` beyond these limits, and a plan that does not follow from the records it is made of.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace

from zeroband.config.ranges import MOST_COUNT
from zeroband.data.ledger import SHARED, count
from zeroband.elastic.membership.progress import Progress, RunShape, ledgers_after, valid_claims
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, Carried, Ready, RoundPlan, View
from zeroband.elastic.membership.resume_rules import restarts_with
from zeroband.elastic.membership.round_rules import (
    ABSENT,
    MemberColumns,
    Rules,
    is_held_by,
    measured_gains,
    member_columns,
    ready_claims,
    trust_factors,
)
from zeroband.errors import ConfigError

MAX_PLANS = 1 << 20
"""Plans between two committed rounds: versions count on from there, and must not reach the end of their range."""


_CHECKERS = 3
"""Members that read all records of a round to check its plan, in runs too large for each to have seen them."""


def limit_violation(ready: Ready, dealt_steps: int, shape: RunShape, heaviest: int = 0) -> str | None:
    """Say which number of a member's record is larger than what it was dealt allows; None: none is.

    `dealt_steps`: inner steps for which the member was dealt samples. `heaviest`: the largest weight in the round
    before: members weigh as much as there in rounds that close a run of fragments, which have no steps. Nodes choose
    their numbers of steps in a round themselves, so that only the run's own number bounds what they request.
    """
    if ready.steps > dealt_steps:
        return f"steps={ready.steps}, and it was dealt samples for {dealt_steps}"
    if ready.phase_steps is not None and not 0 < ready.phase_steps <= ready.steps:
        return f"phase_steps={ready.phase_steps}, and it contributes {ready.steps} steps"
    if ready.steps_requested > shape.total_steps:
        return f"steps_requested={ready.steps_requested}, and the run has {shape.total_steps}"
    most_weight = ready.steps * shape.batch_size * shape.sample_tokens
    if shape.closing_rounds and not ready.steps:
        most_weight = heaviest or MOST_COUNT
    if shape.sample_tokens and ready.weight > most_weight:
        return f"weight={ready.weight}, and {ready.steps} steps have at most {most_weight} tokens"
    return None


def refuse_excess(view: View, round: int, rules: Rules) -> View:
    """Return the view with the records of `round` that are beyond the limits moved from `ready` to `refused`.

    What a member was dealt stands in the verdict of the round before; at a founding it is nothing. A joiner counts up
    to its claim. No member counts for more steps than the run has: a liar may claim more. With another newest
    verdict, or one without progress, nothing is moved.
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
    """The members that read the records of all others to check a plan, drawn by its id.

    If all did, a round would cost the store the square of the number of members.
    """
    return tuple(sorted(plan.members, key=lambda m: hashlib.sha256(f"{plan.id} {m}".encode()).digest())[:_CHECKERS])


def is_checked_by_all(view: View) -> bool:
    """Whether so few members live that nearly each of them is among the `checkers` of a plan."""
    return len(view.alive) <= _CHECKERS + 1


def plan_objection(plan: RoundPlan, view: View, rules: Rules) -> str | None:
    """Say why a plan does not follow from the records of its members; None: it does.

    `view`: of its round, with all that is ready, after `refuse_excess`. Links are not compared: they change meanwhile.
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
        yield from _site_objections(plan, [said.site for said in ready.values()], rules)
        if plan.gains != measured_gains(plan.members, view, rules):
            yield "what it says of scored payloads does not follow from the records of its members"
    if plan.trust != trust_factors(plan.members, view, rules):
        yield "its trust in the members does not follow from the rounds before"
    if plan.orders == view.orders.version and plan.rollback not in (None, view.orders.rollback):
        yield f"it goes back to step {plan.rollback}, which is not ordered"
    before = view.committed.plan if view.committed is not None else None
    version, epoch = (0, 0) if before is None else (before.version, before.epoch)
    if not (0 < plan.version - version <= MAX_PLANS and 0 <= plan.epoch - epoch <= MAX_PLANS):
        yield f"it is version {plan.version}, epoch {plan.epoch} after version {version}, epoch {epoch}"
    if both := set(plan.late) & set(plan.members):
        yield f"it lists {min(both)} as a member and as late"
    yield from _claim_objections(plan, view)


def _claim_objections(plan: RoundPlan, view: View) -> Iterator[str]:
    """Find claims that are not those of the members' records, or that cannot be dealt.

    Claims of joiners that still train are not compared, since their records come and go. A proposer that lists a wrong
    one, or leaves one out, makes that joiner begin again.
    """
    said = dict(plan.claims)
    has_none = plan.rollback is not None or plan.round == BOOTSTRAP_ROUND or restarts_with(view, plan.round)
    own = {} if has_none else {m: c for m, c in ready_claims(view).items() if m in plan.members}
    joining = {m: c for m, c in said.items() if m in plan.late and not has_none}
    expected = valid_claims(ledgers_after(view.committed), own, joining) if own or joining else {}
    for member in sorted(said.keys() | expected.keys()):
        if said.get(member) != expected.get(member):
            yield f"its claim of {member} is {said.get(member)}, and {expected.get(member)} can be dealt to it"


def _carried_objections(plan: RoundPlan, view: View) -> Iterator[str]:
    """Contributions of members outside the exchange that are not as these members and their carriers say."""
    for carried in plan.carried:
        ready, carrier = view.ready.get(carried.member, ABSENT), view.ready.get(carried.carrier)
        if carried.member in view.refused or carrier is None:
            yield f"it lists {carried.member} as carried, whose record for round {plan.round} does not count"
            continue
        said = Carried(
            carried.member,
            carried.carrier,
            ready.offer or "",
            ready.weight,
            ready.steps,
            ready.largest,
            ready.phase_steps,
            counts=carried.counts and is_held_by(ready, carried.member, carrier),
        )
        if said != carried:
            yield f"it lists {carried!s:.200}, and the records say {said!s:.200}"


def _number_objections(plan: RoundPlan, wanted: MemberColumns) -> Iterator[str]:
    """Numbers that are not those of the members' records. `wanted`: what these say."""
    for name in (part.name for part in fields(wanted)):
        said, expected = getattr(plan, name), getattr(wanted, name)
        if said == expected or (name == "loss" and _is_close(said, expected)):
            continue
        if isinstance(expected, tuple) and len(said) == len(expected):
            place = next(place for place, pair in enumerate(zip(said, expected, strict=True)) if pair[0] != pair[1])
            of, said, expected = f" of {plan.members[place]}", said[place], expected[place]
        else:
            of = ""
        yield f"its {name}{of} is {said!s:.80}, and the records of its members say {expected!s:.80}"


def _is_close(one: float | None, other: float | None) -> bool:
    """Whether two means of the same losses differ only in how an interpreter adds up."""
    return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def _site_objections(plan: RoundPlan, names: Sequence[str | None], rules: Rules) -> Iterator[str]:
    """Sites that are not those which the members name. Without names they follow from links, which change."""
    if not plan.sites:
        return
    if rules.sites == "off":
        yield "it has sites, and comm.sites is off"
    elif any(names):
        for name, place, member in zip(names, plan.sites, plan.members, strict=True):
            if names[place] != name or (name is None and plan.members[place] != member):
                yield f"{plan.members[place]} speaks for {member}, which is of another site"


def required_members(plan: RoundPlan) -> frozenset[str]:
    """The members without which a plan has no result: each sends what it made, by links that prove who sends."""
    if plan.rollback is not None:
        return frozenset()
    return frozenset(member for member, weight in zip(plan.members, plan.weights, strict=True) if weight > 0)


def is_undisputed(plan: RoundPlan, member: str, others: Collection[str]) -> bool:
    """Whether the proposer of a plan confirms it by taking part, and nothing is disputed.

    `member`: who asks. `others`: members of the round before.
    """
    is_disputed = bool(plan.retries or plan.blames)
    return not is_disputed and member in plan.members and plan.proposer in required_members(plan).intersection(others)


def has_only_quoted_fields(ready: Ready) -> bool:
    """Whether a member that takes part says nothing that is worth a forgery but what a plan quotes of it."""
    return ready.weight > 0 and not ready.gains and not ready.carries and not ready.offer


def omits_ready_member(plan: RoundPlan, view: View) -> bool:
    """Whether a plan goes without a living member by what that one said."""
    return any(member in view.alive and member not in plan.members for member in view.ready)


def misquote(plan: RoundPlan, member: str, said: Ready) -> str | None:
    """Say where a plan that lists a member has another number than the member said; None: nowhere."""
    place, sizes = plan.members.index(member), [said.largest if said.weight else 0.0]
    sizes += [carried.largest for carried in plan.carried_by(member)]
    known = [size for size in sizes if size is not None]
    claimed = dict(plan.claims)
    claims = [claimed.get(m) for m in plan.members]
    quotes: tuple[tuple[str, Sequence[object], object], ...] = (
        ("weights", plan.weights, said.weight),
        ("steps", plan.steps, said.steps),
        ("steps_requested", plan.steps_requested, said.steps_requested),
        ("phase_fraction", plan.phase_fraction, said.phase_fraction),
        ("corpora", plan.corpora or (SHARED,) * len(plan.members), said.corpus),
        ("largest", plan.largest, max(known) if len(known) == len(sizes) else None),
        ("phase_steps", plan.phase_steps, said.steps if said.phase_steps is None else said.phase_steps),
        ("claims", claims if said.steps and plan.rollback is None else (), said.claim),
    )
    for name, values, own in quotes:
        if values and values[place] != own:
            return f"its {name} of {member} is {values[place]!s:.80}, and that member said {own!s:.80}"
    return None
