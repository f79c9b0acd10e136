"""The rules of membership as pure functions of a view: who takes part in a round, and when its result counts.

Decides by the records that members exchange (`records`). Reads no clock and no store: time is an argument, and the same
functions run in production, in tests and in simulations.

A round goes: every member announces `Ready`; any member proposes a `RoundPlan` (the store takes the first); the listed
members reduce, and vote for the digest of what they got; any member proposes the `Verdict`. Both proposals name the
plan that they build on, so of two competing ones the store refuses the second.
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
from zeroband.elastic.membership.topology import LinkObservation, LinkTable, all_to_all_time
from zeroband.elastic.membership.trust import ScoringRule, median_gains, trust_of

_ROUNDING_SLACK = 2.0
"""Rounding may make a value at most this factor larger than its member says."""

MIN_GRACE_S = 0.25
"""Shortest wait for late members: about as long as news of an arrival takes to reach the others."""


@dataclass(frozen=True)
class Excluded:
    """The run continues without the asking member, which must rejoin."""

    reason: str


@dataclass(frozen=True)
class Rules:
    """A run's settings for opening rounds."""

    min_nodes: int = 1
    """With fewer nodes the run waits."""
    start_nodes: int = 1
    """Nodes that founders wait for."""
    straggler_deadline_s: float | None = None
    """Seconds after which waiting members go on without late ones. None: they wait for all that are alive."""
    straggler_grace: float | None = None
    """Members in time lose at most this part of a round to late members, and to slow links where contributions can be
    carried. None: there is no bound."""
    quorum: float = 0.5
    """Fraction of the weight that must be present before a member is left behind."""
    transfer_bytes: int = 0
    """Least bytes that a member sends and receives in a round; 0: not known, and no member is dropped for its link."""
    hidden: float = 0.0
    """Fraction of a phase of inner steps that overlaps a round's transfer."""
    calls: bool = False
    """A member that trains apart comes to the boundary as soon as another one stands there, so joiners are waited for
    like late members."""
    has_several_stores: bool = False
    """A round takes at least half of the last one's electors: the others may have gone to another store."""
    counts_equally: bool = False
    """Nodes count the same in a round, however much each has trained."""
    is_robust: bool = False
    """Members may lie: the weight that they report is bounded, and they count by their agreement so far."""
    scoring: ScoringRule | None = None
    """Which payloads are scored by held-out loss; None: none is."""
    sites: SitesRule = "off"
    """How members that share a fast network are grouped."""
    shape: RunShape | None = None
    """Bounds the numbers in the members' records (`limits`); None: no bounds."""

    def straggler_wait_s(self, phase_s: float) -> float:
        """How long a quorum waits for the others after a phase of `phase_s`."""
        grace_s = math.inf if self.straggler_grace is None else max(MIN_GRACE_S, self.straggler_grace * phase_s)
        return min(grace_s, math.inf if self.straggler_deadline_s is None else self.straggler_deadline_s)


@dataclass(frozen=True)
class ElapsedWaits:
    """Which waits are over, by the asking member's own clock."""

    start_is_over: bool = False
    """Founders wait for no further node."""
    stragglers_are_late: bool = False
    """Members that are not there go without this round."""
    given_up: frozenset[str] = frozenset()
    """Members whose records were refused for long enough: the round goes on without them."""
    phase_s: float = 0.0
    """From the last verdict until a quorum was at the boundary; 0: not known."""


@dataclass(frozen=True)
class AttemptFindings:
    """What is known so far of a plan that was not committed."""

    attempt: Attempt
    before: Findings
    """What was known when it was proposed."""
    is_over: bool
    """Members that have not testified are waited for no more."""


Inquiry = Callable[[View], AttemptFindings]
"""What is known of the current plan of a view."""


