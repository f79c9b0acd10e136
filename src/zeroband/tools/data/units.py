"""The work on a unit: hash its documents, or make its shard. One thread, one unit at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from zeroband.data.files import Files
from zeroband.data.packing import fill_bins
from zeroband.data.readers import (
    BadRows,
    Dataset,
    Document,
    IdsRow,
    OnBad,
    read_ids,
    read_lines,
    read_row_groups,
    read_rows,
    read_text,
    refuse,
)
from zeroband.data.shard_set import BLOCK_TOKENS, ShardDraft, block_hashes, ids_dtype, npy_pieces
from zeroband.data.sources import dataset_stamp, load_dataset
from zeroband.data.tokenizer import Tokenizer, open_tokenizer
from zeroband.data.tokens import encode_documents, in_batches
from zeroband.errors import ConfigError
from zeroband.tools.data.folder import Folder, UnitRecord, flags_of
from zeroband.tools.data.plan import Origin, OriginPart, Plan

Flags = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.unsignedinteger]

OnProgress = Callable[[int, int], None]
"""Receives the bytes of text read and the tokens written since the last call."""


class Task(NamedTuple):
    """A task for a worker."""

    unit: int
    is_for_hashes: bool = False
    """Whether to hash its documents instead of making its shard."""
    flags: tuple[str, int, int] | None = None
    """File of duplicate flags, with start and end of the unit's."""


_Read = tuple[Document | IdsRow, int]
"""A document and the number of its source."""


