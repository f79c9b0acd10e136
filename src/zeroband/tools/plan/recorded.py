"""What a run recorded of itself, as settings of a forecast: its step, its rounds, the rates of its links.

Reads the files of a run directory, nothing else. What a run does not tell stays as the planner has it.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, cast

from zeroband.config.stability import Method, method_of, overlap_steps, round_steps
from zeroband.errors import ConfigError
from zeroband.observe.facts import CONFIG_FILE, FolderFacts
from zeroband.observe.status import find_run_dir
from zeroband.tools.plan.forecast import HEADERS, STORE_TRIPS, Forecast, Job, Link, forecast_of

_USUAL_RTT_S = 1e-3
"""Round trip between nodes where none was measured: those of one machine."""

_SHORTEST_S = 1e-6
"""Shortest time of a transfer that a rate is taken from."""


@dataclass(frozen=True)
class Recorded:
    """What a run measured, by the medians of its nodes' rounds."""

    name: str
    method: Method
    codec: str
    job: Job
    """Its own settings; `own_factor` says how its machines compare with the planner's constants."""
    link: Link
    """Rates that its transfers reached; a trip to the store is a part of what the last member of a round waits."""
    link_mbit: float | None
    """The slowest link between two nodes as they measured it when they met; None: they did not."""
    rounds: int
    """Number of rounds behind the medians, of all nodes together."""
    round_s: float
    """Seconds from one round to the next."""
    transfer_s: float
    own_s: float
    """Seconds in which training stood still for a round, without the two above."""
    sent_bytes: float

    @property
    def times(self) -> int:
        """Rounds of the run, each of one fragment, in one round of the forecast."""
        return self.job.fragments

    @property
    def forecast(self) -> Forecast:
        """The forecast of the run's own settings."""
        return forecast_of(self.job, self.link, self.method, self.codec)

    @property
    def efficiency(self) -> float | None:
        """Part of the slowest measured link that transfers reached; None where no link was measured."""
        rate = min(self.link.up_bytes_per_s, self.link.down_bytes_per_s)
        return None if self.link_mbit is None else rate * 8 / 1e6 / self.link_mbit


def read_run(folder: Path) -> Recorded:
    """Read what the nodes of a run directory measured. Raises ConfigError where there is nothing to learn from."""
    run_dir = find_run_dir(folder)
    metrics, events = _lines(run_dir)
    config = _config_of(run_dir)
    outer, codec = config.get("outer"), config.get("comm", {}).get("codec")
    method = method_of(outer) if outer else None
    if method == "delayed":
        method = "eager"  # which takes as long
    if outer is None or method is None:
        raise ConfigError(f"{run_dir}: its nodes do not train by a method that the planner knows")
    rounds = [round for lines in metrics.values() for round in _rounds(lines)]
    params = next((e["parameters"] for e in events if e["kind"] == "node_started" and e.get("parameters")), None)
    if not rounds or params is None:
        raise ConfigError(f"{run_dir}: no node committed two rounds with others; let the run go on, then plan again")
    steps_s = [max(0.0, line["train/step_s"] - _of(line, "blocked_s")) for lines in metrics.values() for line in lines]
    link, link_mbit = _link(rounds, events)
    job = _job(outer, method, float(params), rounds, median(steps_s))
    found = Recorded(
        name=run_dir.name,
        method=method,
        codec=codec or ("int8" if outer["type"] == "diloco" else "fp32"),
        job=job,
        link=link,
        link_mbit=link_mbit,
        rounds=len(rounds),
        round_s=fmean(round.took_s for round in rounds),
        transfer_s=_usual(rounds, "transfer_s"),
        own_s=_own_s(rounds),
        sent_bytes=_usual(rounds, "sent_bytes"),
    )
    said = found.forecast
    said_own_s = (said.own_s + max(0.0, said.beside_s - found.times * link.agreement_s)) / found.times
    return replace(found, job=replace(job, own_factor=found.own_s / said_own_s if found.own_s and said_own_s else 1.0))


def _link(rounds: Sequence[_Round], events: Iterable[Mapping[str, Any]]) -> tuple[Link, float | None]:
    """The rates that transfers reached, and the slowest link between two nodes in Mbit/s as they measured it."""
    links = [link for event in events if event["kind"] == "links" for link in event["links"]]
    rtts_ms = [link["rtt_ms"] for link in links if link.get("rtt_ms")]
    mbits = [link["mbit_s"] for link in links if link.get("mbit_s")]
    parts = [_of(one.line, "wide_bytes") / _of(one.line, "sent_bytes") for one in rounds if _of(one.line, "wide_bytes")]
    wide = median(parts or [1.0])  # what moves inside a site says nothing of the links between them
    last_waits_s = median(map(min, _waits(rounds)))  # the last member of a round waits for the store alone
    each_byte = wide * HEADERS / max(_usual(rounds, "transfer_s"), _SHORTEST_S)
    reached = Link(
        up_bytes_per_s=max(1.0, _usual(rounds, "sent_bytes") * each_byte),
        down_bytes_per_s=max(1.0, _usual(rounds, "received_bytes") * each_byte),
        rtt_s=min(rtts_ms) / 1e3 if rtts_ms else _USUAL_RTT_S,
        store_rtt_s=max(last_waits_s, _SHORTEST_S) / STORE_TRIPS,
    )
    return reached, min(mbits, default=None)


