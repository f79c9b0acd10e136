"""A run of hundreds of nodes in virtual time, for planning.

The rules, the store and the ledger are those of a run; work, links and losses are modelled. Starts no process.

    python -m bench.virtual --nodes 64 --params 1e9 --mbit 500 --step-s 1 --mtbf-s 14400
    python -m bench.virtual --nodes 8 --params 150M --mbit 500,500,500,25 --step-s 1,1.2   values in turn
    python -m bench.virtual --nodes 64 --params 1e9 --mbit 500 --sites 8 --store-every-s 3600 --cut-every-s 7200
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import cycle, islice
from typing import Any, TypeVar

from bench.evidence import count
from bench.virtual_models import Chaos, NodeModel, RunModel
from bench.virtual_run import SimulationResult, VirtualRun

from zeroband.kernels.formats import FORMATS
from zeroband.tools.arguments import bounded, parse_count

_STATE_BYTES = 8
"""Bytes of each parameter in what a joiner fetches: it and its momentum."""

_CHAOS = {
    "store_every_s": "mean time until the store is away",
    "slow_link_every_s": "mean time until the link of a node is slow",
    "cut_every_s": "mean time until some nodes and the others do not reach one another",
    "leave_every_s": "mean time until a node is asked to leave",
    "crowd_loss_every_s": "mean time until many nodes are lost at once",
    "crowd_join_every_s": "mean time until many new nodes join at once",
    "store_away_s": "mean time for which the store is away",
    "slow_link_s": "mean time for which a link is slow",
    "slow_link_part": "of its rate that it then has",
    "cut_s": "mean time for which a cut lasts",
    "cut_part": "of the nodes that are there, on its smaller side",
    "grace_s": "as fault.grace_s: how long a node that leaves waits for the others",
    "crowd_loss_part": "of the nodes that are there, which are lost at once",
    "crowd_join_nodes": "which join at once",
}
_BELOW = {"cut_part": 0.5, "crowd_loss_part": 1.0, "slow_link_part": 1.0}

_T = TypeVar("_T")


def main(argv: Sequence[str] | None = None) -> None:
    """Play a run and print what came of it."""
    parser = _parser()
    options = parser.parse_args(argv)
    for name, bound in _BELOW.items():
        if getattr(options, name) >= bound:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name):g} is not below {bound:g}")
    model, began_s = _model(options), time.monotonic()
    found = VirtualRun(model, seed=options.seed).play(options.rounds)
    print(render(model, found, time.monotonic() - began_s))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.virtual",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(flag: str, kind: Callable[[str], Any], what: str, default: Any = None, **more: Any) -> None:
        shown = "" if default is None else "; default: %(default)s"
        parser.add_argument(flag, type=kind, help=f"{what}{shown}", default=default, **more)

    whole, positive = bounded(int, ge=1), bounded(float, gt=0)
    add("--nodes", whole, "machines that train together", required=True)
    add("--params", parse_count, "of the model: 1e9, 150M, 7B", required=True)
    add("--mbit", _several(whole), "Mbit/s of a node's link in each direction; several: in turn", required=True)
    add("--step-s", _several(positive), "seconds of an inner step of a node, or several", "1")
    add("--inner-steps", whole, "of a round", 50)
    add("--inner-seconds", positive, "as outer.inner_seconds: after which the steps of a round end")
    add("--codec", str, "of what is sent", "int8", choices=list(FORMATS))
    add("--rounds", count, "committed behind the founding", 1000)
    add("--rtt-ms", whole, "between two nodes", 100)
    parser.add_argument("--overlap", action="store_true", help="train on while a round is on its way, as eager updates")
    add("--straggler-s", positive, "as outer.straggler_deadline_s: go without those who are late by so much")
    add("--straggler-grace", positive, "as outer.straggler_grace: wait for them so long a part of a round at most")
    add("--detect-s", positive, "as fault.detect_s", 10.0)
    add("--mtbf-s", positive, "mean time to the loss of a node; left out: none is lost")
    add("--away-s", positive, "mean time until a lost node is started again", 300.0)
    add("--freeze-every-s", positive, "mean time of training until a node stands still; left out: none does")
    add("--freeze-s", positive, "mean time for which it then does", 20.0)
    defaults = {field.name: field.default for field in fields(Chaos)}
    for name, what in _CHAOS.items():
        kind = whole if name.endswith("nodes") else positive
        add(f"--{name.replace('_', '-')}", kind, what, defaults[name])
    add("--sites", whole, "of the nodes, in turn; those of a site reduce on their own network; left out: none")
    add("--seed", int, "of what is left to chance", 0)
    return parser


def _several(read: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    return lambda text: [read(part) for part in text.split(",")]


def _model(options: argparse.Namespace) -> RunModel:
    given = vars(options)
    steps_s, rates = (islice(cycle(values), options.nodes) for values in (options.step_s, options.mbit))
    alike = ("inner_steps", "inner_seconds", "rtt_ms", "detect_s", "mtbf_s", "away_s", "freeze_every_s", "freeze_s")
    return RunModel(
        nodes=tuple(NodeModel(step_s, mbit) for step_s, mbit in zip(steps_s, rates, strict=True)),
        encoded_bytes=FORMATS[options.codec].encoded_size(round(options.params)),
        state_bytes=round(_STATE_BYTES * options.params),
        agreement_s=4e-3 * options.rtt_ms,
        overlaps=options.overlap,
        chaos=Chaos(**{name: given[name] for name in _CHAOS}),
        **{name: given[name] for name in (*alike, "straggler_s", "straggler_grace", "sites")},
    )


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
            f"a joiner          trained after {_mean(found.joined_s):.0f} s, at most {max(found.joined_s):.0f} s"
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


if __name__ == "__main__":
    main()
