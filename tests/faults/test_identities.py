"""Three real nodes and somebody with their token: posing as a member has no effect, and a banned node is out.

The impostor has what every node of the run has: the token, the store, and the addresses of the members.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from tests.faults.conftest import Story

from zeroband.elastic.membership.keys import NodeKey, RunKey
from zeroband.elastic.membership.orders import ban
from zeroband.elastic.membership.records import Ready, View
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.dial import call
from zeroband.elastic.transport.handshake import Introduction, Purpose
from zeroband.errors import HandshakeFailed
from zeroband.observe.view import node_id_of_member, short_key

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.timeout(600)]

RecordRun = Callable[..., Any]
TOKEN = "sesame"


def member_of(view: View, node_id: str) -> str:
    return next(member for member in view.alive if node_id_of_member(member) == node_id)


def pose(story: Story) -> None:
    """Say in the name of node0 that it is ready for rounds to come, vote for the current one, and call node1."""
    view = story.store.view(0)
    assert view.committed is not None and view.plan is not None and story.cluster.store_url is not None
    poser = RunKey.of(TOKEN, story.cluster.run_id, node=NodeKey.new())
    victim, called = member_of(view, "node0"), member_of(view, "node1")
    with closing(RedisStore(story.cluster.store_url, story.cluster.run_id, key=poser, retry_s=30.0)) as store:
        for ahead in range(1, 6):
            store.announce_ready(victim, Ready(view.committed.round + ahead, 10**9, "another state"))
        store.vote(view.plan, victim, "another digest")
    peer, introduction = view.peers[called], Introduction(victim, called, "", True, Purpose.PROBE)

    async def dial() -> None:
        connection, _ = await call(poser, introduction, (peer.host, peer.port))
        with connection, contextlib.suppress(ConnectionError):  # it hangs up on the proof
            assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""

    with contextlib.suppress(HandshakeFailed, EOFError):
        asyncio.run(dial())


@pytest.fixture(scope="module")
def recorded(record_run: RecordRun) -> Any:
    def tell(story: Story) -> None:
        story.until_contributing("node0", "node1", "node2")
        pose(story)
        posed_at = max(story.history)
        story.until(lambda: max(story.history) >= posed_at + 6, "the run goes on")
        peers = story.store.view(0).peers
        story.store.give_orders(lambda given: ban(given, "node2", peers))
        story.until_contributing("node0", "node1")
        story.until(lambda: not story.node("node2").is_running, "node2 ends")
        story.cluster.restart("node2", arguments=[])
        story.until(lambda: not story.node("node2").is_running, "node2 is refused")
        banned_at = max(story.history)
        story.until(lambda: max(story.history) >= banned_at + 2, "the run goes on")

    outer = ("diloco", "--outer.inner-steps", "10")
    return record_run(tell, outer=outer, ranks=(1, 1, 1), faults={}, steps_per_round=10)


def test_what_was_said_in_node0s_name_had_no_effect(recorded: Any) -> None:
    """Its own words count in every round: no weight that it did not bring, no round without it."""
    assert all("node0" in map(node_id_of_member, verdict.members) for verdict in recorded.history.values())
    assert max(weight for verdict in recorded.history.values() for weight in verdict.plan.weights) < 10**9
    assert not [e for events in recorded.events.values() for e in events if e["kind"] == "fenced"]


def test_events_name_whose_name_was_used_and_where(recorded: Any) -> None:
    told = [e for events in recorded.events.values() for e in events if e["kind"] == "impostor"]
    assert {node_id_of_member(e["member_id"]) for e in told} == {"node0"}
    assert any(":ready:" in e["where"] for e in told)
    assert [e for e in told if e["where"].startswith("127.0.0.1:")]


def test_banned_node_is_out_is_told_why_and_does_not_come_back(recorded: Any) -> None:
    last, (life,) = max(recorded.history), recorded.lives("node2")
    assert life.last < last - 1
    end = [e for e in recorded.events["node2"] if e["kind"] == "run_failed"]
    assert len(end) == 2
    for event in end:
        assert f"an operator banned this node (key {short_key(life.member_id)})" in event["error"]


def test_others_keep_their_inner_steps_when_one_is_banned(recorded: Any) -> None:
    """The round that was under way is opened again with all that they made for it."""
    (life,) = recorded.lives("node2")
    for round in (life.last + 1, life.last + 2):
        steps = recorded.history[round].plan.contributors()
        assert {node_id_of_member(member): made for member, made in steps.items()} == {"node0": 10, "node1": 10}


def test_node_keeps_its_key_over_restarts(recorded: Any) -> None:
    keys = {path.stat().st_mode & 0o777 for path in recorded.run_dir.rglob("node.key")}
    assert keys == {0o600} and len({p.read_bytes() for p in recorded.run_dir.rglob("node.key")}) == 3
