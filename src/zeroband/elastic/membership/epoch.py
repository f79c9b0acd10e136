"""The rules of membership as pure functions of a view: who takes part in a round, and when its result counts.

Owns the records that members exchange and the decisions about them. Reads no clock and no store: time is an argument,
and the same functions run in production, in tests and in simulations.

A round goes: every member announces `Ready`; any member proposes an `Opening` (the store takes the first); the listed
members reduce, and vote for the digest of what they got; any member proposes the `Verdict`. Both proposals name the
opening that they build on, so of two competing ones the store refuses the second.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Any

from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.resume_rules import RestartPoint, is_abandoned, restarts_with
from zeroband.elastic.membership.topology import LinkObservation, LinkTable, plan

if TYPE_CHECKING:
    from zeroband.elastic.membership.epoch import View

_TOO_FEW_FOR_A_MEDIAN = 2

_MOST_SESSIONS = 16
"""Sessions that a run remembers; members of older ones count as strangers."""

FOUNDING_ROUND = 0
"""The round that starts a run: nothing is reduced, the founders only agree on their initial state."""


@dataclass(frozen=True)
class Ready:
    """A member has arrived at the boundary of `round`. Written once for each member and round."""

    round: int
    weight: int
    """Tokens it contributes; 0 for a joiner, and for a node whose update was not finite."""
    state_digest: str
    """Digest of the outer state that it holds; only members with the same state reduce together."""
    steps: int = 0
    """Inner steps behind what it contributes."""
    steps_requested: int = 0
    """Inner steps for which it is to hold samples after this round; 0 says that it leaves. At a founding: those of one
    round."""
    rate: int = 0
    """Mbit/s that its access link was seen to carry in each direction; 0: not known."""
    links: Mapping[str, int] = field(default_factory=dict[str, int])
    """Mbit/s to each other member, as far as known."""
    took_ms: int = 0
    """Of its last transfer, as the data plane counts it for pacing; 0: it had none, or the last one failed."""
    norm: float = 0.0
    """Of what it contributes; 0: the run does not ask for it."""
    loss: float | None = None
    """Mean over what it contributes, in nats per token. None: it made no step, or the loss is not finite."""
    trained: float = 1.0
    """Part of the phases that usually lie behind a contribution; below 1 for fragments that a joiner took over whole
    with the others, and at a run's start."""


@dataclass(frozen=True)
class Opening:
    """Round `round` is open to exactly these members, in the order of their node ranks."""

    version: int
    """Grows by one with every opening of the run; fences everything that refers to an older one."""
    epoch: int
    """Number of the membership; grows whenever the groups between the nodes must be built anew."""
    round: int
    members: tuple[str, ...]
    weights: tuple[int, ...]
    """Of each member, as in its `Ready`; so are the next two."""
    steps: tuple[int, ...] = ()
    steps_requested: tuple[int, ...] = ()
    late: tuple[str, ...] = ()
    """Members that the others stopped waiting for: what they learned goes into the round after."""
    divergences: int = 0
    """How often this round ended in different results before."""
    network: LinkTable = field(default_factory=LinkTable)
    """What the members plan the transfer with."""
    orders: int = 0
    """Version of the operators' orders that it was proposed under."""
    rollback: int | None = None
    """Nothing is reduced: the members take the state of the checkpoint of this inner step."""
    norms: tuple[float, ...] = ()
    """Of what each member contributes; none: nothing is clipped."""
    skips_data: bool = False
    """With a rollback: what was learned from since that checkpoint is not learned from again."""
    losses: tuple[float | None, ...] = ()
    """Of each member, as in its `Ready`."""
    sessions: tuple[str, ...] = ()
    """The run's session that it was proposed in, and those before it, the newest first; none before the founding."""
    trained: tuple[float, ...] = ()
    """As in each member's `Ready`; none: the same for all that have weight."""

    @property
    def id(self) -> str:
        """Tells this opening from every other one, also from one that a store with old data gave the same version."""
        return f"{self.version}-{hashlib.blake2b(to_json(self).encode(), digest_size=6).hexdigest()}"

    @property
    def total_weight(self) -> int:
        return sum(self.weights)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each member in the mean of this round, in 0..1.

        They add up to 1, with two exceptions. Where a member has trained less than the others what it contributes, they
        add up to more (`_unclipped`). And a contribution that is longer than the median of the round counts as if it
        were that long, if the run asks for it. Of two contributions nobody can say which is too long.
        """
        shares = self._unclipped()
        counted = [norm for norm, share in zip(self.norms, shares, strict=False) if share > 0]
        if len(counted) <= _TOO_FEW_FOR_A_MEDIAN:
            return shares
        most = median_low(counted)
        return tuple(s * most / norm if norm > most else s for s, norm in zip(shares, self.norms, strict=True))

    def _unclipped(self) -> tuple[float, ...]:
        """Shares by weight; a member counts in the divisor by what it has trained, as a part of what is usual.

        A contribution grows with the phases behind it. So the mean is that of a phase's drift, times the phases of a
        usual turn, or of the longest one where nobody has a whole one behind it: the outer step of a fragment is as
        long with a joiner as without.
        """
        total: float = self.total_weight
        if self.longest:
            total = sum(w * t for w, t in zip(self.weights, self.trained, strict=True)) / self.longest
        return tuple(weight / total if total else 0.0 for weight in self.weights)

    @property
    def longest(self) -> float:
        """The most that a member trained, as a part of what is usual and at most that; 0: the same for all."""
        trained = [t for t, w in zip(self.trained, self.weights, strict=False) if w > 0]
        return max(0.0, min(1.0, max(trained, default=0.0)))

    def share(self, member_id: str) -> float:
        """Of one member."""
        return self.shares[self.members.index(member_id)]

    def clip(self, member_id: str) -> float | None:
        """What a member's contribution was scaled by; None where nothing is clipped, or the member has no weight."""
        share = self._unclipped()[self.members.index(member_id)]
        return self.share(member_id) / share if self.norms and share else None

    def contributors(self) -> dict[str, int]:
        """Inner steps of the members whose update counts."""
        return {m: s for m, w, s in zip(self.members, self.weights, self.steps, strict=True) if w > 0}

    def wanted(self) -> dict[str, int]:
        """Inner steps that the members ask samples for."""
        return dict(zip(self.members, self.steps_requested, strict=True))


