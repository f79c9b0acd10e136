"""What every store promises, from the start of a run to its end: who is first, who is fenced, what is forgotten.

On the store in memory, and on each version of a real server that is here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.declared_keys import refuse_undeclared_keys
from tests.memory_store import MemoryRecord, MemoryStore
from tests.servers import SERVERS, ServerProgram
from tests.stores import (
    SHARED,
    MemoryServer,
    RedisUnderTest,
    Server,
    a_peer,
    a_plan,
    a_verdict,
    commit,
    hold,
    known_to,
    open_next,
    renew,
)

from zeroband.elastic.membership.orders import Orders, drain, pause, resume, roll_back
from zeroband.elastic.membership.records import LinkRates, Ready, RestartPoint, RoundPlan, Verdict, View
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.interface import Store, record_of
from zeroband.errors import JoinRefused
from zeroband.tools.cluster import RedisServer

A, B, C = "a#1", "b#1", "c#1"
DEADLINE_S = 20.0


def name_of(program: ServerProgram | None) -> str:
    return "memory" if program is None else str(program)


@pytest.fixture(scope="module", params=[None, *SERVERS], ids=name_of)
def redis_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Each of the servers here in its turn; None: the memory of this process."""
    if request.param is None:
        yield None
        return
    with RedisServer(program=request.param.program) as server:
        yield server.url


