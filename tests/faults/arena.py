"""A run in which one fault after the other strikes a victim: steady nodes that go on, and what must hold after each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.faults.conftest import left_behind
from tests.tiny_runs import ENDLESS, TINY_RUN, ForkedCluster

from zeroband.elastic.guardian.process import process_state
from zeroband.elastic.membership.records import Verdict
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster, Network, NodeProcess, RedisServer
from zeroband.tools.cluster.network import STORE
from zeroband.tools.data.audit import audit, read_rounds

DEADLINE_S = 90.0
DETECT_S = 2.0
SLACK_S = 15.0
"""What a survivor may need beyond `fault.detect_s`; generous, because its cores may be busy with other things."""
STEADY = ("steady0", "steady1")
MOMENTS = (
    *("joining", "inner", "waiting", "opened", "transfer50", "transfer99"),
    *("voted", "committed", "leaving"),
)
"""Of the victim: fetching the state, in its inner steps, waiting for the others, in the transfer at 0, 50 and 99 % of
its bytes, between vote and verdict, applying, leaving."""

TINY = (
    *TINY_RUN,
    *ENDLESS,
    *("--outer.type", "diloco", "--outer.inner-steps", "5", "--comm.chunk-mb", "0.0005"),
    *("--fault.detect-s", str(DETECT_S), "--fault.grace-s", "8", "--fault.inject", "inner@+0=TAKES0.1"),
)
"""Rounds of about half a second, most of it sleep, so that the nodes do not compete for the cores; transfers have more
than a hundred chunks."""


def fault_at(moment: str, action: str) -> list[str]:
    """Arguments of a victim that meets this at that moment of its third round."""
    round = "0" if moment in ("joining", "leaving") else "+2"
    return ["--fault.inject", f"{moment}@{round}={action}"]


@dataclass
class Arena:
    """The cluster, with everything a cell of the matrix does to it. Use as a context."""

    folder: Path
    network: Network | None
    more: Sequence[str] = ()
    """Arguments of all nodes."""
    cluster: LocalCluster = field(init=False)
    store: RedisStore = field(init=False)
    history: dict[int, Verdict] = field(default_factory=dict[int, Verdict])
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Arena:
        env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        arguments = (*TINY, *self.more, "--data.cache-dir", str(self.folder / "cache"))
        redis = RedisServer(persistent=True) if self.network is None else self.network.redis_server(persistent=True)
        self.cluster = self._stack.enter_context(
            ForkedCluster(
                self.folder / "runs", arguments, nodes=len(STEADY), env=env, network=self.network, redis=redis
            )
        )
        for node_id in STEADY:
            self.cluster.start(node_id)
        self.store = RedisStore(redis.local_url, self.cluster.run_id, retry_s=30.0)
        self._stack.callback(self.store.close)
        self.until_contributing(*STEADY)
        return self

    def __exit__(self, *_ending: object) -> None:
        self._stack.close()

    # -- looking ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Remember the history; the store keeps the newest part of it, and may lose that."""
        for verdict in self.store.history():
            known = self.history.setdefault(verdict.round, verdict)
            assert known == verdict, f"round {verdict.round} was committed twice: {known} and {verdict}"

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_so():
            if time.monotonic() > end_s:
                raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}\n{self.cluster.describe()}")
            self.collect()
            time.sleep(0.15)  # a look at the whole history costs processor time
        self.collect()

    def newest(self) -> int:
        committed = self.store.view(0).committed
        return -1 if committed is None else committed.round

    def contributing(self) -> set[str]:
        """Nodes whose update counted in the newest round."""
        committed = self.store.view(0).committed
        return set() if committed is None else {node_id_of_member(m) for m in committed.plan.contributors()}

    def until_contributing(self, *node_ids: str) -> None:
        self.until(lambda: self.contributing() == set(node_ids), f"{', '.join(node_ids)} contribute, and nobody else")

    def until_rounds(self, count: int) -> None:
        """Wait for so many further rounds."""
        newest = self.newest()
        self.until(lambda: self.newest() >= newest + count, f"{count} rounds after round {newest}")

    # -- doing --------------------------------------------------------------------------------------------------

    def start(self, node_id: str, arguments: Sequence[str] = (), *, ranks: int = 1) -> NodeProcess:
        """Start a node, or start it again."""
        if self.cluster.nodes.get(node_id) is None:
            return self.cluster.start(node_id, arguments=arguments, ranks=ranks)
        return self.cluster.restart(node_id, arguments=arguments)

    def start_victim(self, moment: str, action: str, *, node_id: str = "victim", ranks: int = 1) -> NodeProcess:
        """Start a node that will meet its fault, bring it to the moment, and wait until it has happened to it."""
        node = self.start(node_id, fault_at(moment, action), ranks=ranks)
        if moment == "leaving":
            self.until(lambda: node_id in self.contributing(), f"{node_id} contributes")
            node.terminate()
        if action == "SIGSTOP":
            self.until(lambda: is_stopped(node), f"{node_id} stands still at {moment}")
        else:
            self.until(lambda: not node.is_running, f"{node_id} ends at {moment}")
        return node

    def go_on(self, node: NodeProcess) -> None:
        """Let a node go on that stands still."""
        for pid in node.rank_pids:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def cell(self) -> Generator[None]:
        """One fault: begins with the steady nodes alone, and what must hold is checked after it."""
        for node_id in [node.node_id for node in self.cluster.running if node.node_id not in STEADY]:
            self.end(node_id)
        for node_id in STEADY:
            if not self.cluster.nodes[node_id].is_running:
                self.start(node_id)
        self.until_contributing(*STEADY)
        since_round = self.newest()
        yield
        if self.network is not None:
            self.network.heal_all()
        self.until_rounds(1)
        self.check()
        assert self.lost_s(since_round) < DETECT_S + SLACK_S

    def end(self, node_id: str) -> None:
        """Remove a node and wait until the run goes on without it."""
        self.cluster.nodes[node_id].kill()
        self.until(lambda: node_id not in self.contributing(), f"the run goes on without {node_id}")

    # -- what must hold -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that holds after any fault: one line of history, equal digests, an exact ledger."""
        self.collect()
        digests: dict[int, set[str]] = {}
        for node in self.cluster.nodes.values():
            for event in node.events("round_committed"):
                digests.setdefault(event["round"], set()).add(event["digest"])
        assert {round: found for round, found in digests.items() if len(found) > 1} == {}
        result = audit(read_rounds(self.cluster.run_dir))
        assert result.accounts and all(account.is_exact for account in result.accounts.values()), result

    def others_go_on(self) -> None:
        """The steady nodes contribute, alone."""
        self.until_contributing(*STEADY)
        self.until_rounds(2)

    def comes_back(self, victim: NodeProcess, moment: str = "") -> None:
        """A victim that lives contributes again; one that was leaving has left, as it was asked to."""
        if moment == "leaving":
            self.until(lambda: not victim.is_running, f"{victim.node_id} leaves")
            assert victim.exit_code == 0, victim.console_tail()
        else:
            self.until_contributing(*STEADY, victim.node_id)

    def leaves_nothing(self, victim: NodeProcess) -> None:
        """Of a victim that has ended, no process and no shared memory stays."""
        self.until(lambda: not victim.pids and not victim.spec.memory.exists(), f"nothing is left of {victim.node_id}")

    def lost_s(self, since_round: int) -> float:
        """The most that a steady node waited and transferred in one round after this one."""
        costs = [
            record["outer/wait_s"] + record["outer/transfer_s"]
            for node_id in STEADY
            if node_id in self.cluster.nodes
            for record in self.cluster.nodes[node_id].metrics()
            if record.get("outer/round", -1) > since_round
        ]
        return max(costs, default=0.0)


