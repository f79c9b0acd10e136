"""Replays the data ledger of a run from its nodes' events: which samples were trained twice, and which never.

    zeroband data audit RUN_DIR

Exit codes: 0 every sample once, 3 repeated or skipped samples or rounds that nobody recorded, 2 no run there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroband.data.ledger import Ledger, Range, take
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.jsonl import JsonlTail

_EXIT_CONFIG, _EXIT_INEXACT = 2, 3


@dataclass(frozen=True)
class CommittedRound:
    """What one round recorded of the data."""

    round: int
    used: Mapping[str, int]
    """Samples of each member whose update counted."""
    ledger: Ledger
    assigned: Mapping[str, tuple[Range, ...]]
    """Dealt out for the round after this one."""


@dataclass(frozen=True)
class Audit:
    """What became of the samples of a run."""

    rounds: int
    trained: int
    """Samples that contributed to a committed round."""
    owed: int
    """Handed out, not trained yet: in the work of the next round, or returned by lost nodes."""
    repeated: tuple[Range, ...]
    skipped: tuple[Range, ...]
    missing_rounds: tuple[int, ...]
    """Rounds that no node recorded; what they trained is unknown."""

    @property
    def is_exact(self) -> bool:
        return not (self.repeated or self.skipped or self.missing_rounds)


def audit(rounds: Iterable[CommittedRound]) -> Audit:
    """Replay committed rounds, in any order; a round may stand in it several times, once for each node."""
    by_round = {record.round: record for record in rounds}
    newest = max(by_round, default=-1)
    trained: list[Range] = []
    for number in range(1, newest + 1):
        before, after = by_round.get(number - 1), by_round.get(number)
        if before is not None and after is not None:
            trained += [span for m, used in after.used.items() for span in take(before.assigned[m], used)[0]]
    last = by_round.get(newest)
    owed = [] if last is None else [*last.ledger.returned, *(s for spans in last.assigned.values() for s in spans)]
    end = 0 if last is None else last.ledger.next
    repeated, skipped = _overlaps_and_holes([*trained, *owed], end)
    return Audit(
        rounds=len(by_round),
        trained=sum(stop - start for start, stop in trained),
        owed=sum(stop - start for start, stop in owed),
        repeated=repeated,
        skipped=skipped,
        missing_rounds=tuple(n for n in range(newest + 1) if n not in by_round),
    )


def _overlaps_and_holes(ranges: Iterable[Range], end: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    overlaps: list[Range] = []
    holes: list[Range] = []
    reached = 0
    for start, stop in sorted(ranges):
        if start > reached:
            holes.append((reached, start))
        if start < reached:
            overlaps.append((start, min(stop, reached)))
        reached = max(reached, stop)
    if reached < end:
        holes.append((reached, end))
    return tuple(overlaps), tuple(holes)


def read_rounds(run_dir: Path) -> list[CommittedRound]:
    """The committed rounds in the events of all nodes of a run."""
    return [
        _round_of(event)
        for path in sorted(run_dir.glob(f"*/{EVENTS_FILE}"))
        for event in JsonlTail(path).read()
        if event.get("kind") == "round_committed"
    ]


def _round_of(event: Mapping[str, Any]) -> CommittedRound:
    progress = event["progress"]
    return CommittedRound(
        round=event["round"],
        used={
            member: samples
            for member, weight, samples in zip(event["members"], event["weights"], event["samples"], strict=True)
            if weight > 0
        },
        ledger=Ledger.from_json(progress["ledger"]),
        assigned={m: tuple((a, b) for a, b in ranges) for m, ranges in progress["assigned"].items()},
    )


def main(argv: Sequence[str]) -> int:
    """`zeroband data audit RUN_DIR`. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="zeroband data", description=__doc__)
    parser.add_argument("action", choices=["audit"])
    parser.add_argument("run_dir", type=Path, help="<run.dir>/<run.id>, with the folders of all nodes")
    run_dir: Path = parser.parse_args(argv).run_dir
    rounds = read_rounds(run_dir)
    if not rounds:
        print(f"zeroband: no committed rounds in {run_dir}; give <run.dir>/<run.id>", file=sys.stderr)
        return _EXIT_CONFIG
    result = audit(rounds)
    print(f"rounds committed   {result.rounds}")
    print(f"samples trained    {result.trained}")
    print(f"samples owed       {result.owed}")
    print(f"samples repeated   {_total(result.repeated)} {_listed(result.repeated)}")
    print(f"samples skipped    {_total(result.skipped)} {_listed(result.skipped)}")
    if result.missing_rounds:
        print(f"rounds nobody here recorded: {', '.join(map(str, result.missing_rounds))}")
    return 0 if result.is_exact else _EXIT_INEXACT


def _total(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _listed(ranges: Sequence[Range]) -> str:
    shown = ", ".join(f"{start}..{stop - 1}" for start, stop in ranges[:5])
    return f"({shown}{', ...' if len(ranges) > 5 else ''})" if shown else ""
