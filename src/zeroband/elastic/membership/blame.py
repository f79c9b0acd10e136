"""Who is at fault when a round fails although no member was lost: pure rules over the members' reports.

One member's report against another proves nothing: one of the two lies, or the link between them is bad. Such pairs
are the edges of a graph. While fewer than half of the members lie, a member with more edges than there can be liars is
at fault. A pair that proves neither member at fault is kept apart: the two sit out alternate rounds, so that no honest
member is ever excluded on another's report.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from zeroband.elastic.membership.keys import is_of_key
from zeroband.elastic.membership.records import Attempt, Blame, Evidence, RoundPlan, Verdict

TOLERATED_RETRIES = 2
"""Times that a round is reopened with the same members before a missing message has consequences: new connections and
longer waits help against a bad network."""

_APART_ROUNDS, _OUT_ROUNDS = 8, 64
"""Rounds for which two members are kept apart after a message between them got lost, and for which an exclusion is
remembered: the network may have healed."""

NO_VOTE = "members do not vote, although most have"
"""Reason of a failure when votes do not arrive."""

REFUSED = "the plan does not follow from the members' records"
"""Reason of a failure when a member refused the plan. Nothing was sent then, so missing messages prove nothing."""

_REFUSAL = "refused by "

_MAX_BLAMES = 64
_TWICE = 2

Pair = frozenset[str]


def node_of(member: str) -> str:
    """The node of a member, whose id names it before the `#`."""
    return member.partition("#")[0]


def refusal(member: str) -> str:
    """What a member votes for that holds a result which its audit contradicts: each for something else."""
    return f"{_REFUSAL}{member}"


def is_refusal(vote: str) -> bool:
    """Whether a vote refuses the result."""
    return vote.startswith(_REFUSAL)


def _is_one_node(member: str, other: str) -> bool:
    return node_of(member) == node_of(other) or is_of_key(member, other)


def judge(
    plan: RoundPlan,
    votes: Mapping[str, str],
    said: Mapping[str, Evidence],
    silent: Collection[str] = (),
    failed: str = "",
) -> tuple[Blame, ...]:
    """What follows from the evidence on a failed plan.

    `silent`: members that live and gave none in time. `failed`: why it failed, which begins with who said so. In
    whatever order words come: all members come to the same.
    """
    votes, said, silent = dict(sorted(votes.items())), dict(sorted(said.items())), sorted(silent)
    for_results = {member: vote for member, vote in votes.items() if not is_refusal(vote)}
    lies = _earlier(plan, is_lie=True) | _part_conflicts(plan, said) | _rejections(said)
    wrong, audited = _vote_conflicts(plan, for_results, said), _audit_conflicts(plan, votes, said)
    found = _conclude(plan, {**lies, **wrong[1], **audited[1]}, is_lie=True, proven={**wrong[0], **audited[0]})
    gaps = _earlier(plan, is_lie=False) | _gaps(plan, said, silent, failed)
    gaps |= _missing_votes(plan, votes, failed) | _unattributed_differences(plan, for_results, said)
    liars = {m for blame in found for m in blame.members if len(blame.members) == 1}
    rest = {pair: why for pair, why in gaps.items() if not pair & liars}
    return (*found, *_conclude(plan, rest, is_lie=False, proven={}))


def merge_blames(before: Sequence[Blame], found: Iterable[Blame]) -> tuple[Blame, ...]:
    """Findings behind earlier ones, without those that are known: of the same nodes, with the same consequence."""

    def key(blame: Blame) -> object:
        return frozenset(map(node_of, blame.members)), blame.is_lie, blame.consequence

    known = {key(blame) for blame in before if blame.consequence == "apart"}
    return (*before, *(blame for blame in found if key(blame) not in known))


def active_blames(plan: RoundPlan | None, round: int) -> tuple[Blame, ...]:
    """Earlier findings that still count for a plan of this round."""
    blames = () if plan is None else plan.blames
    lasts = {"named": 0, "apart": _APART_ROUNDS, "out": _OUT_ROUNDS}
    counts = [b for b in blames if b.consequence != "named" and (b.is_lie or round - b.round < lasts[b.consequence])]
    return tuple(counts[-_MAX_BLAMES:])


def barring_blame(blames: Iterable[Blame], member: str) -> Blame | None:
    """Why a member's node, by its id or its key, does not come back: it was put out for a lie, or more than once.

    None: it may.
    """
    of_node = [b for b in blames if b.consequence == "out" and any(_is_one_node(member, m) for m in b.members)]
    return of_node[-1] if any(b.is_lie for b in of_node) or len(of_node) >= _TWICE else None


def is_put_out(blames: Collection[Blame], member: str) -> bool:
    """Whether a member takes part in no round: it was put out, or its node was and does not come back."""
    return (
        any(b.consequence == "out" and member in b.members for b in blames) or barring_blame(blames, member) is not None
    )


def sitting_out(members: Sequence[str], blames: Iterable[Blame], turn: int, may_wait: frozenset[str]) -> frozenset[str]:
    """Members that go without a round so that no two that are kept apart take part in it.

    Who stands in the most pairs waits; of two alike one does at each `turn`. Who cannot wait, because it leaves or
    joins, takes part where the other one can.
    """
    by_node = {node_of(member): member for member in members}
    apart = [{by_node.get(node_of(m), "") for m in b.members} for b in blames if b.consequence == "apart"]
    pairs, out = [pair for pair in apart if len(pair) == 2 and "" not in pair], set[str]()
    while pairs:
        count = Counter(member for pair in pairs for member in pair)
        able = may_wait & count.keys() or count.keys()
        first = sorted(member for member in able if count[member] == max(count[m] for m in able))
        out.add(first[turn % len(first)])
        pairs = [pair for pair in pairs if not pair & out]
    return frozenset(out)


def _conclude(
    plan: RoundPlan, pairs: Mapping[Pair, str], *, is_lie: bool, proven: Mapping[str, str]
) -> tuple[Blame, ...]:
    """Whom pairs of members that contradict each other put at fault; and the pairs of which nothing is known."""
    everybody = (*plan.members, *plan.late)
    most = (len(everybody) - 1) // 2
    against: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        for member in pair:
            against[member].append(next(iter(pair - {member})))
    at_fault = {**proven}
    for member in everybody:
        if member not in at_fault and len(against[member]) > most:
            others = sorted(against[member])
            at_fault[member] = f"{', '.join(others)}: {pairs[frozenset((member, others[0]))]}"
    if len(at_fault) > most:
        at_fault = {}  # as many do not lie: who does cannot be told
    acts = is_lie or plan.retries >= TOLERATED_RETRIES
    blames = [Blame((m,), why, is_lie, "out" if acts else "named", plan.round) for m, why in at_fault.items()]
    for pair, why in pairs.items():
        if not pair & at_fault.keys():
            blames.append(Blame(tuple(sorted(pair)), why, is_lie, "apart" if acts else "named", plan.round))
    return tuple(blames)


def _earlier(plan: RoundPlan, *, is_lie: bool) -> dict[Pair, str]:
    """The pairs that are kept apart, as far as both are there: one of them sits out."""
    members = {node_of(member): member for member in (*plan.members, *plan.late)}
    pairs = dict[Pair, str]()
    for blame in active_blames(plan, plan.round):
        if blame.consequence == "apart" and blame.is_lie == is_lie:
            now = frozenset(members[node] for m in blame.members if (node := node_of(m)) in members)
            if len(now) == 2:
                pairs[now] = blame.reason
    return pairs


def _part_conflicts(plan: RoundPlan, said: Mapping[str, Evidence]) -> dict[Pair, str]:
    """Members that hold other bytes of a part than the one that sent it."""
    held = {m: t.held for m, t in said.items() if len(t.held) == len(plan.members)}
    return _contradictions(plan, held, "its part")


def _contradictions(plan: RoundPlan, held: Mapping[str, tuple[str, ...]], what: str) -> dict[Pair, str]:
    """Members that hold other hashes of what came from a member than that one does, in the order of the members."""
    pairs = dict[Pair, str]()
    for place, sender in enumerate(plan.members):
        sent = held[sender][place] if sender in held else ""
        for member, hashes in held.items():
            if member != sender and sent and hashes[place] != sent:
                got = hashes[place][:12] or "nothing"
                pairs[frozenset((sender, member))] = (
                    f"{sender} testifies that {what} has the hash {sent[:12]}, {member} that {got} came"
                )
    return pairs


def _audit_conflicts(
    plan: RoundPlan, votes: Mapping[str, str], said: Mapping[str, Evidence]
) -> tuple[dict[str, str], dict[Pair, str]]:
    """Members whose vote does not follow from an audit, and pairs of members whose words on it contradict each other.

    An owner whose sum is not that of what was shown stands against all who say so, unless it names a member that showed
    another part than it had sent: one of these two lies. Findings count where all saw the same; else somebody showed
    different members different things, or says so.
    """
    shown = {m: t.shown for m, t in said.items() if m in plan.members and len(t.shown) == len(plan.members)}
    wrong, pairs = dict[str, str](), _contradictions(plan, shown, "what it showed")
    voters = [m for m in plan.members if m in votes and m in said]
    if 2 * len(shown) > len(plan.members):
        wrong = {m: f"{m} voted, and does not testify what it was shown" for m in voters if m not in shown}
    for member in voters:
        if is_refusal(votes[member]) and not (said[member].wrong or said[member].denied):
            wrong[member] = f"{member} refuses the result, and says no reason"
    for owner in shown if len(set(shown.values())) == 1 else ():
        denied = [member for member in said[owner].denied if member in plan.members and member != owner]
        why = f"{owner} testifies that {{}} showed another contribution than it had sent"
        pairs |= {frozenset((owner, member)): why.format(member) for member in denied if member in shown}
        accusers = [] if denied else [member for member in shown if owner in said[member].wrong and member != owner]
        pairs |= {
            frozenset((owner, member)): f"{member} testifies that the part of {owner} is not the sum of what was sent"
            for member in accusers
        }
    return wrong, pairs


def _rejections(said: Mapping[str, Evidence]) -> dict[Pair, str]:
    return {
        frozenset((sender, member)): f"{member} testifies that {sender} sent what cannot be taken"
        for member, evidence in said.items()
        for sender in evidence.refused
        if sender != member
    }


def _vote_conflicts(
    plan: RoundPlan, votes: Mapping[str, str], said: Mapping[str, Evidence]
) -> tuple[dict[str, str], dict[Pair, str]]:
    """Members whose vote does not follow from the parts that they hold, and pairs of which one's does not.

    What the same bytes make is the same everywhere, so a majority that holds them knows.
    """
    wrong, pairs = dict[str, str](), dict[Pair, str]()
    voters = [m for m in plan.members if m in votes and m in said]
    holding = [m for m in voters if len(said[m].held) == len(plan.members)]
    if 2 * len(holding) > len(plan.members):
        silent = [m for m in voters if m not in holding]
        wrong = {m: f"{m} voted, and does not testify what it holds" for m in silent}
    alike: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for member in holding:
        alike[said[member].held][votes[member]].append(member)
    for by_vote in alike.values():
        largest = max(by_vote.values(), key=len)
        others = [m for group in by_vote.values() if group is not largest for m in group]
        if 2 * len(largest) > len(plan.members):
            wrong |= {m: f"{m} holds what {len(largest)} others hold, and votes for another result" for m in others}
        else:
            why = "hold the same parts, and vote for different results"
            pairs |= {frozenset((m, o)): f"{o} and {m} {why}" for m in others for o in largest}
    return wrong, pairs


def _unattributed_differences(
    plan: RoundPlan, votes: Mapping[str, str], said: Mapping[str, Evidence]
) -> dict[Pair, str]:
    """Pairs of members with different results where no member knows which sender its parts came from.

    Gloo's transport may have damaged the minority's result, so each pair counts as a gap.
    """
    voted: dict[str, list[str]] = defaultdict(list)
    for member in plan.members:
        if member in votes:
            voted[votes[member]].append(member)
    if any(evidence.held for evidence in said.values()) or len(voted) < 2:
        return {}
    largest = max(voted.values(), key=len)
    others = [m for group in voted.values() if group is not largest for m in group]
    return {frozenset((m, o)): f"{m} and {o} got different results" for m in others for o in largest}


def _missing_votes(plan: RoundPlan, votes: Mapping[str, str], failed: str) -> dict[Pair, str]:
    if NO_VOTE not in failed:
        return {}
    missing = [member for member in plan.members if member not in votes]
    return {frozenset((m, voter)): f"{m} does not vote" for m in missing for voter in votes if voter in plan.members}


def _gaps(plan: RoundPlan, said: Mapping[str, Evidence], silent: Collection[str], failed: str) -> dict[Pair, str]:
    """Pairs of members in which one lacks a message that the other could have sent.

    A member can always send its contribution. It owes a mean only if it lacks no contribution itself.
    """
    pairs = dict[Pair, str]()
    if REFUSED in failed:
        return pairs
    complete = [m for m, evidence in said.items() if evidence.held]
    for member, evidence in said.items():
        owing = [m for m in evidence.lacks_mean if m in said and not (said[m].lacks or said[m].refused)]
        pairs |= {frozenset((member, m)): f"{m} sent {member} no contribution" for m in evidence.lacks}
        pairs |= {frozenset((member, m)): f"{m} sent {member} no mean, and lacks nothing for it" for m in owing}
        ended_it = failed.startswith(f"{member}: ") and 2 * len(complete) > len(plan.members)
        if ended_it and evidence == Evidence():
            pairs |= {frozenset((member, m)): f"{member} ended the round, and says no reason" for m in complete}
    for member in silent:
        pairs |= {frozenset((member, m)): f"{member} does not testify" for m in said if m != member}
    return {pair: why for pair, why in pairs.items() if pair <= {*plan.members} and len(pair) == 2}


@dataclass(frozen=True)
class Findings:
    """What is known of earlier attempts when a plan is proposed; as its fields of these names."""

    blames: tuple[Blame, ...] = ()
    retries: int = 0
    is_flat: bool = False
    silent: tuple[str, ...] = ()


def findings_after(before: Findings, attempt: Attempt, round: int, silent: Sequence[str] | None) -> Findings:
    """What is known for a plan of `round` that follows on this attempt, of which `before` was known.

    `silent`: members that live and did not testify on its failure in time. None: a member of it was lost, or it was of
    another round, so that no member is at fault.
    """
    plan = replace(attempt.plan, blames=before.blames, retries=before.retries)
    known = active_blames(plan, round)
    if plan.round != round:
        return Findings(known)
    if silent is None:
        return Findings(known, before.retries)
    found = judge(plan, attempt.votes, attempt.said, silent, attempt.failed) if attempt.said else ()
    is_flat = not plan.is_flat and (_is_flat_next(attempt) or before.retries + 1 >= TOLERATED_RETRIES)
    return Findings(merge_blames(known, found), before.retries + 1, is_flat, tuple(silent))


def _is_flat_next(attempt: Attempt) -> bool:
    """Whether no part should pass through others in the next attempt, so that it shows whose differ.

    From the second retry on, every second attempt is flat, so that it shows who sends nothing; the others are planned
    by the network, as some members may reach each other only that way.
    """
    return len({attempt.votes[m] for m in attempt.plan.members if m in attempt.votes}) > 1


def findings_before(plan: RoundPlan, past: Sequence[Attempt], committed: Verdict | None) -> Findings:
    """What is known for a plan, by the attempts since the newest verdict.

    `past`: the oldest first, each of which the next one follows on; those that the store has lost are as if they had
    not been. What an attempt itself says of the ones before it does not count.
    """
    first = past[0].plan if past else plan
    found = Findings() if committed is None else Findings(active_blames(committed.plan, first.round))
    for attempt, following in pairwise([*past, Attempt(plan)]):
        silent = _claimed_silent(attempt, following.plan, found.retries)
        found = findings_after(found, attempt, following.plan.round, silent)
    return found


def _claimed_silent(attempt: Attempt, following: RoundPlan, retries: int) -> tuple[str, ...] | None:
    """Who was silent on an attempt by the word of the plan that follows on it; None: by that word one was lost."""
    says_lost = following.retries == retries and not _keeps_all_members(attempt.plan, following)
    if says_lost or not attempt.failed:
        return None
    return tuple(m for m in following.silent if m in attempt.plan.members and m not in attempt.said)


def _keeps_all_members(before: RoundPlan, plan: RoundPlan) -> bool:
    """Whether a plan goes without no member of the one before it."""
    return {*before.members} <= {*plan.members, *plan.late}


def objection(plan: RoundPlan, past: Sequence[Attempt], committed: Verdict | None) -> str | None:
    """Say what a plan says of the ones before it that does not follow from them; None: all of it follows."""
    return next(_objections(plan, past, committed), None)


def _objections(plan: RoundPlan, past: Sequence[Attempt], committed: Verdict | None) -> Iterator[str]:
    if past:
        yield from _predecessor_objections(plan, past[-1])
    found = findings_before(plan, past, committed)
    yield from (f"it says that {_describe(b)}; no signed words say so" for b in plan.blames if b not in found.blames)
    yield from (f"it leaves out that {_describe(b)}" for b in found.blames if b not in plan.blames)
    for name in (part.name for part in fields(found)):
        said, expected = getattr(plan, name), getattr(found, name)
        if said != expected:
            yield f"its {name} is {said!s:.80}, and by the attempts before it {expected!s:.80}"
    yield from (f"it lists {m}, which was put out" for m in plan.members if is_put_out(found.blames, m))


def _predecessor_objections(plan: RoundPlan, last: Attempt) -> Iterator[str]:
    """Why a plan may not follow on the one that it names."""
    before = last.plan
    if plan.version != before.version + 1:
        yield f"it is version {plan.version} and follows on version {before.version}"
    if plan.round == before.round and not last.failed and _keeps_all_members(before, plan):
        yield f"it takes the place of version {before.version}, which neither failed nor lost a member"


def _describe(found: Blame) -> str:
    return f"{' and '.join(found.members)} ({found.consequence}): {found.reason:.200}"