def _job(outer: Mapping[str, Any], method: Method, params: float, rounds: Sequence[_Round], step_s: float) -> Job:
    """The settings of a run, with the step that it measured."""
    fragments = int(outer.get("fragments") or 1)
    between = round_steps(outer) or round(fragments * median(one.steps for one in rounds))
    steps = max(1, between)
    is_demo = method == "demo"
    return Job(
        params=params,
        nodes=max(int(one.line["outer/nodes"]) for one in rounds),
        step_s=step_s,
        inner_steps=steps,
        sparse_steps=steps,
        fragments=fragments,
        overlap=overlap_steps(outer),
        k=int(outer["k"]) if is_demo and "k" in outer else Job.k,
        demo_overlap=overlap_steps(outer) if is_demo else 0,
        relay="aggregator" if outer.get("aggregator") else "none",
        cores=1.0,
        slowest_step_s=step_s + _straggling_s(rounds, outer) * fragments / steps,
    )


def _own_s(rounds: Sequence[_Round]) -> float:
    """Seconds of own work in a round: of its end at least, where the rest overlaps training."""
    others_s = (_of(one.line, "blocked_s") - _of(one.line, "wait_s") - _of(one.line, "transfer_s") for one in rounds)
    return max(_usual(rounds, "apply_s"), median(others_s))


def _straggling_s(rounds: Sequence[_Round], outer: Mapping[str, Any]) -> float:
    """Seconds of a round in which training stands still for slower members; it does not where waits overlap it."""
    if overlap_steps(outer):
        return fmean(max(0.0, _of(one.line, "blocked_s") - _of(one.line, "apply_s")) for one in rounds)
    return fmean(fmean(waits) - min(waits) for waits in _waits(rounds))


def _waits(rounds: Iterable[_Round]) -> list[list[float]]:
    """What the members waited, round by round."""
    by_round: dict[int, list[float]] = defaultdict(list)
    for one in rounds:
        by_round[int(one.line["outer/round"])].append(_of(one.line, "wait_s"))
    return list(by_round.values())


def _usual(rounds: Iterable[_Round], name: str) -> float:
    """Median of a metric of rounds."""
    return median(_of(one.line, name) for one in rounds)


def _lines(run_dir: Path) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """The lines of metrics by node, and the events of all."""
    facts = FolderFacts(run_dir)
    metrics: dict[str, list[dict[str, Any]]] = defaultdict(list)
    events: list[dict[str, Any]] = []
    for node_id, record in facts.read():
        if "kind" in record:
            events.append(record)
        else:
            metrics[node_id].append(record)
    return metrics, events


def _config_of(run_dir: Path) -> Mapping[str, Any]:
    """The configuration of any of its nodes; all have the same [outer] and [comm]."""
    for path in sorted(run_dir.glob(f"*/{CONFIG_FILE}")):
        try:
            return cast("Mapping[str, Any]", _without_none(tomllib.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
    raise ConfigError(f"{run_dir}: no node left its {CONFIG_FILE} there")


def _without_none(value: Any) -> Any:
    """A resolved configuration without the keys that are off, which it spells "none"."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _without_none(each) for key, each in items if each != "none"}
    return value


class _Round(NamedTuple):
    """The line of a node that ends a round with others, and what lies between it and the round before."""

    line: Mapping[str, Any]
    steps: int
    took_s: float


def _rounds(lines: Iterable[Mapping[str, Any]]) -> list[_Round]:
    """A node's rounds without its first one, in which it measures its links, and without a flush of several at once."""
    found: list[_Round] = []
    before, steps, took_s = None, 0, 0.0
    for line in lines:
        steps, took_s = steps + 1, took_s + float(line["train/step_s"])
        if "outer/transfer_s" in line and int(line.get("outer/nodes") or 1) > 1:
            number = int(line["outer/round"])
            if before is not None and number == before + 1:
                found.append(_Round(line, steps, took_s))
            before, steps, took_s = number, 0, 0.0
    return found


def _of(line: Mapping[str, Any], name: str) -> float:
    return float(line.get(f"outer/{name}") or 0.0)
