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
from typing import Any, cast

from zeroband.config.cautions import method_of, overlap_steps, round_steps
from zeroband.config.stability import Method
from zeroband.errors import ConfigError
from zeroband.observe.facts import FolderFacts
from zeroband.observe.status import find_run_dir
from zeroband.runtime.run_folder import CONFIG_FILE
from zeroband.tools.plan.forecast import HEADERS, STORE_TRIPS, Forecast, Job, Link, forecast_of

_FIRST_ROUNDS = 1
"""Rounds of each node that are left out: in them nodes connect and measure their links."""

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
    records = [found for found in metrics.values() if len(_rounds(found)) > _FIRST_ROUNDS]
    params = next((e["parameters"] for e in events if e["kind"] == "node_started" and e.get("parameters")), None)
    if not records or params is None:
        raise ConfigError(
            f"{run_dir}: no node committed {_FIRST_ROUNDS + 1} rounds; let the run go on, then plan again"
        )
    return _measure(run_dir.name, method, outer, codec, float(params), records, events)


def _measure(
    name: str,
    method: Method,
    outer: Mapping[str, Any],
    codec: str | None,
    params: float,
    records: Sequence[Sequence[Mapping[str, Any]]],
    events: Iterable[Mapping[str, Any]],
) -> Recorded:
    rounds = [line for found in records for line in _rounds(found)[_FIRST_ROUNDS:]]
    agreement_s, straggling_s = _waits(rounds)
    link, link_mbit = _link(rounds, events, agreement_s)
    job = _job(outer, method, params, records, straggling_s)
    found = Recorded(
        name=name,
        method=method,
        codec=codec or ("int8" if outer["type"] == "diloco" else "fp32"),
        job=job,
        link=link,
        link_mbit=link_mbit,
        rounds=len(rounds),
        round_s=_round_s(records),
        transfer_s=_usual(rounds, "transfer_s"),
        own_s=_own_s(rounds, outer),
        sent_bytes=_usual(rounds, "sent_bytes"),
    )
    said = found.forecast
    said_own_s = (said.own_s + max(0.0, said.beside_s - found.times * link.agreement_s)) / found.times
    return replace(found, job=replace(job, own_factor=found.own_s / said_own_s if found.own_s and said_own_s else 1.0))


def _link(
    rounds: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]], agreement_s: float
) -> tuple[Link, float | None]:
    """The rates that transfers reached, and the slowest link between two nodes in Mbit/s as they measured it."""
    links = [link for event in events if event["kind"] == "links" for link in event["links"]]
    rtts_ms = [link["rtt_ms"] for link in links if link.get("rtt_ms")]
    mbits = [link["mbit_s"] for link in links if link.get("mbit_s")]
    each_byte = HEADERS / max(_usual(rounds, "transfer_s"), _SHORTEST_S)
    reached = Link(
        up_bytes_per_s=max(1.0, _usual(rounds, "sent_bytes") * each_byte),
        down_bytes_per_s=max(1.0, _usual(rounds, "received_bytes") * each_byte),
        rtt_s=min(rtts_ms) / 1e3 if rtts_ms else _USUAL_RTT_S,
        store_rtt_s=max(agreement_s, _SHORTEST_S) / STORE_TRIPS,
    )
    return reached, min(mbits, default=None)


def _job(
    outer: Mapping[str, Any],
    method: Method,
    params: float,
    records: Sequence[Sequence[Mapping[str, Any]]],
    straggling_s: float,
) -> Job:
    """The settings of a run, with the step that it measured."""
    step_s = median(max(0.0, line["train/step_s"] - _of(line, "blocked_s")) for found in records for line in found)
    steps, fragments = round_steps(outer) or _steps_between(records), int(outer.get("fragments") or 1)
    is_demo = method == "demo"
    return Job(
        params=params,
        nodes=max(int(line["outer/nodes"]) for found in records for line in _rounds(found)),
        step_s=step_s,
        inner_steps=steps,
        sparse_steps=steps,
        fragments=fragments,
        overlap=overlap_steps(outer),
        k=int(outer["k"]) if is_demo and "k" in outer else Job.k,
        demo_overlap=overlap_steps(outer) if is_demo else 0,
        relay="aggregator" if outer.get("aggregator") else "none",
        cores=1.0,
        slowest_step_s=step_s + straggling_s * fragments / steps,
    )


def _own_s(rounds: Sequence[Mapping[str, Any]], outer: Mapping[str, Any]) -> float:
    """Seconds of own work in a round; where the rest of it passes beside training, what its end says."""
    if overlap_steps(outer):
        return _usual(rounds, "apply_s")
    parts = [(_of(line, "blocked_s"), _of(line, "wait_s") + _of(line, "transfer_s")) for line in rounds]
    return max(_usual(rounds, "apply_s"), median(blocked_s - others_s for blocked_s, others_s in parts))


def _usual(rounds: Sequence[Mapping[str, Any]], name: str) -> float:
    """Median of a metric of rounds."""
    return median(_of(line, name) for line in rounds)


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


def _rounds(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that end a round with other nodes."""
    return [line for line in records if "outer/transfer_s" in line and int(line.get("outer/nodes") or 1) > 1]


def _waits(rounds: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds in a round that its last member waits, which is for the store, and that the others wait for it."""
    by_round: dict[int, list[float]] = defaultdict(list)
    for line in rounds:
        by_round[int(line["outer/round"])].append(_of(line, "wait_s"))
    last_s = [min(waits) for waits in by_round.values()]
    return median(last_s), fmean(fmean(waits) - min(waits) for waits in by_round.values())


def _of(line: Mapping[str, Any], name: str) -> float:
    return float(line.get(f"outer/{name}") or 0.0)


def _steps_between(records: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    """Inner steps of a round, where a time decides about them."""
    return max(1, round(sum(map(len, records)) / sum(len(_rounds(found)) for found in records)))


def _round_s(records: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Mean of the time between two rounds, by the durations of the inner steps."""
    found: list[float] = []
    for lines in records:
        since_s = 0.0
        of_node: list[float] = []
        for line in lines:
            since_s += float(line["train/step_s"])
            if "outer/transfer_s" in line:
                of_node.append(since_s)
                since_s = 0.0
        found += of_node[_FIRST_ROUNDS:]
    return fmean(found)
