"""Members' weights by the value of their earlier contributions. Pure rules.

A score is a running mean, in -1..1. Verdicts record the scores, so every proposer reaches the same weights. Norms are
not scored: a combination bounds them (`outer.robust`). There are two scores:

- *agreement*: cosine between a member's contribution and the committed result. Honest contributions point roughly the
  same way, or at worst in random directions, and each one's own part in the result makes its cosine positive. A
  contribution that opposes the others for several rounds loses weight, down to 0.
- *gain*: how much a member's payloads lower the others' held-out loss compared with their own payloads, if that is
  measured and counts (`outer.score.counts`). Most values of a payload have one sender, so a lie's own part makes its
  cosine positive as well; gain catches it.

The lower of its scores limits a member's weight.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

from zeroband.elastic.membership.records import Gain, Ready, RoundPlan, Verdict

RECORD, GAIN = "agreement", "gain"
"""Keys of the scores in a verdict's record."""

_NEW = 0.1
"""Weight of the newest round in a score: at a cosine of -0.5, contributions count 0 after 4 rounds."""

MAX_CHANGE = 2 * _NEW
"""Largest difference after one round between two scores that were equal before it."""

_DECAY = 0.99
"""Factor on a score in a round that did not measure the member, as when it counts 0: after 50 rounds or more the
member is tried again."""

_FULL, _HALF = -0.05, -0.1
"""Scores down to which a member counts fully, and half; below, it counts 0: combinations that compare members value by
value have no small votes."""

_GAIN_FULL, _GAIN_HALF = -0.2, -0.4
"""Limits for the gain score, which few rows measure: once training had converged, honest members reached -0.2."""


def scores_of(record: Mapping[str, Any], name: str = RECORD) -> dict[str, float]:
    """The scores of this name in a verdict's record; empty if it has none."""
    said = record.get(name, {})
    return {member: float(score) for member, score in said.items()} if isinstance(said, dict) else {}


def weight_of(score: float, name: str = RECORD) -> float:
    """Factor on the weight of a member with this score: 0, or 0.5..1; 0 for a NaN score."""
    full, half = (_GAIN_FULL, _GAIN_HALF) if name == GAIN else (_FULL, _HALF)
    if not score >= half:  # also where it is no number
        return 0.0
    return min(1.0, 0.5 + 0.5 * (score - half) / (full - half))


def trust_of(members: Sequence[str], record: Mapping[str, Any]) -> tuple[float, ...]:
    """Each member's factor after a verdict with this record. Members without a score are trusted."""
    scores = {name: scores_of(record, name) for name in (RECORD, GAIN)}
    return tuple(min(weight_of(said.get(m, 0.0), name) for name, said in scores.items()) for m in members)


def scores_after(record: Mapping[str, Any], plan: RoundPlan, cosines: Mapping[str, float]) -> dict[str, float]:
    """Scores after this plan's round; `record`: of the previous round, `cosines`: as measured in this one.

    Members that are neither in the round nor late for it are forgotten.
    """
    before, members = scores_of(record), (*plan.members, *plan.late)
    return {m: _score(before.get(m, 0.0), cosines.get(m), kept=_DECAY) for m in members}


def _score(before: float, measured: float | None, *, kept: float) -> float:
    """The running mean with a new measurement; `kept`: factor on it without one."""
    if measured is None:
        return kept * before
    return (1 - _NEW) * before + _NEW * max(-1.0, min(1.0, measured))


def gains_after(record: Mapping[str, Any], plan: RoundPlan) -> dict[str, float]:
    """Gain scores after this plan's round; the plan holds the measured gains of the previous round's payloads.

    Without a measurement a score stays, except for members that count 0. If most measured payloads raise the loss, as
    when training has converged, a member is compared with these.
    """
    before = scores_of(record, GAIN)
    if not plan.gains:
        return before
    usual = min(0.0, median_high(gain.ratio for gain in plan.gains))
    measured = {gain.member: gain.ratio - usual for gain in plan.gains}

    def score(member: str) -> float:
        was = before.get(member, 0.0)
        return _score(was, measured.get(member), kept=1.0 if weight_of(was, GAIN) > 0 else _DECAY)

    return {member: score(member) for member in (*plan.members, *plan.late)}


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


def scored_members(verdict: Verdict | None, rule: ScoringRule | None) -> tuple[str, ...]:
    """The members whose payloads of a committed round are scored.

    The draw is by the digest of the result, which is unknown until all payloads are sent.
    """
    if rule is None or verdict is None or verdict.plan.rollback is not None:
        return ()
    plan = verdict.plan
    if len(plan.members) <= _FEWEST_OTHERS or random_draw(verdict, "round") % rule.rounds:
        return ()
    senders = [member for member, count in zip(plan.members, plan.counts, strict=True) if count > 0]
    return tuple(sorted(senders, key=lambda member: random_draw(verdict, f"member {member}"))[: rule.members])


def random_draw(verdict: Verdict, what: str) -> int:
    """A 64-bit random number drawn from the result of a round; each `what` gives another one."""
    drawn_from = f"{verdict.round} {verdict.digest} {what}".encode()
    return int.from_bytes(hashlib.sha256(drawn_from).digest()[:8], "big")


def median_gains(verdict: Verdict | None, ready: Mapping[str, Ready], rule: ScoringRule | None) -> tuple[Gain, ...]:
    """What the others found the drawn payloads of a committed round to be worth, by their records of the next round.

    The median of all members of that round that count anything, without the sender; one that says nothing says the best
    of it, so a payload is found to raise the loss only where more than half of them say so.
    """
    told: list[Gain] = []
    if verdict is None or not (scored := scored_members(verdict, rule)):
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
