"""Observes a soak's run (the store's view, committed rounds, nodes' files) and reports violations.

One thread. Injects nothing. Times are in seconds since the soak began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from zeroband.elastic.membership.reach import dials, is_dial_out_only, relay_routes
from zeroband.elastic.membership.records import Verdict, View
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import StoreLost
from zeroband.observe.facts import FolderFacts
from zeroband.observe.view import node_id_of_member
from zeroband.tools.chaos.checks import Agreement, CommittedLine, Pulse, audit_violations
from zeroband.tools.chaos.plan import OF_SEVERAL_STORES, InjectedFault, Kind
from zeroband.tools.chaos.starvation import Starvation
from zeroband.tools.data.audit import Audit, AuditedRound, audit, round_of

_AUDIT_EVERY_S = 5.0
_SHOWN_EVENTS = 8
_WRONG_CLOCK_S = 600.0
"""A record dated this far ahead was written under a clock jump."""


class Violations:
    """Prints and keeps findings."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.found: list[str] = []
        self.starved: list[str] = []
        """What was late because of CPU starvation: neither a violation nor a proof that all held."""

    def add(self, what: str, context: str = "") -> None:
        """Report a violation, once."""
        if what not in self.found:
            self.found.append(what)
            self._say(f"VIOLATION: {what}" + (f"\n{context}" if context else ""))

    def starve(self, what: str) -> None:
        """Report what cannot be judged because of CPU starvation."""
        self.starved.append(what)
        self._say(f"STARVED, cannot judge: {what}")


class NodeFiles:
    """Follows the events and round metrics of all nodes.

    `began_at_s`: wall clock of this machine; the `at_s` of records is converted to seconds since then.
    """

    def __init__(self, run_dir: Path, *, began_at_s: float) -> None:
        self._began_at_s = began_at_s
        self._facts = FolderFacts(run_dir)
        self.records: dict[str, list[dict[str, Any]]] = defaultdict(list)
        """Records of each node, by ascending time."""

    def read(self, now_s: float) -> list[tuple[str, dict[str, Any]]]:
        """Return the new records with their nodes; records under a clock jump get the current time."""
        fresh: list[tuple[str, dict[str, Any]]] = []
        for node, record in self._facts.read():  # an event of a round comes before its metrics
            if "kind" in record or "outer/round" in record:
                at_s = record["at_s"] - self._began_at_s
                fresh.append((node, {**record, "at_s": at_s if at_s < now_s + _WRONG_CLOCK_S else now_s}))
                self.records[node].append(fresh[-1][1])
        return fresh


@dataclass(frozen=True)
class _Pending:
    """An injected fault that the store's view does not show yet."""

    struck: InjectedFault
    members: frozenset[str]
    cuts: frozenset[tuple[str, str]]
    """Pairs of members that were cut off before."""

    def is_shown(self, view: View) -> bool:
        gone = self.members - view.alive
        cut = {pair for pair in cuts_of(view) - self.cuts if self.members & {*pair}}
        if self.struck.fault.kind is Kind.PAIR_CUT:
            return bool(gone or {pair for pair in cut if self.members >= {*pair}})
        return all(member in gone or any(member in pair for pair in cut) for member in self.members)


def cuts_of(view: View) -> frozenset[tuple[str, str]]:
    """Return the pairs of living members of which the first does not reach the second."""
    return frozenset((m, other) for m in view.alive if m in view.peers for other in view.peers[m].cut_off)


