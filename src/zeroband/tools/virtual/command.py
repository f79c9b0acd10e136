"""`zeroband simulate --virtual`: a run of hundreds of nodes in virtual time, for planning.

The rules, the store and the ledger are those of a run; work, links and losses are modelled. Starts no process.
Exit codes: 0; 2 for arguments that make no sense.

    zeroband simulate --virtual --nodes 64 --params 1e9 --mbit 500 --step-s 1 --mtbf-s 14400
    zeroband simulate --virtual --nodes 8 --params 150M --mbit 500,500,500,25 --step-s 1,1.2   values in turn
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import TypeVar

from zeroband.errors import ConfigError
from zeroband.kernels.formats import FORMATS
from zeroband.tools.plan.units import parse_count, parse_positive, parse_whole
from zeroband.tools.virtual.models import NodeModel, RunModel
from zeroband.tools.virtual.run import Found, VirtualRun

_EXIT_CONFIG = 2
_STATE_BYTES = 8
"""Bytes of each parameter in what a joiner fetches: it and its momentum."""

_T = TypeVar("_T")


def main(argv: Sequence[str]) -> int:
    """Play a run and print what came of it. Returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        model = _model(options)
        rounds, seed = _named("--rounds", parse_whole, options.rounds), options.seed
        began_s = time.monotonic()
        found = VirtualRun(model, seed=seed).play(rounds)
    except ConfigError as error:
        print(f"zeroband simulate --virtual: {error}", file=sys.stderr)
        return _EXIT_CONFIG
    print(render(model, found, time.monotonic() - began_s))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroband simulate --virtual",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", required=True, help="machines that train together")
    add("--params", required=True, help="of the model: 1e9, 150M, 7B")
    add("--mbit", required=True, help="Mbit/s of a node's access link in each direction; several are given in turn")
    add("--step-s", default="1", help="seconds of an inner step of a node, or several; default: %(default)s")
    add("--inner-steps", default="50", help="of a round; default: %(default)s")
    add("--codec", choices=list(FORMATS), default="int8", help="of what is sent; default: %(default)s")
    add("--rounds", default="1000", help="default: %(default)s")
    add("--rtt-ms", default="100", help="between two nodes; default: %(default)s")
    add("--overlap", action="store_true", help="train on while a round is on its way, as eager updates do")
    add("--straggler-s", help="as outer.straggler_deadline_s: go without those who are late by so much")
    add("--straggler-grace", help="as outer.straggler_grace: wait for them so long a part of a round at most")
    add("--detect-s", default="10", help="as fault.detect_s; default: %(default)s")
    add("--mtbf-s", help="mean time to the loss of a node; default: none is lost")
    add("--away-s", default="300", help="mean time until a lost node is started again; default: %(default)s")
    add("--freeze-every-s", help="mean time of training until a node stands still; default: none does")
    add("--freeze-s", default="20", help="mean time for which it then does; default: %(default)s")
    add("--seed", type=int, default=0, help="of what is left to chance; default: %(default)s")
    return parser


def _model(options: argparse.Namespace) -> RunModel:
    nodes, params = _named("--nodes", parse_whole, options.nodes), _named("--params", parse_count, options.params)
    steps_s = islice(cycle(_several("--step-s", parse_positive, options.step_s)), nodes)
    rates = islice(cycle(_several("--mbit", parse_whole, options.mbit)), nodes)
    rtt_ms = _named("--rtt-ms", parse_whole, options.rtt_ms)
    return RunModel(
        nodes=tuple(NodeModel(step_s, mbit) for step_s, mbit in zip(steps_s, rates, strict=True)),
        inner_steps=_named("--inner-steps", parse_whole, options.inner_steps),
        encoded_bytes=FORMATS[options.codec].encoded_size(round(params)),
        state_bytes=round(_STATE_BYTES * params),
        rtt_ms=rtt_ms,
        agreement_s=4e-3 * rtt_ms,
        overlaps=options.overlap,
        detect_s=_named("--detect-s", parse_positive, options.detect_s),
        mtbf_s=_if_given("--mtbf-s", options.mtbf_s),
        away_s=_named("--away-s", parse_positive, options.away_s),
        freeze_every_s=_if_given("--freeze-every-s", options.freeze_every_s),
        freeze_s=_named("--freeze-s", parse_positive, options.freeze_s),
        straggler_s=_if_given("--straggler-s", options.straggler_s),
        straggler_grace=_if_given("--straggler-grace", options.straggler_grace),
    )


def _if_given(flag: str, text: str | None) -> float | None:
    return None if text is None else _named(flag, parse_positive, text)


def _several(flag: str, parse: Callable[[str], _T], text: str) -> list[_T]:
    return [_named(flag, parse, part) for part in text.split(",")]


def _named(flag: str, parse: Callable[[str], _T], text: str) -> _T:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


def render(model: RunModel, found: Found, took_s: float) -> str:
    """What came of a run, as text; `took_s`: the seconds that it took here."""
    nodes = len(model.nodes)
    spent = {doing: seconds / found.seconds / nodes for doing, seconds in sorted(found.spent_s.items())}
    lines = [
        f"{found.rounds} rounds of {nodes} nodes in {found.seconds / 3600:.3g} h of virtual time, {took_s:.1f} s here",
        f"a round           every {found.seconds / found.rounds:.1f} s, {found.members / found.rounds:.1f} members",
        f"goodput           {found.goodput:.1%} of the tokens of nodes that are never lost and wait for nothing",
        f"a node's time     {', '.join(f'{doing} {part:.1%}' for doing, part in spent.items() if part)}",
        f"lost              {found.losses} nodes, {found.joins} came back; {found.reopened} rounds were opened again",
        "every sample was trained once, by the ledger of the run",
    ]
    return "\n".join(lines)
