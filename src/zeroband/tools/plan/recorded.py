"""Derives a forecast's settings from a run directory: step time, rounds, link rates.

What a run did not record keeps the planner's default.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from zeroband.config.outer import DemoConfig, DilocoConfig, Outer, RoundsConfig
from zeroband.config.section import NONE
from zeroband.config.stability import Method, method_of, overlap_steps
from zeroband.errors import ConfigError
from zeroband.observe.facts import CONFIG_FILE, FolderFacts, find_run_dir
from zeroband.tools.plan.forecast import HEADERS, STORE_TRIPS, Forecast, Job, Link, forecast_of

_USUAL_RTT_S = 1e-3
"""Round trip between nodes if none was measured, as on one machine."""

_SHORTEST_S = 1e-6
"""Lower bound of a transfer time, for rates."""


@dataclass(frozen=True)
class Recorded:
    """A run's measurements: medians over its nodes' rounds."""

    name: str
    method: Method
    codec: str
    job: Job
    """Its own settings; `own_factor` compares its machines with the planner's constants."""
    link: Link
    """Rates that its transfers reached; the store's round trip comes from the waits of rounds' last members."""
    link_mbit: float | None
    """The slowest measured link between two nodes; None if none was measured."""
    rounds: int
    """Number of node-rounds behind the medians."""
    round_s: float
    """Seconds from one round to the next."""
    transfer_s: float
    own_s: float
    """Seconds per round in which training was blocked by the node's own work."""
    sent_bytes: float

    @property
    def times(self) -> int:
        """Rounds of the run, one per fragment, in one round of the forecast."""
        return self.job.fragments

    @property
    def forecast(self) -> Forecast:
        """The forecast of the run's own settings."""
        return forecast_of(self.job, self.link, self.method, self.codec)

    @property
    def efficiency(self) -> float | None:
        """Fraction of the slowest measured link that transfers reached; None without measured links."""
        rate = min(self.link.up_bytes_per_s, self.link.down_bytes_per_s)
        return None if self.link_mbit is None else rate * 8 / 1e6 / self.link_mbit


def read_run(folder: Path) -> Recorded:
    """Read the measurements of a run directory. Raises ConfigError if there are none."""
    run_dir = find_run_dir(folder)
    metrics, events = _lines(run_dir)
    outer, codec = _settings_of(run_dir)
    method = None if outer is None else method_of(outer)
    if method == "delayed":
        method = "eager"  # takes as long
    if outer is None or method is None:
        raise ConfigError(f"{run_dir}: its nodes do not use a method that the planner knows")
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
        codec=codec or ("int8" if isinstance(outer, DilocoConfig) else "fp32"),
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
    """Return the rates that transfers reached, and the slowest measured link in Mbit/s."""
    links = [link for event in events if event["kind"] == "links" for link in event["links"]]
    rtts_ms = [link["rtt_ms"] for link in links if link.get("rtt_ms")]
    mbits = [link["mbit_s"] for link in links if link.get("mbit_s")]
    parts = [_of(one.line, "wide_bytes") / _of(one.line, "sent_bytes") for one in rounds if _of(one.line, "wide_bytes")]
    wide = median(parts or [1.0])  # traffic inside a site says nothing about links between sites
    last_waits_s = median(map(min, _waits(rounds)))  # the last member of a round waits only for the store
    each_byte = wide * HEADERS / max(_usual(rounds, "transfer_s"), _SHORTEST_S)
    reached = Link(
        up_bytes_per_s=max(1.0, _usual(rounds, "sent_bytes") * each_byte),
        down_bytes_per_s=max(1.0, _usual(rounds, "received_bytes") * each_byte),
        rtt_s=min(rtts_ms) / 1e3 if rtts_ms else _USUAL_RTT_S,
        store_rtt_s=max(last_waits_s, _SHORTEST_S) / STORE_TRIPS,
    )
    return reached, min(mbits, default=None)


def _job(outer: Outer, method: Method, params: float, rounds: Sequence[_Round], step_s: float) -> Job:
    """Return the settings of a run with its measured step time."""
    fragments = outer.fragments if isinstance(outer, RoundsConfig) else 1
    steps = max(1, outer.round_steps or round(fragments * median(one.steps for one in rounds)))
    overlap, demo = overlap_steps(outer), outer if isinstance(outer, DemoConfig) else None
    return Job(
        params=params,
        nodes=max(int(one.line["outer/nodes"]) for one in rounds),
        step_s=step_s,
        inner_steps=steps,
        sparse_steps=steps,
        fragments=fragments,
        overlap=overlap,
        k=demo.k if demo else Job.k,
        demo_overlap=overlap if demo else 0,
        relay="aggregator" if demo and demo.aggregator else "none",
        cores=1.0,
        slowest_step_s=step_s + _straggling_s(rounds, outer) * fragments / steps,
    )


def _own_s(rounds: Sequence[_Round]) -> float:
    """Return the seconds of own work per round, at least its apply time if the rest overlaps training."""
    others_s = (_of(one.line, "blocked_s") - _of(one.line, "wait_s") - _of(one.line, "transfer_s") for one in rounds)
    return max(_usual(rounds, "apply_s"), median(others_s))


def _straggling_s(rounds: Sequence[_Round], outer: Outer) -> float:
    """Return the seconds per round in which slower members block training; overlapped waits do not."""
    if overlap_steps(outer):
        return fmean(max(0.0, _of(one.line, "blocked_s") - _of(one.line, "apply_s")) for one in rounds)
    return fmean(fmean(waits) - min(waits) for waits in _waits(rounds))


def _waits(rounds: Iterable[_Round]) -> list[list[float]]:
    """Return the members' waits, by round."""
    by_round: dict[int, list[float]] = defaultdict(list)
    for one in rounds:
        by_round[int(one.line["outer/round"])].append(_of(one.line, "wait_s"))
    return list(by_round.values())


def _usual(rounds: Iterable[_Round], name: str) -> float:
    """Return the median of a metric over rounds."""
    return median(_of(one.line, name) for one in rounds)


def _lines(run_dir: Path) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return the metrics by node, and the events of all nodes."""
    facts = FolderFacts(run_dir)
    metrics: dict[str, list[dict[str, Any]]] = defaultdict(list)
    events: list[dict[str, Any]] = []
    for node_id, record in facts.read():
        if "kind" in record:
            events.append(record)
        else:
            metrics[node_id].append(record)
    return metrics, events


def _settings_of(run_dir: Path) -> tuple[Outer | None, str | None]:
    """Return [outer] and comm.codec of any node, as all share them; None: none, or of a version that had others."""
    for path in sorted(run_dir.glob(f"*/{CONFIG_FILE}")):
        try:
            config = _without_none(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        try:
            outer = TypeAdapter[Outer](Outer).validate_python(config.get("outer"))
        except ValidationError:
            outer = None
        return outer, config.get("comm", {}).get("codec")
    raise ConfigError(f"{run_dir}: no node wrote its {CONFIG_FILE}")


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of a resolved configuration without the keys that are "none"."""
    kept = {key: value for key, value in table.items() if value != NONE}
    return {key: _without_none(value) if isinstance(value, dict) else value for key, value in kept.items()}


class _Round(NamedTuple):
    """A node's line at the end of a round, with the steps and time since the previous round."""

    line: Mapping[str, Any]
    steps: int
    took_s: float


def _rounds(lines: Iterable[Mapping[str, Any]]) -> list[_Round]:
    """Return a node's rounds except its first, in which it measures links, and flushes of several at once."""
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
