"""What a soak measured, from the records of nodes and the times of faults. Pure: seconds since the soak began."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from zeroband.tools.chaos.plan import Kind, PlannedFault

Span = tuple[float, float]
"""From, to, in seconds since the soak began."""


@dataclass
class InjectedFault:
    """A fault that happened."""

    fault: PlannedFault
    at_s: float
    undone_s: float | None = None
    detected_s: float | None = None
    """When the store's view stopped counting the node, or showed it cut off."""
    over_s: dict[str, float] = field(default_factory=dict[str, float])
    """When each of its nodes contributed to a round that ended after the fault; the store, under its own name: when
    the next round was committed."""
    superseded: set[str] = field(default_factory=set[str])
    """Nodes to which the next fault happened before; it was over for them then."""
    restart_cpu_s: float | None = None
    """What the new processes used of the CPU until they were members."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.fault.nodes or ("store",)

    @property
    def is_over(self) -> bool:
        return all(name in self.over_s for name in self.names)

    def recovered_s(self) -> list[float]:
        """Seconds from the end of the fault until each of its nodes had recovered."""
        if self.undone_s is None:
            return []
        return [at_s - self.undone_s for name, at_s in self.over_s.items() if name not in self.superseded]

    def span(self, end_s: float) -> Span:
        """Return the time from the strike until all have recovered, at most until the soak's end."""
        return self.at_s, max(self.over_s.values()) if self.is_over else end_s


@dataclass(frozen=True)
class RoundCost:
    """One round of one node."""

    node_id: str
    round: int
    span: Span
    """Time from the end of the round before to its own end."""
    blocked_s: float
    """Waiting for others, transfer and retries."""
    tokens: int
    retries: int


@dataclass(frozen=True)
class Fence:
    """A node that the run went on without: what it did in that round is lost."""

    node_id: str
    span: Span
    """Time from the end of its last round until it was a member again."""


def round_costs(node_id: str, records: Iterable[Mapping[str, Any]]) -> tuple[list[RoundCost], list[Fence]]:
    """The rounds and fences of a node from its events and metrics, which come in the order of time."""
    costs: list[RoundCost] = []
    fences: list[Fence] = []
    ended: dict[int, float] = {}
    boundary_s, fenced_from_s = math.nan, math.nan
    for record in records:
        kind, at_s = record.get("kind"), float(record["at_s"])
        if kind == "round_committed":
            ended[record["round"]] = boundary_s
            boundary_s = at_s
        elif kind in ("node_started", "left"):
            boundary_s = fenced_from_s = math.nan
        elif kind == "fenced" and math.isnan(fenced_from_s):
            fenced_from_s = boundary_s
        elif kind == "joined" and not math.isnan(fenced_from_s):
            fences.append(Fence(node_id, (fenced_from_s, at_s)))
            fenced_from_s, boundary_s = math.nan, at_s
        elif "outer/round" in record and not math.isnan(from_s := ended.get(record["outer/round"], math.nan)):
            blocked_s = record["outer/wait_s"] + record["outer/transfer_s"]
            span = (from_s, at_s)
            costs.append(
                RoundCost(
                    node_id, record["outer/round"], span, blocked_s, record["outer/weight"], record["outer/retries"]
                )
            )
    return costs, fences


@dataclass(frozen=True)
class Share:
    """How a group of node-rounds used its time."""

    rounds: int
    time_s: float
    tokens: int
    blocked_s: float
    """Beyond the usual of an undisturbed round, in rounds that count."""

    @property
    def lost(self) -> float:
        """Share of the time that was spent blocked."""
        return self.blocked_s / self.time_s if self.time_s else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of one node."""
        return self.tokens / self.time_s if self.time_s else math.nan


@dataclass(frozen=True)
class PhaseComparison:
    """The time of nodes that no fault struck, with and without faults on others."""

    usual_s: float
    """Median of what an undisturbed round spends waiting and in transfer."""
    undisturbed: Share
    survivors: Share
    fenced: int
    """Times that a healthy node was left out and had to come back; its time is in `survivors`."""


def compare(
    costs: Sequence[RoundCost], fences: Sequence[Fence], struck: Sequence[InjectedFault], calm: Span, end_s: float
) -> PhaseComparison:
    """Survivors against the undisturbed phase `calm`. `end_s`: of the faults' phase."""
    before = [cost for cost in costs if cost.span[0] >= calm[0] and cost.span[1] <= calm[1]]
    usual_s = median([cost.blocked_s for cost in before]) if before else 0.0
    faults = [one.span(end_s) for one in struck]
    own = disturbed_spans(struck, end_s)

    def is_healthy(one: RoundCost | Fence) -> bool:
        in_phase = one.span[0] >= calm[1] and one.span[1] <= end_s
        return in_phase and not any(overlap(one.span, span) for span in own.get(one.node_id, ()))

    after = [cost for cost in costs if is_healthy(cost)]
    redone = [fence for fence in fences if is_healthy(fence)]
    touched = [cost for cost in after if any(overlap(cost.span, span) for span in faults)]
    lost_s = sum(cost.blocked_s - usual_s for cost in touched) + sum(_length(fence.span) for fence in redone)
    return PhaseComparison(
        usual_s=usual_s,
        undisturbed=_share(before, [], sum(cost.blocked_s - usual_s for cost in before)),
        survivors=_share(after, redone, lost_s),
        fenced=len(redone),
    )


def disturbed_spans(struck: Iterable[InjectedFault], end_s: float) -> dict[str, list[Span]]:
    """When each node was struck or not yet back."""
    spans: dict[str, list[Span]] = {}
    for one in struck:
        for name in one.fault.nodes:
            spans.setdefault(name, []).append((one.at_s, one.over_s.get(name, end_s)))
    return spans


def _share(costs: Sequence[RoundCost], fences: Sequence[Fence], blocked_s: float) -> Share:
    time_s = sum(_length(one.span) for one in (*costs, *fences))
    return Share(len(costs), time_s, sum(cost.tokens for cost in costs), blocked_s)


def overlap(one: Span, other: Span) -> bool:
    """Whether two spans have a moment in common."""
    return one[0] < other[1] and other[0] < one[1]


def _length(span: Span) -> float:
    return span[1] - span[0]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all are not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class KindRow:
    """What faults of one kind cost."""

    kind: Kind
    count: int
    detected_s: tuple[float, ...]
    """Seconds from the strike."""
    recovered_s: tuple[float, ...]
    """Seconds from the end of the fault."""


def rows_of(struck: Sequence[InjectedFault]) -> list[KindRow]:
    """A row for each kind that happened, in the order of kinds."""
    rows: list[KindRow] = []
    for kind in Kind:
        ours = [one for one in struck if one.fault.kind is kind]
        detected = tuple(one.detected_s - one.at_s for one in ours if one.detected_s is not None)
        back = tuple(took_s for one in ours for took_s in one.recovered_s())
        if ours:
            rows.append(KindRow(kind, len(ours), detected, back))
    return rows
