"""The micro-batches of one rank. Reads the token store where the sample index says; talks to no other rank.

A thread builds the batches of the next inner step beside this one.
"""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zeroband.data.index import SampleIndex, rank_share, require_even_shares
from zeroband.data.ledger import Range, take
from zeroband.data.token_store import TokenStore

IGNORED = -100
"""Target of a place that is not learned: padding, and in conversations what the assistant does not say."""

_NO_SAMPLE = -1
"""Position of a row that only pads a batch."""

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
        """Return these rows on a device; pinned ones get there when it comes to them, and nobody waits."""
        tokens, targets = (tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.targets))
        lengths = None if self.cu_seqlens is None else self.cu_seqlens.to(device, non_blocking=True)
        sources = None if self.sources is None else self.sources.to(device, non_blocking=True)
        return MicroBatch(tokens, targets, lengths, sources)

    def pinned(self) -> MicroBatch:
        """Return these rows in memory that a GPU copies from by itself."""
        lengths = None if self.cu_seqlens is None else self.cu_seqlens.pin_memory()
        sources = None if self.sources is None else self.sources.pin_memory()
        return MicroBatch(self.tokens.pin_memory(), self.targets.pin_memory(), lengths, sources)


@dataclass(frozen=True)
class _BuiltStep:
    """What one inner step reads."""

    batches: list[MicroBatch]
    targets: int
    data_pass: int


class Loader:
    """What one rank of a node reads: its share of each inner step's batch, along the ranges assigned to the node.

    The samples of a node in one inner step depend on neither its number of ranks nor micro_bs. All ranks are given the
    same ranges.
    Raises: ConfigError when the batch cannot be shared out evenly.
    """

    def __init__(
        self,
        store: TokenStore,
        index: SampleIndex,
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
        self._store = store
        self._index = index
        self._batch_size = batch_size
        self._micro_bs = micro_bs
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        self._document_mask = document_mask
        self._even_micro_batches = even_micro_batches
        self._pins = pins
        self.source_names: tuple[str, ...] = ()
        self.targets_by_source: tuple[int, ...] = ()
        self.passes: tuple[float, ...] = ()
        self._ranges: tuple[Range, ...] = ()
        self._targets_in_step = 0
        self._data_pass = 0
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[tuple[Range, ...], Future[_BuiltStep]] | None = None
        """The samples of the step after the last one, while or after the thread builds it. It is not read before it is
        asked for, and of no use where the assignment changes."""

    @property
    def remaining(self) -> int:
        """Samples of the node's assignment that are not read yet."""
        return sum(stop - start for start, stop in self._ranges)

    @property
    def targets_in_step(self) -> int:
        """Targets of the whole node in the last step, the same number on each of its ranks: the loss's denominator.

        Conversations may have none in a step.
        """
        return self._targets_in_step

    @property
    def data_pass(self) -> int:
        """The pass over the data that the last step ended in."""
        return self._data_pass

    @property
    def n_held_out(self) -> int:
        """Samples that are held out of the corpus."""
        return self._index.n_held_out

    def assign(self, ranges: Sequence[Range]) -> None:
        """Take these samples as the node's work from now on; what is left of an earlier assignment is dropped."""
        self._ranges = tuple(ranges)

    def next_step(self) -> list[MicroBatch]:
        """This rank's part of the next inner step; the last micro-batch may be smaller than the others.

        On the CPU. Has the step after it built meanwhile, if that is assigned already.
        """
        assert self.remaining >= self._batch_size, (self.remaining, self._batch_size)
        batch, self._ranges = take(self._ranges, self._batch_size)
        ahead, self._ahead = self._ahead, None
        step = ahead[1].result() if ahead is not None and ahead[0] == batch else self._build(batch)
        if self.remaining >= self._batch_size:
            after, _ = take(self._ranges, self._batch_size)
            self._ahead = after, self._builder.submit(self._build, after)
        self._targets_in_step, self._data_pass = step.targets, step.data_pass
        return step.batches

    def close(self) -> None:
        """End the thread. Called once, by whoever made this."""
        if self._ahead is not None:
            concurrent.futures.wait([self._ahead[1]], timeout=_CLOSE_S)
        self._builder.shutdown(wait=False, cancel_futures=True)

    def held_out_batches(self, n: int, batch: int) -> Iterator[MicroBatch]:
        """This rank's share of the first n held-out samples, `batch` rows at a time.

        All ranks yield equally many batches of equal sizes, so a sharded model runs in lock step: rows without a sample
        have no targets. With `even_micro_batches` the last batch is filled up with them, too. Summed over the ranks,
        losses and targets are those of the samples, each once.
        """
        positions = self._index.held_out_positions(n).tolist()
        unit = self._local_world_size * (batch if self._even_micro_batches else 1)
        padding = -len(positions) % unit
        share = rank_share([*positions, *[_NO_SAMPLE] * padding], self._local_rank, self._local_world_size)
        return self._micro_batches(share, batch)

    def state_dict(self) -> dict[str, Any]:
        """The samples still to be read: a few integers, the same on all ranks."""
        return {"ranges": [list(span) for span in self._ranges]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the loader that gave the state was; it may have had other ranks and another micro_bs."""
        self._ranges = tuple((int(start), int(stop)) for start, stop in state["ranges"])

    def _build(self, batch: Sequence[Range]) -> _BuiltStep:
        """Read the samples of an inner step. Any thread."""
        indices = list(itertools.chain.from_iterable(range(start, stop) for start, stop in batch))
        positions = self._index.positions(indices)
        share = rank_share(positions.tolist(), self._local_rank, self._local_world_size)
        size = min(self._micro_bs, len(share))
        if self._even_micro_batches:
            share = [*share, *[_NO_SAMPLE] * (-len(share) % size)]
        batches = [batch.pinned() if self._pins else batch for batch in self._micro_batches(share, size)]
        spans = [self._index.span(position) for position in positions.tolist()]
        targets = sum(self._store.count_learned(start + 1, stop) for start, stop in spans)
        return _BuiltStep(batches, targets, self._index.data_pass(indices[-1]))

    def _micro_batches(self, positions: Sequence[int], size: int) -> Iterator[MicroBatch]:
        for start in range(0, len(positions), size):
            yield self._micro_batch(positions[start : start + size])

    def _micro_batch(self, positions: Sequence[int]) -> MicroBatch:
        end = self._store.end_of_document
        shape = (len(positions), self._index.seq_length)
        tokens = np.full(shape, end, dtype=np.int64)  # (b, t)
        targets = np.full(shape, IGNORED, dtype=np.int64)  # (b, t)
        begins = np.zeros(shape, dtype=np.bool_)  # (b, t); padding is one document
        for row, position in enumerate(positions):
            if position == _NO_SAMPLE:
                continue
            start, stop = self._index.span(position)
            sample, places = self._store.read(start, stop), slice(0, stop - start - 1)
            tokens[row, places] = sample[:-1]
            np.copyto(targets[row, places], sample[1:], where=self._store.is_learned(start + 1, stop))
            begins[row, places] = self._store.begins(start, sample[:-1])
        lengths = _cu_seqlens(begins) if self._document_mask else None
        return MicroBatch(torch.as_tensor(tokens), torch.as_tensor(targets), lengths)


def _cu_seqlens(begins: npt.NDArray[np.bool_]) -> Tensor:
    """`MicroBatch.cu_seqlens` of rows whose documents begin where `begins` (b, t) says."""
    begins[:, 0] = True
    return torch.as_tensor(np.append(np.flatnonzero(begins), begins.size).astype(np.int32))
