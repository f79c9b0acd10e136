"""What a slow node costs the others: the time of their rounds, the tokens that count, and the loss at equal tokens.

Eight real nodes in namespaces of their own, whose links have a rate and whose inner steps sleep, so that two cores can
carry them. Linux as root.

  links          one of eight has a 20th of the others' rate: without it, waited for, and with a grace, by which what it
                 contributes is carried
  freezes        one of eight is stopped (SIGSTOP) for random times: waited for, and with a grace

    python bench/stragglers.py [links] [freezes] [--rounds 20] [--grace 0.1] [--phase 40x0.2] [--mbit 20]
                               [--without-waiting] [--outer ARGUMENT ...] [--fault ARGUMENT ...]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from evidence import count, finite, require_known
from held_out import curve_of, loss_at, task, trained_tokens

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import Verdict
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster, Network, NodeProcess

NODES, SLOW = 8, "slow"
BATCH, LENGTH = 4, 32
SLOWER = 20.0
FIRST = 5
"""Rounds before it are not counted: links are measured, and processes start."""
FROZEN_S, APART_S = 3.0, 12.0
"""Means of how long a node is stopped, and of how long it is not."""
LIMIT_S = 1200.0


@dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    rounds: int = 20
    inner_steps: int = 40
    step_s: float = 0.2
    mbit: float = 20.0
    """Rate of the others' links."""
    flags: tuple[str, ...] = ()


@dataclass
class SimulationResult:
    """What a run left behind."""

    ended_at_s: list[tuple[Verdict, float]] = field(default_factory=list)
    """Committed rounds, as they were seen."""
    trained: int = 0
    """Tokens that nodes trained on."""
    counted: int = 0
    """Tokens of committed rounds."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and held-out loss."""

    def rounds_s(self) -> list[float]:
        """How long rounds took, but for the first ones and the last, which waits for everybody."""
        ended = [at_s for verdict, at_s in self.ended_at_s if verdict.round >= FIRST][:-1]
        return [after - before for before, after in pairwise(ended)]

    def rounds_with_slow(self) -> int:
        """Rounds in which the slow node counted."""
        return sum(
            any(node_id_of_member(m) == SLOW for m in verdict.plan.contributors()) for verdict, _ in self.ended_at_s
        )


def run(
    setting: Setting,
    arguments: Sequence[str] = (),
    *,
    nodes: int = NODES,
    slow_link: bool = False,
    freezes: int | None = None,
) -> SimulationResult:
    """A run to its end. `freezes`: seed of the times for which the slow node is stopped."""
    found = SimulationResult()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroband-bench-")))
        network = stack.enter_context(Network())
        inner_steps, steps = setting.inner_steps, setting.rounds * setting.inner_steps
        learns = task(folder / "ck", d_model=128, length=LENGTH, batch=BATCH, inner_steps=inner_steps, steps=steps)
        arguments = (*learns, f"--fault.inject=inner@+0=TAKES{setting.step_s}", *setting.flags, *arguments)
        cluster = LocalCluster(folder / "runs", arguments, nodes=nodes, env={"OMP_NUM_THREADS": "1"}, network=network)
        stack.enter_context(cluster)
        for name in (*(f"node{n}" for n in range(NODES - 1)), SLOW)[:nodes]:
            network.limit(name, setting.mbit / SLOWER if slow_link and name == SLOW else setting.mbit)
            cluster.start(name)
        assert cluster.redis is not None
        store = RedisStore(cluster.redis.local_url, cluster.run_id, retry_s=30.0)
        stack.callback(store.close)
        ended = threading.Event()
        if freezes is not None:
            freezer = threading.Thread(target=freeze, args=(cluster.nodes[SLOW], random.Random(freezes), ended))
            freezer.start()
            stack.callback(freezer.join)
            stack.callback(ended.set)
        follow(cluster, store, found)
        ended.set()
        codes = cluster.wait(timeout_s=LIMIT_S)
        assert set(codes.values()) == {0}, cluster.describe()
        found.trained = trained_tokens(cluster, length=LENGTH, batch=BATCH)
        found.curve = curve_of(folder / "ck", cluster.run_id)
    return found


