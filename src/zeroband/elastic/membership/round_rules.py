"""Membership rules as pure functions of a view: who takes part in a round, and when its result is committed.

No clock and no store: time is an argument, and the same functions run in production, tests and simulations.

In a round every member announces `Ready`; any member proposes a `RoundPlan` (the store accepts the first); the listed
members reduce and vote for the digest of their result; any member proposes the `Verdict`. Both proposals name the plan
that they build on, so the store refuses the second of two competitors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from zeroband.elastic.membership import blame
from zeroband.elastic.membership.ballots import digest_in, electors
from zeroband.elastic.membership.blame import Findings, findings_after
from zeroband.elastic.membership.progress import RunShape, ledgers_after, valid_claims
from zeroband.elastic.membership.records import (
    BOOTSTRAP_ROUND,
    Attempt,
    Blame,
    Carried,
    Claim,
    Gain,
    LinkRates,
    Ready,
    RoundPlan,
    Verdict,
    View,
    Wait,
)
from zeroband.elastic.membership.resume_rules import is_abandoned, restarts_with
from zeroband.elastic.membership.rings import plan_links
from zeroband.elastic.membership.sites import Groups, LinkSpeeds, SitesRule, group, speakers
from zeroband.elastic.membership.succession import may_commit
from zeroband.elastic.membership.topology import LinkTable, all_to_all_time
from zeroband.elastic.membership.trust import ScoringRule, median_gains, trust_of

_ROUNDING_SLACK = 2.0
"""Rounding may enlarge a value over its member's announcement by at most this factor."""

MIN_GRACE_S = 0.25
"""Shortest wait for late members: about the time for an arrival to become visible to the others."""


@dataclass(frozen=True)
class Rules:
    """A run's settings for opening rounds."""

    min_nodes: int = 1
    """The run waits while fewer nodes can take part."""
    start_nodes: int = 1
    """Number of nodes that the bootstrap round waits for."""
    straggler_deadline_s: float | None = None
    """Seconds after which a quorum continues without late members. None: it waits for all living members."""
    straggler_grace: float | None = None
    """Largest fraction of a round lost to late members, and to slow links if contributions can be carried. None: no
    bound."""
    quorum: float = 0.5
    """Fraction of the weight that must be present before members are left behind."""
    transfer_bytes: int = 0
    """Lower bound on the bytes that a member sends and receives in a round; 0: unknown, no member is left out for its
    link."""
    hidden: float = 0.0
    """Fraction of a phase of inner steps that overlaps a round's transfer."""
    syncs_on_demand: bool = False
    """Members come to the boundary as soon as another one is there, so joiners are waited for like late members."""
    has_several_stores: bool = False
    """A round requires at least half of the last round's electors: the others may have moved to another store."""
    counts_equally: bool = False
    """Nodes count equally, however much each has trained."""
    is_robust: bool = False
    """Members may lie: reported weights are bounded and scaled by trust."""
    scoring: ScoringRule | None = None
    """Which payloads are scored by held-out loss; None: none."""
    sites: SitesRule = "off"
    """How members that share a fast network are grouped."""
    shape: RunShape | None = None
    """Bounds the numbers in the members' records (`limits`); None: no bounds."""

    def straggler_wait_s(self, phase_s: float) -> float:
        """Seconds that a quorum waits for the others after a phase of `phase_s`."""
        grace_s = math.inf if self.straggler_grace is None else max(MIN_GRACE_S, self.straggler_grace * phase_s)
        return min(grace_s, math.inf if self.straggler_deadline_s is None else self.straggler_deadline_s)


@dataclass(frozen=True)
class ElapsedWaits:
    """Which waits have ended, by the asking member's clock."""

    start_is_over: bool = False
    """The bootstrap round waits for no further node."""
    stragglers_are_late: bool = False
    """The round opens without members that are not at the boundary."""
    given_up: frozenset[str] = frozenset()
    """Members whose records have been refused for so long that the round opens without them."""
    phase_s: float = 0.0
    """Seconds from the last verdict until a quorum was at the boundary; 0: unknown."""


