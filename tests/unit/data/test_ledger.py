from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.data.ledger import Ledger, Range, take

MEMBERS = ("a#0", "b#0", "c#1", "d#0")
rounds = st.lists(
    st.tuples(st.sets(st.sampled_from(MEMBERS), min_size=1), st.sets(st.sampled_from(MEMBERS)), st.integers(1, 7)),
    max_size=12,
)


def indices(ranges: tuple[Range, ...]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


@given(rounds=rounds)
def test_ledger_accounts_for_every_index_exactly_once_whoever_dies(
    rounds: list[tuple[set[str], set[str], int]],
) -> None:
    ledger = Ledger()
    contributed: Counter[int] = Counter()
    for members, survivors, samples_each in rounds:
        assigned, ledger = ledger.allocate(sorted(members), samples_each)
        held = [i for ranges in assigned.values() for i in indices(ranges)]
        assert sorted([*contributed.elements(), *held, *indices(ledger.returned)]) == list(range(ledger.next))
        assert {len(indices(ranges)) for ranges in assigned.values()} == {samples_each}
        alive = members & survivors
        contributed.update(i for member in alive for i in indices(assigned[member]))
        ledger = ledger.settle(assigned, alive)
        assert sorted([*contributed.elements(), *indices(ledger.returned)]) == list(range(ledger.next))
        assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


def test_allocate_deals_fresh_samples_in_the_order_of_the_members() -> None:
    assigned, ledger = Ledger(next=10).allocate(["b", "a"], 4)
    assert assigned == {"b": ((10, 14),), "a": ((14, 18),)}
    assert ledger == Ledger(next=18)


def test_allocate_hands_out_returned_samples_before_fresh_ones() -> None:
    assigned, ledger = Ledger(next=20, returned=((0, 3), (7, 9))).allocate(["a", "b"], 4)
    assert assigned == {"a": ((0, 3), (7, 8)), "b": ((8, 9), (20, 23))}
    assert ledger == Ledger(next=23)


def test_allocate_keeps_what_it_did_not_need_of_the_pool() -> None:
    assigned, ledger = Ledger(next=20, returned=((0, 3), (7, 9))).allocate(["a"], 2)
    assert assigned == {"a": ((0, 2),)}
    assert ledger == Ledger(next=20, returned=((2, 3), (7, 9)))


def test_allocate_joins_returned_and_fresh_samples_that_touch() -> None:
    assigned, _ = Ledger(next=9, returned=((7, 9),)).allocate(["a"], 4)
    assert assigned == {"a": ((7, 11),)}


def test_settle_returns_the_ranges_of_members_that_did_not_contribute() -> None:
    assigned, ledger = Ledger().allocate(["a", "b", "c"], 4)
    assert ledger.settle(assigned, {"b"}) == Ledger(next=12, returned=((0, 4), (8, 12)))
    assert ledger.settle(assigned, set()) == Ledger(next=12, returned=((0, 12),))
    assert ledger.settle(assigned, {"a", "b", "c"}) == Ledger(next=12)


def test_settle_refuses_a_contribution_without_an_assignment() -> None:
    assigned, ledger = Ledger().allocate(["a"], 4)
    with pytest.raises(AssertionError, match="z"):
        ledger.settle(assigned, {"a", "z"})


def test_settle_refuses_to_return_a_sample_twice() -> None:
    assigned, ledger = Ledger().allocate(["a"], 4)
    with pytest.raises(AssertionError, match="two ranges"):
        ledger.settle(assigned, set()).settle(assigned, set())


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
def test_from_json_refuses_a_value_that_is_no_ledger(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="ledger"):
        Ledger.from_json(value)


def test_take_gives_all_when_there_are_fewer() -> None:
    assert take(((0, 2), (5, 6)), 9) == (((0, 2), (5, 6)), ())
