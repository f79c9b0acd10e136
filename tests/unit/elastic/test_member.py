"""A membership on a real Redis, its waiting included; only the guardian's process is taken out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from zeroband.config.schema import ElasticConfig, FaultConfig
from zeroband.elastic.board import NodeBoard
from zeroband.elastic.epoch import Opening, Ready, Verdict
from zeroband.elastic.lease import GuardianOrder
from zeroband.elastic.member import Member, NodeIdentity, new_member_id
from zeroband.elastic.store import Store
from zeroband.errors import Fenced, PeerLost

ELASTIC = ElasticConfig(start_nodes=1)
NEVER_S = float("inf")
LONG_S = 1000.0
MakeMember = Callable[[str], Member]


class StubGuardian:
    """Takes the lease and lives until it is told otherwise."""

    store: Store
    orders: list[GuardianOrder]

    def __init__(self, order: GuardianOrder) -> None:
        self.orders.append(order)
        self.store.renew_lease(order.member_id, lease_s=LONG_S, progress=0, first=order.is_first)
        self.is_dead = False
        self.pid = 1
        self._member_id = order.member_id

    def is_running(self) -> bool:
        return not self.is_dead

    def close(self) -> None:
        self.store.release_lease(self._member_id)


@pytest.fixture
def guardians(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[GuardianOrder]:
    """The orders of all guardians that were started."""
    orders: list[GuardianOrder] = []
    stub = type("Guardian", (StubGuardian,), {"store": store, "orders": orders})
    monkeypatch.setattr("zeroband.elastic.member.Guardian", stub)
    return orders


@pytest.fixture
def make_member(tmp_path: Path, store: Store, guardians: list[GuardianOrder]) -> Iterator[MakeMember]:
    members: list[Member] = []
    boards: list[NodeBoard] = []

    def make(node_id: str) -> Member:
        boards.append(NodeBoard(tmp_path / f"board-{node_id}", create=True))
        identity = NodeIdentity(node_id, (), 0, tmp_path)
        members.append(Member(store, "unused", identity, boards[-1], FaultConfig(detect_s=0.5), "run"))
        return members[-1]

    yield make
    for member in members:
        member.close()
    for board in boards:
        board.close()


def board_of(tmp_path: Path, node_id: str) -> NodeBoard:
    return NodeBoard(tmp_path / f"board-{node_id}", create=False)


def found(*members: Member) -> Opening:
    """Open round 0 to these members."""
    for member in members:
        member.announce_ready(Ready(0, 0, "s"))
    openings = [member.await_opening(0, ELASTIC, start_deadline_s=NEVER_S) for member in members]
    assert len(set(openings)) == 1 and set(openings[0].members) == {m.member_id for m in members}
    return openings[0]


def expire(client: redis.Redis, member: Member) -> None:
    assert client.delete(member.store.keys.lease(member.member_id)) == 1


def renew(member: Member) -> bool:
    return member.store.renew_lease(member.member_id, lease_s=LONG_S, progress=0)


def test_every_membership_of_a_node_has_an_id_of_its_own() -> None:
    first, second = new_member_id("node"), new_member_id("node")
    assert first != second and first.startswith("node#")


def test_members_open_and_commit_a_round(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    opening = found(a, b)
    for member in (a, b):
        member.vote(opening, "d")
    verdicts = [member.await_verdict(opening, {"n": 1}) for member in (a, b)]
    assert verdicts == [Verdict(0, 1, 1, opening.members, (0, 0), "d", {"n": 1})] * 2


@pytest.mark.parametrize("proposer", ["a", "b", "c"])
def test_any_member_opens_and_commits_when_the_others_are_silent(make_member: MakeMember, proposer: str) -> None:
    """A predecessor's followers polled for ever when their leader died: here one alone brings a round to its end."""
    members = {name: make_member(name) for name in "abc"}
    for member in members.values():
        member.announce_ready(Ready(0, 0, "s"))
    opening = members[proposer].await_opening(0, ELASTIC, start_deadline_s=NEVER_S)
    for member in members.values():
        member.vote(opening, "d")
    assert members[proposer].await_verdict(opening, {}).members == opening.members


def test_members_go_on_without_any_one_that_died(make_member: MakeMember, redis_client: redis.Redis) -> None:
    """A predecessor compared integer ranks with string ids: nobody was ever evicted."""
    members = [make_member(name) for name in "abc"]
    for dead in range(3):
        redis_client.flushall()
        for member in members:
            member.store.renew_lease(member.member_id, lease_s=LONG_S, progress=0, first=True)
        found(*members)
        expire(redis_client, members[dead])
        left = [member for member in members if member is not members[dead]]
        for member in left:
            opening = member.await_opening(0, ELASTIC, start_deadline_s=NEVER_S)
            assert opening.members == tuple(sorted(m.member_id for m in left))


