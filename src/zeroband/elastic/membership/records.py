"""Records that members exchange through the store, the view that one read returns, and their JSON encoding."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from statistics import median_low
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from zeroband.config.ranges import (
    MOST_MEMBERS,
    Count,
    EachMember,
    Epoch,
    Id,
    Loss,
    Magnitude,
    Mbit,
    MemberPlace,
    Millis,
    Phases,
    Port,
    Ratio,
    Round,
    Share,
    Text,
    Version,
)
from zeroband.data.ledger import SHARED, Range
from zeroband.elastic.membership.keys import is_of_key
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.topology import LinkTable
from zeroband.observe.view import public_key_in

_R = TypeVar("_R")

_MAX_SESSIONS = 16
"""Sessions that a run remembers; members of older ones are treated as unknown."""


_PER_MEMBER_FIELDS = (
    "steps",
    "steps_requested",
    "trust",
    "phase_fraction",
    "corpora",
    "sites",
    "largest",
    "phase_steps",
)

BOOTSTRAP_ROUND = 0
"""The round that starts a run: nothing is reduced; its members only agree on the initial state."""


class CachedRecord:
    """A large record whose JSON text is cached: encoding it costs more than all its other uses."""

    @cached_property
    def text(self) -> str:
        """The record as encoded by `to_json`."""
        return _text_of(self)


@dataclass(frozen=True)
class Carry:
    """A contribution of a member with a slow link, held completely by its carrier."""

    member: Id
    """The contributor."""
    offer: Id
    """As in that member's `Ready`."""
    largest: Magnitude
    """Largest magnitude of its values, as measured by the carrier."""


@dataclass(frozen=True)
class Claim:
    """A range of samples that a joiner trains on before a round deals it samples."""

    start: Count
    stop: Count
    corpus: Id = SHARED
    """Their corpus, as in `Ready`."""

    @property
    def span(self) -> Range:
        return self.start, self.stop


@dataclass(frozen=True)
class Ready:
    """A member's announcement that it reached the boundary of `round`. Written once per member and round."""

    round: Round
    weight: Count
    """Tokens that it contributes; 0 for a joiner, and if its update was not finite."""
    state_digest: Id
    """Digest of its outer state; only members with equal states reduce together."""
    steps: Count = 0
    """Inner steps in its contribution."""
    steps_requested: Count = 0
    """Inner steps to deal it samples for after this round; 0: it leaves. In the bootstrap round: those of one round."""
    rate: Mbit = 0
    """Measured rate of its access link in each direction, in Mbit/s; 0: unknown."""
    took_ms: Millis = 0
    """Duration of its last transfer for rate control, in milliseconds; 0: none, or it failed."""
    loss: Loss | None = None
    """Mean loss over its contribution, in nats per token. None: no step, or not finite."""
    phase_fraction: Phases = 1.0
    """Phases in its contribution, relative to a usual contribution. Below 1 at a run's start and for a joiner's first
    fragments; above 1 for a fragment whose last round this node missed."""
    corpus: Id = SHARED
    """Corpus of its samples: the shared one, or its node's private one."""
    site: Id | None = None
    """Configured site of its node; None: not configured."""
    largest: Magnitude | None = None
    """Largest magnitude in its contribution to a mean; None: unknown, or it sends payloads."""
    gains: EachMember[Ratio | None] = ()
    """For each scored payload of the previous round (`trust`): how much it lowers this member's held-out loss, relative
    to its own payload; None: not measurable. Empty: nothing measured."""
    offer: Id | None = None
    """Number and hash under which a carrier can fetch its contribution. Empty: it can be carried but offers nothing
    yet. None: it can neither be carried nor carry others."""
    carries: EachMember[Carry] = ()
    """Contributions of members with slow links that it holds completely."""
    phase_steps: Count | None = None
    """Inner steps of the longest phase, if it contributes several phases after missing rounds; None: it contributes one
    phase."""
    claim: Claim | None = None
    """Samples that it claimed as a joiner; None: it trained on dealt samples."""


