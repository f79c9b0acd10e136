"""The one-page report of a soak, as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroband.tools.chaos.fault_costs import InjectedFault, KindRow, PhaseComparison, Share, percentile, rows_of
from zeroband.tools.chaos.judgement import Evidence, Judgement
from zeroband.tools.chaos.options import ChaosOptions

_TITLE = "# Chaos soak"


@dataclass(frozen=True)
class SoakSetting:
    """What was run, where."""

    options: ChaosOptions
    machine: str
    config: str
    """The settings that matter, on one line."""
    left_out: str = ""
    """Kinds that were impossible here, and why; empty where all were possible."""


def render(
    setting: SoakSetting,
    struck: Sequence[InjectedFault],
    comparison: PhaseComparison,
    seen: Evidence,
    judgement: Judgement,
) -> str:
    """The whole page."""
    parts = [
        f"{_TITLE}: {judgement.headline}",
        _setting(setting, seen),
        "## Invariants\n\n" + _invariants(seen, judgement),
        "## Faults\n\n" + _faults(rows_of(struck), seen),
        "## What survivors lost\n\n" + _survivors(comparison),
        "## How to read this\n\n" + _NOTES.format(cpu=_restart_cpu(seen.restart_cpu_s)),
    ]
    return "\n\n".join(parts) + "\n"


def _setting(setting: SoakSetting, seen: Evidence) -> str:
    options = setting.options
    lines = [
        f"- machine: {setting.machine}",
        f"- run: `{options.command}`",
        f"- config: {setting.config}",
        f"- seed {options.seed}, {options.nodes} nodes{_special(options)}, mean time between faults "
        f"{options.mtbf_s:g} s, {options.calm_minutes:g} minutes undisturbed, then {options.minutes:g} minutes "
        "with faults",
        f"- CPU of all nodes and the store in the undisturbed phase: {seen.cpu_share:.0%} of all cores",
        f"- some member waited for a processor for {seen.calm_starved:.0%} of the undisturbed phase, and for "
        f"{seen.starved:.0%} of the phase with faults",
    ]
    return "\n".join([*lines, *([f"- left out: {setting.left_out}"] if setting.left_out else [])])


def _special(options: ChaosOptions) -> str:
    behind = f", of which {options.behind} cannot be dialled" if options.behind else ""
    return behind + {0: ", each with a store", 1: ""}.get(options.stores, f", {options.stores} stores")


def _invariants(seen: Evidence, judgement: Judgement) -> str:
    lines = [
        f"{seen.rounds} rounds committed, {seen.retries} openings of a round retried, {seen.fences} fences, "
        f"{seen.mismatches} digest mismatches, {seen.hangs} hangs; data: {seen.audit}.",
    ]
    found = [f"- {line}" for line in judgement.lines]
    return "\n".join([*lines, *([""] if found else []), *found])


def _faults(rows: Sequence[KindRow], seen: Evidence) -> str:
    head = (
        "| fault | count | detected | p50 s | p99 s | max s | back after p50 s | max s |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    lines = [head, *map(_row, rows)]
    detected = [value for row in rows for value in row.detected_s]
    back = [value for row in rows for value in row.recovered_s]
    lines.append(f"| all | {sum(row.count for row in rows)} | {len(detected)} | {_three(detected)} | {_two(back)} |")
    lines += [
        "",
        f"{seen.struck} of {seen.planned} planned faults struck; one waits while too few nodes are in peace.",
    ]
    return "\n".join(lines)


def _row(row: KindRow) -> str:
    return (
        f"| {row.kind.value} | {row.count} | {len(row.detected_s)} | {_three(row.detected_s)} "
        f"| {_two(row.recovered_s)} |"
    )


def _three(values: Sequence[float]) -> str:
    shares = (0.5, 0.99, 1.0)
    return " | ".join(f"{percentile(values, share):.2f}" if values else "-" for share in shares)


def _two(values: Sequence[float]) -> str:
    return " | ".join(f"{percentile(values, share):.1f}" if values else "-" for share in (0.5, 1.0))


def _survivors(comparison: PhaseComparison) -> str:
    calm, after = comparison.undisturbed, comparison.survivors
    change = f"{after.tokens_per_s / calm.tokens_per_s - 1:+.1%}" if calm.tokens and after.time_s else "unknown"
    rows = [
        "| | node-rounds | node-seconds | blocked by faults | tokens/s of a node |",
        "|---|---|---|---|---|",
        _share_row("undisturbed phase", calm),
        _share_row("healthy nodes, faults on others", after),
    ]
    sentences = (
        f"Survivors spent {_percent(after)} of their time blocked, retrying or redoing because of faults; per healthy "
        f"node-second they trained {change} tokens against the undisturbed phase. An undisturbed round waits and "
        f"transfers for {comparison.usual_s:.2f} s (median), which is not counted. Healthy nodes were left out and had "
        f"to come back {comparison.fenced} times."
    )
    return "\n".join([*rows, "", sentences])


def _share_row(name: str, share: Share) -> str:
    rate = f"{share.tokens_per_s:.1f}" if share.time_s else "-"
    return f"| {name} | {share.rounds} | {share.time_s:.0f} | {_percent(share)} | {rate} |"


def _percent(share: Share) -> str:
    return f"{share.lost:.2%}" if share.time_s else "-"


def _restart_cpu(restarts_s: Sequence[float]) -> str:
    if not restarts_s:
        return "no node was restarted"
    return f"{len(restarts_s)} restarts used {sum(restarts_s):.0f} s, {max(restarts_s):.1f} s at most"


_NOTES = """\
- Compute is emulated: where the config slows every inner step (`fault.inject`), nodes sleep instead of
  computing, so that all of them fit on this machine. Waits, transfers, detection and recovery are real.
- Detection: from the strike until the store no longer counts the node alive, or shows it cut off; looked at every
  20 ms. A fault that ended before that is not in the figure, nor are faults of the only store and nodes that leave.
  A store of several that was lost or stopped: until the first member said that it is at another one.
- Back after: from the end of the fault (restart, SIGCONT, link healed) until the node contributed to a round again,
  or for the store until the next round was committed. It includes starting Python and waiting for the round's end.
- Blocked by faults: waiting and transfer of each round that overlaps a fault, minus the undisturbed median, and the
  whole round where a healthy node was left out; over the time of healthy nodes. In the undisturbed phase the same
  difference, which is the noise of the figure.
- Not counted: the CPU of restarting processes, which on machines of their own would take nothing from the others. As
  root they run in the background until they are members: {cpu}."""