@dataclass(frozen=True)
class AttemptFindings:
    """What is known so far about an uncommitted plan."""

    attempt: Attempt
    before: Findings
    """Findings at the time of its proposal."""
    is_over: bool
    """The wait for further evidence has ended."""


Inquiry = Callable[[View], AttemptFindings]
"""Look up what is known about a view's current plan."""


def next_plan(
    view: View,
    round: int,
    rules: Rules,
    waits: ElapsedWaits = ElapsedWaits(),
    links: Callable[[], Mapping[str, LinkRates]] = dict,
    inquiry: Inquiry | None = None,
    claims: Callable[[], Mapping[str, Claim]] = dict,
) -> RoundPlan | Wait:
    """Return the plan to propose for `round`, the current one if it can still finish, or what to wait for.

    `links`: returns the members' measured links; called only for a new plan. `inquiry`: called if the current plan was
    not committed; None: no one is blamed. `claims`: returns joiners' claims; called only if living members are in no
    round.
    """
    current = view.plan
    if not view.is_settling and current is not None and current.round == round and view.can_finish(current):
        return current
    if (blocker := _open_blocker(view, round)) is not None:
        return blocker
    expected = view.committed.members if view.committed is not None else ()
    is_last = all(ready.steps_requested == 0 for ready in view.ready.values())
    claimed = claims_to_deal(view, round, waits, claims)
    joining = tuple(m for m in claimed if m not in view.ready)
    awaited = (*expected, *_awaited_late(view, rules, is_last=is_last))
    awaited = (*awaited, *joining) if is_last or rules.syncs_on_demand else awaited
    is_away = {m: m in view.alive and m not in view.ready and m not in waits.given_up for m in awaited}
    missing = tuple(m for m in awaited if is_away[m])
    if missing and not (waits.stragglers_are_late and not is_last and has_quorum(view, rules)):
        return Wait(f"{len(missing)} of {len(awaited)} members have not reached round {round}", missing)
    found = _findings(view, round, inquiry)
    if isinstance(found, Wait):
        return found
    members = _able_to_reduce(view, expected, found.blames)
    is_founding = round == BOOTSTRAP_ROUND or restarts_with(view, round)
    if (too_few := _too_few_members(members, rules, may_wait=is_founding and not waits.start_is_over)) is not None:
        return too_few
    if not is_founding and (too_few := _too_few_electors(members, view, rules)) is not None:
        return too_few
    rates = links()
    slow, apart, behind = frozenset[str](), frozenset[str](), frozenset[str]()
    if not is_founding:
        slow = _slow_links(_sites_of(members, view, rules, rates), view, rules, waits, rates)
        apart = _kept_apart(members, view, round, rules, found)
        behind = _lagging_with_offer(view, members)
    if _too_few_electors([m for m in members if m not in slow | apart], view, rules) is not None:
        slow = apart = frozenset()
    members = tuple(m for m in members if m not in slow | apart)
    late = tuple(dict.fromkeys([*_late(view, missing, slow | apart | behind, waits), *joining]))
    carried = () if is_last else _carried((slow | behind) - apart, members, late, view)
    kept = tuple((m, claim) for m, claim in sorted(claimed.items()) if m in members or m in joining)
    return _build_plan(members, view, round, rules, rates, late=late, carried=carried, found=found, claims=kept)


def _too_few_members(members: Sequence[str], rules: Rules, *, may_wait: bool) -> Wait | None:
    """Return a wait if a round needs more members. `may_wait`: the bootstrap still waits for `start_nodes`."""
    if may_wait and len(members) < rules.start_nodes:
        return Wait(f"{len(members)} of {rules.start_nodes} nodes are here (elastic.start_nodes)")
    if len(members) < rules.min_nodes:
        return Wait(f"{len(members)} of at least {rules.min_nodes} nodes can take part (elastic.min_nodes)")
    return None


