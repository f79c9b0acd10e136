"""Which payloads are scored by held-out loss, and the resulting scores. Pure rules.

Every member has all payloads of a round. After some rounds each member measures, on its own rows, how much each of a
few payloads alone lowers the loss, compared with its own payload, which it knows to be honest. It reports this in its
next `Ready`; the next plan holds the medians. A member's weight then follows from the records (`trust`), the same on
all nodes. A member whose own payload lowers nothing, as near the end of training, measures no other payload either.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroband.elastic.membership.records import Gain, Ready, Verdict
from zeroband.elastic.membership.trust import trust_of

_FEWEST_OTHERS = 2
"""Members besides the scored one: of two members one would be judge of the other."""


@dataclass(frozen=True)
class ScoringRule:
    """How much is scored. The same on all nodes."""

    rounds: int
    """Mean interval between scored rounds, in rounds."""
    members: int
    """Number of members whose payloads are scored in such a round."""
    counts: bool = False
    """Whether a member's weight depends on its score."""


def drawn(verdict: Verdict | None, rule: ScoringRule | None) -> tuple[str, ...]:
    """The members whose payloads of a committed round are scored.

    The draw is by the digest of the result, which is unknown until all payloads are sent.
    """
    if rule is None or verdict is None or verdict.plan.rollback is not None:
        return ()
    plan = verdict.plan
    if len(plan.members) <= _FEWEST_OTHERS or lot_of(verdict, "round") % rule.rounds:
        return ()
    senders = [member for member, count in zip(plan.members, plan.counts, strict=True) if count > 0]
    return tuple(sorted(senders, key=lambda member: lot_of(verdict, f"member {member}"))[: rule.members])


def lot_of(verdict: Verdict, what: str) -> int:
    """A 64-bit random number drawn from the result of a round; each `what` gives another one."""
    drawn_from = f"{verdict.round} {verdict.digest} {what}".encode()
    return int.from_bytes(hashlib.sha256(drawn_from).digest()[:8], "big")


def gains_told(verdict: Verdict | None, ready: Mapping[str, Ready], rule: ScoringRule | None) -> tuple[Gain, ...]:
    """What the others found the drawn payloads of a committed round to be worth, by their records of the next round.

    The median of all members of that round that count anything, without the sender; one that says nothing says the best
    of it, so a payload is found to raise the loss only where more than half of them say so.
    """
    told: list[Gain] = []
    if verdict is None or not (scored := drawn(verdict, rule)):
        return ()
    trust = dict(zip(verdict.members, trust_of(verdict.members, verdict.record), strict=True))
    words = {member: said.gains for member, said in ready.items() if len(said.gains) == len(scored)}
    for place, sender in enumerate(scored):
        others = [member for member in verdict.members if member != sender and trust[member] > 0]
        median = _median([words[member][place] if member in words else None for member in others])
        if median is not None:
            told.append(Gain(sender, median))
    return tuple(told)


def _median(said: Sequence[float | None]) -> float | None:
    """The higher median, where None is above all; None where it is that, or too few could say anything."""
    if len(said) < _FEWEST_OTHERS:
        return None
    median = sorted(math.inf if ratio is None else ratio for ratio in said)[len(said) // 2]
    return None if median == math.inf else median
