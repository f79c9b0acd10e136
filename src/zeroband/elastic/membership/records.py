"""The records that members exchange through the store, and what one look at it shows; as JSON, and back."""

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

_MOST_SESSIONS = 16
"""Sessions that a run remembers; members of older ones count as strangers."""


_OF_EACH_MEMBER = ("steps", "steps_requested", "trust", "phase_fraction", "corpora", "sites", "largest", "phase_steps")

FOUNDING_ROUND = 0
"""The round that starts a run: nothing is reduced, the founders only agree on their initial state."""


class LongRecord:
    """A record of many members: its text is made once, as it takes longer than all else that is done with it."""

    @cached_property
    def text(self) -> str:
        """The record as `to_json` gives it."""
        return _text_of(self)


@dataclass(frozen=True)
class Carry:
    """A contribution that a member holds whole and counts in place of a member with a slow link."""

    member: Id
    """Whose it is."""
    offer: Id
    """As in that member's `Ready`."""
    largest: Magnitude
    """Largest size of a value in it, as the carrier found it."""


@dataclass(frozen=True)
class Claim:
    """A range of samples that a joiner trains on before a round deals it any."""

    start: Count
    stop: Count
    corpus: Id = SHARED
    """Name of the corpus that they are of, as in `Ready`."""

    @property
    def span(self) -> Range:
        return self.start, self.stop


@dataclass(frozen=True)
class Ready:
    """A member has arrived at the boundary of `round`. Written once for each member and round."""

    round: Round
    weight: Count
    """Tokens it contributes; 0 for a joiner, and for a node whose update was not finite."""
    state_digest: Id
    """Digest of the outer state that it holds; only members with the same state reduce together."""
    steps: Count = 0
    """Inner steps behind what it contributes."""
    steps_requested: Count = 0
    """Inner steps for which it is to hold samples after this round; 0 says that it leaves. At a founding: those of one
    round."""
    rate: Mbit = 0
    """Mbit/s that its access link was seen to carry in each direction; 0: not known."""
    took_ms: Millis = 0
    """Milliseconds of its last transfer, as rate control counts them; 0: it had none, or the last one failed."""
    loss: Loss | None = None
    """Mean over what it contributes, in nats per token. None: it made no step, or the loss is not finite."""
    phase_fraction: Phases = 1.0
    """Part of the phases that usually lie behind a contribution; below 1 for fragments that a joiner took over whole
    with the others, and at a run's start, above 1 for one whose last turn this node was late for."""
    corpus: Id = SHARED
    """Name of the corpus that its samples are of: the one that all nodes share, or one of its node's own."""
    site: Id | None = None
    """The site that its node is at, as configured; None: it names none."""
    largest: Magnitude | None = None
    """Largest size of a value that it contributes to a mean; None: not known, or it sends payloads."""
    gains: EachMember[Ratio | None] = ()
    """By how much each payload of the round before that was drawn (`scoring`) lowers its held-out loss, as a part of
    what its own payload does; None of one that it could not measure. Empty: it measured none."""
    offer: Id | None = None
    """What it contributes, as its carrier can fetch it: a number and a hash. Empty: it could be carried, and offers
    nothing yet. None: what it contributes cannot be carried, nor can it carry others'."""
    carries: EachMember[Carry] = ()
    """Contributions of members with slow links that it holds whole."""
    phase_steps: Count | None = None
    """Inner steps of the longest of several phases that it contributes at once, since rounds were committed without
    it; None: it contributes one."""
    claim: Claim | None = None
    """Samples that it claimed as a joiner; None: it trained on what it was dealt."""


@dataclass(frozen=True)
class Gain:
    """What the members found a payload of the round before to be worth."""

    member: Id
    """Its sender."""
    ratio: Ratio
    """By how much it lowers the others' held-out loss, as a part of what their own payloads do: their median. 1: as
    much as these, or more; below 0: the loss rises."""


@dataclass(frozen=True)
class Blame:
    """Who kept a round from its end, as follows from what its members testified."""

    members: EachMember[Id]
    """One member that is at fault; or two, one of which is, and nothing shows the others which."""
    reason: Text
    is_lie: bool
    """Bytes or words contradict each other. False: something did not come, for which a bad network is enough."""
    consequence: Literal["named", "apart", "out"]
    """What follows: nothing yet; the two do not take part in one round; or the member is put out."""
    round: Round


