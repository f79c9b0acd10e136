"""`zeroband data audit RUN_DIR`: find samples that a run trained twice or never, by replaying its nodes' events.

Private data is audited separately for each node.
Exit codes: 0 every sample was trained once; 3 repeated or skipped samples, or unrecorded rounds; 2 nothing to audit.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroband.data.ledger import SHARED, Ledger, Range, count, holes, take
from zeroband.elastic.membership.progress import deal_claims, upgraded
from zeroband.elastic.membership.records import Claim, from_record
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.jsonl import JsonlTail
from zeroband.tools.arguments import parser_of

_EXIT_CONFIG, _EXIT_INEXACT = 2, 3

NOTHING: Mapping[str, tuple[Range, ...]] = {}


@dataclass(frozen=True)
class AuditedRound:
    """A round's record of the data."""

    round: int
    used: Mapping[str, int]
    """Samples by member whose update counted."""
    ledgers: Mapping[str, Ledger]
    """Ledgers after the round, by corpus."""
    founding: str = ""
    """Its line of rounds; each founding and each rollback starts one."""
    follows: tuple[str, int] | None = None
    """The line and round that this line continues; later rounds of that line are superseded."""
    at_s: float = 0.0
    claims: Mapping[str, Claim] = field(default_factory=dict[str, Claim])
    """Joiners' claims, which the round assigned before it counted samples."""


@dataclass(frozen=True)
class Account:
    """The samples of a corpus."""

    trained: int = 0
    """Samples that contributed to a committed round."""
    owed: int = 0
    """Samples assigned to the next round or returned by lost nodes."""
    repeated: tuple[Range, ...] = ()
    skipped: tuple[Range, ...] = ()

    @property
    def is_exact(self) -> bool:
        return not (self.repeated or self.skipped)


@dataclass(frozen=True)
class Audit:
    """The samples of a run."""

    rounds: int
    """Committed rounds without foundings, which train nothing."""
    accounts: Mapping[str, Account]
    """By corpus."""
    missing_rounds: tuple[int, ...]
    """Rounds that no node recorded."""

    @property
    def trained(self) -> int:
        return sum(account.trained for account in self.accounts.values())

    @property
    def is_exact(self) -> bool:
        return not self.missing_rounds and all(account.is_exact for account in self.accounts.values())


def audit(rounds: Iterable[AuditedRound], left_out: Mapping[str, Iterable[Range]] = NOTHING) -> Audit:
    """Replay committed rounds, given in any order and possibly once per node.

    `left_out`: samples that rollbacks skipped on purpose, by corpus.
    """
    line = _line(rounds)
    trained, missing = _inherited(line), list[int]()
    for segment in line:
        missing += [number for number in range(segment.first, segment.last + 1) if number not in segment.rounds]
        for number in range(segment.first + 1, segment.last + 1):
            before, after = segment.rounds.get(number - 1), segment.rounds.get(number)
            if before is not None and after is not None:
                for corpus, ledger in deal_claims(after.claims, before.ledgers).items():
                    for member, used in after.used.items():
                        trained[corpus] += take(ledger.assigned.get(member, ()), used)[0]
    last = line[-1].rounds[line[-1].last].ledgers if line else {}
    return Audit(
        rounds=sum(segment.first < number <= segment.last for segment in line for number in segment.rounds),
        accounts={
            corpus: _account(trained[corpus], last.get(corpus, Ledger()), left_out.get(corpus, ()))
            for corpus in sorted({*trained, *last})
        },
        missing_rounds=tuple(missing),
    )


def _account(trained: Sequence[Range], last: Ledger, left_out: Iterable[Range]) -> Account:
    """Return the account of a corpus. `last`: its ledger after the newest round."""
    missed = holes([*trained, *last.owed], last.next)
    return Account(
        trained=count(trained),
        owed=count(last.owed),
        repeated=_overlaps([*trained, *last.owed]),
        skipped=holes([*holes(missed, last.next), *left_out], last.next),
    )


@dataclass(frozen=True)
class _Segment:
    """The part of a line of rounds that was not superseded."""

    rounds: Mapping[int, AuditedRound]
    first: int
    last: int


def _line(rounds: Iterable[AuditedRound]) -> list[_Segment]:
    """Return what led to the newest state: of each line, its rounds up to the one that the next line continues."""
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


