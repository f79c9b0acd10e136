"""Which signatures members need not verify to take part in a round. Pure.

What somebody else says in the name of a member is noticed by that member itself: it knows what it said, compares what
an opening quotes of it, and refuses one that it did not propose. A usual round cannot end without any of its members,
so a forgery ends it, and the others need not look for one: they verify signatures where something is disputed, where
somebody is left out or new, and a few by lot. A signature takes 0.1 ms, and a member reads those of all others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zeroband.data.ledger import SHARED
from zeroband.elastic.membership.records import Opening, Ready, View


def needed(opening: Opening) -> frozenset[str]:
    """The members without which an opening has no result: each sends what it made, by links that prove who sends."""
    if opening.rollback is not None:
        return frozenset()
    return frozenset(member for member, weight in zip(opening.members, opening.weights, strict=True) if weight > 0)


def is_usual(opening: Opening, member: str, others: Collection[str]) -> bool:
    """Whether the proposer of an opening confirms it by taking part, and nothing is disputed.

    `member`: who asks. `others`: members of the round before.
    """
    is_disputed = bool(opening.retries or opening.blames)
    return not is_disputed and member in opening.members and opening.proposer in needed(opening).intersection(others)


def only_quoted(ready: Ready) -> bool:
    """Whether a member that takes part says nothing that is worth a forgery but what an opening quotes of it."""
    return ready.weight > 0 and not ready.gains and not ready.carries and not ready.offer


def leaves_out(opening: Opening, view: View) -> bool:
    """Whether an opening goes without a living member by what that one said."""
    return any(member in view.alive and member not in opening.members for member in view.ready)


def misquotes(opening: Opening, member: str, said: Ready) -> str | None:
    """Say where an opening that lists a member has another number than the member said; None: nowhere."""
    place, sizes = opening.members.index(member), [said.largest if said.weight else 0.0]
    sizes += [carried.largest for carried in opening.carried_by(member)]
    known = [size for size in sizes if size is not None]
    claimed = dict(opening.claims)
    claims = [claimed.get(m) for m in opening.members]
    quotes: tuple[tuple[str, Sequence[object], object], ...] = (
        ("weights", opening.weights, said.weight),
        ("steps", opening.steps, said.steps),
        ("steps_requested", opening.steps_requested, said.steps_requested),
        ("trained", opening.trained, said.trained),
        ("corpora", opening.corpora or (SHARED,) * len(opening.members), said.corpus),
        ("largest", opening.largest, max(known) if len(known) == len(sizes) else None),
        ("phase_steps", opening.phase_steps, said.steps if said.phase_steps is None else said.phase_steps),
        ("claims", claims if said.steps and opening.rollback is None else (), said.claim),
    )
    for name, values, own in quotes:
        if values and values[place] != own:
            return f"its {name} of {member} is {values[place]!s:.80}, and that member said {own!s:.80}"
    return None
