"""What a run came to: its losses, and what its own counters say of bytes, times and rounds, here and at another link.

Each outcome is a JSON file, named by the digest of what it depends on. Finished runs are never repeated; one that
failed leaves a file, too, so that the table can show it, and is tried again by the next comparison. Times are those of
this machine, where nodes share the processor: they are compared within one page, not with others.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zeroband.tools.plan.forecast import Link, all_gather_s, all_reduce_s

FORMAT = 2
"""Number of the files' format, and part of every digest: another one makes all runs anew."""


@dataclass(frozen=True)
class RunMeasurements:
    """The counters of one run, the mean over its nodes unless it says otherwise."""

    nodes: int
    steps: int
    """Inner steps of a node."""
    tokens: int
    """Tokens of all nodes."""
    step_s: float
    """Median of an inner step without what happens between nodes."""
    blocked_s: float
    """Seconds in which training stood still for the others, or for this node's part of a round, over the run."""
    wall_s: float
    """Seconds from the first step's beginning to the last one's end."""
    rounds: int
    """Outer updates."""
    sent_bytes: float
    received_bytes: float
    peak_bytes: float
    """The most that any node sent in one round."""
    apply_s: float
    """Spent on the outer step itself, over the run."""
    payload_bytes: float | None = None
    """Payloads that a node sent over the run, each counted once however often it was sent: the mean over the nodes that
    sent any. None: they sent none, and what travelled are means."""

    @property
    def compute_utilisation(self) -> float:
        """Part of the time in which a node computed."""
        return min(1.0, self.steps * self.step_s / self.wall_s) if self.wall_s else 1.0

    @property
    def tokens_per_node(self) -> float:
        return self.tokens / self.nodes

    @property
    def sent_per_token(self) -> float:
        """Bytes up for each token of that node."""
        return self.sent_bytes / self.tokens_per_node

    @property
    def received_per_token(self) -> float:
        return self.received_bytes / self.tokens_per_node


@dataclass(frozen=True)
class Point:
    """The outer parameters at one place of the run."""

    step: int
    loss: float | None
    """On the text that is reported on, nats per token; None where it is not finite."""


@dataclass(frozen=True)
class Provenance:
    """What made an outcome."""

    command: str = ""
    """The comparison, as it was typed."""
    commit: str = ""
    """Commit of the code, with `-dirty` where the code differs from it. Empty: not known."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions of Python, torch and this package."""


