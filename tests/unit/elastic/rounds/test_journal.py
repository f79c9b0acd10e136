import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from zeroband.elastic.rounds import journal as journal_module
from zeroband.elastic.rounds.journal import Journal, JournalBounds, Keep
from zeroband.state.round_state import RoundUpdate

HOUR_S = 3600.0
MANY_BYTES = 1 << 30


def entry(round: int, nbytes: int = 40) -> RoundUpdate:
    return RoundUpdate(round, torch.full((nbytes,), round, dtype=torch.uint8), {"round": round}, f"digest {round}")


def kept(journal: Journal) -> list[int]:
    return [round for round in range(20) if journal.await_entry(round, timeout_s=0.0) is not None]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path, JournalBounds(HOUR_S, MANY_BYTES))


def filled(folder: Path, *, max_rounds: int = 100, max_bytes: int = 10_000) -> Journal:
    journal = Journal(folder, JournalBounds(HOUR_S, max_bytes, max_rounds))
    for round in range(1, 11):
        journal.add(entry(round))
    return journal


def test_journal_returns_what_was_added(journal: Journal) -> None:
    journal.add(added := entry(3))
    assert journal.await_entry(3) is added
    assert journal.await_entry(2) is None


def test_entries_hold_no_descriptors(journal: Journal, tmp_path: Path) -> None:
    """A process has 1024 of them, and a run with a round for each step soon has more entries."""

    def held() -> list[str]:
        """Files of the journal among the descriptors; those of other tests come and go."""
        targets = []
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # it was that of the folder itself
                targets.append(str(entry.readlink()))
        return [target for target in targets if target.startswith(str(tmp_path))]

    with (tmp_path / "shown").open("w"):
        assert len(held()) == 1
    for round in range(50):
        room = journal.room(40)
        room.fill_(round)
        journal.add(RoundUpdate(round, room, {"round": round}, f"digest {round}"))
    assert held() == []
    first = journal.await_entry(0)
    assert first is not None and first.update.tolist() == [0] * 40


def test_journal_keeps_the_newest_rounds(tmp_path: Path) -> None:
    assert kept(filled(tmp_path, max_rounds=3)) == [8, 9, 10]


def test_journal_keeps_what_fits_into_its_bytes(tmp_path: Path) -> None:
    assert kept(filled(tmp_path, max_bytes=4 * 40 + 39)) == [7, 8, 9, 10]


def test_journal_keeps_the_newest_round_even_if_it_is_larger_than_the_bound(tmp_path: Path) -> None:
    assert kept(filled(tmp_path, max_bytes=39)) == [10]


def test_journal_keeps_the_rounds_of_its_time_and_the_newest_in_any_case(tmp_path: Path) -> None:
    now_s = [0.0]
    journal = Journal(tmp_path, JournalBounds(HOUR_S, MANY_BYTES), clock=lambda: now_s[0])
    for round in range(1, 11):
        now_s[0] += HOUR_S / 3
        journal.add(entry(round))
    assert kept(journal) == [7, 8, 9, 10]
    now_s[0] += 10 * HOUR_S
    assert 10 in kept(journal)
    journal.add(entry(11))
    assert kept(journal) == [11]


def test_what_is_packed_lies_on_disk_and_its_place_is_given_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path, JournalBounds(HOUR_S, max_bytes=3 << 20))
    for round in range(1, 6):
        recorded(journal, round, torch.full((1 << 20,), round, dtype=torch.uint8))
    journal.settle()
    assert kept(journal) == [3, 4, 5]
    assert mapped_files(tmp_path) == 3
    assert list(tmp_path.iterdir()) == []


def test_entries_that_nobody_reads_take_no_memory_of_the_process(tmp_path: Path) -> None:
    """As many after 10 rounds as after 3; what is read is there again, and read entries alone take memory."""
    journal, found = Journal(tmp_path, JournalBounds(HOUR_S, MANY_BYTES)), dict[int, int]()
    for round in range(1, 11):
        recorded(journal, round, torch.full((1 << 20,), round, dtype=torch.uint8))
        journal.settle()
        fetched = journal.room(1 << 20).fill_(100 + round)
        journal.add(RoundUpdate(100 + round, fetched, {}, "digest"))
        found[round] = resident_bytes(tmp_path)
    assert found[3] == found[10] == 0
    for round in (4, 104):
        kept = journal.await_entry(round)
        assert kept is not None and kept.update.eq(round).all()
    assert resident_bytes(tmp_path) == 2 << 20


