"""What a plan may say of the ones before it: who was at fault, how often its round was given up. Pure rules.

Its proposer comes to it by `found_after`. Every other member comes to the same by `found_before`, from what the members
of each attempt since the newest verdict signed (`Attempt`), and refuses a plan that says something else
(`objection`). Two things are the proposer's word: that a member of the failed attempt was lost, so that nothing is
judged, and who of it was silent. Both are bounded: who says that one was lost has to go without one, and no member is
silent that testified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from zeroband.elastic.membership import blame
from zeroband.elastic.membership.records import Attempt, Blame, RoundPlan, Verdict


@dataclass(frozen=True)
class Findings:
    """What is known of earlier attempts when a plan is proposed; as its fields of these names."""

    blames: tuple[Blame, ...] = ()
    retries: int = 0
    is_flat: bool = False
    silent: tuple[str, ...] = ()


def found_after(before: Findings, attempt: Attempt, round: int, silent: Sequence[str] | None) -> Findings:
    """What is known for a plan of `round` that follows on this attempt, of which `before` was known.

    `silent`: members that live and did not testify on its failure in time. None: a member of it was lost, or it was of
    another round, so that no member is at fault.
    """
    plan = replace(attempt.plan, blames=before.blames, retries=before.retries)
    known = blame.kept(plan, round)
    if plan.round != round:
        return Findings(known)
    if silent is None:
        return Findings(known, before.retries)
    found = blame.judge(plan, attempt.votes, attempt.said, silent, attempt.failed) if attempt.said else ()
    is_flat = not plan.is_flat and (_results_differ(attempt) or before.retries + 1 >= blame.PATIENT_RETRIES)
    return Findings(blame.added(known, found), before.retries + 1, is_flat, tuple(silent))


def _results_differ(attempt: Attempt) -> bool:
    """Whether no part should pass through others in the next attempt, so that it shows whose differ.

    From the second retry on, every second attempt is flat, so that it shows who sends nothing; the others are planned
    by the network, as some members may reach each other only that way.
    """
    return len({attempt.votes[m] for m in attempt.plan.members if m in attempt.votes}) > 1


def found_before(plan: RoundPlan, past: Sequence[Attempt], committed: Verdict | None) -> Findings:
    """What is known for a plan, by the attempts since the newest verdict.

    `past`: the oldest first, each of which the next one follows on; those that the store has lost are as if they had
    not been. What an attempt itself says of the ones before it does not count.
    """
    first = past[0].plan if past else plan
    found = Findings() if committed is None else Findings(blame.kept(committed.plan, first.round))
    for attempt, following in pairwise([*past, Attempt(plan)]):
        silent = _claimed_silent(attempt, following.plan, found.retries)
        found = found_after(found, attempt, following.plan.round, silent)
    return found


def _claimed_silent(attempt: Attempt, following: RoundPlan, retries: int) -> tuple[str, ...] | None:
    """Who was silent on an attempt by the word of the plan that follows on it; None: by that word one was lost."""
    says_lost = following.retries == retries and not _has_all_of(attempt.plan, following)
    if says_lost or not attempt.failed:
        return None
    return tuple(m for m in following.silent if m in attempt.plan.members and m not in attempt.said)


def _has_all_of(before: RoundPlan, plan: RoundPlan) -> bool:
    """Whether a plan goes without no member of the one before it."""
    return {*before.members} <= {*plan.members, *plan.late}


def objection(plan: RoundPlan, past: Sequence[Attempt], committed: Verdict | None) -> str | None:
    """Say what a plan says of the ones before it that does not follow from them; None: all of it follows."""
    return next(_objections(plan, past, committed), None)


def _objections(plan: RoundPlan, past: Sequence[Attempt], committed: Verdict | None) -> Iterator[str]:
    if past:
        yield from _other_place(plan, past[-1])
    found = found_before(plan, past, committed)
    yield from (f"it says that {_told(b)}; no signed words say so" for b in plan.blames if b not in found.blames)
    yield from (f"it leaves out that {_told(b)}" for b in found.blames if b not in plan.blames)
    for name in (part.name for part in fields(found)):
        said, expected = getattr(plan, name), getattr(found, name)
        if said != expected:
            yield f"its {name} is {said!s:.80}, and by the attempts before it {expected!s:.80}"
    yield from (f"it lists {m}, which was put out" for m in plan.members if blame.is_put_out(found.blames, m))


def _other_place(plan: RoundPlan, last: Attempt) -> Iterator[str]:
    """Why a plan may not follow on the one that it names."""
    before = last.plan
    if plan.version != before.version + 1:
        yield f"it is version {plan.version} and follows on version {before.version}"
    if plan.round == before.round and not last.failed and _has_all_of(before, plan):
        yield f"it takes the place of version {before.version}, which neither failed nor lost a member"


def _told(found: Blame) -> str:
    return f"{' and '.join(found.members)} ({found.consequence}): {found.reason:.200}"