@dataclass(frozen=True)
class Evidence:
    """What a member saw of a plan that failed. Written once for each plan, by each of its members."""

    held: EachMember[Id] = ()
    """SHA-256 of the part of the result that came from each member, in the order of the members; empty where it did
    not get all of it, or where parts come through others."""
    lacks: EachMember[Id] = ()
    """Members whose own contribution stopped coming."""
    lacks_mean: EachMember[Id] = ()
    """Members whose contribution came, and whose part of the mean stopped coming."""
    refused: EachMember[Id] = ()
    """Members that sent something that cannot be taken: values that are not finite, or a part twice."""
    shown: EachMember[Id] = ()
    """SHA-256 of what each member drew and showed in the audit of the result, in the order of the members; empty where
    it did not get all of it, or there was none."""
    wrong: EachMember[Id] = ()
    """Members whose part of the result is not the sum of what was shown."""
    denied: EachMember[Id] = ()
    """Members that showed another contribution to its own part than they had sent it."""


@dataclass(frozen=True)
class Carried:
    """A member that is not in the exchange since its link is slow: another one fetches what it contributes."""

    member: Id
    carrier: Id
    offer: Id
    """As in its `Ready`, and so are the next four."""
    weight: Count
    steps: Count
    largest: Magnitude | None
    phase_steps: Count | None
    counts: bool
    """The carrier holds it whole, so that it counts in this round."""


def _weight_of_phase(weight: int, phase_steps: int | None, steps: int) -> float:
    """What a contribution of several phases counts: as one of them does (`RoundPlan.counts`)."""
    return weight if phase_steps is None or phase_steps >= steps else weight * phase_steps / steps