def test_who_saw_a_loss_stops_the_round_for_everybody(make_member: MakeMember, redis_client: redis.Redis) -> None:
    """The lost one comes back and votes: nobody may commit any more what one of them has dropped."""
    a, b, c = (make_member(name) for name in "abc")
    opening = found(a, b, c)
    a.vote(opening, "d")
    c.vote(opening, "d")
    expire(redis_client, b)
    with pytest.raises(PeerLost, match=f"{b.member_id} lost"):
        a.await_verdict(opening, {})
    assert renew(b)
    b.vote(opening, "d")
    with pytest.raises(PeerLost, match=f"{b.member_id} lost"):
        c.await_verdict(opening, {})
    again = [member.await_opening(0, ELASTIC, start_deadline_s=NEVER_S) for member in (a, b, c)]
    assert again == [Opening(2, 2, 0, opening.members, (0, 0, 0))] * 3


def test_who_saw_a_loss_too_late_takes_the_verdict(
    make_member: MakeMember, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_member("a"), make_member("b")
    opening = found(a, b)
    a.vote(opening, "d")
    expire(redis_client, b)
    outdated = a.store.view(0)
    assert renew(b)
    b.vote(opening, "d")
    verdict = b.await_verdict(opening, {})
    looks = iter([outdated])
    fresh = Store.view
    monkeypatch.setattr(Store, "view", lambda store, round: next(looks, None) or fresh(store, round))
    assert a.await_verdict(opening, {}) == verdict


def test_different_results_open_the_round_again(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    opening = found(a, b)
    a.vote(opening, "d")
    b.vote(opening, "damaged")
    for member in (a, b):
        with pytest.raises(PeerLost, match="hold different results"):
            member.await_verdict(opening, {})
    assert a.await_opening(0, ELASTIC, start_deadline_s=NEVER_S).version == 2


def test_failure_that_one_reports_reaches_all(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    opening = found(a, b)
    a.report_failure(opening, "lane 1 broke")
    b.vote(opening, "d")
    with pytest.raises(PeerLost, match=f"{a.member_id}: lane 1 broke"):
        b.await_verdict(opening, {})


def test_member_is_fenced_by_a_round_that_was_committed_without_it(
    make_member: MakeMember, redis_client: redis.Redis
) -> None:
    a, b = make_member("a"), make_member("b")
    opening = found(a, b)
    a.vote(opening, "d")
    expire(redis_client, b)
    with pytest.raises(PeerLost):
        a.await_verdict(opening, {})
    again = a.await_opening(0, ELASTIC, start_deadline_s=NEVER_S)
    a.vote(again, "d")
    a.await_verdict(again, {})
    with pytest.raises(Fenced, match="committed without b#"):
        b.await_verdict(opening, {})
    with pytest.raises(Fenced, match="round 0 was committed"):
        b.await_opening(0, ELASTIC, start_deadline_s=NEVER_S)


def test_member_is_fenced_by_its_board(make_member: MakeMember, tmp_path: Path) -> None:
    a = make_member("a")
    board_of(tmp_path, "a").set_fenced(True)
    with pytest.raises(Fenced, match="ran out and the run went on"):
        a.await_opening(0, ELASTIC, start_deadline_s=NEVER_S)


def test_new_membership_is_not_fenced(make_member: MakeMember, tmp_path: Path) -> None:
    NodeBoard(tmp_path / "board-a", create=True).set_fenced(True)
    found(make_member("a"))


def test_waiting_shows_the_guardian_that_the_trainer_moves(make_member: MakeMember, tmp_path: Path) -> None:
    found(make_member("a"))
    assert board_of(tmp_path, "a").progress > 0


def test_joiner_learns_of_the_round_that_it_missed(make_member: MakeMember) -> None:
    a, joiner = make_member("a"), make_member("j")
    opening = found(a)
    a.vote(opening, "d")
    verdict = a.await_verdict(opening, {})
    assert joiner.await_admission(0, ELASTIC) == verdict


def test_joiner_is_let_in_at_the_next_boundary(make_member: MakeMember) -> None:
    a, joiner = make_member("a"), make_member("j")
    opening = found(a)
    a.vote(opening, "d")
    a.await_verdict(opening, {})
    joiner.announce_ready(Ready(1, 0, "s"))
    a.announce_ready(Ready(1, 5, "s"))
    admitted = joiner.await_admission(1, ELASTIC)
    assert isinstance(admitted, Opening) and admitted.members == (a.member_id, joiner.member_id)
    assert a.await_opening(1, ELASTIC, start_deadline_s=NEVER_S) == admitted


def test_watched_opening_is_aborted_on_the_board_when_a_member_is_lost(
    make_member: MakeMember, redis_client: redis.Redis, tmp_path: Path
) -> None:
    a, b = make_member("a"), make_member("b")
    opening = found(a, b)
    a.watch(opening)
    expire(redis_client, b)
    _until(lambda: board_of(tmp_path, "a").aborted_version == opening.version)


def test_guardian_that_ended_is_replaced_by_one_that_respects_a_fence(
    make_member: MakeMember, guardians: list[GuardianOrder]
) -> None:
    a: Any = make_member("a")
    a._guardian.is_dead = True
    _until(lambda: len(guardians) == 2)
    assert [order.is_first for order in guardians] == [True, False]
    assert guardians[0].member_id == guardians[1].member_id


def _until(condition: Callable[[], bool]) -> None:
    pause, tries = threading.Event(), 0
    while not condition():
        assert tries < 2000, "not within 10 s"
        tries += 1
        pause.wait(0.005)
