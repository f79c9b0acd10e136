"""Trust: members' weights by the value of their earlier contributions. Pure rules.

A score is a running mean, in -1..1. Verdicts record the scores, so every proposer reaches the same weights. Norms are
not scored: a combination bounds them (`outer.robust`). There are two scores:

- *agreement*: cosine between a member's contribution and the committed result. Honest contributions point roughly the
  same way, or at worst in random directions, and each one's own part in the result makes its cosine positive. A
  contribution that opposes the others for several rounds loses weight, down to 0.
- *gain*: how much a member's payloads lower the others' held-out loss compared with their own payloads, if that is
  measured and counts (`outer.score.counts`). Most values of a payload have one sender, so a lie's own part makes its
  cosine positive as well; gain catches it.

The lower of its scores limits a member's weight.

Gains are measured after some rounds: each member computes on its own rows how much each of a few drawn payloads lowers
the loss, compared with its own payload, which it knows to be honest. It reports the ratios in its next `Ready`, and the
next plan holds their medians. A member whose own payload lowers nothing, as near the end of training, measures none.
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
"""Weight of the newest round in a score: at a cosine of -0.5, a member's weight is 0 after 4 rounds."""

MAX_CHANGE = 2 * _NEW
"""Largest difference that one round can make between two equal scores."""

_DECAY = 0.99
"""Decay of a score without a measurement, as for members with weight 0: after 50 or more rounds they are tried
again."""

_FULL, _HALF = -0.05, -0.1
"""Scores down to which a member's factor is 1, and 1/2. Below it is 0: combinations that compare members value by value
have no small votes."""

_GAIN_FULL, _GAIN_HALF = -0.2, -0.4
"""Bounds for gain scores, which are noisy because few rows measure them: honest members reached -0.2 after
convergence."""


def scores_of(record: Mapping[str, Any], name: str = RECORD) -> dict[str, float]:
    """Return a verdict's scores of this name; empty if it has none."""
    scores = record.get(name, {})
    return {member: float(score) for member, score in scores.items()} if isinstance(scores, dict) else {}


def weight_of(score: float, name: str = RECORD) -> float:
    """Return the weight factor for a score: 0, or 0.5..1."""
    full, half = (_GAIN_FULL, _GAIN_HALF) if name == GAIN else (_FULL, _HALF)
    if not score >= half:  # written so that NaN gives 0
        return 0.0
    return min(1.0, 0.5 + 0.5 * (score - half) / (full - half))


def trust_of(members: Sequence[str], record: Mapping[str, Any]) -> tuple[float, ...]:
    """Return each member's factor after a verdict with this record. Members without a score are trusted."""
    scores = {name: scores_of(record, name) for name in (RECORD, GAIN)}
    return tuple(min(weight_of(known.get(m, 0.0), name) for name, known in scores.items()) for m in members)


def scores_after(record: Mapping[str, Any], plan: RoundPlan, cosines: Mapping[str, float]) -> dict[str, float]:
    """Return the agreement scores after this plan's round, from the previous record and the measured cosines.

    Members that are neither in the round nor late for it are forgotten.
    """
    before = scores_of(record)
    return {m: _score(before.get(m, 0.0), cosines.get(m), kept=_DECAY) for m in plan.listed}


def _score(before: float, measured: float | None, *, kept: float) -> float:
    """Update a running mean; `kept`: its factor without a measurement."""
    if measured is None:
        return kept * before
    return (1 - _NEW) * before + _NEW * max(-1.0, min(1.0, measured))


def gains_after(record: Mapping[str, Any], plan: RoundPlan) -> dict[str, float]:
    """Return the gain scores after this plan's round; the plan holds the gains of the previous round's payloads.

    Without a measurement a score stays, except for members with weight 0. If most payloads raise the loss, as after
    convergence, members are compared with the median.
    """
    before = scores_of(record, GAIN)
    if not plan.gains:
        return before
    usual = min(0.0, median_high(gain.ratio for gain in plan.gains))
    measured = {gain.member: gain.ratio - usual for gain in plan.gains}

    def score(member: str) -> float:
        was = before.get(member, 0.0)
        return _score(was, measured.get(member), kept=1.0 if weight_of(was, GAIN) > 0 else _DECAY)

    return {member: score(member) for member in plan.listed}


_FEWEST_OTHERS = 2
"""Fewest members besides the scored one: with one, a member would judge its only rival."""


@dataclass(frozen=True)
class ScoringRule:
    """How many payloads are scored; equal on all nodes."""

    rounds: int
    """Mean interval between scored rounds, in rounds."""
    members: int
    """Number of members whose payloads are scored in such a round."""
    counts: bool = False
    """Whether a member's weight depends on its score."""


def scored_members(verdict: Verdict | None, rule: ScoringRule | None) -> tuple[str, ...]:
    """Draw the members whose payloads of a committed round are scored.

    The result's digest is the seed, since nobody knows it before all payloads are sent.
    """
    if rule is None or verdict is None or verdict.plan.rollback is not None:
        return ()
    plan = verdict.plan
    if len(plan.members) <= _FEWEST_OTHERS or random_draw(verdict, "round") % rule.rounds:
        return ()
    senders = [member for member, count in zip(plan.members, plan.counts, strict=True) if count > 0]
    return tuple(sorted(senders, key=lambda member: random_draw(verdict, f"member {member}"))[: rule.members])


def random_draw(verdict: Verdict, what: str) -> int:
    """Derive a 64-bit random number from a round's result and a label."""
    drawn_from = f"{verdict.round} {verdict.digest} {what}".encode()
    return int.from_bytes(hashlib.sha256(drawn_from).digest()[:8], "big")


def median_gains(verdict: Verdict | None, ready: Mapping[str, Ready], rule: ScoringRule | None) -> tuple[Gain, ...]:
    """Return the gains of a committed round's drawn payloads, from the members' records of the next round.

    Each is the median over the round's members with weight, without the sender. A missing report counts as the best
    value, so a payload is found to raise the loss only if more than half of the members say so.
    """
    found: list[Gain] = []
    if verdict is None or not (scored := scored_members(verdict, rule)):
        return ()
    trust = dict(zip(verdict.members, trust_of(verdict.members, verdict.record), strict=True))
    gains = {member: record.gains for member, record in ready.items() if len(record.gains) == len(scored)}
    for place, sender in enumerate(scored):
        others = [member for member in verdict.members if member != sender and trust[member] > 0]
        median = _median([gains[member][place] if member in gains else None for member in others])
        if median is not None:
            found.append(Gain(sender, median))
    return tuple(found)


def _median(ratios: Sequence[float | None]) -> float | None:
    """The higher median, with None above all; None if it is that, or there are too few."""
    if len(ratios) < _FEWEST_OTHERS:
        return None
    median = sorted(math.inf if ratio is None else ratio for ratio in ratios)[len(ratios) // 2]
    return None if median == math.inf else median
