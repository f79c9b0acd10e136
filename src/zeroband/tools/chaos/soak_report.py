"""The cost of a soak's faults, and its one-page report as Markdown. Pure. Times are in seconds since the soak began."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from zeroband.observe.words import markdown_table
from zeroband.tools.chaos.judgement import Judgement
from zeroband.tools.chaos.options import ChaosOptions
from zeroband.tools.chaos.plan import InjectedFault, Kind, Span

_TITLE = "# Chaos soak"


@dataclass(frozen=True)
class RoundCost:
    """A round of a node, or the time for which a node was fenced."""

    node_id: str
    span: Span
    """From the end of the previous round that counted the node to the end of this one; if fenced, until the node was a
    member again."""
    blocked_s: float
    """Time in which training stood still."""
    tokens: int
    is_fenced: bool = False
    """Whether the run continued without the node, so that its work in that time is lost."""


def round_costs(node_id: str, records: Iterable[Mapping[str, Any]]) -> list[RoundCost]:
    """Return the rounds of a node from its events and metrics, by ascending time."""
    costs: list[RoundCost] = []
    start_of_round: dict[int, float] = {}
    boundary_s, fenced_from_s, blocked_s = math.nan, math.nan, 0.0
    for record in records:
        kind, at_s = record.get("kind"), float(record["at_s"])
        blocked_s += record.get("outer/blocked_s") or 0.0
        if kind == "round_committed":  # also for a round that a late node replays, before the one that counts it
            start_of_round[record["round"]] = boundary_s
            boundary_s = at_s if math.isnan(boundary_s) else boundary_s
        elif kind in ("node_started", "left"):
            boundary_s = fenced_from_s = math.nan
        elif kind == "fenced" and math.isnan(fenced_from_s):
            fenced_from_s = boundary_s
        elif kind == "joined" and not math.isnan(fenced_from_s):
            costs.append(RoundCost(node_id, (fenced_from_s, at_s), at_s - fenced_from_s, 0, is_fenced=True))
            fenced_from_s, boundary_s = math.nan, at_s
        elif "outer/round" in record:
            if not math.isnan(from_s := start_of_round.get(record["outer/round"], math.nan)):
                costs.append(RoundCost(node_id, (from_s, at_s), blocked_s, record["outer/weight"]))
            boundary_s, blocked_s = at_s, 0.0
    return costs


@dataclass(frozen=True)
class Share:
    """Time use of a group of node-rounds."""

    rounds: int
    time_s: float
    tokens: int
    blocked_s: float
    """Blocked time beyond that of an undisturbed round."""

    @staticmethod
    def of(costs: Sequence[RoundCost], blocked_s: float) -> Share:
        time_s = sum(cost.span[1] - cost.span[0] for cost in costs)
        return Share(sum(not cost.is_fenced for cost in costs), time_s, sum(cost.tokens for cost in costs), blocked_s)

    @property
    def lost(self) -> float:
        """Fraction of the time spent blocked."""
        return self.blocked_s / self.time_s if self.time_s else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one node."""
        return self.tokens / self.time_s if self.time_s else math.nan


@dataclass(frozen=True)
class PhaseComparison:
    """Time use of healthy nodes with and without faults on others."""

    usual_s: float
    """Median time in which an undisturbed round blocks training."""
    undisturbed: Share
    survivors: Share
    store_healthy: Share
    """Rounds of `survivors` without a fault of the store, which stops all nodes at their boundary."""
    fenced: int
    """Times that a healthy node was fenced; included in `survivors`."""