def provenance(command: str) -> Provenance:
    """Return what makes the outcomes of this process."""
    describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    root = Path(__file__).parents[2]
    commit = subprocess.run(describe, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    names = {"torch": "torch", "zeroband": "zeroband-elastic"}
    versions = {name: version(distribution) for name, distribution in names.items()}
    return Provenance(command, commit, {"python": platform.python_version(), **versions})


@dataclass(frozen=True)
class RunResult:
    """One run: a method with one learning rate and one seed."""

    arm: str
    lr: float
    seed: int
    digest: str
    """Digest of its configuration, its start and how it is evaluated."""
    params: int = 0
    points: tuple[Point, ...] = ()
    tuning_loss: float | None = None
    """At the end of the run, on text that is not reported on: by which learning rates are chosen."""
    measured: RunMeasurements | None = None
    took_s: float = 0.0
    """Wall time of the run with starting and ending its processes."""
    failure: str = ""
    """Why there is no loss; empty: it ended well."""
    made_by: Provenance = Provenance()
    """What made it."""

    @property
    def loss(self) -> float | None:
        """Loss at the end of the run; None where it failed or diverged."""
        return self.points[-1].loss if self.points and not self.failure else None

    @property
    def state(self) -> str:
        """Say the state in a word, for the table."""
        if self.failure:
            return "failed"
        return "done" if self.loss is not None else "diverged"


def finite(loss: float) -> float | None:
    """A loss as it is kept."""
    return loss if math.isfinite(loss) else None


class ResultFiles:
    """The outcomes in a folder, by the digest of a run or another name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, digest: str, name: str = "") -> RunResult | None:
        """The outcome of a run that ended well, or diverged; None where there is none, or it cannot be read."""
        try:
            outcome = TypeAdapter(RunResult).validate_json(self._path(name or digest).read_bytes(), strict=True)
        except (OSError, ValueError):
            return None
        return None if outcome.failure or outcome.digest != digest else outcome

    def load_all(self) -> list[RunResult]:
        """Return the outcomes of all files, in the order of their names. Raises ValueError for one that is none."""
        found = [path.read_bytes() for path in sorted(self._folder.glob("*.json"))]
        return [TypeAdapter(RunResult).validate_json(content, strict=True) for content in found]

    def save(self, outcome: RunResult, name: str = "") -> None:
        """Keep an outcome; a reader sees the whole file or none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(name or outcome.digest)
        draft = path.with_suffix(f".{os.getpid()}.part")
        record = {"format": FORMAT, **dataclasses.asdict(outcome)}
        draft.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        draft.replace(path)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


# -- counters -------------------------------------------------------------------------------------------------------


def measured(records_of_nodes: Sequence[Sequence[Mapping[str, Any]]]) -> RunMeasurements:
    """Fold the lines of metrics.jsonl of each node. Raises ValueError where a node wrote none."""
    if not records_of_nodes or not all(records_of_nodes):
        raise ValueError("a node wrote no metrics")
    count = len(records_of_nodes)
    rounds = [[record for record in records if "outer/round" in record] for records in records_of_nodes]

    def total(name: str) -> float:
        return sum(record.get(name, 0) for of_node in rounds for record in of_node)

    return RunMeasurements(
        nodes=count,
        steps=round(statistics.mean(len(records) for records in records_of_nodes)),
        tokens=max(int(records[-1]["train/tokens"]) for records in records_of_nodes),
        step_s=statistics.median(_own_s(record) for records in records_of_nodes for record in records),
        blocked_s=sum(_blocked_s(record) for records in records_of_nodes for record in records) / count,
        wall_s=statistics.mean(sum(record["train/step_s"] for record in records) for records in records_of_nodes),
        rounds=max(sum(_rounds_of_lines(of_node)) for of_node in rounds),
        sent_bytes=total("outer/sent_bytes") / count,
        received_bytes=total("outer/received_bytes") / count,
        peak_bytes=max(
            (
                record.get("outer/sent_bytes", 0) / count
                for of_node in rounds
                for record, count in zip(of_node, _rounds_of_lines(of_node), strict=True)
            ),
            default=0,
        ),
        apply_s=total("outer/apply_s") / count,
        payload_bytes=statistics.mean(payloads) if (payloads := [*filter(None, map(_payloads_of, rounds))]) else None,
    )


def _payloads_of(records: Sequence[Mapping[str, Any]]) -> float:
    """Bytes of all payloads of a node; a line about several rounds has that of the newest."""
    return sum(
        (record.get("outer/payload_bytes") or 0) * number
        for record, number in zip(records, _rounds_of_lines(records), strict=True)
    )


def _rounds_of_lines(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many rounds each of a node's lines is about: a flush of updates that overlap brings several at once."""
    numbers = [int(record["outer/round"]) for record in records]
    return [max(1, number - before) for before, number in pairwise([numbers[0] - 1, *numbers])] if numbers else []


def _own_s(record: Mapping[str, Any]) -> float:
    """Duration of an inner step without what happens between nodes."""
    return max(0.0, record["train/step_s"] - _blocked_s(record))


def _blocked_s(record: Mapping[str, Any]) -> float:
    return record.get("outer/blocked_s") or 0.0  # a node alone has none


def said_bytes(found: RunMeasurements) -> float:
    """What a node had to say over the run, encoded, however often it was sent: as DisTrO's authors count.

    A payload is counted where it is sent. Of means, an all-reduce of E bytes sends 2 (M - 1) / M E.
    """
    if found.nodes == 1:
        return 0.0
    means = found.sent_bytes / (2 * (found.nodes - 1) / found.nodes)
    return means if found.payload_bytes is None else found.payload_bytes


def payload_ratio(found: RunMeasurements, params: int) -> float | None:
    """How many times less than 2 bytes a parameter and step a node had to say; None where it said nothing."""
    said = said_bytes(found)
    return 2 * params * found.steps / said if said else None


@dataclass(frozen=True)
class AtLink:
    """A run as it would go with another link between its nodes, by the formulas of `zeroband plan`."""

    step_s: float
    """Seconds of an inner step with its share of the outer one and of waiting."""
    compute_utilisation: float


def at_link(found: RunMeasurements, link: Link, *, overlap_steps: int = 0, step_s: float | None = None) -> AtLink:
    """What the counted bytes and measured times give over a link.

    `overlap_steps`: inner steps during which a mean may travel. `step_s`: of an inner step on the machines to predict
    for; None: as measured here.
    """
    own_s = found.step_s if step_s is None else step_s
    if not found.rounds or found.nodes == 1:
        return AtLink(own_s, 1.0)
    sent, received = found.sent_bytes / found.rounds, found.received_bytes / found.rounds
    steps = found.steps / found.rounds
    took_s = (
        all_reduce_s(sent, found.nodes, link)
        if found.payload_bytes is None
        else all_gather_s(sent, received, found.nodes, link)
    )
    waits_s = max(0.0, took_s - min(overlap_steps, steps) * own_s)
    round_s = steps * own_s + found.apply_s / found.rounds + waits_s
    return AtLink(round_s / steps, steps * own_s / round_s)
