"""Members that hold the stores switch to another one when the one in use is lost, and agree on which."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.held_stores import HeldStore, open_at
from tests.stores import RUN_ID, SHARED, a_plan, a_verdict

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import Peer, StoreTerm, Verdict
from zeroband.elastic.membership.succession import HandoverState
from zeroband.elastic.store.backup import LiveBackup
from zeroband.elastic.store.failover import StoreFailover
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.node.shared_flags import SharedFlags

A, B, C = "a#1", "b#1", "c#1"
KEY = RunKey.of("a token of the run", RUN_ID)
LEASE_S = 1.0
SESSION = "first"


@dataclass
class Node:
    """A member with its own store, which knows that and the first node's."""

    member: str
    server: HeldStore
    store: RedisStore
    memory: LiveBackup
    events: list[dict[str, object]]
    failover: StoreFailover

    def go_on(self) -> None:
        """Take steps until it is at a store in a later generation."""
        before = self.memory.generation
        while self.memory.generation == before:
            self.failover.recover()


@pytest.fixture
def nodes(tmp_path: Path, stack: ExitStack) -> Mapping[str, Node]:
    servers = {m: stack.enter_context(HeldStore(KEY, RUN_ID)) for m in (A, B, C)}
    return {m: make_node(m, servers, tmp_path, stack) for m in servers}


def make_node(member: str, servers: Mapping[str, HeldStore], folder: Path, stack: ExitStack) -> Node:
    store = open_at(stack, servers[A], servers[member], lease_s=LEASE_S)
    store.reach(retry_s=5.0)
    flags = SharedFlags(folder / member, create=True)
    stack.callback(flags.close)
    memory, events = LiveBackup(member, SHARED), list[dict[str, object]]()
    failover = StoreFailover(
        store, member, memory, flags, lambda kind, **fields: events.append(fields), survey_s=LEASE_S / 2
    )
    stack.callback(failover.close)
    store.renew_lease(member, Peer(member, "127.0.0.1", 4000, True, store_port=servers[member].port), first=True)
    return Node(member, servers[member], store, memory, events, failover)


def commit_a_round(nodes: Mapping[str, Node]) -> None:
    """All three know the verdict of a round."""
    plan, store = a_plan(A, B, C), nodes[A].store
    store.found_or_match(SHARED)
    assert store.propose_plan(plan, current=None, generation=store.generation)
    assert store.propose_verdict(a_verdict(plan), generation=store.generation)
    for node in nodes.values():
        node.memory.learn(node.store.view(0))


