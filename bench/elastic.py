"""What unequal and joining nodes cost the others: tokens/s beside what the nodes' own speeds add up to.

Real nodes, processes on this machine, whose inner steps sleep (`fault.inject`, TAKES): they stand for machines that do
not share a processor, so that two cores can carry four of them. Three measurements:

  slow           one of four at a third of the speed: fixed inner steps, a straggler deadline, a fixed time
  joining        tokens/s of the members of a run before, while and after another node joins
  detection      from a fault until the others no longer count the node alive: SIGKILL of the trainer and of the
                 machine, SIGSTOP, and a silent partition (root only)

    python bench/elastic.py [slow] [joining] [detection]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from evidence import require, require_known

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster, Network, NodeProcess

STEP_S, SLOW_STEP_S = 0.1, 0.3
DETECT_S = 2.0
TOKENS_PER_STEP = 4 * 32
DEADLINE_S = 180.0

TINY = (
    *("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--model.d-ff", "64"),
    *("--data.seq-length", "32", "--data.source.type", "synthetic", "--data.source.documents", "200"),
    *("--train.total-steps", "1000000", "--train.dtype", "float32", "--train.threads", "1"),
    *("--train.batch-size", "4", "--train.micro-bs", "4", "--fault.detect-s", str(DETECT_S)),
    *("--outer.type", "diloco"),
)


def takes(step_s: float) -> list[str]:
    """Arguments of a node whose inner steps last so long."""
    return ["--fault.inject", f"inner@+0=TAKES{step_s}"]


@dataclass(frozen=True)
class Moment:
    """A run just after a verdict."""

    round: int
    tokens: int
    """Of all nodes, in committed rounds."""
    at_s: float


class Run:
    """A cluster and the view of its store."""

    def __init__(self, cluster: LocalCluster, store: RedisStore) -> None:
        self.cluster = cluster
        self.store = store

    def newest(self) -> int:
        committed = self.store.view(0).committed
        return -1 if committed is None else committed.round

    def until(self, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_so():
            if time.monotonic() > end_s:
                raise TimeoutError(self.cluster.describe())
            time.sleep(0.01)

    def after_round(self, round: int) -> Moment:
        """Wait until this round is committed, or a newer one; the run at that moment."""
        self.until(lambda: self.newest() >= round)
        committed = self.store.view(0).committed
        assert committed is not None
        tokens = Progress.from_record(committed.record["progress"]).tokens
        return Moment(committed.round, tokens, time.monotonic())


@contextmanager
def running(step_times_s: Sequence[float], *arguments: str, network: Network | None = None) -> Generator[Run]:
    """A founded run of nodes whose steps take these times."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroband-bench-")))
        cluster = stack.enter_context(
            LocalCluster(
                folder / "runs",
                (*TINY, "--data.cache-dir", str(folder / "cache"), *arguments),
                nodes=len(step_times_s),
                env={"OMP_NUM_THREADS": "1"},
                network=network,
            )
        )
        for step_s in step_times_s:
            cluster.start(arguments=takes(step_s))
        assert cluster.redis is not None
        store = RedisStore(cluster.redis.local_url, cluster.run_id, retry_s=30.0)
        stack.callback(store.close)
        run = Run(cluster, store)
        run.until(lambda: run.newest() >= 0)
        yield run


# -- one slow node --------------------------------------------------------------------------------------------------


def measure_slow_node(for_s: float = 60.0) -> None:
    """Tokens/s of four nodes, one at a third of the speed, over the sum of their speeds, from verdict to verdict."""
    print(f"\n{'outer':<42}{'tokens/s':>10}{'sum of speeds':>16}{'ratio':>8}")
    for name, arguments in {
        "inner_steps = 60": ("--outer.inner-steps", "60"),
        "inner_steps = 60, straggler deadline 1 s": (
            *("--outer.inner-steps", "60"),
            *("--outer.straggler-deadline-s", "1"),
        ),
        "inner_seconds = 12": ("--outer.inner-seconds", "12"),
    }.items():
        with running((STEP_S, STEP_S, STEP_S, SLOW_STEP_S), *arguments) as run:
            first = run.after_round(max(3, run.newest() + 1))
            last = first
            while last.at_s < first.at_s + for_s:
                last = run.after_round(last.round + 1)
            rate = (last.tokens - first.tokens) / (last.at_s - first.at_s)
            speeds = sum(own_speed(node) for node in run.cluster.nodes.values())
        print(f"{name:<42}{rate:>10.0f}{speeds:>16.0f}{rate / speeds:>8.3f}")


