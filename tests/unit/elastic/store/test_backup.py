"""LiveBackup: what a member learns from a view, and when it is ahead of the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroband.elastic.membership.records import Ready, RoundPlan, StoreTerm, Verdict, View
from zeroband.elastic.store.backup import LiveBackup

A, B = "a#1", "b#1"
RUN = {"model.d_model": "256"}
WORD = Ready(6, 10, "s")


def a_plan(version: int = 6, round: int = 5, members: tuple[str, ...] = (A, B)) -> RoundPlan:
    tens = tuple(10 for _ in members)
    return RoundPlan(version, version, round, members, tens, tens, tens)


def a_verdict(version: int = 6, round: int = 5) -> Verdict:
    return Verdict(a_plan(version, round), "d")


def a_view(**fields: Any) -> View:
    """Round 5 is committed."""
    usual: dict[str, Any] = {
        "plan": a_plan(),
        "committed": a_verdict(),
        "alive": frozenset({A, B}),
        "ready": {},
        "votes": {},
        "failed": None,
    }
    return View(**{**usual, **fields})


EMPTY = a_view(plan=None, committed=None, is_known=False)


@pytest.fixture
def memory() -> LiveBackup:
    """The backup of member A after round 5 was committed."""
    memory = LiveBackup(A, RUN)
    memory.learn(a_view())
    return memory


def test_backup_keeps_what_was_read_and_written(memory: LiveBackup) -> None:
    memory.announced(WORD)
    memory.voted(a_plan(), "digest", {})
    known = memory.known
    assert (known.member_id, known.run) == (A, RUN)
    assert (known.plan, known.committed) == (a_plan(), a_verdict())
    assert (known.ready, known.vote) == (WORD, (a_plan(), "digest"))


def test_backup_learns_newer_records(memory: LiveBackup) -> None:
    newer = a_view(plan=a_plan(8, 7), committed=a_verdict(7, 6))
    memory.learn(newer)
    assert (memory.known.plan, memory.known.committed) == (newer.plan, newer.committed)


@pytest.mark.parametrize(
    "older",
    [EMPTY, a_view(plan=a_plan(4, 3), committed=a_verdict(3, 2)), a_view(plan=None, committed=None)],
    ids=["nothing", "an older copy", "only the run"],
)
def test_backup_keeps_what_the_store_lost(memory: LiveBackup, older: View) -> None:
    memory.learn(older)
    assert (memory.known.plan, memory.known.committed) == (a_plan(), a_verdict())
    assert memory.is_ahead_of(older, 6)


def test_backup_prefers_the_stores_record_of_the_same_version(memory: LiveBackup) -> None:
    """Members that restored the record agreed on it."""
    other = a_plan(members=(A,))
    memory.learn(a_view(plan=other, committed=Verdict(other, "e")))
    assert (memory.known.plan, memory.known.committed) == (other, Verdict(other, "e"))


def test_refused_plan_is_neither_restored_nor_learned_until_its_member_votes_on_it(memory: LiveBackup) -> None:
    refused = a_view(plan=a_plan(7, 6))
    memory.learn(refused)
    assert memory.known.plan == refused.plan and refused.plan is not None
    memory.refuse(refused.plan)
    memory.learn(refused)
    assert memory.known.plan == a_plan() and not memory.is_ahead_of(a_view(), 6)
    memory.voted(refused.plan, "digest", {})
    assert memory.known.plan == refused.plan and memory.is_ahead_of(a_view(), 6)


def test_vote_is_not_restored_into_a_generation_after_the_promise_of_a_later_one(memory: LiveBackup) -> None:
    """The store refuses it there; brought back all the same, it committed a round that the later one never saw."""
    used, promised = StoreTerm(3, "store"), StoreTerm(4, "another")
    memory.enter(used, a_plan())
    memory.promise(promised)
    assert memory.voted(a_plan(), "digest", {}) == promised
    lacks_vote = a_view(generation=used)
    assert memory.to_restore.vote is None and memory.to_restore.generation == used
    assert not memory.is_ahead_of(lacks_vote, 6)
    memory.enter(promised, a_plan())
    assert memory.to_restore.vote == (a_plan(), "digest") and memory.is_ahead_of(lacks_vote, 6)


def test_first_reason_for_a_failure_counts_until_another_plan_fails(memory: LiveBackup) -> None:
    first, second = a_plan(7, 6), a_plan(8, 6)
    memory.failed(first, "a link broke")
    memory.failed(first, "it was seen again")
    assert memory.failure_unknown_to(a_view(plan=first)) == (first, "a link broke")
    assert memory.failure_unknown_to(a_view(plan=first, failed="b lost")) is None
    memory.failed(second, "another")
    assert memory.failure_unknown_to(a_view(plan=first)) is None
    assert memory.failure_unknown_to(a_view(plan=second)) == (second, "another")


def test_backup_is_not_ahead_of_its_source(memory: LiveBackup) -> None:
    assert not memory.is_ahead_of(a_view(), 6)


def test_backup_is_not_ahead_of_a_newer_store(memory: LiveBackup) -> None:
    memory.announced(WORD)
    memory.voted(a_plan(), "digest", {})
    assert not memory.is_ahead_of(a_view(plan=a_plan(8, 7), committed=a_verdict(7, 6)), 7)


def test_new_backup_is_not_ahead_of_a_store_with_the_run() -> None:
    memory = LiveBackup(A, RUN)
    assert not memory.is_ahead_of(a_view(plan=None, committed=None), 0)
    assert memory.is_ahead_of(EMPTY, 0), "it knows what all nodes must share"


@pytest.mark.parametrize(
    ("missing", "expected"),
    [({"plan": None}, True), ({"committed": None}, True), ({"committed": a_verdict(5, 4)}, True), ({}, False)],
    ids=["plan", "verdict", "newest verdict", "nothing"],
)
def test_backup_is_ahead_of_a_store_that_lost_a_record(
    memory: LiveBackup, missing: dict[str, Any], expected: bool
) -> None:
    assert memory.is_ahead_of(a_view(**missing), 6) is expected


def test_backup_is_ahead_when_its_ready_record_is_missing(memory: LiveBackup) -> None:
    memory.announced(WORD)
    assert memory.is_ahead_of(a_view(ready={B: WORD}), 6)
    with memory.writing():
        assert not memory.is_ahead_of(a_view(ready={B: WORD}), 6), "it is on its way"
        assert memory.is_ahead_of(EMPTY, 6)
    assert not memory.is_ahead_of(a_view(ready={A: replace(WORD, weight=99)}), 6), "the first word counts"


def test_backup_checks_its_ready_record_only_in_the_round_of_the_view(memory: LiveBackup) -> None:
    """A view has the records of one round; the store may have those of others."""
    memory.announced(WORD)
    assert not memory.is_ahead_of(a_view(), 0)


def test_backup_is_ahead_when_its_vote_for_the_current_plan_is_missing(memory: LiveBackup) -> None:
    memory.voted(a_plan(), "digest", {})
    assert memory.is_ahead_of(a_view(votes={B: "digest"}), 6)
    assert not memory.is_ahead_of(a_view(votes={A: "digest"}), 6)
    assert not memory.is_ahead_of(a_view(plan=a_plan(7)), 6), "it was opened again"


def test_backup_follows_a_successor_session_even_with_fewer_rounds(memory: LiveBackup) -> None:
    """The run was founded again on a checkpoint without this member, in an emptied store."""
    founding = replace(a_plan(1, 2), sessions=("old",))
    again = a_view(plan=founding, committed=Verdict(founding, "d", {"session": "new"}), is_known=False)
    memory.announced(WORD)
    assert not memory.is_ahead_of(again, 6)
    memory.learn(again)
    assert (memory.known.plan, memory.known.committed) == (again.plan, again.committed)