@contextmanager
def open_arena(folder: Path, *arguments: str) -> Generator[Arena]:
    """An arena, with a network of its own where this machine allows one; leaves nothing behind."""
    with ExitStack() as stack:
        network = None if Network.obstacle() else stack.enter_context(Network())
        yield (arena := stack.enter_context(Arena(folder, network, arguments)))
    assert left_behind(arena.cluster.run_id) == []


def is_stopped(node: NodeProcess) -> bool:
    """Whether a rank of a node stands still (SIGSTOP)."""
    return any(process_state(pid) == "T" for pid in node.rank_pids)


CUTS: dict[str, Callable[[Network], object]] = {
    "silent partition": lambda network: network.cut_off("victim"),
    "one way, outwards": lambda network: network.drop_outgoing("victim"),
    "one way, inwards": lambda network: network.drop_incoming("victim"),
    "link down": lambda network: network.link_down("victim"),
    "from one other node": lambda network: network.cut_between("victim", STEADY[0]),
    "from the store": lambda network: network.cut_between("victim", STORE),
}
"""Ways to cut off a node called victim."""


def cut_and_heal(arena: Arena, moment: str, cut: str) -> None:
    """Cut a victim off at a moment; the others go on; when the link is there again, it comes back."""
    network = arena.network
    if network is None:
        pytest.skip(f"no network of its own: {Network.obstacle()}")
    victim = arena.start_victim(moment, "SIGSTOP")
    CUTS[cut](network)
    arena.go_on(victim)
    if cut == "from one other node":  # one of the two goes on; which one, the rules say
        arena.until(lambda: not {"victim", STEADY[0]} <= arena.contributing(), "they do not take part together")
        arena.until_rounds(2)
    else:
        arena.others_go_on()
    if cut == "link down":
        network.link_up("victim")
    network.heal_all()
    arena.comes_back(victim, moment)


def restart_store(arena: Arena, moment: str, *, is_empty: bool) -> None:
    """Kill the store at a moment of the victim and start it again; nobody is lost over it."""
    victim = arena.start_victim(moment, "SIGSTOP")
    assert arena.cluster.redis is not None
    arena.cluster.redis.stop()
    arena.go_on(victim)
    arena.cluster.redis.start(empty=is_empty)
    arena.comes_back(victim, moment)
    arena.until_rounds(2)