def own_speed(node: NodeProcess) -> float:
    """Tokens/s of a node within its rounds, which is what it would do alone."""
    return statistics.median(r["train/tokens_per_s"] for r in node.metrics() if "outer/round" not in r)


# -- a joining node -------------------------------------------------------------------------------------------------


def measure_joining() -> None:
    """Tokens/s of two members in the rounds before, during and after the join of a third."""
    with running((STEP_S, STEP_S), "--outer.inner-seconds", "4") as run:
        run.until(lambda: run.newest() >= 8)
        started_at_s = time.time()
        joiner = run.cluster.start("joiner", arguments=takes(STEP_S))
        run.until(lambda: bool(joiner.events("joined")))
        joined_at_s = time.time()
        first = run.newest()
        run.until(lambda: run.newest() >= first + 5)
        members = [run.cluster.nodes["node0"], run.cluster.nodes["node1"]]
        phases = {
            "before": (0.0, started_at_s),
            "while it joins": (started_at_s, joined_at_s),
            "after": (joined_at_s, time.time()),
        }
        rates = {name: rate_of(members, *span) for name, span in phases.items()}
    print(f"\n{'members, while another node joins':<40}{'tokens/s':>10}{'of before':>24}")
    for name, rate in rates.items():
        print(f"{name:<40}{rate:>10.0f}{rate / rates['before']:>24.3f}")
    print(f"the join took {joined_at_s - started_at_s:.1f} s, of which most is the start of the process")


def rate_of(nodes: Iterable[NodeProcess], from_s: float, to_s: float) -> float:
    """Tokens/s of nodes over the inner steps recorded between two times of this machine's clock, waits included."""
    rate = 0.0
    for node in nodes:
        records = [r for r in node.metrics() if from_s <= r["at_s"] < to_s and r["step"] > 20]
        require(len(records) > 1, f"{node.node_id} made no two inner steps in the phase")
        took_s = records[-1]["at_s"] - records[0]["at_s"]
        rate += (len(records) - 1) * TOKENS_PER_STEP / took_s
    return rate


# -- detection ------------------------------------------------------------------------------------------------------


def kill_trainer(node: NodeProcess, _network: Network | None) -> None:
    for pid in (node.pid, *node.rank_pids):
        os.kill(pid, signal.SIGKILL)


def measure_detection(times: int = 5) -> None:
    """Seconds until the store no longer counts a node alive."""
    is_possible = not Network.obstacle()
    faults: dict[str, Callable[[NodeProcess, Network | None], object]] = {
        "SIGKILL of the trainer": kill_trainer,
        "SIGKILL of every process": lambda node, _network: node.kill(),
        "SIGSTOP": lambda node, _network: node.pause(),
    }
    if is_possible:
        faults["silent partition"] = lambda node, network: network and network.cut_off(node.node_id)
    with ExitStack() as stack:
        network = stack.enter_context(Network()) if is_possible else None
        run = stack.enter_context(running((STEP_S, STEP_S), "--outer.inner-seconds", "3", network=network))
        print(f"\n{f'detect_s = {DETECT_S:g}, {times} times each':<40}{'median s':>10}{'max s':>12}")
        for name, strike in faults.items():
            seconds = [detect(run, strike, network) for _ in range(times)]
            print(f"{name:<40}{statistics.median(seconds):>10.2f}{max(seconds):>12.2f}")


def detect(run: Run, strike: Callable[[NodeProcess, Network | None], object], network: Network | None) -> float:
    """Have a fault happen to a node, wait until it is detected, and bring the node back."""
    node = run.cluster.nodes.get("victim")
    if node is None or not node.is_running:
        start = run.cluster.start if node is None else run.cluster.restart
        node = start("victim", arguments=takes(STEP_S))

    def is_member() -> bool:
        view = run.store.view(0)
        return any(
            node_id_of_member(m) == "victim" for m in view.alive & set(view.committed.members if view.committed else ())
        )

    run.until(is_member)
    from_s = time.monotonic()
    strike(node, network)
    run.until(lambda: not any(node_id_of_member(m) == "victim" for m in run.store.view(0).alive))
    took_s = time.monotonic() - from_s
    if network is not None:
        network.heal_all()
    node.kill()
    return took_s


MEASUREMENTS = {"slow": measure_slow_node, "joining": measure_joining, "detection": measure_detection}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="slow, joining, detection, or all")
    asked = parser.parse_args(argv).what
    require_known(parser, asked, MEASUREMENTS)
    for name in asked or MEASUREMENTS:
        MEASUREMENTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
