"""Whom a joiner believes: what its donors claim is compared, and the claim that most of them make is taken."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zeroband.elastic.membership.records import View
from zeroband.elastic.membership.resume_rules import pending
from zeroband.elastic.recovery.donors import Donor, Inquiry, Refusal
from zeroband.elastic.recovery.state_chunks import StateManifest
from zeroband.errors import RecoveryFailed
from zeroband.observe.log import get_logger
from zeroband.observe.view import node_id_of_member

_log = get_logger(__name__)


@dataclass(frozen=True)
class Believed:
    """The outcome: a manifest, and who stands behind it."""

    manifest: StateManifest
    supporters: tuple[Donor, ...]
    dropped: Mapping[str, str]
    """Members that claim something else, and in what they differ."""

    def spare(self, donors: Sequence[Donor]) -> list[Donor]:
        """Those of some donors that did not say yet what they claim, or would not."""
        return [d for d in donors if d not in self.supporters and d.member_id not in self.dropped]


@dataclass(frozen=True)
class Poll:
    """What donors answered about one round."""

    claims: Mapping[Donor, StateManifest]
    refusals: Mapping[Donor, Refusal]


def elect(claims: Mapping[Donor, StateManifest]) -> Believed:
    """Believe the largest group of donors that claim the same; of equal groups, that of the donor that comes first."""
    groups: dict[str, list[Donor]] = {}
    for donor, manifest in claims.items():
        groups.setdefault(manifest.claim, []).append(donor)
    largest = max(groups.values(), key=len)
    manifest = claims[largest[0]]
    dropped = {d.member_id: manifest.difference(claims[d]) for d in claims if d not in largest}
    return Believed(manifest, tuple(largest), dropped)


def ask_all(donors: Sequence[Donor], voters: int, ask: Callable[[Donor], StateManifest | Refusal]) -> Poll:
    """Ask donors at once until `voters` of them made a claim, or so many agree that the rest changes nothing.

    A donor that refuses is replaced by the next one. Claims are in the order of the donors.
    """
    answers: queue.SimpleQueue[tuple[Donor, StateManifest | Refusal]] = queue.SimpleQueue()
    waiting, claims, refusals = list(donors), dict[Donor, StateManifest](), dict[Donor, Refusal]()
    asked = 0
    while not _is_decided(claims, min(voters, len(donors))):
        while waiting and asked - len(refusals) < voters:
            donor = waiting.pop(0)
            target: Callable[[Donor], None] = lambda donor: _put_answer(donor, ask, answers)  # noqa: E731
            threading.Thread(target=target, args=(donor,), name="recovery-poll", daemon=True).start()
            asked += 1
        if asked == len(claims) + len(refusals):
            break
        donor, answer = answers.get()
        if isinstance(answer, Refusal):
            refusals[donor] = answer
        else:
            claims[donor] = answer
    return Poll({donor: claims[donor] for donor in donors if donor in claims}, refusals)


def _put_answer(
    donor: Donor,
    ask: Callable[[Donor], StateManifest | Refusal],
    answers: queue.SimpleQueue[tuple[Donor, StateManifest | Refusal]],
) -> None:
    answer: StateManifest | Refusal = Refusal("this node failed to ask it")
    try:
        answer = ask(donor)
    finally:
        answers.put((donor, answer))


def _is_decided(claims: Mapping[Donor, StateManifest], voters: int) -> bool:
    """Whether more than half of the voters claim the same."""
    said = [manifest.claim for manifest in claims.values()]
    return any(2 * said.count(claim) > voters for claim in set(said))


def believe_newest(donors: Sequence[Donor], voters: int, inquiry: Inquiry, first_of: Callable[[int], int]) -> Believed:
    """Choose a round and what to believe of it. Raises RecoveryFailed where no donor serves.

    `first_of`: by round, the number of the first chunk that is needed of it.
    One donor's newest round is the round that the others are asked for. Where no other holds that round, the next
    donor names one: a round that only one donor knows of is taken only if there is no other.
    """
    problems: dict[str, str] = {}
    alone: list[Believed] = []
    firsts = list(donors)
    while firsts and len(alone) < voters:
        first = firsts.pop(0)
        try:
            round = inquiry.round_of(first)
        except RecoveryFailed as error:
            problems[str(first)] = str(error)
            continue
        others = [donor for donor in donors if donor != first and str(donor) not in problems]
        ask: Callable[[Donor], StateManifest | Refusal] = lambda donor, round=round: inquiry.manifest_of(  # noqa: E731
            donor, round, first_of(round)
        )
        poll = ask_all([first, *others], voters, ask)
        problems |= {str(d): r.why for d, r in poll.refusals.items() if not r.is_other_round or d == first}
        elsewhere = [donor for donor, refusal in poll.refusals.items() if refusal.is_other_round]
        firsts = [donor for donor in firsts if donor in elsewhere]
        if poll.claims:
            alone.append(elect(poll.claims))
        if len(poll.claims) > 1:
            return _announced(alone[-1])
    if not alone:
        raise no_donor(problems)
    return alone[0]


def believe_round(donors: Sequence[Donor], voters: int, inquiry: Inquiry, round: int, first: int = 0) -> Believed:
    """Choose what to believe of one round from a chunk on. Raises RecoveryFailed where no donor serves it."""
    poll = ask_all(donors, voters, lambda donor: inquiry.manifest_of(donor, round, first))
    if not poll.claims:
        raise no_donor({str(donor): refusal.why for donor, refusal in poll.refusals.items()})
    return _announced(elect(poll.claims))


def _announced(believed: Believed) -> Believed:
    for member_id, why in believed.dropped.items():
        fields = {"donor": member_id, "round": believed.manifest.round, "why": why}
        _log.warning("donor disagrees with the others; dropped", extra={"fields": fields})
    return believed


def no_donor_in(view: View) -> RecoveryFailed:
    """The error that says why no member serves its state: all are gone, or the living ones have none yet."""
    agreed, newest = pending(view), view.committed or view.opening
    living = [m for m in (view.alive if newest is None else newest.members) if m in view.alive]
    names = ", ".join(sorted(map(node_id_of_member, living)))
    if agreed is not None and agreed.member in view.alive:
        why = f"{node_id_of_member(agreed.member)} still takes over the checkpoint of step {agreed.step}"
    elif not living:
        why = "no member is alive"
    elif view.committed is None:
        why = f"the first state is not committed yet; alive: {names}"
    else:
        why = f"these members serve none yet: {names}"
    return RecoveryFailed(f"no state to join with yet: {why}")


def no_donor(problems: Mapping[str, str]) -> RecoveryFailed:
    """The error that names every donor and what is wrong with it."""
    named = "; ".join(f"{donor}: {why}" for donor, why in problems.items())
    return RecoveryFailed("no member could serve its state: " + (named or "no member is alive"))