def compare(costs: Sequence[RoundCost], struck: Sequence[InjectedFault], calm: Span, end_s: float) -> PhaseComparison:
    """Compare healthy nodes during faults, up to `end_s`, with the baseline `calm`."""
    before = [c for c in costs if c.span[0] >= calm[0] and c.span[1] <= calm[1] and not c.is_fenced]
    usual_s = median([cost.blocked_s for cost in before]) if before else 0.0
    faults = [one.span(end_s) for one in struck]
    own: dict[str, list[Span]] = {}  # when each node had a fault or had not recovered
    for one in struck:
        for name in one.fault.nodes:
            own.setdefault(name, []).append((one.at_s, one.over_s.get(name, end_s)))
    in_phase = [cost for cost in costs if cost.span[0] >= calm[1] and cost.span[1] <= end_s]
    healthy = [cost for cost in in_phase if not _touches(cost.span, own.get(cost.node_id, ()))]
    of_store = [one.span(end_s) for one in struck if not one.fault.nodes]

    def share_of(rounds: Sequence[RoundCost]) -> Share:
        affected = [cost for cost in rounds if cost.is_fenced or _touches(cost.span, faults)]
        return Share.of(rounds, sum(cost.blocked_s - (0 if cost.is_fenced else usual_s) for cost in affected))

    return PhaseComparison(
        usual_s=usual_s,
        undisturbed=Share.of(before, sum(cost.blocked_s - usual_s for cost in before)),
        survivors=share_of(healthy),
        store_healthy=share_of([cost for cost in healthy if not _touches(cost.span, of_store)]),
        fenced=sum(cost.is_fenced for cost in healthy),
    )


def _touches(one: Span, others: Iterable[Span]) -> bool:
    """Return whether a span overlaps one of others."""
    return any(one[0] < other[1] and other[0] < one[1] for other in others)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile; `share` is 0 to 1."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class KindRow:
    """The cost of faults of one kind."""

    kind: Kind
    count: int
    detected_s: tuple[float, ...]
    """Seconds from the injection."""
    recovered_s: tuple[float, ...]
    """Seconds from the end of the fault."""


def rows_of(struck: Sequence[InjectedFault]) -> list[KindRow]:
    """Return a row for each kind that was injected."""
    rows: list[KindRow] = []
    for kind in Kind:
        ours = [one for one in struck if one.fault.kind is kind]
        detected = tuple(one.detected_s - one.at_s for one in ours if one.detected_s is not None)
        back = tuple(took_s for one in ours for took_s in one.recovered_s())
        if ours:
            rows.append(KindRow(kind, len(ours), detected, back))
    return rows


# -- the page -------------------------------------------------------------------------------------------------------


def render(
    options: ChaosOptions, about: Mapping[str, str], struck: Sequence[InjectedFault], comparison: PhaseComparison,
    seen: Judgement,
) -> str:  # fmt: skip
    """Return the report. `about`: machine, config and omitted kinds as text."""
    parts = [
        f"{_TITLE}: {seen.headline}",
        _setting(options, about, seen),
        "## Invariants\n\n" + _invariants(seen),
        "## Faults\n\n" + _faults(rows_of(struck), seen),
        "## What survivors lost\n\n" + _survivors(comparison),
        "## How to read this\n\n" + _NOTES.format(cpu=_restart_cpu(seen.restart_cpu_s)),
    ]
    return "\n\n".join(parts) + "\n"


def _setting(options: ChaosOptions, about: Mapping[str, str], seen: Judgement) -> str:
    lines = [
        f"- machine: {about['machine']}",
        f"- run: `{options.command}`",
        f"- config: {about['config']}",
        f"- seed {options.seed}, {options.nodes} nodes{_special(options)}, mean time between faults "
        f"{options.mtbf_s:g} s, {options.calm_minutes:g} minutes undisturbed, then {options.minutes:g} minutes "
        "with faults",
        f"- CPU of all nodes and the store in the undisturbed phase: {seen.cpu_share:.0%} of all cores",
        f"- some member waited for a CPU for {seen.calm_starved:.0%} of the undisturbed phase, and for "
        f"{seen.storm_starved:.0%} of the phase with faults",
    ]
    return "\n".join([*lines, *([f"- left out: {about['left out']}"] if about["left out"] else [])])


def _special(options: ChaosOptions) -> str:
    dial_out_only = f", of which {options.dial_out_only} cannot be dialled" if options.dial_out_only else ""
    return dial_out_only + {0: ", each with a store", 1: ""}.get(options.stores, f", {options.stores} stores")


