"""What a vote is for, and which verdicts follow from votes. Pure rules.

The first member to write a verdict decides its text, so that text is one member's word. What it may say is bound by
votes, which each member signs: the digest of the result, and a hash of all that the verdict records, but for what was
measured. So a member knows a verdict on its own round that it did not vote for, and a member that was not in the
round asks for the others' votes. Figures that were measured may differ a little from node to node; they are held to
that.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from zeroband.elastic.membership import loss_record, trust
from zeroband.elastic.membership.records import Verdict, to_record

_SIGN = "@"
_HASH_BYTES = 12
_SCORES = (trust.RECORD, trust.GAIN)
_MEASURED = frozenset((*_SCORES, loss_record.RECORD, "grad_norm"))
"""What a verdict records that follows from floating-point sums: two kinds of processors may differ in the last bits."""
_RELATIVE = 1e-3
"""By which such a figure may differ."""


def vote_for(digest: str, record: Mapping[str, Any]) -> str:
    """The text of a vote for a result with this digest and a verdict that records this."""
    exact = {name: value for name, value in record.items() if name not in _MEASURED}
    said = json.dumps(exact, sort_keys=True).encode()
    return f"{digest}{_SIGN}{hashlib.blake2b(said, digest_size=_HASH_BYTES).hexdigest()}"


def digest_in(vote: str) -> str:
    """The digest of the result that a vote names."""
    return vote.partition(_SIGN)[0]


def is_alike(verdict: Verdict, own: Verdict) -> bool:
    """Whether a verdict on the opening of `own` says what this node would have written."""
    if verdict.opening != own.opening or vote_of(verdict) != vote_of(own):
        return False
    said, expected = to_record(verdict)["record"], to_record(own)["record"]
    return said.keys() == expected.keys() and all(
        _is_close(said[name], expected[name], trust.MOST_A_ROUND if name in _SCORES else 0.0)
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


def _is_close(said: Any, expected: Any, slack: float) -> bool:
    if isinstance(expected, dict):
        same = isinstance(said, dict) and said.keys() == expected.keys()
        return same and all(_is_close(said[name], value, slack) for name, value in expected.items())
    if isinstance(expected, float) and isinstance(said, float | int):
        if math.isnan(expected) or math.isnan(said):
            return math.isnan(expected) and math.isnan(said)
        return math.isclose(said, expected, rel_tol=_RELATIVE, abs_tol=slack)
    return said == expected