@dataclass(frozen=True)
class Verdict:
    """A round is committed: the members of its opening hold the same result. Written once for each round."""

    opening: Opening
    digest: str
    """Digest of the reduced result."""
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else the round fixed for everybody: data ledger, progress, norm of the mean gradient."""

    @property
    def round(self) -> int:
        return self.opening.round

    @property
    def members(self) -> tuple[str, ...]:
        return self.opening.members

    @property
    def sessions(self) -> tuple[str, ...]:
        """The run's session after this round and those before it, the newest first.

        A founding begins another session. It names the one that it goes on from, so that a member of that one which
        turns out to live finds itself left behind; one that is not named is another run's.
        """
        named = (self.record.get("session"), self.record.get("session_before"), *self.opening.sessions)
        return tuple(dict.fromkeys(session for session in named if session))[:_MOST_SESSIONS]

    @property
    def session(self) -> str:
        """Session of the run after this round; empty where nobody named one."""
        return next(iter(self.sessions), "")


@dataclass(frozen=True)
class Peer:
    """Where a member is found, and whom it does not reach. Its guardian writes it with every renewal of the lease."""

    node_id: str
    host: str
    port: int
    """Its one port: for probes, for its state and for the data plane."""
    serves_state: bool
    """Whether others may fetch its state."""
    cut_off: tuple[str, ...] = ()
    """Members that did not answer its probes for `fault.detect_s`."""
    links: Mapping[str, int] = field(default_factory=dict[str, int])
    """Mbit/s to each other member, as its guardian measured them when the two met."""
    rtt_ms: int = 0
    """The longest round trip to another member; 0: not known."""


@dataclass(frozen=True)
class View:
    """What one look at the store showed, all of it at one instant."""

    opening: Opening | None
    committed: Verdict | None
    """The newest verdict of the run."""
    alive: frozenset[str]
    """Members whose lease holds."""
    ready: Mapping[str, Ready]
    """Those at the boundary of the round that was asked for."""
    votes: Mapping[str, str]
    """Digests voted for the current opening."""
    failed: str | None
    """Why the current opening cannot be finished, if a member said so."""
    peers: Mapping[str, Peer] = field(default_factory=dict[str, Peer])
    is_known: bool = True
    """False: the store has no record of this run, because it is new or because the store lost it."""
    is_settling: bool = False
    """The store lost its record a moment ago: members are given time to bring it back before anything is decided."""
    orders: Orders = field(default_factory=Orders)
    restart_point: RestartPoint | None = None
    """The newest agreement to begin again on a checkpoint."""

    def are_cut(self, one: str, other: str) -> bool:
        """Whether two members, which both reach the store, do not reach one another."""
        return any(a in self.peers and b in self.peers[a].cut_off for a, b in ((one, other), (other, one)))

    def can_finish(self, opening: Opening) -> bool:
        """Whether this opening is the current one, and nothing that it needs is lost."""
        return self.opening == opening and self.failed is None and not self.lost(opening)

    def lost(self, opening: Opening) -> tuple[str, ...]:
        """Members that keep an opening from being finished: without lease, or cut off from another one.

        One that has voted is not needed any more, unless nobody is left who would write the verdict.
        """
        if not any(m in self.alive for m in opening.members):
            return opening.members
        unvoted = [m for m in opening.members if m not in self.votes]
        dead = [m for m in unvoted if m not in self.alive]
        cut = [m for m in unvoted if any(self.are_cut(m, other) for other in opening.members)]
        return tuple(dict.fromkeys([*dead, *cut]))


@dataclass(frozen=True)
class Wait:
    """Nothing to decide yet."""

    reason: str
    waiting_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class Excluded:
    """The run goes on without the asking member, which must come back by the join path."""

    reason: str


@dataclass(frozen=True)
class Rules:
    """What a run asks of a round."""

    min_nodes: int = 1
    """Fewer do not go on."""
    start_nodes: int = 1
    """Founders wait for so many."""
    straggler_deadline_s: float | None = None
    """After this, those who wait go without those who are late. None: they wait for all that are alive."""


@dataclass(frozen=True)
class Patience:
    """Which waits are over, by the asking member's own clock."""

    start_is_over: bool = False
    """Founders wait for no further node."""
    stragglers_are_late: bool = False
    """Members that are not there go without this round."""


