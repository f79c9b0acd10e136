"""Which signatures a member need not verify to take part in a round. Pure.

A signature check takes 0.1 ms, and a member reads the records of all others, so most are skipped: a member notices a
forgery in its own name, since it knows what it wrote, compares what a plan quotes of it, and refuses a plan that it did
not propose. An undisputed round cannot complete without any of its members, so a forgery ends it. Signatures are
verified if something is disputed, if a member is left out or new, and at random.

Apart from `plan_checks`, because guardians read records and load no rules.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zeroband.data.ledger import SHARED
from zeroband.elastic.membership.records import Ready, RoundPlan, View


def required_members(plan: RoundPlan) -> frozenset[str]:
    """Members without which a plan has no result: each sends its contribution over an authenticated link."""
    if plan.rollback is not None:
        return frozenset()
    return frozenset(member for member, weight in zip(plan.members, plan.weights, strict=True) if weight > 0)


def is_undisputed(plan: RoundPlan, member: str, others: Collection[str]) -> bool:
    """Whether a plan needs no signature check: its proposer confirms it by taking part, and nothing is disputed.

    `member`: the asking member. `others`: members of the previous round.
    """
    is_disputed = bool(plan.retries or plan.blames)
    return not is_disputed and member in plan.members and plan.proposer in required_members(plan).intersection(others)


def has_only_quoted_fields(ready: Ready) -> bool:
    """Whether a participant's record has only fields that a plan quotes, so that it notices a forgery itself."""
    return ready.weight > 0 and not ready.gains and not ready.carries and not ready.offer


def omits_ready_member(plan: RoundPlan, view: View) -> bool:
    """Whether a plan leaves out a living member that is ready."""
    return any(member in view.alive and member not in plan.members for member in view.ready)


def misquote(plan: RoundPlan, member: str, record: Ready) -> str | None:
    """Describe the first number in a plan that differs from its member's record; None: none."""
    place, sizes = plan.members.index(member), [record.largest if record.weight else 0.0]
    sizes += [carried.largest for carried in plan.carried_by(member)]
    known = [size for size in sizes if size is not None]
    claimed = dict(plan.claims)
    claims = [claimed.get(m) for m in plan.members]
    quotes: tuple[tuple[str, Sequence[object], object], ...] = (
        ("weights", plan.weights, record.weight),
        ("steps", plan.steps, record.steps),
        ("steps_requested", plan.steps_requested, record.steps_requested),
        ("phase_fraction", plan.phase_fraction, record.phase_fraction),
        ("corpora", plan.corpora or (SHARED,) * len(plan.members), record.corpus),
        ("largest", plan.largest, max(known) if len(known) == len(sizes) else None),
        ("phase_steps", plan.phase_steps, record.steps if record.phase_steps is None else record.phase_steps),
        ("claims", claims if record.steps and plan.rollback is None else (), record.claim),
    )
    for name, values, own in quotes:
        if values and values[place] != own:
            return f"its {name} of {member} is {values[place]!s:.80}, but that member's record says {own!s:.80}"
    return None
