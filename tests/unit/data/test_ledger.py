from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.data.ledger import SHARED, Ledger, Range, allocate, settle, take
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


CORPORA = {"a#0": "a/1", "b#0": SHARED, "c#1": SHARED, "d#0": "d/7"}
"""Two nodes with documents of their own beside two that share some."""


def dealt(ledger: Ledger, **wanted: int) -> Ledger:
    """The ledger after its members were dealt what they want."""
    return allocate({SHARED: ledger}, wanted, dict.fromkeys(wanted, SHARED))[SHARED]


@pytest.mark.parametrize("corpora", [dict.fromkeys(MEMBERS, SHARED), CORPORA], ids=["shared", "private"])
@given(rounds=rounds)
def test_every_index_is_trained_once_or_owed_or_returned_whoever_dies_is_slow_or_late(
    corpora: dict[str, str], rounds: list[dict[str, tuple[str, float, int]]]
) -> None:
    ledgers = dict[str, Ledger]()
    trained: dict[str, Counter[int]] = defaultdict(Counter)
    for members in rounds:
        held = {m: spans for ledger in ledgers.values() for m, spans in ledger.assigned.items()}
        used = {
            m: round(share * len(indices(held[m])))
            for m, (fate, share, _) in members.items()
            if fate == USED and m in held
        }
        late = {m: held[m] for m, (fate, _, _) in members.items() if fate == LATE and m in held}
        wanted = {m: wants for m, (fate, _, wants) in members.items() if fate == USED}
        for member, n in used.items():
            trained[corpora[member]].update(indices(held[member])[:n])
        ledgers = settle(ledgers, used, late)
        before, ledgers = ledgers, allocate(ledgers, wanted, corpora)
        for corpus, ledger in ledgers.items():
            assert from_record(Ledger, to_record(ledger)) == ledger
            assert all(corpora[member] == corpus for member in ledger.assigned)
            given = {m: len(indices(spans)) for m, spans in ledger.assigned.items() if m not in late}
            assert given == {m: n for m, n in wanted.items() if n and corpora[m] == corpus}
            assert ledger.next == before.get(corpus, Ledger()).next or not ledger.returned, "fresh before returned ones"
            places = [*trained[corpus].elements(), *indices(ledger.owed)]
            assert sorted(places) == list(range(ledger.next))
            assert sorted(trained[corpus].elements()) == indices(ledger.settled)


POOL = Ledger(20, ((0, 3), (7, 9)))
POOLED = dealt(POOL, a=8, b=2)
THREE, TWO, ONE = (dealt(Ledger(), **dict.fromkeys(names, 4)) for names in ("abc", "ab", "a"))
ALLOCATED = {
    "fresh in the order of the members": (Ledger(10), {"b": 4, "a": 4}, 18, (), {"b": ((10, 14),), "a": ((14, 18),)}),
    "returned ones first": (POOL, {"a": 4, "b": 4}, 23, (), {"a": ((0, 3), (7, 8)), "b": ((8, 9), (20, 23))}),
    "both": (POOL, {"a": 8, "b": 2}, 25, (), {"a": ((0, 3), (7, 9), (20, 23)), "b": ((23, 25),)}),
    "what is not needed of the pool stays": (POOL, {"a": 2}, 20, ((2, 3), (7, 9)), {"a": ((0, 2),)}),
    "ranges that touch are one": (Ledger(9, ((7, 9),)), {"a": 4}, 11, (), {"a": ((7, 11),)}),
    "nothing to those that leave": (Ledger(), {"a": 2, "b": 0, "c": 6}, 8, (), {"a": ((0, 2),), "c": ((2, 8),)}),
    "behind what is held": (Ledger(9, ((0, 2),), {"a": ((4, 6),)}), {"a": 3}, 10, (), {"a": ((4, 6), (0, 2), (9, 10))}),
}


@pytest.mark.parametrize("case", ALLOCATED)
def test_allocate_gives(case: str) -> None:
    before, wanted, *after = ALLOCATED[case]
    assert dealt(before, **wanted) == Ledger(*after)


def test_allocate_begins_the_ledger_of_a_corpus_with_its_first_sample() -> None:
    ledgers = allocate({}, {"a": 2, "b": 3, "c": 0}, {"a": "a/1", "b": "b/2", "c": "c/3"})
    assert ledgers == {"a/1": Ledger(2, (), {"a": ((0, 2),)}), "b/2": Ledger(3, (), {"b": ((0, 3),)})}


def test_settle_returns_what_a_lost_member_held_to_its_own_corpus_where_the_node_finds_it_again() -> None:
    corpora = {"a#1": "a/1", "b#1": "b/2", "a#2": "a/1"}
    ledgers = settle(allocate({}, {"a#1": 4, "b#1": 4}, corpora), {"b#1": 4}, {})
    assert ledgers == {"a/1": Ledger(4, ((0, 4),)), "b/2": Ledger(4)}
    ledgers = allocate(ledgers, {"b#1": 4, "a#2": 6}, corpora)
    assert ledgers["b/2"].assigned == {"b#1": ((4, 8),)}
    assert ledgers["a/1"].assigned == {"a#2": ((0, 6),)}


SETTLED = {
    "of members that did not contribute": (THREE, {"b": 4}, {}, Ledger(12, ((0, 4), (8, 12)))),
    "of all": (THREE, {}, {}, Ledger(12, ((0, 12),))),
    "nothing": (THREE, {"a": 4, "b": 4, "c": 4}, {}, Ledger(12)),
    "what members did not come to": (POOLED, {"a": 4, "b": 1}, {}, Ledger(25, ((8, 9), (20, 23), (24, 25)))),
    "nothing of late ones": (TWO, {"a": 4}, {"b": ((4, 8),)}, Ledger(8, (), {"b": ((4, 8),)})),
    "the rest of one that came late": (ONE, {"a": 1}, {"a": ((2, 4),)}, Ledger(4, ((1, 2),), {"a": ((2, 4),)})),
    "nothing of others": (ONE, {"a": 4, "z": 4}, {"y": ((0, 2),)}, Ledger(4)),
}


@pytest.mark.parametrize("case", SETTLED)
def test_settle_returns(case: str) -> None:
    before, used, kept, after = SETTLED[case]
    assert before.settle(used, kept) == after


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"next": 4, "returned": []},
        {"next": None, "returned": [], "assigned": {}},
        {"next": 4, "returned": [[0, 5]], "assigned": {}},
        {"next": 9, "returned": [[3, 3]], "assigned": {}},
        {"next": 9, "returned": [[3, 5], [4, 6]], "assigned": {}},
        {"next": 9, "returned": [[-3, 5]], "assigned": {}},
    ],
)
def test_value_that_is_no_ledger_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Ledger"):
        from_record(Ledger, value)


def test_take_gives_all_when_there_are_fewer() -> None:
    assert take(((0, 2), (5, 6)), 9) == (((0, 2), (5, 6)), ())
