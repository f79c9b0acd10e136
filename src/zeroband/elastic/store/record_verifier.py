"""Which records of the store are valid: sealed by a node of this run, in this session, for the use they are read for.

A member's own record also needs that member's signature, and the member must not be banned. Rejected values are logged
and kept, so that callers can pass them to the scripts, which overwrite them. Any thread.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from zeroband.elastic.membership.ballots import is_alike
from zeroband.elastic.membership.keys import is_of_key
from zeroband.elastic.membership.loss_record import LossRecord
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.proofs import has_only_quoted_fields
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

_MAX_REJECTED = 1000
_LOG_INTERVAL_S = 60.0
"""Shortest time between two log lines about one key."""
_SPOT_CHECK_FRACTION = 1 / 32
"""Fraction of trusted records whose signatures are verified anyway."""
_VERIFY_ALL_S = 600.0
"""Time after a forged signature during which every signature is verified."""
_UNSEALED = "it was not written by a node of this run (another run.token, an older record, damage)"
_FOREIGN = "it belongs to another session of this run.id; if nodes of both are alive, end those of one"
_UNSIGNED = "the node that it names did not sign it: another node of this run poses as that one"
_NOT_ORDERED = "the operator of this run (run.operator) did not sign it"
_NOT_LISTED = "the plan that it is about does not list the member that wrote it"
_BANNED = "a node whose key is banned proposed it"
_MALFORMED = "a node of this run sealed it, but this version cannot parse it"
NOT_VOTED_FOR = "it is not the verdict that the members of its round voted for"
EXCLUDES_MOST = "with it one member would continue without most others, which are alive and reach one another"

_log = get_logger(__name__)


class RecordVerifier:
    """Seals what this node writes and verifies what it reads. `name`: where a record is stored, for the log."""

    def __init__(self, seals: Seals) -> None:
        self._seals = seals
        self.session = ""
        """Session of the run that this node is in; empty: none yet, so that records of every session are valid."""
        self._lineage: tuple[str, ...] = ()
        """This session and its predecessors, newest first; written into records."""
        self._rejected: dict[str, bytes] = {}
        """Invalid value by place, as of the last read."""
        self._logged_at_s: dict[str, float] = {}
        self._verify_all_until_s = -math.inf
        self._malformed: dict[str, str] = {}
        """Why a sealed record could not be parsed, by place."""
        self.on_forgery: Callable[[str, str], object] = lambda name, member: None
        """Called, at most once a minute per place, with a place and the member in whose name it was forged."""
        self._orders = Orders()
        """Newest valid orders."""
        self.accepts_orders: Callable[[Orders, Orders], bool] = lambda orders, before: True
        """Whether orders may follow the previous ones."""
        self._expected: tuple[Verdict, bytes] | None = None
        """The verdict that follows from this node's newest vote, and its record."""
        self._newest: tuple[Verdict, bytes] | None = None
        """The newest verdict that was read, and its record."""

    @property
    def token_check(self) -> str:
        """A hash of the token: equal for equal tokens."""
        return self._seals.token_check

    @property
    def can_sign(self) -> bool:
        """Whether this is a node, which has a key. A tool without one only displays what it reads."""
        return self._seals.can_sign

    def rejected(self, name: str) -> bytes:
        """The invalid value that the last read found at this place; empty if it was valid."""
        return self._rejected.get(name, b"")

    @property
    def verifies_all(self) -> bool:
        """Whether a forgery was found recently, so that no signature is trusted."""
        return time.monotonic() < self._verify_all_until_s

    def malformed(self, name: str) -> str | None:
        """Why a sealed value at this place cannot be parsed; None: it can, or is not sealed."""
        return self._malformed.get(name) if name in self._rejected else None

    def reject(self, name: str, raw: bytes, reason: str) -> bool:
        """Treat a value as invalid from now on. Returns whether this was logged now."""
        if len(self._rejected) >= _MAX_REJECTED:
            self._rejected.clear()
            self._logged_at_s.clear()
            self._malformed.clear()
        self._rejected[name] = raw
        now_s = time.monotonic()
        if reason == _UNSIGNED:
            self._verify_all_until_s = now_s + _VERIFY_ALL_S
        if now_s - self._logged_at_s.get(name, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
            return False
        self._logged_at_s[name] = now_s
        fields = {"key": name, "reason": reason, "begins_with": repr(raw[:40])}
        _log.warning("ignoring an invalid record in the store", extra={"fields": fields})
        return True

    def _open(self, name: str, raw: bytes | None, *scope: str, by: str = "") -> Record | None:
        """Return a record that was sealed for this scope and belongs to this session, or to none.

        `by`: the node that must have signed it; empty: any node of the run may have written it.
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

    def _parse(self, kind: type[_R], name: str, raw: bytes | None, record: Record | None) -> _R | None:
        """Parse the text of a verified record."""
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

    def _read(self, kind: type[_R], name: str, raw: bytes | None, *scope: str) -> _R | None:
        return self._parse(kind, name, raw, self._open(name, raw, *scope))

    def _read_signed(self, kind: type[_R], name: str, raws: Mapping[str, bytes], *scope: str) -> dict[str, _R]:
        """Read members' own records, whose scope ends with the member."""
        names = {member: f"{name} {member}" for member in raws}
        opened = {m: self._open(names[m], raw, *scope, m, by=m) for m, raw in raws.items()}
        parsed = {m: self._parse(kind, names[m], raw, opened[m]) for m, raw in raws.items()}
        return {member: value for member, value in parsed.items() if value is not None}

    def _read_trusted(
        self, raws: Mapping[str, bytes], trusted: Collection[str], parse: Callable[[str], _R | None], *scope: str
    ) -> dict[str, _R]:
        """Read trusted members' records without verifying signatures, except for those drawn for a spot check.

        `parse`: returns None for what must be verified.
        """
        found = dict[str, _R]()
        for member in trusted if self.can_sign else ():
            raw = raws.get(member)
            if not raw or self._orders.bans(member) or random.random() < _SPOT_CHECK_FRACTION:
                continue
            record = self._seals.open(raw, *scope, member, by=member, is_trusted=True)
            if record is None or self._is_foreign(record):
                continue
            value = parse(record.text)
            if value is not None:
                found[member] = value
        return found

    def _seal(self, text: str, *scope: str, version: int = 0, by: str = "") -> str:
        """Seal for this node's session."""
        return self._seals.seal(text, *scope, label=Label(version=version, sessions=self._lineage), by=by)

    # -- plans and verdicts; None is sealed as an empty text ----------------------------------------------------

    def signed(self, plan: RoundPlan, member: str) -> RoundPlan:
        """Return the plan with this node's member as its proposer, and its signature."""
        plan = replace(plan, proposer=member, signature="")
        return replace(plan, signature=self._seals.sign(plan.unsigned_text, "plan", by=member))

    def seal_plan(self, plan: RoundPlan | None) -> str:
        if plan is None:
            return ""
        label = Label(plan.round, plan.version, plan.id, plan.sessions)
        return self._seals.seal(to_json(plan), "plan", label=label)

    def require_sealed(self, raw: bytes, kind: str) -> None:
        """Raise ValueError unless a node of this run sealed this as a record of this kind."""
        if self._seals.open(raw, kind) is None:
            raise ValueError(f"not sealed as {kind}")

    def seal_verdict(self, verdict: Verdict | None) -> str:
        if verdict is None:
            return ""
        label = Label(verdict.round, verdict.plan.version, verdict.plan.id, verdict.sessions)
        return self._seals.seal(to_json(verdict), "verdict", label=label)

    def verdict(self, name: str, raw: bytes | None) -> Verdict | None:
        """Read the newest verdict. This node's later records belong to its session."""
        record = self._open(name, raw, "verdict")
        known = next((known for known in (self._expected, self._newest) if known is not None and known[1] == raw), None)
        verdict = known[0] if known is not None else self._parse(Verdict, name, raw, record)
        if raw is None or record is None or verdict is None:
            return None
        if self._expected is not None and self.is_expected(verdict):
            expected = self._expected[0]
            if verdict is not expected and not is_alike(verdict, expected):
                self.reject(name, raw, NOT_VOTED_FOR)
                return None
        self._lineage, self._newest = record.label.sessions, (verdict, raw)
        return verdict

    def expect(self, verdict: Verdict) -> bytes:
        """Reject every other verdict on its plan from now on. Returns the record that this one is sealed as."""
        raw = self.seal_verdict(verdict).encode()
        self._expected = verdict, raw
        return raw

    def is_expected(self, verdict: Verdict) -> bool:
        """Whether a verdict is on the plan for which this node voted last."""
        return self._expected is not None and verdict.plan.id == self._expected[0].plan.id

    def past_verdicts(self, name: str, raws: Sequence[bytes]) -> list[Verdict]:
        """Read a history, oldest first. The last record of a round counts.

        Members overwrite a verdict that they reject, and restore one that the store lost.
        """
        verdicts = [self._read(Verdict, name, raw, "verdict") for raw in raws]
        return list({(v.session, v.round): v for v in verdicts if v is not None}.values())

    def plan(
        self,
        name: str,
        raw: bytes | None,
        committed: Verdict | None,
        *,
        is_trusted: Callable[[RoundPlan], bool] = lambda plan: False,
    ) -> RoundPlan | None:
        """Read the current plan, which must be of the verdict's session or be the committed plan itself.

        A plan that founds a session was proposed in the previous one. `is_trusted`: whether its signature need not be
        verified.
        """
        if not raw:
            return None
        record = self._seals.open(raw, "plan")
        if record is None:
            self.reject(name, raw, _UNSEALED)
            return None
        plan = self._parse(RoundPlan, name, raw, record)
        if plan is None or not self.is_signed_by_proposer(name, raw, plan, is_trusted=is_trusted(plan)):
            return None
        if committed is None:
            is_valid = not self.session or self.session in plan.sessions
        else:
            is_valid = plan == committed.plan or plan.sessions == committed.sessions
        if not is_valid:
            self.reject(name, raw, _FOREIGN)
            return None
        self._rejected.pop(name, None)
        return plan

    def is_signed_by_proposer(self, name: str, raw: bytes, plan: RoundPlan, *, is_trusted: bool = False) -> bool:
        """Whether the member that a plan names proposed it, and may; else the record with the plan is rejected."""
        by = plan.proposer
        if not is_trusted and not self._seals.is_signed(plan.unsigned_text, plan.signature, "plan", by=by):
            if self.reject(name, raw, _UNSIGNED):
                self.on_forgery(name, by)
            return False
        if self._orders.bans(by) and plan.orders == self._orders.version:  # it was proposed under the ban
            self.reject(name, raw, _BANNED)
            return False
        return True

    def past_plan(self, name: str, raw: bytes | None, id: str) -> RoundPlan | None:
        """Read the plan of this id, of any session, after another one has followed."""
        plan = self._parse(RoundPlan, name, raw, self._seals.open(raw, "plan")) if raw else None
        if not raw or plan is None or plan.id != id or not self.is_signed_by_proposer(name, raw, plan):
            return None
        return plan

    def seal_restart_point(self, restart_point: RestartPoint | None) -> str:
        if restart_point is None:
            return ""
        return self._seals.seal(to_json(restart_point), "restart_point", label=Label(sessions=restart_point.sessions))

    def restart_point(self, name: str, raw: bytes | None, committed: Verdict | None) -> RestartPoint | None:
        """Read the agreed checkpoint, which must be of the verdict's session or of one of its predecessors."""
        record = self._seals.open(raw, "restart_point") if raw else None
        if raw and record is None:
            self.reject(name, raw, _UNSEALED)
        if record is None:
            return None
        lineage = set() if committed is None else {*committed.sessions}
        return self._parse(RestartPoint, name, raw, record) if lineage >= {*record.label.sessions[:1]} else None

    # -- members' own records; `trusted`: members whose signatures need not be verified -------------------------

    def seal_ready(self, member: str, ready: Ready) -> str:
        return self._seal(to_json(ready), "ready", str(ready.round), member, by=member)

    def ready(
        self, name: str, round: int, raws: Mapping[str, bytes], trusted: Collection[str] = ()
    ) -> dict[str, Ready]:
        """Read who is ready for a round."""

        def parse(text: str) -> Ready | None:
            try:
                ready = from_json(Ready, text)
            except ValueError:
                return None
            return ready if has_only_quoted_fields(ready) else None

        found = self._read_trusted(raws, trusted, parse, "ready", str(round))
        rest = {member: raw for member, raw in raws.items() if member not in found}
        return {**found, **self._read_signed(Ready, name, rest, "ready", str(round))}

    def seal_vote(self, member: str, plan: RoundPlan, digest: str) -> str:
        return self._seal(digest, "vote", plan.id, member, by=member)

    def votes(
        self, name: str, plan: RoundPlan | None, raws: Mapping[str, bytes], trusted: Collection[str] = ()
    ) -> dict[str, str]:
        """Read the digests of members' results under a plan."""
        if plan is None:
            return {}
        found = self._read_trusted(raws, trusted, str, "vote", plan.id)
        rest = {member: raw for member, raw in raws.items() if member not in found}
        records = {m: self._open(f"{name} {m}", raw, "vote", plan.id, m, by=m) for m, raw in rest.items()}
        return {**found, **{m: record.text for m, record in records.items() if record is not None}}

    def seal_evidence(self, member: str, plan: RoundPlan, evidence: Evidence) -> str:
        return self._seal(to_json(evidence), "evidence", plan.id, member, by=member)

    def evidence(self, name: str, plan: RoundPlan, raws: Mapping[str, bytes]) -> dict[str, Evidence]:
        return self._read_signed(Evidence, name, raws, "evidence", plan.id)

    def seal_failure(self, plan: RoundPlan, reason: str, *, by: str) -> str:
        label = Label(id=by or Label.id, sessions=self._lineage)
        return self._seals.seal(reason, "failed", plan.id, label=label, by=label.id)

    def failure(self, name: str, plan: RoundPlan | None, raw: bytes | None) -> str | None:
        """Read why a plan failed, as one of its members reported."""
        if plan is None or not raw:
            return None
        member = id_of(raw)
        record = self._open(name, raw, "failed", plan.id, by=member)
        if record is None or public_key_in(member) is None:
            return None if record is None else record.text
        if member not in plan.members:
            self.reject(name, raw, _NOT_LISTED)
            return None
        if record.text.startswith(tuple(f"{other}: " for other in plan.members if other != member)):
            self.reject(name, raw, _MALFORMED)  # a reason that begins with a name blames that member
            return None
        return record.text

    def seal_peer(self, member: str, peer: Peer) -> str:
        """Seal without a session: a guardian does not know it, and a member id belongs to one session only."""
        return self._seals.seal(to_json(peer), "peer", member, by=member)

    def peers(self, name: str, raws: Mapping[str, bytes]) -> dict[str, Peer]:
        """Read members' addresses; a record must name the node of its member id."""
        peers = self._read_signed(Peer, name, raws, "peer")
        return {m: p for m, p in peers.items() if public_key_in(m) is None or p.node_id == node_id_of_member(m)}

    def seal_holding(self, member: str, holding: Holding) -> str:
        """Seal without a session: a node publishes it before it is in one."""
        return self._seals.seal(to_json(holding), "holding", member, by=member)

    def holdings(self, name: str, raws: Mapping[str, bytes]) -> dict[str, Holding]:
        return self._read_signed(Holding, name, raws, "holding")

    def seal_claim(self, member: str, claim: Claim) -> str:
        return self._seal(to_json(claim), "claim", member, by=member)

    def claims(self, name: str, raws: Mapping[str, bytes]) -> dict[str, Claim]:
        return self._read_signed(Claim, name, raws, "claim")

    def seal_links(self, member: str, links: LinkRates) -> str:
        return self._seal(to_json(links), "links", member, by=member)

    def links(self, name: str, raws: Mapping[str, bytes]) -> dict[str, LinkRates]:
        return self._read_signed(LinkRates, name, raws, "links")

    def seal_leaving(self, member: str) -> str:
        return self._seals.seal("leaving", "leaving", member, by=member)

    def leaving(self, name: str, raws: Mapping[str, bytes]) -> set[str]:
        return {m for m, raw in raws.items() if self._open(f"{name} {m}", raw, "leaving", m, by=m) is not None}

    def seal_saving(self, name: str, node: str, message: str) -> str:
        return self._seals.seal(message, "saving", name, node, by=node)

    def saving(self, name: str, raws: Mapping[str, bytes], living: Mapping[str, str]) -> dict[str, str]:
        """Read the messages of a checkpoint's writers, by node id.

        `living`: the living member of each node id; a writer with another key is ignored.
        """
        opened = {node: self._open(f"{name} {node}", raw, "saving", name, node, by=node) for node, raw in raws.items()}
        found = {node: record.text for node, record in opened.items() if record is not None}
        messages = ((node_id_of_member(node), node, message) for node, message in found.items())
        return {node_id: message for node_id, node, message in messages if is_of_key(node, living.get(node_id, node))}

    def seal_facts(self, name: str, node: str, batch: FactBatch) -> str:
        """Seal without a session: a node records before it is in one. `name`: the key, as a scope."""
        return self._seals.seal(batch.to_text(), "facts", name, node, by=node)

    def facts(self, name: str, node: str, raw: bytes | None) -> FactBatch | None:
        record = self._open(name, raw, "facts", name, node, by=node)
        if record is None or raw is None:
            return None
        try:
            return FactBatch.of_text(record.text)
        except ValueError:
            self.reject(name, raw, _MALFORMED)
            return None

    # -- several stores; valid in every session of the run ------------------------------------------------------

    def seal_generation(self, generation: StoreTerm) -> str:
        return self._seals.seal("generation", "generation", label=Label(0, generation.number, generation.store))

    def generation(self, name: str, raw: bytes | None) -> StoreTerm | None:
        record = self._open(name, raw, "generation")
        return None if record is None else StoreTerm(record.label.version, record.label.id)

    def seal_forward_pointer(self, forward_pointer: ForwardPointer) -> str:
        label = Label(0, forward_pointer.generation.number, forward_pointer.generation.store)
        return self._seals.seal(to_json(forward_pointer), "forward_pointer", label=label)

    def forward_pointer(self, name: str, raw: bytes | None) -> ForwardPointer | None:
        return self._read(ForwardPointer, name, raw, "forward_pointer")

    def seal_split_brain(self, split_brain: SplitBrain) -> str:
        return self._seals.seal(to_json(split_brain), "split_brain")

    def split_brain(self, name: str, raw: bytes | None) -> SplitBrain | None:
        return self._read(SplitBrain, name, raw, "split_brain")

    def seal_member_report(self, member: str, member_report: MemberReport) -> str:
        return self._seals.seal(to_json(member_report), "member_report", member, by=member)

    def member_reports(self, name: str, raws: Mapping[str, bytes]) -> dict[str, MemberReport]:
        return self._read_signed(MemberReport, name, raws, "member_report")

    # -- records of the run -------------------------------------------------------------------------------------

    def seal_orders(self, orders: Orders) -> str:
        """Seal orders; an empty text if there are none."""
        return self._seal(to_json(orders), "orders", version=orders.version) if orders.version else ""

    def orders(self, name: str, raw: bytes | None) -> Orders:
        """Read operators' orders; those of another session, or from before the founding, are void."""
        record = self._open(name, raw, "orders")
        if record is None or raw is None:
            return Orders()
        if self.session and not record.label.sessions:
            self.reject(name, raw, _FOREIGN)
            return Orders()
        orders = self._parse(Orders, name, raw, record) or Orders()
        if not self.accepts_orders(orders, self._orders):
            self.reject(name, raw, _NOT_ORDERED)
            return replace(self._orders, version=0)  # version 0 looks lost, so members restore the valid ones
        self._orders = orders
        return orders

    def seal_run(self, shared: Mapping[str, str], sessions: tuple[str, ...] | None = None) -> str:
        """Seal the run's record. `sessions`: those of the verdict that begins another session; None: the current."""
        label = Label(id=self.token_check, sessions=self._lineage if sessions is None else sessions)
        return self._seals.seal(to_json(dict(shared)), "run", label=label)

    def run(self, name: str, raw: bytes | None) -> dict[str, str] | None:
        """Read the settings that all nodes share; of this session, once this node is in one."""
        record = self._open(name, raw, "run")
        if record is None or raw is None:
            return None
        if self.session and not record.label.sessions:
            self._rejected[name] = raw  # from before the founding: members overwrite it for their session
            return None
        return self._parse(dict[str, str], name, raw, record)

    # -- rendezvous of process groups ---------------------------------------------------------------------------

    def seal_value(self, key: str, value: bytes) -> bytes:
        return self._seals.seal(value.hex(), "group", key).encode()

    def value(self, key: str, raw: bytes | None) -> bytes | None:
        """Read a value of another process; a plain number is a counter of the store and has no seal."""
        if raw is None or raw.isdigit():
            return raw
        record = self._open(key, raw, "group", key)
        try:
            return None if record is None else bytes.fromhex(record.text)
        except ValueError:
            self.reject(key, raw, _MALFORMED)
            return None


def _require_sound(verdict: Verdict) -> None:
    """Raise ValueError if the progress or the losses in a verdict cannot be parsed."""
    LossRecord.of(verdict.record)
    if "progress" in verdict.record:
        try:
            Progress.of_verdict(verdict)
        except ConfigError as error:
            raise ValueError(str(error)) from error