def follow(cluster: LocalCluster, store: RedisStore, found: SimulationResult) -> None:
    """Note each committed round until the run is over."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        committed = store.view(0).committed
        if committed is not None and (not found.ended_at_s or committed.round > found.ended_at_s[-1][0].round):
            found.ended_at_s.append((committed, time.monotonic()))
            progress = Progress.from_record(committed.record["progress"])
            found.counted = progress.tokens
            if progress.is_complete:
                return
        if time.monotonic() > end_s or len(cluster.running) < len(cluster.nodes):
            raise TimeoutError(cluster.describe())
        time.sleep(0.02)


def freeze(node: NodeProcess, chance: random.Random, ended: threading.Event) -> None:
    """Stop a node now and then."""
    while not ended.wait(chance.expovariate(1 / APART_S)):
        node.pause()
        ended.wait(chance.expovariate(1 / FROZEN_S))
        node.resume()


def tell(runs: dict[str, SimulationResult], alone: str, waited_for: str) -> None:
    """Print a table. `alone`: the run by whose rounds the others are measured; `waited_for`: by whose loss."""
    usual_s = statistics.mean(runs[alone].rounds_s())
    longest_s = max(runs[alone].rounds_s())
    print(
        "| run | rounds | round, mean s | of usual | median s | longest s | of the usual longest | "
        "rounds with the slow node | tokens | counted of trained | loss at equal tokens |\n|" + "---|" * 11
    )
    for name, found in runs.items():
        took = found.rounds_s()
        tokens = min(found.curve[-1][0], runs[waited_for].curve[-1][0])
        loss, usual = loss_at(found.curve, tokens), loss_at(runs[waited_for].curve, tokens)
        finite(loss, f"the loss of {name} at {tokens} tokens")
        times = f"{statistics.mean(took):.2f} | {statistics.mean(took) / usual_s:.3f} | {statistics.median(took):.2f}"
        slow, counted = found.rounds_with_slow(), f"{found.counted} | {found.counted / found.trained:.4f}"
        ratio = f"{loss:.4f} ({loss / usual:.4f})"
        longest = f"{max(took):.2f} | {max(took) / longest_s:.3f}"
        print(f"| {name} | {len(took)} | {times} | {longest} | {slow} | {counted} | {ratio} |", flush=True)


Run = Callable[[], SimulationResult]


def runs_of_links(setting: Setting, grace: str) -> dict[str, Run]:
    return {
        "without it": lambda: run(setting, [grace], nodes=NODES - 1),
        "waited for": lambda: run(setting, slow_link=True),
        "with a grace": lambda: run(setting, [grace], slow_link=True),
    }


def runs_of_freezes(setting: Setting, grace: str) -> dict[str, Run]:
    return {
        "it does not freeze": lambda: run(setting),
        "waited for": lambda: run(setting, freezes=1),
        "with a grace": lambda: run(setting, [grace], freezes=1),
    }


MEASUREMENTS = {"links": runs_of_links, "freezes": runs_of_freezes}
"""By name: its runs. With the rounds of the first one those of the others are compared."""


def phase(text: str) -> tuple[int, float]:
    """Steps and seconds of each, of `40x0.2`."""
    steps, _, step_s = text.partition("x")
    return count(steps), float(step_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="links, freezes, or both")
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--grace", type=float, default=0.1)
    parser.add_argument("--phase", type=phase, default=(40, 0.2), help="inner steps, and the seconds that each takes")
    parser.add_argument("--mbit", type=float, default=20.0, help="rate of the links that are not slow")
    parser.add_argument("--without-waiting", action="store_true", help="leave out the run that waits")
    parser.add_argument("--outer", nargs="*", default=[], help="more of [outer], as fragments=2")
    parser.add_argument("--fault", nargs="*", default=[], help="more of [fault], as detect-s=12")
    asked = parser.parse_args()
    require_known(parser, asked.what, MEASUREMENTS)
    flags = (*(f"--outer.{one}" for one in asked.outer), *(f"--fault.{one}" for one in asked.fault))
    inner_steps, step_s = asked.phase
    setting = Setting(asked.rounds, inner_steps, step_s, asked.mbit, flags)
    for name in asked.what or MEASUREMENTS:
        runs = MEASUREMENTS[name](setting, f"--outer.straggler-grace={asked.grace}")
        if asked.without_waiting:
            del runs["waited for"]
        found = {one: make() for one, make in runs.items()}
        tell(found, next(iter(found)), "waited for" if "waited for" in found else next(iter(found)))


if __name__ == "__main__":
    main()