def _inherited(line: Sequence[_Segment]) -> defaultdict[str, list[Range]]:
    """Return what was trained before the first of these rounds, by a run without records here; by corpus."""
    inherited = defaultdict[str, list[Range]](list)
    first = line[0].rounds.get(line[0].first) if line else None
    if first is not None and first.follows is not None:
        inherited |= {corpus: list(ledger.settled) for corpus, ledger in first.ledgers.items()}
    return inherited


def _overlaps(ranges: Iterable[Range]) -> tuple[Range, ...]:
    overlaps: list[Range] = []
    reached = 0
    for start, stop in sorted(ranges):
        if start < reached:
            overlaps.append((start, min(stop, reached)))
        reached = max(reached, stop)
    return tuple(overlaps)


def read_rounds(run_dir: Path) -> list[AuditedRound]:
    """Return the committed rounds in the events of all nodes."""
    return [round_of(event) for event in _events(run_dir, "round_committed")]


def _events(run_dir: Path, kind: str) -> Iterator[Mapping[str, Any]]:
    for path in sorted(run_dir.glob(f"*/{EVENTS_FILE}")):
        yield from (event for event in JsonlTail(path).read() if event.get("kind") == kind)


def read_left_out(run_dir: Path) -> dict[str, list[Range]]:
    """Return what rollbacks skipped on purpose, by corpus, from the events of all nodes."""
    left_out = defaultdict[str, list[Range]](list)
    for skipped in (event.get("skipped", {}) for event in _events(run_dir, "rolled_back")):
        by_corpus = skipped if isinstance(skipped, dict) else {SHARED: skipped}  # a list in earlier versions
        for corpus, spans in by_corpus.items():
            left_out[corpus] += [(start, stop) for start, stop in spans]
    return left_out


def round_of(event: Mapping[str, Any]) -> AuditedRound:
    """Return the round that an event `round_committed` records."""
    progress = upgraded(event["progress"])
    return AuditedRound(
        round=event["round"],
        used={
            member: samples
            for member, weight, samples in zip(event["members"], event["weights"], event["samples"], strict=True)
            if weight > 0
        }
        | {member: samples for member, _, samples in event.get("carried", ())},  # absent from earlier versions
        ledgers={corpus: from_record(Ledger, ledger) for corpus, ledger in progress["ledgers"].items()},
        founding=progress.get("founding", ""),  # absent from events of earlier versions, as the next
        follows=None if (follows := progress.get("follows")) is None else (follows[0], follows[1]),
        at_s=event["at_s"],
        claims={member: from_record(Claim, claim) for member, claim in event.get("claims", {}).items()},
    )


def main(argv: Sequence[str]) -> int:
    """Audit a run. Returns the exit code."""
    parser = parser_of("data audit", __doc__)
    parser.add_argument("run_dir", type=Path, help="<run.dir>/<run.id>, with the folders of all nodes")
    run_dir: Path = parser.parse_args(argv).run_dir
    rounds = read_rounds(run_dir)
    if not rounds:
        print(f"zeroband: no committed rounds in {run_dir}; give <run.dir>/<run.id>", file=sys.stderr)
        return _EXIT_CONFIG
    left_out = read_left_out(run_dir)
    result = audit(rounds, left_out)
    print(f"rounds committed   {result.rounds}")
    for corpus, account in result.accounts.items():
        if corpus != SHARED:
            print(f"documents of {corpus}")
        print(f"samples trained    {account.trained}")
        print(f"samples owed       {account.owed}")
        print(f"samples repeated   {count(account.repeated)} {_listed(account.repeated)}")
        print(f"samples skipped    {count(account.skipped)} {_listed(account.skipped)}")
        if left_out.get(corpus):
            print(f"skipped by rollbacks {_listed(sorted(set(left_out[corpus])))}")
    if result.missing_rounds:
        print(f"rounds not recorded here: {', '.join(map(str, result.missing_rounds))}")
    if result.is_exact and not result.trained:
        print(
            f"zeroband: the {result.rounds} rounds in {run_dir} trained no samples, so there is nothing to audit; wait "
            "until the run has committed a round after its founding",
            file=sys.stderr,
        )
        return _EXIT_CONFIG
    return 0 if result.is_exact else _EXIT_INEXACT


def _listed(ranges: Sequence[Range]) -> str:
    shown = ", ".join(f"{start}..{stop - 1}" for start, stop in ranges[:5])
    return f"({shown}{', ...' if len(ranges) > 5 else ''})" if shown else ""