def next_opening(view: View, round: int, rules: Rules, patience: Patience = Patience()) -> Opening | Wait:
    """The opening of `round` that this view calls for, or what it still waits for.

    Returns the current opening itself where it is for this round and can still be finished.
    """
    if view.is_settling:
        return Wait("the store lost its record; members are given time to bring it back")
    current = view.opening
    if current is not None and current.round == round and view.can_finish(current):
        return current
    if _has_lost_verdict(view, round):
        return Wait("the store lost the newest verdict; who holds it brings it back")
    if view.orders.is_paused:
        return Wait("the run is paused; `zeroband ctl resume` lets it go on")
    expected = view.committed.members if view.committed is not None else ()
    missing = tuple(m for m in expected if m in view.alive and m not in view.ready)
    is_last = all(ready.steps_requested == 0 for ready in view.ready.values())
    if missing and not (patience.stragglers_are_late and not is_last):
        return Wait(f"{len(missing)} of {len(expected)} members have not reached round {round}", missing)
    members = _that_can_reduce(view, round, expected)
    is_founding = round == FOUNDING_ROUND or restarts_with(view, round)
    if is_founding and len(members) < rules.start_nodes and not patience.start_is_over:
        return Wait(f"{len(members)} of {rules.start_nodes} nodes are here (elastic.start_nodes)")
    if len(members) < rules.min_nodes:
        return Wait(f"{len(members)} of at least {rules.min_nodes} nodes can take part (elastic.min_nodes)")
    keeps_groups = current is not None and members == current.members and current.round != round
    ready = [view.ready[m] for m in members]
    return Opening(
        version=1 if current is None else current.version + 1,
        epoch=1 if current is None else current.epoch + (not keeps_groups),
        round=round,
        members=members,
        weights=tuple(r.weight for r in ready),
        steps=tuple(r.steps for r in ready),
        steps_requested=tuple(r.steps_requested for r in ready),
        norms=tuple(r.norm for r in ready) if any(r.norm for r in ready) else (),
        late=_late(view, missing),
        divergences=divergences(view, round),
        network=plan(
            members,
            [_seen(view, m) for m in members],
            current.network if current is not None and keeps_groups else LinkTable(),
        ),
        orders=view.orders.version,
        rollback=None if is_founding else view.orders.rollback,
        skips_data=not is_founding and view.orders.rollback is not None and view.orders.skips_data,
        losses=tuple(r.loss for r in ready),
        sessions=() if view.committed is None else view.committed.sessions,
        trained=tuple(r.trained for r in ready) if len({r.trained for r in ready if r.weight}) > 1 else (),
    )


def _has_lost_verdict(view: View, round: int) -> bool:
    """Whether the run has committed rounds that the store does not show: who holds no state must not begin another."""
    if view.committed is not None or restarts_with(view, round):
        return False
    if round > FOUNDING_ROUND:
        return True
    return view.opening is not None and view.opening.round > FOUNDING_ROUND and not is_abandoned(view)