def claims_to_deal(
    view: View, round: int, waits: ElapsedWaits, claims: Callable[[], Mapping[str, Claim]]
) -> dict[str, Claim]:
    """Return the claims that a plan of this round deals: those of ready joiners and of joiners still training."""
    if round == BOOTSTRAP_ROUND or restarts_with(view, round) or view.orders.rollback is not None:
        return {}
    training = view.alive - {*_previous_participants(view), *view.ready, *view.refused, *waits.given_up}
    own = ready_claims(view)
    joining = {m: claim for m, claim in (claims() if training else {}).items() if m in training}
    return valid_claims(ledgers_after(view.committed), own, joining) if own or joining else {}


def ready_claims(view: View) -> dict[str, Claim]:
    """Return the claims in the ready records, by member."""
    return {member: ready.claim for member, ready in view.ready.items() if ready.claim is not None}


def _open_blocker(view: View, round: int) -> Wait | None:
    """Return the reason why no round may be opened now, regardless of the members at the boundary."""
    if view.is_settling:
        return Wait("the store lost its record; members are given time to bring it back")
    if _has_lost_verdict(view, round):
        return Wait("the store lost the newest verdict; waiting for a member to restore it")
    if view.orders.is_paused:
        return Wait("the run is paused; `zeroband ctl resume` lets it go on")
    return None


def _findings(view: View, round: int, inquiry: Inquiry | None) -> Findings | Wait:
    """Return the findings on earlier attempts that still apply, including new ones."""
    current = view.plan
    if current is None:
        return Findings()
    if inquiry is None or (view.committed is not None and current == view.committed.plan):
        attempt = Attempt(current, view.votes, failed=view.failed or "")
        known = AttemptFindings(attempt, Findings(current.blames, current.retries), is_over=True)
    else:
        known = inquiry(view)
    if not _has_failed(view, round):
        return findings_after(known.before, known.attempt, round, None)
    silent = tuple(m for m in current.members if m in view.alive and m not in known.attempt.evidence)
    if silent and not known.is_over:
        return Wait(f"{len(silent)} of {len(current.members)} members have no evidence on round {round} yet", silent)
    return findings_after(known.before, known.attempt, round, () if inquiry is None else silent)


def _has_failed(view: View, round: int) -> bool:
    """Whether the current plan is for this round and failed although none of its members was lost."""
    current = view.plan
    return current is not None and current.round == round and view.failed is not None and not view.lost(current)


def _kept_apart(members: tuple[str, ...], view: View, round: int, rules: Rules, found: Findings) -> frozenset[str]:
    """Members of undecided pairs that sit this round out; none if too few would remain."""
    held = _previous_participants(view)
    may_wait = frozenset(m for m in members if m in held and view.ready[m].steps_requested > 0)
    out = blame.sitting_out(members, found.blames, round + found.retries, may_wait)
    return out if len(members) - len(out) >= max(1, rules.min_nodes) else frozenset()


def _too_few_electors(members: Sequence[str], view: View, rules: Rules) -> Wait | None:
    """Return a wait if a run with several stores may not continue with these members."""
    last = view.committed
    if not rules.has_several_stores or last is None or may_commit(members, last):
        return None
    here, needed = sum(m in members for m in electors(last)), (len(electors(last)) + 1) // 2
    return Wait(
        f"{here} of {len(electors(last))} members of round {last.round} are at this store; {needed} are needed, since "
        "the others may have gone on with another store of store.url",
        lacks_electors=True,
    )


