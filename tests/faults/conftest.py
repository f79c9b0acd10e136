"""Runs of tiny nodes as real processes to which faults happen, and what they recorded. One thread tells a story."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_runs import ENDLESS, TINY_MODEL, ForkedCluster

from zeroband.data.ledger import Range, take
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.progress import Progress, deal_claims
from zeroband.elastic.membership.records import Verdict
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.node.processes import pids_with
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster, NodeProcess
from zeroband.tools.cluster.forked import ForkedNode
from zeroband.tools.cluster.local import TRAINER
from zeroband.tools.cluster.node_process import NodeSpec

DEADLINE_S = 180.0

INTRUDER = """
import sys
from pathlib import Path
from zeroband.elastic.store import interface as store
{patch}
from zeroband.train import main
code = main()
print("threads:", *(name.read_text() for name in Path("/proc/self/task").glob("*/comm")), file=sys.stderr)
sys.exit(code)
"""
"""A trainer; and what threads it had at its end."""

PACE = "inner@+0=TAKES0.1"
"""Inner steps that mostly sleep: a node that starts has a core for itself, and is not kept waiting by the others."""

SLOW_PACE = "inner@+0=TAKES0.2"
"""For stories that count no steps: while a node starts again, each step of the others costs processor time."""

RecordRun = Callable[..., "Recorded"]


@pytest.fixture(scope="module")
def record_run(tmp_path_factory: pytest.TempPathFactory) -> RecordRun:
    """record_run(tell, outer=("ddp",), ranks=(1, 1), faults={}): found a run, let the story happen to it, end it."""

    def record_one(tell: Callable[[Story], None], **setup: Any) -> Recorded:
        return record(tmp_path_factory.mktemp("story"), Setup(**setup), tell)

    return record_one


@dataclass(frozen=True)
class Setup:
    """A tiny run without an end of its own, so that it lasts until the last fault of its story."""

    outer: tuple[str, ...]
    """Arguments: the type of the outer algorithm, and what else differs from the other runs."""
    ranks: tuple[int, ...]
    """Of each founder."""
    faults: Mapping[str, Sequence[str]]
    """Arguments of founders that shall fail, by node id."""
    steps_per_round: int = 1
    batch_size: int = 4
    seq_length: int = 32
    has_own_steps: bool = True
    """Nodes make inner steps of their own; False: every step is a round."""
    pace: str = PACE
    detect_s: float = 3.0
    token: str = "sesame"
    model: tuple[str, ...] = TINY_MODEL
    data: tuple[str, ...] = ("--data.source.type", "synthetic", "--data.source.documents", "200")
    script: Path = TRAINER
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def tokens_per_round(self) -> int:
        """Of one member."""
        return self.steps_per_round * self.batch_size * self.seq_length

    @property
    def rounds_held(self) -> int:
        """For which a member holds samples: two where it trains on while its round travels."""
        return 2 if "--outer.overlap" in self.outer else 1

    @property
    def ragged_tokens(self) -> int:
        """What a round may lack of them: the last sample of a data pass is shorter, and two passes may end in it."""
        return 2 * self.seq_length

    def arguments(self, cache: Path) -> tuple[str, ...]:
        return (
            *self.model,
            *("--data.seq-length", str(self.seq_length), "--data.hold-out", "0", "--data.cache-dir", str(cache)),
            *self.data,
            *(*ENDLESS, "--train.dtype", "float32", "--train.threads", "1"),
            *("--train.batch-size", str(self.batch_size), "--train.micro-bs", str(self.batch_size)),
            *("--fault.detect-s", str(self.detect_s), "--fault.inject", self.pace, "--outer.type", *self.outer),
        )


@dataclass
class Story:
    """A run in progress: what happens to it, and what it recorded so far."""

    cluster: LocalCluster
    store: RedisStore
    arguments: Sequence[str]
    history: dict[int, Verdict] = field(default_factory=dict[int, Verdict])
    strangers: dict[str, NodeProcess] = field(default_factory=dict[str, NodeProcess])
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])

    def node(self, node_id: str) -> NodeProcess:
        return self.cluster.nodes[node_id]

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not (is_over := is_so()) and time.monotonic() < end_s:
            self.collect()  # the store keeps the newest rounds only
            time.sleep(0.2)
        self.collect()
        if not is_over:
            raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}\n{self.cluster.describe()}")

    def collect(self) -> None:
        self.history |= {verdict.round: verdict for verdict in self.store.history()}

    def members(self) -> set[str]:
        """Node ids of the newest round's members."""
        committed = self.store.view(0).committed
        return set() if committed is None else {node_id_of_member(m) for m in committed.members}

    def until_contributing(self, *node_ids: str, rounds: int = 1) -> None:
        """Wait for as many rounds to which exactly these nodes contributed; all of them live."""
        found = set[int]()

        def contribute() -> bool:
            view = self.store.view(0)
            if view.committed is None or not set(said := contributors(view.committed)) <= view.alive:
                return False
            if {node_id_of_member(m) for m in said} == set(node_ids):
                found.add(view.committed.round)
            return len(found) >= rounds

        self.until(contribute, f"{', '.join(node_ids)} alone contribute")

    def until_struck(self, node_id: str) -> None:
        """Wait for a node's own fault, and until its guardian has cleaned up behind it."""
        node = self.node(node_id)
        self.until(lambda: not node.is_running, f"{node_id} is struck")
        assert node.exit_code == -signal.SIGKILL, node.console_tail()
        self.until(lambda: not node.pids and not node.spec.memory.exists(), f"nothing is left of {node_id}")

    def refuse(self, key: str, *arguments: str, patch: str = "pass", token: str | None = None) -> None:
        """Have a stranger try to join whose `key` differs; several do at once, and their fate shows at the end."""
        node_id = f"stranger{len(self.strangers)}"
        folder = self.cluster.run_dir.parents[1] / node_id
        folder.mkdir()
        (script := folder / "intruder.py").write_text(INTRUDER.format(patch=patch), encoding="utf-8")
        env = self.cluster.environment(node_id, 1)
        env |= {} if token is None else {"ZERO_BAND_RUN__TOKEN": token}
        spec = NodeSpec(node_id, 1, script, (*self.arguments, *arguments), env, folder, folder / "memory")
        self.strangers[key] = ForkedNode(spec)

    def end(self) -> None:
        """Ask the nodes that still run to end; they must leave nothing by themselves."""
        for key, stranger in self.strangers.items():
            exit_code = stranger.wait(DEADLINE_S)
            self.refusals[key] = (exit_code, stranger.console.read_text(encoding="utf-8"))
        for node in self.cluster.running:
            node.terminate()
        self.cluster.wait(timeout_s=DEADLINE_S)
        self.until(lambda: not left_behind(self.cluster.run_id), f"left behind: {left_behind(self.cluster.run_id)}")