def lose(lost: Node, *survivors: Node) -> Sequence[Node]:
    """End a node's store and let the others switch."""
    lost.server.stop()
    threads = [threading.Thread(target=node.go_on) for node in survivors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return survivors


def test_survivors_switch_to_one_store_with_the_committed_state(nodes: Mapping[str, Node]) -> None:
    commit_a_round(nodes)
    survivors = lose(nodes[A], nodes[B], nodes[C])
    stores = {node.store.address for node in survivors}
    assert len(stores) == 1 and stores <= {f"node://{node.server.place}" for node in survivors}
    assert nodes[B].memory.generation == nodes[C].memory.generation != nodes[A].memory.generation
    first, newest = (event["generation"] for event in nodes[B].events)
    assert first == 1 < newest == nodes[B].memory.generation.number  # 3 where one was too busy for the second
    assert nodes[C].store.view(1).committed == a_verdict(a_plan(A, B, C))


def test_round_for_which_all_survivors_voted_is_committed_without_stored_votes(nodes: Mapping[str, Node]) -> None:
    """Its verdict's content was fixed by the votes: the lost node may have committed it."""
    commit_a_round(nodes)
    plan = replace(a_plan(A, B, C), version=2, round=1)
    assert nodes[A].store.propose_plan(plan, current=a_plan(A, B, C), generation=nodes[A].store.generation)
    for node in (nodes[B], nodes[C]):
        node.memory.learn(node.store.view(1))
        node.memory.voted(plan, "d", {"n": 1})
    lose(nodes[A], nodes[B], nodes[C])
    assert nodes[C].store.view(1).committed == Verdict(plan, "d", {"n": 1})


def test_vote_of_a_member_that_promised_another_store_does_not_come_back_as_a_lost_record(
    nodes: Mapping[str, Node],
) -> None:
    """Its store refuses the vote. With it, a round was committed here after the promised generation had begun."""
    commit_a_round(nodes)
    b, plan = nodes[B], replace(a_plan(A, B, C), version=2, round=1)
    assert nodes[A].store.propose_plan(plan, current=a_plan(A, B, C), generation=nodes[A].store.generation)
    b.memory.learn(b.store.view(1))
    b.memory.promise(StoreTerm(2, "another"))
    b.store.vote(plan, B, "d", generation=b.memory.voted(plan, "d", {"n": 1}))
    seen = b.store.view(1)
    assert seen.plan == plan and not seen.votes and not b.memory.is_ahead_of(seen, 1)
    b.store.restore(b.memory.to_restore)
    assert not b.store.view(1).votes


def test_member_whose_store_still_answers_follows_the_others_within_a_lease(nodes: Mapping[str, Node]) -> None:
    """It may be in the midst of its inner steps, and a lease after their move the others go on without it."""
    commit_a_round(nodes)
    c, begun, verdict = nodes[C], nodes[C].memory.generation, Verdict(a_plan(A, B, C), "d", {"session": SESSION})
    c.memory.committed(verdict)
    elsewhere = next(store for store in c.store.candidates if store.address != c.store.address)
    later = StoreTerm(2, elsewhere.probe("", None).store)
    began_at_s = time.monotonic()
    assert elsewhere.begin(later, HandoverState(verdict, verdict.plan, Orders(), SHARED, (A, B, C)))
    while c.memory.generation == begun:
        assert time.monotonic() - began_at_s < 30
        time.sleep(0.02)
    assert c.memory.generation == later and c.store.view(1).committed == verdict
    assert nodes[B].memory.generation == begun, "it does not know that store"


def test_member_does_not_follow_another_line_of_the_run(nodes: Mapping[str, Node], stack: ExitStack) -> None:
    """A machine that was cut off founded it: which line goes on is decided by what they trained."""
    commit_a_round(nodes)
    c, plan = nodes[C], a_plan(A)
    c.memory.committed(Verdict(a_plan(A, B, C), "d", {"session": SESSION}))
    begun = c.memory.generation
    founder = open_at(stack, c.server, lease_s=LEASE_S)
    another = Verdict(plan, "d", {"session": "another"})
    later = StoreTerm(9, founder.probe("", None).store)
    assert founder.begin(later, HandoverState(another, plan, Orders(), SHARED, (A,)))
    lines = [candidate.line for _, candidate in c.store.survey() if candidate.generation == later]
    assert [None if line is None else line.session for line in lines] == ["another"]
    time.sleep(2 * LEASE_S)
    assert c.memory.generation == begun


def test_one_of_three_does_not_switch(nodes: Mapping[str, Node]) -> None:
    commit_a_round(nodes)
    nodes[A].server.stop()
    for _ in range(5):
        nodes[B].failover.recover()
    assert nodes[B].memory.generation == nodes[A].memory.generation
    assert nodes[B].memory.member_report().promised == nodes[B].memory.generation


def test_member_does_not_enter_a_run_founded_in_its_emptied_store(nodes: Mapping[str, Node], stack: ExitStack) -> None:
    commit_a_round(nodes)
    nodes[A].server.stop()
    nodes[A].server.start()
    stranger = open_at(stack, nodes[A].server, lease_s=LEASE_S)
    stranger.reach(retry_s=5.0)
    begun = stranger.generation
    for _ in range(3):
        nodes[B].failover.recover()
    assert begun is not None and nodes[B].memory.generation != begun
    assert not stranger.may_found(), "members have told the store that they live"
