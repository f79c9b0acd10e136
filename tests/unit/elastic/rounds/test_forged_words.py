"""Members of a round in which somebody with the token writes in the name of one of them, on a real Redis.

No member verifies the others' signatures at first (`membership.proofs`): the one whose name is used notices it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.memberships import a_member

from zeroband.config.time_outs import TimeOuts
from zeroband.elastic.membership.keys import NodeKey, RunKey
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.records import Ready, RoundPlan, Verdict
from zeroband.elastic.membership.round_rules import Rules, Wait, next_plan
from zeroband.elastic.rounds.member import Member
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import Fenced, PeerLost
from zeroband.node.shared_flags import SharedFlags

NAMES = ("a", "b", "c")
TIME_OUTS = TimeOuts(60.0, 60.0, renew_s=60.0, watch_s=60.0, hung_s=300.0, gloo_timeout_s=600.0, store_s=3600.0)
SHAPE = RunShape(total_steps=1000, batch_size=4, sample_tokens=8)
RULES = Rules(start_nodes=len(NAMES), shape=SHAPE)
NEVER_S = float("inf")
READY = Ready(1, 8, "state", 1, 1)


class Crowd:
    """Three members that founded a run, each with a store; and one more with their token."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        """By whom, of what kind, with what."""
        self._threads = stack.enter_context(ThreadPoolExecutor(len(NAMES)))
        self.poser = stack.enter_context(closing(RedisStore(url, "run", key=_key(), lease_s=60.0, retry_s=5.0)))
        self.members = {name: self._member(name, url, folder, stack) for name in NAMES}
        self._go(Ready(0, 0, "state", 0, 1))

    def _member(self, name: str, url: str, folder: Path, stack: ExitStack) -> Member:
        key = _key()
        assert key.node is not None
        store = stack.enter_context(closing(RedisStore(url, "run", key=key, lease_s=60.0, retry_s=5.0)))
        flags = SharedFlags(folder / f"flags-{name}", create=True)
        stack.callback(flags.close)

        def tell(kind: str, **fields: Any) -> None:
            self.events.append((name, kind, fields))

        store.verifier.on_forgery = lambda place, member: tell("impostor", member_id=member)
        member_id, shared = key.node.new_member_id(name), store.found_or_match({})
        member = a_member(store, member_id, flags, shared=shared, time_outs=TIME_OUTS, on_event=tell)
        stack.callback(member.close)
        return member

    def id_of(self, name: str) -> str:
        return self.members[name].member_id

    def arrive(self, *names: str) -> None:
        for name in names:
            self.members[name].announce_ready(READY, start_nodes=len(NAMES))

    def go_on(self) -> Verdict:
        """Have those that are at the boundary commit the round, from where they stand."""
        return self._go(None)

    def _go(self, ready: Ready | None) -> Verdict:
        going = [self._threads.submit(self._round, member, ready) for member in self.members.values()]
        verdicts = [done.result() for done in going]
        assert all(verdict == verdicts[0] for verdict in verdicts)
        return verdicts[0]

    def _round(self, member: Member, ready: Ready | None) -> Verdict:
        round = READY.round if ready is None else ready.round
        if ready is not None:
            member.announce_ready(ready, start_nodes=len(NAMES))
        while True:
            try:
                turn = member.await_turn(round, RULES, is_member=round > 0, start_deadline_s=NEVER_S)
            except Fenced:  # the others may have committed the round with the vote that it gave before
                turn = member.look(round).committed
                if turn is None or member.member_id not in turn.members:
                    raise
            if isinstance(turn, Verdict):
                return turn
            try:
                member.vote(turn, "digest", record_of(turn))
                return member.await_verdict(turn, record_of(turn))
            except PeerLost:
                continue


def record_of(plan: RoundPlan) -> dict[str, Any]:
    """Each member is dealt the samples of a step."""
    return {"progress": Progress.at_start().begin(plan, SHAPE, after_round=None).to_record(), "session": "s" * 16}


def _key() -> RunKey:
    return RunKey(b"k" * 32, NodeKey.new())


@pytest.fixture
def crowd(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    monkeypatch.setattr("zeroband.elastic.store.record_verifier.random.random", lambda: 1.0)  # nothing by lot
    with ExitStack() as stack:
        yield Crowd(redis_url, tmp_path, stack)


def forge(crowd: Crowd, client: redis.Redis, name: str, said: Ready) -> None:
    """Write over what a member said of round 1."""
    raw = crowd.poser.verifier.seal_ready(crowd.id_of(name), said)
    client.hset(crowd.poser.keys.ready(1), crowd.id_of(name), raw)


def impostors(crowd: Crowd) -> set[str]:
    return {fields["member_id"] for _, kind, fields in crowd.events if kind == "impostor"}


def test_round_without_forgeries_is_opened_once(crowd: Crowd) -> None:
    crowd.arrive("a", "b", "c")
    verdict = crowd.go_on()
    assert verdict.plan.weights == (8, 8, 8) and verdict.plan.retries == 0 and crowd.events == []


def test_member_refuses_a_plan_that_says_of_it_what_it_did_not_say(crowd: Crowd, redis_client: redis.Redis) -> None:
    """Its proposer took a forged record for that member's.

    Once the member has written its own record again, others may see that the plan does not follow from it, too.
    """
    crowd.arrive("a", "b")
    forge(crowd, redis_client, "b", replace(READY, weight=7))
    crowd.arrive("c")
    verdict = crowd.go_on()
    assert verdict.plan.weights == (8, 8, 8) and verdict.plan.retries == 1 and verdict.plan.blames == ()
    refused = [(name, fields["reason"]) for name, kind, fields in crowd.events if kind == "plan_refused"]
    assert "b" in {name for name, _ in refused} and all("its weights of" in reason for _, reason in refused), refused
    assert impostors(crowd) == {crowd.id_of("b")}


def test_member_refuses_a_wrong_number_of_its_own_though_it_reads_no_records(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run too large for all to read the records of all. The members drawn for that are the liar's friends."""

    def drawn(plan: RoundPlan) -> tuple[str, ...]:
        return (crowd.id_of("a"),)

    monkeypatch.setattr("zeroband.elastic.rounds.member.checkers", drawn)
    crowd.arrive("a", "b", "c")
    liar, honest = crowd.members["c"], crowd.members["b"]
    view = liar.store.view(1)
    due = next_plan(view, 1, RULES)
    assert isinstance(due, RoundPlan) and view.plan is not None
    lie = liar.store.signed(replace(due, weights=(8, 7, 8), before=view.plan.id), liar.member_id)
    assert liar.store.propose_plan(lie, current=view.plan)
    seen = honest.store.await_change(1, None, within_s=0.0, whole=False)
    assert seen.unseen_ready and seen.plan is not None and seen.plan.weights == (8, 7, 8)
    decision = honest.turn_rule(1, RULES, is_member=True, start_deadline_s=NEVER_S).decide(seen)
    assert isinstance(decision, Wait) and "weights of" in decision.reason
    assert [(name, kind) for name, kind, _ in crowd.events] == [("b", "plan_refused")]


