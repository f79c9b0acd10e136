"""The micro-batches of one rank. Reads the token stores where the data set says; talks to no other rank.

A thread builds the batches of the next inner step meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zeroband.data.dataset import Dataset, Sample
from zeroband.data.index import rank_share, require_even_shares
from zeroband.data.ledger import Range, count, take

IGNORED = -100
"""Target of a place that is not learned: padding, and in conversations what the assistant does not say."""

_NO_SAMPLE = Sample(0, 0, 0)
"""A row that only pads a batch."""

_EXPECTED = 1 << 16
"""Samples that stores are told of before they are read."""

_STEPS_AHEAD = 2
"""One that is ready, and one that the thread is about."""

_MOST_KEPT = 7
"""Arrays of tokens and targets: of the step that is trained, the one before it, and those that are built."""

_CLOSE_S = 5.0
"""A step is built in milliseconds, unless the storage of the tokens hangs."""


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass."""

    tokens: Tensor
    """(b, t) int64."""
    targets: Tensor
    """(b, t) int64: the token after each one; IGNORED where it is not learned."""
    cu_seqlens: Tensor | None
    """(documents + 1,) int32: where each document begins in the b t places of all rows laid end to end, and the end. A
    row begins a document, and so does an end-of-document token of text, from which alone the first token of the next
    one is predicted, and the first token of a conversation. None without document mask."""
    sources: Tensor | None = None
    """(b,) int64: the number of the source of each row. None with a single source."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return these rows on a device; pinned ones get there without a wait here."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        """Return these rows in memory that a GPU copies from by itself."""
        return self._each(Tensor.pin_memory)

    def _each(self, do: Callable[[Tensor], Tensor]) -> MicroBatch:
        lengths = None if self.cu_seqlens is None else do(self.cu_seqlens)
        sources = None if self.sources is None else do(self.sources)
        return MicroBatch(do(self.tokens), do(self.targets), lengths, sources)


@dataclass(frozen=True)
class _BuiltStep:
    """What one inner step reads."""

    batches: list[MicroBatch]
    targets: tuple[int, ...]
    """Targets of the whole node from each source."""
    passes: tuple[float, ...]
    """Over each source, before the last sample."""


class Loader:
    """What one rank of a node reads: its share of each inner step's batch, along the ranges assigned to the node.

    The samples of a node in one inner step depend on neither its number of ranks nor micro_bs. All ranks are given the
    same ranges.
    Raises: ConfigError when the batch cannot be shared out evenly.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        micro_bs: int,
        local_rank: int,
        local_world_size: int,
        document_mask: bool,
        even_micro_batches: bool = False,
        pins: bool = False,
    ) -> None:
        require_even_shares(batch_size, local_world_size)
        self.dataset = dataset
        self._stores = [source.store for source in dataset.sources]
        self._batch_size = batch_size
        self._micro_bs = micro_bs
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        self._document_mask = document_mask
        self._even_micro_batches = even_micro_batches
        self._pins = pins
        self._ranges: tuple[Range, ...] = ()
        self._forecast = AssignmentForecast(_EXPECTED)
        self._arrays = _Arrays()
        self._targets: tuple[int, ...] = ()
        self._passes: tuple[float, ...] = ()
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: deque[tuple[tuple[Range, ...], Future[_BuiltStep]]] = deque()
        """The samples of the next steps, while or after the thread builds them. They are not read before they are asked
        for, and of no use where the assignment changes."""

    @property
    def remaining(self) -> int:
        """Samples of the node's assignment that are not read yet."""
        return count(self._ranges)

    @property
    def targets_in_step(self) -> int:
        """Targets of the whole node in the last step, the same number on each of its ranks: the loss's denominator.

        Conversations may have none in a step.
        """
        return sum(self._targets)

    @property
    def targets_by_source(self) -> tuple[int, ...]:
        """`targets_in_step` that are of each source."""
        return self._targets

    @property
    def data_pass(self) -> int:
        """The pass over the data that the last step ended in; of several sources the lowest."""
        return int(min(self._passes, default=0))

    @property
    def passes(self) -> tuple[float, ...]:
        """Passes over each source up to the last step."""
        return self._passes

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources, where there are several."""
        return tuple(source.name for source in self.dataset.sources) if self.dataset.is_mixed else ()

    def assign(self, ranges: Sequence[Range]) -> None:
        """Take these samples as the node's work from now on; what is left of an earlier assignment is dropped."""
        self._ranges = tuple(ranges)
        self._forecast.assign(ranges)
        self._tell_stores()

    def next_step(self) -> list[MicroBatch]:
        """This rank's part of the next inner step; the last micro-batch may be smaller than the others.

        On the CPU. Has the steps after it built meanwhile, if they are assigned already.
        """
        assert self.remaining >= self._batch_size, (self.remaining, self._batch_size)
        self._build_ahead()
        step = self._ahead.popleft()[1].result()
        self._ranges = take(self._ranges, self._batch_size)[1]
        self._forecast.read(self._batch_size)
        self._build_ahead()
        self._targets, self._passes = step.targets, step.passes
        self._tell_stores()
        return step.batches

    def is_ready(self, timeout_s: float) -> bool:
        """Wait at most so long for the samples of the next inner step; whether they are there, or why they are not."""
        self._build_ahead()
        return bool(concurrent.futures.wait([self._ahead[0][1]], timeout_s).done)

    def close(self) -> None:
        """End the thread. Called once, by the owner."""
        self.dataset.close()
        concurrent.futures.wait([step for _, step in self._ahead], timeout=_CLOSE_S)
        self._builder.shutdown(wait=False, cancel_futures=True)

    def n_held_out(self, source: int = 0) -> int:
        """Samples that are held out of a source."""
        return self.dataset.sources[source].index.n_held_out

    def held_out_batches(self, n: int, batch: int, source: int = 0, *, first: int = 0) -> Iterator[MicroBatch]:
        """This rank's share of n held-out samples of a source, from the `first`-th on, `batch` rows at a time.

        All ranks yield equally many batches of equal sizes, so a sharded model runs in lock step: rows without a sample
        have no targets. With `even_micro_batches` the last batch is filled up with them, too. Summed over the ranks,
        losses and targets are those of the samples, each once.
        """
        samples = self.dataset.held_out(n, source, first=first)
        self._tell_stores(first=samples)
        unit = self._local_world_size * (batch if self._even_micro_batches else 1)
        padding = -len(samples) % unit
        share = rank_share([*samples, *[_NO_SAMPLE] * padding], self._local_rank, self._local_world_size)
        for first in range(0, len(share), batch):
            yield from self._micro_batches(share[first : first + batch], batch)

    def state_dict(self) -> dict[str, Any]:
        """The samples still to be read: a few integers, the same on all ranks."""
        return {"ranges": [list(span) for span in self._ranges]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the loader that gave the state was; it may have had other ranks and another micro_bs."""
        self._ranges = tuple((int(start), int(stop)) for start, stop in state["ranges"])

    def _build_ahead(self) -> None:
        """Have the thread build the next steps of the assignment, those that it does not build already."""
        rest = self._ranges
        for place in range(_STEPS_AHEAD):
            batch, rest = take(rest, self._batch_size)
            if count(batch) < self._batch_size:
                break
            if place < len(self._ahead) and self._ahead[place][0] != batch:
                while len(self._ahead) > place:
                    self._ahead.pop()[1].cancel()
            if place == len(self._ahead):
                self._ahead.append((batch, self._builder.submit(self._build, batch)))

    def _tell_stores(self, first: Sequence[Sample] = ()) -> None:
        """Tell stores that fetch what is read next, if it is time for it: some samples, and what is foreseen."""
        if not self.dataset.is_fetched or not (first or self._forecast.is_due):
            return
        expected = self._forecast.tell()
        sources, spans = self.dataset.spans(_indices(expected))
        for number, source in enumerate(self.dataset.sources):
            before = [(start, stop) for one, start, stop in first if one == number]
            source.store.expect([*before, *map(tuple, spans[sources == number].tolist())])

    def _build(self, batch: Sequence[Range]) -> _BuiltStep:
        """Read the samples of an inner step. Any thread."""
        indices = _indices(batch)
        samples = self.dataset.samples(indices)
        share = list(rank_share(samples, self._local_rank, self._local_world_size))
        size = min(self._micro_bs, len(share))
        if self._even_micro_batches:
            share += [_NO_SAMPLE] * (-len(share) % size)
        batches = [batch.pinned() if self._pins else batch for batch in self._micro_batches(share, size)]
        targets = [0] * len(self.dataset.sources)
        for source, start, stop in samples:
            targets[source] += self._stores[source].count_learned(start + 1, stop)
        return _BuiltStep(batches, tuple(targets), self.dataset.passes(indices[-1]))

    def _micro_batches(self, samples: Sequence[Sample], size: int) -> list[MicroBatch]:
        """Read samples and cut them into micro-batches, whose rows lie in one array: that spares memory traffic."""
        length, end, stores = self.dataset.seq_length, self.dataset.end_of_document, self._stores
        ids = np.full((len(samples), length + 1), end, dtype=self.dataset.dtype)  # (samples, t + 1)
        usual = [store.is_plain and store.end_of_document == end for store in stores]
        special: list[int] = []
        for row, (source, start, stop) in enumerate(samples):
            if stop - start <= length or not usual[source]:
                special.append(row)
            if stop > start:
                stores[source].read_into(start, stop, ids[row, : stop - start])
        tokens, targets = self._arrays.take(len(samples), length), self._arrays.take(len(samples), length)
        tokens[:], targets[:] = ids[:, :-1], ids[:, 1:]  # (samples, t) each
        begins = ids[:, :-1] == end  # (samples, t)
        for row in special:
            source, start, stop = samples[row]
            n = max(0, stop - start - 1)
            tokens[row, n:], targets[row, n:], begins[row, n:] = end, IGNORED, False  # padding is one document
            if n and not stores[source].is_plain:
                targets[row, :n][~stores[source].is_learned(start + 1, stop)] = IGNORED
            if n and not usual[source]:
                begins[row, :n] = stores[source].begins(start, ids[row, :n])
        sources = torch.tensor([sample.source for sample in samples]) if self.dataset.is_mixed else None
        return [
            MicroBatch(
                torch.as_tensor(tokens[part]),
                torch.as_tensor(targets[part]),
                _cu_seqlens(begins[part]) if self._document_mask else None,
                None if sources is None else sources[part],
            )
            for part in (slice(first, first + size) for first in range(0, len(samples), size))
        ]


class AssignmentForecast:
    """What a node was dealt, and behind it what it will be if each assignment lies as far from the last as this one.

    `samples`: how far it reaches. A guess that is wrong costs what was fetched for it, and nothing else.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._dealt: tuple[Range, ...] = ()
        self._last: Range | None = None
        self._shift = 0
        self._told: tuple[Range, ...] = ()

    @property
    def is_due(self) -> bool:
        """Whether `tell` would say what it has not said before, and it is time for it."""
        left = count(self._told)
        return left < self._samples // 2 and (self._shift > 0 or left < count(self._dealt))

    def assign(self, ranges: Sequence[Range]) -> None:
        """Take note of what the node is dealt; what was foreseen need not be told again."""
        before, self._dealt = self._last, tuple(ranges)
        self._last = self._dealt[-1] if self._dealt else before
        self._shift = 0 if before is None or self._last is None else max(0, self._last[0] - before[0])
        if _joined(take(self._told, count(self._dealt))[0]) != _joined(self._dealt):
            self._told = ()

    def read(self, samples: int) -> None:
        """Take note that this many samples were read."""
        self._dealt, self._told = take(self._dealt, samples)[1], take(self._told, samples)[1]

    def tell(self) -> tuple[Range, ...]:
        """Return what is read next, in this order."""
        ranges, (start, stop) = [*self._dealt], self._last or (0, 0)
        while self._shift and stop > start and count(ranges) < self._samples:
            start, stop = start + self._shift, stop + self._shift
            ranges.append((start, stop))
        self._told = take(ranges, self._samples)[0]
        return self._told


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """The ranges, those that follow each other as one."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


class _Arrays:
    """Arrays that are free to be used again: what malloc gives back and gets anew costs more than to fill.

    Any thread.
    """

    def __init__(self) -> None:
        self._kept: list[npt.NDArray[np.int64]] = [np.empty((0, 0), dtype=np.int64)]
        self._lock = threading.Lock()
        (self._unused,) = self._references()
        """References to an array that only the list of them has; how many that are, Python's version says."""

    def take(self, rows: int, length: int) -> npt.NDArray[np.int64]:
        """Return an array of any content. Shapes: (rows, length)."""
        with self._lock:
            for place, references in enumerate(self._references()):
                if references == self._unused and self._kept[place].shape == (rows, length):
                    return self._kept[place]
            array = np.empty((rows, length), dtype=np.int64)
            self._kept = [*self._kept[-_MOST_KEPT:], array]
            return array

    def _references(self) -> list[int]:
        return [sys.getrefcount(array) for array in self._kept]


def _indices(ranges: Sequence[Range]) -> list[int]:
    return list(itertools.chain.from_iterable(range(start, stop) for start, stop in ranges))


def _cu_seqlens(begins: npt.NDArray[np.bool_]) -> Tensor:
    """`MicroBatch.cu_seqlens` of rows whose documents begin where `begins` (b, t) says."""
    begins[:, 0] = True
    return torch.as_tensor(np.append(np.flatnonzero(begins), begins.size).astype(np.int32))