@dataclass(frozen=True)
class Gain:
    """The members' common measurement of a payload of the previous round."""

    member: Id
    """Sender of the payload."""
    ratio: Ratio
    """Median over the other members of how much it lowers their held-out loss, relative to their own payloads. 1: at
    least as much; below 0: it raises the loss."""


@dataclass(frozen=True)
class Blame:
    """A conclusion from the members' evidence: who made a round fail."""

    members: EachMember[Id]
    """The member at fault; or two members, one of which is at fault, without proof of which."""
    reason: Text
    is_lie: bool
    """True: bytes or statements contradict each other. False: a message is missing, which a bad network can cause."""
    consequence: Literal["named", "apart", "out"]
    """`named`: none yet; `apart`: the two are never in the same round; `out`: the member is excluded."""
    round: Round


@dataclass(frozen=True)
class Evidence:
    """What a member observed of a failed plan. Written once by each of its members."""

    held: EachMember[Id] = ()
    """SHA-256 of the part of the result received from each member, in member order; empty if the result is incomplete
    or parts are relayed by other members."""
    lacks: EachMember[Id] = ()
    """Members whose own contribution stopped arriving."""
    lacks_mean: EachMember[Id] = ()
    """Members whose contribution arrived, but whose part of the mean did not."""
    refused: EachMember[Id] = ()
    """Members that sent invalid data: non-finite values, or a part twice."""
    shown: EachMember[Id] = ()
    """SHA-256 of what each member drew and showed in the audit of the result, in member order; empty if incomplete or
    not audited."""
    wrong: EachMember[Id] = ()
    """Members whose part of the result differs from the sum of the shown contributions."""
    denied: EachMember[Id] = ()
    """Members that showed a different contribution to this member's part than they had sent it."""


@dataclass(frozen=True)
class Carried:
    """A member left out of the exchange because its link is slow; a carrier fetches its contribution."""

    member: Id
    carrier: Id
    offer: Id
    """As in its `Ready`; so are the next four."""
    weight: Count
    steps: Count
    largest: Magnitude | None
    phase_steps: Count | None
    counts: bool
    """The carrier holds the complete contribution, so it counts in this round."""


def _one_phase_weight(weight: int, phase_steps: int | None, steps: int) -> float:
    """Weight of a contribution of several phases: that of a single phase (see `RoundPlan.counts`)."""
    return weight if phase_steps is None or phase_steps >= steps else weight * phase_steps / steps


