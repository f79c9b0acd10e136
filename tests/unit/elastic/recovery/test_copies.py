import os
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from zeroband.elastic.recovery import serving, state_chunks
from zeroband.elastic.recovery.serving import COPY_LIFE_S, IDLE_S, Copies, Entries, Hasher, Served
from zeroband.elastic.recovery.state_chunks import StateManifest, chunk_hash, parse_manifest
from zeroband.state.round_state import LiveState, RoundState, RoundUpdate

TIMEOUT_S = 10.0


def state_of(round: int, **sections: Tensor) -> RoundState:
    return RoundState(round, {}, "digest", sections or {"params": torch.arange(5.0)})


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s


class Trainer:
    """A donor's training, as the copies see it."""

    def __init__(self) -> None:
        self.round = 3
        self.copied: list[int] = []

    def copy_state(self) -> RoundState:
        self.copied.append(self.round)
        return state_of(self.round)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(serving, "time", clock)
    return clock


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    hasher = Hasher(chunk_bytes=8)
    yield hasher
    hasher.close()


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def copies(clock: Clock, hasher: Hasher, trainer: Trainer) -> Copies:
    return Copies(trainer.copy_state, hasher, lambda: trainer.round)


def manifest_of(served: Served | None, first: int = 0) -> StateManifest:
    """What it says from a chunk on, once it is hashed."""
    assert served is not None
    made = served.manifest(first)
    assert made is not None
    data = made.result(TIMEOUT_S)
    assert data is not None
    return parse_manifest(data, None)


def is_held(copies: Copies, round: int) -> bool:
    return copies.held(round) is not None


def test_one_copy_of_a_round_serves_all_who_ask_at_once(copies: Copies, trainer: Trainer) -> None:
    asked = [threading.Thread(target=ask) for ask in (copies.newest, lambda: copies.at(3)) for _ in range(4)]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join(TIMEOUT_S)
    assert trainer.copied == [3]


@pytest.mark.defect(9)
def test_newest_copy_follows_the_rounds(copies: Copies, trainer: Trainer) -> None:
    assert manifest_of(copies.newest()).round == 3
    trainer.round = 4
    assert manifest_of(copies.newest()).round == 4
    assert trainer.copied == [3, 4]
    assert is_held(copies, 3)


def test_at_most_two_copies_are_kept_and_the_one_unused_for_longest_goes(
    copies: Copies, trainer: Trainer, clock: Clock
) -> None:
    for trainer.round in (3, 4):
        manifest_of(copies.newest())
        clock.now_s += IDLE_S + 1
    manifest_of(copies.at(3))
    clock.now_s += IDLE_S + 1
    trainer.round = 5
    manifest_of(copies.newest())
    assert [round for round in range(10) if is_held(copies, round)] == [3, 5]


def test_copies_in_use_are_not_given_up_for_a_third(copies: Copies, trainer: Trainer, clock: Clock) -> None:
    for trainer.round in (3, 4):
        manifest_of(copies.newest())
    trainer.round = 5
    assert copies.newest().state.round == 4
    old, new = copies.held(3), copies.held(4)
    assert old is not None and new is not None
    with old.sending(), new.sending():
        clock.now_s += 10 * COPY_LIFE_S
        copies.drop_unused()
        assert copies.newest().state.round == 4
    clock.now_s += IDLE_S + 1
    assert copies.newest().state.round == 5
    assert trainer.copied == [3, 4, 5]


def test_older_round_is_served_while_a_newer_copy_is_made(hasher: Hasher, trainer: Trainer) -> None:
    is_copying, go_on = threading.Event(), threading.Event()

    def copy_state() -> RoundState:
        if trainer.round == 4:
            is_copying.set()
            go_on.wait(TIMEOUT_S)
        return trainer.copy_state()

    copies = Copies(copy_state, hasher, lambda: trainer.round)
    manifest_of(copies.newest())
    trainer.round = 4
    thread = threading.Thread(target=copies.newest)
    thread.start()
    assert is_copying.wait(TIMEOUT_S)
    assert is_held(copies, 3)
    assert manifest_of(copies.at(3)).round == 3
    go_on.set()
    thread.join(TIMEOUT_S)
    assert is_held(copies, 4)


def test_copy_that_nobody_asks_for_is_dropped(copies: Copies, clock: Clock) -> None:
    manifest_of(copies.newest())
    clock.now_s += COPY_LIFE_S
    copies.drop_unused()
    assert is_held(copies, 3)
    clock.now_s += COPY_LIFE_S + 1
    copies.drop_unused()
    assert not is_held(copies, 3)


@pytest.mark.parametrize("round", [2, 5])
def test_round_that_passed_or_is_far_ahead_is_refused_at_once_and_without_a_copy(
    copies: Copies, trainer: Trainer, clock: Clock, round: int
) -> None:
    asked_at_s = clock.now_s
    assert copies.at(round) is None
    assert clock.now_s == asked_at_s
    assert trainer.copied == []


