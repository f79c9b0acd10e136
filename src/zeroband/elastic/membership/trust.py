"""What members count by how far their contributions agreed with what the rounds came to. Pure rules.

A score is a running mean of cosines, of a member's contribution and of the committed result. Verdicts record the
scores, so every opening's proposer comes to the same weights. Honest contributions point somewhat the same way, or at
worst nowhere in particular, so that each one's own part in the result makes its cosine positive; one that points
against the others for several rounds counts less and less, and nothing at last. Norms do not show here: a combination
bounds them (`outer.robust`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroband.elastic.membership.records import Opening

RECORD, GAIN = "agreement", "gain"
"""Where scores stand in a verdict's record."""

_NEW = 0.1
"""Part of a score that the newest round makes: contributions as opposite as -0.5 count nothing after 4 rounds."""

_KEPT = 0.99
"""What is left of a score in a round in which nothing of the member was measured, as of one that counts nothing: after
50 rounds or more it is tried again."""

_FULL, _HALF = -0.05, -0.1
"""Scores down to which a member counts fully, and half; below it counts nothing: combinations that compare members
value by value have no small votes."""


def scores_of(record: Mapping[str, Any], name: str = RECORD) -> dict[str, float]:
    """The scores of this name that a verdict recorded; of one that recorded nothing, none."""
    said = record.get(name, {})
    return {member: float(score) for member, score in said.items()} if isinstance(said, dict) else {}


def weight_of(score: float) -> float:
    """What a member of this score counts: 0, or 0.5..1. One whose score is no number counts nothing."""
    if not score >= _HALF:  # also where it is no number
        return 0.0
    return min(1.0, 0.5 + 0.5 * (score - _HALF) / (_FULL - _HALF))


def trust_of(members: Sequence[str], record: Mapping[str, Any]) -> tuple[float, ...]:
    """What each member counts after a verdict with this record. Members without a score are trusted."""
    scores = [scores_of(record, name) for name in (RECORD, GAIN)]
    return tuple(min(weight_of(said.get(member, 0.0)) for said in scores) for member in members)


def scores_after(
    record: Mapping[str, Any], opening: Opening, measured: Mapping[str, float], name: str = RECORD
) -> dict[str, float]:
    """Scores after the round of this opening; `record`: of the round before, `measured`: in this one, in -1..1.

    Members that are neither in the round nor late for it are forgotten.
    """
    before = scores_of(record, name)

    def score(member: str) -> float:
        if member in measured:
            return (1 - _NEW) * before.get(member, 0.0) + _NEW * max(-1.0, min(1.0, measured[member]))
        return _KEPT * before.get(member, 0.0)

    return {member: score(member) for member in (*opening.members, *opening.late)}


def gains_after(record: Mapping[str, Any], opening: Opening) -> dict[str, float]:
    """Scores of gain after the round of this opening, which has what was measured of the payloads of the round before.

    They are as before where nothing was measured. A payload that changes no loss lowers none.
    """
    if not opening.gains:
        return scores_of(record, GAIN)
    return scores_after(record, opening, {gain.member: 1.0 if gain.nats > 0 else -1.0 for gain in opening.gains}, GAIN)