@dataclass(frozen=True)
class RoundPlan(CachedRecord):
    """Opens a round to exactly these members, in node-rank order."""

    version: Version
    """Grows by one with every plan of the run; fences everything that refers to an older plan."""
    epoch: Epoch
    """Number of the membership; grows whenever the groups between nodes must be rebuilt."""
    round: Round
    members: EachMember[Id]
    weights: EachMember[Count]
    """From each member's `Ready`; so are the next two."""
    steps: EachMember[Count] = ()
    steps_requested: EachMember[Count] = ()
    late: EachMember[Id] = ()
    """Living members that are not in the exchange because they or their links are slow: their contributions go into a
    later round, or are carried into this one."""
    carried: EachMember[Carried] = ()
    """Late members whose contributions are fetched by carriers, in id order."""
    retries: Count = 0
    """Earlier failures of this round without a lost member."""
    is_flat: bool = False
    """Force all-to-all: every part comes directly from the member that made it, so a bad part identifies its sender."""
    before: Id = ""
    """Id of the previous plan; empty: this is the first."""
    silent: EachMember[Id] = ()
    """Living members of the previous plan that wrote no evidence on its failure in time."""
    blames: EachMember[Blame] = ()
    """Conclusions from earlier attempts that still apply, newest last."""
    network: LinkTable = field(default_factory=LinkTable)
    """Link rates used to plan the transfer."""
    orders: Count = 0
    """Version of the operator's orders under which it was proposed."""
    rollback: Count | None = None
    """Inner step of the checkpoint that the members load instead of reducing; None: no rollback."""
    trust: EachMember[Share] = ()
    """Each member's trust factor in 0..1 (`trust`); empty: the run uses none."""
    skips_data: bool = False
    """With a rollback: skip samples trained on since that checkpoint."""
    loss: Loss | None = None
    """Mean loss of the contributing members, weighted, in nats per token; None: no finite loss."""
    sessions: EachMember[Id] = ()
    """The run's session at the proposal, then earlier ones, newest first; empty before the bootstrap."""
    phase_fraction: EachMember[Phases] = ()
    """`Ready.phase_fraction` of each member; empty: equal for all with weight."""
    corpora: EachMember[Id] = ()
    """`Ready.corpus` of each member; empty: all share one."""
    is_equal: bool = False
    """All members with weight count equally."""
    sites: EachMember[MemberPlace] = ()
    """Place of the speaker of each member's site: its own if it is the speaker or has no site; empty: no sites."""
    largest: EachMember[Magnitude] = ()
    """`Ready.largest` of each member, 0 without weight; empty: not known for all with weight."""
    gains: EachMember[Gain] = ()
    """Gains of the previous round's payloads; empty: none was scored, or too few members measured."""
    phase_steps: EachMember[Count] = ()
    """Inner steps of the longest phase in each contribution; empty: each is of one phase."""
    claims: EachMember[tuple[Id, Claim]] = ()
    """Joiners' member ids and claims; committing this plan deals them those samples."""
    proposer: Id = ""
    """Proposing member."""
    signature: Id = ""
    """The proposer's, in base64, over all fields above."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ValueError(problem)

    def _problem(self) -> str:
        """Reason why this plan is malformed: wrong list lengths or places out of range; empty: well-formed."""
        count, network = len(self.members), self.network
        if not count or len(set(self.members)) < count:
            return f"members={self.members!s:.200} must be different, and at least one"
        if len(self.weights) != count:
            return f"weights has {len(self.weights)} entries for {count} members"
        lists = {name: getattr(self, name) for name in _PER_MEMBER_FIELDS} | {"network.rates": network.rates}
        for name, values in lists.items():
            if len(values) not in (0, count):
                return f"{name} has {len(values)} entries for {count} members"
        if self.phase_steps and not self.steps:
            return f"phase_steps={self.phase_steps!s:.200} are parts of steps, and there are none"
        if any(place >= count or self.sites[place] != place for place in self.sites):
            return f"sites={self.sites!s:.200} names places of members that do not speak for themselves"
        speakers = sorted(set(self.sites)) or list(range(count))
        if network.order and sorted(network.order) != speakers:
            return f"network.order={network.order!s:.200} must have each of the members {speakers!s:.200} once"
        if any(place >= count for place in network.dial_out_only):
            return f"network.dial_out_only={network.dial_out_only!s:.200} names members beyond {count}"
        return self._problem_of_carried()

    def _problem_of_carried(self) -> str:
        names = [carried.member for carried in self.carried]
        if len(set(names)) < len(names):
            return f"carried={names!s:.200} names a member twice"
        for carried in self.carried:
            if carried.carrier not in self.members or carried.member in self.members or carried.member not in self.late:
                return f"{carried.member} cannot be carried by {carried.carrier}: one must be late, the other a member"
        return ""

    @cached_property
    def unsigned_text(self) -> str:
        """The signed text: the record with an empty signature."""
        # Quotes inside strings are escaped in JSON, so this pattern matches only the field itself.
        signature = json.dumps(self.signature)
        return self.text.replace(f'"signature": {signature}', '"signature": ""')

    @cached_property
    def id(self) -> str:
        """Unique id, even if a store with old data assigns the same version twice."""
        return f"{self.version}-{hashlib.blake2b(to_json(self).encode(), digest_size=6).hexdigest()}"

    @property
    def listed(self) -> tuple[str, ...]:
        """Its members, then its late members."""
        return (*self.members, *self.late)

    @property
    def total_weight(self) -> int:
        return sum(self.weights) + sum(carried.weight for carried in self.counted)

    @property
    def counted(self) -> tuple[Carried, ...]:
        """Carried contributions that count in this round."""
        return tuple(carried for carried in self.carried if carried.counts)

    def is_counted(self, member_id: str, offer: str) -> bool:
        """Whether this member's offer counts in this round through its carrier."""
        return any(carried.member == member_id and carried.offer == offer for carried in self.counted)

    def carried_by(self, member_id: str) -> tuple[Carried, ...]:
        """Contributions that this member carries, in summation order."""
        return tuple(carried for carried in self.counted if carried.carrier == member_id)

    def count_of(self, carried: Carried) -> float:
        """Weight of a carried contribution, defined like `counts`."""
        return 1 if self.is_equal else _one_phase_weight(carried.weight, carried.phase_steps, carried.steps)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each member's coefficient in this round's mean, in 0..1.

        The coefficients sum to more than 1 if a member trained for less than a usual contribution: the divisor counts
        it only by its `phase_fraction`. The mean is thus the drift per phase times the phases of a usual contribution
        (or of the longest one), so a joiner does not shorten a fragment's outer step.
        """
        total = sum(self._divisor_terms)
        return tuple(count / total if total else 0.0 for count in self._with_carried(self.counts))

    def _with_carried(self, counts: Sequence[float]) -> tuple[float, ...]:
        """Add to the members' weights those of the contributions that they carry."""
        if not self.counted:
            return tuple(counts)
        of_others = [sum(map(self.count_of, self.carried_by(member))) for member in self.members]
        return tuple(own + others for own, others in zip(counts, of_others, strict=True))

    @property
    def divisor_parts(self) -> tuple[float, ...]:
        """Each member's fraction of the mean's divisor; they sum to 1."""
        total = sum(self._divisor_terms)
        return tuple(part / total if total else 0.0 for part in self._divisor_terms)

    @property
    def _divisor_terms(self) -> tuple[float, ...]:
        if not self.max_phase_fraction:
            return self._with_carried(tuple(map(float, self.counts)))
        return self._with_carried(
            [c * t / self.max_phase_fraction for c, t in zip(self.counts, self.phase_fraction, strict=True)]
        )

    @property
    def counts(self) -> tuple[float, ...]:
        """Each member's relative weight: its reported weight, or 1 if all count equally.

        A contribution of several phases weighs as much as one phase, as each would have in the round that it missed.
        With `trust`, weights are capped at the median, since a member may report a false one.
        """
        counts = tuple(int(weight > 0) for weight in self.weights) if self.is_equal else self._phase_weights
        if not self.trust:
            return counts
        most = median_low([count for count in counts if count > 0] or [0])
        return tuple(min(count, most) * trust for count, trust in zip(counts, self.trust, strict=True))

    @property
    def _phase_weights(self) -> tuple[float, ...]:
        if not self.phase_steps:
            return self.weights
        columns = zip(self.weights, self.phase_steps, self.steps, strict=True)
        return tuple(_one_phase_weight(weight, phase, steps) for weight, phase, steps in columns)

    @property
    def advanced_steps(self) -> int:
        """Inner steps by which the round advances the run: the longest phase of any member."""
        return max(self.phase_steps or self.steps, default=0)

    @property
    def max_phase_fraction(self) -> float:
        """Largest `phase_fraction` of a member with weight, at most 1; 0: equal for all."""
        fractions = [t for t, w in zip(self.phase_fraction, self.weights, strict=False) if w > 0]
        return max(0.0, min(1.0, max(fractions, default=0.0)))

    @property
    def max_value(self) -> float:
        """Bound on the magnitude of the mean's values; infinite if the members did not report theirs."""
        # |mean| <= largest member value * sum of the shares; the factor of 2 allows for the codec's rounding.
        return 2 * max(self.largest) * max(1.0, sum(self.shares)) if self.largest else math.inf

    @property
    def leaving(self) -> tuple[str, ...]:
        """Members that leave after this round: they request no samples while others do.

        At the end of the run no member requests any.
        """
        asked = dict(zip(self.members, self.steps_requested, strict=False))
        return tuple(m for m, steps in asked.items() if steps == 0) if any(asked.values()) else ()

    @property
    def dial_out_only(self) -> frozenset[str]:
        """Members that others cannot dial."""
        return frozenset(self.members[place] for place in self.network.dial_out_only)

    def share(self, member_id: str) -> float:
        """One member's share."""
        return self.shares[self.members.index(member_id)]

    def expected_share(self, member_id: str, weight: int) -> float:
        """Estimate a member's share in the next round, to which it brings `weight` tokens.

        Other members are assumed to bring as many tokens as to this round. One that brought none (a joiner, or anyone
        in the bootstrap round) is assumed to bring tokens in proportion to its requested steps; one that requested none
        leaves.
        """
        own = self.members.index(member_id)
        asked = max(1, self.steps_requested[own])
        known = zip(self.weights, self.steps_requested, strict=True)
        weights = [(before or weight * steps // asked) if steps else 0 for before, steps in known]
        weights[own] = weight
        phases = [(p, s)[m == own] for m, (p, s) in enumerate(zip(self.phase_steps, self.steps, strict=False))]
        return replace(self, weights=tuple(weights), phase_steps=tuple(phases)).share(member_id)

    def is_same_site(self, one: str, other: str) -> bool:
        """Whether two members are in the same site."""
        if not self.sites:
            return one == other
        return self.sites[self.members.index(one)] == self.sites[self.members.index(other)]

    def speakers(self) -> dict[str, str]:
        """The speaker of each member's site: the only one that uses the wide-area network."""
        return {m: self.members[place] for m, place in zip(self.members, self.sites, strict=False)}

    def contributors(self) -> dict[str, int]:
        """Inner steps of each contributing node: members with weight and carried late members."""
        member_columns = {m: s for m, w, s in zip(self.members, self.weights, self.steps, strict=False) if w > 0}
        return member_columns | {carried.member: carried.steps for carried in self.counted}

    def wanted(self) -> dict[str, int]:
        """Inner steps that each member requests samples for."""
        return dict(zip(self.members, self.steps_requested, strict=False))

    def claim_records(self) -> dict[str, dict[str, Any]]:
        """Joiners' claims as plain JSON values, by member."""
        return {member: to_record(claim) for member, claim in self.claims}

    def corpus_of(self) -> dict[str, str]:
        """Corpus of each member."""
        return dict(zip(self.members, self.corpora or (SHARED,) * len(self.members), strict=True))


@dataclass(frozen=True)
class Attempt:
    """An uncommitted plan with everything that its members signed about it."""

    plan: RoundPlan
    votes: Mapping[str, str] = field(default_factory=dict[str, str])
    evidence: Mapping[str, Evidence] = field(default_factory=dict[str, Evidence])
    failed: str = ""
    """Reason of the failure, prefixed by the reporting member; empty: none was reported."""
    tag: str = field(default="", compare=False)
    """Version in the store: tells it from the same attempt with more votes or evidence."""


@dataclass(frozen=True)
class _KnownParts:
    """Typed parts of a verdict's record, without progress and losses."""

    weight: Count = 0
    session: Id | None = None
    session_before: Id | None = None
    state_before: Id = ""
    grad_norm: float = 0.0
    updates_before: Count = 0


def _with_known_parts(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Validate the known parts. Raises ValueError."""
    known = {part.name: record[part.name] for part in fields(_KnownParts) if part.name in record}
    _adapter(_KnownParts).validate_json(json.dumps(known), strict=True)
    return record


VerdictRecord = Annotated[Mapping[Id, Any], AfterValidator(_with_known_parts)]
"""Data in a verdict besides its plan and digest."""


@dataclass(frozen=True)
class Verdict(CachedRecord):
    """Commits a round: the members of its plan hold the same result. Written once per round."""

    plan: RoundPlan
    digest: Id
    """Digest of the reduced result."""
    record: VerdictRecord = field(default_factory=dict[str, Any])
    """Other data that the round fixed for all, such as progress with the data ledgers."""

    @property
    def round(self) -> int:
        return self.plan.round

    @property
    def members(self) -> tuple[str, ...]:
        return self.plan.members

    @cached_property
    def sessions(self) -> tuple[str, ...]:
        """The run's session after this round, then earlier ones, newest first.

        Each bootstrap begins a session and names the one that it continues, so surviving members of that session learn
        that they were left behind. A session that is not listed belongs to another run.
        """
        named = (self.record.get("session"), self.record.get("session_before"), *self.plan.sessions)
        return tuple(dict.fromkeys(session for session in named if session))[:_MAX_SESSIONS]

    @property
    def session(self) -> str:
        """The run's session after this round; empty if none is named."""
        return next(iter(self.sessions), "")


def session_after(plan: RoundPlan) -> str:
    """Name the session that begins with this plan: equal on all members, unique per plan."""
    return hashlib.blake2b(f"session {to_json(plan)}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Peer:
    """A member's address and reachability. Its guardian writes it with every lease renewal."""

    node_id: Id
    host: Id
    port: Port
    """The node's single port, for probes, state transfer and the data plane."""
    serves_state: bool
    """Whether others may fetch its state."""
    cut_off: EachMember[Id] = ()
    """Members that have not answered its probes for `fault.detect_s`."""
    doubted: EachMember[Id] = ()
    """Members that have not answered for a fraction of that; all others then probe them as well."""
    undialled: EachMember[Id] = ()
    """Members whose probes arrive here although their address accepts no connection from here."""
    relays: EachMember[Id] = ()
    """Members that relay connections to this one, preferred first; empty: it can be dialled."""
    store_port: Port = 0
    """Port of the node's store; 0: it runs none."""


@dataclass(frozen=True)
class LinkRates:
    """A member's measured links. Rewritten on notable change; read by a plan's proposer."""

    mbit: Annotated[Mapping[Id, Mbit], Field(max_length=MOST_MEMBERS)] = field(default_factory=dict[str, int])
    """Rate to each other member, where known."""
    rtt_ms: Millis = 0
    """Longest round trip to another member; 0: unknown."""


@dataclass(frozen=True, order=True)
class StoreTerm:
    """A generation: one use of a store by a run with several stores. The higher number is newer."""

    number: Count
    store: Id
    """Random id of the store; one that lost its data has a new id and counts as another store."""


@dataclass(frozen=True)
class View:
    """A consistent snapshot of the store, as returned by one read."""

    plan: RoundPlan | None
    committed: Verdict | None
    """The run's newest verdict."""
    alive: frozenset[str]
    """Members with a valid lease."""
    ready: Mapping[str, Ready]
    """Members at the boundary of the requested round."""
    votes: Mapping[str, str]
    """Votes on the current plan."""
    failed: str | None
    """Reason why the current plan failed, if a member reported one."""
    peers: Mapping[str, Peer] = field(default_factory=dict[str, Peer])
    is_known: bool = True
    """False: the store has no record of this run: the run is new, or the store lost its data."""
    is_settling: bool = False
    """The store just lost its data: no decisions until members had time to restore it."""
    orders: Orders = field(default_factory=Orders)
    restart_point: RestartPoint | None = None
    """The newest agreement to restart from a checkpoint."""
    unseen_ready: int = 0
    """Further members at the boundary that `ready` does not list; it lists at least this member."""
    unseen_votes: int = 0
    """Further votes that `votes` does not list."""
    generation: StoreTerm | None = None
    """The store's generation; None in a run with a single store."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Members whose authentic record for this round is invalid, with the reason."""
    is_proven: bool = True
    """All signatures on the plan, ready records and votes were verified. False: some were skipped (`plan_checks`)."""

    @property
    def arrived(self) -> int:
        """Number of members at the boundary."""
        return len(self.ready) + self.unseen_ready

    @property
    def voted(self) -> int:
        """Number of votes on the current plan."""
        return len(self.votes) + self.unseen_votes

    def counted(self) -> View:
        """Drop banned members and duplicate node ids; all nodes drop the same ones.

        If living nodes share an id under several keys, the key that is in the run stays, else the one whose member id
        sorts first (`rounds/waits.py`).
        """
        members = {*self.alive, *self.peers, *self.ready} if self.orders.banned else set[str]()
        out = {member for member in members if self.orders.bans(member)}
        out |= self._duplicate_ids(self.alive - out)
        if not out:
            return self
        ready, votes, peers = (
            {member: record for member, record in records.items() if member not in out}
            for records in (self.ready, self.votes, self.peers)
        )
        return replace(self, alive=self.alive - out, ready=ready, votes=votes, peers=peers)

    def _duplicate_ids(self, alive: Iterable[str]) -> set[str]:
        """Living members whose node id belongs to a node with another key."""
        ids = {member: self.peers[member].node_id for member in alive if member in self.peers}
        if len(set(ids.values())) == len(ids):
            return set()
        listed = self.committed.members if self.committed is not None else ()
        holders = dict[str, str]()
        for member in sorted(ids, key=lambda member: (member not in listed, member)):
            holders.setdefault(ids[member], member)
        return {m for m in ids if public_key_in(m) is not None and not is_of_key(m, holders[ids[m]])}

    def cuts_among(self, members: Sequence[str]) -> dict[str, set[str]]:
        """Broken links among these members, which all reach the store: each end mapped to its unreachable peers."""
        asked, cuts = set(members), dict[str, set[str]]()
        for one in members:
            for other in self.peers[one].cut_off if one in self.peers else ():
                if other in asked and other != one:
                    cuts.setdefault(one, set()).add(other)
                    cuts.setdefault(other, set()).add(one)
        return cuts

    def can_finish(self, plan: RoundPlan) -> bool:
        """Whether this plan is current, has not failed, and every member that it still needs is alive."""
        return self.plan == plan and self.failed is None and not self.lost(plan)

    def lost(self, plan: RoundPlan) -> tuple[str, ...]:
        """Members that block a plan: their lease expired, or they are cut off from another member.

        Members that voted are no longer needed, unless none is left to write the verdict.
        """
        if not any(m in self.alive for m in plan.members):
            return plan.members
        unvoted = [m for m in plan.members if m not in self.votes]
        dead, cuts = [m for m in unvoted if m not in self.alive], self.cuts_among(plan.members)
        cut = [m for m in unvoted if m in cuts]
        return tuple(dict.fromkeys([*dead, *cut]))


@dataclass(frozen=True)
class RestartPoint:
    """Agreement to bootstrap the run from a checkpoint."""

    round: Round
    """The bootstrap round: above all earlier rounds."""
    step: Count
    """Inner step of the checkpoint."""
    state_digest: Id
    """Digest of its outer state."""
    member: Id
    """The proposer."""
    sessions: EachMember[Id] = ()
    """Sessions of the dead run, as in its newest verdict."""


def view_to_record(view: View) -> dict[str, Any]:
    """Convert a view to JSON values for diagnostics."""
    return {**asdict(view), "alive": sorted(view.alive)}


@dataclass(frozen=True)
class Wait:
    """A decision that cannot be taken yet."""

    reason: str
    waiting_for: tuple[str, ...] = ()
    lacks_electors: bool = False
    """Too few electors: the others may continue on another store."""


def to_json(value: object) -> str:
    """Encode a record canonically: equal records give equal text, by which the store compares plans."""
    return value.text if isinstance(value, CachedRecord) else _text_of(value)


def _text_of(value: object) -> str:
    return sorted_json(_adapter(type(value)).dump_python(value, warnings="error"))


sorted_json = json.JSONEncoder(sort_keys=True).encode
"""Encode JSON with sorted keys; `json.dumps` with options builds a new encoder on each call."""


def from_json(kind: type[_R], text: str) -> _R:
    """Decode a record. Raises ValueError for text that is not canonical, as encoded by `to_json`."""
    return _parsed(kind, text)


@lru_cache(maxsize=256)  # successive reads of the store return mostly the same records
def _parsed(kind: type[Any], text: str) -> Any:
    value = _adapter(kind).validate_json(text, strict=True)
    if to_json(value) != text:
        raise ValueError(f"not how a {kind.__name__} is written: {text:.200}")
    return value


def to_record(value: object) -> dict[str, Any]:
    """Convert a record to plain JSON values, to embed in another record."""
    return json.loads(to_json(value))


def from_record(kind: type[_R], record: Mapping[str, Any]) -> _R:
    """Convert plain JSON values back to a record. Raises ValueError."""
    return from_json(kind, sorted_json(record))


def problem_of(error: ValueError) -> str:
    """Describe the first invalid field, its value and the bound; empty if the error names no field."""
    if not isinstance(error, ValidationError):
        return ""
    first = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}={first['input']!s:.80}: {first['msg']:.300}"


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