def _build_plan(
    members: tuple[str, ...],
    view: View,
    round: int,
    rules: Rules,
    rates: Mapping[str, LinkRates],
    *,
    late: tuple[str, ...],
    carried: tuple[Carried, ...],
    found: Findings,
    claims: tuple[tuple[str, Claim], ...],
) -> RoundPlan:
    """Build the plan that follows the current one, with these members."""
    current, is_founding = view.plan, round == BOOTSTRAP_ROUND or restarts_with(view, round)
    sites = () if found.is_flat else _speakers(members, view, rules, rates)
    keeps_groups = current is not None and members == current.members and current.round != round
    columns = member_columns(members, carried, view.ready, rules)
    return RoundPlan(
        version=1 if current is None else current.version + 1,
        epoch=1 if current is None else current.epoch + (not keeps_groups),
        round=round,
        members=members,
        trust=trust_factors(members, view, rules),
        late=late,
        carried=carried,
        retries=found.retries,
        is_flat=found.is_flat,
        silent=found.silent,
        blames=found.blames,
        network=plan_links(
            members,
            [(view.ready[m], rates.get(m, LinkRates())) for m in members],
            current.network if current is not None and keeps_groups else LinkTable(),
            sites=sites,
            dial_out_only=_dial_out_only(members, view),
        ),
        orders=view.orders.version,
        rollback=None if is_founding else view.orders.rollback,
        skips_data=not is_founding and view.orders.rollback is not None and view.orders.skips_data,
        sessions=() if view.committed is None else view.committed.sessions,
        sites=sites,
        gains=measured_gains(members, view, rules),
        claims=claims,
        **vars(columns),
    )


def measured_gains(members: Sequence[str], view: View, rules: Rules) -> tuple[Gain, ...]:
    """Return the gains of the previous round's payloads as measured by these members."""
    return median_gains(view.committed, {m: view.ready[m] for m in members}, rules.scoring)


def trust_factors(members: Sequence[str], view: View, rules: Rules) -> tuple[float, ...]:
    """Return each member's trust factor; empty if the run uses none."""
    return trust_of(members, {} if view.committed is None else view.committed.record) if rules.is_robust else ()


@dataclass(frozen=True)
class MemberColumns:
    """The plan's fields that repeat its members' `Ready` records, and their mean loss."""

    weights: tuple[int, ...]
    steps: tuple[int, ...]
    steps_requested: tuple[int, ...]
    loss: float | None
    phase_fraction: tuple[float, ...]
    corpora: tuple[str, ...]
    is_equal: bool
    largest: tuple[float, ...]
    phase_steps: tuple[int, ...]


def member_columns(
    members: Sequence[str], carried: Sequence[Carried], records: Mapping[str, Ready], rules: Rules
) -> MemberColumns:
    """Collect the plan's columns from the members' records, in member order, with what they carry."""
    ready, counted = [records[m] for m in members], [one for one in carried if one.counts]
    sizes = [r.largest if r.weight else 0.0 for r in ready]
    for one in counted:
        place, own = members.index(one.carrier), sizes[members.index(one.carrier)]
        sizes[place] = None if own is None or one.largest is None else max(own, one.largest)
    known = tuple(size for size in sizes if size is not None)
    steps = tuple(r.steps for r in ready)
    fractions = tuple(r.phase_fraction for r in ready)
    differ = len({r.phase_fraction for r in ready if r.weight}) > 1
    phases = tuple(r.steps if r.phase_steps is None else r.phase_steps for r in ready)
    return MemberColumns(
        weights=tuple(r.weight for r in ready),
        steps=steps,
        steps_requested=tuple(r.steps_requested for r in ready),
        loss=mean_loss([*ready, *(records[one.member] for one in counted)]),
        phase_fraction=fractions if not rules.is_robust and differ else (),
        corpora=tuple(r.corpus for r in ready) if any(r.corpus for r in ready) else (),
        is_equal=rules.counts_equally,
        largest=known if len(known) == len(sizes) and any(known) else (),
        phase_steps=phases if phases != steps else (),
    )


