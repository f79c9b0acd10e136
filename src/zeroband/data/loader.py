"""Builds the micro-batches of one rank from the token stores; a thread prepares the next inner steps."""

from __future__ import annotations

import concurrent.futures
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zeroband.data.dataset import Dataset, Sample
from zeroband.data.index import rank_share, require_even_shares
from zeroband.data.ledger import Range, count, take

IGNORED = -100
"""Target of tokens without loss: padding, and in conversations all but the assistant's words."""

_NO_SAMPLE = Sample(0, 0, 0)
"""A padding row."""

_PREFETCH_SAMPLES = 1 << 16

_STEPS_AHEAD = 2
"""One ready, one being built."""

_POOL_SIZE = 7
"""Arrays of tokens and targets: of the current step, the previous one, and those being built."""

_CLOSE_S = 5.0
"""A step is built in milliseconds unless storage hangs."""


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass."""

    tokens: Tensor
    """(b, t) int64."""
    targets: Tensor
    """(b, t) int64: the next token, or IGNORED."""
    cu_seqlens: Tensor | None
    """(documents + 1,) int32: start of each document in the flattened (b t,) rows, and b t. None without document mask.

    A document starts at the start of a row, at an end-of-document token of text (it predicts the next document's first
    token), and at the first token of a conversation."""
    sources: Tensor | None = None
    """(b,) int64: index of each row's source. None with a single source."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device; asynchronous from pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        """Return a copy in pinned memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> MicroBatch:
        cu_seqlens = None if self.cu_seqlens is None else function(self.cu_seqlens)
        sources = None if self.sources is None else function(self.sources)
        return MicroBatch(function(self.tokens), function(self.targets), cu_seqlens, sources)


@dataclass(frozen=True)
class _BuiltStep:
    """Batches and counts of one inner step."""

    batches: list[MicroBatch]
    targets: tuple[int, ...]
    """Targets of the whole node, by source."""
    passes: tuple[float, ...]
    """Passes over each source before the last sample."""


