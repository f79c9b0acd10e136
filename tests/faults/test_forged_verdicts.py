"""Three real nodes, and somebody with their token who commits rounds by himself: no member believes such a verdict."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import redis
from tests.faults.conftest import Story

from zeroband.elastic.membership.keys import NodeKey, RunKey
from zeroband.elastic.membership.records import RoundPlan, Verdict
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.view import node_id_of_member

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.timeout(600)]

TOKEN, STEPS, STOLEN = "sesame", 10, 1000
NODES = ("node0", "node1", "node2")


def forged(plan: RoundPlan, after: Verdict) -> Verdict:
    """A verdict by which the run has gone on by a thousand steps that nobody made."""
    progress = after.record["progress"]
    return Verdict(
        plan, "made up", {**after.record, "progress": {**progress, "inner_step": progress["inner_step"] + STOLEN}}
    )


def commit_alone(story: Story) -> None:
    """Write verdicts on the round that is under way, on one that nobody opened, and on one without node2."""
    key = RunKey.of(TOKEN, story.cluster.run_id, node=NodeKey.new())
    url = story.cluster.store_url
    assert url is not None
    with closing(RedisStore(url, story.cluster.run_id, key=key, retry_s=30.0)) as store:
        client = redis.Redis.from_url(url)

        def write(ahead: int, *, without: str = "") -> None:
            def is_open() -> bool:
                plan, committed = (view := store.view(0)).plan, view.committed
                return plan is not None and committed is not None and plan.round > committed.round

            story.until(is_open, "a round is open")
            view = store.view(0)
            assert view.plan is not None and view.committed is not None
            plan = view.plan
            if ahead:
                gone = tuple(m for m in plan.members if node_id_of_member(m) == without)
                left = [place for place, member in enumerate(plan.members) if member not in gone]
                lists = ("members", "weights", "steps", "steps_requested", "largest")
                said = {name: getattr(plan, name) for name in lists if getattr(plan, name)}
                kept = {name: tuple(values[place] for place in left) for name, values in said.items()}
                plan = replace(plan, version=plan.version + 1, round=plan.round + ahead, late=gone, **kept)
            client.set(store.keys.committed, store.verifier.seal_verdict(forged(plan, view.committed)))
            written = view.committed.round
            story.until(lambda: max(story.history) >= written + 3, "the run goes on")

        write(0)
        write(4)
        write(1, without="node2")


@pytest.fixture(scope="module")
def recorded(record_run: Callable[..., Any]) -> Any:
    def tell(story: Story) -> None:
        story.until_contributing(*NODES)
        commit_alone(story)

    outer = ("diloco", "--outer.inner-steps", str(STEPS))
    return record_run(tell, outer=outer, ranks=(1, 1, 1), faults={}, steps_per_round=STEPS)


def test_nobody_believes_a_verdict_that_the_members_did_not_vote_for(recorded: Any) -> None:
    """Rounds follow one another by as many steps as were made, all nodes in each, and none is put out."""
    rounds = sorted(recorded.history)
    steps = {round: recorded.history[round].record["progress"]["inner_step"] for round in rounds}
    made = {round: max(recorded.history[round].plan.steps) for round in rounds}
    assert all(steps[later] - steps[round] == made[later] <= STEPS for round, later in pairwise(rounds))
    assert all(verdict.digest != "made up" for verdict in recorded.history.values())
    for node in NODES:
        committed = [e for e in recorded.events[node] if e["kind"] == "round_committed"]
        assert [e["round"] for e in committed] == sorted(e["round"] for e in committed)
        assert not [e for e in recorded.events[node] if e["kind"] in ("fenced", "left_behind", "rejoined")]
        assert len(recorded.lives(node)) == 1
