from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroband.data.dataset import Dataset, SourceSamples
from zeroband.data.index import SampleIndex, flat_layout
from zeroband.data.ledger import take
from zeroband.data.loader import IGNORED, Loader, MicroBatch
from zeroband.data.token_store import TokenStore
from zeroband.errors import ConfigError

T = 8
END = 256
OPEN: list[Loader] = []
"""The loaders of a test, closed at its end."""
TEXTS = (b"the first document is longer than a sample", b"x", b"", "ünï→code".encode(), b"the last one")


@pytest.fixture
def store(make_store: Callable[..., TokenStore]) -> TokenStore:
    return make_store(*TEXTS)


def dataset_of(store: TokenStore, seq_length: int, hold_out: float) -> Dataset:
    return Dataset([SourceSamples("", store, SampleIndex(flat_layout(len(store), seq_length), 0, hold_out))])


def loader(store: TokenStore, *, hold_out: float = 0.0, **options: Any) -> Loader:
    defaults = {"batch_size": 4, "micro_bs": 2, "local_rank": 0, "local_world_size": 1, "document_mask": True}
    OPEN.append(Loader(dataset_of(store, T, hold_out), **{**defaults, **options}))
    return OPEN[-1]


@pytest.fixture(autouse=True)
def _close_loaders() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def rows(batches: list[MicroBatch], name: str) -> list[list[int]]:
    return [row for batch in batches for row in getattr(batch, name).tolist()]


def step_of_node(store: TokenStore, ranks: int, **options: Any) -> tuple[list[list[int]], list[list[int]], set[int]]:
    """Tokens and targets of one inner step, joined over the ranks, and the targets that each of them counts."""
    tokens: list[list[int]] = []
    targets: list[list[int]] = []
    counts: set[int] = set()
    for rank in range(ranks):
        one = loader(store, local_rank=rank, local_world_size=ranks, **options)
        one.assign([(3, 5), (8, 20)])
        batches = one.next_step()
        tokens += rows(batches, "tokens")
        targets += rows(batches, "targets")
        counts.add(one.targets_in_step)
    return tokens, targets, counts


@pytest.mark.defect(8)
def test_one_pass_learns_every_token_of_the_corpus_from_the_one_before(store: TokenStore) -> None:
    corpus = store.read(0, len(store)).tolist()
    index = SampleIndex(flat_layout(len(store), T), 0, 0.0)
    reader = loader(store, batch_size=index.n_samples)
    reader.assign([(0, index.n_samples)])
    batches = reader.next_step()
    tokens, targets = (chain.from_iterable(rows(batches, name)) for name in ("tokens", "targets"))
    learned = sorted(pair for pair in zip(tokens, targets, strict=True) if pair[1] != IGNORED)
    assert learned == sorted(pairwise(corpus))
    assert reader.targets_in_step == len(learned) == len(corpus) - 1


def test_micro_batches_have_the_types_that_the_model_takes(store: TokenStore) -> None:
    for mask in (True, False):
        reader = loader(store, document_mask=mask)
        reader.assign([(0, 4)])
        batch = reader.next_step()[0]
        assert (batch.tokens.shape, batch.targets.shape) == ((2, T),) * 2
        assert (batch.tokens.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
        assert (batch.cu_seqlens is not None) == mask
        assert batch.cu_seqlens is None or batch.cu_seqlens.dtype == torch.int32
        tensors = [value for value in vars(batch.to(torch.device("meta"))).values() if isinstance(value, Tensor)]
        assert {tensor.device.type for tensor in tensors} == {"meta"} and len(tensors) == 2 + mask


def test_the_short_sample_is_padded_with_ends_that_are_not_learned(store: TokenStore) -> None:
    index = SampleIndex(flat_layout(len(store), T), 0, 0.0)
    last = index.n_samples - 1
    short = next(i for i in range(index.n_samples) if index.positions([i])[0] == last)
    reader = loader(store, batch_size=1)
    reader.assign([(short, short + 1)])
    (batch,) = reader.next_step()
    learned = len(store) - 1 - last * T
    assert 0 < learned < T
    assert batch.tokens[0, learned:].tolist() == [END] * (T - learned)
    assert batch.targets[0].tolist()[learned:] == [IGNORED] * (T - learned)
    assert reader.targets_in_step == learned


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("micro_bs", [1, 4, 64])
def test_a_step_of_the_node_is_the_same_for_any_number_of_ranks_and_micro_bs(
    store: TokenStore, ranks: int, micro_bs: int
) -> None:
    assert step_of_node(store, ranks, batch_size=6, micro_bs=micro_bs) == step_of_node(
        store, 1, batch_size=6, micro_bs=6
    )


def test_next_step_crosses_the_gap_between_two_ranges_and_reads_no_more_than_was_assigned(store: TokenStore) -> None:
    gapped, plain = loader(store), loader(store)
    gapped.assign([(0, 3), (6, 7)])
    plain.assign([(0, 8)])
    four, eight = rows(gapped.next_step(), "tokens"), rows(plain.next_step() + plain.next_step(), "tokens")
    assert four == [*eight[:3], eight[6]]
    assert gapped.remaining == 0
    gapped.assign([(0, 3)])
    with pytest.raises(AssertionError):
        gapped.next_step()


def test_data_pass_is_that_of_the_last_sample_of_the_step(store: TokenStore) -> None:
    n_train = SampleIndex(flat_layout(len(store), T), 0, 0.0).n_train
    reader = loader(store)
    reader.assign([(n_train - 6, n_train + 2)])
    passes = []
    for _ in range(2):
        reader.next_step()
        passes.append(reader.data_pass)
    assert passes == [0, 1]


@pytest.mark.defect(8)
def test_resuming_twice_reads_what_never_stopping_reads(store: TokenStore) -> None:
    ranges = [(2, 9), (30, 47)]
    steady = loader(store)
    steady.assign(ranges)
    expected = [rows(steady.next_step(), "tokens") for _ in range(6)]

    seen = []
    reader = loader(store)
    reader.assign(ranges)
    for step in range(6):
        if step in (1, 4):
            reader = loader(store, micro_bs=step)
            reader.assign(take(ranges, 4 * step)[1])
        seen.append(rows(reader.next_step(), "tokens"))
    assert seen == expected


def test_a_row_begins_a_document_and_an_end_opens_the_next(make_store: Callable[..., TokenStore]) -> None:
    store = make_store(b"ab", b"cd", b"e", b"f" * 7)
    first = next(i for i in (0, 1) if SampleIndex(flat_layout(len(store), T), 0, 0.0).positions([i])[0] == 0)
    reader = loader(store, batch_size=1)
    reader.assign([(first, first + 1)])
    (batch,) = reader.next_step()
    assert batch.cu_seqlens is not None
    assert batch.tokens[0].tolist() == [97, 98, END, 99, 100, END, 101, END]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 7, 8]