def next_plan(
    view: View,
    round: int,
    rules: Rules,
    waits: ElapsedWaits = ElapsedWaits(),
    links: Callable[[], Mapping[str, LinkRates]] = dict,
    inquiry: Inquiry | None = None,
    claims: Callable[[], Mapping[str, Claim]] = dict,
) -> RoundPlan | Wait:
    """The plan of `round` that this view calls for, or what it still waits for.

    Returns the current plan itself where it is for this round and can still be finished. `links`: asked for what
    members know of their links, if there is to be another one. `inquiry`: asked where the current one was not
    committed; None: culprits are not looked for. `claims`: asked for the samples that joiners train on that no round
    lists, if there are such joiners.
    """
    current = view.plan
    if not view.is_settling and current is not None and current.round == round and view.can_finish(current):
        return current
    if (hindrance := _open_blocker(view, round)) is not None:
        return hindrance
    expected = view.committed.members if view.committed is not None else ()
    is_last = all(ready.steps_requested == 0 for ready in view.ready.values())
    claimed = claims_to_deal(view, round, waits, claims)
    joining = tuple(m for m in claimed if m not in view.ready)
    # There is no later round for what is late; and a round that travels during training has time for it.
    awaited = (*expected, *_previous_late(view)) if is_last or rules.hidden else expected
    awaited = (*awaited, *joining) if is_last or rules.calls else awaited
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
    """Why these members are not enough for a round. `may_wait`: founders still wait for others."""
    if may_wait and len(members) < rules.start_nodes:
        return Wait(f"{len(members)} of {rules.start_nodes} nodes are here (elastic.start_nodes)")
    if len(members) < rules.min_nodes:
        return Wait(f"{len(members)} of at least {rules.min_nodes} nodes can take part (elastic.min_nodes)")
    return None


def claims_to_deal(
    view: View, round: int, waits: ElapsedWaits, claims: Callable[[], Mapping[str, Claim]]
) -> dict[str, Claim]:
    """Return the claims that a plan of this round deals: of ready joiners, and of those that still train."""
    if round == BOOTSTRAP_ROUND or restarts_with(view, round) or view.orders.rollback is not None:
        return {}
    listed = {*(view.committed.members if view.committed is not None else ()), *_previous_late(view)}
    gone = {*listed, *view.ready, *view.refused, *waits.given_up}
    strangers, own = view.alive - gone, ready_claims(view)
    told = {m: claim for m, claim in (claims() if strangers else {}).items() if m in strangers}
    return valid_claims(ledgers_after(view.committed), own, told) if own or told else {}


def ready_claims(view: View) -> dict[str, Claim]:
    """Return the samples that ready members say they trained on before a round dealt them any."""
    return {member: ready.claim for member, ready in view.ready.items() if ready.claim is not None}


def _open_blocker(view: View, round: int) -> Wait | None:
    """Why no round may be opened now, whichever members are at the boundary."""
    if view.is_settling:
        return Wait("the store lost its record; members are given time to bring it back")
    if _has_lost_verdict(view, round):
        return Wait("the store lost the newest verdict; who holds it brings it back")
    if view.orders.is_paused:
        return Wait("the run is paused; `zeroband ctl resume` lets it go on")
    return None


def _findings(view: View, round: int, inquiry: Inquiry | None) -> Findings | Wait:
    """Findings on earlier attempts that still count, including new ones."""
    current = view.plan
    if current is None:
        return Findings()
    if inquiry is None or (view.committed is not None and current == view.committed.plan):
        attempt = Attempt(current, view.votes, failed=view.failed or "")
        heard = AttemptFindings(attempt, Findings(current.blames, current.retries), is_over=True)
    else:
        heard = inquiry(view)
    if not _has_failed(view, round):
        return findings_after(heard.before, heard.attempt, round, None)
    silent = tuple(m for m in current.members if m in view.alive and m not in heard.attempt.said)
    if silent and not heard.is_over:
        return Wait(f"{len(silent)} of {len(current.members)} members have not testified on round {round}", silent)
    return findings_after(heard.before, heard.attempt, round, () if inquiry is None else silent)


def _has_failed(view: View, round: int) -> bool:
    """Whether the current plan is of this round, and came to nothing although no member of it was lost."""
    current = view.plan
    return current is not None and current.round == round and view.failed is not None and not view.lost(current)


def _kept_apart(members: tuple[str, ...], view: View, round: int, rules: Rules, found: Findings) -> frozenset[str]:
    """Members that go without this round since what they say contradicts others; none where too few would be left."""
    held = (*(view.committed.members if view.committed is not None else ()), *_previous_late(view))
    may_wait = frozenset(m for m in members if m in held and view.ready[m].steps_requested > 0)
    out = blame.sitting_out(members, found.blames, round + found.retries, may_wait)
    return out if len(members) - len(out) >= max(1, rules.min_nodes) else frozenset()


