"""A run of a few members on a Redis in which somebody damages keys: the run under `test_damage`.

Members, rules, store and the guardians' renewals are those of production; training and transfers are words. No clock:
where a lease passes in production, `Run.let_a_lease_pass` does what happens in that time.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import redis
from tests.memberships import a_member

from zeroband.elastic.membership.orders import Orders, pause, resume
from zeroband.elastic.membership.records import Peer, Ready, RoundPlan, Verdict
from zeroband.elastic.membership.round_rules import Rules, Wait
from zeroband.elastic.rounds.member import Member
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import Fenced, PeerLost
from zeroband.node.shared_flags import SharedFlags

LEASE_S = 1000.0
RUN_ID = "run"
NODES = 3
STEPS = 60
"""Longer than a round takes with any damage."""
MOMENTS = ("training", "waiting", "opened", "voted")
"""Moments of a round: no member is ready; all are; it is open; all but one have voted."""


def hashed(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


@dataclass
class Node:
    """A node with its own store connections, as its processes have them."""

    name: str
    store: RedisStore
    guardian: RedisStore
    shared: dict[str, str]
    flags: SharedFlags
    member: Member = field(init=False)
    phase: str = "training"
    round: int = -1
    state: str = "initial"
    session: str = ""
    is_joiner: bool = False
    plan: RoundPlan | None = None
    lives: int = 0

    def __post_init__(self) -> None:
        self.be_another_member()

    def be_another_member(self) -> None:
        self.lives += 1
        member_id = f"{self.name}#{self.lives}{uuid.uuid4().hex[:4]}"
        if self.lives > 1:
            self.member.close()
        self.member = a_member(self.store, member_id, self.flags, shared=self.shared, has_lease=False)
        self.renew(first=True)

    def renew(self, *, first: bool = False) -> None:
        """Renew the lease as a guardian does five times per lease. Raises Fenced."""
        self.guardian.session = self.flags.session
        peer = Peer(self.name, f"host-{self.name}", 7, True)
        listed_version = self.flags.listed_version
        granted = self.guardian.renew_lease(self.member.member_id, peer, first=first, listed_version=listed_version)
        if granted is None:
            raise Fenced("the lease was refused")


class Run:
    """The nodes, the history that they applied, and the number of fenced members. A context manager."""

    def __init__(self, url: str, *, retry_s: float = 2.0) -> None:
        self.client = redis.Redis.from_url(url)
        self.stores: list[RedisStore] = []

        def open_store() -> RedisStore:
            self.stores.append(RedisStore(url, RUN_ID, lease_s=LEASE_S, retry_s=retry_s))
            return self.stores[-1]

        self.shared = open_store().found_or_match({"model.d_model": "256"})
        self.session = uuid.uuid4().hex
        self.folder = TemporaryDirectory()
        flags = {name: SharedFlags(Path(self.folder.name) / name, create=True) for name in "abc"[:NODES]}
        self.nodes = [Node(name, open_store(), open_store(), dict(self.shared), flags[name]) for name in flags]
        self.line: dict[int, tuple[str, str]] = {}
        """Digest and state of the applied rounds."""
        self.fences = 0

    def close(self) -> None:
        for node in self.nodes:
            node.member.close()
            node.flags.close()
        self.folder.cleanup()
        for store in self.stores:
            store.close()
        self.client.close()

    @property
    def newest(self) -> int:
        return max(self.line, default=-1)

    # -- one step of a node ---------------------------------------------------------------------------------------

    def step(self, node: Node) -> None:
        try:
            getattr(self, f"_{node.phase}")(node)
        except PeerLost:
            node.phase = "training"
        except Fenced:
            self.fence(node)

    def fence(self, node: Node) -> None:
        """Rejoin as another member with the others' state."""
        self.fences += 1
        with suppress(Fenced):
            node.be_another_member()
        node.phase, node.is_joiner = "joining", True

    def _joining(self, node: Node) -> None:
        """Copy the newest state once the store shows its round, and announce this member."""
        committed = node.store.view(0).committed
        donor = max((n for n in self.nodes if n is not node), key=lambda n: n.round)
        if committed is not None and committed.round <= donor.round:
            node.round, node.state, node.session = donor.round, donor.state, donor.session
            self._training(node)

    def _training(self, node: Node) -> None:
        weight = 0 if node.is_joiner or node.round < 0 else 5
        node.member.announce_ready(Ready(node.round + 1, weight, node.state, 1, 1))
        node.phase = "waiting"

    def _waiting(self, node: Node) -> None:
        is_member = node.round >= 0 and not node.is_joiner
        round = node.round + 1
        rule = node.member.turn_rule(round, Rules(1, NODES), is_member=is_member, start_deadline_s=float("inf"))
        turn = rule.decide(node.member.look(round))
        if isinstance(turn, Verdict):
            node.phase = "joining"  # it catches up
        elif not isinstance(turn, Wait):
            node.plan, node.phase = turn, "opened"

    def _opened(self, node: Node) -> None:
        assert node.plan is not None
        if not node.member.look(node.plan.round).can_finish(node.plan):
            node.member.report_failure(node.plan, "it cannot be finished")
            raise PeerLost("it cannot be finished")
        node.member.vote(node.plan, hashed(node.plan.round, "result"), self._record_of(node))
        node.phase = "voted"

    def _voted(self, node: Node) -> None:
        assert node.plan is not None
        rule = node.member.verdict_rule(node.plan, self._record_of(node))
        verdict = rule.decide(node.member.look(node.plan.round))
        if isinstance(verdict, Verdict):
            node.round, node.state = verdict.round, hashed(node.state, verdict.digest)
            node.session, node.is_joiner, node.phase = verdict.record["session"], False, "training"
            applied = self.line.setdefault(verdict.round, (verdict.digest, node.state))
            assert applied == (verdict.digest, node.state), f"round {verdict.round} has two results"

    def _record_of(self, node: Node) -> dict[str, Any]:
        """The record that this node would commit."""
        assert node.plan is not None
        return {"session": node.session or self.session, "n": node.plan.round}

    def steps_of(self, nodes: list[Node]) -> bool:
        """Let each node take one step. Returns whether any made progress."""
        before = [(node.phase, node.round) for node in nodes]
        for node in nodes:
            self.step(node)
        return [(node.phase, node.round) for node in nodes] != before

    # -- time -----------------------------------------------------------------------------------------------------

    def renew_all(self) -> None:
        for node in self.nodes:
            try:
                node.renew()
            except Fenced:
                self.fence(node)

    def let_a_lease_pass(self) -> None:
        """Let all living nodes renew and read, then end the time for restoring."""
        self.renew_all()
        for node in self.nodes:
            node.member.look(0)
        clock = self.nodes[0].store.keys.clock
        if self.client.type(clock) == b"hash":
            self.client.hset(clock, "settling_until_ms", 0)

    def until(self, is_so: Callable[[], bool], what: str, steps: int = STEPS) -> None:
        """Let all nodes act until a condition holds. A lease passes whenever none makes progress."""
        for _ in range(steps):
            if is_so():
                return
            if not self.steps_of(self.nodes):
                self.let_a_lease_pass()
        standing = [(n.name, n.phase, n.round) for n in self.nodes]
        raise AssertionError(f"not within {steps} steps: {what}; {standing}, {self.fences} fences")

    def bring_to(self, moment: str) -> None:
        """Bring all nodes to a moment of their next round; at the first moment some may be ready already."""
        for _ in range(STEPS):
            behind = [n for n in self.nodes if n.round < self.newest or n.phase not in MOMENTS[:2]]
            if not behind:
                break
            if not self.steps_of(behind):
                self.let_a_lease_pass()
        for phase in MOMENTS[: MOMENTS.index(moment)]:
            for node in self.nodes[: -1 if phase == "opened" else None]:
                for _ in range(STEPS):
                    if node.phase == phase:
                        self.step(node)
            assert all(n.phase != phase for n in self.nodes[:-1]), (moment, [(n.name, n.phase) for n in self.nodes])

    def commits_rounds(self, count: int = 2) -> None:
        """Let all nodes commit this many more rounds."""
        begun = self.newest
        self.until(
            lambda: all(n.round >= begun + count and not n.is_joiner for n in self.nodes),
            f"{count} more rounds",
            count * STEPS,
        )
        committed = self.nodes[0].store.view(0).committed
        assert committed is not None and committed.round <= self.newest, "a round that nobody has made"
        assert set(committed.members) == {n.member.member_id for n in self.nodes}

    def dump(self) -> dict[bytes, bytes]:
        """A dump of the whole store."""
        names = cast("list[bytes]", list(self.client.scan_iter(f"{self.nodes[0].store.keys.prefix}:*")))
        return {name: self.client.dump(name) or b"" for name in names}

    def give_orders(self) -> Orders:
        """A pause that ends at once, so that there are orders."""
        store = self.nodes[0].store
        store.give_orders(pause)
        return store.give_orders(resume)


@contextmanager
def a_run(url: str, **options: Any) -> Iterator[Run]:
    """A run that has committed a few rounds, with orders."""
    run = Run(url, **options)
    try:
        run.commits_rounds(2)
        run.give_orders()
        run.commits_rounds(1)
        yield run
    finally:
        run.close()