FORGERIES = {"state": {"state_digest": "another"}, "nothing": {"weight": 0, "steps": 0}, "too much": {"weight": 10**6}}


@pytest.mark.parametrize("said", [replace(READY, **changes) for changes in FORGERIES.values()], ids=FORGERIES)
def test_forged_record_leaves_its_member_neither_out_nor_without_weight(
    crowd: Crowd, redis_client: redis.Redis, said: Ready
) -> None:
    crowd.arrive("a", "b")
    forge(crowd, redis_client, "b", said)
    crowd.arrive("c")
    verdict = crowd.go_on()
    assert verdict.plan.weights == (8, 8, 8) and verdict.plan.retries == 0
    assert impostors(crowd) == {crowd.id_of("b")} and {kind for _, kind, _ in crowd.events} == {"impostor"}


def test_word_of_a_member_that_is_not_there_yet_is_its_own_once_it_comes(
    crowd: Crowd, redis_client: redis.Redis
) -> None:
    crowd.arrive("a")
    crowd.poser.announce_ready(crowd.id_of("b"), replace(READY, weight=7))
    crowd.arrive("c", "b")
    assert crowd.go_on().plan.weights == (8, 8, 8)
    assert impostors(crowd) == {crowd.id_of("b")}


def test_forged_vote_ends_no_round(crowd: Crowd, redis_client: redis.Redis) -> None:
    """Votes that differ are verified before they say that the members hold different results."""
    crowd.arrive("a", "b", "c")
    for name in ("c", "a", "b"):
        plan = crowd.members[name].await_turn(1, RULES, is_member=True, start_deadline_s=NEVER_S)
        assert isinstance(plan, RoundPlan)
        crowd.members[name].vote(plan, "digest", record_of(plan))
    forged = crowd.poser.verifier.seal_vote(crowd.id_of("a"), plan, "worse")
    redis_client.hset(crowd.poser.keys.votes, crowd.id_of("a"), forged)
    last = crowd.members["c"]
    seen = last.store.await_change(1, None, within_s=0.0)
    assert isinstance(last.verdict_rule(plan, record_of(plan)).decide(seen), Wait)
    verdict = crowd.go_on()
    assert verdict.plan == plan and verdict.digest == "digest"
    assert impostors(crowd) == {crowd.id_of("a")}