def _too_few_electors(members: Sequence[str], view: View, rules: Rules) -> Wait | None:
    """Why a run of several stores does not go on with these members; None where it does."""
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
    """The plan of a round to these members, behind the current one."""
    current, is_founding = view.plan, round == BOOTSTRAP_ROUND or restarts_with(view, round)
    sites = () if found.is_flat else _speakers(members, view, rules, rates)
    keeps_groups = current is not None and members == current.members and current.round != round
    said = member_columns(members, carried, view.ready, rules)
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
            [_observation(view.ready[m], rates.get(m, LinkRates())) for m in members],
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
        **vars(said),
    )


def measured_gains(members: Sequence[str], view: View, rules: Rules) -> tuple[Gain, ...]:
    """What these members found payloads of the round before to be worth."""
    return median_gains(view.committed, {m: view.ready[m] for m in members}, rules.scoring)


def trust_factors(members: Sequence[str], view: View, rules: Rules) -> tuple[float, ...]:
    """What each member counts for how it agreed with the rounds before; none where the run does not ask for it."""
    return trust_of(members, {} if view.committed is None else view.committed.record) if rules.is_robust else ()


@dataclass(frozen=True)
class MemberColumns:
    """The fields of a plan that repeat its members' records, and their mean loss."""

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
    members: Sequence[str], carried: Sequence[Carried], words: Mapping[str, Ready], rules: Rules
) -> MemberColumns:
    """What a plan to these members says of them, in their order, with what they carry."""
    ready, counted = [words[m] for m in members], [one for one in carried if one.counts]
    sizes = [r.largest if r.weight else 0.0 for r in ready]
    for one in counted:
        place, own = members.index(one.carrier), sizes[members.index(one.carrier)]
        sizes[place] = None if own is None or one.largest is None else max(own, one.largest)
    known = tuple(size for size in sizes if size is not None)
    steps = tuple(r.steps for r in ready)
    phases = tuple(r.steps if r.phase_steps is None else r.phase_steps for r in ready)
    return MemberColumns(
        weights=tuple(r.weight for r in ready),
        steps=steps,
        steps_requested=tuple(r.steps_requested for r in ready),
        loss=mean_loss([*ready, *(words[one.member] for one in counted)]),
        phase_fraction=tuple(r.phase_fraction for r in ready)
        if not rules.is_robust and _differ_in_training(ready)
        else (),
        corpora=tuple(r.corpus for r in ready) if any(r.corpus for r in ready) else (),
        is_equal=rules.counts_equally,
        largest=known if len(known) == len(sizes) and any(known) else (),
        phase_steps=phases if phases != steps else (),
    )


def _differ_in_training(ready: Sequence[Ready]) -> bool:
    """Whether members say that not all of them have trained alike what they contribute."""
    return len({r.phase_fraction for r in ready if r.weight}) > 1


def mean_loss(ready: Sequence[Ready]) -> float | None:
    """The mean over the members whose update counts and whose loss is finite; None: there are none."""
    told = [(r.weight, r.loss) for r in ready if r.weight > 0 and r.loss is not None]
    return sum(weight * loss for weight, loss in told) / sum(weight for weight, _ in told) if told else None


def _sites_of(members: tuple[str, ...], view: View, rules: Rules, rates: Mapping[str, LinkRates]) -> Groups:
    """The members by sites; one that has none is its own."""
    names = {m: view.ready[m].site for m in members}
    before = {} if view.plan is None else view.plan.speakers()
    return group(names, _links(rates), before, rules.sites)


def _speakers(members: tuple[str, ...], view: View, rules: Rules, rates: Mapping[str, LinkRates]) -> tuple[int, ...]:
    """Who speaks for the site of each member, as in `RoundPlan.sites`."""
    groups = _sites_of(members, view, rules, rates)
    weights, access = {m: view.ready[m].weight for m in members}, {m: view.ready[m].rate for m in members}
    uplinks = {**access, **_links(rates).uplinks(groups)}
    before = {} if view.plan is None else view.plan.speakers()
    return speakers(groups, weights, uplinks, before, _dial_out_only(members, view))


