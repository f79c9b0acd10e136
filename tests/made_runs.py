"""Facts of made-up runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.facts import Fact, FactSource
from zeroband.observe.history import RunHistory
from zeroband.observe.metrics import METRICS_FILE

BEGIN_S = 1_700_000_000.0
SAMPLES = 4


class MadeFacts(FactSource):
    """Gives facts, or a problem, call by call; `facts` are what the next call gives."""

    run_id, place = "run", "made up"

    def __init__(self, facts: Iterable[Fact] = (), *later: Iterable[Fact] | Exception) -> None:
        self.facts = list(facts)
        self.later = list(later)
        self.problem: Exception | None = None
        self.is_piece = False
        self.cannot: list[str] = []
        self.skipped: dict[str, int] = {}
        self._node_ids: set[str] = set()

    def node_ids(self) -> list[str]:
        return sorted(self._node_ids)

    def read(self) -> list[Fact]:
        if self.problem is not None:
            raise self.problem
        new, after = self.facts, self.later.pop(0) if self.later else ()
        self.problem, self.facts = (after, []) if isinstance(after, Exception) else (None, list(after))
        self._node_ids |= {fact.node_id for fact in new}
        return new

    @property
    def has_more(self) -> bool:
        return self.is_piece

    def skipped_lines(self) -> dict[str, int]:
        return self.skipped

    def unread(self) -> list[str]:
        return self.cannot

    def close(self) -> None: ...


def history_of(facts: Iterable[Fact]) -> RunHistory:
    made = RunHistory("run")
    made.take((), facts)
    return made


def write(run_dir: Path, facts: Iterable[Fact]) -> None:
    """Append facts to the files of their nodes."""
    for node_id, record in facts:
        node_dir = run_dir / node_id
        node_dir.mkdir(parents=True, exist_ok=True)
        with (node_dir / (EVENTS_FILE if "kind" in record else METRICS_FILE)).open("a") as file:
            file.write(json.dumps(record) + "\n")


def member(node_id: str) -> str:
    return f"{node_id}#1"


def event(node_id: str, at_s: float, kind: str, **fields: Any) -> Fact:
    return Fact(node_id, {"at_s": BEGIN_S + at_s, "kind": kind, **fields})


def step(node_id: str, at_s: float, number: int, **values: Any) -> Fact:
    usual = {"train/loss": 4.0, "train/tokens_per_s": 100.0, "train/step_s": 1.0, "train/tokens": 100 * number}
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return Fact(node_id, {"step": number, "at_s": BEGIN_S + at_s, **usual, **named})


def joined(node_id: str, at_s: float) -> list[Fact]:
    return [
        event(node_id, at_s, "node_started", total_steps=100, local_world_size=1, parameters=1000, detect_s=5.0),
        event(node_id, at_s + 0.1, "joined", member_id=member(node_id), round=0),
    ]


def committed(
    node_id: str, at_s: float, number: int, nodes: Sequence[str], *, line: str = "line", **fields: Any
) -> Fact:
    """A round of these nodes, each with SAMPLES samples after the founding round. `line`: of rounds that it is in."""
    used = SAMPLES if number else 0
    ledger = {
        "next": (number + 1) * SAMPLES * len(nodes),
        "returned": [],
        "assigned": {
            member(n): [[(number * len(nodes) + i) * SAMPLES, (number * len(nodes) + i + 1) * SAMPLES]]
            for i, n in enumerate(nodes)
        },
    }
    progress = {"inner_step": number, "tokens": number, "ledgers": {"": ledger}, "founding": line, "follows": None}
    record = {
        "round": number,
        "epoch": 1,
        "members": [member(n) for n in nodes],
        "digest": f"d{number}",
        "weights": [used] * len(nodes),
        "samples": [used] * len(nodes),
        "late": [],
        "progress": progress,
        **fields,
    }
    return event(node_id, at_s, "round_committed", **record)


def run_of(
    nodes: Sequence[str],
    rounds: int,
    *,
    round_s: float = 2.0,
    ahead_s: float = 0.0,
    begin_s: float = 0.0,
    line: str = "line",
) -> Iterator[list[Fact]]:
    """Each node's facts: one inner step and one round every `round_s`. `ahead_s`: of the last node's clock."""
    for node_id in nodes:
        by_s = begin_s + (ahead_s if node_id == nodes[-1] else 0.0)
        facts = [*joined(node_id, by_s), committed(node_id, by_s + 0.2, 0, nodes, line=line)]
        for number in range(1, rounds + 1):
            at_s = by_s + round_s * number
            facts.append(committed(node_id, at_s, number, nodes, line=line))
            facts.append(
                step(
                    node_id,
                    at_s,
                    number,
                    outer__round=number,
                    outer__wait_s=0.3,
                    outer__transfer_s=0.2,
                    outer__apply_s=0.1,
                    outer__blocked_s=0.6,
                    outer__sent_bytes=10,
                    outer__nodes=len(nodes),
                )
            )
        yield facts
