"""Who is at fault when a round fails although no member was lost: pure rules over the members' evidence.

One member's report against another proves nothing: either may lie, or the link between them is bad. Such pairs are the
edges of a graph. While fewer than half of the members lie, a member with more edges than there can be liars is at
fault. An undecided pair is kept apart: the two sit out alternate rounds, so no honest member is ever excluded on
another's report.

A plan's proposer computes `findings_after` the failed plan. Every other member recomputes it with `findings_before`
from what the members of each attempt since the newest verdict signed (`Attempt`), and refuses a plan that says anything
else (`objection`). Two things are the proposer's word: that a member was lost, so that none is judged, and who was
silent. Both are bounded: a proposer that claims a loss must go on without a member, and members with evidence are not
silent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from zeroband.elastic.membership.keys import is_of_key
from zeroband.elastic.membership.records import Attempt, Blame, Evidence, RoundPlan, Verdict
from zeroband.observe.view import node_id_of_member

TOLERATED_RETRIES = 2
"""Retries with the same members before a missing message has consequences: new connections and longer timeouts often
fix a bad network."""

_APART_ROUNDS, _OUT_ROUNDS = 8, 64
"""Rounds for which a pair is kept apart after a lost message, and an exclusion is remembered: networks heal."""

NO_VOTE = "members do not vote, although most have"
"""Failure reason: missing votes."""

REFUSED = "the plan does not follow from the members' records"
"""Failure reason: a member refused the plan. Nothing was sent then, so missing messages prove nothing."""

_REFUSAL = "refused by "

_MAX_BLAMES = 64

Pair = frozenset[str]


def refusal(member: str) -> str:
    """Return the vote of a member whose audit contradicts the result; unique per member, so refusals never agree."""
    return f"{_REFUSAL}{member}"


def is_refusal(vote: str) -> bool:
    """Whether a vote refuses the result."""
    return vote.startswith(_REFUSAL)


def _is_one_node(member: str, other: str) -> bool:
    return node_id_of_member(member) == node_id_of_member(other) or is_of_key(member, other)


def judge(
    plan: RoundPlan,
    votes: Mapping[str, str],
    reports: Mapping[str, Evidence],
    silent: Collection[str] = (),
    failed: str = "",
) -> tuple[Blame, ...]:
    """Return the conclusions from the evidence on a failed plan.

    `silent`: living members without evidence. `failed`: the reason, prefixed by the reporting member.
    """
    # Sorted, so that the result does not depend on the order of arrival: all members must conclude the same.
    votes, reports, silent = dict(sorted(votes.items())), dict(sorted(reports.items())), sorted(silent)
    for_results = {member: vote for member, vote in votes.items() if not is_refusal(vote)}
    lies = _earlier(plan, is_lie=True) | _part_conflicts(plan, reports) | _rejections(reports)
    wrong, audited = _vote_conflicts(plan, for_results, reports), _audit_conflicts(plan, votes, reports)
    found = _conclude(plan, {**lies, **wrong[1], **audited[1]}, is_lie=True, proven={**wrong[0], **audited[0]})
    gaps = _earlier(plan, is_lie=False) | _gaps(plan, reports, silent, failed)
    gaps |= _missing_votes(plan, votes, failed) | _unattributed_differences(plan, for_results, reports)
    liars = {m for blame in found for m in blame.members if len(blame.members) == 1}
    rest = {pair: why for pair, why in gaps.items() if not pair & liars}
    return (*found, *_conclude(plan, rest, is_lie=False, proven={}))


def merge_blames(before: Sequence[Blame], found: Iterable[Blame]) -> tuple[Blame, ...]:
    """Append new findings to earlier ones, except for pairs that are already kept apart."""

    def key(blame: Blame) -> object:
        return frozenset(map(node_id_of_member, blame.members)), blame.is_lie, blame.consequence

    known = {key(blame) for blame in before if blame.consequence == "apart"}
    return (*before, *(blame for blame in found if key(blame) not in known))


def active_blames(plan: RoundPlan | None, round: int) -> tuple[Blame, ...]:
    """Return a plan's findings that still apply in this round."""
    blames = () if plan is None else plan.blames
    lasts = {"named": 0, "apart": _APART_ROUNDS, "out": _OUT_ROUNDS}
    counts = [b for b in blames if b.consequence != "named" and (b.is_lie or round - b.round < lasts[b.consequence])]
    return tuple(counts[-_MAX_BLAMES:])


