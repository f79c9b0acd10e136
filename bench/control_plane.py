"""What membership and rounds cost as nodes are added: bytes, commands and processor time of store and members.

Real members, rules and records on a real Redis, without training and without the bytes of a transfer: guardian, watcher
and main thread of each member do to the store what they do in a run. Some processes carry the members as threads, so
the times to a decision are those of members that share the processors of this machine.

    python bench/control_plane.py --nodes 4 16 64
    python bench/control_plane.py --nodes 128 --churn     # then 30 % leave at once, and 50 join at once
    python bench/control_plane.py --nodes 128 --probe     # members probe one another, too, as their guardians do
    python bench/control_plane.py --nodes 128 --unsigned  # and once with members that have no keys, and sign nothing
    python bench/control_plane.py --nodes 512 --detect-s 30   # leases that hold though members wait for a processor
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import redis
from evidence import count, require

from zeroband.config.time_outs import TIME_OUT_NAMES, TimeOuts
from zeroband.elastic.guardian.probes import Identity, LinkMonitor
from zeroband.elastic.guardian.process import GuardianOrder, ListenAddress
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.keys import NodeKey, RunKey, is_signed
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.reach import DialRoute, neighbours, suspects
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, Claim, Peer, Ready, RoundPlan, Verdict
from zeroband.elastic.membership.round_rules import Rules
from zeroband.elastic.rounds.member import Member, NodeIdentity, RunAccess, new_member_id
from zeroband.elastic.store.local_server import RedisServer
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import PeerLost
from zeroband.node.shared_flags import SharedFlags

RUN_ID = "scale"
SECRET, HOST = b"k" * 32, "127.0.0.1"
SHAPE = RunShape(total_steps=10**9, batch_size=32)
RULES = Rules(shape=SHAPE)
STEPS = 50
START_S = 600.0
DETECT_S = 5.0
SHARED = {f"section.key_{i}": str(i) for i in range(40)}
PER_PROCESS = 32
TURN_S = 0.1
"""For which a thread that computes keeps the interpreter; by default each that waits for it looks every 5 ms."""
JOIN_AT_ONCE, LEAVE_PART = 50, 0.3
JOIN_ROUNDS, JOIN_ROUND_S = 6, 1.0
"""Rounds in which those that join at once have to come in, and how long their transfers last."""


class TimedKey(RunKey):
    """A node's keys that count what signing and verifying takes, of all members of this process.

    Each member verifies for itself here, though members share a process.
    """

    spent_s = 0.0
    _verified: ClassVar[dict[tuple[str, str, bytes, bytes], bool]] = {}

    def sign(self, message: bytes) -> bytes:
        began_s = time.thread_time()
        signature = super().sign(message)
        TimedKey.spent_s += time.thread_time() - began_s
        return signature

    def accepts(self, name: str, message: bytes, signature: bytes) -> bool:
        asked = ("" if self.node is None else self.node.public, name, message, signature)
        if asked not in self._verified:
            is_signed.cache_clear()
            began_s = time.thread_time()
            self._verified[asked] = super().accepts(name, message, signature)
            TimedKey.spent_s += time.thread_time() - began_s
        return self._verified[asked]


@dataclass(frozen=True)
class Cost:
    """What a stretch of time cost."""

    seconds: float
    sent_bytes: int
    """By the store."""
    received_bytes: int
    commands: int
    store_cpu_s: float
    members_cpu_s: float
    """Of all members together."""
    signatures_s: float
    """Of that, what signing and verifying takes."""


class Lease:
    """What a guardian does, without its process: takes a lease, renews it, gives it back, and may probe others."""

    pid = 0

    def __init__(self, store: RedisStore, order: GuardianOrder, key: RunKey, *, probes: bool) -> None:
        self._store, self._order = store, order
        identity, lease_s = Identity(order.member_id, key), order.lease_s
        self._gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._links = LinkMonitor(HOST, identity=identity, detect_s=lease_s, on_gone=self._gone.put) if probes else None
        self._stop = threading.Event()
        self._renew(is_first=order.is_first)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _renew(self, *, is_first: bool = False) -> None:
        order, links = self._order, self._links
        if links is None:
            self._store.renew_lease(order.member_id, Peer(order.node_id, HOST, 29700, True), first=is_first)
            return
        peer = Peer(order.node_id, HOST, links.port, True, links.cut_off(), links.doubted())
        peers = self._store.renew_lease(order.member_id, peer, first=is_first) or {}
        asked = neighbours(order.member_id, peers) | suspects(peers)
        links.watch({m: (DialRoute(HOST, peers[m].port),) for m in asked if m != order.member_id})

    def _run(self) -> None:
        while not self._stop.wait(self._order.renew_s):
            self._renew()
            while not self._gone.empty():
                self._store.expire_lease(self._gone.get())

    def is_running(self) -> bool:
        return True

    def end(self) -> None:
        """Renew no more: the lease runs out, unless those who probe this one see that it is gone."""
        self._stop.set()
        self._thread.join()
        if self._links is not None:
            self._links.close()

    def close(self) -> None:
        self.end()
        self._store.release_lease(self._order.member_id)
        self._store.close()


@lru_cache(maxsize=1024)
def links_of(member: str, members: tuple[str, ...]) -> dict[str, int]:
    """Mbit/s to whom a guardian probes."""
    return {other: random.randrange(80, 100) for other in neighbours(member, members)}


class Node:
    """One member, and what a node has beside it."""

    def __init__(self, url: str, number: int, folder: Path, *, probes: bool, detect_s: float, signs: bool) -> None:
        self._probes = probes
        time_outs = TimeOuts.following(detect_s, dict.fromkeys(TIME_OUT_NAMES))
        own = NodeKey.new() if signs else None
        self._key = TimedKey(SECRET, own)
        self._open_store = partial(RedisStore, url, RUN_ID, key=self._key, lease_s=time_outs.lease_s, retry_s=60.0)
        self._store = self._open_store()
        self.number = number
        self._flags = SharedFlags(folder / f"flags-{number}", create=True)
        self.lease: Lease | None = None
        access = RunAccess(
            self._store,
            url,
            RUN_ID,
            self._store.found_or_match(SHARED),
            start_guardian=lambda order, _: self._guard(order),
            name_member=new_member_id if own is None else own.new_member_id,
        )
        identity = NodeIdentity(
            f"node-{number:04d}", ListenAddress(f"10.0.{number // 250}.{number % 250}"), (), 0, folder
        )
        self.member = Member(access, identity, self._flags, time_outs, Departure(grace_s=1e6))
        self.verdict: Verdict | None = None
        self._claim: Claim | None = None
        """Samples that it trains on as a joiner, before a round has dealt it any."""

    def _guard(self, order: GuardianOrder) -> Lease:
        self.lease = Lease(self._open_store(), order, self._key, probes=self._probes)
        return self.lease

    def join(self, last: int) -> None:
        """Claim samples, and take part up to this round as a joiner that has trained on them."""
        self.verdict = self.member.look(0).committed
        assert self.verdict is not None
        self._claim = self.member.claim_samples(STEPS * SHAPE.batch_size)
        counted = 0
        while self.verdict.round < last:
            counted += self._round(self.verdict.round + 1, RULES, weight=1000, transfer_s=JOIN_ROUND_S, is_member=True)
        require(counted > 0, f"{self.member.member_id} was in no round up to {last}")

    def found(self, nodes: int) -> None:
        assert self._round(
            BOOTSTRAP_ROUND, replace(RULES, start_nodes=nodes), weight=0, transfer_s=0.0, is_member=False
        )

    def round(self, transfer_s: float) -> None:
        assert self.verdict is not None
        assert self._round(self.verdict.round + 1, RULES, weight=1000, transfer_s=transfer_s, is_member=True)

    def _round(self, round: int, rules: Rules, *, weight: int, transfer_s: float, is_member: bool) -> bool:
        """One round from start to end. False: it was committed without this member."""
        member = self.member
        steps = STEPS if weight else 0
        links = {} if self.verdict is None else links_of(member.member_id, self.verdict.members)
        ready = Ready(round, weight, "state", steps=steps, steps_requested=STEPS, rate=900)
        ready = replace(ready, loss=random.uniform(2, 3), took_ms=random.randrange(1000, 2000))
        if self._claim is not None and self.verdict is not None:
            is_dealt = member.member_id in Progress.of_verdict(self.verdict).assigned
            self._claim = None if is_dealt else self._claim
            ready = replace(ready, claim=self._claim)
        member.announce_ready(ready, links, start_nodes=rules.start_nodes)
        while True:
            turn = member.await_turn(round, rules, is_member=is_member, start_deadline_s=time.monotonic() + START_S)
            if isinstance(turn, Verdict):
                self.verdict = turn
                return False
            try:
                member.watch(turn)
                time.sleep(transfer_s)
                member.watch(None)
                record = self._record(turn)
                member.vote(turn, "digest", record)
                self.verdict = member.await_verdict(turn, record)
                return True
            except PeerLost:
                continue

    def _record(self, plan: RoundPlan) -> dict[str, Any]:
        if self.verdict is None:
            committed = self.member.look(plan.round).committed
            before = None if committed is None else Progress.from_record(committed.record["progress"])
        else:
            before = Progress.from_record(self.verdict.record["progress"])
        if before is None:
            after = Progress.at_start().begin(plan, SHAPE, after_round=None)
        else:
            after = before.after(plan, SHAPE)
        return {"progress": after.to_record(), "session": "s" * 16}

    def die(self) -> None:
        """Say nothing more."""
        assert self.lease is not None
        self.lease.end()

    def rest(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.member.close()
        self._flags.close()
        self._store.close()


def carry(url: str, numbers: Sequence[int], told: Connection, *, probes: bool, detect_s: float, signs: bool) -> None:
    """A process that carries some members: does what it is told with those that are meant, all at once."""
    sys.setswitchinterval(TURN_S)
    nodes: dict[int, Node] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(numbers)) as threads:

        def act(what: str, number: int, arguments: Sequence[Any]) -> None:
            if what == "start":
                nodes[number] = Node(url, number, Path(folder), probes=probes, detect_s=detect_s, signs=signs)
            elif number in nodes:  # else it has not started, or is not there any more
                getattr(nodes[number], what)(*arguments)

        while True:
            what, meant, *arguments = told.recv()
            doing = [threads.submit(act, what, number, arguments) for number in numbers if number in meant]
            problems = [repr(done.exception()) for done in doing if done.exception() is not None]
            newest = max((node.verdict.round for node in nodes.values() if node.verdict is not None), default=-1)
            spent = time.process_time(), TimedKey.spent_s
            told.send((problems, spent, newest, len(list(Path("/proc/self/fd").iterdir()))))
            if what == "close":
                return


class Crowd:
    """Members of one run, in processes that carry them, and the store between them."""

    def __init__(
        self,
        server: RedisServer,
        *groups: range,
        probes: bool = False,
        detect_s: float = DETECT_S,
        signs: bool = True,
    ) -> None:
        """`groups`: members that are told what to do together; no process carries members of two."""
        work = partial(carry, probes=probes, detect_s=detect_s, signs=signs)
        self._client = redis.Redis.from_url(server.local_url)
        spawn = multiprocessing.get_context("spawn")
        self._workers: list[tuple[range, Connection]] = []
        self._processes: list[Any] = []
        for numbers in (group[at : at + PER_PROCESS] for group in groups for at in range(0, len(group), PER_PROCESS)):
            ours, theirs = spawn.Pipe()
            self._processes.append(spawn.Process(target=work, args=(server.local_url, numbers, theirs), daemon=True))
            self._processes[-1].start()
            self._workers.append((numbers, ours))
        self._everybody = range(groups[-1].stop)
        self.descriptors = 0
        """Open in the processes of the members that were told something last."""

    def have(self, what: str, members: range, *arguments: Any) -> tuple[tuple[float, float], int]:
        """Have these members do something, all at once.

        Returns their processes' processor time, what of it signatures take, and their newest round.
        """
        meant = [worker for numbers, worker in self._workers if set(numbers) & set(members)]
        for worker in meant:
            worker.send((what, members, *arguments))
        answers = [worker.recv() for worker in meant]
        problems = [problem for some, *_ in answers for problem in some]
        require(not problems, "; ".join(problems[:3]))
        self.descriptors = sum(open for *_, open in answers)
        cpu_s, signatures_s = (sum(spent) for spent in zip(*(spent for _, spent, *_ in answers), strict=True))
        return (cpu_s, signatures_s), max(newest for _, _, newest, _ in answers)

    def cost_of(self, act: Callable[[], object]) -> Cost:
        def now() -> tuple[float, ...]:
            spent_s, _ = self.have("rest", self._everybody)
            info: dict[str, Any] = self._client.info("everything")  # type: ignore[assignment]
            store_cpu_s = info["used_cpu_user"] + info["used_cpu_sys"]
            traffic = info["total_net_output_bytes"], info["total_net_input_bytes"]
            trips = info["cmdstat_evalsha"]["calls"]  # a look that waits for news is one of them
            return time.monotonic(), *traffic, trips, store_cpu_s, *spent_s

        before = now()
        act()
        at_s, sent, received, commands, *spent_s = (b - a for a, b in zip(before, now(), strict=True))
        return Cost(at_s, int(sent), int(received), int(commands), *spent_s)

    def clients(self) -> int:
        return int(self._client.info("clients")["connected_clients"])  # type: ignore[index]

    def close(self) -> None:
        self.have("close", self._everybody)
        for process in self._processes:
            process.join()
        self._client.close()


@dataclass(frozen=True)
class Figures:
    """What a run of so many nodes costs."""

    nodes: int
    training_mbit: float
    """Sent by the store while nodes only train, per second."""
    training_cpu: float
    """Part of a core that one member takes meanwhile."""
    round_bytes: int
    """Sent by the store in one round, with what it sends beside it: members that read all anew do so at any time."""
    round_commands: float
    """Of one member."""
    round_cpu_s: float
    """Of one member."""
    round_signatures_s: float
    """Of that, what signing and verifying takes."""
    round_s: float
    """From the first word to the last verdict, without the transfer."""
    store_round_cpu_s: float
    clients: float
    """Connections to the store, of one member."""
    descriptors: float
    """Open files of one member, sockets nearly all of them."""


def figures(crowd: Crowd, nodes: int, *, rounds: int, train_s: float, transfer_s: float) -> Figures:
    """Play a run of `nodes` nodes, and measure it."""
    members = range(nodes)
    crowd.have("start", members)
    crowd.have("found", members, nodes)
    crowd.have("round", members, 0.0)
    training = crowd.cost_of(lambda: time.sleep(train_s))
    spent = crowd.cost_of(lambda: [crowd.have("round", members, transfer_s) for _ in range(rounds)])
    clients, _ = crowd.clients(), crowd.have("rest", members)
    beside = spent.seconds / training.seconds
    return Figures(
        nodes=nodes,
        training_mbit=8e-6 * training.sent_bytes / training.seconds,
        training_cpu=training.members_cpu_s / training.seconds / nodes,
        round_bytes=spent.sent_bytes // rounds,
        round_commands=(spent.commands - beside * training.commands) / rounds / nodes,
        round_cpu_s=(spent.members_cpu_s - beside * training.members_cpu_s) / rounds / nodes,
        round_signatures_s=(spent.signatures_s - beside * training.signatures_s) / rounds / nodes,
        round_s=spent.seconds / rounds - transfer_s,
        store_round_cpu_s=(spent.store_cpu_s - beside * training.store_cpu_s) / rounds,
        clients=clients / nodes,
        descriptors=crowd.descriptors / nodes,
    )


HEAD = (
    "nodes | sent while training, Mbit/s | of a core, a member | round: MB sent | commands, a member "
    "| ms of processor, a member | ms of it for signatures "
    "| s to the verdict | s of the store's processor | connections to the store, a member "
    "| descriptors, a member"
)


def row(found: Figures) -> str:
    return (
        f"{found.nodes} | {found.training_mbit:.2f} | {found.training_cpu:.4f} | {found.round_bytes / 1e6:.3f} "
        f"| {found.round_commands:.1f} | {1e3 * found.round_cpu_s:.1f} | {1e3 * found.round_signatures_s:.3f} "
        f"| {found.round_s:.2f} "
        f"| {found.store_round_cpu_s:.3f} | {found.clients:.1f} | {found.descriptors:.0f}"
    )


def churn(crowd: Crowd, nodes: int, detect_s: float) -> None:
    """30 % leave at once between two rounds; then 50 join at once."""
    dead, left = range(int(LEAVE_PART * nodes)), range(int(LEAVE_PART * nodes), nodes)
    crowd.have("die", dead)
    took = crowd.cost_of(lambda: crowd.have("round", left, 0.0))
    print(
        f"{len(dead)} of {nodes} gone at once: the others' next round took {took.seconds:.1f} s, of which "
        f"{detect_s:g} s until the leases ran out; the store sent {took.sent_bytes / 1e6:.1f} MB",
        flush=True,
    )
    new = range(nodes, nodes + JOIN_AT_ONCE)
    crowd.have("start", new)
    _, newest = crowd.have("rest", left)

    def join() -> None:
        with ThreadPoolExecutor(1) as beside:
            joining = beside.submit(crowd.have, "join", new, newest + JOIN_ROUNDS)
            for _ in range(JOIN_ROUNDS):
                crowd.have("round", left, JOIN_ROUND_S)
            joining.result()

    took = crowd.cost_of(join)
    print(
        f"{JOIN_AT_ONCE} joined at once, all of them within {JOIN_ROUNDS} rounds, which took {took.seconds:.1f} s; "
        f"the store sent {took.sent_bytes / 1e6:.1f} MB",
        flush=True,
    )


def measure(nodes: int, signs: bool, options: argparse.Namespace) -> None:
    """Print what a run of `nodes` nodes costs."""
    with RedisServer() as server, ExitStack() as stack:
        joiners = range(nodes, nodes + JOIN_AT_ONCE if options.churn else nodes)
        crowd = Crowd(server, range(nodes), joiners, probes=options.probe, detect_s=options.detect_s, signs=signs)
        stack.callback(crowd.close)
        found = figures(crowd, nodes, rounds=options.rounds, train_s=options.train_s, transfer_s=options.transfer_s)
        require(found.round_bytes > 0, "the store sent nothing")
        print(row(found) + ("" if signs else " | without signatures"), flush=True)
        if options.churn:
            churn(crowd, nodes, options.detect_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--train-s", type=float, default=5.0)
    parser.add_argument("--transfer-s", type=float, default=1.0)
    parser.add_argument("--detect-s", type=float, default=DETECT_S, help="how long a lease lasts")
    parser.add_argument("--probe", action="store_true", help="have members probe one another")
    parser.add_argument("--churn", action="store_true", help="then have some leave, and others join, at once")
    parser.add_argument("--unsigned", action="store_true", help="measure members without keys, too")
    options = parser.parse_args()
    print(HEAD, flush=True)
    for nodes in options.nodes:
        for signs in (False, True) if options.unsigned else (True,):
            measure(nodes, signs, options)


if __name__ == "__main__":
    main()