def _dial_out_only(members: Sequence[str], view: View) -> frozenset[str]:
    """Members that others cannot dial."""
    return frozenset(m for m in members if m in view.peers and view.peers[m].relays)


def _links(rates: Mapping[str, LinkRates]) -> LinkSpeeds:
    return LinkSpeeds.of({m: told.mbit for m, told in rates.items()})


def expected_members(view: View) -> tuple[str, ...]:
    """Those for whom a round waits: the living members of the last one; before there was any, all that live."""
    return tuple(m for m in view.committed.members if m in view.alive) if view.committed else tuple(sorted(view.alive))


def may_open(view: View, round: int, rules: Rules, waits: ElapsedWaits) -> bool:
    """Whether `next_plan` may call for another plan, by how many are ready: a look may not show who they are."""
    current = view.plan
    if view.is_settling or view.orders.is_paused:
        return False
    if current is not None and current.round == round and not view.can_finish(current):
        return True
    if round == BOOTSTRAP_ROUND or restarts_with(view, round):
        return waits.start_is_over or view.arrived >= rules.start_nodes
    awaited = len(expected_members(view)) + (sum(m in view.alive for m in _previous_late(view)) if rules.hidden else 0)
    return waits.stragglers_are_late or view.arrived + len(view.refused) >= awaited


def knows_enough_to_open(view: View, round: int) -> bool:
    """Whether a view shows all that `next_plan` asks of it."""
    is_open = view.plan is not None and view.plan.round == round
    return not view.unseen_ready and not (view.unseen_votes and is_open)


def _has_lost_verdict(view: View, round: int) -> bool:
    """Whether the run has committed rounds that the store does not show: who holds no state must not begin another."""
    if view.committed is not None or restarts_with(view, round):
        return False
    if round > BOOTSTRAP_ROUND:
        return True
    return view.plan is not None and view.plan.round > BOOTSTRAP_ROUND and not is_abandoned(view)


def _observation(ready: Ready, links: LinkRates) -> LinkObservation:
    """A member's measurements of its links."""
    return LinkObservation(ready.rate, links.mbit, links.rtt_ms, ready.took_ms)


def has_quorum(view: View, rules: Rules = Rules()) -> bool:
    """Whether a quorum of the last round's living members, by weight, stands at the boundary.

    They count by number if no member had weight in it, or if a look does not show which members are there.
    """
    plan = view.committed.plan if view.committed is not None else None
    alive = {m: count for m, count in zip(plan.members, plan.counts, strict=True) if m in view.alive} if plan else {}
    if view.unseen_ready:
        return view.arrived >= rules.quorum * len(alive)
    if not any(alive.values()):
        alive = dict.fromkeys(alive, 1)
    return bool(alive) and sum(n for m, n in alive.items() if m in view.ready) >= rules.quorum * sum(alive.values())


def _previous_late(view: View) -> tuple[str, ...]:
    """Members that the last round went without."""
    return view.committed.plan.late if view.committed is not None else ()


def _late(view: View, missing: tuple[str, ...], sitting_out: frozenset[str], waits: ElapsedWaits) -> tuple[str, ...]:
    """Members that miss this round, including those still away since an earlier one."""
    gone = {*view.ready, *waits.given_up}
    away = [m for m in (*missing, *_previous_late(view)) if m in view.alive and m not in gone]
    return tuple(dict.fromkeys([*away, *sorted(sitting_out)]))