def mean_loss(ready: Sequence[Ready]) -> float | None:
    """Weighted mean over the contributing members with a finite loss; None: there are none."""
    known = [(r.weight, r.loss) for r in ready if r.weight > 0 and r.loss is not None]
    return sum(weight * loss for weight, loss in known) / sum(weight for weight, _ in known) if known else None


def _sites_of(members: tuple[str, ...], view: View, rules: Rules, rates: Mapping[str, LinkRates]) -> Groups:
    """Group members by site; a member without one forms its own group."""
    names = {m: view.ready[m].site for m in members}
    before = {} if view.plan is None else view.plan.speakers()
    return group(names, _links(rates), before, rules.sites)


def _speakers(members: tuple[str, ...], view: View, rules: Rules, rates: Mapping[str, LinkRates]) -> tuple[int, ...]:
    """Return the place of each member's speaker, as in `RoundPlan.sites`."""
    groups = _sites_of(members, view, rules, rates)
    weights, access = {m: view.ready[m].weight for m in members}, {m: view.ready[m].rate for m in members}
    uplinks = {**access, **_links(rates).uplinks(groups)}
    before = {} if view.plan is None else view.plan.speakers()
    return speakers(groups, weights, uplinks, before, _dial_out_only(members, view))


def _dial_out_only(members: Sequence[str], view: View) -> frozenset[str]:
    """Members that others cannot dial."""
    return frozenset(m for m in members if m in view.peers and view.peers[m].relays)


def _links(rates: Mapping[str, LinkRates]) -> LinkSpeeds:
    return LinkSpeeds.of({m: links.mbit for m, links in rates.items()})


def expected_members(view: View) -> tuple[str, ...]:
    """Members that a round waits for: the living ones of the last round, or all living ones before the first."""
    return tuple(m for m in view.committed.members if m in view.alive) if view.committed else tuple(sorted(view.alive))


def may_open(view: View, round: int, rules: Rules, waits: ElapsedWaits) -> bool:
    """Whether `next_plan` may return a new plan, judged by counts alone: a cheap read does not list members."""
    current = view.plan
    if view.is_settling or view.orders.is_paused:
        return False
    if current is not None and current.round == round and not view.can_finish(current):
        return True
    if round == BOOTSTRAP_ROUND or restarts_with(view, round):
        return waits.start_is_over or view.arrived >= rules.start_nodes
    awaited = len(expected_members(view)) + sum(m in view.alive for m in _awaited_late(view, rules))
    return waits.stragglers_are_late or view.arrived + len(view.refused) >= awaited


def knows_enough_to_open(view: View, round: int) -> bool:
    """Whether a view lists all that `next_plan` needs."""
    is_open = view.plan is not None and view.plan.round == round
    return not view.unseen_ready and not (view.unseen_votes and is_open)


def _has_lost_verdict(view: View, round: int) -> bool:
    """Whether the store lost the verdicts of committed rounds: a node without state must not start a new history."""
    if view.committed is not None or restarts_with(view, round):
        return False
    if round > BOOTSTRAP_ROUND:
        return True
    return view.plan is not None and view.plan.round > BOOTSTRAP_ROUND and not is_abandoned(view)


def has_quorum(view: View, rules: Rules = Rules()) -> bool:
    """Whether a quorum of the last round's living members, by weight, is at the boundary.

    Members are counted by number if none had weight, or if the view does not list those present.
    """
    plan = view.committed.plan if view.committed is not None else None
    alive = {m: count for m, count in zip(plan.members, plan.counts, strict=True) if m in view.alive} if plan else {}
    if view.unseen_ready:
        return view.arrived >= rules.quorum * len(alive)
    if not any(alive.values()):
        alive = dict.fromkeys(alive, 1)
    return bool(alive) and sum(n for m, n in alive.items() if m in view.ready) >= rules.quorum * sum(alive.values())


