"""Which signatures members need not verify to take part in a round. Pure.

What somebody else says in the name of a member is noticed by that member itself: it knows what it said, compares what
a plan quotes of it, and refuses one that it did not propose. A usual round cannot end without any of its members,
so a forgery ends it, and the others need not look for one: they verify signatures where something is disputed, where
somebody is left out or new, and a few by lot. A signature takes 0.1 ms, and a member reads those of all others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zeroband.data.ledger import SHARED
from zeroband.elastic.membership.records import Ready, RoundPlan, View


def needed(plan: RoundPlan) -> frozenset[str]:
    """The members without which a plan has no result: each sends what it made, by links that prove who sends."""
    if plan.rollback is not None:
        return frozenset()
    return frozenset(member for member, weight in zip(plan.members, plan.weights, strict=True) if weight > 0)


def is_usual(plan: RoundPlan, member: str, others: Collection[str]) -> bool:
    """Whether the proposer of a plan confirms it by taking part, and nothing is disputed.

    `member`: who asks. `others`: members of the round before.
    """
    is_disputed = bool(plan.retries or plan.blames)
    return not is_disputed and member in plan.members and plan.proposer in needed(plan).intersection(others)


def only_quoted(ready: Ready) -> bool:
    """Whether a member that takes part says nothing that is worth a forgery but what a plan quotes of it."""
    return ready.weight > 0 and not ready.gains and not ready.carries and not ready.offer


def leaves_out(plan: RoundPlan, view: View) -> bool:
    """Whether a plan goes without a living member by what that one said."""
    return any(member in view.alive and member not in plan.members for member in view.ready)


def misquotes(plan: RoundPlan, member: str, said: Ready) -> str | None:
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
