"""What an opening may say of the ones before it: who was at fault, how often its round was given up. Pure rules.

Its proposer comes to it by `found_after`. Every other member comes to the same by `found_before`, from what the members
of each attempt since the newest verdict signed (`Attempt`), and refuses an opening that says something else
(`objection`). Two things are the proposer's word: that a member of the failed attempt was lost, so that nothing is
judged, and who of it was silent. Both are bounded: who says that one was lost has to go without one, and no member is
silent that testified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from zeroband.elastic.membership import blame
from zeroband.elastic.membership.records import Attempt, Blame, Opening, Verdict


@dataclass(frozen=True)
class Findings:
    """What is known of earlier attempts when an opening is proposed; as its fields of these names."""

    blames: tuple[Blame, ...] = ()
    retries: int = 0
    is_flat: bool = False
    silent: tuple[str, ...] = ()


def found_after(before: Findings, attempt: Attempt, round: int, silent: Sequence[str] | None) -> Findings:
    """What is known for an opening of `round` that follows on this attempt, of which `before` was known.

    `silent`: members that live and did not testify on its failure in time. None: a member of it was lost, or it was of
    another round, so that no member is at fault.
    """
    opening = replace(attempt.opening, blames=before.blames, retries=before.retries)
    known = blame.kept(opening, round)
    if opening.round != round:
        return Findings(known)
    if silent is None:
        return Findings(known, before.retries)
    found = blame.judge(opening, attempt.votes, attempt.said, silent, attempt.failed) if attempt.said else ()
    is_flat = not opening.is_flat and (_results_differ(attempt) or before.retries + 1 >= blame.PATIENT_RETRIES)
    return Findings(blame.added(known, found), before.retries + 1, is_flat, tuple(silent))


def _results_differ(attempt: Attempt) -> bool:
    """Whether no part should pass through others in the next attempt, so that it shows whose differ.

    From the second retry on, every second attempt is flat, so that it shows who sends nothing; the others are planned
    by the network, as some members may reach each other only that way.
    """
    return len({attempt.votes[m] for m in attempt.opening.members if m in attempt.votes}) > 1


def found_before(opening: Opening, past: Sequence[Attempt], committed: Verdict | None) -> Findings:
    """What is known for an opening, by the attempts since the newest verdict.

    `past`: the oldest first, each of which the next one follows on; those that the store has lost are as if they had
    not been. What an attempt itself says of the ones before it does not count.
    """
    first = past[0].opening if past else opening
    found = Findings() if committed is None else Findings(blame.kept(committed.opening, first.round))
    for attempt, following in pairwise([*past, Attempt(opening)]):
        silent = _claimed_silent(attempt, following.opening, found.retries)
        found = found_after(found, attempt, following.opening.round, silent)
    return found


def _claimed_silent(attempt: Attempt, following: Opening, retries: int) -> tuple[str, ...] | None:
    """Who was silent on an attempt by the word of the opening that follows on it; None: by that word one was lost."""
    says_lost = following.retries == retries and not _has_all_of(attempt.opening, following)
    if says_lost or not attempt.failed:
        return None
    return tuple(m for m in following.silent if m in attempt.opening.members and m not in attempt.said)


def _has_all_of(before: Opening, opening: Opening) -> bool:
    """Whether an opening goes without no member of the one before it."""
    return {*before.members} <= {*opening.members, *opening.late}


def objection(opening: Opening, past: Sequence[Attempt], committed: Verdict | None) -> str | None:
    """Say what an opening says of the ones before it that does not follow from them; None: all of it follows."""
    return next(_objections(opening, past, committed), None)


def _objections(opening: Opening, past: Sequence[Attempt], committed: Verdict | None) -> Iterator[str]:
    if past:
        yield from _other_place(opening, past[-1])
    found = found_before(opening, past, committed)
    yield from (f"it says that {_told(b)}; no signed words say so" for b in opening.blames if b not in found.blames)
    yield from (f"it leaves out that {_told(b)}" for b in found.blames if b not in opening.blames)
    for name in (part.name for part in fields(found)):
        said, expected = getattr(opening, name), getattr(found, name)
        if said != expected:
            yield f"its {name} is {said!s:.80}, and by the attempts before it {expected!s:.80}"
    yield from (f"it lists {m}, which was put out" for m in opening.members if blame.is_put_out(found.blames, m))


def _other_place(opening: Opening, last: Attempt) -> Iterator[str]:
    """Why an opening may not follow on the one that it names."""
    before = last.opening
    if opening.version != before.version + 1:
        yield f"it is version {opening.version} and follows on version {before.version}"
    if opening.round == before.round and not last.failed and _has_all_of(before, opening):
        yield f"it takes the place of version {before.version}, which neither failed nor lost a member"


def _told(found: Blame) -> str:
    return f"{' and '.join(found.members)} ({found.consequence}): {found.reason:.200}"