def _previous_late(view: View) -> tuple[str, ...]:
    """Late members of the last round."""
    return view.committed.plan.late if view.committed is not None else ()


def _awaited_late(view: View, rules: Rules, *, is_last: bool = False) -> tuple[str, ...]:
    """Late members of the last round that this one waits for.

    The last round, since no later one could count them; an overlapped one, which has the time, those that bring their
    contributions themselves.
    """
    late = _previous_late(view) if is_last or rules.hidden else ()
    carried = {carried.member for carried in _previously_carried(view)}
    return late if is_last else tuple(m for m in late if m not in carried)


def _late(view: View, missing: tuple[str, ...], sitting_out: frozenset[str], waits: ElapsedWaits) -> tuple[str, ...]:
    """Late members of this round, including those still absent since an earlier one."""
    gone = {*view.ready, *waits.given_up}
    away = [m for m in (*missing, *_previous_late(view)) if m in view.alive and m not in gone]
    return tuple(dict.fromkeys([*away, *sorted(sitting_out)]))


def _slow_links(
    sites: Groups, view: View, rules: Rules, waits: ElapsedWaits, rates: Mapping[str, LinkRates]
) -> frozenset[str]:
    """Members to leave out of the exchange because their sites' links would make it too slow.

    The baseline is a round in which no link is slower than the slowest of the fastest quorum; slow links may add a
    grace to it. The cost of a slow link is predicted from its rate, or taken from its last transfer if that was longer.
    Excluded members are carried, so only those that can be carried are excluded. Unknown links count as fast.
    """
    known = {site: max(_uplink_rate(m, site, view, rates) for m in site) for site in sites}
    if rules.straggler_grace is None or not rules.transfer_bytes or not any(known.values()):
        return frozenset()
    if not waits.phase_s:  # this member did not see the phase begin, so it keeps the last decision
        before = {carried.member for carried in _previously_carried(view)}
        return frozenset(m for site in sites for m in site if m in before and _may_be_carried(site, view))
    fastest = max(known.values())
    order = sorted(known, key=lambda site: (-(known[site] or fastest), site))
    mbit, scale = [known[site] or fastest for site in order], rules.transfer_bytes * 8e-6
    needed = _smallest_prefix(rules.quorum, [sum(view.ready[m].weight for m in site) for site in order])
    usual_s = scale * all_to_all_time([max(rate, mbit[needed - 1]) for rate in mbit])
    grace_s, hidden_s = rules.straggler_grace * (waits.phase_s + usual_s), rules.hidden * waits.phase_s

    took_s = _last_transfer_s(order, [rate < mbit[needed - 1] / 2 for rate in mbit], view)

    def costs_little(count: int) -> bool:
        will_take_s = max(scale * all_to_all_time(mbit[:count]), *took_s[:count])
        return will_take_s - max(usual_s, hidden_s) <= grace_s

    def can_exclude_rest(count: int) -> bool:
        return all(_may_be_carried(site, view) for site in order[count:])

    fast = max(count for count in range(needed, len(order) + 1) if count == needed or costs_little(count))
    kept = next(count for count in range(fast, len(order) + 1) if can_exclude_rest(count))
    while sum(map(len, order[:kept])) < rules.min_nodes:
        kept += 1
    return frozenset(m for site in order[kept:] for m in site)


def _last_transfer_s(order: Sequence[tuple[str, ...]], is_slow: Sequence[bool], view: View) -> list[float]:
    """Duration in seconds of the last transfer of each site that limited it; 0 for the others.

    A measured duration includes queueing, which a rate does not. Limiting are the slowest site of the last round, and
    carried sites, which report an earlier round.
    """
    last = [site for site in order if view.committed is not None and any(m in view.committed.members for m in site)]
    took_s = [max(view.ready[m].took_ms for m in site) / 1e3 for site in order]
    counts = [slow and (site not in last or site == last[-1]) for site, slow in zip(order, is_slow, strict=True)]
    return [seconds if count else 0.0 for seconds, count in zip(took_s, counts, strict=True)]


