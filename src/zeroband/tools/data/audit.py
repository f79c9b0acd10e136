"""Replays the data ledger of a run from its nodes' events: which samples were trained twice, and which never.

    zeroband data audit RUN_DIR

Exit codes: 0 every sample once; 3 repeated or skipped samples or rounds that nobody recorded; 2 nothing to audit: no
run there, or one that trained no sample.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroband.data.ledger import Ledger, Range, holes, take
from zeroband.elastic.membership.records import from_record
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.jsonl import JsonlTail

_EXIT_CONFIG, _EXIT_INEXACT = 2, 3


@dataclass(frozen=True)
class AuditedRound:
    """What one round recorded of the data."""

    round: int
    used: Mapping[str, int]
    """Samples of each member whose update counted."""
    ledger: Ledger
    assigned: Mapping[str, tuple[Range, ...]]
    """Dealt out for the round after this one."""
    founding: str = ""
    """The line of rounds that it belongs to: each founding, and each rollback, begins one."""
    follows: tuple[str, int] | None = None
    """The line and round whose state this line began with; what came after that does not count any more."""
    at_s: float = 0.0


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


def audit(rounds: Iterable[AuditedRound], left_out: Iterable[Range] = ()) -> Audit:
    """Replay committed rounds, in any order; a round may stand in it several times, once for each node.

    `left_out`: what rollbacks recorded that they skip on purpose.
    """
    line = _line(rounds)
    trained, missing = _inherited(line), list[int]()
    for segment in line:
        missing += [number for number in range(segment.first, segment.last + 1) if number not in segment.rounds]
        for number in range(segment.first + 1, segment.last + 1):
            before, after = segment.rounds.get(number - 1), segment.rounds.get(number)
            if before is not None and after is not None:
                for member, used in after.used.items():
                    trained += take(before.assigned.get(member, ()), used)[0]
    last = line[-1].rounds[line[-1].last] if line else None
    owed = [] if last is None else _owed(last)
    reached = 0 if last is None else last.ledger.next
    repeated, missed = _overlaps([*trained, *owed]), holes([*trained, *owed], reached)
    skipped = holes([*holes(missed, reached), *left_out], reached)
    return Audit(
        rounds=sum(segment.first <= number <= segment.last for segment in line for number in segment.rounds),
        trained=_total(trained),
        owed=_total(owed),
        repeated=repeated,
        skipped=skipped,
        missing_rounds=tuple(missing),
    )


@dataclass(frozen=True)
class _Segment:
    """The part of a line of rounds that counts."""

    rounds: Mapping[int, AuditedRound]
    first: int
    last: int


def _line(rounds: Iterable[AuditedRound]) -> list[_Segment]:
    """What led to the newest state, in order: of each line its rounds up to the one that the next line began with."""
    lines: dict[str, dict[int, AuditedRound]] = {}
    for record in rounds:
        lines.setdefault(record.founding, {})[record.round] = record
    begins = {founding: min(record.at_s for record in line.values()) for founding, line in lines.items()}
    founding: str | None = max(begins, key=lambda founding: begins[founding], default=None)
    segments: list[_Segment] = []
    last: int | None = None
    while founding is not None and founding in lines:
        line = lines.pop(founding)
        follows = next(iter(line.values())).follows
        first = 0 if follows is None else min(line)
        segments.insert(0, _Segment(line, first, max(line) if last is None else last))
        founding, last = follows or (None, None)
    return segments


def _inherited(line: Sequence[_Segment]) -> list[Range]:
    """What was trained before the first of these rounds, by a run whose records are not here."""
    first = line[0].rounds.get(line[0].first) if line else None
    if first is None or first.follows is None:
        return []
    return list(holes(_owed(first), first.ledger.next))


def _owed(record: AuditedRound) -> list[Range]:
    """Handed out after a round and not trained by then."""
    return [*record.ledger.returned, *(span for spans in record.assigned.values() for span in spans)]


def _overlaps(ranges: Iterable[Range]) -> tuple[Range, ...]:
    overlaps: list[Range] = []
    reached = 0
    for start, stop in sorted(ranges):
        if start < reached:
            overlaps.append((start, min(stop, reached)))
        reached = max(reached, stop)
    return tuple(overlaps)


def read_rounds(run_dir: Path) -> list[AuditedRound]:
    """The committed rounds in the events of all nodes of a run."""
    return [
        _round_of(event)
        for path in sorted(run_dir.glob(f"*/{EVENTS_FILE}"))
        for event in JsonlTail(path).read()
        if event.get("kind") == "round_committed"
    ]


def read_left_out(run_dir: Path) -> list[Range]:
    """What rollbacks of a run skipped on purpose, in the events of all its nodes."""
    events = [event for path in sorted(run_dir.glob(f"*/{EVENTS_FILE}")) for event in JsonlTail(path).read()]
    return [(start, stop) for e in events if e.get("kind") == "rolled_back" for start, stop in e.get("skipped", [])]


def _round_of(event: Mapping[str, Any]) -> AuditedRound:
    progress = event["progress"]
    return AuditedRound(
        round=event["round"],
        used={
            member: samples
            for member, weight, samples in zip(event["members"], event["weights"], event["samples"], strict=True)
            if weight > 0
        },
        ledger=from_record(Ledger, progress["ledger"]),
        assigned={m: tuple((a, b) for a, b in ranges) for m, ranges in progress["assigned"].items()},
        founding=progress.get("founding", ""),  # absent from events of earlier versions, as the next
        follows=None if (follows := progress.get("follows")) is None else (follows[0], follows[1]),
        at_s=event["at_s"],
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
    left_out = read_left_out(run_dir)
    result = audit(rounds, left_out)
    print(f"rounds committed   {result.rounds}")
    print(f"samples trained    {result.trained}")
    print(f"samples owed       {result.owed}")
    print(f"samples repeated   {_total(result.repeated)} {_listed(result.repeated)}")
    print(f"samples skipped    {_total(result.skipped)} {_listed(result.skipped)}")
    if left_out:
        print(f"left out by rollbacks {_listed(sorted(set(left_out)))}")
    if result.missing_rounds:
        print(f"rounds nobody here recorded: {', '.join(map(str, result.missing_rounds))}")
    if result.is_exact and not result.trained:
        print(
            f"zeroband: the {result.rounds} rounds in {run_dir} trained no samples, so there is nothing to audit; "
            "wait until the run has committed a round after its founding",
            file=sys.stderr,
        )
        return _EXIT_CONFIG
    return 0 if result.is_exact else _EXIT_INEXACT


def _total(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _listed(ranges: Sequence[Range]) -> str:
    shown = ", ".join(f"{start}..{stop - 1}" for start, stop in ranges[:5])
    return f"({shown}{', ...' if len(ranges) > 5 else ''})" if shown else ""