class Loader:
    """Yields one rank's share of each inner step's batch, from the sample ranges assigned to the node.

    All ranks are assigned the same ranges. The samples of an inner step depend neither on the number of ranks nor on
    micro_bs.
    Raises: ConfigError if the batch does not divide evenly among the ranks.
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
        self._forecast = AssignmentForecast(_PREFETCH_SAMPLES)
        self._arrays = _ArrayPool()
        self._targets: tuple[int, ...] = ()
        self._passes: tuple[float, ...] = ()
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: deque[tuple[tuple[Range, ...], Future[_BuiltStep]]] = deque()
        """Samples and result of the next steps, finished or being built; discarded if the assignment changes."""

    @property
    def remaining(self) -> int:
        """Assigned samples not read yet."""
        return count(self._ranges)

    @property
    def targets_in_step(self) -> int:
        """Targets of the whole node in the last step, the loss's denominator; conversations may have none."""
        return sum(self._targets)

    @property
    def targets_by_source(self) -> tuple[int, ...]:
        """`targets_in_step` of each source."""
        return self._targets

    @property
    def data_pass(self) -> int:
        """The pass over the data in which the last step ended; the lowest of several sources."""
        return int(min(self._passes, default=0))

    @property
    def passes(self) -> tuple[float, ...]:
        """Passes over each source up to the last step."""
        return self._passes

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources of a mixture; empty for a single source."""
        return tuple(source.name for source in self.dataset.sources) if self.dataset.is_mixed else ()

    def assign(self, ranges: Sequence[Range]) -> None:
        """Replace the node's assignment."""
        self._ranges = tuple(ranges)
        self._forecast.assign(ranges)
        self._prefetch()

    def next_step(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of the next inner step, on the CPU; the last may be smaller."""
        assert self.remaining >= self._batch_size, (self.remaining, self._batch_size)
        self._build_ahead()
        step = self._ahead.popleft()[1].result()
        self._ranges = take(self._ranges, self._batch_size)[1]
        self._forecast.read(self._batch_size)
        self._build_ahead()
        self._targets, self._passes = step.targets, step.passes
        self._prefetch()
        return step.batches

    def is_ready(self, timeout_s: float) -> bool:
        """Wait for the next inner step; return whether it is built or has failed."""
        self._build_ahead()
        return bool(concurrent.futures.wait([self._ahead[0][1]], timeout_s).done)

    def close(self) -> None:
        """Stop the thread. Called once, by the owner."""
        self.dataset.close()
        concurrent.futures.wait([step for _, step in self._ahead], timeout=_CLOSE_S)
        self._builder.shutdown(wait=False, cancel_futures=True)

    def n_held_out(self, source: int = 0) -> int:
        """Return the number of held-out samples of a source."""
        return self.dataset.sources[source].index.n_held_out

    def held_out_batches(self, n: int, batch: int, source: int = 0, *, first: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's share of n held-out samples of a source, from the `first`-th on, `batch` rows at a time.

        All ranks yield the same number and sizes of batches, as sharded models require; padding rows have no targets.
        With `even_micro_batches` the last batch is padded to full size.
        """
        samples = self.dataset.held_out(n, source, first=first)
        self._prefetch(first=samples)
        unit = self._local_world_size * (batch if self._even_micro_batches else 1)
        padding = -len(samples) % unit
        share = rank_share([*samples, *[_NO_SAMPLE] * padding], self._local_rank, self._local_world_size)
        for first in range(0, len(share), batch):
            yield from self._micro_batches(share[first : first + batch], batch)

    def _build_ahead(self) -> None:
        """Queue the next steps of the assignment that are not queued yet; drop those of an old assignment."""
        rest = self._ranges
        for step in range(_STEPS_AHEAD):
            batch, rest = take(rest, self._batch_size)
            if count(batch) < self._batch_size:
                break
            if step < len(self._ahead) and self._ahead[step][0] != batch:
                while len(self._ahead) > step:
                    self._ahead.pop()[1].cancel()
            if step == len(self._ahead):
                self._ahead.append((batch, self._builder.submit(self._build, batch)))

    def _prefetch(self, first: Sequence[Sample] = ()) -> None:
        """Announce `first` and the forecast to remote stores, if an announcement is due."""
        if not self.dataset.is_remote or not (first or self._forecast.is_due):
            return
        sources, spans = self.dataset.spans(_indices(self._forecast.upcoming()))
        for number, source in enumerate(self.dataset.sources):
            before = [(start, stop) for of_source, start, stop in first if of_source == number]
            source.store.prefetch([*before, *map(tuple, spans[sources == number].tolist())])

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
            targets[source] += self._stores[source].count_targets(start + 1, stop)
        return _BuiltStep(batches, tuple(targets), self.dataset.passes(indices[-1]))

    def _micro_batches(self, samples: Sequence[Sample], size: int) -> list[MicroBatch]:
        """Read samples into one array, which saves memory traffic, and split it into micro-batches."""
        length, end, stores = self.dataset.seq_length, self.dataset.end_of_document, self._stores
        ids = np.full((len(samples), length + 1), end, dtype=self.dataset.dtype)  # (samples, t + 1)
        is_simple = [store.is_plain and store.end_of_document == end for store in stores]
        special: list[int] = []
        for row, (source, start, stop) in enumerate(samples):
            if stop - start <= length or not is_simple[source]:
                special.append(row)
            if stop > start:
                ids[row, : stop - start] = stores[source].read(start, stop)
        tokens, targets = self._arrays.take(len(samples), length), self._arrays.take(len(samples), length)
        tokens[:], targets[:] = ids[:, :-1], ids[:, 1:]  # (samples, t) each
        begins = ids[:, :-1] == end  # (samples, t)
        for row in special:
            source, start, stop = samples[row]
            n = max(0, stop - start - 1)
            tokens[row, n:], targets[row, n:], begins[row, n:] = end, IGNORED, False  # padding is one document
            if n and not stores[source].is_plain:
                targets[row, :n][~stores[source].is_target(start + 1, stop)] = IGNORED
            if n and not is_simple[source]:
                begins[row, :n] = stores[source].document_starts(start, ids[row, :n])
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
    """Predicts the next `samples` samples of a node: its assignment, then the last range shifted by a constant stride.

    The stride is the distance between the last two assignments. A wrong guess only wastes its prefetches.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._assigned: tuple[Range, ...] = ()
        self._last: Range | None = None
        self._stride = 0
        self._announced: tuple[Range, ...] = ()

    @property
    def is_due(self) -> bool:
        """Whether half of the last forecast is used up and `upcoming` has anything new."""
        left = count(self._announced)
        return left < self._samples // 2 and (self._stride > 0 or left < count(self._assigned))

    def assign(self, ranges: Sequence[Range]) -> None:
        """Record an assignment; an announced forecast stays valid if it was right."""
        before, self._assigned = self._last, tuple(ranges)
        self._last = self._assigned[-1] if self._assigned else before
        self._stride = 0 if before is None or self._last is None else max(0, self._last[0] - before[0])
        if _joined(take(self._announced, count(self._assigned))[0]) != _joined(self._assigned):
            self._announced = ()

    def read(self, samples: int) -> None:
        """Record that this many samples were read."""
        self._assigned, self._announced = take(self._assigned, samples)[1], take(self._announced, samples)[1]

    def upcoming(self) -> tuple[Range, ...]:
        """Return the forecast in reading order, and remember it as announced."""
        ranges, (start, stop) = [*self._assigned], self._last or (0, 0)
        while self._stride and stop > start and count(ranges) < self._samples:
            start, stop = start + self._stride, stop + self._stride
            ranges.append((start, stop))
        self._announced = take(ranges, self._samples)[0]
        return self._announced


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """Join consecutive ranges that touch."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


class _ArrayPool:
    """Reuses arrays without references: page faults of fresh memory cost more than filling it. Any thread."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.int64]] = [np.empty((0, 0), dtype=np.int64)]
        self._lock = threading.Lock()
        (self._unused,) = self._reference_counts()
        """Count of an array that only the pool references; depends on the Python version."""

    def take(self, rows: int, length: int) -> npt.NDArray[np.int64]:
        """Return an uninitialised array. Shapes: (rows, length)."""
        with self._lock:
            for number, references in enumerate(self._reference_counts()):
                if references == self._unused and self._arrays[number].shape == (rows, length):
                    return self._arrays[number]
            array = np.empty((rows, length), dtype=np.int64)
            self._arrays = [*self._arrays[-_POOL_SIZE:], array]
            return array

    def _reference_counts(self) -> list[int]:
        return [sys.getrefcount(array) for array in self._arrays]


def _indices(ranges: Sequence[Range]) -> list[int]:
    return list(itertools.chain.from_iterable(range(start, stop) for start, stop in ranges))


def _cu_seqlens(begins: npt.NDArray[np.bool_]) -> Tensor:
    """Compute `MicroBatch.cu_seqlens` from the mask of document starts (b, t)."""
    begins[:, 0] = True
    return torch.as_tensor(np.append(np.flatnonzero(begins), begins.size).astype(np.int32))