class SoakWatch:
    """Observes a run and checks it. Faults of the store must be announced to it."""

    def __init__(
        self,
        store: RedisStore,
        files: NodeFiles,
        violations: Violations,
        *,
        is_held_by_nodes: bool = False,
    ) -> None:
        self._store, self._files = store, files
        self._is_held_by_nodes = is_held_by_nodes
        """Whether nodes hold the stores, so that losing a node may lose the store in use."""
        self.violations = violations
        self.is_store_up = True
        """Whether the store in use is expected to answer."""
        self.view: View | None = None
        self.contributed: dict[str, int] = {}
        """Each node's newest contributed round."""
        self.joined_s: dict[str, float] = {}
        """When each node last joined."""
        self.pulse: Pulse | None = None
        self.agreement, self.line = Agreement(), CommittedLine()
        self.hangs = 0
        self.starvation = Starvation()
        self.complete_s: float | None = None
        """When the run was complete; nodes may exit then."""
        self._starved: set[tuple[str, float]] = set()
        self._pending: list[_Pending] = []
        self._moving: InjectedFault | None = None
        """The fault of a store after which the members have not moved to another one yet."""
        self._audit_due_s = _AUDIT_EVERY_S
        self._missing: Collection[int] = ()
        self._rounds: list[AuditedRound] = []
        """Committed rounds, once for each node that recorded them."""

    @property
    def round(self) -> int:
        """The newest committed round seen; -1 before the founding."""
        return max(self.line.rounds, default=-1)

    def members_of(self, node: str) -> frozenset[str]:
        """Return the living members of a node."""
        alive = self.view.alive if self.view is not None else frozenset[str]()
        return frozenset(member for member in alive if node_id_of_member(member) == node)

    @property
    def store_address(self) -> str:
        """Address of the store in use, as seen from this machine."""
        return self._store.address

    def relays(self) -> frozenset[str]:
        """Return the nodes that relay between two living dial-out-only members."""
        peers = {} if self.view is None else {m: self.view.peers[m] for m in self.view.alive if m in self.view.peers}
        dial_out_only = [member for member in peers if is_dial_out_only(member, peers)]
        called = [other for one, other in permutations(dial_out_only, 2) if dials(one, other, dial_out_only)]
        return frozenset(node_id_of_member(ways[0].relay) for other in called if (ways := relay_routes(other, peers)))

    @property
    def awaits_detection(self) -> bool:
        return bool(self._pending)

    def expect_detection(self, struck: InjectedFault) -> None:
        """Start watching for this fault in the store's view."""
        members = frozenset(member for node in struck.fault.nodes for member in self.members_of(node))
        if members and self.view is not None and self.is_store_up:
            self._pending.append(_Pending(struck, members, cuts_of(self.view)))

    def forget_detections(self, struck: InjectedFault | None = None) -> None:
        """Stop watching for this fault, or for all when the store itself is down."""
        self._pending = [p for p in self._pending if struck is not None and p.struck is not struck]

    def store_was_struck(self, struck: InjectedFault) -> None:
        """Stop polling the store until it is back or the members use another one."""
        self.is_store_up = False
        self.forget_detections()
        self._moving = struck if struck.fault.kind in OF_SEVERAL_STORES else None

    def store_is_back(self, struck: InjectedFault) -> None:
        """Poll the store again, unless it came back empty: the members move to another one then."""
        if self._moving is None or struck.fault.kind is not Kind.STORE_LOST:
            self.is_store_up = True

    def _follow(self, at_s: float) -> None:
        """Follow the members to their store."""
        before = self._store.generation
        self._store.follow()
        if self._moving is not None and self._store.generation != before:
            self._moving.detected_s, self._moving, self.is_store_up = at_s, None, True

    def is_too_late(self, what: str, from_s: float, bound_s: float, now_s: float, nodes: Sequence[str] = ()) -> bool:
        """Return whether something exceeds a bound even without CPU starvation of all members and `nodes`.

        If only starvation explains the excess, report it once.
        """
        took_s = now_s - from_s
        if took_s <= bound_s:
            return False
        lost_s = self.starvation.lost_s(from_s, now_s, nodes)
        if took_s - lost_s > bound_s:
            return True
        if (one := (what, round(from_s, 3))) not in self._starved:
            self._starved.add(one)
            self.violations.starve(
                f"{what} for {took_s:.1f} s at {now_s:.0f} s (bound {bound_s:.1f} s), "
                f"and nodes waited {lost_s:.1f} s of that for a CPU"
            )
        return False

    def overdue(self, now_s: float, bound_s: float) -> list[InjectedFault]:
        """Return the faults that the view should show by now, each once."""
        late = [
            p.struck
            for p in self._pending
            if self.is_too_late(f"the store did not show {p.struck.fault}", p.struck.at_s, bound_s, now_s)
        ]
        self._pending = [p for p in self._pending if p.struck not in late]
        return late

    def stays_without_store(self, now_s: float, bound_s: float) -> InjectedFault | None:
        """Return the loss of a store after which the members should have moved by now, once."""
        lost = self._moving
        if lost is None or lost.fault.kind is not Kind.STORE_LOST:
            return None
        what = f"the members were at no other store after {lost.fault}"
        if not self.is_too_late(what, lost.at_s, bound_s, now_s):
            return None
        self.is_store_up, self._moving = True, None
        return lost

    def look(self, now: Callable[[], float]) -> list[Verdict]:
        """Poll the store. Returns the newly committed rounds in order."""
        if not self.is_store_up:
            return []
        try:
            self.view = view = self._store.view(0)
            for pending in [p for p in self._pending if p.is_shown(view)]:
                pending.struck.detected_s = now()
                self._pending.remove(pending)
            if view.committed is None or view.committed.round in self.line.rounds:
                return []
            verdicts = self._store.history()
        except StoreLost as error:
            if self._is_held_by_nodes:
                self._store.follow()
                return []
            self.violations.add(f"the store is up but does not answer: {error}")
            return []
        fresh = sorted((v for v in verdicts if v.round not in self.line.rounds), key=lambda v: v.round)
        for wrong in self.line.add(verdicts):
            self.violations.add(wrong, self.context())
        for verdict in fresh:
            for member in verdict.plan.contributors():
                self.contributed[node_id_of_member(member)] = verdict.round
            if self.complete_s is None and verdict.record.get("progress", {}).get("is_complete"):
                self.complete_s = now()
        return fresh

    def read(self, now_s: float) -> None:
        """Read and check the nodes' new records."""
        for node, record in self._files.read(now_s):
            if "kind" in record:
                self._take(node, record)
        for wrong in self.line.misfits(self.agreement):
            self.violations.add(wrong, self.context())
        if now_s >= self._audit_due_s:
            self.check_data(is_final=False)
            self._audit_due_s = now_s + _AUDIT_EVERY_S

    def _take(self, node: str, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "round_committed":
                self._rounds.append(round_of(event))
            case "store_in_use":
                self._follow(event["at_s"])
            case "joined":
                self.joined_s[node] = event["at_s"]
            case "run_finished" if self.complete_s is None:
                self.complete_s = event["at_s"]
            case _:
                pass
        if self.pulse is not None:
            self.pulse.note(node, event["kind"], event["at_s"])
        for wrong in self.agreement.add(node, event):
            self.violations.add(wrong, self.context())

    def check_data(self, *, is_final: bool) -> Audit:
        """Replay the data ledger. Before the end, a missing round counts only when seen twice."""
        result = audit(self._rounds)
        wrong = audit_violations(result)
        is_settled = is_final or not result.missing_rounds or set(result.missing_rounds) == set(self._missing)
        self._missing = result.missing_rounds
        for what in wrong if is_settled else ():
            self.violations.add(what, self.context())
        return result

    def check_pulse(self, healthy: Sequence[str], now_s: float, faults: Sequence[str]) -> None:
        """Report healthy nodes that hang, once per hang."""
        if self.pulse is None or not (self.is_store_up or self._moving):
            return
        for node, since_s in self.pulse.hung(healthy, now_s).items():
            bound_s = self.pulse.bound_s(node)
            if not self.is_too_late(f"{node} finished no round", now_s - since_s, bound_s, now_s):
                continue
            self.hangs += 1
            what = f"{node} hangs: at {now_s:.0f} s, no round for {since_s:.1f} s (bound {bound_s:.1f} s)"
            self.violations.add(what, self.context(faults))
            self.pulse.advanced(node, now_s)

    def context(self, faults: Sequence[str] = ()) -> str:
        """Describe the current faults, the store's view and the newest events."""
        recent = sorted(
            (
                (record["at_s"], node, record)
                for node, records in self._files.records.items()
                for record in records[-200:]
                if "kind" in record
            ),
            key=lambda entry: entry[:2],
        )[-_SHOWN_EVENTS:]
        lines = [*(f"  fault {fault}" for fault in faults), f"  store: {_described(self.view)}"]
        lines += [f"  {at_s:8.2f} s {node} {_event(record)}" for at_s, node, record in recent]
        return "\n".join(lines)


def _described(view: View | None) -> str:
    if view is None:
        return "not seen"
    plan, committed = view.plan, view.committed
    parts = [f"alive {sorted(view.alive)}", f"committed {None if committed is None else committed.round}"]
    if plan is not None:
        parts.append(f"open round {plan.round} version {plan.version} to {list(plan.members)}")
        parts.append(f"votes {sorted(view.votes)}")
    return "; ".join([*parts, f"failed {view.failed}", f"cut {sorted(cuts_of(view))}", f"settling {view.is_settling}"])


def _event(record: Mapping[str, Any]) -> str:
    shown = {k: v for k, v in record.items() if k not in ("at_s", "kind", "progress", "weights", "samples")}
    return f"{record['kind']} {shown}"
