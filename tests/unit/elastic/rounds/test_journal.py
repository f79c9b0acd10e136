from concurrent.futures import ThreadPoolExecutor

import torch

from zeroband.elastic.rounds.journal import Journal, JournalEntry


def entry(round: int, nbytes: int = 40) -> JournalEntry:
    return JournalEntry(round, torch.full((nbytes,), round, dtype=torch.uint8), {"round": round}, f"digest {round}")


def kept(journal: Journal) -> list[int]:
    return [round for round in range(20) if journal.await_entry(round, patience_s=0.0) is not None]


def filled(*, max_rounds: int, max_bytes: int) -> Journal:
    journal = Journal(max_rounds=max_rounds, max_bytes=max_bytes)
    for round in range(1, 11):
        journal.add(entry(round))
    return journal


def test_journal_returns_what_was_added() -> None:
    added = entry(3)
    journal = Journal(max_rounds=2, max_bytes=1000)
    journal.add(added)
    assert journal.await_entry(3) is added
    assert journal.await_entry(2) is None


def test_journal_keeps_the_newest_rounds() -> None:
    assert kept(filled(max_rounds=3, max_bytes=10_000)) == [8, 9, 10]


def test_journal_keeps_what_fits_into_its_bytes() -> None:
    assert kept(filled(max_rounds=100, max_bytes=4 * 40 + 39)) == [7, 8, 9, 10]


def test_journal_keeps_the_newest_round_even_if_it_is_larger_than_the_bound() -> None:
    assert kept(filled(max_rounds=100, max_bytes=39)) == [10]


def test_journal_entry_that_is_awaited_comes_as_soon_as_it_is_added() -> None:
    journal = filled(max_rounds=3, max_bytes=10_000)
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(journal.await_entry, 11, patience_s=10.0)
        journal.add(added := entry(11))
        assert awaited.result(timeout=1.0) is added


def test_journal_entry_that_is_forgotten_or_does_not_come_is_none() -> None:
    journal = filled(max_rounds=3, max_bytes=10_000)
    assert journal.await_entry(7, patience_s=10.0) is None
    assert journal.await_entry(11, patience_s=0.01) is None


def recorded(journal: Journal, round: int, values: torch.Tensor) -> None:
    journal.record(round, values.clone, {}, "digest")


def test_update_is_packed_from_the_values_that_were_there_until_settled() -> None:
    journal, values = Journal(max_rounds=2, max_bytes=1 << 30), torch.ones(1 << 22, dtype=torch.uint8)
    recorded(journal, 1, values)
    journal.settle()
    values.zero_()
    packed = journal.await_entry(1)
    assert packed is not None and packed.update.eq(1).all()


def test_rounds_are_recorded_in_their_order_and_a_cut_comes_after_them() -> None:
    journal, values = Journal(max_rounds=8, max_bytes=1 << 30), torch.ones(1 << 22, dtype=torch.uint8)
    for round in range(1, 4):
        recorded(journal, round, values)
    assert journal.await_entry(3) is not None and kept(journal) == [1, 2, 3]
    recorded(journal, 4, values)
    journal.cut(5)
    assert kept(journal) == []


def test_small_entries_come_after_large_ones_and_the_other_way_round() -> None:
    """Means of a node alone travel nowhere and are kept as they are; those of several are kept encoded."""
    journal = Journal(max_rounds=100, max_bytes=100)
    for round, nbytes in enumerate([60, 60, 10, 10, 90, 10]):
        journal.add(entry(round, nbytes))
    assert kept(journal) == [4, 5]
