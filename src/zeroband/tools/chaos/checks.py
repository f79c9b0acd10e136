"""Invariants of a soak, as checks of rounds, nodes' events and times. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zeroband.elastic.membership.records import Verdict
from zeroband.observe.words import first_of
from zeroband.tools.data.audit import Audit


class Agreement:
    """Checks that all nodes agree on every round. Methods return a line for each violation."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, Mapping[str, Any]]] = {}
        """The first record of a round and its node."""
        self._recovered: list[tuple[str, int, str]] = []
        self.mismatches = 0
        self.compared: set[int] = set()
        """Rounds recorded by more than one node."""

    def digest_of(self, round: int) -> str | None:
        """Return the digest of the outer state after a round, by the first node that recorded it."""
        return self._first[round][1]["digest"] if round in self._first else None

    def add(self, node_id: str, event: Mapping[str, Any]) -> list[str]:
        """Add an event of a node."""
        if event["kind"] == "recovered":
            self._recovered.append((node_id, event["round"], event["digest"]))
        if event["kind"] != "round_committed":
            return self._check_recovered()
        other, first = self._first.setdefault(event["round"], (node_id, event))
        if other != node_id:
            self.compared.add(event["round"])
        names = [name for name in ("digest", "epoch", "members", "weights", "progress") if event[name] != first[name]]
        self.mismatches += "digest" in names
        return [
            f"round {event['round']}: {name} is {_short(event[name])} on {node_id} and {_short(first[name])} on {other}"
            for name in names
        ] + self._check_recovered()

    def _check_recovered(self) -> list[str]:
        """Compare fetched states with the recorded digests; a round may be recorded later."""
        known = [fetched for fetched in self._recovered if fetched[1] in self._first]
        self._recovered = [fetched for fetched in self._recovered if fetched not in known]
        wrong = [
            f"round {round}: {node_id} fetched a state with digest {digest}, others hold {self.digest_of(round)}"
            for node_id, round, digest in known
            if digest != self.digest_of(round)
        ]
        self.mismatches += len(wrong)
        return wrong


class CommittedLine:
    """Checks that committed rounds in the store form one line: each written once and built on its predecessor."""

    def __init__(self) -> None:
        self.rounds: dict[int, Verdict] = {}

    def add(self, verdicts: Iterable[Verdict]) -> list[str]:
        """Add what the store shows; repeats are fine. Returns a line for each violation."""
        wrong: list[str] = []
        for verdict in sorted(verdicts, key=lambda v: v.round):
            known = self.rounds.setdefault(verdict.round, verdict)
            if (known.plan, known.digest) != (verdict.plan, verdict.digest):
                wrong.append(f"round {verdict.round} was committed twice: {_brief(known)}, and {_brief(verdict)}")
            before = self.rounds.get(verdict.round - 1)
            if known is verdict and before is not None and before.plan.version >= verdict.plan.version:
                wrong.append(f"round {verdict.round} was opened before round {before.round}: {_brief(verdict)}")
        return wrong

    def misfits(self, agreement: Agreement) -> list[str]:
        """Return the rounds that do not build on the recorded state of their predecessor."""
        return [
            f"round {round} builds on state {built_on}, nodes recorded {recorded} after round {round - 1}"
            for round, verdict in self.rounds.items()
            if (built_on := verdict.record.get("state_before")) is not None
            and (recorded := agreement.digest_of(round - 1)) not in (None, built_on)
        ]


def audit_violations(result: Audit) -> list[str]:
    """Return a line for each violation in a data audit."""
    wrong = [
        f"samples {f'of {corpus} ' if corpus else ''}{what}: {first_of(spans)}"
        for corpus, account in result.accounts.items()
        for what, spans in {"trained twice": account.repeated, "skipped": account.skipped}.items()
        if spans
    ]
    if result.missing_rounds:
        wrong.append(f"rounds that no node recorded: {first_of(result.missing_rounds)}")
    return wrong


class Pulse:
    """Detects healthy nodes that hang. Times are in seconds of one clock.

    `round_s`: longest undisturbed round. `detect_s` + `slack_s`: maximum delay that a fault may cause the others.
    """

    def __init__(self, *, round_s: float, detect_s: float, slack_s: float) -> None:
        self._round_s, self._fault_s = round_s, detect_s + slack_s
        self._advanced_s: dict[str, float] = {}
        self._faults: dict[str, int] = {}
        self._joined: set[str] = set()
        """Nodes that have finished no round since they joined: they may miss the one under way and finish the next."""

    def note(self, node_id: str, kind: str, at_s: float) -> None:
        """Note a node's event: a round restarts its clock, and joining gives it two rounds' time for its first one."""
        if kind in ("joined", "round_committed"):
            self.advanced(node_id, at_s)
            (self._joined.add if kind == "joined" else self._joined.discard)(node_id)

    def advanced(self, node_id: str, now_s: float) -> None:
        """Restart the clock of a node: it recovered."""
        self._advanced_s[node_id] = max(now_s, self._advanced_s.get(node_id, now_s))
        self._faults[node_id] = 0

    def struck(self) -> None:
        """Extend all bounds: a fault was injected."""
        self._faults = {node_id: faults + 1 for node_id, faults in self._faults.items()}

    def bound_s(self, node_id: str) -> float:
        """Return the time that this node may take for its current round."""
        return self._round_s * (1 + (node_id in self._joined)) + max(1, self._faults.get(node_id, 0)) * self._fault_s

    def hung(self, healthy: Iterable[str], now_s: float) -> dict[str, float]:
        """Return the nodes over their bound, with the seconds since they last advanced."""
        silent_s = {node: now_s - self._advanced_s[node] for node in healthy if node in self._advanced_s}
        return {node: since_s for node, since_s in silent_s.items() if since_s > self.bound_s(node)}


def _brief(verdict: Verdict) -> str:
    plan = verdict.plan
    return f"version {plan.version} with result {verdict.digest} by {', '.join(plan.members)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
