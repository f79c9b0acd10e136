"""A membership on a real Redis, its waiting included; only the guardian's process is taken out."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.memberships import LeaseInMemory
from tests.unit.elastic.conftest import until

from zeroband.config.time_outs import TimeOuts
from zeroband.elastic.guardian.link_report import LinkSeen, LinkWriter
from zeroband.elastic.guardian.process import GuardianOrder, ListenAddress
from zeroband.elastic.membership.ballots import vote_for
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.orders import drain, pause, resume
from zeroband.elastic.membership.records import Evidence, Peer, Ready, RoundPlan, Verdict, View
from zeroband.elastic.membership.round_rules import Rules, Wait, next_plan
from zeroband.elastic.rounds.member import Member, NodeIdentity, RunAccess, new_member_id
from zeroband.elastic.rounds.waits import StragglerTimer
from zeroband.elastic.store.connection import StoreClient
from zeroband.elastic.store.interface import Store
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.handover import Inbox
from zeroband.errors import Fenced, Leaving, PeerLost
from zeroband.node.shared_flags import SharedFlags
from zeroband.tools.plan.forecast import STORE_TRIPS

RULES = Rules()
TIME_OUTS = TimeOuts(0.5, 0.5, renew_s=0.1, watch_s=0.05, hung_s=300.0, gloo_timeout_s=600.0, store_s=3600.0)
NEVER_S = float("inf")
SHARED = {"model.d_model": "256"}
MakeMember = Callable[..., Member]


@dataclass
class Guardians:
    """All that were started, and whether the machine starts more of them."""

    store: Store
    started: list[LeaseInMemory] = field(default_factory=list[LeaseInMemory])
    is_out_of_memory: bool = False

    def start(self, order: GuardianOrder, inbox: Inbox | None) -> LeaseInMemory:
        if self.is_out_of_memory:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        self.started.append(LeaseInMemory(self.store, order))
        return self.started[-1]

    @property
    def are_first(self) -> list[bool]:
        """Whether each was to take a lease, or to find out whether its member still has one."""
        return [guardian.order.is_first for guardian in self.started]


@pytest.fixture
def guardians(store: RedisStore) -> Guardians:
    return Guardians(store)


@pytest.fixture
def make_member(tmp_path: Path, store: RedisStore, guardians: Guardians) -> Iterator[MakeMember]:
    members: list[Member] = []
    boards: list[SharedFlags] = []

    def make(node_id: str, departure: Departure | None = None, **more: Any) -> Member:
        boards.append(SharedFlags(tmp_path / f"flags-{node_id}", create=True))
        identity = NodeIdentity(node_id, ListenAddress("host"), (), 0, tmp_path)
        access: dict[str, Any] = {"store": store, "start_guardian": guardians.start, **more}
        run = RunAccess(store_url="unused", run_id="run", shared=store.found_or_match(SHARED), **access)
        members.append(Member(run, identity, boards[-1], TIME_OUTS, departure or Departure(grace_s=1000.0)))
        return members[-1]

    yield make
    for member in members:
        member.close()
    for flags in boards:
        flags.close()


def board_of(tmp_path: Path, node_id: str) -> SharedFlags:
    return SharedFlags(tmp_path / f"flags-{node_id}", create=False)


def found(*members: Member) -> RoundPlan:
    """Open round 0 to these members."""
    for member in members:
        member.announce_ready(Ready(0, 0, "s"))
    plans = [turn_of(member, 0, Rules(start_nodes=len(members))) for member in members]
    assert all(isinstance(o, RoundPlan) and set(o.members) == {m.member_id for m in members} for o in plans)
    assert len(set(plans)) == 1 and isinstance(plans[0], RoundPlan)
    return plans[0]


def turn_of(member: Member, round: int, rules: Rules = RULES, *, is_member: bool = True) -> RoundPlan | Verdict:
    return member.await_turn(round, rules, is_member=is_member, start_deadline_s=NEVER_S)


def commit(plan: RoundPlan | Verdict, *members: Member) -> list[Verdict]:
    assert isinstance(plan, RoundPlan)
    for member in members:
        member.vote(plan, "d", {"n": 1})
    return [member.await_verdict(plan, {"n": 1}) for member in members]


def commit_together(plan: RoundPlan, members: Sequence[Member]) -> None:
    """As `commit`, for members with a store each: all vote before one waits."""
    for member in members:
        member.vote(plan, "d", {"n": 1})
    for member in members:
        member.await_verdict(plan, {"n": 1})


def three_at_a_boundary(make_member: MakeMember, open_store: Callable[..., RedisStore]) -> list[Member]:
    """a, b and c, with a store each, after round 0 and ready for round 1."""
    members = [make_member(node, store=open_store()) for node in "abc"]
    commit_together(found(*members), members)
    for member in members:
        member.announce_ready(Ready(1, 5, "s"))
    return members


def expire(member: Member) -> None:
    member.store.expire_lease(member.member_id)


def renew(member: Member, *cut_off: Member) -> bool:
    peer = Peer("node", "host", 1, False, tuple(other.member_id for other in cut_off))
    return member.store.renew_lease(member.member_id, peer) is not None


def settle(client: redis.Redis, member: Member) -> None:
    """End the time that members get to bring a lost record back, without waiting for it."""
    client.hset(member.store.keys.clock, "settling_until_ms", 0)


def test_every_membership_of_a_node_has_an_id_of_its_own() -> None:
    first, second = new_member_id("node"), new_member_id("node")
    assert first != second and first.startswith("node#")


def test_members_open_and_commit_a_round(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    plan = found(a, b)
    assert commit(plan, a, b) == [Verdict(plan, "d", {"n": 1})] * 2


def test_last_of_a_round_asks_the_store_as_often_as_the_plan_counts(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a long way to the store, each of them is a round trip for which per-step methods stand still."""
    a, b = make_member("a"), make_member("b")
    commit(found(a, b), a, b)
    a.announce_ready(Ready(1, 5, "s"))
    trips: list[bool] = []
    execute = StoreClient.execute_command

    def counted(*asked: Any, **options: Any) -> Any:
        trips.append(threading.current_thread() is threading.main_thread())  # and not a watcher
        return execute(*asked, **options)

    def last(*acts: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(StoreClient, "execute_command", counted)
            return [act() for act in acts][-1]

    plan = last(lambda: b.announce_ready(Ready(1, 5, "s")), lambda: turn_of(b, 1))
    assert turn_of(a, 1) == plan
    a.vote(plan, "d", {})
    verdict = last(lambda: b.vote(plan, "d", {}), lambda: b.await_verdict(plan, {}))
    assert a.await_verdict(plan, {}) == verdict
    assert trips.count(True) == STORE_TRIPS


def test_first_of_a_round_asks_the_store_no_more_often(
    make_member: MakeMember, open_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It checks the plan by the records of all members, which the look shows that brings the plan."""
    first, last = make_member("a", store=open_store()), make_member("b", store=open_store())
    monkeypatch.setattr("zeroband.elastic.rounds.member._LOOK_S", 30.0)
    execute, trips = StoreClient.execute_script, Counter[str]()

    def counted(*asked: Any, **options: Any) -> Any:
        trips[threading.current_thread().name] += 1
        return execute(*asked, **options)

    def play(member: Member, round: int, until: threading.Event, then: threading.Event) -> Verdict:
        until.wait()
        member.announce_ready(Ready(round, 5 * round, "s"), start_nodes=2)
        then.set()
        plan = turn_of(member, round, Rules(start_nodes=2))
        return commit(plan, member)[0]

    with ThreadPoolExecutor(1, "first") as threads:
        for round in (0, 1):
            monkeypatch.setattr(StoreClient, "execute_script", counted if round else execute)
            now, announced = threading.Event(), threading.Event()
            now.set()
            verdict = threads.submit(play, first, round, now, announced)
            assert play(last, round, announced, now) == verdict.result()
    assert trips["first_0"] == STORE_TRIPS


def test_last_of_the_founders_opens_the_run_by_its_first_look(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = make_member("a"), make_member("b")
    for member in (first, last):
        member.announce_ready(Ready(0, 0, "s"), start_nodes=2)
    monkeypatch.setattr(last.store, "await_change", lambda *_, **__: pytest.fail("it has to look again"))
    plan = turn_of(last, 0, Rules(start_nodes=2))
    assert isinstance(plan, RoundPlan) and set(plan.members) == {first.member_id, last.member_id}


def test_word_that_is_on_its_way_is_not_lost_to_another_thread(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bringing it back would have every member read all of the run anew."""
    member, restored, looks = make_member("a"), list[object](), list[threading.Thread]()
    plan = found(member)
    monkeypatch.setattr(member.store, "restore", restored.append)
    vote, await_change = member.store.vote, member.store.await_change

    def look_before(*of: Any, **options: Any) -> View:
        member.look_after_record()
        return vote(*of, **options)

    def vote_after_look(*of: Any, **options: Any) -> View:
        seen = await_change(*of, **options)
        if not looks:
            looks.append(threading.Thread(target=member.vote, args=[plan, "d", {}]))
            looks[0].start()
            looks[0].join()
        return seen

    monkeypatch.setattr(member.store, "vote", look_before)
    monkeypatch.setattr(member.store, "await_change", vote_after_look)
    member.look_after_record()
    assert looks and member.look(0).votes == {member.member_id: vote_for("d", {})} and restored == []


@pytest.mark.parametrize("proposer", ["a", "b", "c"])
@pytest.mark.defect(3)
def test_any_member_opens_and_commits_when_the_others_are_silent(make_member: MakeMember, proposer: str) -> None:
    """A predecessor's followers polled for ever when their leader died: here one alone brings a round to its end."""
    members = {name: make_member(name) for name in "abc"}
    for member in members.values():
        member.announce_ready(Ready(0, 0, "s"))
    plan = turn_of(members[proposer], 0, Rules(start_nodes=3))
    assert isinstance(plan, RoundPlan)
    for member in members.values():
        member.vote(plan, "d", {})
    assert members[proposer].await_verdict(plan, {}).members == plan.members


@pytest.mark.parametrize("dead", range(3))
@pytest.mark.defect(1)
def test_members_go_on_without_any_one_that_died(make_member: MakeMember, dead: int) -> None:
    """A predecessor compared integer ranks with string ids: nobody was ever evicted."""
    members = [make_member(name) for name in "abc"]
    found(*members)
    expire(members[dead])
    left = [member for member in members if member is not members[dead]]
    for member in left:
        assert turn_of(member, 0).members == tuple(sorted(m.member_id for m in left))


def test_one_member_does_not_go_on_alone_while_the_others_leases_are_lost(
    make_member: MakeMember, open_store: Callable[..., RedisStore], redis_client: redis.Redis
) -> None:
    """A damaged store shows one member alive, until the guardians of the others renew their leases."""
    a, b, c = members = three_at_a_boundary(make_member, open_store)
    leases = {other.member_id: redis_client.zscore("zeroband:{run}:leases", other.member_id) for other in (b, c)}
    redis_client.zrem("zeroband:{run}:leases", *leases)
    with ThreadPoolExecutor(3) as threads:
        turn = threads.submit(turn_of, a, 1)
        time.sleep(TIME_OUTS.lease_s / 2)
        assert not turn.done()
        redis_client.zadd("zeroband:{run}:leases", leases)
        plans = [turn.result(), *(threads.submit(turn_of, member, 1).result() for member in (b, c))]
    assert len(set(plans)) == 1 and isinstance(plans[0], RoundPlan)
    assert plans[0].members == tuple(sorted(member.member_id for member in members))


def test_one_member_refuses_a_round_of_its_own_that_another_opened_without_the_living(
    make_member: MakeMember, open_store: Callable[..., RedisStore], redis_client: redis.Redis
) -> None:
    """Else the liar's victim commits alone what the others refuse, and the run stands still."""
    a, b, c = three_at_a_boundary(make_member, open_store)
    view = c.look(1)
    honest = next_plan(view, 1, RULES)
    assert isinstance(honest, RoundPlan) and view.plan is not None
    ready = {a.member_id: view.ready[a.member_id]}
    lie = next_plan(replace(view, alive=frozenset({a.member_id}), ready=ready), 1, RULES)
    assert isinstance(lie, RoundPlan) and lie.members == (a.member_id,)
    assert c.store.propose_plan(c.store.signed(replace(lie, before=view.plan.id), c.member_id), current=view.plan)
    with ThreadPoolExecutor(3) as threads:
        turn = threads.submit(turn_of, a, 1)
        time.sleep(TIME_OUTS.lease_s / 2)
        assert not turn.done()
        turns = [turn, *(threads.submit(turn_of, member, 1) for member in (b, c))]
        while not all(turn.done() for turn in turns):
            settle(redis_client, a)
            time.sleep(0.05)
        plans = [turn.result() for turn in turns]
    assert {plan.members for plan in plans if isinstance(plan, RoundPlan)} == {honest.members}


def test_attempt_that_a_member_ended_is_not_run_again_where_a_damaged_store_shows_it_once_more(
    make_member: MakeMember,
) -> None:
    """Whoever has not seen it end would get the member's messages twice, and take it for a liar."""
    a, b = make_member("a"), make_member("b")
    commit(found(a, b), a, b)
    for member in (a, b):
        member.announce_ready(Ready(1, 5, "s"))
    plan = turn_of(a, 1)
    assert turn_of(b, 1) == plan and isinstance(plan, RoundPlan)
    a.testify(plan, Evidence())  # as after PeerLost, when another plan seemed to be there
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(turn_of, a, 1)
        with pytest.raises(PeerLost, match="a member had ended this attempt before"):
            b.await_verdict(plan, {"n": 1})
        b.testify(plan, Evidence())
        again = turn_of(b, 1)
        assert isinstance(again, RoundPlan) and ended.result() == again
    assert again.version == plan.version + 1 and again.members == plan.members and not again.blames


def test_last_living_member_goes_on_after_a_lease(make_member: MakeMember) -> None:
    a, b, c = make_member("a"), make_member("b"), make_member("c")
    commit(found(a, b, c), a, b, c)
    expire(b)
    expire(c)
    a.announce_ready(Ready(1, 5, "s"))
    from_s = time.monotonic()
    plan = turn_of(a, 1)
    assert isinstance(plan, RoundPlan) and plan.members == (a.member_id,)
    assert time.monotonic() - from_s >= TIME_OUTS.lease_s


def test_who_saw_a_loss_stops_the_round_for_everybody(make_member: MakeMember) -> None:
    """The lost one comes back and votes: nobody may commit any more what one of them has dropped."""
    a, b, c = (make_member(name) for name in "abc")
    plan = found(a, b, c)
    a.vote(plan, "d", {})
    c.vote(plan, "d", {})
    expire(b)
    with pytest.raises(PeerLost, match=f"{b.member_id} lost"):
        a.await_verdict(plan, {})
    assert renew(b)
    b.vote(plan, "d", {})
    with pytest.raises(PeerLost, match=f"{b.member_id} lost"):
        c.await_verdict(plan, {})
    for member in (a, b, c):
        member.testify(plan, Evidence())
    again = [turn_of(member, 0) for member in (a, b, c)]
    assert again == [replace(plan, version=2, epoch=2, retries=1, before=plan.id)] * 3


def test_who_saw_a_loss_too_late_takes_the_verdict(make_member: MakeMember, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_member("a"), make_member("b")
    plan = found(a, b)
    a.vote(plan, "d", {})
    expire(b)
    outdated = a.store.view(0)
    assert renew(b)
    b.vote(plan, "d", {})
    verdict = b.await_verdict(plan, {})
    looks, fresh = iter([outdated]), a.store.view
    monkeypatch.setattr(a.store, "view", lambda round: next(looks, None) or fresh(round))
    assert a.await_verdict(plan, {}) == verdict


def test_different_results_open_the_round_again(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    plan = found(a, b)
    a.vote(plan, "d", {})
    b.vote(plan, "damaged", {})
    for member in (a, b):
        with pytest.raises(PeerLost, match="hold different results"):
            member.await_verdict(plan, {})
        member.testify(plan, Evidence())
    again = turn_of(a, 0)
    assert isinstance(again, RoundPlan) and (again.version, again.retries, again.members) == (2, 1, plan.members)


def test_who_differs_time_and_again_is_left_out(make_member: MakeMember) -> None:
    """A machine that computes wrongly must not stop the run, nor write into it."""
    a, b, c = (make_member(name) for name in "abc")
    plan: RoundPlan | Verdict = found(a, b, c)
    for _ in range(3):
        assert isinstance(plan, RoundPlan)
        for member, digest in ((a, "odd"), (b, "d"), (c, "d")):
            member.vote(plan, digest, {})
        with pytest.raises(PeerLost, match="hold different results"):
            b.await_verdict(plan, {})
        for member in (a, b, c):
            member.testify(plan, Evidence())
        plan = turn_of(b, 0)
    assert plan.members == (b.member_id, c.member_id)


def test_vote_that_does_not_come_ends_the_round_for_those_who_voted(make_member: MakeMember) -> None:
    now_s = [0.0]
    a, b, c, d = (make_member(name, clock=lambda: now_s[0]) for name in "abcd")
    plan = found(a, b, c, d)
    decide = a.verdict_rule(plan, {}).decide
    for member in (a, b):
        member.vote(plan, "d", {})
    for waited_s in (0.0, TIME_OUTS.hung_s):  # the others may have slower links
        now_s[0] += waited_s
        assert isinstance(decide(a.look(0)), Wait)
    c.vote(plan, "d", {})
    assert isinstance(decide(a.look(0)), Wait)
    now_s[0] += TIME_OUTS.hung_s
    with pytest.raises(PeerLost, match="1 members do not vote, although most have"):
        decide(a.look(0))


def test_failure_that_one_reports_reaches_all(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    plan = found(a, b)
    a.report_failure(plan, "lane 1 broke")
    b.vote(plan, "d", {})
    with pytest.raises(PeerLost, match=f"{a.member_id}: lane 1 broke"):
        b.await_verdict(plan, {})


def test_member_is_fenced_by_a_round_that_was_committed_without_it(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    plan = found(a, b)
    a.vote(plan, "d", {})
    expire(b)
    with pytest.raises(PeerLost):
        a.await_verdict(plan, {})
    commit(turn_of(a, 0), a)
    with pytest.raises(Fenced, match="committed without b#"):
        b.await_verdict(plan, {})
    with pytest.raises(Fenced, match="round 0 was committed"):
        turn_of(b, 0)


def test_member_is_fenced_by_its_board(make_member: MakeMember, tmp_path: Path) -> None:
    a = make_member("a")
    board_of(tmp_path, "a").set_fenced(True)
    with pytest.raises(Fenced, match="ran out and the run went on"):
        turn_of(a, 0)


def test_new_membership_is_not_fenced(make_member: MakeMember, tmp_path: Path) -> None:
    SharedFlags(tmp_path / "flags-a", create=True).set_fenced(True)
    found(make_member("a"))


def test_waiting_shows_the_guardian_that_the_trainer_moves(make_member: MakeMember, tmp_path: Path) -> None:
    found(make_member("a"))
    assert board_of(tmp_path, "a").progress > 0


def test_joiner_learns_of_the_round_that_it_missed(make_member: MakeMember) -> None:
    a, joiner = make_member("a"), make_member("j")
    verdicts = commit(found(a), a)
    assert turn_of(joiner, 0, is_member=False) == verdicts[0]


def test_joiner_is_let_in_at_the_next_boundary(make_member: MakeMember) -> None:
    a, joiner = make_member("a"), make_member("j")
    commit(found(a), a)
    joiner.announce_ready(Ready(1, 0, "s"))
    a.announce_ready(Ready(1, 5, "s"))
    admitted = turn_of(joiner, 1, is_member=False)
    assert isinstance(admitted, RoundPlan) and admitted.members == (a.member_id, joiner.member_id)
    assert turn_of(a, 1) == admitted


# -- members that are late --------------------------------------------------------------------------------------------


def test_those_who_wait_leave_a_straggler_behind_after_the_deadline(make_member: MakeMember) -> None:
    a, b, c = (make_member(name) for name in "abc")
    commit(found(a, b, c), a, b, c)
    for member in (a, b):
        member.announce_ready(Ready(1, 5, "s", 4, 4))
    plan = turn_of(a, 1, Rules(straggler_deadline_s=0.02))
    assert isinstance(plan, RoundPlan)
    assert (plan.members, plan.late) == ((a.member_id, b.member_id), (c.member_id,))


def test_straggler_learns_of_the_round_that_it_missed_and_takes_part_in_a_later_one(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    commit(found(a, b), a, b)
    a.announce_ready(Ready(1, 5, "s", 4, 4))
    missed = commit(turn_of(a, 1, Rules(straggler_deadline_s=0.0)), a)
    b.announce_ready(Ready(1, 7, "s"))
    assert turn_of(b, 1) == missed[0], "no fence: it was only late"
    for member, weight in ((a, 5), (b, 7)):
        member.announce_ready(Ready(2, weight, "s"))
    both = turn_of(b, 2)
    assert isinstance(both, RoundPlan) and both.weights == (5, 7) and both.late == ()
    assert turn_of(a, 2) == both


def test_straggler_that_comes_in_time_is_waited_for(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    commit(found(a, b), a, b)
    a.announce_ready(Ready(1, 5, "s", 4, 4))
    arrival = threading.Timer(0.05, b.announce_ready, args=(Ready(1, 7, "s", 4, 4),))
    arrival.start()
    plan = turn_of(a, 1, Rules(straggler_deadline_s=1000.0))
    arrival.join()
    assert plan.members == (a.member_id, b.member_id)


def test_grace_begins_with_the_quorum_and_goes_with_the_phase_before_it(make_member: MakeMember) -> None:
    a, b, c = (make_member(name) for name in "abc")
    commit(found(a, b, c), a, b, c)
    waiting = StragglerTimer(Rules(straggler_grace=0.1), settled_at_s=100.0)
    a.announce_ready(Ready(1, 5, "s", 4, 4))
    assert not waiting.are_late(a.store.view(1), 150.0) and waiting.left_s(150.0) == math.inf
    b.announce_ready(Ready(1, 5, "s", 4, 4))
    assert not waiting.are_late(a.store.view(1), 160.0)
    assert (waiting.phase_s, waiting.left_s(160.0)) == (60.0, 6.0)
    assert not waiting.are_late(a.store.view(1), 165.9) and waiting.are_late(a.store.view(1), 166.0)


def test_whose_grace_is_over_proposes_at_once_and_looks_no_later(make_member: MakeMember) -> None:
    now_s = [0.0]
    a, b, c = (make_member(name, clock=lambda: now_s[0]) for name in "abc")
    commit(found(a, b, c), a, b, c)
    now_s[0] = 60.0
    for member in (a, b):
        member.announce_ready(Ready(1, 5, "s", 4, 4))
    rule = b.turn_rule(1, Rules(straggler_grace=0.1), is_member=True, start_deadline_s=NEVER_S)
    view = b.look(1)
    assert isinstance(rule.decide(view), Wait) and rule.proposers(view) == (a.member_id, b.member_id, c.member_id)
    now_s[0] += rule.left_s()
    assert rule.proposers(view) == (b.member_id,)
    plan = rule.decide(view)
    assert isinstance(plan, RoundPlan) and plan.late == (c.member_id,)
    assert now_s[0] == pytest.approx(66.0)


# -- members that are cut off from each other -------------------------------------------------------------------------


def test_round_goes_on_without_a_member_that_another_one_does_not_reach(make_member: MakeMember) -> None:
    a, b, c = (make_member(name) for name in "abc")
    plan = found(a, b, c)
    renew(a, c)
    renew(b, c)
    with pytest.raises(PeerLost, match="lost during round 0"):
        a.await_verdict(plan, {})
    assert turn_of(a, 0).members == (a.member_id, b.member_id)


def test_member_that_others_do_not_reach_is_fenced(make_member: MakeMember) -> None:
    a, b, c = (make_member(name) for name in "abc")
    commit(found(a, b, c), a, b, c)
    renew(a, c)
    for member in (a, b, c):
        member.announce_ready(Ready(1, 5, "s"))
    assert turn_of(a, 1).members == (a.member_id, b.member_id)
    with pytest.raises(Fenced, match="unreachable for others"):
        turn_of(c, 1)


# -- a node that leaves -----------------------------------------------------------------------------------------------


def test_node_that_leaves_waits_no_longer_than_it_may(make_member: MakeMember) -> None:
    departure = Departure(grace_s=0.0)
    a, _ = make_member("a", departure), make_member("b")
    a.announce_ready(Ready(0, 0, "s"))
    departure.ask(0.0)
    with pytest.raises(Leaving, match="did not reach round 0"):
        turn_of(a, 0, Rules(start_nodes=2))


# -- a store that lost its record -------------------------------------------------------------------------------------


def test_members_bring_the_record_back_into_an_empty_store(make_member: MakeMember, redis_client: redis.Redis) -> None:
    a, b = make_member("a"), make_member("b")
    verdict = commit(found(a, b), a, b)[0]
    for member in (a, b):
        member.announce_ready(Ready(1, 5, "s"))
    before = a.look(1)
    redis_client.flushall()
    assert renew(a) and renew(b)
    b.look(1)
    view = a.look(1)
    assert view.is_settling and view.committed == verdict and view.ready == before.ready
    assert b'"model.d_model": "256"' in (redis_client.get(a.store.keys.run) or b"")
    settle(redis_client, a)
    plan = turn_of(a, 1)
    assert isinstance(plan, RoundPlan) and plan.version == 2
    assert [v.round for v in (*commit(turn_of(b, 1), a, b), verdict)] == [1, 1, 0]


def test_member_brings_its_vote_back(make_member: MakeMember, redis_client: redis.Redis) -> None:
    a, b = make_member("a"), make_member("b")
    plan = found(a, b)
    a.vote(plan, "d", {})
    redis_client.flushall()
    assert renew(a) and renew(b)
    b.vote(plan, "d", {})
    b.look(0)
    a.look(0)
    settle(redis_client, a)
    assert a.await_verdict(plan, {}).plan == plan


def test_watcher_brings_the_record_back_while_the_trainer_is_busy(
    make_member: MakeMember, redis_client: redis.Redis
) -> None:
    """Inner steps may take minutes, and a joiner must not found the run a second time meanwhile."""
    a = make_member("a")
    verdict = commit(found(a), a)[0]
    redis_client.flushall()
    until(lambda: a.store.view(0).committed == verdict)


# -- during a transfer ------------------------------------------------------------------------------------------------


def test_watched_plan_is_aborted_on_the_board_when_a_member_is_lost(make_member: MakeMember, tmp_path: Path) -> None:
    a, b = make_member("a"), make_member("b")
    plan = found(a, b)
    a.watch(plan)
    expire(b)
    until(lambda: board_of(tmp_path, "a").aborted_version == plan.version)


def test_transfer_that_is_over_soon_has_the_store_asked_for_nothing(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, asked, turns = [0.0], list[float](), list[float]()
    a = make_member("a", clock=lambda: now_s[0])
    plan, await_news = found(a), a.await_news

    def ask(*of: Any) -> View:
        asked.append(now_s[0])
        return await_news(*of)

    monkeypatch.setattr(a, "await_news", ask)
    monkeypatch.setattr(a, "tell_links", lambda: turns.append(now_s[0]))
    a.watch(plan)
    turns.clear()
    until(lambda: len(turns) >= 3)
    assert asked == []
    now_s[0] = TIME_OUTS.watch_s
    until(lambda: asked != [])


def test_watched_plan_is_aborted_when_the_time_to_leave_is_over(make_member: MakeMember, tmp_path: Path) -> None:
    departure = Departure(grace_s=0.0)
    a = make_member("a", departure)
    plan = found(a)
    a.watch(plan)
    departure.ask(0.0)
    until(lambda: board_of(tmp_path, "a").aborted_version == plan.version)


def test_guardian_that_ended_is_replaced_by_one_that_respects_a_fence(
    make_member: MakeMember, guardians: Guardians
) -> None:
    make_member("a")
    guardians.started[0].is_dead = True
    until(lambda: len(guardians.started) == 2)
    assert guardians.are_first == [True, False]
    assert len({guardian.order.member_id for guardian in guardians.started}) == 1


def test_watcher_goes_on_while_no_guardian_can_be_started(
    make_member: MakeMember, guardians: Guardians, tmp_path: Path
) -> None:
    """A machine without memory for another process: transfers are aborted all the same, and later it starts."""
    a, b = make_member("a"), make_member("b")
    plan = found(a, b)
    guardians.is_out_of_memory = True
    guardians.started[0].is_dead = True
    a.watch(plan)
    expire(b)
    until(lambda: board_of(tmp_path, "a").aborted_version == plan.version)
    guardians.is_out_of_memory = False
    until(lambda: guardians.are_first == [True, True, False])


def test_members_wait_at_their_boundary_while_the_run_is_paused(make_member: MakeMember) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    a = make_member("a", on_event=lambda kind, **fields: told.append((kind, fields)))
    commit(found(a), a)
    a.store.give_orders(pause)
    a.announce_ready(Ready(1, 1, "s"))
    turns: list[RoundPlan | Verdict] = []
    waiting = threading.Thread(target=lambda: turns.append(turn_of(a, 1)))
    waiting.start()
    while not told:
        waiting.join(0.001)
    assert told == [("paused", {"round": 1})] and not turns
    a.store.give_orders(resume)
    waiting.join(timeout=10)
    assert [turn.round for turn in turns if isinstance(turn, RoundPlan)] == [1]
    assert [kind for kind, _ in told] == ["paused", "resumed"]


def test_member_that_an_operator_drains_is_asked_to_leave_without_hurry(make_member: MakeMember) -> None:
    departures = {node: Departure(grace_s=0.0) for node in "ab"}
    a, b = (make_member(node, departure) for node, departure in departures.items())
    a.store.give_orders(lambda given: drain(given, "a", {a.member_id: "a", b.member_id: "b"}))
    a.look(0), b.look(0)
    assert departures["a"].is_asked and not departures["a"].is_urgent and not departures["a"].is_overdue(1e9)
    assert not departures["b"].is_asked


# -- links ------------------------------------------------------------------------------------------------------------


def test_member_records_what_its_guardian_says_of_the_links(make_member: MakeMember, tmp_path: Path) -> None:
    told, is_told = list[tuple[str, dict[str, Any]]](), threading.Event()

    def note(kind: str, **fields: Any) -> None:
        told.append((kind, fields))
        is_told.set()

    a = make_member("a", on_event=note)
    LinkWriter(tmp_path, "b#1").write({a.member_id: LinkSeen(9, 9.0, is_cut_off=False)}, 0.0)
    LinkWriter(tmp_path, a.member_id).write({"b#1": LinkSeen(30, 12.5, is_cut_off=False)}, 0.0)
    assert is_told.wait(10)
    a.close()
    assert told == [
        ("links", {"links": [{"to": "b#1", "mbit_s": 30, "rtt_ms": 12.5, "is_cut_off": False, "way": "direct"}]})
    ]
