"""LiveBackup: what a member takes over from a look, and when it knows more than the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroband.elastic.membership.records import Ready, RoundPlan, Verdict, View
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
    """Of member A, which saw round 5 committed."""
    memory = LiveBackup(A, RUN)
    memory.learn(a_view())
    return memory


def test_memory_keeps_what_it_saw_and_said(memory: LiveBackup) -> None:
    memory.announced(WORD)
    memory.voted(a_plan(), "digest", {})
    known = memory.known
    assert (known.member_id, known.run) == (A, RUN)
    assert (known.plan, known.committed) == (a_plan(), a_verdict())
    assert (known.ready, known.vote) == (WORD, (a_plan(), "digest"))


def test_memory_takes_over_what_is_newer(memory: LiveBackup) -> None:
    newer = a_view(plan=a_plan(8, 7), committed=a_verdict(7, 6))
    memory.learn(newer)
    assert (memory.known.plan, memory.known.committed) == (newer.plan, newer.committed)


@pytest.mark.parametrize(
    "older",
    [EMPTY, a_view(plan=a_plan(4, 3), committed=a_verdict(3, 2)), a_view(plan=None, committed=None)],
    ids=["nothing", "an older copy", "only the run"],
)
def test_memory_keeps_what_the_store_forgot(memory: LiveBackup, older: View) -> None:
    memory.learn(older)
    assert (memory.known.plan, memory.known.committed) == (a_plan(), a_verdict())
    assert memory.is_ahead_of(older, 6)


def test_memory_follows_the_store_where_both_know_another_of_one_version(memory: LiveBackup) -> None:
    """Members that brought the record back agreed on it: it counts from then on."""
    other = a_plan(members=(A,))
    memory.learn(a_view(plan=other, committed=Verdict(other, "e")))
    assert (memory.known.plan, memory.known.committed) == (other, Verdict(other, "e"))


def test_memory_is_no_more_than_what_it_came_from(memory: LiveBackup) -> None:
    assert not memory.is_ahead_of(a_view(), 6)


def test_memory_is_no_more_than_a_store_that_went_on(memory: LiveBackup) -> None:
    memory.announced(WORD)
    memory.voted(a_plan(), "digest", {})
    assert not memory.is_ahead_of(a_view(plan=a_plan(8, 7), committed=a_verdict(7, 6)), 7)


def test_new_memory_is_no_more_than_a_store_that_knows_the_run() -> None:
    memory = LiveBackup(A, RUN)
    assert not memory.is_ahead_of(a_view(plan=None, committed=None), 0)
    assert memory.is_ahead_of(EMPTY, 0), "it knows what all nodes must share"


@pytest.mark.parametrize(
    ("missing", "expected"),
    [({"plan": None}, True), ({"committed": None}, True), ({"committed": a_verdict(5, 4)}, True), ({}, False)],
    ids=["plan", "verdict", "newest verdict", "nothing"],
)
def test_memory_is_more_than_a_store_that_misses_a_part(
    memory: LiveBackup, missing: dict[str, Any], expected: bool
) -> None:
    assert memory.is_ahead_of(a_view(**missing), 6) is expected


def test_memory_is_more_when_its_word_is_missing(memory: LiveBackup) -> None:
    memory.announced(WORD)
    assert memory.is_ahead_of(a_view(ready={B: WORD}), 6)
    with memory.writing():
        assert not memory.is_ahead_of(a_view(ready={B: WORD}), 6), "it is on its way"
        assert memory.is_ahead_of(EMPTY, 6)
    assert not memory.is_ahead_of(a_view(ready={A: replace(WORD, weight=99)}), 6), "the first word counts"


def test_memory_asks_for_its_word_in_the_round_that_was_looked_at_only(memory: LiveBackup) -> None:
    """A look shows one round's words; those of the others may be there."""
    memory.announced(WORD)
    assert not memory.is_ahead_of(a_view(), 0)


def test_memory_is_more_when_its_vote_for_the_current_plan_is_missing(memory: LiveBackup) -> None:
    memory.voted(a_plan(), "digest", {})
    assert memory.is_ahead_of(a_view(votes={B: "digest"}), 6)
    assert not memory.is_ahead_of(a_view(votes={A: "digest"}), 6)
    assert not memory.is_ahead_of(a_view(plan=a_plan(7)), 6), "it was opened again"


def test_memory_follows_a_session_that_goes_on_from_its_own_however_few_rounds_that_has(memory: LiveBackup) -> None:
    """The run began again on a checkpoint without this member, in a store that had lost everything."""
    founding = replace(a_plan(1, 2), sessions=("old",))
    again = a_view(plan=founding, committed=Verdict(founding, "d", {"session": "new"}), is_known=False)
    memory.announced(WORD)
    assert not memory.is_ahead_of(again, 6)
    memory.learn(again)
    assert (memory.known.plan, memory.known.committed) == (again.plan, again.committed)