def test_round_that_does_not_come_is_awaited_for_a_moment_only(copies: Copies, trainer: Trainer, clock: Clock) -> None:
    asked_at_s = clock.now_s
    assert copies.at(4) is None
    assert 1 < clock.now_s - asked_at_s < 5
    assert trainer.copied == []


def test_round_that_is_about_to_come_is_awaited(
    copies: Copies, trainer: Trainer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "sleep", lambda pause_s: setattr(trainer, "round", 4))
    assert manifest_of(copies.at(4)).round == 4


class Training:
    """A state that changes where it lies."""

    def __init__(self) -> None:
        self.round = 3
        self.lock = threading.Lock()
        self.sections = {"params": torch.arange(5.0)}

    def live_state(self) -> LiveState:
        return LiveState(self.round, {}, "digest", self.sections, lock=self.lock, round_now=lambda: self.round)


def test_state_itself_is_served_until_its_next_round_and_makes_room_at_once(clock: Clock, hasher: Hasher) -> None:
    training = Training()
    copies = Copies(training.live_state, hasher, lambda: training.round)
    for training.round in range(3, 8):
        assert manifest_of(copies.newest()).round == training.round
        held = copies.held(training.round)
        assert held is not None
        assert held.state.sections["params"].data_ptr() == training.sections["params"].data_ptr()
        training.round += 1
        assert held.chunk("params", 0, torch.empty(20, dtype=torch.uint8)) is None
        assert copies.at(training.round - 1) is None


def test_chunks_are_hashed_once_and_not_before_somebody_is_about_to_fetch_them(
    hasher: Hasher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_chunks, "STRETCH", 2)
    hashed = list[bytes]()
    monkeypatch.setattr(serving, "chunk_hash", lambda view: (hashed.append(bytes(view)), chunk_hash(view))[1])
    data = torch.arange(10.0).view(torch.uint8).numpy().tobytes()
    state = Served(hasher, state_of(3, params=torch.arange(10.0), short=torch.arange(3.0)))
    assert hashed == []
    for first, seen in ((0, [(0, 8), (8, 16), (0, 8), (8, 12)]), (1, [(16, 24)]), (0, []), (4, [(32, 40)])):
        hashed.clear()
        manifest = manifest_of(state, first)
        assert hashed == [data[start:stop] for start, stop in seen]
        assert manifest.first == first and len(manifest.sections["params"].hashes) == min(2, 5 - first)
        assert manifest.sections["params"].hashes[0] == chunk_hash(data[8 * first : 8 * first + 8])
        assert len(manifest.sections["short"].hashes) == max(2 - first, 0)
    assert state.manifest(5) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives threads a priority of their own")
def test_hashes_leave_the_cores_to_the_inner_steps(hasher: Hasher) -> None:
    own, theirs = os.getpriority(os.PRIO_PROCESS, 0), Future[int]()
    hasher.start(lambda room: theirs.set_result(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert theirs.result(timeout=30.0) == max(own, 10) and os.getpriority(os.PRIO_PROCESS, 0) == own


def test_hashes_of_a_state_that_changes_meanwhile_are_given_up(hasher: Hasher, monkeypatch: pytest.MonkeyPatch) -> None:
    training, hash_of = Training(), serving.chunk_hash

    def hash_beside_training(view: memoryview) -> str:
        training.round += 1
        return hash_of(view)

    monkeypatch.setattr(serving, "chunk_hash", hash_beside_training)
    made = Served(hasher, training.live_state()).manifest(0)
    assert made is not None and made.result(TIMEOUT_S) is None


def test_entry_is_hashed_once_and_not_kept_longer_than_by_the_journal(hasher: Hasher) -> None:
    journal = {5: RoundUpdate(5, torch.ones(2).view(torch.uint8), {}, "digest")}
    entries, lives = Entries(journal.get, hasher), weakref.ref(journal[5])
    assert manifest_of(entries.at(5)).round == 5
    assert entries.at(5) is entries.at(5)
    assert entries.at(6) is None
    del journal[5]
    assert entries.at(5) is None
    entries.drop_unused()
    has_let_go = threading.Event()
    hasher.start(lambda room: has_let_go.set())
    assert has_let_go.wait(TIMEOUT_S)
    assert lives() is None


def test_hashes_of_two_states_are_not_computed_at_once(hasher: Hasher, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun, hash_of = threading.Event(), list[memoryview](), serving.chunk_hash

    def hash_later(view: memoryview) -> str:
        begun.append(view)
        assert go_on.wait(TIMEOUT_S)
        return hash_of(view)

    monkeypatch.setattr(serving, "chunk_hash", hash_later)
    states = [Served(hasher, state_of(round)) for round in (3, 4)]
    for state in states:
        made = state.manifest(0)
        assert made is not None
        with pytest.raises(TimeoutError):
            made.result(0.02)
    assert len(begun) == 1
    go_on.set()
    assert [manifest_of(state).round for state in states] == [3, 4]


def test_closed_hasher_promises_nothing_more() -> None:
    hasher = Hasher(chunk_bytes=8)
    hasher.close()
    made = Served(hasher, state_of(3)).manifest(0)
    assert made is not None and made.cancelled()
