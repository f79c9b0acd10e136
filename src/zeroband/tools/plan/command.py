"""`zeroband plan`: predict memory needs and communication before renting machines.

    zeroband plan @FILE --key value --gpus 8 --gpu-memory 80GB    does a run fit into a machine's memory
    zeroband plan --params 1e9 --nodes 8 --up 20mbit --step-s 2   which method fits a link
    zeroband plan @FILE --gpus 8 --gpu-memory 80GB --nodes 8 --up 1gbit --gpu-tflops 989 --mfu 0.4   both
    zeroband plan --from runs/first --nodes 16 --up 100mbit   a run's measurements with other nodes or links
    zeroband plan --from runs/first --recommend > next.toml   phase, fragments, overlap, grace and codec for its links

Measures nothing. With --from, step time, rates, waits and own work default to a run's measurements.
--quorum and --relay store exist only in the forecast; no setting of a run corresponds to them.
Exit codes: 0; 2 invalid arguments; 3 the memory does not suffice.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import indent
from typing import Any

from zeroband.config.stability import Caution
from zeroband.errors import ConfigError
from zeroband.observe.status import human_bytes
from zeroband.observe.words import aligned
from zeroband.tools.arguments import bounded, parse_count, parse_rate, parse_size, parser_of, run_command
from zeroband.tools.plan.advice import advise, cautions_of
from zeroband.tools.plan.forecast import STORE_TRIPS, Forecast, Job, Link, forecasts
from zeroband.tools.plan.memory import memory_plan, planned_config, planned_needs, step_seconds
from zeroband.tools.plan.recommend import recommend
from zeroband.tools.plan.recorded import Recorded, read_run

_EXIT_UNFIT = 3
_OF_A_LINK = ("params", "nodes", "up", "step_s")
_COLUMNS = {
    "method": "",
    "values": "codec of the values",
    "steps": "inner steps per round; the following columns are per node and round",
    "sent": "bytes sent",
    "received": "bytes received",
    "at a time": "bytes sent per synchronisation",
    "transfer": "transfer time, overlapped with training or not",
    "own": "time of the node's own work, which blocks training",
    "waits": "time in which training waits for the link, the others and the store",
    "round": "time from one round to the next",
    "computes": "fraction of the time in which the node trains",
    "saves": "compression against 2 bytes per parameter and step",
    "link": "factor on the link's rate to reach the target; `none is`: no rate would do",
}
"""Columns of the table and their meanings."""
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0


def main(argv: Sequence[str]) -> int:
    """Print the plan. Returns the exit code."""
    return run_command("plan", lambda: _plan(argv))


def _plan(argv: Sequence[str]) -> int:
    parser = _parser()
    options, of_run = parser.parse_known_args(argv)
    if options.from_run:
        recorded = read_run(options.from_run)
        parser.set_defaults(**_defaults_from(recorded, is_up_given=options.up is not None))
        options, of_run = parser.parse_known_args(argv)
        measured = f"{_what_was_measured(recorded)}\n"
        print(indent(measured, "# ", bool) if options.recommend else measured)
    fits = _plan_memory(options, of_run) if of_run else True
    if not of_run or options.up:
        _plan_link(options)
    return 0 if fits else _EXIT_UNFIT


def _plan_memory(options: argparse.Namespace, of_run: Sequence[str]) -> bool:
    """Print whether a run fits into the GPUs; store its parameters and step time in the options."""
    config = planned_config(of_run)
    if options.gpu_memory is None:
        raise ConfigError("--gpu-memory is missing: memory of one GPU, such as 80GB")
    needs = planned_needs(config)
    text, fits = memory_plan(needs, ranks=options.gpus, gpu_bytes=options.gpu_memory)
    print(text)
    if options.gpu_tflops is not None:
        flops = options.gpu_tflops * 1e12
        step_s = step_seconds(needs, gpus=options.gpus, flops=flops, mfu=options.mfu)
        options.step_s = options.step_s or step_s
        print(f"\nan inner step takes {step_s:.3g} s at an MFU of {100 * options.mfu:g} %, predicted")
    options.params = needs.params
    return fits


def _plan_link(options: argparse.Namespace) -> None:
    if missing := [f"--{name.replace('_', '-')}" for name in _OF_A_LINK if getattr(options, name) is None]:
        raise ConfigError(f"{', '.join(missing)}: needed to choose a method for a link; --help shows an example")
    job, link = _read(options)
    if options.recommend:
        print(recommend(job, link, options.target).to_toml())
    else:
        print(render(job, forecasts(job, link), options.target))


_WHOLE, _POSITIVE, _SHARE = bounded(int, ge=1), bounded(float, gt=0), bounded(float, gt=0, le=1)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("plan", __doc__, usage="zeroband plan [@FILE] [--key value ...] [options]")
    parser.add_argument(
        "--from", dest="from_run", type=Path, metavar="RUN_DIR", help="take measurements from this <run.dir>/<run.id>"
    )
    parser.add_argument(
        "--recommend", action="store_true", help="print DiLoCo settings for these nodes and links as TOML with reasons"
    )
    _add_machine(parser)
    _add_link(parser)
    _add_methods(parser)
    return parser


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=_WHOLE, default=1, help="GPUs per node, one rank each; default: %(default)s")
    add("--gpu-memory", type=parse_size, help="memory of one GPU: 80GB, 79.6GiB")
    add("--gpu-tflops", type=_POSITIVE, help="dense bfloat16 TFLOP/s of one GPU, for the step time: 989")
    add("--mfu", type=_SHARE, default=0.4, help="fraction of them that training uses; default: %(default)s")
    add("--params", type=parse_count, help="parameters of the model: 1e9, 150M, 7B")
    add("--nodes", type=_WHOLE, help="number of nodes")
    add("--step-s", type=_POSITIVE, help="seconds of an inner step of one node")
    add("--slowest-step-s", type=_POSITIVE, help="the same of the slowest node; default: --step-s")
    add("--grace-s", type=_POSITIVE, help="maximum wait for the slowest node (outer.straggler_deadline_s)")
    add(
        "--quorum", type=_SHARE, default=0.0,
        help="fraction of the nodes that must be ready before the grace starts; default: any",
    )  # fmt: skip
    add("--cores", type=_POSITIVE, default=4.0, help="cores of a node for its own work; default: %(default)s")
    add(
        "--device", choices=("cpu", "gpu"), default="cpu",
        help="device of state and codec; gpu: as far as supported, estimated; default: %(default)s",
    )  # fmt: skip
    add(
        "--own-factor", type=_POSITIVE, default=1.0,
        help="factor on the own work by the constants; default: %(default)s",
    )  # fmt: skip


def _add_link(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--up", type=parse_rate, help="upload rate of the slowest node: 20mbit, 1gbit")
    add("--down", type=parse_rate, help="its download rate; default: --up")
    add(
        "--efficiency",
        type=_SHARE,
        default=1.0,
        help="fraction of the rates that transfers reach; default: %(default)s",
    )
    add("--rtt-ms", type=_POSITIVE, default=100.0, help="round trip between the nodes; default: %(default)s")
    add("--store-rtt-ms", type=_POSITIVE, help="round trip to the store; default: --rtt-ms")
    add(
        "--store-trips", type=_POSITIVE, default=STORE_TRIPS,
        help="round trips to the store per synchronisation; default: %(default)s",
    )  # fmt: skip
    add(
        "--sites", type=_WHOLE,
        help="number of sites with a fast network (node.site); traffic inside a site is not counted",
    )  # fmt: skip
    add(
        "--relay", choices=("none", "store", "aggregator"), default="none",
        help="sparse payloads go to each node, once to an object store that all read, or to an aggregator that "
        "combines them (outer.aggregator, of demo)",
    )  # fmt: skip


def _add_methods(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--inner-steps", type=_WHOLE, default=100, help="of diloco, streaming and eager; default: %(default)s")
    add("--sparse-steps", type=_WHOLE, default=30, help="inner steps of sparseloco; default: %(default)s")
    add("--fragments", type=_WHOLE, default=5, help="of streaming; default: %(default)s")
    add("--overlap", type=bounded(int, ge=0), default=5, help="steps that a fragment may travel; default: %(default)s")
    add("--k", type=_WHOLE, default=4, help="coefficients of 4096 that demo sends; default: %(default)s")
    add("--demo-overlap", type=int, choices=(0, 1), default=0, help="steps that demo's payload may travel")
    add("--outer-lr", type=_POSITIVE, help="for warnings; default: a safe one for each method")
    add("--outer-momentum", type=bounded(float, ge=0, lt=1), default=0.9, help="default: %(default)s")
    add("--total-steps", type=_WHOLE, help="inner steps of the run, for warnings about too few rounds")
    add(
        "--target", type=bounded(float, gt=0, lt=1), default=0.95,
        help="target for the fraction of time spent computing; default: %(default)s",
    )  # fmt: skip


def _read(options: argparse.Namespace) -> tuple[Job, Link]:
    given = vars(options)
    job = Job(**{field.name: given[field.name] for field in fields(Job)})
    if job.sites is not None and job.sites > job.nodes:
        raise ConfigError(f"--sites: {job.sites} sites need a node each, but there are {job.nodes}")
    link = Link(
        options.up,
        options.down or options.up,
        rtt_s=options.rtt_ms / 1e3,
        store_rtt_s=None if options.store_rtt_ms is None else options.store_rtt_ms / 1e3,
        store_trips=options.store_trips,
        efficiency=options.efficiency,
    )
    return job, link


def _defaults_from(recorded: Recorded, *, is_up_given: bool) -> dict[str, Any]:
    """Return defaults for the options from a run's measurements; with --up given, --down follows it."""
    job, link = recorded.job, recorded.link
    steps = job.inner_steps
    fragments = next(count for count in (job.fragments if job.fragments > 1 else 5, 4, 3, 2, 1) if steps % count == 0)
    overlap = job.overlap if recorded.method == "streaming" else min(5, steps // fragments - 1)
    alike = ("params", "nodes", "step_s", "cores", "own_factor", "k", "relay")
    found: dict[str, Any] = {
        **{name: getattr(job, name) for name in alike},
        "rtt_ms": 1e3 * link.rtt_s,
        "store_rtt_ms": 1e3 * (link.store_rtt_s or link.rtt_s),
        "slowest_step_s": job.slowest_step_s or job.step_s,
    }
    if not is_up_given:
        found |= {"up": link.up_bytes_per_s, "down": link.down_bytes_per_s}
    if recorded.method in ("diloco", "streaming", "eager"):
        return found | {"inner_steps": steps, "fragments": fragments, "overlap": overlap}
    return found | ({"sparse_steps": steps} if recorded.method == "sparseloco" else {})


def _what_was_measured(recorded: Recorded) -> str:
    """Return a run's measurements next to the forecast for its settings."""
    job, said = recorded.job, recorded.forecast
    link = min(recorded.link.up_bytes_per_s, recorded.link.down_bytes_per_s) * 8 / 1e6
    if recorded.efficiency is None or recorded.link_mbit is None:
        of_link = ""
    else:
        part = f"{100 * recorded.efficiency:.0f} %"
        of_link = (
            f", {part} of the slowest measured link, {recorded.link_mbit:g} Mbit/s; if transfers are long, use it as "
            "--efficiency with your own --up"
        )
    rows = (
        ("a round", recorded.round_s, said.round_s / recorded.times),
        ("transfer", recorded.transfer_s, said.transfer_s / recorded.times),
        ("own work", recorded.own_s, (said.own_s + said.beside_s) / recorded.times - recorded.link.agreement_s),
    )
    return "\n".join(
        [
            f"{recorded.name}: {recorded.method}, {said.codec} values, {job.nodes} nodes",
            *(f"  {name}: {human_time(was_s)}, by the formulas {human_time(is_s)}" for name, was_s, is_s in rows),
            f"  transfers reached {_digits(link)} Mbit/s{of_link}",
        ]
    )


def render(job: Job, found: Sequence[Forecast], target: float) -> str:
    """Return the comparison of methods as text."""
    chosen, reasons = advise(found, job, target)
    lines = [
        *aligned([tuple(_COLUMNS), *(_row(forecast, job, target) for forecast in found)]),
        "",
        *_legend(job, target),
        "",
        f"recommended: {chosen.method} with {chosen.codec} values:",
        *(f"  - {reason}" for reason in reasons),
    ]
    said: dict[str, tuple[Caution, ...]] = {}
    for forecast in found:
        said.setdefault(forecast.method, cautions_of(forecast, job))
    warnings = [f"  {'UNSTABLE ' if c.is_unstable else ''}{method}: {c}" for method, cs in said.items() for c in cs]
    return "\n".join([*lines, *(["", "warnings:", *warnings] if warnings else [])])


def _legend(job: Job, target: float) -> list[str]:
    """Return the meanings of the columns and remarks on them."""
    width = max(map(len, _COLUMNS))
    lines = [f"  {name:<{width}}  {meaning}" for name, meaning in _COLUMNS.items() if meaning]
    lines.append(f"the target: to train {100 * target:g} % of the time")
    if job.sites is not None:
        lines.append(
            f"{job.nodes} nodes at {job.sites} sites: bytes are those between sites, for means those of a site's "
            "speaker; traffic inside a site is not counted"
        )
    if job.device == "gpu":
        lines.append(
            "own work on GPUs is estimated from bytes and instructions, not measured; ddp, demo and sparseloco also "
            "use --cores"
        )
    return lines


def _row(forecast: Forecast, job: Job, target: float) -> tuple[str, ...]:
    faster = forecast.faster_link(target)
    return (
        forecast.method,
        forecast.codec,
        str(forecast.round_steps),
        human_bytes(forecast.sent_bytes),
        human_bytes(forecast.received_bytes),
        human_bytes(forecast.peak_bytes),
        human_time(forecast.transfer_s),
        human_time(forecast.own_s),
        human_time(forecast.waits_s + forecast.straggling_s),
        human_time(forecast.round_s),
        f"{100 * forecast.compute_utilisation:.1f} %",
        f"{_digits(forecast.payload_ratio(job.params))}x",
        "enough" if faster <= 1 else "none is" if math.isinf(faster) else f"{_digits(faster)}x",
    )


def _digits(number: float) -> str:
    """Format a number with three digits, never with an exponent."""
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"


def human_time(seconds: float) -> str:
    """Format a duration: `3.4 ms`, `7.42 s`, `54 min`, `5.4 h`, `12 days`."""
    if seconds == 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{1e3 * seconds:.2g} ms"
    if seconds < 89.5:
        return f"{seconds:.3g} s"
    for size_s, unit, most in ((_MINUTE_S, "min", 90), (_HOUR_S, "h", 48), (_DAY_S, "days", math.inf)):
        count = seconds / size_s
        if count < most:
            return f"{count:.2g} {unit}" if count < 9.95 else f"{count:.0f} {unit}"
    return "forever"