def test_rows_are_laid_end_to_end_and_padding_is_one_document(store: TokenStore) -> None:
    reader = loader(store, batch_size=3, micro_bs=2, even_micro_batches=True)
    reader.assign([(0, 3)])
    full, filled = reader.next_step()
    assert full.cu_seqlens is not None and filled.cu_seqlens is not None
    assert T in full.cu_seqlens.tolist() and full.cu_seqlens[-1] == 2 * T
    assert filled.targets[1].tolist() == [IGNORED] * T
    assert filled.cu_seqlens.tolist()[-2:] == [T, 2 * T]


@pytest.mark.parametrize(
    ("batch_size", "micro_bs", "even_sizes", "sizes"),
    [(5, 2, [2, 2, 2], [2, 2, 1]), (5, 64, [5], [5]), (4, 2, [2, 2], [2, 2])],
)
def test_even_micro_batches_have_as_many_rows_and_the_same_samples(
    store: TokenStore, batch_size: int, micro_bs: int, even_sizes: list[int], sizes: list[int]
) -> None:
    even, plain = (
        loader(store, batch_size=batch_size, micro_bs=micro_bs, even_micro_batches=on) for on in (True, False)
    )
    for reader in (even, plain):
        reader.assign([(0, batch_size)])
    batches, others = even.next_step(), plain.next_step()
    assert [len(batch.tokens) for batch in batches] == even_sizes
    assert [len(batch.tokens) for batch in others] == sizes
    assert rows(batches, "targets")[:batch_size] == rows(others, "targets")
    assert even.targets_in_step == plain.targets_in_step


@pytest.mark.parametrize(
    ("batch_size", "ranks", "nearest"), [(5, 2, "nearest: 4 or 6"), (3, 4, "nearest: 4"), (17, 8, "nearest: 16 or 24")]
)
def test_loader_names_the_nearest_batch_sizes_when_ranks_do_not_divide_it(
    store: TokenStore, batch_size: int, ranks: int, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=rf"train\.batch_size={batch_size} .*{ranks} ranks.*{nearest}$"):
        loader(store, batch_size=batch_size, local_world_size=ranks)