def contributors(verdict: Verdict) -> list[str]:
    return list(verdict.plan.contributors())


def samples_of(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {index for start, stop in ranges for index in range(start, stop)}


def left_behind(run_id: str) -> list[object]:
    """Processes and shared memory of a run."""
    return [*Path("/dev/shm").glob(f"zeroband-{run_id}@*"), *pids_with("ZERO_BAND_RUN__ID", run_id)]


@dataclass(frozen=True)
class Life:
    """One membership of a node: the rounds that it was a member of."""

    member_id: str
    first: int
    last: int


@dataclass(frozen=True)
class Recorded:
    """What a run left in its store and in its files."""

    setup: Setup
    history: Mapping[int, Verdict]
    metrics: Mapping[str, list[dict[str, Any]]]
    events: Mapping[str, list[dict[str, Any]]]
    run_dir: Path
    refusals: Mapping[str, tuple[int, str]]
    left_behind: Sequence[object]
    """When everything was over, the store too."""

    def lives(self, node_id: str) -> list[Life]:
        """Of a node, in their order."""
        rounds: dict[str, list[int]] = {}
        for number, verdict in self.history.items():
            for member_id in verdict.members:
                if node_id_of_member(member_id) == node_id:
                    rounds.setdefault(member_id, []).append(number)
        return [Life(member_id, numbers[0], numbers[-1]) for member_id, numbers in rounds.items()]

    def of_round(self, kind: str, round: int) -> dict[str, dict[str, Any]]:
        """The events of a kind that nodes have recorded about a round, by node id."""
        found = [(n, e) for n, events in self.events.items() for e in events if e["kind"] == kind]
        return {node_id: event for node_id, event in found if event["round"] == round}

    def took_s(self, round: int) -> list[float]:
        """What the end of a round cost each of its members: waiting and transfer, over all attempts."""
        ends = [m for records in self.metrics.values() for m in records if m.get("outer/round") == round]
        return [m["outer/wait_s"] + m["outer/transfer_s"] for m in ends]

    def ranges(self, round: int) -> dict[str, Sequence[Range]]:
        """The ranges of samples that each member was dealt for a round, or claimed in it as a joiner."""
        progress = Progress.from_record(self.history[round - 1].record["progress"])
        ledgers = deal_claims(dict(self.history[round].plan.claims), progress.ledgers)
        return {member: ranges for ledger in ledgers.values() for member, ranges in ledger.assigned.items()}

    def assigned(self, round: int) -> dict[str, set[int]]:
        """The samples that each member was dealt for a round, or claimed in it as a joiner."""
        return {member: samples_of(ranges) for member, ranges in self.ranges(round).items()}

    def trained(self, round: int) -> dict[str, set[int]]:
        """The samples behind each update that counted in a round: the first ones of its member's ranges."""
        held, steps = self.ranges(round), self.history[round].plan.contributors()
        return {m: samples_of(take(held[m], s * self.setup.batch_size)[0]) for m, s in steps.items()}

    def contributors(self, round: int) -> list[str]:
        """Members whose update counted in a round."""
        return contributors(self.history[round])


def record(folder: Path, setup: Setup, tell: Callable[[Story], None]) -> Recorded:
    """Found the run, let the story happen to it, end it."""
    arguments = setup.arguments(folder / "cache")
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "ZERO_BAND_RUN__TOKEN": setup.token, **setup.env}
    nodes, script = len(setup.ranks), setup.script
    cluster_of = ForkedCluster if script == TRAINER else LocalCluster
    with cluster_of(folder / "runs", arguments, nodes=nodes, env=env, script=script) as cluster:
        assert cluster.store_url is not None
        for number, ranks in enumerate(setup.ranks):
            cluster.start(ranks=ranks, arguments=setup.faults.get(f"node{number}", []))
        key = RunKey.of(setup.token, cluster.run_id)
        with closing(RedisStore(cluster.store_url, cluster.run_id, key=key, retry_s=10.0)) as store:
            story = Story(cluster, store, arguments)
            tell(story)
            story.end()
        nodes = list(cluster.nodes.values())
    socket = Path(cluster.store_url.removeprefix("unix://"))
    return Recorded(
        setup=setup,
        history=dict(sorted(story.history.items())),
        metrics={node.node_id: node.metrics() for node in nodes},
        events={node.node_id: node.events() for node in nodes},
        run_dir=cluster.run_dir,
        refusals=story.refusals,
        left_behind=[*left_behind(cluster.run_id), *(path for path in (socket, socket.parent) if path.exists())],
    )