def _slow_links(
    sites: Groups, view: View, rules: Rules, waits: ElapsedWaits, rates: Mapping[str, LinkRates]
) -> frozenset[str]:
    """Members that are not in the exchange, since with the links of their sites it would take too long.

    A round may be longer by a grace than one in which no link is slower than those of a quorum. How long it takes with
    a slow link is what the link's rate says, or what the last one with it took. What such a member
    contributes is carried, so it is left out only where that is possible: not if it leaves, nor a joiner that no round
    has listed yet, nor the others of their sites. A link of which nothing is known counts as fast.
    """
    known = {site: max(_uplink_rate(m, site, view, rates) for m in site) for site in sites}
    if rules.straggler_grace is None or not rules.transfer_bytes or not any(known.values()):
        return frozenset()
    if not waits.phase_s:  # this member saw no phase begin: as it was
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

    def may_go_without(count: int) -> bool:
        return all(_may_be_carried(site, view) for site in order[count:])

    fast = max(count for count in range(needed, len(order) + 1) if count == needed or costs_little(count))
    kept = next(count for count in range(fast, len(order) + 1) if may_go_without(count))
    while sum(map(len, order[:kept])) < rules.min_nodes:
        kept += 1
    return frozenset(m for site in order[kept:] for m in site)


def _last_transfer_s(order: Sequence[tuple[str, ...]], is_slow: Sequence[bool], view: View) -> list[float]:
    """Seconds of the last transfer that sites were in, for those who made it that long: links have queues.

    These are the slowest of the last round, and those that are carried, who tell of an earlier one.
    """
    last = [site for site in order if view.committed is not None and any(m in view.committed.members for m in site)]
    took_s = [max(view.ready[m].took_ms for m in site) / 1e3 for site in order]
    counts = [slow and (site not in last or site == last[-1]) for site, slow in zip(order, is_slow, strict=True)]
    return [seconds if count else 0.0 for seconds, count in zip(took_s, counts, strict=True)]


def _may_be_carried(site: Sequence[str], view: View) -> bool:
    """Whether members of a site can do without the exchange: they stay, have not just come, and can offer."""
    return all(
        m in _previous_participants(view) and view.ready[m].steps_requested > 0 and view.ready[m].offer is not None
        for m in site
    )


def _previous_participants(view: View) -> tuple[str, ...]:
    """Those that have a part in the run already: the last round's members, and those that it went without."""
    return (*(view.committed.members if view.committed is not None else ()), *_previous_late(view))


def _previously_carried(view: View) -> tuple[Carried, ...]:
    """Who was carried last, as the newest plan says."""
    return view.plan.carried if view.plan is not None else ()


def _lagging_with_offer(view: View, members: Sequence[str]) -> frozenset[str]:
    """Members that hold an earlier state while what they offer waits for its round: they replay at their own pace."""
    held = _previous_participants(view)
    offer = {m for m, ready in view.ready.items() if ready.offer and m in held and m in view.alive}
    return frozenset(offer - {*members})


def _carried(slow: frozenset[str], members: Sequence[str], late: Sequence[str], view: View) -> tuple[Carried, ...]:
    """Who carries the contributions of members with slow links, and which of them count in this round.

    A carrier stays while it is a member, also for a member that is on its way to the boundary, unless another one that
    was late meanwhile holds the contribution already. Else it is the one with the fastest link of those that carry the
    fewest.
    """
    before = {carried.member: carried.carrier for carried in _previously_carried(view)}
    away = {m for m in before if m in late and m not in view.ready}
    fit = [m for m in members if view.ready[m].offer is not None]
    load, found = dict.fromkeys(fit, 0), list[Carried]()
    for member in sorted(slow | away, key=lambda member: (before.get(member) not in load, member)):
        ready = view.ready.get(member, ABSENT)
        if not fit or ready.offer is None:
            continue
        able = [m for m in fit if is_held_by(ready, member, view.ready[m])] or fit
        carrier = before.get(member, "")
        if carrier not in able:
            carrier = min(able, key=lambda m: (load[m], -view.ready[m].rate, m))
        load[carrier] += 1
        counts = is_held_by(ready, member, view.ready[carrier])
        numbers = (ready.weight, ready.steps, ready.largest, ready.phase_steps)
        found.append(Carried(member, carrier, ready.offer, *numbers, counts=counts))
    return tuple(sorted(found, key=lambda carried: carried.member))


ABSENT = Ready(0, 0, "", offer="")
"""What a carried member says that does not stand at the boundary."""


def is_held_by(ready: Ready, member: str, carrier: Ready) -> bool:
    """Whether a carrier says that it holds what a member offers, and that it is as large as that member says."""
    if not ready.offer or not ready.weight or ready.largest is None:
        return False
    here = [carry for carry in carrier.carries if (carry.member, carry.offer) == (member, ready.offer)]
    return any(carry.largest <= _ROUNDING_SLACK * ready.largest for carry in here)


