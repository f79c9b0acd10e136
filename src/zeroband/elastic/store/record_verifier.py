"""Which of the store's records count: sealed by a node of this run, in this session, as what they are read as.

What a member says for itself counts if that member signed it and is not banned. What does not count is said in the log
and remembered, so that the scripts can be told to write over it. Any thread.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from zeroband.elastic.membership.ballots import is_alike
from zeroband.elastic.membership.keys import is_of_key
from zeroband.elastic.membership.loss_record import LossRecord
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.plan_checks import has_only_quoted_fields
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import (
    Claim,
    Evidence,
    LinkRates,
    Peer,
    Ready,
    RestartPoint,
    RoundPlan,
    StoreTerm,
    Verdict,
    from_json,
    problem_of,
    to_json,
)
from zeroband.elastic.membership.resume_rules import Holding
from zeroband.elastic.membership.succession import ForwardPointer, MemberReport, SplitBrain
from zeroband.elastic.store.fact_records import FactBatch
from zeroband.elastic.store.seals import Label, Record, Seals, id_of
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger
from zeroband.observe.view import node_id_of_member, public_key_in

_R = TypeVar("_R")

_MOST_REJECTED = 1000
_REPEAT_S = 60.0
"""Least time between two log lines about one key, however often it is overwritten."""
_DRAWN = 1 / 32
"""Fraction of the signatures that are verified although nothing is disputed."""
_WARY_S = 600.0
"""Time after a forged signature in which every signature is verified."""
_UNSEALED = "it was not written by a node of this run (another run.token, an older record, damage)"
_FOREIGN = "it belongs to another session of this run.id; if nodes of both are alive, end those of one"
_UNSIGNED = "the node that it names did not sign it: another node of this run poses as that one"
_NOT_ORDERED = "the operator of this run (run.operator) did not sign it"
_NOT_IN_IT = "it is about a plan that does not list the member which wrote it"
_OF_A_BANNED_NODE = "a node whose key is banned proposed it"
NOT_VOTED_FOR = "it is not the verdict that the members of its round voted for"
LEAVES_OUT_MOST = "one member goes on by it without most of the others, which are alive and reach one another"
_MALFORMED = "it is sealed by a node of this run, but says nothing that this version understands"

_log = get_logger(__name__)


def _speaking_as(members: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{member}: " for member in members)


class RecordVerifier:
    """Seals what this node writes, and reads what it finds. `name` is where a record stands, for the log."""

    def __init__(self, seals: Seals) -> None:
        self._seals = seals
        self.session = ""
        """Session of the run that this node is in; empty: in none yet, so that it believes every record of the run."""
        self._lineage: tuple[str, ...] = ()
        self._rejected: dict[str, bytes] = {}
        self._said_at_s: dict[str, float] = {}
        self._wary_until_s = -math.inf
        self._malformed: dict[str, str] = {}
        """Why a record that a node of this run sealed did not count, by where it stands."""
        self.on_forgery: Callable[[str, str], object] = lambda name, member: None
        """Told, once a minute at most for each place, where a record stands that another than this member wrote."""
        self._orders = Orders()
        """As they were read last."""
        self.are_ordered: Callable[[Orders, Orders], bool] = lambda orders, before: True
        """Whether orders count behind the ones before."""
        self._expected: tuple[Verdict, bytes] | None = None
        """The verdict that follows from this node's newest vote, and its record."""
        self._newest: tuple[Verdict, bytes] | None = None
        """The newest verdict that was read, and its record."""

    @property
    def token_check(self) -> str:
        """What tells two tokens apart without telling either."""
        return self._seals.token_check

    @property
    def is_of_a_node(self) -> bool:
        """Whether a node reads here. A tool only shows what it reads."""
        return self._seals.has_own_key

    def rejected(self, name: str) -> bytes:
        """What stood at this place when it was looked at last and does not count; empty if it did."""
        return self._rejected.get(name, b"")

    @property
    def is_wary(self) -> bool:
        """Whether a forgery was found of late, so that no signature is taken unverified."""
        return time.monotonic() < self._wary_until_s

    def malformed(self, name: str) -> str | None:
        """Why what stands at this place is no record, though a node of this run sealed it; None: it is not so."""
        return self._malformed.get(name) if name in self._rejected else None

    def reject(self, name: str, raw: bytes, reason: str) -> bool:
        """Have a value not count from now on. Whether that was said in the log now."""
        if len(self._rejected) >= _MOST_REJECTED:
            self._rejected.clear()
            self._said_at_s.clear()
            self._malformed.clear()
        self._rejected[name] = raw
        now_s = time.monotonic()
        if reason == _UNSIGNED:
            self._wary_until_s = now_s + _WARY_S
        if now_s - self._said_at_s.get(name, -_REPEAT_S) < _REPEAT_S:
            return False
        self._said_at_s[name] = now_s
        fields = {"key": name, "reason": reason, "begins_with": repr(raw[:40])}
        _log.warning("ignoring an invalid record in the store", extra={"fields": fields})
        return True

    def _open(self, name: str, raw: bytes | None, *scope: str, by: str = "") -> Record | None:
        """A record that was sealed for this place and belongs to this session, or to none.

        `by`: the node that says it for itself; empty: any node of the run may have written it.
        """
        if not raw or (by and self._orders.bans(by)):
            return None
        record = self._seals.open(raw, *scope, by=by)
        if record is None:
            self.reject(name, raw, _UNSEALED)
        elif not record.is_signed:
            if self.reject(name, raw, _UNSIGNED):
                self.on_forgery(name, by)
            return None
        elif self._is_foreign(record):
            self.reject(name, raw, _FOREIGN)
            return None
        else:
            self._rejected.pop(name, None)
        return record

    def _is_foreign(self, record: Record) -> bool:
        return bool(self.session and record.label.sessions) and self.session not in record.label.sessions

    def _read(self, kind: type[_R], name: str, raw: bytes | None, record: Record | None) -> _R | None:
        """What a record that verified says."""
        if raw is None or record is None:
            return None
        try:
            value = from_json(kind, record.text)
            if isinstance(value, Verdict):
                _require_sound(value)
            return value
        except ValueError as error:
            self._malformed[name] = problem_of(error) or "it is no such record"
            self.reject(name, raw, f"{_MALFORMED}: {self._malformed[name]}")
            return None

    def _all(self, kind: type[_R], name: str, said: Mapping[str, bytes], *scope: str) -> dict[str, _R]:
        """What each member says for itself, in a record that names it behind `scope`."""
        names = {member: f"{name} {member}" for member in said}
        opened = {m: self._open(names[m], raw, *scope, m, by=m) for m, raw in said.items()}
        read = {m: self._read(kind, names[m], raw, opened[m]) for m, raw in said.items()}
        return {member: value for member, value in read.items() if value is not None}

    def _taken(
        self, said: Mapping[str, bytes], by: Collection[str], counts: Callable[[str], _R | None], *scope: str
    ) -> dict[str, _R]:
        """What some of these members say, whose signatures need not be verified now; less those that are drawn.

        `counts`: what a text says; None: that does not do.
        """
        found = dict[str, _R]()
        for member in by if self.is_of_a_node else ():
            raw = said.get(member)
            if not raw or self._orders.bans(member) or random.random() < _DRAWN:
                continue
            record = self._seals.open(raw, *scope, member, by=member, is_taken=True)
            if record is None or self._is_foreign(record):
                continue
            value = counts(record.text)
            if value is not None:
                found[member] = value
        return found

    def _seal(self, text: str, *scope: str, version: int = 0, by: str = "") -> str:
        return self._seals.seal(text, *scope, label=Label(version=version, sessions=self._lineage), by=by)

    # -- what decides -------------------------------------------------------------------------------------------

    def signed(self, plan: RoundPlan, member: str) -> RoundPlan:
        """A plan as this node proposes it, with its signature."""
        plan = replace(plan, proposer=member, signature="")
        return replace(plan, signature=self._seals.sign(plan.unsigned_text, "plan", by=member))

    def seal_plan(self, plan: RoundPlan | None) -> str:
        """The text that the store keeps; empty where there is none."""
        if plan is None:
            return ""
        label = Label(plan.round, plan.version, plan.id, plan.sessions)
        return self._seals.seal(to_json(plan), "plan", label=label)

    def require_sealed(self, raw: bytes, kind: str) -> None:
        """Raise ValueError where this is no record of this kind that a node of this run sealed."""
        if self._seals.open(raw, kind) is None:
            raise ValueError(f"not sealed as {kind}")

    def seal_verdict(self, verdict: Verdict | None) -> str:
        """The text that the store keeps; empty where there is none."""
        if verdict is None:
            return ""
        label = Label(verdict.round, verdict.plan.version, verdict.plan.id, verdict.sessions)
        return self._seals.seal(to_json(verdict), "verdict", label=label)

    def verdict(self, name: str, raw: bytes | None) -> Verdict | None:
        """The newest verdict of the run; what this node writes belongs to its session from now on."""
        record = self._open(name, raw, "verdict")
        known = next((known for known in (self._expected, self._newest) if known is not None and known[1] == raw), None)
        verdict = known[0] if known is not None else self._read(Verdict, name, raw, record)
        if raw is None or record is None or verdict is None:
            return None
        if self.is_expected(verdict) and not self._is_as_expected(verdict):
            self.reject(name, raw, NOT_VOTED_FOR)
            return None
        self._lineage, self._newest = record.label.sessions, (verdict, raw)
        return verdict

    def expect(self, verdict: Verdict) -> bytes:
        """Take no other verdict on its plan from now on. Returns the record of one that says just this."""
        raw = self.seal_verdict(verdict).encode()
        self._expected = verdict, raw
        return raw

    def is_expected(self, verdict: Verdict) -> bool:
        """Whether a verdict is on the plan that this node voted on last."""
        return self._expected is not None and verdict.plan.id == self._expected[0].plan.id

    def _is_as_expected(self, verdict: Verdict) -> bool:
        expected = None if self._expected is None else self._expected[0]
        return expected is not None and (verdict is expected or is_alike(verdict, expected))

    def past_verdicts(self, name: str, raws: Sequence[bytes]) -> list[Verdict]:
        """The verdicts of a history that count, oldest first: of a round the one that was written last.

        Members write over a verdict that they refuse, and bring back one that the store lost.
        """
        verdicts = [self._read(Verdict, name, raw, self._open(name, raw, "verdict")) for raw in raws]
        return list({(v.session, v.round): v for v in verdicts if v is not None}.values())

    def plan(
        self,
        name: str,
        raw: bytes | None,
        committed: Verdict | None,
        *,
        is_taken: Callable[[RoundPlan], bool] = lambda plan: False,
    ) -> RoundPlan | None:
        """The current plan, if it belongs to this verdict's session or is the plan that was committed.

        The plan that founds a session was proposed in the previous one. `is_taken`: whether its signature need not be
        verified.
        """
        if not raw:
            return None
        record = self._seals.open(raw, "plan")
        if record is None:
            self.reject(name, raw, _UNSEALED)
            return None
        plan = self._read(RoundPlan, name, raw, record)
        if plan is None or not self.is_of_its_proposer(name, raw, plan, is_taken=is_taken(plan)):
            return None
        if committed is None:
            counts = not self.session or self.session in plan.sessions
        else:
            counts = plan == committed.plan or plan.sessions == committed.sessions
        if not counts:
            self.reject(name, raw, _FOREIGN)
            return None
        self._rejected.pop(name, None)
        return plan

    def is_of_its_proposer(self, name: str, raw: bytes, plan: RoundPlan, *, is_taken: bool = False) -> bool:
        """Whether the member that a plan names has proposed it; else the record with it does not count."""
        by = plan.proposer
        if not is_taken and not self._seals.is_signed(plan.unsigned_text, plan.signature, "plan", by=by):
            if self.reject(name, raw, _UNSIGNED):
                self.on_forgery(name, by)
            return False
        if self._orders.bans(by) and plan.orders == self._orders.version:  # it knew that it is banned
            self.reject(name, raw, _OF_A_BANNED_NODE)
            return False
        return True

    def past_plan(self, name: str, raw: bytes | None, id: str) -> RoundPlan | None:
        """A plan of this id that another one has followed, of whatever session."""
        plan = self._read(RoundPlan, name, raw, self._seals.open(raw, "plan")) if raw else None
        if not raw or plan is None or plan.id != id or not self.is_of_its_proposer(name, raw, plan):
            return None
        return plan

    def seal_restart_point(self, restart_point: RestartPoint | None) -> str:
        """The text that the store keeps; empty where there is none."""
        if restart_point is None:
            return ""
        return self._seals.seal(to_json(restart_point), "restart_point", label=Label(sessions=restart_point.sessions))

    def restart_point(self, name: str, raw: bytes | None, committed: Verdict | None) -> RestartPoint | None:
        """The agreement on a checkpoint: of the verdict's session, or of one that it goes on from."""
        record = self._seals.open(raw, "restart_point") if raw else None
        if raw and record is None:
            self.reject(name, raw, _UNSEALED)
        if record is None:
            return None
        line = set() if committed is None else {*committed.sessions}
        return self._read(RestartPoint, name, raw, record) if line >= {*record.label.sessions[:1]} else None

    # -- what each says for itself ------------------------------------------------------------------------------

    def seal_ready(self, member: str, ready: Ready) -> str:
        return self._seal(to_json(ready), "ready", str(ready.round), member, by=member)

    def ready(self, name: str, round: int, said: Mapping[str, bytes], taken: Collection[str] = ()) -> dict[str, Ready]:
        """Those that stand at the boundary of a round. `taken`: members whose signatures need not be verified."""

        def quoted(text: str) -> Ready | None:
            try:
                ready = from_json(Ready, text)
            except ValueError:
                return None
            return ready if has_only_quoted_fields(ready) else None

        found = self._taken(said, taken, quoted, "ready", str(round))
        rest = {member: raw for member, raw in said.items() if member not in found}
        return {**found, **self._all(Ready, name, rest, "ready", str(round))}

    def seal_vote(self, member: str, plan: RoundPlan, digest: str) -> str:
        return self._seal(digest, "vote", plan.id, member, by=member)

    def votes(
        self, name: str, plan: RoundPlan | None, said: Mapping[str, bytes], taken: Collection[str] = ()
    ) -> dict[str, str]:
        """The digests that members hold after a plan. `taken`: members whose signatures need not be verified."""
        if plan is None:
            return {}
        found = self._taken(said, taken, str, "vote", plan.id)
        rest = {member: raw for member, raw in said.items() if member not in found}
        records = {m: self._open(f"{name} {m}", raw, "vote", plan.id, m, by=m) for m, raw in rest.items()}
        return {**found, **{m: record.text for m, record in records.items() if record is not None}}

    def seal_evidence(self, member: str, plan: RoundPlan, evidence: Evidence) -> str:
        return self._seal(to_json(evidence), "evidence", plan.id, member, by=member)

    def evidence(self, name: str, plan: RoundPlan, said: Mapping[str, bytes]) -> dict[str, Evidence]:
        """What members saw of a plan that failed."""
        return self._all(Evidence, name, said, "evidence", plan.id)

    def seal_failure(self, plan: RoundPlan, reason: str, *, by: str = "") -> str:
        label = Label(id=by or Label.id, sessions=self._lineage)
        return self._seals.seal(reason, "failed", plan.id, label=label, by=label.id)

    def failure(self, name: str, plan: RoundPlan | None, raw: bytes | None) -> str | None:
        """Why a plan cannot be finished, as one of its members says."""
        if plan is None or not raw:
            return None
        member = id_of(raw)
        record = self._open(name, raw, "failed", plan.id, by=member)
        if record is not None and public_key_in(member) is not None and member not in plan.members:
            self.reject(name, raw, _NOT_IN_IT)
            return None
        others = [m for m in plan.members if m != member]
        if record is not None and public_key_in(member) is not None and record.text.startswith(_speaking_as(others)):
            self.reject(name, raw, _MALFORMED)  # a failure that begins with a name says who ended the round
            return None
        return None if record is None else record.text

    def seal_peer(self, member: str, peer: Peer) -> str:
        """Seal for the run only: a guardian knows no session, and a member's id is in no other one."""
        return self._seals.seal(to_json(peer), "peer", member, by=member)

    def peers(self, name: str, said: Mapping[str, bytes]) -> dict[str, Peer]:
        """Where members are found. A record of another node than the one that the member's id names does not count."""
        peers = self._all(Peer, name, said, "peer")
        return {m: p for m, p in peers.items() if public_key_in(m) is None or p.node_id == node_id_of_member(m)}

    def seal_holding(self, member: str, holding: Holding) -> str:
        """Seal for the run only: a node tells it before it is in a session, and a member's id is in no other one."""
        return self._seals.seal(to_json(holding), "holding", member, by=member)

    def holdings(self, name: str, said: Mapping[str, bytes]) -> dict[str, Holding]:
        """What nodes have at their ckpt.path."""
        return self._all(Holding, name, said, "holding")

    def seal_claim(self, member: str, claim: Claim) -> str:
        return self._seal(to_json(claim), "claim", member, by=member)

    def claims(self, name: str, said: Mapping[str, bytes]) -> dict[str, Claim]:
        """Samples that joiners took by themselves."""
        return self._all(Claim, name, said, "claim")

    def seal_links(self, member: str, links: LinkRates) -> str:
        return self._seal(to_json(links), "links", member, by=member)

    def links(self, name: str, said: Mapping[str, bytes]) -> dict[str, LinkRates]:
        """What members know of their links."""
        return self._all(LinkRates, name, said, "links")

    def seal_leaving(self, member: str) -> str:
        return self._seals.seal("leaving", "leaving", member, by=member)

    def leaving(self, name: str, said: Mapping[str, bytes]) -> set[str]:
        """Members on their way out."""
        return {m for m, raw in said.items() if self._open(f"{name} {m}", raw, "leaving", m, by=m) is not None}

    def seal_saving(self, name: str, node: str, word: str) -> str:
        return self._seals.seal(word, "saving", name, node, by=node)

    def saving(self, name: str, said: Mapping[str, bytes], living: Mapping[str, str]) -> dict[str, str]:
        """What the writers of a checkpoint said, by node id.

        `living`: by node id, the living member: another key of that id does not count.
        """
        opened = {node: self._open(f"{name} {node}", raw, "saving", name, node, by=node) for node, raw in said.items()}
        found = {node: record.text for node, record in opened.items() if record is not None}
        words = ((node_id_of_member(node), node, word) for node, word in found.items())
        return {node_id: word for node_id, node, word in words if is_of_key(node, living.get(node_id, node))}

    # -- what nodes recorded ------------------------------------------------------------------------------------

    def seal_facts(self, name: str, node: str, batch: FactBatch) -> str:
        """Seal for the run only: a node records before it is in a session, and its files know none."""
        return self._seals.seal(batch.to_text(), "facts", name, node, by=node)

    def facts(self, name: str, node: str, raw: bytes | None) -> FactBatch | None:
        """What a node recorded; `name`: of the key, so that an entry of one is none of another."""
        record = self._open(name, raw, "facts", name, node, by=node)
        if record is None or raw is None:
            return None
        try:
            return FactBatch.of_text(record.text)
        except ValueError:
            self.reject(name, raw, _MALFORMED)
            return None

    # -- what a run of several stores needs ---------------------------------------------------------------------

    def seal_generation(self, generation: StoreTerm) -> str:
        return self._seals.seal("generation", "generation", label=Label(0, generation.number, generation.store))

    def generation(self, name: str, raw: bytes | None) -> StoreTerm | None:
        """The generation that began in a store last; of the run, whatever session it is in."""
        record = self._open(name, raw, "generation")
        return None if record is None else StoreTerm(record.label.version, record.label.id)

    def seal_forward_pointer(self, forward_pointer: ForwardPointer) -> str:
        label = Label(0, forward_pointer.generation.number, forward_pointer.generation.store)
        return self._seals.seal(to_json(forward_pointer), "forward_pointer", label=label)

    def forward_pointer(self, name: str, raw: bytes | None) -> ForwardPointer | None:
        """Where the run goes on, as a store was told that it does not use."""
        return self._read(ForwardPointer, name, raw, self._open(name, raw, "forward_pointer"))

    def seal_meeting(self, meeting: SplitBrain) -> str:
        return self._seals.seal(to_json(meeting), "meeting")

    def meeting(self, name: str, raw: bytes | None) -> SplitBrain | None:
        """What was written down of two lines of history that met; of the run, whatever session it is in."""
        return self._read(SplitBrain, name, raw, self._open(name, raw, "meeting"))

    def seal_member_report(self, member: str, member_report: MemberReport) -> str:
        return self._seals.seal(to_json(member_report), "member_report", member, by=member)

    def member_reports(self, name: str, said: Mapping[str, bytes]) -> dict[str, MemberReport]:
        """What members told a store that the run may go to."""
        return self._all(MemberReport, name, said, "member_report")

    # -- what all share -----------------------------------------------------------------------------------------

    def seal_orders(self, orders: Orders) -> str:
        """The text that the store keeps; empty where there are no orders."""
        return self._seal(to_json(orders), "orders", version=orders.version) if orders.version else ""

    def orders(self, name: str, raw: bytes | None) -> Orders:
        """What operators want; what they wanted of another session, or before there was one, counts no more."""
        record = self._open(name, raw, "orders")
        if record is None or raw is None:
            return Orders()
        if self.session and not record.label.sessions:
            self.reject(name, raw, _FOREIGN)
            return Orders()
        orders = self._read(Orders, name, raw, record) or Orders()
        if not self.are_ordered(orders, self._orders):
            self.reject(name, raw, _NOT_ORDERED)
            return replace(self._orders, version=0)  # as one that lacks them, so that members bring them back
        self._orders = orders
        return orders

    def seal_run(self, shared: Mapping[str, str], sessions: tuple[str, ...] | None = None) -> str:
        """`sessions`: those of a verdict with which another one begins; None: this node is in it already."""
        label = Label(id=self.token_check, sessions=self._lineage if sessions is None else sessions)
        return self._seals.seal(to_json(dict(shared)), "run", label=label)

    def run(self, name: str, raw: bytes | None) -> dict[str, str] | None:
        """What all nodes must share; of no other session, once this node is in one."""
        record = self._open(name, raw, "run")
        if record is None or raw is None:
            return None
        if self.session and not record.label.sessions:
            self._rejected[name] = raw  # from before the founding: members write it again, for their session
            return None
        return self._read(dict[str, str], name, raw, record)

    # -- what processes of one group tell each other ------------------------------------------------------------

    def seal_value(self, key: str, value: bytes) -> bytes:
        return self._seals.seal(value.hex(), "group", key).encode()

    def value(self, key: str, raw: bytes | None) -> bytes | None:
        """What another process of the group wrote; a plain number is a counter, which the store itself keeps."""
        if raw is None or raw.isdigit():
            return raw
        record = self._open(key, raw, "group", key)
        try:
            return None if record is None else bytes.fromhex(record.text)
        except ValueError:
            self.reject(key, raw, _MALFORMED)
            return None


def _require_sound(verdict: Verdict) -> None:
    """Raise ValueError where the progress or the losses that a verdict records cannot be read."""
    LossRecord.of(verdict.record)
    if "progress" in verdict.record:
        try:
            Progress.of_verdict(verdict)
        except ConfigError as error:
            raise ValueError(str(error)) from error