@pytest.fixture
def server(redis_url: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    refuse_undeclared_keys(monkeypatch)
    server = MemoryServer() if redis_url is None else RedisUnderTest(redis_url)
    yield server
    server.close()


@pytest.fixture
def store(server: Server) -> Store:
    return server.open()


# -- a run from start to end -------------------------------------------------------------------------------------------


def test_view_of_a_run_that_has_not_begun_is_empty(store: Store) -> None:
    assert store.view(0) == View(None, None, frozenset(), {}, {}, None, is_known=False)
    assert store.history() == [] and store.lease_ends_ms() == {}


def test_view_shows_what_was_written_so_far_at_each_moment_of_a_run(store: Store, server: Server) -> None:
    """Every write is seen by the node that made it, in the answer, and by the others in the next look."""
    other = server.open()
    store.found_or_match(SHARED)
    hold(store, A, B)
    peers = {A: a_peer(A), B: a_peer(B)}
    expected = View(None, None, frozenset({A, B}), {}, {}, None, peers)
    for round in range(3):
        expected = replace(expected, ready={})
        assert store.view(round) == expected
        for member in (A, B):
            word = Ready(round, 10 * round, f"state {round}")
            expected = replace(expected, ready={**expected.ready, member: word})
            assert store.announce_ready(member, word) == other.view(round) == expected
        plan = a_plan(A, B, version=round + 1, round=round)
        assert store.propose_plan(plan, current=expected.plan)
        expected = replace(expected, plan=plan, votes={})
        for member in (A, B):
            expected = replace(expected, votes={**expected.votes, member: f"digest {round}"})
            assert store.vote(plan, member, f"digest {round}") == other.view(round) == expected
        verdict = a_verdict(plan, f"digest {round}")
        assert other.propose_verdict(verdict)
        expected = replace(expected, committed=verdict)
        assert store.view(round) == other.view(round) == expected
    assert [verdict.round for verdict in store.history()] == [0, 1, 2]
    store.release_lease(B)
    assert store.view(3) == replace(expected, alive=frozenset({A}), ready={}, peers={A: a_peer(A)})
    assert store.announce_leaving(A) == frozenset()


def test_wait_for_a_change_ends_where_there_was_one(store: Store, server: Server) -> None:
    seen = store.view(0)
    server.open().announce_ready(A, Ready(0, 1, "s"))
    store.await_change(0, seen, within_s=0.01)
    assert store.view(0) != seen


def test_links_are_those_that_members_told_last(store: Store, server: Server) -> None:
    other = server.open()
    for mbit in (10, 20):
        other.publish_links(A, LinkRates({B: mbit}, 5))
        other.publish_links(B, LinkRates({}, 7))
        store.view(0)
        assert store.links() == {A: LinkRates({B: mbit}, 5), B: LinkRates({}, 7)}
    assert store.links() == store.links()


def test_store_in_memory_wakes_who_waits_for_a_change() -> None:
    record = MemoryRecord()
    waiting, other = MemoryStore(record), MemoryStore(record)
    seen = waiting.view(0)
    waiter = threading.Thread(target=waiting.await_change, args=(0, seen), kwargs={"within_s": 1e6}, daemon=True)
    waiter.start()
    other.announce_ready(A, Ready(0, 1, "s"))
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive()


# -- proposals --------------------------------------------------------------------------------------------------------


def test_store_takes_one_of_many_simultaneous_proposals(server: Server) -> None:
    racers = 4
    stores = [server.open() for _ in range(racers)]
    start = threading.Barrier(racers)
    opened: list[tuple[int, int]] = []
    committed: list[tuple[int, int]] = []

    def race(racer: int) -> None:
        for round in range(25):
            plan = a_plan(f"racer#{racer}", version=round + 1, round=round)
            current = stores[racer].view(round).plan
            start.wait()
            if stores[racer].propose_plan(plan, current=current):
                opened.append((round, racer))
            start.wait()
            if stores[racer].propose_verdict(a_verdict(plan, digest=str(racer))):
                committed.append((round, racer))

    threads = [threading.Thread(target=race, args=(racer,)) for racer in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [round for round, _ in opened] == list(range(25))
    assert [round for round, _ in committed] == list(range(25))
    assert [v.round for v in stores[0].history()] == list(range(25))


def test_plan_must_follow_the_current_one(store: Store) -> None:
    first, second = a_plan(A), a_plan(A, B, version=2)
    assert store.propose_plan(first, current=None)
    assert not store.propose_plan(a_plan(B), current=None)
    assert store.propose_plan(second, current=first)
    assert not store.propose_plan(a_plan(B, version=2), current=first)
    assert store.view(0).plan == second


def test_plan_that_follows_on_another_of_the_same_version_is_refused(store: Store) -> None:
    """A store that came back with old data gives a version twice: who looked before must look again."""
    first, replayed = a_plan(A, B), a_plan(A, C)
    assert store.propose_plan(replayed, current=None)
    assert not store.propose_plan(a_plan(A, B, version=2), current=first)
    assert store.view(0).plan == replayed


def test_plan_of_a_committed_round_is_refused(store: Store) -> None:
    commit(store, a_plan(A))
    assert not open_next(store, a_plan(A, version=2))
    assert open_next(store, a_plan(A, version=2, round=1))


def test_verdict_of_a_superseded_plan_is_refused(store: Store) -> None:
    assert open_next(store, a_plan(A, B)) and open_next(store, a_plan(A, version=2))
    assert not store.propose_verdict(a_verdict(a_plan(A, B)))
    assert store.view(0).committed is None


def test_verdict_of_another_plan_of_the_same_version_is_refused(store: Store) -> None:
    assert open_next(store, a_plan(A, B))
    assert not store.propose_verdict(a_verdict(a_plan(A, C)))


def test_verdict_is_written_once(store: Store) -> None:
    commit(store, a_plan(A))
    assert not store.propose_verdict(a_verdict(a_plan(A), digest="another"))
    assert store.view(0).committed == a_verdict(a_plan(A))


def test_verdict_without_a_plan_is_refused(store: Store) -> None:
    assert not store.propose_verdict(a_verdict(a_plan(A)))


@pytest.mark.defect(11)
def test_failed_plan_can_not_be_committed_any_more(store: Store) -> None:
    """Who saw a failure has dropped the result: the others must not be able to commit it behind its back."""
    assert open_next(store, a_plan(A, B))
    assert store.report_failure(a_plan(A, B), "b#1 lost")
    assert not store.propose_verdict(a_verdict(a_plan(A, B)))
    assert store.view(0).failed == "b#1 lost"


def test_committed_plan_can_not_fail_any_more(store: Store) -> None:
    commit(store, a_plan(A, B))
    assert not store.report_failure(a_plan(A, B), "b#1 lost")
    assert store.view(0).failed is None


def test_first_reason_of_a_failure_stays(store: Store) -> None:
    open_next(store, a_plan(A))
    assert store.report_failure(a_plan(A), "first") and store.report_failure(a_plan(A), "second")
    assert store.view(0).failed == "first"


def test_first_vote_and_first_word_of_a_member_count(store: Store) -> None:
    open_next(store, a_plan(A))
    for digest, weight in (("first", 1), ("second", 2)):
        store.vote(a_plan(A), A, digest)
        store.announce_ready(A, Ready(0, weight, "s"))
    view = store.view(0)
    assert view.votes == {A: "first"} and view.ready == {A: Ready(0, 1, "s")}


def test_view_shows_votes_and_failure_of_the_current_plan_only(store: Store) -> None:
    open_next(store, a_plan(A, B))
    store.vote(a_plan(A, B), A, "old")
    store.report_failure(a_plan(A, B), "old")
    open_next(store, a_plan(A, version=2))
    view = store.view(0)
    assert view.votes == {} and view.failed is None


def test_votes_and_failure_of_another_plan_of_the_same_version_do_not_count(store: Store) -> None:
    open_next(store, a_plan(A, B))
    store.vote(a_plan(A, C), A, "of another line")
    store.report_failure(a_plan(A, C), "of another line")
    view = store.view(0)
    assert view.votes == {} and view.failed is None


def test_view_shows_who_is_ready_for_the_round_that_was_asked_for(store: Store) -> None:
    store.announce_ready(A, Ready(1, 5, "s"))
    assert store.view(1).ready == {A: Ready(1, 5, "s")} and store.view(2).ready == {}


# -- leases -----------------------------------------------------------------------------------------------------------


def test_lease_makes_alive_and_known_and_its_release_ends_that(store: Store) -> None:
    assert store.renew_lease(A, a_peer(A, B), first=True) == {A: a_peer(A, B)}
    view = store.view(0)
    assert view.alive == {A} and view.peers == {A: a_peer(A, B)}
    store.release_lease(A)
    view = store.view(0)
    assert view.alive == frozenset() and view.peers == {}


def test_renewal_names_the_living(store: Store) -> None:
    hold(store, A, B, C)
    store.expire_lease(C)
    assert store.renew_lease(A, a_peer(A)) == {A: a_peer(A), B: a_peer(B)}


@pytest.mark.defect(2)
def test_lease_runs_out_by_the_clock_of_the_store_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A predecessor compared the wall clocks of two hosts: 10 s of skew killed healthy nodes."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    hold(store, A)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    hold(store, B)
    assert store.view(0).alive == {A, B}


@pytest.mark.defect(2)
def test_dead_member_is_noticed_by_hosts_whose_clocks_differ(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    hold(store, A)
    for _ in range(2):
        server.let_pass(3000, is_silent=False)
        for member, skew_s in ((B, 10.0), (C, -10.0)):
            monkeypatch.setattr(time, "time", lambda skew_s=skew_s: now_s + skew_s)
            hold(store, member)
    assert store.view(0).alive == {B, C}


@pytest.mark.parametrize(("away_ms", "alive"), [(3000, {A, B}), (5100, {B})])
def test_lease_that_is_not_renewed_ends_after_its_life(
    store: Store, server: Server, away_ms: int, alive: set[str]
) -> None:
    hold(store, A)
    server.let_pass(away_ms, is_silent=False)
    hold(store, B)
    assert store.view(0).alive == alive


def test_lease_that_ran_out_returns_while_nothing_was_decided(store: Store) -> None:
    hold(store, A)
    store.expire_lease(A)
    assert renew(store, A)
    assert store.view(0).alive == {A}


@pytest.mark.parametrize("plan", [a_plan(A, B), a_plan(A, late=(B,))], ids=["member", "late"])
def test_lease_that_ran_out_returns_to_those_whom_the_plan_names(store: Store, plan: RoundPlan) -> None:
    hold(store, A, B)
    open_next(store, plan)
    store.expire_lease(B)
    assert store.view(0).alive == {A}
    assert renew(store, B)
    assert store.view(0).alive == {A, B}


def test_lease_that_ran_out_is_refused_once_a_round_was_opened_without_it(store: Store) -> None:
    hold(store, A, B)
    commit(store, a_plan(A, B))
    store.expire_lease(B)
    open_next(store, a_plan(A, version=2, round=1))
    assert not renew(store, B)
    assert store.view(1).alive == {A}


def test_lease_is_not_refused_for_a_plan_of_before_the_one_that_lists_its_member(store: Store) -> None:
    """As a server shows it that came back with an earlier file of this run."""
    hold(store, A)
    open_next(store, a_plan(A, version=4))
    assert store.renew_lease(B, a_peer(B), listed_version=3) is None
    for version in (4, 5):
        assert store.renew_lease(B, a_peer(B), listed_version=version) is not None
        store.expire_lease(B)


def test_lease_that_holds_is_renewed_even_if_a_round_was_opened_without_it(store: Store) -> None:
    hold(store, A, B)
    open_next(store, a_plan(A))
    assert renew(store, B)


def test_new_member_of_the_same_node_is_not_fenced(store: Store) -> None:
    hold(store, A, B)
    store.expire_lease(B)
    open_next(store, a_plan(A))
    assert not renew(store, B)
    hold(store, "b#2")
    assert store.view(0).alive == {A, "b#2"}


def test_expiry_of_an_unknown_lease_makes_nobody_known(store: Store, server: Server) -> None:
    """A guardian that is told of an end twice must not bring the dead back into the record."""
    store.expire_lease(A)
    assert store.lease_ends_ms() == {}


def test_commit_forgets_the_dead_that_can_not_return(store: Store, server: Server) -> None:
    """Weeks of crashes must not make every look at the store longer."""
    joiner, late = "j#1", "l#1"
    hold(store, A, B, C, joiner, late)
    for member in (B, C, late):
        store.expire_lease(member)
    commit(store, a_plan(A, B, late=(late,)))
    assert set(store.view(0).peers) == {A, B, joiner, late}
    assert store.lease_ends_ms().keys() == {A, B, joiner, late}


# -- a store that was away --------------------------------------------------------------------------------------------


def test_time_stands_still_while_nobody_renews(store: Store, server: Server) -> None:
    """All guardians at once are silent when the store is out of reach: that is no reason to call them dead."""
    hold(store, A, B)
    server.let_pass(60_000, is_silent=True)
    assert store.view(0).alive == {A, B}


def test_whoever_held_a_lease_when_the_silence_began_gets_a_fresh_one(store: Store, server: Server) -> None:
    hold(store, A, B, C)
    store.expire_lease(C)
    server.let_pass(60_000, is_silent=True)
    open_next(store, a_plan(A))
    assert renew(store, A)
    assert store.view(0).alive == {A, B}, "the first to come back does not end the others' leases"
    assert renew(store, B) and not renew(store, C)
    ends_ms = store.lease_ends_ms()
    assert abs(ends_ms[A] - ends_ms[B]) < 1000, "as long as that of the first"


def test_lease_runs_out_when_the_others_come_back_from_a_silence_and_it_does_not(store: Store, server: Server) -> None:
    hold(store, A, B)
    server.let_pass(60_000, is_silent=True)
    assert renew(store, A)
    server.let_pass(5_100, is_silent=False)
    assert renew(store, A) and store.view(0).alive == {A}


def test_short_pause_is_no_silence(store: Store, server: Server) -> None:
    hold(store, A)
    server.let_pass(3_000, is_silent=False)
    server.let_pass(2_400, is_silent=True)
    assert store.view(0).alive == frozenset()


def test_clock_that_was_set_back_counts_as_a_silence(store: Store, server: Server) -> None:
    hold(store, A, B)
    server.let_pass(-3_600_000, is_silent=True)
    assert store.view(0).alive == {A, B} and renew(store, A)
    server.let_pass(5_100, is_silent=False)
    assert renew(store, A) and store.view(0).alive == {A}, "no lease of an hour is left behind"


def test_the_dead_stay_dead_when_the_clock_is_set_back(store: Store, server: Server) -> None:
    hold(store, A, B)
    server.let_pass(5_100, is_silent=False)
    assert renew(store, A)
    server.let_pass(-3_600_000, is_silent=True)
    assert renew(store, A) and store.view(0).alive == {A}


# -- a record that was lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [(4, 5), (5, 4), (5, 5)])
def test_highest_committed_round_wins_in_an_empty_store(store: Store, rounds: tuple[int, int]) -> None:
    for member, round in zip((A, B), rounds, strict=True):
        store.restore(known_to(member, round=round))
    view = store.view(5)
    plan = a_plan(A, B, version=6, round=5)
    assert (view.plan, view.committed, view.is_known) == (plan, a_verdict(plan), True)
    assert store.history()[-1] == view.committed


def test_of_two_verdicts_of_one_round_the_newer_plan_wins(store: Store) -> None:
    store.restore(known_to(A, round=5, version=6))
    store.restore(known_to(B, round=5, version=7))
    store.restore(known_to(A, round=5, version=6))
    committed = store.view(5).committed
    assert committed is not None and committed.plan.version == 7


def test_member_brings_back_what_it_said(store: Store, server: Server) -> None:
    current, word = a_plan(A, B, version=7, round=6), Ready(6, 5, "s", 4, 4)
    assert store.restore(known_to(A, round=5, plan=current, ready=word, vote=(current, "d")))
    view = store.view(6)
    assert (view.plan, view.ready, view.votes) == (current, {A: word}, {A: "d"})
    assert view.is_known and store.found_or_match(SHARED) == record_of(SHARED)


def test_restoring_what_is_there_changes_nothing(store: Store) -> None:
    known = known_to(A, round=5, ready=Ready(6, 5, "s"))
    assert store.restore(known)
    before = store.view(6)
    assert not store.restore(replace(known, ready=Ready(6, 99, "other")))
    assert not store.restore(known_to(B, round=3))
    assert store.view(6) == before and len(store.history()) == 1


def test_nothing_is_decided_until_the_members_had_time_to_bring_the_record_back(store: Store, server: Server) -> None:
    """Who restored first may have missed the newest round, and must not open it a second time."""
    known = known_to(A, round=5)
    store.restore(known)
    following = a_plan(A, version=7, round=6)
    assert store.view(6).is_settling
    assert not store.propose_plan(following, current=known.plan)
    server.settle()
    assert not store.view(6).is_settling
    assert store.propose_plan(following, current=known.plan)


def test_nothing_is_committed_until_the_members_had_time_to_bring_the_record_back(store: Store, server: Server) -> None:
    """Not even what all have voted for: its failure may be among what is still missing."""
    plan = a_plan(A, version=7, round=6)
    store.restore(known_to(A, round=5, plan=plan, vote=(plan, "d")))
    assert not store.propose_verdict(a_verdict(plan))
    server.settle()
    assert store.propose_verdict(a_verdict(plan))


def test_settling_takes_one_lease(store: Store, server: Server) -> None:
    store.restore(known_to(A, round=5))
    server.let_pass(4_000, is_silent=False)
    assert store.view(6).is_settling
    server.let_pass(1_000, is_silent=False)
    assert not store.view(6).is_settling


def test_store_with_an_older_record_takes_the_newer_one(store: Store, server: Server) -> None:
    """It came back from a copy on its disk."""
    store.found_or_match(SHARED)
    commit(store, a_plan(A, B, version=3, round=2))
    assert store.restore(known_to(A, round=5)) and store.view(5).is_settling
    server.settle()
    assert not open_next(store, a_plan(A, B, version=7, round=5)), "it is committed"
    assert open_next(store, a_plan(A, B, version=7, round=6))


def test_lease_is_taken_by_everybody_while_the_store_is_empty(store: Store, server: Server) -> None:
    hold(store, A)
    open_next(store, a_plan(A))
    server.lose_everything()
    assert renew(store, A) and renew(store, B)


# -- joining ----------------------------------------------------------------------------------------------------------


def test_equal_nodes_may_join(server: Server) -> None:
    server.open().found_or_match(SHARED)
    server.open().found_or_match(dict(reversed(SHARED.items())))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (SHARED, {**SHARED, "model.d_model": "512"}),
        ({k: v for k, v in SHARED.items() if k != "model.d_model"}, {**SHARED, "model.d_model": "512"}),
    ],
    ids=["differs", "is new here"],
)
def test_refusal_names_the_key_that_differs(store: Store, theirs: dict[str, str], ours: dict[str, str]) -> None:
    store.found_or_match(theirs)
    with pytest.raises(JoinRefused) as refused:
        store.found_or_match(ours)
    assert refused.value.key == "model.d_model" and refused.value.ours == "512"


def test_refusal_names_a_key_that_only_the_run_has(store: Store) -> None:
    store.found_or_match(SHARED)
    with pytest.raises(JoinRefused) as refused:
        store.found_or_match({"train.batch_size": "64"})
    assert (refused.value.key, refused.value.theirs, refused.value.ours) == ("model.d_model", "256", "absent")


def test_refusal_leaves_the_record_as_it_was(store: Store, server: Server) -> None:
    store.found_or_match(SHARED)
    with pytest.raises(JoinRefused):
        store.found_or_match({**SHARED, "model.d_model": "512", "new": "1"})
    assert store.found_or_match(SHARED) == record_of(SHARED)


def test_repeated_proposal_after_a_lost_reply_changes_nothing(store: Store) -> None:
    """A call whose reply was lost is sent again: refused, and the member finds its own proposal at its next look."""
    plan = a_plan(A)
    store.propose_plan(plan, current=None)
    assert not store.propose_plan(plan, current=None) and store.view(0).plan == plan
    store.propose_verdict(a_verdict(plan))
    assert not store.propose_verdict(replace(a_verdict(plan), record={"n": 2}))
    assert store.view(0).committed == a_verdict(plan)


# -- sessions ---------------------------------------------------------------------------------------------------------


def of_session(session: str, *before: str, round: int = 5) -> Verdict:
    plan = replace(a_plan(A, B, version=round + 1, round=round), sessions=before)
    return Verdict(plan, "d", {"session": session})


def test_member_of_a_session_sees_no_record_of_another_one(server: Server) -> None:
    other, ours = server.open(), server.open()
    other.restore(StoreBackup(A, SHARED, of_session("old").plan, of_session("old"), orders=Orders(9, is_paused=True)))
    assert ours.view(5).committed == of_session("old"), "who is in none believes it"
    ours.session = "new"
    view = ours.view(5)
    assert (view.committed, view.orders, view.is_known) == (None, Orders(), False)


def test_what_nodes_share_is_of_the_session_that_a_verdict_begins(server: Server) -> None:
    founder, other, plan = server.open(), server.open(), a_plan(A)
    founder.found_or_match(SHARED)
    hold(founder, A)
    assert founder.propose_plan(plan, current=None)
    assert founder.propose_verdict(Verdict(plan, "d", {"session": "new"}))
    other.session = "new"
    assert other.view(0).is_known, "nobody has to bring it back for the session"
    assert other.found_or_match(SHARED) == record_of(SHARED)


def test_member_writes_over_another_session_however_many_rounds_that_has(server: Server) -> None:
    other, ours = server.open(), server.open()
    old, new = of_session("old", round=500), replace(of_session("new", "new"))
    other.restore(StoreBackup(A, SHARED, old.plan, old))
    ours.session = "new"
    ours.view(6)
    assert ours.restore(StoreBackup(B, SHARED, new.plan, new))
    assert ours.view(6).committed == new and ours.view(6).plan == new.plan


def test_session_that_goes_on_from_ours_counts(server: Server) -> None:
    """The run began again without this node: it must learn that, and not write over it."""
    other, ours = server.open(), server.open()
    again = of_session("new", "old")
    assert again.sessions == ("new", "old")
    other.restore(StoreBackup(A, SHARED, again.plan, again))
    ours.session = "old"
    view = ours.view(5)
    assert view.committed == again and view.plan == again.plan


def test_lease_is_not_refused_by_a_plan_of_another_session(server: Server) -> None:
    """Redis came back with the file of an earlier run: none of today's members is in its plan."""
    other, ours = server.open(), server.open()
    old = Verdict(replace(a_plan(C, round=5, version=6), sessions=("old",)), "d", {"session": "old"})
    other.restore(StoreBackup(C, SHARED, old.plan, old))
    assert not renew(ours, A), "who is in no session believes it"
    ours.session = "new"
    assert renew(ours, A)


def test_joiner_leaves_it_to_the_living_to_bring_back_what_nodes_share(server: Server) -> None:
    """It may differ from them, and must not write its own record instead."""
    member, joiner = server.open(), server.open()
    shared = member.found_or_match(SHARED)
    hold(member, A)
    server.lose_shared()
    bringing = threading.Timer(0.1, member.restore, args=(StoreBackup(A, shared),))
    bringing.start()
    with pytest.raises(JoinRefused, match=r"model\.d_model"):
        joiner.found_or_match({**SHARED, "model.d_model": "512"})
    bringing.join()


def test_run_that_begins_on_the_checkpoint_of_a_session_goes_on_from_it() -> None:
    founded = Verdict(a_plan(A), "d", {"session": "new", "session_before": "of the checkpoint"})
    assert founded.sessions == ("new", "of the checkpoint") and founded.session == "new"
    assert a_verdict(a_plan(A)).sessions == ()


def test_word_of_another_session_is_not_seen(server: Server) -> None:
    other, ours = server.open(), server.open()
    old = of_session("old")
    other.restore(StoreBackup(A, SHARED, old.plan, old))
    assert other.view(6).committed == old, "from here on it writes in that session"
    other.announce_ready(A, Ready(6, 1, "s"))
    other.announce_leaving(A)
    assert ours.view(6).ready.keys() == {A}, "who is in none believes it"
    ours.session = "new"
    assert ours.view(6).ready == {} and ours.history() == []
    hold(ours, A, B)
    assert ours.announce_leaving(B) == frozenset(), "member ids are never used twice: whoever leaves, leaves"


# -- orders of an operator --------------------------------------------------------------------------------------------


def test_plan_under_other_orders_is_refused(store: Store) -> None:
    """Who has not seen an order may not begin a round without it."""
    assert store.give_orders(pause).version == 1
    assert not store.propose_plan(a_plan(A), current=None)
    assert store.propose_plan(replace(a_plan(A), orders=1), current=None)


def test_orders_of_two_operators_at_once_are_both_given(server: Server) -> None:
    stores = [server.open() for _ in range(2)]
    start = threading.Barrier(2)

    def give(operator: int) -> None:
        for number in range(20):
            member = f"{operator}.{number}"
            start.wait()
            stores[operator].give_orders(lambda given: drain(given, "n", dict.fromkeys([*given.leaving, member], "n")))  # noqa: B023

    threads = [threading.Thread(target=give, args=(operator,)) for operator in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(set(stores[0].view(0).orders.leaving)) == 40


def test_rollback_is_done_once_its_round_is_committed(store: Store) -> None:
    commit(store, a_plan(A))
    ordered = store.give_orders(lambda given: roll_back(pause(given), 40, [40]))
    commit(store, replace(a_plan(A, version=2, round=1), orders=ordered.version, rollback=40))
    assert store.view(2).orders == Orders(ordered.version + 1, is_paused=True)


def test_rollback_ordered_while_another_is_on_its_way_stays(store: Store) -> None:
    commit(store, a_plan(A))
    ordered = store.give_orders(lambda given: roll_back(given, 40, [40]))
    plan = replace(a_plan(A, version=2, round=1), orders=ordered.version, rollback=40)
    assert open_next(store, plan)
    later = store.give_orders(lambda given: roll_back(given, 20, [20]))
    assert store.propose_verdict(a_verdict(plan))
    assert store.view(2).orders == later


def test_orders_that_the_store_lost_are_brought_back_and_newer_ones_stay(store: Store, server: Server) -> None:
    given = store.give_orders(pause)
    server.lose_everything()
    assert store.restore(StoreBackup(A, SHARED, orders=given))
    assert store.view(0).orders == given
    newer = store.give_orders(resume)
    store.restore(StoreBackup(A, SHARED, orders=given))
    assert store.view(0).orders == newer


# -- a run that begins again ------------------------------------------------------------------------------------------


def a_restart_point(member: str = A, **fields: Any) -> RestartPoint:
    return RestartPoint(**{"round": 7, "step": 40, "state_digest": "s", "member": member, **fields})


def test_store_agrees_on_one_of_many_beginnings(server: Server) -> None:
    racers = 4
    stores = [server.open() for _ in range(racers)]
    views = [store.view(0) for store in stores]
    start = threading.Barrier(racers)
    agreed: list[int] = []

    def race(racer: int) -> None:
        start.wait()
        if stores[racer].propose_restart_point(a_restart_point(f"racer#{racer}", step=racer), views[racer]):
            agreed.append(racer)

    threads = [threading.Thread(target=race, args=(racer,)) for racer in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(agreed) == 1
    assert stores[0].view(0).restart_point == a_restart_point(f"racer#{agreed[0]}", step=agreed[0])


def test_beginning_is_refused_where_the_run_went_on_meanwhile(store: Store) -> None:
    plan = a_plan(A)
    assert open_next(store, plan)
    before = store.view(0)
    assert store.propose_verdict(a_verdict(plan))
    assert not store.propose_restart_point(a_restart_point(), before)
    after = store.view(0)
    assert open_next(store, a_plan(A, version=2, round=1))
    assert not store.propose_restart_point(a_restart_point(), after)
    assert store.propose_restart_point(a_restart_point(), store.view(0))


def test_what_the_nodes_of_a_run_shared_is_forgotten_once_all_are_dead(store: Store, server: Server) -> None:
    store.found_or_match(SHARED)
    hold(store, A)
    commit(store, a_plan(A))
    assert not store.forget_dead_run()
    server.let_pass(10_000, is_silent=False)
    assert store.forget_dead_run()
    assert store.found_or_match({"model.d_model": "512"})["model.d_model"] == "512"
    assert store.view(0).committed == a_verdict(a_plan(A))


def test_run_that_was_silent_as_a_whole_is_not_taken_for_dead_before_a_lease_has_passed(
    store: Store, server: Server
) -> None:
    store.found_or_match(SHARED)
    hold(store, A)
    server.let_pass(10_000, is_silent=True)
    assert not store.forget_dead_run()
    assert renew(store, A)
    server.let_pass(4_000, is_silent=False)
    assert not store.forget_dead_run()
    server.let_pass(4_000, is_silent=False)
    assert store.forget_dead_run()


def test_of_members_that_leave_at_once_the_last_sees_that_nobody_stays(store: Store, server: Server) -> None:
    hold(store, A, B, C)
    assert store.announce_leaving(A) == {B, C}
    assert store.announce_leaving(B) == {C}
    server.let_pass(10_000, is_silent=False)
    assert store.announce_leaving(B) == frozenset()
