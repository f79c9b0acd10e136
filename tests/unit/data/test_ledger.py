from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.data.ledger import Ledger, Range, take
from zeroband.elastic.membership.records import from_record, to_record

MEMBERS = ("a#0", "b#0", "c#1", "d#0")
USED, LOST, LATE = "used", "lost", "late"
members_of_a_round = st.fixed_dictionaries(
    {},
    optional={
        member: st.tuples(st.sampled_from((USED, LOST, LATE)), st.floats(0, 1), st.integers(0, 7)) for member in MEMBERS
    },
)
rounds = st.lists(members_of_a_round, max_size=12)
"""What becomes of each member that is there: its fate, which share of its samples it used, how many it wants next."""


def indices(ranges: tuple[Range, ...]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


@given(rounds=rounds)
def test_every_index_is_trained_once_or_owed_or_returned_whoever_dies_is_slow_or_late(
    rounds: list[dict[str, tuple[str, float, int]]],
) -> None:
    ledger, held = Ledger(), dict[str, tuple[Range, ...]]()
    trained: Counter[int] = Counter()
    for members in rounds:
        used = {
            m: round(share * len(indices(held[m])))
            for m, (fate, share, _) in members.items()
            if fate == USED and m in held
        }
        late = {m: held[m] for m, (fate, _, _) in members.items() if fate == LATE and m in held}
        wanted = {m: wants for m, (fate, _, wants) in members.items() if fate == USED}
        trained.update(index for m, count in used.items() for index in indices(held[m])[:count])
        ledger = ledger.settle(held, used, late)
        assert from_record(Ledger, to_record(ledger)) == ledger
        assigned, ledger = ledger.allocate(wanted)
        assert {m: len(indices(spans)) for m, spans in assigned.items()} == {m: n for m, n in wanted.items() if n}
        held = {**assigned, **late}
        owed = [index for spans in held.values() for index in indices(spans)]
        assert sorted([*trained.elements(), *owed, *indices(ledger.returned)]) == list(range(ledger.next))


@given(rounds=rounds)
def test_fresh_samples_are_dealt_only_when_none_are_returned(rounds: list[dict[str, tuple[str, float, int]]]) -> None:
    ledger = Ledger()
    for members in rounds:
        assigned, after = ledger.allocate({m: wants for m, (_, _, wants) in members.items()})
        assert after.next == ledger.next or not after.returned
        ledger = after.settle(assigned, dict.fromkeys(assigned, 0))


def test_allocate_deals_fresh_samples_in_the_order_of_the_members() -> None:
    assigned, ledger = Ledger(next=10).allocate({"b": 4, "a": 4})
    assert assigned == {"b": ((10, 14),), "a": ((14, 18),)}
    assert ledger == Ledger(next=18)


def test_allocate_hands_out_returned_samples_before_fresh_ones() -> None:
    assigned, ledger = Ledger(next=20, returned=((0, 3), (7, 9))).allocate({"a": 4, "b": 4})
    assert assigned == {"a": ((0, 3), (7, 8)), "b": ((8, 9), (20, 23))}
    assert ledger == Ledger(next=23)


def test_allocate_keeps_what_it_did_not_need_of_the_pool() -> None:
    assigned, ledger = Ledger(next=20, returned=((0, 3), (7, 9))).allocate({"a": 2})
    assert assigned == {"a": ((0, 2),)}
    assert ledger == Ledger(next=20, returned=((2, 3), (7, 9)))


def test_allocate_joins_returned_and_fresh_samples_that_touch() -> None:
    assigned, _ = Ledger(next=9, returned=((7, 9),)).allocate({"a": 4})
    assert assigned == {"a": ((7, 11),)}


def test_allocate_gives_each_member_what_it_wants_and_nothing_to_those_that_leave() -> None:
    assigned, ledger = Ledger().allocate({"a": 2, "b": 0, "c": 6})
    assert assigned == {"a": ((0, 2),), "c": ((2, 8),)}
    assert ledger == Ledger(next=8)


def test_settle_returns_the_ranges_of_members_that_did_not_contribute() -> None:
    assigned, ledger = Ledger().allocate({"a": 4, "b": 4, "c": 4})
    assert ledger.settle(assigned, {"b": 4}) == Ledger(next=12, returned=((0, 4), (8, 12)))
    assert ledger.settle(assigned, {}) == Ledger(next=12, returned=((0, 12),))
    assert ledger.settle(assigned, {"a": 4, "b": 4, "c": 4}) == Ledger(next=12)


def test_settle_returns_what_a_member_did_not_come_to() -> None:
    assigned, ledger = Ledger(next=20, returned=((0, 3), (7, 9))).allocate({"a": 8, "b": 2})
    assert assigned == {"a": ((0, 3), (7, 9), (20, 23)), "b": ((23, 25),)}
    assert ledger.settle(assigned, {"a": 4, "b": 1}) == Ledger(next=25, returned=((8, 9), (20, 23), (24, 25)))


def test_settle_leaves_their_ranges_to_members_that_are_late() -> None:
    assigned, ledger = Ledger().allocate({"a": 4, "b": 4})
    assert ledger.settle(assigned, {"a": 4}, kept={"b": assigned["b"]}) == Ledger(next=8)


def test_settle_returns_the_rest_of_a_member_that_was_late_and_came() -> None:
    assigned, ledger = Ledger().allocate({"a": 4})
    assert ledger.settle(assigned, {"a": 1}, kept={"a": ((2, 4),)}) == Ledger(next=4, returned=((1, 2),))


def test_settle_refuses_a_contribution_without_an_assignment() -> None:
    assigned, ledger = Ledger().allocate({"a": 4})
    with pytest.raises(AssertionError, match="z"):
        ledger.settle(assigned, {"a": 4, "z": 4})


def test_settle_refuses_to_return_a_sample_twice() -> None:
    assigned, ledger = Ledger().allocate({"a": 4})
    with pytest.raises(AssertionError, match="two ranges"):
        ledger.settle(assigned, {}).settle(assigned, {})


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"next": 4},
        {"next": None, "returned": []},
        {"next": 4, "returned": [[0, 5]]},
        {"next": 9, "returned": [[3, 3]]},
        {"next": 9, "returned": [[3, 5], [4, 6]]},
        {"next": 9, "returned": [[-3, 5]]},
    ],
)
def test_value_that_is_no_ledger_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Ledger"):
        from_record(Ledger, value)


def test_take_gives_all_when_there_are_fewer() -> None:
    assert take(((0, 2), (5, 6)), 9) == (((0, 2), (5, 6)), ())
