"""What a vote is for, and which verdicts follow from votes. Pure rules.

The first member to write a verdict decides its text, so that text is one member's word. What it may say is bound by
votes, which each member signs: the digest of the result, and a hash of all that the verdict records, but for what was
measured. So a member knows a verdict on its own round that it did not vote for, and a member that was not in the
round asks for the others' votes. Figures that were measured may differ a little from node to node; they are held to
that.

The vote of a single member is enough where all others are gone. So those that one member leaves out look whether they
are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroband.elastic.membership import loss_record, trust
from zeroband.elastic.membership.records import Peer, Ready, RoundPlan, Verdict, to_record

_SIGN = "@"
_HASH_BYTES = 12
_SCORES = (trust.RECORD, trust.GAIN)
_MEASURED = frozenset((*_SCORES, loss_record.RECORD, "grad_norm"))
"""What a verdict records that follows from floating-point sums: two kinds of processors may differ in the last bits."""
_RELATIVE = 1e-3
"""By which such a figure may differ."""

_FEWEST_OTHERS = 2
"""Living members that a single one may not leave out: of two members either may be the one that is cut off."""


def vote_for(digest: str, record: Mapping[str, Any]) -> str:
    """The text of a vote for a result with this digest and a verdict that records this."""
    exact = {name: value for name, value in record.items() if name not in _MEASURED}
    said = json.dumps(exact, sort_keys=True).encode()
    return f"{digest}{_SIGN}{hashlib.blake2b(said, digest_size=_HASH_BYTES).hexdigest()}"


def digest_in(vote: str) -> str:
    """The digest of the result that a vote names."""
    return vote.partition(_SIGN)[0]


def is_alike(verdict: Verdict, own: Verdict) -> bool:
    """Whether a verdict on the plan of `own` says what this node would have written."""
    if verdict.plan != own.plan or vote_of(verdict) != vote_of(own):
        return False
    said, expected = to_record(verdict)["record"], to_record(own)["record"]
    return said.keys() == expected.keys() and all(
        _is_close(said[name], expected[name], trust.MAX_CHANGE if name in _SCORES else 0.0)
        for name in _MEASURED & expected.keys()
    )


def vote_of(verdict: Verdict) -> str:
    """What a member has voted that voted for this verdict."""
    return vote_for(verdict.digest, verdict.record)


def is_voted_for(verdict: Verdict, votes: Mapping[str, str], known: Collection[str]) -> bool:
    """Whether more than half of these members of its round have voted for a verdict; true where it lists none."""
    asked = [member for member in verdict.members if member in known]
    needed = vote_of(verdict)
    return not asked or 2 * sum(votes.get(member) == needed for member in asked) > len(asked)


def electors(verdict: Verdict) -> tuple[str, ...]:
    """The members of a committed round that stay; where none does, all of them."""
    plan = verdict.plan
    staying = tuple(m for m, steps in zip(plan.members, plan.steps_requested, strict=False) if steps > 0)
    return staying or plan.members


@dataclass(frozen=True)
class Present:
    """Who is there when a plan is judged, as one look at the store shows it."""

    alive: Collection[str]
    """Members whose lease holds."""
    peers: Mapping[str, Peer] = field(default_factory=dict[str, Peer])
    ready: Mapping[str, Ready] = field(default_factory=dict[str, Ready])
    """Those seen at the boundary of its round; there may be more."""
    quorum: float = 0.5
    """Part of the weight that must be there before anybody is left behind."""


def may_leave_out(
    plan: RoundPlan, before: Verdict, own: str, here: Present, takes_part: Collection[str]
) -> bool | None:
    """Whether a plan behind this verdict may go without `own`; None: leases decide it, which may just be changing.

    It may not where a single member of the round before goes on without two or more that live. By the rules of an
    plan (`epoch`) that happens only if none of these reaches another one, if no two have the same state, or to
    members that are late, where that one has a quorum of the weight. `takes_part`: those of its members that are known
    to be there.
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


def _are_all_cut_off(own: str, others: Collection[str], here: Present) -> bool:
    """Whether none of these members and `own` reach one another, as far as the two ends say."""
    cut_off = {member: here.peers[member].cut_off for member in here.peers}
    apart = [own in cut_off.get(other, ()) or other in cut_off.get(own, ()) for other in others if other != own]
    return bool(apart) and all(apart)


def _has_no_equal(own: str, others: Collection[str], here: Present) -> bool:
    """Whether all these members are ready, and each holds another state than `own`."""
    states = {member: here.ready[member].state_digest for member in {own, *others} if member in here.ready}
    is_seen = len(states) > 1 and len(states) == len({own, *others})
    return is_seen and all(states[member] != states[own] for member in others if member != own)


def _is_quorum(alone: Collection[str], others: Collection[str], before: Verdict, here: Present) -> bool:
    """Whether those that go on have so large a part of the weight: of the round before, or of what is ready now."""
    told = dict(zip(before.members, before.plan.counts, strict=True))
    brought = {member: float(ready.weight) for member, ready in here.ready.items()}
    for weights in (told, brought):
        total = sum(weights.get(member, 0.0) for member in (*alone, *others))
        if total and sum(weights.get(member, 0.0) for member in alone) >= here.quorum * total:
            return True
    return False


def _is_close(said: Any, expected: Any, slack: float) -> bool:
    if isinstance(expected, dict):
        same = isinstance(said, dict) and said.keys() == expected.keys()
        return same and all(_is_close(said[name], value, slack) for name, value in expected.items())
    if isinstance(expected, float) and isinstance(said, float | int):
        if math.isnan(expected) or math.isnan(said):
            return math.isnan(expected) and math.isnan(said)
        return math.isclose(said, expected, rel_tol=_RELATIVE, abs_tol=slack)
    return said == expected