def test_entry_that_is_in_memory_stays_as_it_is(journal: Journal) -> None:
    """Where the disk had no room for it: whole pages of memory, as those of a file are."""
    pages = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    journal.add(RoundUpdate(1, torch.frombuffer(pages, dtype=torch.uint8).fill_(5), {}, "digest"))
    kept = journal.await_entry(1)
    assert kept is not None and kept.update.eq(5).all()


def resident_bytes(folder: Path) -> int:
    """Of what this process has mapped of files in a folder."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_ours = f" {folder}/" in line
        elif is_ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def mapped_files(folder: Path) -> int:
    return sum(f" {folder}/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_entry_that_is_read_stays_though_the_journal_forgets_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path, JournalBounds(HOUR_S, max_bytes=1 << 20))
    recorded(journal, 1, torch.ones(1 << 20, dtype=torch.uint8))
    held = journal.await_entry(1)
    recorded(journal, 2, torch.zeros(1 << 20, dtype=torch.uint8))
    journal.settle()
    assert kept(journal) == [2]
    assert held is not None and held.update.eq(1).all()


def test_round_that_finds_no_room_ends_the_journal_and_not_the_run(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(journal, 1, torch.ones(8, dtype=torch.uint8))
    journal.settle()
    with monkeypatch.context() as patched:
        patched.setattr(journal_module.os, "posix_fallocate", full)
        recorded(journal, 2, torch.ones(8, dtype=torch.uint8))
        journal.settle()
    assert kept(journal) == [] and "the journal cannot be written" in caplog.text
    recorded(journal, 3, torch.ones(8, dtype=torch.uint8))
    journal.settle()
    assert kept(journal) == [3]


def full(*_arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_journal_entry_that_is_awaited_comes_as_soon_as_it_is_added(tmp_path: Path) -> None:
    journal = filled(tmp_path, max_rounds=3)
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(journal.await_entry, 11, timeout_s=10.0)
        journal.add(added := entry(11))
        assert awaited.result(timeout=1.0) is added


def test_journal_entry_that_is_forgotten_or_does_not_come_is_none(tmp_path: Path) -> None:
    journal = filled(tmp_path, max_rounds=3)
    assert journal.await_entry(7, timeout_s=10.0) is None
    assert journal.await_entry(11, timeout_s=0.01) is None


def recorded(journal: Journal, round: int, values: torch.Tensor) -> None:
    def pack(keep: Keep) -> torch.Tensor:
        return keep(values)

    journal.record(round, pack, {}, "digest", values=values.numel())


def test_update_is_packed_from_the_values_that_were_there_until_settled(journal: Journal) -> None:
    values = torch.ones(1 << 22, dtype=torch.uint8)
    recorded(journal, 1, values)
    journal.settle()
    values.zero_()
    packed = journal.await_entry(1)
    assert packed is not None and packed.update.eq(1).all()


def test_rounds_are_recorded_in_their_order_and_a_cut_comes_after_them(journal: Journal) -> None:
    values = torch.ones(1 << 22, dtype=torch.uint8)
    for round in range(1, 4):
        recorded(journal, round, values)
    assert journal.await_entry(3) is not None and kept(journal) == [1, 2, 3]
    recorded(journal, 4, values)
    journal.cut(5)
    assert kept(journal) == []


def test_small_entries_come_after_large_ones_and_the_other_way_round(tmp_path: Path) -> None:
    """Means of a node alone travel nowhere and are kept as they are; those of several are kept encoded."""
    journal = Journal(tmp_path, JournalBounds(HOUR_S, max_bytes=100))
    for round, nbytes in enumerate([60, 60, 10, 10, 90, 10]):
        journal.add(entry(round, nbytes))
    assert kept(journal) == [4, 5]
