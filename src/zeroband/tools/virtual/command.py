"""`zeroband simulate --virtual`: a run of hundreds of nodes in virtual time, for planning.

The rules, the store and the ledger are those of a run; work, links and losses are modelled. Starts no process.
Exit codes: 0; 2 for arguments that make no sense.

    zeroband simulate --virtual --nodes 64 --params 1e9 --mbit 500 --step-s 1 --mtbf-s 14400
    zeroband simulate --virtual --nodes 8 --params 150M --mbit 500,500,500,25 --step-s 1,1.2   values in turn
    zeroband simulate --virtual --nodes 64 --params 1e9 --mbit 500 --sites 8 --store-every-s 3600 --cut-every-s 7200
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any, TypeVar

from zeroband.errors import ConfigError
from zeroband.kernels.formats import FORMATS
from zeroband.tools.plan.units import parse_count, parse_positive, parse_whole
from zeroband.tools.virtual.models import Chaos, NodeModel, RunModel
from zeroband.tools.virtual.run import SimulationResult, VirtualRun

_EXIT_CONFIG = 2
_STATE_BYTES = 8
"""Bytes of each parameter in what a joiner fetches: it and its momentum."""

_CHAOS_TIMES = {
    "--store-every-s": "until the store is away",
    "--slow-link-every-s": "until the link of a node is slow",
    "--cut-every-s": "until some nodes and the others do not reach one another",
    "--leave-every-s": "until a node is asked to leave",
    "--crowd-loss-every-s": "until many nodes are lost at once",
    "--crowd-join-every-s": "until many new nodes join at once",
}
_CHAOS_SIZES = {
    "--store-away-s": ("store_away_s", "mean time for which the store is away"),
    "--slow-link-s": ("slow_link_s", "mean time for which a link is slow"),
    "--slow-link-part": ("slow_link_part", "of its rate that it then has"),
    "--cut-s": ("cut_s", "mean time for which a cut lasts"),
    "--cut-part": ("cut_part", "of the nodes that are there, on its smaller side"),
    "--grace-s": ("grace_s", "as fault.grace_s: how long a node that leaves waits for the others"),
    "--crowd-loss-part": ("crowd_loss_part", "of the nodes that are there, which are lost at once"),
    "--crowd-join-nodes": ("crowd_join_nodes", "which join at once"),
}

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
    add("--inner-seconds", help="as outer.inner_seconds: after which the steps of a round end")
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
    for flag, mean in _CHAOS_TIMES.items():
        add(flag, help=f"mean time {mean}; default: it does not happen")
    for flag, (name, what) in _CHAOS_SIZES.items():
        add(flag, default=f"{getattr(Chaos, name):g}", help=f"{what}; default: %(default)s")
    add("--sites", help="of the nodes, in turn; those of a site reduce on their own network; default: none")
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
        inner_seconds=_if_given("--inner-seconds", options.inner_seconds),
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
        sites=None if options.sites is None else _named("--sites", parse_whole, options.sites),
        chaos=_chaos(options),
    )


def _chaos(options: argparse.Namespace) -> Chaos:
    given: dict[str, str | None] = vars(options)
    values: dict[str, Any] = {_field(flag): _if_given(flag, given[_field(flag)]) for flag in _CHAOS_TIMES}
    values |= {name: _if_given(flag, given[name]) for flag, (name, _) in _CHAOS_SIZES.items()}
    for flag, bound in {"--cut-part": 0.5, "--crowd-loss-part": 1.0, "--slow-link-part": 1.0}.items():
        if values[_field(flag)] >= bound:
            raise ConfigError(f"{flag}: {given[_field(flag)]} is not below {bound:g}")
    joining = _named("--crowd-join-nodes", parse_whole, options.crowd_join_nodes)
    return Chaos(**{**values, "crowd_join_nodes": joining})


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _if_given(flag: str, text: str | None) -> float | None:
    return None if text is None else _named(flag, parse_positive, text)


def _several(flag: str, parse: Callable[[str], _T], text: str) -> list[_T]:
    return [_named(flag, parse, part) for part in text.split(",")]


def _named(flag: str, parse: Callable[[str], _T], text: str) -> _T:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def render(model: RunModel, found: SimulationResult, took_s: float) -> str:
    """What came of a run, as text; `took_s`: the seconds that it took here."""
    nodes = len(model.nodes)
    spent = {doing: seconds / found.seconds / nodes for doing, seconds in sorted(found.spent_s.items())}
    lines = [
        f"{found.rounds} rounds of {nodes} nodes in {found.seconds / 3600:.3g} h of virtual time, {took_s:.1f} s here",
        f"a round           every {found.seconds / found.rounds:.1f} s, {found.members / found.rounds:.1f} members",
        f"goodput           {found.goodput:.1%} of the tokens of nodes that are never lost and wait for nothing",
        f"a node's time     {', '.join(f'{doing} {part:.1%}' for doing, part in spent.items() if part)}",
        f"lost              {found.losses} nodes, {found.leaves} left; {found.joins} came in; "
        f"{found.reopened} rounds were opened again",
    ]
    if found.joined_s:
        lines.append(
            f"a joiner          was in after {_mean(found.joined_s):.0f} s, at most {max(found.joined_s):.0f} s"
        )
    chaos = {
        "the store was away": found.store_losses,
        "nodes were cut apart": found.cuts,
        "a link was slow": found.slow_links,
        "a speaker was lost in a transfer": found.speakers_lost,
    }
    if told := [f"{what} {times} times" for what, times in chaos.items() if times]:
        lines.append(f"chaos             {', '.join(told)}")
    lines.append(
        "every sample that counts was counted once, by the ledger of the run; "
        f"{found.wasted / found.trained:.2%} of what was trained was dealt again"
    )
    return "\n".join(lines)
