"""`zeroband plan`: what fits, before anything is rented.

Two questions, which may be asked together:

    zeroband plan @FILE --key value --gpus 8 --gpu-memory 80GB    does a run fit into the memory of a machine
    zeroband plan --params 1e9 --nodes 8 --up 20mbit --step-s 2   which method fits a link
    zeroband plan @FILE --gpus 8 --gpu-memory 80GB --nodes 8 --up 1gbit --gpu-tflops 989 --mfu 0.4   both

Predicts; measures nothing. Exit codes: 0; 2 for arguments that make no sense; 3 where the memory does not suffice.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from zeroband.config.stability import Caution
from zeroband.errors import ConfigError
from zeroband.observe.status import human_bytes
from zeroband.tools.plan.advice import Advice, OuterKnobs, advise, cautions_of
from zeroband.tools.plan.forecast import Forecast, Job, Link, forecasts
from zeroband.tools.plan.memory import Gpus, memory_plan, planned_config, step_seconds, vocabulary_of
from zeroband.tools.plan.units import parse_count, parse_positive, parse_rate, parse_size, parse_whole

_EXIT_CONFIG, _EXIT_UNFIT = 2, 3
_OF_A_LINK = ("params", "nodes", "up", "step_s")
_COLUMNS = (
    "method",
    "values",
    "steps",
    "sent",
    "received",
    "at a time",
    "transfer",
    "own",
    "waits",
    "computes",
    "2N/sent",
    "link",
)

_T = TypeVar("_T")


def main(argv: Sequence[str]) -> int:
    """Print what was asked for. Returns the exit code."""
    options, of_run = _parser().parse_known_args(argv)
    try:
        fits = _plan_memory(options, of_run) if of_run else True
        if not of_run or options.up:
            _plan_link(options)
    except ConfigError as error:
        print(f"zeroband plan: {error}", file=sys.stderr)
        return _EXIT_CONFIG
    return 0 if fits else _EXIT_UNFIT


def _plan_memory(options: argparse.Namespace, of_run: Sequence[str]) -> bool:
    """Print whether a run fits into the GPUs; leaves in the options what the link's table takes from the run."""
    config = planned_config(of_run)
    if options.gpu_memory is None:
        raise ConfigError("--gpu-memory is missing: that of one GPU, such as 80GB")
    gpus = Gpus(_named("--gpus", parse_whole, options.gpus), _named("--gpu-memory", parse_size, options.gpu_memory))
    vocab_size = vocabulary_of(config)
    plan = memory_plan(config, vocab_size, gpus)
    print(plan.text)
    if options.gpu_tflops is not None:
        flops = _named("--gpu-tflops", parse_positive, options.gpu_tflops) * 1e12
        step_s = step_seconds(config, vocab_size, gpus=gpus.count, flops=flops, mfu=options.mfu)
        options.step_s = options.step_s or str(step_s)
        print(f"\nan inner step takes {step_s:.3g} s at an MFU of {100 * options.mfu:g} %, predicted")
    options.params = str(plan.params)
    return plan.fits


def _plan_link(options: argparse.Namespace) -> None:
    if missing := [f"--{name.replace('_', '-')}" for name in _OF_A_LINK if getattr(options, name) is None]:
        raise ConfigError(f"{', '.join(missing)}: needed to say which method fits a link; --help shows an example")
    job, link, knobs, target = _read(options)
    found = forecasts(job, link)
    print(render(job, found, advise(found, job, knobs, target), knobs, target))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroband plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="zeroband plan [@FILE] [--key value ...] [options]",
    )
    parser.add_argument("--gpus", default="1", help="of one node, a rank on each; default: %(default)s")
    parser.add_argument("--gpu-memory", help="of one GPU: 80GB, 79.6GiB")
    parser.add_argument("--gpu-tflops", help="dense bfloat16 TFLOP/s of one GPU, for the time of a step: 989")
    parser.add_argument("--mfu", default=0.4, type=float, help="part of them that training uses; default: %(default)s")
    parser.add_argument("--params", help="of the model: 1e9, 150M, 7B")
    parser.add_argument("--nodes", help="machines that train together")
    parser.add_argument("--up", help="rate at which the slowest node sends: 20mbit, 1gbit")
    parser.add_argument("--down", help="rate at which it receives; default: --up")
    parser.add_argument("--rtt-ms", default="100", help="round trip between the nodes; default: %(default)s")
    parser.add_argument("--store-rtt-ms", help="round trip to the store; default: --rtt-ms")
    parser.add_argument("--cores", default="4", help="of a node for its part of a round; default: %(default)s")
    parser.add_argument("--step-s", help="seconds of an inner step of one node")
    parser.add_argument("--inner-steps", default="100", help="of diloco, streaming, eager; default: %(default)s")
    parser.add_argument("--sparse-steps", default="30", help="inner steps of sparseloco; default: %(default)s")
    parser.add_argument("--fragments", default="5", help="of streaming; default: %(default)s")
    parser.add_argument("--overlap", default="5", help="inner steps that a fragment may travel; default: %(default)s")
    parser.add_argument("--k", default="4", help="coefficients of 4096 that demo sends; default: %(default)s")
    parser.add_argument(
        "--demo-overlap", type=int, choices=(0, 1), default=0, help="steps that demo's payload may travel"
    )
    parser.add_argument(
        "--relay",
        choices=("none", "store", "aggregator"),
        default="none",
        help="sparse payloads go to each node, or up once to where all read them, or to one that combines them",
    )
    parser.add_argument("--outer-lr", help="to judge; default: what is safe for each method")
    parser.add_argument("--outer-momentum", default=0.9, type=float, help="default: %(default)s")
    parser.add_argument("--total-steps", help="inner steps of the run, to judge whether the rounds are enough")
    parser.add_argument(
        "--target", default=0.95, type=float, help="part of the time to compute in; default: %(default)s"
    )
    return parser