@dataclass(frozen=True)
class RoundPlan(LongRecord):
    """Round `round` is open to exactly these members, in the order of their node ranks."""

    version: Version
    """Grows by one with every plan of the run; fences everything that refers to an older one."""
    epoch: Epoch
    """Number of the membership; grows whenever the groups between the nodes must be built anew."""
    round: Round
    members: EachMember[Id]
    weights: EachMember[Count]
    """One for each member, as in its `Ready`; so are the next two."""
    steps: EachMember[Count] = ()
    steps_requested: EachMember[Count] = ()
    late: EachMember[Id] = ()
    """Members whose links this round goes without, since they or their links are slow: what they learned goes into a
    later one, or is carried into this one."""
    carried: EachMember[Carried] = ()
    """Those of the late members whose contributions others fetch, in the order of their ids."""
    retries: Count = 0
    """How often this round was given up before, although no member was lost."""
    is_flat: bool = False
    """Every part of the result comes directly from the member that made it, whatever the network is like: so what came
    tells of that member alone."""
    before: Id = ""
    """Id of the plan that it follows; empty: it is the first one."""
    silent: EachMember[Id] = ()
    """Living members of that plan that did not testify on its failure in time."""
    blames: EachMember[Blame] = ()
    """Findings on earlier attempts that still count, newest last."""
    network: LinkTable = field(default_factory=LinkTable)
    """Link rates that the transfer is planned with."""
    orders: Count = 0
    """Version of the operators' orders that it was proposed under."""
    rollback: Count | None = None
    """Inner step of the checkpoint whose state the members take, instead of reducing anything."""
    trust: EachMember[Share] = ()
    """Each member's factor in 0..1 for its agreement with earlier rounds; none: the run does not ask for it."""
    skips_data: bool = False
    """With a rollback: samples trained on since that checkpoint are skipped."""
    loss: Loss | None = None
    """Mean loss of the members that count, by weight, in nats per token; None: no member has a finite one."""
    sessions: EachMember[Id] = ()
    """The run's session at the proposal, then earlier ones, newest first; none before the founding."""
    phase_fraction: EachMember[Phases] = ()
    """`Ready.phase_fraction` of each member; none: equal for all that have weight."""
    corpora: EachMember[Id] = ()
    """`Ready.corpus` of each member; none: all share one."""
    is_equal: bool = False
    """All members with weight count the same."""
    sites: EachMember[MemberPlace] = ()
    """Place of the speaker of each member's site; the member's own if it speaks for itself or has no site; none: the
    run has no sites."""
    largest: EachMember[Magnitude] = ()
    """`Ready.largest` of each member, 0 without weight; none: not known of all that have weight."""
    gains: EachMember[Gain] = ()
    """Measured value of the previous round's payloads; none: no payload was drawn, or too few members measured."""
    phase_steps: EachMember[Count] = ()
    """Inner steps of the longest phase in each contribution; none: each is of one phase."""
    claims: EachMember[tuple[Id, Claim]] = ()
    """Claims of joiners, each after its member id; this plan's commit deals them to these joiners."""
    proposer: Id = ""
    """Member that proposed it."""
    signature: Id = ""
    """The proposer's, in base64, over all of the above."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ValueError(problem)

    def _problem(self) -> str:
        """Why the rules cannot use this plan: lists of other lengths, or places beyond the member list."""
        count, network = len(self.members), self.network
        if not count or len(set(self.members)) < count:
            return f"members={self.members!s:.200} must be different, and at least one"
        if len(self.weights) != count:
            return f"weights has {len(self.weights)} entries for {count} members"
        lists = {name: getattr(self, name) for name in _OF_EACH_MEMBER} | {"network.rates": network.rates}
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
        """What the signature is over."""
        signature = json.dumps(self.signature)  # a quote within a text has a backslash before it, so this is the field
        return self.text.replace(f'"signature": {signature}', '"signature": ""')

    @cached_property
    def id(self) -> str:
        """Tells this plan from every other one, also from one that a store with old data gave the same version."""
        return f"{self.version}-{hashlib.blake2b(to_json(self).encode(), digest_size=6).hexdigest()}"

    @property
    def total_weight(self) -> int:
        return sum(self.weights) + sum(carried.weight for carried in self.counted)

    @property
    def counted(self) -> tuple[Carried, ...]:
        """Contributions of members outside the exchange that count."""
        return tuple(carried for carried in self.carried if carried.counts)

    def is_counted(self, member_id: str, offer: str) -> bool:
        """Whether what this member offers counts without it."""
        return any(carried.member == member_id and carried.offer == offer for carried in self.counted)

    def carried_by(self, member_id: str) -> tuple[Carried, ...]:
        """Contributions that this member carries, in the order in which it adds them."""
        return tuple(carried for carried in self.counted if carried.carrier == member_id)

    def count_of(self, carried: Carried) -> float:
        """Weight of a carried contribution, as `counts` has it of members."""
        return 1 if self.is_equal else _weight_of_phase(carried.weight, carried.phase_steps, carried.steps)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each member's share in the mean of this round, in 0..1.

        They add up to 1, or to more if a member trained its contribution for less than the usual time: the divisor
        counts that member by the fraction that it trained.

        A contribution grows with the phases in it. So the mean is the drift per phase, times the phases of a usual
        contribution (or of the longest one if none is whole): a joiner does not shorten a fragment's outer step.
        """
        total = sum(self._behind_divisor)
        return tuple(count / total if total else 0.0 for count in self._with_carried(self.counts))

    def _with_carried(self, counts: Sequence[float]) -> tuple[float, ...]:
        """Weights of the members, including the contributions that they carry."""
        if not self.counted:
            return tuple(counts)
        of_others = [sum(map(self.count_of, self.carried_by(member))) for member in self.members]
        return tuple(own + others for own, others in zip(counts, of_others, strict=True))

    @property
    def divisor_parts(self) -> tuple[float, ...]:
        """Each member's part of the mean's divisor, in 0..1; the parts add up to 1."""
        total = sum(self._behind_divisor)
        return tuple(part / total if total else 0.0 for part in self._behind_divisor)

    @property
    def _behind_divisor(self) -> tuple[float, ...]:
        if not self.max_phase_fraction:
            return self._with_carried(tuple(map(float, self.counts)))
        return self._with_carried(
            [c * t / self.max_phase_fraction for c, t in zip(self.counts, self.phase_fraction, strict=True)]
        )

    @property
    def counts(self) -> tuple[float, ...]:
        """Each member's relative weight: its own weight, or 1 if all count equally.

        A contribution of several phases counts as one of them: each would have counted this much in the round that it
        was late for. With `trust`, no member counts more than the median, whatever weight it reports.
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
        return tuple(_weight_of_phase(weight, phase, steps) for weight, phase, steps in columns)

    @property
    def moves_on(self) -> int:
        """Inner steps by which the round advances the run: the longest phase of a member."""
        return max(self.phase_steps or self.steps, default=0)

    @property
    def max_phase_fraction(self) -> float:
        """The largest fraction of the usual time that a member trained, at most 1; 0: the same for all."""
        fractions = [t for t, w in zip(self.phase_fraction, self.weights, strict=False) if w > 0]
        return max(0.0, min(1.0, max(fractions, default=0.0)))

    @property
    def most_value(self) -> float:
        """Bound on the magnitude of the mean's values; infinite if the members did not report theirs.

        A mean is at most the members' largest value times the sum of their shares; a factor of 2 allows for rounding.
        """
        return 2 * max(self.largest) * max(1.0, sum(self.shares)) if self.largest else math.inf

    @property
    def leaving(self) -> tuple[str, ...]:
        """Members that ask for no samples while others do: they were asked to leave, and are in no later round.

        At the end of the run no member asks for any.
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
        """Estimate a member's share of the next round, to which it brings `weight` tokens, before that round is open.

        Each other member is assumed to bring as many tokens as to this round. One that brought none (all at a founding,
        later each joiner) is assumed to bring tokens in proportion to the steps that it asked samples for. A member
        that asked for none is leaving.
        """
        own = self.members.index(member_id)
        asked = max(1, self.steps_requested[own])
        known = zip(self.weights, self.steps_requested, strict=True)
        weights = [(before or weight * steps // asked) if steps else 0 for before, steps in known]
        weights[own] = weight
        phases = [(p, s)[m == own] for m, (p, s) in enumerate(zip(self.phase_steps, self.steps, strict=False))]
        return replace(self, weights=tuple(weights), phase_steps=tuple(phases)).share(member_id)

    def is_near(self, one: str, other: str) -> bool:
        """Whether two members are in the same site."""
        if not self.sites:
            return one == other
        return self.sites[self.members.index(one)] == self.sites[self.members.index(other)]

    def speakers(self) -> dict[str, str]:
        """The speaker of each member's site, which alone uses the wide network."""
        return {m: self.members[place] for m, place in zip(self.members, self.sites, strict=False)}

    def contributors(self) -> dict[str, int]:
        """Inner steps of each node whose update counts: members, and late members that are carried."""
        of_members = {m: s for m, w, s in zip(self.members, self.weights, self.steps, strict=False) if w > 0}
        return of_members | {carried.member: carried.steps for carried in self.counted}

    def wanted(self) -> dict[str, int]:
        """Inner steps that the members ask samples for."""
        return dict(zip(self.members, self.steps_requested, strict=False))

    def claims_told(self) -> dict[str, dict[str, Any]]:
        """The joiners' claims as plain values, by member."""
        return {member: to_record(claim) for member, claim in self.claims}

    def corpus_of(self) -> dict[str, str]:
        """Name of the corpus of each member."""
        return dict(zip(self.members, self.corpora or (SHARED,) * len(self.members), strict=True))


@dataclass(frozen=True)
class Attempt:
    """A plan that was not committed, and all that its members signed on it."""

    plan: RoundPlan
    votes: Mapping[str, str] = field(default_factory=dict[str, str])
    said: Mapping[str, Evidence] = field(default_factory=dict[str, Evidence])
    failed: str = ""
    """Why it failed, which begins with who said so; empty: no member said so."""
    tag: str = field(default="", compare=False)
    """Distinguishes it in the store from the same one with more words."""


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
    """Raises ValueError where a part that is read is of another type or out of range."""
    known = {part.name: record[part.name] for part in fields(_KnownParts) if part.name in record}
    _adapter(_KnownParts).validate_json(json.dumps(known), strict=True)
    return record


VerdictRecord = Annotated[Mapping[Id, Any], AfterValidator(_with_known_parts)]
"""Further data in a verdict, after its plan and digest."""


@dataclass(frozen=True)
class Verdict(LongRecord):
    """A round is committed: the members of its plan hold the same result. Written once for each round."""

    plan: RoundPlan
    digest: Id
    """Digest of the reduced result."""
    record: VerdictRecord = field(default_factory=dict[str, Any])
    """Other data that the round fixed for all: progress with the data ledgers, norm of the mean gradient."""

    @property
    def round(self) -> int:
        return self.plan.round

    @property
    def members(self) -> tuple[str, ...]:
        return self.plan.members

    @cached_property
    def sessions(self) -> tuple[str, ...]:
        """The run's session after this round, then earlier ones, newest first.

        Each founding begins a new session and names the one that it continues. A surviving member of that session thus
        learns that it was left behind; a session that is not named belongs to another run.
        """
        named = (self.record.get("session"), self.record.get("session_before"), *self.plan.sessions)
        return tuple(dict.fromkeys(session for session in named if session))[:_MOST_SESSIONS]

    @property
    def session(self) -> str:
        """Session of the run after this round; empty if none is named."""
        return next(iter(self.sessions), "")


def session_after(plan: RoundPlan) -> str:
    """Name of the session that begins with this plan: the same on all members, another for each plan."""
    return hashlib.blake2b(f"session {to_json(plan)}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Peer:
    """Where a member is found, and whom it does not reach. Its guardian writes it with every renewal of the lease."""

    node_id: Id
    host: Id
    port: Port
    """Its one port: for probes, for its state and for the data plane."""
    serves_state: bool
    """Whether others may fetch its state."""
    cut_off: EachMember[Id] = ()
    """Members that did not answer its probes for `fault.detect_s`."""
    doubted: EachMember[Id] = ()
    """Members that did not answer them for a part of that, so that others ask them too."""
    undialled: EachMember[Id] = ()
    """Members whose probes come here, and whose address takes no connection from here."""
    relays: EachMember[Id] = ()
    """Members that pass calls on to this one, the first one first, as others cannot dial it; none: it is dialled."""
    store_port: Port = 0
    """Port of the store that its node holds; 0: it holds none."""


@dataclass(frozen=True)
class LinkRates:
    """What a member knows of its links. Written anew where they changed notably; who proposes a plan reads it."""

    mbit: Annotated[Mapping[Id, Mbit], Field(max_length=MOST_MEMBERS)] = field(default_factory=dict[str, int])
    """To each other member, as far as known."""
    rtt_ms: Millis = 0
    """The longest round trip to another member; 0: not known."""


@dataclass(frozen=True, order=True)
class StoreTerm:
    """A time in which a run of several stores uses one of them. Of two, that of the higher number is the newer one."""

    number: Count
    store: Id
    """Id that the store gave itself; one that lost its memory has another id, and so is another store."""


@dataclass(frozen=True)
class View:
    """What one look at the store showed, all of it at one instant."""

    plan: RoundPlan | None
    committed: Verdict | None
    """The newest verdict of the run."""
    alive: frozenset[str]
    """Members whose lease holds."""
    ready: Mapping[str, Ready]
    """Those at the boundary of the round that was asked for."""
    votes: Mapping[str, str]
    """Digests voted for the current plan."""
    failed: str | None
    """Why the current plan cannot be finished, if a member said so."""
    peers: Mapping[str, Peer] = field(default_factory=dict[str, Peer])
    is_known: bool = True
    """False: the store has no record of this run, because it is new or because the store lost it."""
    is_settling: bool = False
    """The store lost its record a moment ago: members are given time to bring it back before anything is decided."""
    orders: Orders = field(default_factory=Orders)
    restart_point: RestartPoint | None = None
    """The newest agreement to restart from a checkpoint."""
    unseen_ready: int = 0
    """Members at the boundary that `ready` does not list; it has at least this member."""
    unseen_votes: int = 0
    """Votes that `votes` does not list."""
    generation: StoreTerm | None = None
    """The one that this store is in; None: none, as in runs that have one store."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Members whose record for this round is sealed and does not count, and why."""
    is_proven: bool = True
    """Every signature on the plan, the ready records and the votes was verified. False: some were accepted unverified
    (`proofs`)."""

    @property
    def arrived(self) -> int:
        """How many stand at the boundary."""
        return len(self.ready) + self.unseen_ready

    @property
    def voted(self) -> int:
        """How many have voted for the current plan."""
        return len(self.votes) + self.unseen_votes

    def counted(self) -> View:
        """Drop the members that do not count; all nodes drop the same ones.

        These are members with a banned key and, if living nodes share an id under several keys, all but one of them:
        the key that is in the run stays, else the one whose member id sorts first (`rounds/duplicate_ids.py`).
        """
        members = {*self.alive, *self.peers, *self.ready} if self.orders.banned else set[str]()
        out = {member for member in members if self.orders.bans(member)}
        out |= self._of_taken_ids(self.alive - out)
        if not out:
            return self
        ready, votes, peers = (
            {member: word for member, word in words.items() if member not in out}
            for words in (self.ready, self.votes, self.peers)
        )
        return replace(self, alive=self.alive - out, ready=ready, votes=votes, peers=peers)

    def _of_taken_ids(self, alive: Iterable[str]) -> set[str]:
        """Living members whose node id is that of a node with another key."""
        ids = {member: self.peers[member].node_id for member in alive if member in self.peers}
        if len(set(ids.values())) == len(ids):
            return set()
        listed = self.committed.members if self.committed is not None else ()
        holders = dict[str, str]()
        for member in sorted(ids, key=lambda member: (member not in listed, member)):
            holders.setdefault(ids[member], member)
        return {m for m in ids if public_key_in(m) is not None and not is_of_key(m, holders[ids[m]])}

    def cuts_among(self, members: Sequence[str]) -> dict[str, set[str]]:
        """Which of these members cannot reach one another, though they reach the store: both ends of each cut."""
        asked, cuts = set(members), dict[str, set[str]]()
        for one in members:
            for other in self.peers[one].cut_off if one in self.peers else ():
                if other in asked and other != one:
                    cuts.setdefault(one, set()).add(other)
                    cuts.setdefault(other, set()).add(one)
        return cuts

    def can_finish(self, plan: RoundPlan) -> bool:
        """Whether this plan is the current one and every member that it still needs is there."""
        return self.plan == plan and self.failed is None and not self.lost(plan)

    def lost(self, plan: RoundPlan) -> tuple[str, ...]:
        """Members that keep a plan from being finished: without a lease, or cut off from another member.

        A member that has voted is no longer needed, unless no member is left to write the verdict.
        """
        if not any(m in self.alive for m in plan.members):
            return plan.members
        unvoted = [m for m in plan.members if m not in self.votes]
        dead, cuts = [m for m in unvoted if m not in self.alive], self.cuts_among(plan.members)
        cut = [m for m in unvoted if m in cuts]
        return tuple(dict.fromkeys([*dead, *cut]))


@dataclass(frozen=True)
class RestartPoint:
    """Agreement on founding a run from a checkpoint."""

    round: Round
    """The founding round: above all earlier rounds."""
    step: Count
    """Inner step of the checkpoint."""
    state_digest: Id
    """Digest of its outer state."""
    member: Id
    """The proposer."""
    sessions: EachMember[Id] = ()
    """Sessions of the dead run, as in its newest verdict."""


def view_to_record(view: View) -> dict[str, Any]:
    """A view as JSON-ready values, for a person to read."""
    return {**asdict(view), "alive": sorted(view.alive)}


@dataclass(frozen=True)
class Wait:
    """A decision that cannot be taken yet."""

    reason: str
    waiting_for: tuple[str, ...] = ()
    is_too_few: bool = False
    """The others may have gone on with another store."""


def to_json(value: object) -> str:
    """A record as text, always the same for equal records: the store compares plans by it."""
    return value.text if isinstance(value, LongRecord) else _text_of(value)


def _text_of(value: object) -> str:
    return sorted_json(_adapter(type(value)).dump_python(value, warnings="error"))


sorted_json = json.JSONEncoder(sort_keys=True).encode
"""JSON with sorted keys; `json.dumps` would make its encoder anew each time."""


def from_json(kind: type[_R], text: str) -> _R:
    """The inverse of `to_json`. Raises ValueError for a text that it does not give: one value has one text."""
    return _parsed(kind, text)


@lru_cache(maxsize=256)  # a look at the store shows mostly what the one before it showed
def _parsed(kind: type[Any], text: str) -> Any:
    value = _adapter(kind).validate_json(text, strict=True)
    if to_json(value) != text:
        raise ValueError(f"not how a {kind.__name__} is written: {text:.200}")
    return value


def to_record(value: object) -> dict[str, Any]:
    """A record as plain JSON values, which may be a part of another record."""
    return json.loads(to_json(value))


def from_record(kind: type[_R], record: Mapping[str, Any]) -> _R:
    """The inverse of `to_record`. Raises ValueError for what is no such record."""
    return from_json(kind, sorted_json(record))


def problem_of(error: ValueError) -> str:
    """Name the field of a record that did not count, its value and the bound; empty where it is no question of one."""
    if not isinstance(error, ValidationError):
        return ""
    first = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}={first['input']!s:.80}: {first['msg']:.300}"


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