def barring_blame(blames: Iterable[Blame], member: str) -> Blame | None:
    """Return the finding that bars a member's node, by id or key: it lied, or was excluded twice."""
    of_node = [b for b in blames if b.consequence == "out" and any(_is_one_node(member, m) for m in b.members)]
    return of_node[-1] if any(b.is_lie for b in of_node) or len(of_node) > 1 else None


def is_put_out(blames: Collection[Blame], member: str) -> bool:
    """Whether a member is excluded, or its node barred."""
    return (
        any(b.consequence == "out" and member in b.members for b in blames) or barring_blame(blames, member) is not None
    )


def sitting_out(members: Sequence[str], blames: Iterable[Blame], turn: int, may_wait: frozenset[str]) -> frozenset[str]:
    """Choose members to sit out so that no pair that is kept apart takes part together.

    Members in the most pairs sit out first; equals alternate by `turn`. Members not in `may_wait`, which join or leave,
    sit out only if no other member can.
    """
    by_node = {node_id_of_member(member): member for member in members}
    apart = [{by_node.get(node_id_of_member(m), "") for m in b.members} for b in blames if b.consequence == "apart"]
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
    """Derive the members at fault from the graph of pairs, and return them with the undecided pairs."""
    most = (len(plan.listed) - 1) // 2
    against: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        for member in pair:
            against[member].append(next(iter(pair - {member})))
    at_fault = {**proven}
    for member in plan.listed:
        if member not in at_fault and len(against[member]) > most:
            others = sorted(against[member])
            at_fault[member] = f"{', '.join(others)}: {pairs[frozenset((member, others[0]))]}"
    if len(at_fault) > most:
        at_fault = {}  # more than half of the members cannot all be liars, so nothing is proven
    acts = is_lie or plan.retries >= TOLERATED_RETRIES
    blames = [Blame((m,), why, is_lie, "out" if acts else "named", plan.round) for m, why in at_fault.items()]
    for pair, why in pairs.items():
        if not pair & at_fault.keys():
            blames.append(Blame(tuple(sorted(pair)), why, is_lie, "apart" if acts else "named", plan.round))
    return tuple(blames)


def _earlier(plan: RoundPlan, *, is_lie: bool) -> dict[Pair, str]:
    """Return the pairs that are already kept apart and both present."""
    members = {node_id_of_member(member): member for member in plan.listed}
    pairs = dict[Pair, str]()
    for blame in active_blames(plan, plan.round):
        if blame.consequence == "apart" and blame.is_lie == is_lie:
            now = frozenset(members[node] for m in blame.members if (node := node_id_of_member(m)) in members)
            if len(now) == 2:
                pairs[now] = blame.reason
    return pairs


def _part_conflicts(plan: RoundPlan, reports: Mapping[str, Evidence]) -> dict[Pair, str]:
    """Pairs that hold different bytes of a part than its sender."""
    held = {m: t.held for m, t in reports.items() if len(t.held) == len(plan.members)}
    return _contradictions(plan, held, "its part")


def _contradictions(plan: RoundPlan, held: Mapping[str, tuple[str, ...]], what: str) -> dict[Pair, str]:
    """Pairs of a sender and a member whose hashes of the sender's data differ. Hashes are in member order."""
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
    plan: RoundPlan, votes: Mapping[str, str], reports: Mapping[str, Evidence]
) -> tuple[dict[str, str], dict[Pair, str]]:
    """Return members whose vote does not follow from the audit, and pairs whose statements on it conflict.

    An owner with a wrong sum is paired with all its accusers, unless it names a member that showed a different part
    than it had sent; then those two are paired. Accusations count only if all members saw the same data: otherwise
    somebody showed different members different data, or claims so.
    """
    shown = {m: t.shown for m, t in reports.items() if m in plan.members and len(t.shown) == len(plan.members)}
    wrong, pairs = dict[str, str](), _contradictions(plan, shown, "what it showed")
    voters = [m for m in plan.members if m in votes and m in reports]
    if 2 * len(shown) > len(plan.members):
        wrong = {m: f"{m} voted, and does not testify what it was shown" for m in voters if m not in shown}
    for member in voters:
        if is_refusal(votes[member]) and not (reports[member].wrong or reports[member].denied):
            wrong[member] = f"{member} refuses the result, and says no reason"
    for owner in shown if len(set(shown.values())) == 1 else ():
        denied = [member for member in reports[owner].denied if member in plan.members and member != owner]
        why = f"{owner} testifies that {{}} showed another contribution than it had sent"
        pairs |= {frozenset((owner, member)): why.format(member) for member in denied if member in shown}
        accusers = [] if denied else [member for member in shown if owner in reports[member].wrong and member != owner]
        pairs |= {
            frozenset((owner, member)): f"{member} testifies that the part of {owner} is not the sum of what was sent"
            for member in accusers
        }
    return wrong, pairs