def _read(options: argparse.Namespace) -> tuple[Job, Link, OuterKnobs, float]:
    if not 0 < options.target < 1:
        raise ConfigError(f"--target: {options.target:g} is outside 0 to 1; write 95 % as 0.95")
    if not 0 <= options.outer_momentum < 1:
        raise ConfigError(f"--outer-momentum: {options.outer_momentum:g} is outside 0 to 1")
    up = _named("--up", parse_rate, options.up)
    down = _named("--down", parse_rate, options.down) if options.down else up
    job = Job(
        params=_named("--params", parse_count, options.params),
        nodes=_named("--nodes", parse_whole, options.nodes),
        step_s=_named("--step-s", parse_positive, options.step_s),
        inner_steps=_named("--inner-steps", parse_whole, options.inner_steps),
        sparse_steps=_named("--sparse-steps", parse_whole, options.sparse_steps),
        fragments=_named("--fragments", parse_whole, options.fragments),
        overlap=_named("--overlap", parse_whole, options.overlap) if options.overlap != "0" else 0,
        k=_named("--k", parse_whole, options.k),
        demo_overlap=options.demo_overlap,
        relay=options.relay,
        cores=_named("--cores", parse_positive, options.cores),
    )
    lr = _named("--outer-lr", parse_positive, options.outer_lr) if options.outer_lr else None
    total_steps = _named("--total-steps", parse_whole, options.total_steps) if options.total_steps else None
    rtt_s = _named("--rtt-ms", parse_positive, options.rtt_ms) / 1e3
    store_rtt_s = _named("--store-rtt-ms", parse_positive, options.store_rtt_ms) / 1e3 if options.store_rtt_ms else None
    return job, Link(up, down, rtt_s, store_rtt_s), OuterKnobs(lr, options.outer_momentum, total_steps), options.target


def _named(flag: str, parse: Callable[[str], _T], text: str) -> _T:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


def render(job: Job, found: Sequence[Forecast], advice: Advice, knobs: OuterKnobs, target: float) -> str:
    """The whole answer as text."""
    rows = [_COLUMNS, *(_row(forecast, job, target) for forecast in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [
        "",
        "Bytes of one node in a round of so many steps; 2N/payload compares what it has to say with 2 bytes a",
        "parameter and step; own: what the node itself does for a round while training stands still; link: how many",
        f"times as fast it must be to compute {100 * target:g} % of the time.",
        "",
        f"take {advice.forecast.method} with {advice.forecast.codec} values:",
        *(f"  - {reason}" for reason in advice.reasons),
    ]
    said: dict[str, tuple[Caution, ...]] = {}
    for forecast in found:
        said.setdefault(forecast.method, cautions_of(forecast, job, knobs))
    warnings = [f"  {'UNSTABLE ' if c.is_unstable else ''}{method}: {c}" for method, cs in said.items() for c in cs]
    return "\n".join([*lines, *(["", "warnings:", *warnings] if warnings else [])])


def _row(forecast: Forecast, job: Job, target: float) -> tuple[str, ...]:
    faster = forecast.faster_link(target)
    return (
        forecast.method,
        forecast.codec,
        str(forecast.round_steps),
        human_bytes(forecast.sent_bytes),
        human_bytes(forecast.received_bytes),
        human_bytes(forecast.peak_bytes),
        f"{forecast.transfer_s:.3g} s",
        f"{forecast.own_s:.3g} s",
        f"{forecast.waits_s:.3g} s",
        f"{100 * forecast.compute_utilisation:.1f} %",
        f"{forecast.payload_ratio(job.params):.3g}x",
        "enough" if faster <= 1 else "none is" if math.isinf(faster) else f"{faster:.3g}x",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