def _invariants(seen: Judgement) -> str:
    counts = (
        f"{seen.rounds} rounds committed, {seen.retries} plans of a round retried, {seen.fences} fences, "
        f"{seen.mismatches} digest mismatches, {seen.hangs} hangs; data: {seen.audit}."
    )
    found = [f"- {line}" for line in seen.lines]
    return "\n".join([counts, *([""] if found else []), *found])


def _faults(rows: Sequence[KindRow], seen: Judgement) -> str:
    detected = tuple(value for row in rows for value in row.detected_s)
    back = tuple(value for row in rows for value in row.recovered_s)
    cells = [_cells(row.kind.value, row.count, row.detected_s, row.recovered_s) for row in rows]
    cells.append(_cells("all", sum(row.count for row in rows), detected, back))
    head = ("fault", "count", "detected", "p50 s", "p99 s", "max s", "back after p50 s", "max s")
    injected = (
        f"{seen.struck} of {seen.planned} planned faults were injected; a fault waits while it would leave too few "
        "nodes undisturbed."
    )
    return f"{markdown_table(head, cells)}\n\n{injected}"


def _cells(name: str, count: int, detected_s: Sequence[float], recovered_s: Sequence[float]) -> list[str]:
    detected = [f"{percentile(detected_s, share):.2f}" if detected_s else "-" for share in (0.5, 0.99, 1.0)]
    back = [f"{percentile(recovered_s, share):.1f}" if recovered_s else "-" for share in (0.5, 1.0)]
    return [name, str(count), str(len(detected_s)), *detected, *back]


def _survivors(comparison: PhaseComparison) -> str:
    undisturbed, survivors = comparison.undisturbed, comparison.survivors
    head = ("", "node-rounds", "node-seconds", "blocked by faults", "tokens/s of a node", "of undisturbed")
    rows = [
        _share_cells("undisturbed phase", undisturbed, undisturbed),
        _share_cells("healthy nodes, faults on others", survivors, undisturbed),
        _share_cells("of these, rounds without a fault of the store", comparison.store_healthy, undisturbed),
    ]
    sentences = (
        f"Survivors stood still for {_percent(survivors)} of their time because of faults, "
        f"{_percent(comparison.store_healthy)} in rounds without a fault of the store. An undisturbed round blocks "
        f"training for {comparison.usual_s:.2f} s (median), which is not counted. Healthy nodes were fenced and "
        f"rejoined {comparison.fenced} times."
    )
    return f"{markdown_table(head, rows)}\n\n{sentences}"


def _share_cells(name: str, share: Share, undisturbed: Share) -> list[str]:
    rate = f"{share.tokens_per_s:.1f}" if share.time_s else "-"
    ratio = f"{share.tokens_per_s / undisturbed.tokens_per_s:.3f}" if undisturbed.tokens and share.time_s else "unknown"
    return [name, str(share.rounds), f"{share.time_s:.0f}", _percent(share), rate, ratio]


def _percent(share: Share) -> str:
    return f"{share.lost:.2%}" if share.time_s else "-"


def _restart_cpu(restarts_s: Sequence[float]) -> str:
    if not restarts_s:
        return "no node was restarted"
    return f"{len(restarts_s)} restarts used {sum(restarts_s):.0f} s, at most {max(restarts_s):.1f} s each"


_NOTES = """\
- Compute is emulated: if the config slows down inner steps (`fault.inject`), nodes sleep instead of computing, so that
  all of them fit on this machine. Waits, transfers, detection and recovery are real.
- Detected: from the injection until the store no longer counts the node alive or shows it cut off; polled every 20 ms.
  For one of several stores: until the first member reported that it uses another one. Not included: faults that ended
  earlier, faults of the only store, and leaving nodes.
- Back after: from the end of the fault (restart, SIGCONT, link healed) until the node contributed to a round again; for
  the store, until the next round was committed. It includes starting Python and waiting for the end of the round.
- Blocked by faults: the time in which training stood still in each round that overlaps a fault, minus the undisturbed
  median, plus the whole round if a healthy node was fenced; divided by the time of healthy nodes. The same difference
  in the undisturbed phase shows the noise.
- Not counted: the CPU of restarting processes, which would not slow down other machines. As root they run at background
  priority until they are members: {cpu}."""