def _may_be_carried(site: Sequence[str], view: View) -> bool:
    """Whether all members of a site can be carried: they stay in the run, have been in a round, and offer."""
    return all(
        m in _previous_participants(view) and view.ready[m].steps_requested > 0 and view.ready[m].offer is not None
        for m in site
    )


def _previous_participants(view: View) -> tuple[str, ...]:
    """Members of the last round and those late for it."""
    return view.committed.plan.listed if view.committed is not None else ()


def _previously_carried(view: View) -> tuple[Carried, ...]:
    """Contributions carried in the newest plan."""
    return view.plan.carried if view.plan is not None else ()


def _lagging_with_offer(view: View, members: Sequence[str]) -> frozenset[str]:
    """Members with an offer that hold an earlier state: they replay rounds while their offer waits to be carried."""
    held = _previous_participants(view)
    offer = {m for m, ready in view.ready.items() if ready.offer and m in held and m in view.alive}
    return frozenset(offer - {*members})


def _carried(slow: frozenset[str], members: Sequence[str], late: Sequence[str], view: View) -> tuple[Carried, ...]:
    """Assign carriers to members with slow links, and decide which contributions count in this round.

    A carrier is kept while it is a member, even before the carried one is at the boundary, unless another member
    already holds the contribution. A new carrier is the one with the lowest load, then with the fastest link.
    """
    before = {carried.member: carried.carrier for carried in _previously_carried(view)}
    away = {m for m in before if m in late and m not in view.ready}
    fit = [m for m in members if view.ready[m].offer is not None]
    load, found = dict.fromkeys(fit, 0), list[Carried]()
    for member in sorted(slow | away, key=lambda member: (before.get(member) not in load, member)):
        ready = view.ready.get(member, _ABSENT)
        if not fit or ready.offer is None:
            continue
        able = [m for m in fit if _is_held_by(ready, member, view.ready[m])] or fit
        carrier = before.get(member, "")
        if carrier not in able:
            carrier = min(able, key=lambda m: (load[m], -view.ready[m].rate, m))
        load[carrier] += 1
        found.append(carried_contribution(member, carrier, view.ready))
    return tuple(sorted(found, key=lambda carried: carried.member))


_ABSENT = Ready(0, 0, "", offer="")
"""Stands for the record of a carried member that is not at the boundary."""


def carried_contribution(member: str, carrier: str, records: Mapping[str, Ready]) -> Carried:
    """Return a late member's contribution as its own record and that of its carrier describe it."""
    ready = records.get(member, _ABSENT)
    numbers = (ready.weight, ready.steps, ready.largest, ready.phase_steps)
    counts = _is_held_by(ready, member, records[carrier])
    return Carried(member, carrier, ready.offer or "", *numbers, counts=counts)


def _is_held_by(ready: Ready, member: str, carrier: Ready) -> bool:
    """Whether a carrier reports holding a member's offer, with values no larger than announced."""
    if not ready.offer or not ready.weight or ready.largest is None:
        return False
    here = [carry for carry in carrier.carries if (carry.member, carry.offer) == (member, ready.offer)]
    return any(carry.largest <= _ROUNDING_SLACK * ready.largest for carry in here)


def _uplink_rate(member: str, site: Sequence[str], view: View, rates: Mapping[str, LinkRates]) -> int:
    """A member's rate to other sites in Mbit/s: of its access link, or of its links' slower direction; 0: unknown."""
    links = rates.get(member, LinkRates()).mbit
    sent = max((mbit for other, mbit in links.items() if other not in site), default=0)
    received = max((links.mbit.get(member, 0) for other, links in rates.items() if other not in site), default=0)
    return max(view.ready[member].rate, min(sent or received, received or sent))


