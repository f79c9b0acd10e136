"""What members count by what their contributions to the rounds before were worth. Pure rules.

A score is a running mean, in -1..1. Verdicts record the scores, so every plan's proposer comes to the same weights.
Norms do not show here: a combination bounds them (`outer.robust`). There are two:

- *agreement*: of the cosine of a member's contribution and of the committed result. Honest contributions point somewhat
  the same way, or at worst nowhere in particular, so that each one's own part in the result makes its cosine positive;
  one that points against the others for several rounds counts less and less, and nothing at last.
- *gain*: of how much its payloads lower the others' held-out loss beside their own, where that is measured and counts
  (`outer.score.counts`). Of most values of a payload there is one sender, so its own part makes the cosine of a lie
  positive, too.

A member counts what the lower of its scores allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import Any

from zeroband.elastic.membership.records import RoundPlan

RECORD, GAIN = "agreement", "gain"
"""Where scores stand in a verdict's record."""

_NEW = 0.1
"""Part of a score that the newest round makes: contributions as opposite as -0.5 count nothing after 4 rounds."""

MOST_A_ROUND = 2 * _NEW
"""By which two scores differ at most that were equal before the newest round."""

_KEPT = 0.99
"""What is left of a score in a round in which nothing of the member was measured, as of one that counts nothing: after
50 rounds or more it is tried again."""

_FULL, _HALF = -0.05, -0.1
"""Scores down to which a member counts fully, and half; below it counts nothing: combinations that compare members
value by value have no small votes."""

_GAIN_FULL, _GAIN_HALF = -0.2, -0.4
"""Those of scores of gain, which are of few rows: where a training has converged, honest ones came to -0.2."""


def scores_of(record: Mapping[str, Any], name: str = RECORD) -> dict[str, float]:
    """The scores of this name that a verdict recorded; of one that recorded nothing, none."""
    said = record.get(name, {})
    return {member: float(score) for member, score in said.items()} if isinstance(said, dict) else {}


def weight_of(score: float, name: str = RECORD) -> float:
    """What a member of this score counts: 0, or 0.5..1. One whose score is no number counts nothing."""
    full, half = (_GAIN_FULL, _GAIN_HALF) if name == GAIN else (_FULL, _HALF)
    if not score >= half:  # also where it is no number
        return 0.0
    return min(1.0, 0.5 + 0.5 * (score - half) / (full - half))


def trust_of(members: Sequence[str], record: Mapping[str, Any]) -> tuple[float, ...]:
    """What each member counts after a verdict with this record. Members without a score are trusted."""
    scores = {name: scores_of(record, name) for name in (RECORD, GAIN)}
    return tuple(min(weight_of(said.get(m, 0.0), name) for name, said in scores.items()) for m in members)


def scores_after(record: Mapping[str, Any], plan: RoundPlan, cosines: Mapping[str, float]) -> dict[str, float]:
    """Scores after the round of this plan; `record`: of the round before, `cosines`: what was measured in this one.

    Members that are neither in the round nor late for it are forgotten.
    """
    before, members = scores_of(record), (*plan.members, *plan.late)
    return {m: _score(before.get(m, 0.0), cosines.get(m), kept=_KEPT) for m in members}


def _score(before: float, measured: float | None, *, kept: float) -> float:
    """A running mean with what was measured; `kept`: what is left of it where nothing was."""
    if measured is None:
        return kept * before
    return (1 - _NEW) * before + _NEW * max(-1.0, min(1.0, measured))


def gains_after(record: Mapping[str, Any], plan: RoundPlan) -> dict[str, float]:
    """Scores of gain after the round of this plan, which has what was measured of the payloads of the round before.

    They are as before where nothing was measured, but of members that count nothing. Where most of the measured
    payloads raise the loss, as when nobody learns any more, a member is compared with these.
    """
    before = scores_of(record, GAIN)
    if not plan.gains:
        return before
    usual = min(0.0, median_high(gain.ratio for gain in plan.gains))
    measured = {gain.member: gain.ratio - usual for gain in plan.gains}

    def score(member: str) -> float:
        was = before.get(member, 0.0)
        return _score(was, measured.get(member), kept=1.0 if weight_of(was, GAIN) > 0 else _KEPT)

    return {member: score(member) for member in (*plan.members, *plan.late)}
