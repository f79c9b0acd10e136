"""The content of a vote, the verdicts that votes allow, and the plans that may leave a member out. Pure rules.

A verdict is written by one member but bound by all members' signed votes: each contains the digest of the result and a
hash of the verdict's record, except for measured figures, which may differ slightly between nodes and are compared with
a tolerance. A member of the round thus recognises a verdict that it did not vote for; other members ask for the votes.

If all others are gone, a single member's vote suffices. So members that a single one leaves out check that claim, and
the single one gives them a lease to show that they live, since a store may have lost their leases.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroband.elastic.membership import loss_record, trust
from zeroband.elastic.membership.blame import is_put_out
from zeroband.elastic.membership.records import Peer, Ready, RoundPlan, Verdict, to_record

_SIGN = "@"
_HASH_BYTES = 12
_SCORES = (trust.RECORD, trust.GAIN)
_MEASURED = frozenset((*_SCORES, loss_record.RECORD, "grad_norm"))
"""Keys with floating-point sums: processors of two kinds may differ in the last bits."""
_RELATIVE = 1e-3
"""Relative tolerance for measured figures."""

_FEWEST_OTHERS = 2
"""A single member may not leave out this many living ones. Of only two members, either may be the one cut off."""


def vote_for(digest: str, record: Mapping[str, Any]) -> str:
    """Return the vote for a result with this digest and a verdict with this record."""
    exact = {name: value for name, value in record.items() if name not in _MEASURED}
    text = json.dumps(exact, sort_keys=True).encode()
    return f"{digest}{_SIGN}{hashlib.blake2b(text, digest_size=_HASH_BYTES).hexdigest()}"


def digest_in(vote: str) -> str:
    """Return the digest of the result in a vote."""
    return vote.partition(_SIGN)[0]


def is_alike(verdict: Verdict, own: Verdict) -> bool:
    """Whether a verdict equals the `own` one, up to the tolerance of measured figures."""
    if verdict.plan != own.plan or vote_of(verdict) != vote_of(own):
        return False
    actual, expected = to_record(verdict)["record"], to_record(own)["record"]
    return actual.keys() == expected.keys() and all(
        _is_close(actual[name], expected[name], trust.MAX_CHANGE if name in _SCORES else 0.0)
        for name in _MEASURED & expected.keys()
    )


def vote_of(verdict: Verdict) -> str:
    """Return the vote that supports this verdict."""
    return vote_for(verdict.digest, verdict.record)


def is_voted_for(verdict: Verdict, votes: Mapping[str, str], known: Collection[str]) -> bool:
    """Whether more than half of the known members of its round voted for a verdict; true if none is known."""
    asked = [member for member in verdict.members if member in known]
    needed = vote_of(verdict)
    return not asked or 2 * sum(votes.get(member) == needed for member in asked) > len(asked)


def electors(verdict: Verdict) -> tuple[str, ...]:
    """Return the staying members of a committed round; all of them if none stays."""
    plan = verdict.plan
    staying = tuple(m for m, steps in zip(plan.members, plan.steps_requested, strict=False) if steps > 0)
    return staying or plan.members


@dataclass(frozen=True)
class Present:
    """Members present when a plan is judged, from one read of the store."""

    alive: Collection[str]
    """Members with a valid lease."""
    peers: Mapping[str, Peer] = field(default_factory=dict[str, Peer])
    ready: Mapping[str, Ready] = field(default_factory=dict[str, Ready])
    """Known members at the boundary of its round; there may be more."""
    quorum: float = 0.5
    """Fraction of the weight that must be present before members are left behind."""


def may_leave_out(
    plan: RoundPlan, before: Verdict, own: str, here: Present, takes_part: Collection[str]
) -> bool | None:
    """Whether a plan after this verdict may leave out `own`; None: it depends on leases, which may be changing now.

    A single member of the previous round may not continue without two or more living ones, except where the rules allow
    it: no two of them reach each other, no two hold the same state, or the others are late and it has a quorum of the
    weight. `takes_part`: members of the plan known to be present.
    """
    staying = electors(before)
    if own not in staying or own in plan.members or len(staying) <= _FEWEST_OTHERS:
        return True
    alone = [member for member in staying if member in plan.members and member in takes_part]
    others = [member for member in staying if member not in plan.members and member in here.alive]
    if len(alone) > 1 or _are_all_cut_off(own, [*alone, *others], here) or _has_no_equal(own, others, here):
        return True
    if own in plan.late and _is_quorum(alone, others, before, here):
        return True
    return False if own in others and len(others) >= _FEWEST_OTHERS else None


def left_by_one(plan: RoundPlan, before: Verdict) -> tuple[str, ...]:
    """Return the members that a plan leaves behind with at most one member of the previous round; empty: it does not.

    Members that were put out do not count.
    """
    staying = electors(before)
    others = tuple(m for m in staying if m not in plan.members and not is_put_out(plan.blames, m))
    goes_on = sum(m in plan.members for m in staying)
    return others if goes_on <= 1 and len(others) >= _FEWEST_OTHERS else ()


def _are_all_cut_off(own: str, others: Collection[str], here: Present) -> bool:
    """Whether `own` is cut off from all these members, as reported by either end."""
    cut_off = {member: here.peers[member].cut_off for member in here.peers}
    apart = [own in cut_off.get(other, ()) or other in cut_off.get(own, ()) for other in others if other != own]
    return bool(apart) and all(apart)


def _has_no_equal(own: str, others: Collection[str], here: Present) -> bool:
    """Whether all these members are ready with states that differ from that of `own`."""
    states = {member: here.ready[member].state_digest for member in {own, *others} if member in here.ready}
    is_seen = len(states) > 1 and len(states) == len({own, *others})
    return is_seen and all(states[member] != states[own] for member in others if member != own)


def _is_quorum(alone: Collection[str], others: Collection[str], before: Verdict, here: Present) -> bool:
    """Whether the continuing members have a quorum of the weight: of the previous round, or of the ready members."""
    previous = dict(zip(before.members, before.plan.counts, strict=True))
    current = {member: float(ready.weight) for member, ready in here.ready.items()}
    for weights in (previous, current):
        total = sum(weights.get(member, 0.0) for member in (*alone, *others))
        if total and sum(weights.get(member, 0.0) for member in alone) >= here.quorum * total:
            return True
    return False


def _is_close(actual: Any, expected: Any, slack: float) -> bool:
    if isinstance(expected, dict):
        same = isinstance(actual, dict) and actual.keys() == expected.keys()
        return same and all(_is_close(actual[name], value, slack) for name, value in expected.items())
    if isinstance(expected, float) and isinstance(actual, float | int):
        if math.isnan(expected) or math.isnan(actual):
            return math.isnan(expected) and math.isnan(actual)
        return math.isclose(actual, expected, rel_tol=_RELATIVE, abs_tol=slack)
    return actual == expected