def _smallest_prefix(part: float, weights: Sequence[int]) -> int:
    """Length of the shortest prefix with this part of all weight, or of the number if all weights are 0."""
    counts = weights if any(weights) else [1] * len(weights)
    sums = list(accumulate(counts))
    return next(n for n, total in enumerate(sums, 1) if total >= part * sums[-1])


def _able_to_reduce(view: View, expected: tuple[str, ...], blames: Sequence[Blame]) -> tuple[str, ...]:
    """Choose the members at the boundary that can complete the round together, in id order."""
    here = [m for m in view.ready if m in view.alive and not blame.is_put_out(blames, m)]
    states = {m: view.ready[m].state_digest for m in here}
    return _connected(view, _same_state(states, expected), expected)


def _same_state(states: Mapping[str, str], expected: tuple[str, ...]) -> tuple[str, ...]:
    """The largest group with equal states; members of the last round outweigh joiners."""
    by_state: dict[str, list[str]] = {}
    for member, state in sorted(states.items()):
        by_state.setdefault(state, []).append(member)
    if not by_state:
        return ()

    def rank(state: str) -> tuple[int, int, str]:
        group = by_state[state]
        return (-sum(m in expected for m in group), -len(group), group[0])

    return tuple(by_state[min(by_state, key=rank)])


def _connected(view: View, members: tuple[str, ...], expected: tuple[str, ...]) -> tuple[str, ...]:
    """Remove members until all remaining ones reach one another.

    Joiners go first, then leaving members, then those with the most cuts. Leaving members go early because joiners must
    be able to fetch the state from the remaining ones.
    """
    left, cuts = list(members), view.cuts_among(members)

    def removal_order(member: str) -> tuple[bool, bool, int, int, str]:
        ready = view.ready[member]
        return (member not in expected, ready.steps_requested == 0, len(cuts[member]), -ready.weight, member)

    while cuts:
        gone = max(cuts, key=removal_order)
        left.remove(gone)
        for other in cuts.pop(gone):
            cuts[other].discard(gone)
        cuts = {member: others for member, others in cuts.items() if others}
    return tuple(left)


def next_verdict(view: View, plan: RoundPlan, record: Mapping[str, Any]) -> Verdict | Wait | None:
    """Return the verdict that follows from the votes; None if they conflict and the round must be retried."""
    if view.is_settling:
        return Wait("the store lost its record; members are given time to bring it back")
    missing = tuple(m for m in plan.members if m not in view.votes)
    if missing:
        reason = f"{len(missing)} of {len(plan.members)} members have not voted on round {plan.round}"
        return Wait(reason, missing)
    votes = {view.votes[m] for m in plan.members}
    is_agreed = len(votes) == 1 and not any(map(blame.is_refusal, votes))
    return Verdict(plan, digest_in(votes.pop()), dict(record)) if is_agreed else None


def must_leave(view: View, member_id: str, round: int, claim: Claim | None = None) -> str | None:
    """Return why this member, at the boundary of `round`, must rejoin; None if it need not.

    A late member catches up with the committed rounds and takes part again. So does a joiner that no round has listed
    yet, while its claim is valid.
    """
    committed, plan = view.committed, view.plan
    if committed is not None and committed.round >= round:
        has_claim = claim is not None and bool(valid_claims(ledgers_after(committed), {member_id: claim}))
        if member_id in committed.plan.late or has_claim:
            return None
        return f"round {committed.round} was committed while {member_id} was waiting for round {round}"
    if plan is None or plan.round != round or member_id not in view.ready:
        return None
    expected = committed.members if committed is not None else ()
    if member_id in expected and member_id in view.alive and member_id not in plan.listed:
        found = [b.reason for b in plan.blames if b.consequence == "out" and member_id in b.members]
        if found:
            return f"round {round} was opened without {member_id}, which was excluded: {found[-1]}"
        return (
            f"round {round} was opened without {member_id}: it was absent, unreachable for others, or its state differs"
        )
    return None
