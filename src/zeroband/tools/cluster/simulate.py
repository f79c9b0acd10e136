"""`zeroband simulate NODES RANKS @config`: run several nodes on this machine with their output on one console."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zeroband.config import load_config
from zeroband.config.load import given_settings, require_asked
from zeroband.errors import ConfigError
from zeroband.observe.facts import REPORT_FILE
from zeroband.tools.arguments import parser_of, run_command
from zeroband.tools.cluster.forked import forked_if_possible
from zeroband.tools.cluster.interrupts import Interrupts, counted_interrupts
from zeroband.tools.cluster.local import TRAINER, LocalCluster, asked_run
from zeroband.tools.cluster.node_process import NodeProcess

_POLL_S = 0.1
_GRACE_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the worst node's exit code; 2 for wrong arguments, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    return run_command("simulate", lambda: _simulate(options))


def _simulate(options: argparse.Namespace) -> int:
    ranks = ranks_of_nodes(options.nodes, options.ranks)
    if options.script.startswith("@"):
        return simulate(ranks, TRAINER, [options.script, *options.arguments])
    return simulate(ranks, Path(options.script), options.arguments)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "simulate",
        "Start several nodes of one run on this machine with their own Redis, or the store of ZERO_BAND_STORE__URL; "
        "if that is `nodes`, each node holds a store.",
        epilog="example: zeroband simulate 2 2 @debug/diloco --train.micro_bs 4",
    )
    parser.add_argument("nodes", metavar="NODES", type=int, help="number of nodes")
    parser.add_argument("ranks", metavar="RANKS", help="ranks of each node, or one number for each: 2,1")
    parser.add_argument("script", metavar="[SCRIPT]", help="file that each rank runs; default before an @: the trainer")
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script: @config.toml --flags"
    )
    return parser


def ranks_of_nodes(nodes: int, ranks: str) -> list[int]:
    """Parse RANKS, `2` or `2,1`, into the ranks of each node. Raises ConfigError."""
    try:
        each = [int(part) for part in ranks.split(",")]
    except ValueError:
        each = []
    if len(each) == 1:
        each *= nodes
    if nodes < 1 or len(each) != nodes or min(each) < 1:
        raise ConfigError(f"NODES={nodes} RANKS={ranks}: RANKS is one number for all nodes or one for each: 2,1")
    return each


def simulate(ranks: Sequence[int], script: Path, arguments: Sequence[str]) -> int:
    """Start one node per entry of `ranks`, print their output, and wait for all. Returns the exit code."""
    if not script.is_file():
        raise ConfigError(f"no such script: {script}; this package's trainer is {TRAINER}")
    with counted_interrupts() as interrupts, asked_cluster(len(ranks), script, arguments) as cluster:
        if _is_trainer(script):  # report a wrong configuration once instead of on every rank
            load_config(arguments, cluster.environment("node0", ranks[0]))
            require_asked(arguments)
        for count in ranks:
            cluster.start(ranks=count)
        print(f"zeroband: {len(ranks)} nodes started; their files are in {cluster.run_dir}", flush=True)
        follow(cluster, interrupts)
        if interrupts.count:
            print("zeroband: stopping all nodes; press Ctrl-C again to kill them", file=sys.stderr, flush=True)
            cluster.stop(grace_s=_GRACE_S, in_hurry=lambda: interrupts.count > 1)
            return interrupts.exit_code
        if (report := cluster.run_dir / REPORT_FILE).exists():
            print(f"zeroband: report of the run: {report}", flush=True)
        return worst(cluster)


def asked_cluster(nodes: int, script: Path, arguments: Sequence[str]) -> LocalCluster:
    """Return the cluster for these arguments and the environment, which may name run directory, run id and store.

    Arguments of scripts other than the trainer are not interpreted. Raises ConfigError.
    """
    own_arguments = arguments if _is_trainer(script) else ()
    directory, run_id = asked_run(own_arguments)
    store_url = given_settings(own_arguments, os.environ, with_files=False).get(("store", "url"))
    node = forked_if_possible if _is_trainer(script) else NodeProcess  # another script may change what it loads
    return LocalCluster(directory, arguments, nodes=nodes, run_id=run_id, script=script, store_url=store_url, node=node)


def _is_trainer(script: Path) -> bool:
    return script.resolve() == TRAINER.resolve()


def follow(cluster: LocalCluster, interrupts: Interrupts) -> None:
    """Print the nodes' output, prefixed by node, until all have ended or the user interrupts."""
    consoles = {node.node_id: ConsoleTail(node.console, node.console_start) for node in cluster.nodes.values()}
    while True:
        is_over = not cluster.running or interrupts.count > 0
        for node_id, console in consoles.items():
            for line in console.read(is_over=is_over):
                print(f"[{node_id}] {line}", flush=True)
        if is_over:
            return
        time.sleep(_POLL_S)


def worst(cluster: LocalCluster) -> int:
    """Return the highest exit code of the nodes, 128 + signal for killed ones."""
    codes = {node.node_id: node.exit_code or 0 for node in cluster.nodes.values()}
    failed = {node_id: code if code > 0 else 128 - code for node_id, code in codes.items() if code}
    for node_id, code in failed.items():
        print(f"zeroband: {node_id} ended with exit code {code}", file=sys.stderr)
    return max(failed.values(), default=0)


class ConsoleTail:
    """Follows the lines of a growing text file from `start` (bytes)."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._offset = start

    def read(self, *, is_over: bool = False) -> list[str]:
        """Return the new whole lines; with `is_over`, also a partial last line."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        if not is_over:
            data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return data.decode(errors="replace").splitlines()