@pytest.fixture
def readers(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that read samples, one for each sample."""
    read, readers = type(store).read, list[str]()

    def note(store: TokenStore, start: int, stop: int) -> Any:
        readers.append(threading.current_thread().name.rpartition("_")[0])
        return read(store, start, stop)

    monkeypatch.setattr(type(store), "read", note)
    return readers


def test_the_next_steps_are_built_beside_this_one_within_the_assignment(store: TokenStore, readers: list[str]) -> None:
    reader = loader(store)
    reader.assign([(0, 12)])
    reader.next_step()
    assert reader.is_ready(10) and reader.remaining == 8
    reader.close()
    assert readers == ["batches"] * 12


def test_what_was_built_ahead_is_not_read_before_it_is_asked_for(store: TokenStore, readers: list[str]) -> None:
    reader, plain = loader(store), loader(store)
    n_train = SampleIndex(flat_layout(len(store), T), 0, 0.0).n_train
    reader.assign([(n_train - 4, n_train + 4)])
    reader.next_step()
    assert (reader.remaining, reader.data_pass) == (4, 0)
    for ranges in ([(20, 28)], [(n_train, n_train + 4)]):
        reader.assign(ranges)
        plain.assign(ranges)
        assert rows(reader.next_step(), "tokens") == rows(plain.next_step(), "tokens")
    assert (reader.remaining, reader.data_pass) == (0, 1)


def test_what_was_built_ahead_serves_the_next_assignment_where_it_begins_alike(
    store: TokenStore, readers: list[str]
) -> None:
    reader = loader(store)
    reader.assign([(0, 8)])
    reader.next_step()
    reader.assign([(4, 40)])
    reader.next_step()
    reader.close()
    assert readers == ["batches"] * 16


def test_step_that_is_not_built_yet_is_not_ready(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, read, may_read = loader(store), type(store).read, threading.Event()

    def wait(store: TokenStore, start: int, stop: int) -> Any:
        assert may_read.wait(10)
        return read(store, start, stop)

    monkeypatch.setattr(type(store), "read", wait)
    reader.assign([(0, 4)])
    assert not reader.is_ready(0.01)
    may_read.set()
    assert reader.is_ready(10) and len(reader.next_step()) == 2


def test_error_of_the_thread_is_that_of_the_step_it_built(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, read, reads = loader(store), type(store).read, list[int]()

    def fail(store: TokenStore, start: int, stop: int) -> Any:
        reads.append(start)
        if len(reads) > 4:
            raise OSError("the storage is away")
        return read(store, start, stop)

    monkeypatch.setattr(type(store), "read", fail)
    reader.assign([(0, 8)])
    assert len(reader.next_step()) == 2
    assert reader.is_ready(10), "to say why it cannot be had"
    with pytest.raises(OSError, match="the storage is away"):
        reader.next_step()


def test_close_ends_the_thread(store: TokenStore) -> None:
    reader, before = loader(store), set(threading.enumerate())
    reader.assign([(0, 12)])
    reader.next_step()
    (thread,) = set(threading.enumerate()) - before
    reader.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_held_out_batches_cover_the_held_out_samples_once_in_lock_step(store: TokenStore, ranks: int) -> None:
    index = SampleIndex(flat_layout(len(store), T), 0, 0.4)
    parts = [
        list(
            loader(store, hold_out=0.4, batch_size=ranks, local_rank=r, local_world_size=ranks).held_out_batches(100, 2)
        )
        for r in range(ranks)
    ]
    assert len({tuple(len(batch.tokens) for batch in part) for part in parts}) == 1
    seen = [row for part in parts for row in rows(part, "targets") if set(row) != {IGNORED}]
    expected = [store.read(*span).tolist()[1:] for span in index.spans(index.held_out_positions(100)).tolist()]
    assert seen == [row + [IGNORED] * (T - len(row)) for row in expected]


def test_held_out_batches_stop_at_the_number_asked_for_and_have_one_size_where_a_model_is_compiled(
    store: TokenStore,
) -> None:
    even, odd = (
        list(loader(store, hold_out=0.4, even_micro_batches=on).held_out_batches(3, 2)) for on in (True, False)
    )
    assert [[len(batch.tokens) for batch in batches] for batches in (even, odd)] == [[2, 2], [2, 1]]
    assert [row for row in rows(even, "targets") if set(row) != {IGNORED}] == rows(odd, "targets")
    assert list(loader(store).held_out_batches(3, 2)) == [], "nothing is held out"


def test_training_never_reads_a_held_out_sample(store: TokenStore) -> None:
    n_train = SampleIndex(flat_layout(len(store), T), 0, 0.4).n_train
    reader = loader(store, hold_out=0.4, batch_size=n_train)
    reader.assign([(0, 3 * n_train)])
    trained = {tuple(row) for _ in range(3) for row in rows(reader.next_step(), "targets")}
    held_out = {tuple(row) for row in rows(list(reader.held_out_batches(100, 4)), "targets")}
    assert len(trained) == n_train
    assert not trained & held_out


def test_arrays_of_a_batch_are_used_again_only_when_nobody_has_them(store: TokenStore) -> None:
    reader = loader(store, batch_size=2)
    reader.assign([(0, 20)])
    kept = [reader.next_step() for _ in range(4)]
    seen = [rows(batches, "tokens") for batches in kept]
    places = {batch.tokens.data_ptr() for batches in kept for batch in batches}
    assert len(places) == 4
    reader.next_step()
    assert [rows(batches, "tokens") for batches in kept] == seen, "nobody wrote over them"
    del kept
    again = [reader.next_step()[0].tokens.data_ptr() for _ in range(4)]
    assert places & set(again) or len(set(again)) < 4, "what was read ahead has places of its own, which come again"
