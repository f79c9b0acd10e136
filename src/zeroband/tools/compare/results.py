"""Results of runs: losses, counters of bytes, times and rounds, and predictions for another link.

Each result is a JSON file named by the digest of all it depends on. Finished runs are not repeated; failed ones are
shown and retried by the next comparison. Nodes share this machine's CPUs, so times are comparable only within a report.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zeroband.tools.plan.forecast import Link, all_gather_s, all_reduce_s

FORMAT = 2
"""Version of the files, part of every digest: changing it repeats all runs."""


@dataclass(frozen=True)
class RunMeasurements:
    """Counters of a run; means over its nodes unless stated otherwise."""

    nodes: int
    steps: int
    """Inner steps per node."""
    tokens: int
    """Tokens of all nodes."""
    step_s: float
    """Median inner step without communication."""
    blocked_s: float
    """Total time in which the outer algorithm blocked training."""
    wall_s: float
    """Time from the start of the first step to the end of the last."""
    rounds: int
    """Outer updates."""
    sent_bytes: float
    received_bytes: float
    peak_bytes: float
    """Maximum sent by a node in one round."""
    apply_s: float
    """Total time of the outer steps."""
    payload_bytes: float | None = None
    """Total size of a node's sparse payloads, each counted once; mean over nodes that sent any. None: no payloads."""

    @property
    def compute_utilisation(self) -> float:
        """Fraction of the time in which a node computed."""
        return min(1.0, self.steps * self.step_s / self.wall_s) if self.wall_s else 1.0

    @property
    def tokens_per_node(self) -> float:
        return self.tokens / self.nodes

    @property
    def sent_per_token(self) -> float:
        """Bytes sent per token of a node."""
        return self.sent_bytes / self.tokens_per_node

    @property
    def received_per_token(self) -> float:
        return self.received_bytes / self.tokens_per_node


@dataclass(frozen=True)
class Point:
    """Evaluation of the outer parameters at one step of the run."""

    step: int
    loss: float | None
    """On the reported half, nats per token; None if not finite."""


@dataclass(frozen=True)
class Provenance:
    """What made an outcome."""

    command: str = ""
    """The comparison, as it was typed."""
    commit: str = ""
    """Commit of the code, with `-dirty` where the code differs from it; `unknown` outside a clone."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions of Python, torch and this package."""


def provenance(command: str) -> Provenance:
    """Return what makes the outcomes of this process."""
    from zeroband.runtime.report import commit_of

    commit = commit_of(Path(__file__).parents[4])
    names = {"torch": "torch", "zeroband": "zeroband-elastic"}
    versions = {name: version(distribution) for name, distribution in names.items()}
    return Provenance(command, commit, {"python": platform.python_version(), **versions})


@dataclass(frozen=True)
class RunResult:
    """Result of a run: a method with a learning rate and a seed."""

    arm: str
    lr: float
    seed: int
    digest: str
    """Digest of its configuration, start and evaluation."""
    params: int = 0
    points: tuple[Point, ...] = ()
    tuning_loss: float | None = None
    """Final loss on the tuning half, by which learning rates are chosen."""
    measured: RunMeasurements | None = None
    took_s: float = 0.0
    """Wall time of the run, process start-up included."""
    failure: str = ""
    """Error of a failed run."""
    made_by: Provenance = Provenance()
    """What made it."""

    @property
    def loss(self) -> float | None:
        """Final loss; None if the run failed or diverged."""
        return self.points[-1].loss if self.points and not self.failure else None

    @property
    def state(self) -> str:
        """The state for the table."""
        if self.failure:
            return "failed"
        return "done" if self.loss is not None else "diverged"


def finite(loss: float) -> float | None:
    """Return the loss if it is finite."""
    return loss if math.isfinite(loss) else None


class ResultFiles:
    """Results in a folder, by the digest of a run or another name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, digest: str, name: str = "") -> RunResult | None:
        """Return the result of a run that finished or diverged; None without a readable one."""
        try:
            outcome = TypeAdapter(RunResult).validate_json(self._path(name or digest).read_bytes(), strict=True)
        except (OSError, ValueError):
            return None
        return None if outcome.failure or outcome.digest != digest else outcome

    def load_all(self) -> list[RunResult]:
        """Return the results of all files, in the order of their names. Raises ValueError for an invalid one."""
        found = [path.read_bytes() for path in sorted(self._folder.glob("*.json"))]
        return [TypeAdapter(RunResult).validate_json(content, strict=True) for content in found]

    def save(self, outcome: RunResult, name: str = "") -> None:
        """Write a result atomically."""
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
    """Summarise the nodes' metrics. Raises ValueError if a node wrote none."""
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
    """Return the bytes of a node's payloads; a line for several rounds has the size of the newest."""
    return sum(
        (record.get("outer/payload_bytes") or 0) * number
        for record, number in zip(records, _rounds_of_lines(records), strict=True)
    )


def _rounds_of_lines(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the rounds per line: flushing overlapping updates ends several at once."""
    numbers = [int(record["outer/round"]) for record in records]
    return [max(1, number - before) for before, number in pairwise([numbers[0] - 1, *numbers])] if numbers else []


def _own_s(record: Mapping[str, Any]) -> float:
    """Return the duration of an inner step without communication."""
    return max(0.0, record["train/step_s"] - _blocked_s(record))


def _blocked_s(record: Mapping[str, Any]) -> float:
    return record.get("outer/blocked_s") or 0.0  # absent for a single node


def payload_ratio(found: RunMeasurements, params: int) -> float | None:
    """Return the compression of a node's contributions against 2 bytes per parameter and step; None without any.

    A contribution counts once, however often it is sent, as in DisTrO: an all-reduce of E bytes sends 2 (M - 1) / M E.
    """
    if found.nodes == 1:
        return None
    means = found.sent_bytes / (2 * (found.nodes - 1) / found.nodes)
    contributed = means if found.payload_bytes is None else found.payload_bytes
    return 2 * params * found.steps / contributed if contributed else None


@dataclass(frozen=True)
class AtLink:
    """Prediction of a run with another link, by the formulas of `zeroband plan`."""

    step_s: float
    """Seconds of an inner step, including its share of the outer step and of waiting."""
    compute_utilisation: float


def at_link(found: RunMeasurements, link: Link, *, overlap_steps: int = 0, step_s: float | None = None) -> AtLink:
    """Predict a run over a link from counted bytes and measured times.

    `overlap_steps`: inner steps during which a mean may travel. `step_s`: inner step on the target machines; None: as
    measured here.
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