class Units:
    """Runs tasks and writes their results into OUT.

    retry_s: time for which failing sources are retried. Raises ConfigError naming what is unreadable or has changed
    since the plan; StorageLost, OSError of OUT.
    """

    def __init__(self, plan: Plan, folder: Folder, retry_s: float) -> None:
        self._plan = plan
        self._folder = folder
        self._retry_s = retry_s
        self._files = Files(retry_s)
        self._datasets: dict[Origin, Dataset] = {}
        self._bad = BadRows()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = open_tokenizer(self._plan.tokenizer)
        if not tokenizer.matches(self._plan.tokenizer_fingerprint):
            raise ConfigError(
                f"--tokenizer {self._plan.tokenizer} ({tokenizer.release}) has changed since this preparation began "
                f"({self._plan.tokenizer_release}); restore it, or start again with --start-over"
            )
        return tokenizer

    def make(self, task: Task, on_progress: OnProgress) -> UnitRecord | None:
        """Run a task. Returns the record of the unit if its shard was made."""
        if task.is_for_hashes:
            self._hash_documents(task.unit, on_progress)
            return None
        return self._tokenize(task.unit, None if task.flags is None else flags_of(*task.flags), on_progress)

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def _on_bad(self) -> OnBad:
        return self._bad if self._plan.options.skip_bad_rows else refuse

    def _chunks(self, unit: int) -> Iterator[list[_Read]]:
        """Yield the documents of a unit in chunks."""
        return in_batches(self._documents(unit), lambda read: read[0].size)

    def _documents(self, unit: int) -> Iterator[_Read]:
        for piece in self._plan.units[unit]:
            origin = self._plan.origins[piece.origin]
            for found in (
                self._of_dataset(origin, piece) if origin.kind == "huggingface" else self._of_file(origin, piece)
            ):
                documents = self._split(found) if isinstance(found, IdsRow) else [found]
                yield from ((document, origin.source) for document in documents)

    def _of_file(self, origin: Origin, piece: OriginPart) -> Iterator[Document | IdsRow]:
        (file,) = self._files.find([origin.name])
        options, start, stop = self._plan.options, piece.start, piece.stop
        _require_unchanged(origin, tuple(file.stamp()))
        if origin.kind == "text":
            yield from read_text(file, self._on_bad, allow_binary=options.binary)
        elif origin.kind == "jsonl":
            yield from read_lines(file, options.field, start, math.inf if stop is None else stop, self._on_bad)
        elif origin.holds_ids:
            assert stop is not None, piece
            yield from read_ids(file, options.column, start, stop)
        else:
            yield from read_row_groups(file, options.column, start, stop, self._on_bad, allow_binary=options.binary)
        _require_unchanged(origin, tuple(file.stamp()))

    def _of_dataset(self, origin: Origin, piece: OriginPart) -> Iterator[Document]:
        named = origin.dataset(self._plan.options)
        if origin not in self._datasets:
            self._datasets[origin] = load_dataset(named, self._retry_s)
        _require_unchanged(origin, dataset_stamp(self._datasets[origin]))
        return read_rows(self._datasets[origin], named, piece.start, piece.stop, self._on_bad)

    def _split(self, row: IdsRow) -> list[IdsRow]:
        """Split a row of ids at end-of-document ids, which are removed."""
        ids, vocab_size = row.ids, self._tokenizer.vocab_size
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(wrong):
            raise ConfigError(
                f"{row.where}: id {ids[wrong[0]]} is outside the {vocab_size} ids of --tokenizer "
                f"{self._plan.tokenizer}; name the tokenizer that made these ids"
            )
        ends = np.flatnonzero(ids == self._tokenizer.end_of_document)
        starts = [0, *(ends + 1).tolist()]
        stops = [*ends.tolist(), len(ids)]
        documents = [IdsRow(ids[start:stop], row.where) for start, stop in zip(starts, stops, strict=True)]
        return documents[:-1] if not documents[-1].size and len(documents) > 1 else documents

    # -- making ----------------------------------------------------------------------------------------------------

    def _hash_documents(self, unit: int, on_progress: OnProgress) -> None:
        """Write the hash of each document of a unit."""
        found: list[bytes] = []
        for chunk in self._chunks(unit):
            found += [_hash_of(document) if document.size else bytes(16) for document, _ in chunk]
            on_progress(sum(document.size for document, _ in chunk), 0)
        self._folder.write_document_hashes(unit, np.frombuffer(b"".join(found), dtype="<u8").reshape(-1, 2))

    def _tokenize(self, unit: int, duplicates: Flags | None, on_progress: OnProgress) -> UnitRecord:
        """Make the shard and the record of a unit. duplicates: which documents to drop."""
        record, lengths, number = UnitRecord(), list[int](), 0
        self._bad = BadRows()
        end = np.array([self._tokenizer.end_of_document], dtype=np.uint32)
        with closing(ShardDraft(ids_dtype(self._tokenizer.vocab_size))) as draft:
            for chunk in self._chunks(unit):
                dropped = np.zeros(len(chunk), np.bool_) if duplicates is None else duplicates[number:][: len(chunk)]
                number += len(chunk)
                kept = self._kept(chunk, dropped, record)
                draft.append([part for ids in kept for part in (ids, end)])
                written = [len(ids) + 1 for ids in kept]
                lengths += written
                on_progress(sum(document.size for document, _ in chunk), sum(written))
            self._write(unit, draft.ids, lengths, record)
        record.bad, record.first_bad = self._bad.count, self._bad.first
        self._folder.record(unit, record)
        return record

    def _kept(self, chunk: Sequence[_Read], dropped: Flags, record: UnitRecord) -> list[Ids]:
        """Return the ids of the kept documents, and count the others."""
        kept: list[Ids] = []
        full = [read for read, is_dropped in zip(chunk, dropped, strict=True) if read[0].size and not is_dropped]
        record.duplicates += int(dropped.sum())
        record.empty += len(chunk) - len(full) - int(dropped.sum())
        least, most = self._plan.options.min_tokens or 0, self._plan.options.max_tokens or math.inf
        texts = [document for document, _ in full if isinstance(document, Document)]
        encoded = iter(encode_documents(self._tokenizer, texts, self._on_bad))
        for document, source in full:
            ids = next(encoded) if isinstance(document, Document) else document.ids.astype(np.uint32)
            if ids is None:  # unusable
                continue
            if not len(ids):
                record.empty += 1
            elif not least <= len(ids) <= most:
                record.filtered += 1
            else:
                record.of_sources[source] += 1
                kept.append(ids)
        return kept

    def _write(self, unit: int, ids: Ids, lengths: Sequence[int], record: UnitRecord) -> None:
        """Write the shard, packed if asked for, unless it is empty; complete the record. lengths: of the documents."""
        size, n_ids = self._plan.options.packed_length, len(ids)
        with closing(ShardDraft(ids.dtype)) as packed:
            if size is not None and lengths:
                for parts in fill_bins(ids, lengths, size, self._tokenizer.end_of_document):
                    packed.append(parts)
                ids = packed.ids
            if len(ids):
                self._folder.storage.write(self._plan.shard_name(unit), npy_pieces(ids))
            record.hashes = tuple(block_hashes(ids, BLOCK_TOKENS).tolist())
        record.tokens, record.padding, record.documents = len(ids), len(ids) - n_ids, len(lengths)


def _hash_of(document: Document | IdsRow) -> bytes:
    """Return the XXH3-128 of a text as UTF-8, lone surrogates included, or of ids."""
    if isinstance(document, IdsRow):
        return xxhash.xxh3_128_digest(document.ids.astype("<i8").tobytes())
    text = document.text
    return xxhash.xxh3_128_digest(text.encode(errors="surrogatepass") if isinstance(text, str) else text)


def _require_unchanged(origin: Origin, stamp: tuple[str, ...]) -> None:
    if stamp != origin.stamp:
        raise ConfigError(
            f"{origin.name} has changed since this preparation began; restore it, or start again with --start-over"
        )