def _uplink_rate(member: str, site: Sequence[str], view: View, rates: Mapping[str, LinkRates]) -> int:
    """Mbit/s of a member to other sites: of its access, or of its links in the slower direction; 0: not known."""
    told = rates.get(member, LinkRates()).mbit
    sent = max((mbit for other, mbit in told.items() if other not in site), default=0)
    received = max((links.mbit.get(member, 0) for other, links in rates.items() if other not in site), default=0)
    return max(view.ready[member].rate, min(sent or received, received or sent))


def _smallest_prefix(part: float, weights: Sequence[int]) -> int:
    """How many of the first ones have such a part of all weight; of those without weight, of their number."""
    counts = weights if any(weights) else [1] * len(weights)
    sums = list(accumulate(counts))
    return next(n for n, total in enumerate(sums, 1) if total >= part * sums[-1])


def _able_to_reduce(view: View, expected: tuple[str, ...], blames: Sequence[Blame]) -> tuple[str, ...]:
    """Choose the members at the boundary that can bring the round to its end together, in the order of their ids."""
    here = [m for m in view.ready if m in view.alive and not blame.is_put_out(blames, m)]
    states = {m: view.ready[m].state_digest for m in here}
    return _connected(view, _same_state(states, expected), expected)


def _same_state(states: Mapping[str, str], expected: tuple[str, ...]) -> tuple[str, ...]:
    """The largest set of members that hold one state; members of the last round outweigh joiners."""
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
    """The members without those that others do not reach: joiners go first, then who leaves, who is cut off from most.

    Of two nodes one must stay that others can take the state from.
    """
    left, cuts = list(members), view.cuts_among(members)

    def blame(member: str) -> tuple[bool, bool, int, int, str]:
        ready = view.ready[member]
        return (member not in expected, ready.steps_requested == 0, len(cuts[member]), -ready.weight, member)

    while cuts:
        gone = max(cuts, key=blame)
        left.remove(gone)
        for other in cuts.pop(gone):
            cuts[other].discard(gone)
        cuts = {member: others for member, others in cuts.items() if others}
    return tuple(left)


def next_verdict(view: View, plan: RoundPlan, record: Mapping[str, Any]) -> Verdict | Wait | None:
    """The verdict that the votes call for; None where they contradict each other and the round must be opened again."""
    if view.is_settling:
        return Wait("the store lost its record; members are given time to bring it back")
    missing = tuple(m for m in plan.members if m not in view.votes)
    if missing:
        reason = f"{len(missing)} of {len(plan.members)} members have not voted on round {plan.round}"
        return Wait(reason, missing)
    votes = {view.votes[m] for m in plan.members}
    is_agreed = len(votes) == 1 and not any(map(blame.is_refusal, votes))
    return Verdict(plan, digest_in(votes.pop()), dict(record)) if is_agreed else None


def must_leave(view: View, member_id: str, round: int, claim: Claim | None = None) -> Excluded | None:
    """Whether the run has gone on without this member, which stands at the boundary of `round`.

    A member that was only late has not been left: it catches up with what was committed, and takes part again. So does
    a joiner that no round has listed yet, while its claim still stands.
    """
    committed, plan = view.committed, view.plan
    if committed is not None and committed.round >= round:
        is_unheard = claim is not None and bool(valid_claims(ledgers_after(committed), {member_id: claim}))
        if member_id in committed.plan.late or is_unheard:
            return None
        return Excluded(f"round {committed.round} was committed while {member_id} stood before round {round}")
    if plan is None or plan.round != round or member_id not in view.ready:
        return None
    expected = committed.members if committed is not None else ()
    listed = (*plan.members, *plan.late)
    if member_id in expected and member_id in view.alive and member_id not in listed:
        found = [b.reason for b in plan.blames if b.consequence == "out" and member_id in b.members]
        if found:
            return Excluded(f"round {round} was opened without {member_id}, which was put out: {found[-1]}")
        return Excluded(
            f"round {round} was opened without {member_id}: it was away, others do not reach it, or its state differs"
        )
    return None