def _rejections(reports: Mapping[str, Evidence]) -> dict[Pair, str]:
    return {
        frozenset((sender, member)): f"{member} testifies that {sender} sent what cannot be taken"
        for member, evidence in reports.items()
        for sender in evidence.refused
        if sender != member
    }


def _vote_conflicts(
    plan: RoundPlan, votes: Mapping[str, str], reports: Mapping[str, Evidence]
) -> tuple[dict[str, str], dict[Pair, str]]:
    """Return members whose vote does not follow from the parts that they hold, and pairs of which one is such a member.

    Decoding is deterministic: members with equal parts must vote alike, and a majority proves the others wrong.
    """
    wrong, pairs = dict[str, str](), dict[Pair, str]()
    voters = [m for m in plan.members if m in votes and m in reports]
    holding = [m for m in voters if len(reports[m].held) == len(plan.members)]
    if 2 * len(holding) > len(plan.members):
        silent = [m for m in voters if m not in holding]
        wrong = {m: f"{m} voted, and does not testify what it holds" for m in silent}
    alike: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for member in holding:
        alike[reports[member].held][votes[member]].append(member)
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
    plan: RoundPlan, votes: Mapping[str, str], reports: Mapping[str, Evidence]
) -> dict[Pair, str]:
    """Pairs of members with different results when the sender of a part is unknown, as with gloo.

    The network may have corrupted the minority's result, so each pair counts as a gap.
    """
    voted: dict[str, list[str]] = defaultdict(list)
    for member in plan.members:
        if member in votes:
            voted[votes[member]].append(member)
    if any(evidence.held for evidence in reports.values()) or len(voted) < 2:
        return {}
    largest = max(voted.values(), key=len)
    others = [m for group in voted.values() if group is not largest for m in group]
    return {frozenset((m, o)): f"{m} and {o} got different results" for m in others for o in largest}


def _missing_votes(plan: RoundPlan, votes: Mapping[str, str], failed: str) -> dict[Pair, str]:
    if NO_VOTE not in failed:
        return {}
    missing = [member for member in plan.members if member not in votes]
    return {frozenset((m, voter)): f"{m} does not vote" for m in missing for voter in votes if voter in plan.members}


def _gaps(plan: RoundPlan, reports: Mapping[str, Evidence], silent: Collection[str], failed: str) -> dict[Pair, str]:
    """Pairs of which one lacks a message that the other could have sent.

    A member can always send its contribution, but its part of the mean only if it lacks no contribution itself.
    """
    pairs = dict[Pair, str]()
    if REFUSED in failed:
        return pairs
    complete = [m for m, evidence in reports.items() if evidence.held]
    for member, evidence in reports.items():
        owing = [m for m in evidence.lacks_mean if m in reports and not (reports[m].lacks or reports[m].refused)]
        pairs |= {frozenset((member, m)): f"{m} sent {member} no contribution" for m in evidence.lacks}
        pairs |= {frozenset((member, m)): f"{m} sent {member} no mean, and lacks nothing for it" for m in owing}
        ended_it = failed.startswith(f"{member}: ") and 2 * len(complete) > len(plan.members)
        if ended_it and evidence == Evidence():
            pairs |= {frozenset((member, m)): f"{member} ended the round, and says no reason" for m in complete}
    for member in silent:
        pairs |= {frozenset((member, m)): f"{member} does not testify" for m in reports if m != member}
    return {pair: why for pair, why in pairs.items() if pair <= {*plan.members} and len(pair) == 2}