def _seen(view: View, member: str) -> LinkObservation:
    """What a member's transfers and its guardian's probes showed; of two rates the higher: a link shared while it was
    measured carries more."""
    ready, peer = view.ready[member], view.peers.get(member)
    probed = {} if peer is None else peer.links
    links = {m: max(probed.get(m, 0), ready.links.get(m, 0)) for m in {*probed, *ready.links}}
    return LinkObservation(ready.rate, links, 0 if peer is None else peer.rtt_ms, ready.took_ms)


def has_quorum(view: View) -> bool:
    """Whether half of the members of the last round that are alive stand at the boundary."""
    members = view.committed.members if view.committed is not None else ()
    alive = [m for m in members if m in view.alive]
    return bool(alive) and 2 * sum(m in view.ready for m in alive) >= len(alive)


def _late(view: View, missing: tuple[str, ...]) -> tuple[str, ...]:
    """Members that go without this round, with those that have not come back from an earlier one."""
    before = view.committed.opening.late if view.committed is not None else ()
    return tuple(m for m in dict.fromkeys([*missing, *before]) if m in view.alive and m not in view.ready)


def _that_can_reduce(view: View, round: int, expected: tuple[str, ...]) -> tuple[str, ...]:
    """Of those at the boundary, the members that can bring the round to its end together, in the order of their ids."""
    wrong = outvoted(view, round)
    states = {m: r.state_digest for m, r in view.ready.items() if m in view.alive and m not in wrong}
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
    left = list(members)
    while True:
        cuts = {m: sum(view.are_cut(m, other) for other in left if other != m) for m in left}
        if not any(cuts.values()):
            return tuple(left)

        def blame(member: str, cuts: Mapping[str, int] = cuts) -> tuple[bool, bool, int, int, str]:
            ready = view.ready[member]
            return (member not in expected, ready.steps_requested == 0, cuts[member], -ready.weight, member)

        left.remove(max((m for m in left if cuts[m]), key=blame))


def next_verdict(view: View, opening: Opening, record: Mapping[str, Any]) -> Verdict | Wait | None:
    """The verdict that the votes call for; None where they contradict each other and the round must be opened again."""
    if view.is_settling:
        return Wait("the store lost its record; members are given time to bring it back")
    missing = tuple(m for m in opening.members if m not in view.votes)
    if missing:
        reason = f"{len(missing)} of {len(opening.members)} members have not voted on round {opening.round}"
        return Wait(reason, missing)
    digests = {view.votes[m] for m in opening.members}
    return Verdict(opening, digests.pop(), dict(record)) if len(digests) == 1 else None


def must_leave(view: View, member_id: str, round: int) -> Excluded | None:
    """Whether the run has gone on without this member, which stands at the boundary of `round`.

    A member that was only late has not been left: it catches up with what was committed, and takes part again.
    """
    committed, opening = view.committed, view.opening
    if committed is not None and committed.round >= round:
        if member_id in committed.opening.late:
            return None
        return Excluded(f"round {committed.round} was committed while {member_id} stood before round {round}")
    if opening is None or opening.round != round or member_id not in view.ready:
        return None
    expected = committed.members if committed is not None else ()
    listed = (*opening.members, *opening.late)
    if member_id in expected and member_id in view.alive and member_id not in listed:
        return Excluded(
            f"round {round} was opened without {member_id}: it was away, others do not reach it, or its state differs"
        )
    return None


def to_record(value: Ready | Opening | Verdict | Peer) -> dict[str, Any]:
    """A record as JSON-ready values."""
    return asdict(value)


def to_json(value: Ready | Opening | Verdict | Peer) -> str:
    """A record as text, always the same for equal records: the store compares openings by it."""
    return json.dumps(to_record(value), sort_keys=True)


def _has_diverged(view: View, round: int) -> bool:
    current = view.opening
    if current is None or current.round != round:
        return False
    return len({view.votes[m] for m in current.members if m in view.votes}) > 1


def divergences(view: View, round: int) -> int:
    """How often this round ended in different results."""
    current = view.opening
    return current.divergences + _has_diverged(view, round) if current is not None and current.round == round else 0


def outvoted(view: View, round: int) -> frozenset[str]:
    """Members whose result differed from that of the most, when this happened for the second time in one round."""
    current = view.opening
    if current is None or current.divergences == 0 or not _has_diverged(view, round):
        return frozenset()
    by_digest: dict[str, list[str]] = {}
    for member in current.members:
        if member in view.votes:
            by_digest.setdefault(view.votes[member], []).append(member)

    def trust(group: list[str]) -> tuple[int, int]:
        return (len(group), sum(view.ready[m].steps_requested > 0 for m in group if m in view.ready))

    believed = max(by_digest.values(), key=trust)  # of two as large, who stays; then the one of the first member
    return frozenset(m for group in by_digest.values() if group is not believed for m in group)