@dataclass(frozen=True)
class Findings:
    """Conclusions from earlier attempts, named like the plan's fields that hold them."""

    blames: tuple[Blame, ...] = ()
    retries: int = 0
    is_flat: bool = False
    silent: tuple[str, ...] = ()


def findings_after(before: Findings, attempt: Attempt, round: int, silent: Sequence[str] | None) -> Findings:
    """Return the findings for a plan of `round` that follows this attempt, given those before it.

    `silent`: living members without evidence on its failure. None: a member was lost, so no member is judged.
    """
    plan = replace(attempt.plan, blames=before.blames, retries=before.retries)
    known = active_blames(plan, round)
    if plan.round != round:
        return Findings(known)
    if silent is None:
        return Findings(known, before.retries)
    found = judge(plan, attempt.votes, attempt.evidence, silent, attempt.failed) if attempt.evidence else ()
    # A flat (all-to-all) attempt shows who sends what. It alternates with attempts planned by the network, since some
    # members may reach each other only through others.
    results_differ = len({attempt.votes[m] for m in attempt.plan.members if m in attempt.votes}) > 1
    is_flat = not plan.is_flat and (results_differ or before.retries + 1 >= TOLERATED_RETRIES)
    return Findings(merge_blames(known, found), before.retries + 1, is_flat, tuple(silent))


def findings_before(plan: RoundPlan, past: Sequence[Attempt], committed: Verdict | None) -> Findings:
    """Recompute the findings for a plan from the attempts since the newest verdict.

    `past`: attempts, oldest first, each followed by the next; attempts that the store lost are skipped. The findings
    that an attempt itself states are not trusted.
    """
    first = past[0].plan if past else plan
    found = Findings() if committed is None else Findings(active_blames(committed.plan, first.round))
    for attempt, following in pairwise([*past, Attempt(plan)]):
        silent = _claimed_silent(attempt, following.plan, found.retries)
        found = findings_after(found, attempt, following.plan.round, silent)
    return found


def _claimed_silent(attempt: Attempt, following: RoundPlan, retries: int) -> tuple[str, ...] | None:
    """Return who was silent on an attempt according to the next plan; None: according to it, a member was lost."""
    says_lost = following.retries == retries and not _keeps_all_members(attempt.plan, following)
    if says_lost or not attempt.failed:
        return None
    return tuple(m for m in following.silent if m in attempt.plan.members and m not in attempt.evidence)


def _keeps_all_members(before: RoundPlan, plan: RoundPlan) -> bool:
    """Whether all members of one plan are members of or late for the next."""
    return {*before.members} <= {*plan.listed}


def objection(plan: RoundPlan, past: Sequence[Attempt], committed: Verdict | None) -> str | None:
    """Return the first statement of a plan about its predecessors that does not follow from them; None: all follow."""
    return next(_objections(plan, past, committed), None)


def _objections(plan: RoundPlan, past: Sequence[Attempt], committed: Verdict | None) -> Iterator[str]:
    if past:
        yield from _predecessor_objections(plan, past[-1])
    found = findings_before(plan, past, committed)
    yield from (
        f"it says that {_describe(b)}; no signed evidence supports that" for b in plan.blames if b not in found.blames
    )
    yield from (f"it leaves out that {_describe(b)}" for b in found.blames if b not in plan.blames)
    for name in (part.name for part in fields(found)):
        actual, expected = getattr(plan, name), getattr(found, name)
        if actual != expected:
            yield f"its {name} is {actual!s:.80}; the attempts before it give {expected!s:.80}"
    yield from (f"it lists {m}, which was excluded" for m in plan.members if is_put_out(found.blames, m))


def _predecessor_objections(plan: RoundPlan, last: Attempt) -> Iterator[str]:
    """Yield reasons why a plan may not follow the one that it names."""
    before = last.plan
    if plan.version != before.version + 1:
        yield f"it has version {plan.version} and follows version {before.version}"
    if plan.round == before.round and not last.failed and _keeps_all_members(before, plan):
        yield f"it replaces version {before.version}, which neither failed nor lost a member"


def _describe(found: Blame) -> str:
    return f"{' and '.join(found.members)} ({found.consequence}): {found.reason:.200}"
