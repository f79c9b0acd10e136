"""OUT during a preparation: the plan, a record of each finished unit, and finally the manifest.

    _prepare/plan.json             written first
    _prepare/units/<unit>.json     written after the unit's shard, if it has one
    _prepare/hashes/<unit>-<documents>.npy
                                   with --dedup: (documents, 2) uint64, XXH3-128 of each document, 0 for an empty one
    <unit>.npy                     shards
    hashes.npy, manifest.json      written last; then _prepare is removed

Complete files are kept and all others are made again with the same bytes. Disks and most object stores write files
atomically; elsewhere a partial file is recognised by its size or content.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from zeroband.checkpoint.storage import LocalStorage, Storage, open_folder, reason_of
from zeroband.data.shard_set import (
    BLOCK_TOKENS,
    FORMAT,
    HASHES,
    MANIFEST,
    NPY_HEADER_BYTES,
    Shard,
    ShardSet,
    hashes_digest,
    ids_dtype,
    npy_pieces,
)
from zeroband.data.tokenizer import Tokenizer
from zeroband.errors import ConfigError
from zeroband.tools.data.plan import Plan

WORK = "_prepare"
_PLAN = f"{WORK}/plan.json"
_UNITS = f"{WORK}/units"
_DOCUMENTS = f"{WORK}/hashes"
_OURS = re.compile(rf"\d{{5,}}\.npy|{re.escape(HASHES)}|{re.escape(MANIFEST)}|{WORK}|\..+\.{WORK}")
"""Names that --start-over removes, partial files included."""
_HASHED = re.compile(r"(\d+)-(\d+)\.npy")
_RECORDED = re.compile(rf"{_UNITS}/(\d+)\.json")
_FETCHING_THREADS = 16

Hashes = npt.NDArray[np.uint64]


@dataclass
class UnitRecord:
    """Counts of a unit: filled in while it is made, written when it is finished."""

    tokens: int = 0
    """Ids in its shard; 0: it has no shard."""
    documents: int = 0
    empty: int = 0
    filtered: int = 0
    duplicates: int = 0
    padding: int = 0
    of_sources: Counter[int] = field(default_factory=Counter[int])
    """Documents by source number."""
    hashes: tuple[int, ...] = ()
    """Hashes of its shard's blocks."""
    bad: int = 0
    """Skipped unusable rows."""
    first_bad: str = ""
    """Problem of the first one."""


def open_out(out: str) -> Storage:
    """Open the folder OUT, which need not exist. Raises ConfigError for unsupported URLs."""
    return open_folder(str(Path(out).expanduser()) if out.startswith("~") else out, WORK, key="OUT")


@contextlib.contextmanager
def writing_to(out: str) -> Generator[None]:
    """Turn a storage's OSError into a ConfigError that names OUT."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to {out}: {reason_of(error)}; finished units are kept, and the same command resumes"
        ) from error


@contextlib.contextmanager
def alone_in(storage: Storage) -> Generator[None]:
    """Lock a local folder against a second preparation; buckets have no lock. Raises ConfigError, OSError."""
    if not isinstance(storage, LocalStorage):
        yield
        return
    folder = Path(storage.url) / WORK
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another zeroband data prepare is writing to {storage.url}; wait for it") from error
        yield


class Folder:
    """OUT, for the process that manages it. All methods raise OSError if the storage fails."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def manifest(self) -> ShardSet | None:
        """Return the finished set, if there is one. Raises ConfigError for a damaged manifest."""
        names = self.storage.names()
        if MANIFEST not in names:
            return None
        try:
            return ShardSet.of_json(self.storage.read(MANIFEST))
        except ValueError as error:
            if WORK in names and self.plan() is not None:
                return None  # partially written
            raise ConfigError(
                f"{self.storage.url}/{MANIFEST} is damaged: {error}; copy the folder again, or make the set again with "
                "--start-over"
            ) from error

    def plan(self) -> Plan | None:
        """Return the plan of an unfinished preparation, if any. Raises ConfigError for another version's."""
        if WORK not in self.storage.names():
            return None
        with contextlib.suppress(FileNotFoundError):
            content = self.storage.read(_PLAN)
            try:
                return Plan.of_json(content)
            except ValueError as error:
                if not _is_json(content):
                    return None  # partially written, before anything else
                raise ConfigError(
                    f"{self.storage.url}/{_PLAN} cannot be read: {error}; start again with --start-over or resume with "
                    "the version that started it"
                ) from error
        return None

    def other_files(self) -> list[str]:
        """Return the names in OUT outside the preparation's work folder."""
        return [name for name in self.storage.names() if name != WORK]

    def start_over(self) -> None:
        """Remove a set or a partial one, the manifest first. Raises ConfigError if there are other files."""
        names = self.storage.names()
        if others := [name for name in names if not _OURS.fullmatch(name)]:
            raise ConfigError(
                f"--start-over only removes files of this command, but {self.storage.url} also holds {others[0]!r}; "
                "name another OUT, or remove it yourself"
            )
        for name in sorted(names, key=lambda name: (name != MANIFEST, name == WORK)):
            self.storage.remove(name)

    def begin(self, plan: Plan) -> None:
        """Remove leftovers of an earlier plan and write this one."""
        for folder in (_UNITS, _DOCUMENTS):
            self.storage.remove(folder)
        self.storage.write(_PLAN, [plan.to_json()])

    def records(self, plan: Plan) -> dict[int, UnitRecord]:
        """Return the records of finished units whose shards are complete."""
        sizes = self.storage.sizes("")
        units = sorted(int(found[1]) for name in sizes if (found := _RECORDED.fullmatch(name)))
        with ThreadPoolExecutor(_FETCHING_THREADS, thread_name_prefix="records") as threads:
            read = dict(zip(units, threads.map(self._record, units), strict=True))
        return {
            unit: record
            for unit, record in read.items()
            if record is not None and _is_whole(record, sizes, plan.shard_name(unit))
        }

    def _record(self, unit: int) -> UnitRecord | None:
        """Return a unit's record; None for a partially written one."""
        try:
            return TypeAdapter(UnitRecord).validate_json(self.storage.read(f"{_UNITS}/{unit}.json"))
        except ValueError:
            return None

    def record(self, unit: int, record: UnitRecord) -> None:
        """Write the record of a finished unit."""
        self.storage.write(f"{_UNITS}/{unit}.json", [TypeAdapter(UnitRecord).dump_json(record)])

    def hashed(self) -> dict[int, int]:
        """Return the number of documents by hashed unit."""
        found = [(_HASHED.fullmatch(name), size) for name, size in self.storage.sizes(_DOCUMENTS).items()]
        counted = {int(name[1]): (int(name[2]), size) for name, size in found if name}
        return {unit: n for unit, (n, size) in counted.items() if size == NPY_HEADER_BYTES + 16 * n}

    def write_document_hashes(self, unit: int, hashes: Hashes) -> None:
        """Write the hashes of a unit's documents. Shapes: (documents, 2)."""
        self.storage.write(f"{_DOCUMENTS}/{unit}-{len(hashes)}.npy", npy_pieces(hashes.reshape(-1)))

    def document_hashes(self, unit: int, documents: int) -> Hashes:
        """Read the hashes of a unit's documents. Shapes: (documents, 2)."""
        content = self.storage.read(f"{_DOCUMENTS}/{unit}-{documents}.npy")
        return np.load(io.BytesIO(content), allow_pickle=False).reshape(-1, 2)

    def finish(self, plan: Plan, tokenizer: Tokenizer, records: Sequence[UnitRecord]) -> ShardSet:
        """Write the hashes, then the manifest, which makes the set valid; remove the work folder."""
        made = _set_of(plan, tokenizer, records)
        hashes = np.array([value for record in records for value in record.hashes], dtype="<u8")
        self.storage.write(HASHES, npy_pieces(hashes))
        self.storage.write(MANIFEST, [made.to_json()])
        self.clean()
        return made

    def clean(self) -> None:
        """Remove the work folder."""
        self.storage.remove(WORK)


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def _is_whole(record: UnitRecord, sizes: dict[str, int], name: str) -> bool:
    """Return whether the shard of a unit is complete, with 2 or 4 bytes per id."""
    held = sizes.get(name, 0) - NPY_HEADER_BYTES
    return not record.tokens or held in (2 * record.tokens, 4 * record.tokens)


def _set_of(plan: Plan, tokenizer: Tokenizer, records: Sequence[UnitRecord]) -> ShardSet:
    full = [(unit, record) for unit, record in enumerate(records) if record.tokens]
    return ShardSet(
        format=FORMAT,
        dtype=ids_dtype(tokenizer.vocab_size).str,
        block_tokens=BLOCK_TOKENS,
        tokens=sum(record.tokens for record in records),
        documents=sum(record.documents for record in records),
        empty_documents=sum(record.empty for record in records),
        filtered_documents=sum(record.filtered for record in records),
        duplicate_documents=sum(record.duplicates for record in records),
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        tokenizer=plan.tokenizer,
        tokenizer_fingerprint=plan.tokenizer_fingerprint,
        tokenizer_release=plan.tokenizer_release,
        packed_length=plan.options.packed_length,
        padding=sum(record.padding for record in records),
        sources=plan.sources,
        hashes=hashes_digest([value for record in records for value in record.hashes]),
        shards=tuple(Shard(plan.shard_name(unit), record.tokens, record.documents) for unit, record in full),
        plan=plan.digest,
    )


# -- duplicates: by 128-bit hashes, in partitions that fit into memory ------------------------------------------------

_PARTITION_DOCUMENTS = 1 << 22
"""Documents per partition: about 300 MB to sort."""

_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u8")])


def find_duplicates(
    folder: Folder, documents: Mapping[int, int], scratch: Path, *, partition: int = _PARTITION_DOCUMENTS
) -> dict[int, tuple[int, int]]:
    """Write a flag per document of all units, 1 for a duplicate, to `flags_file(scratch)`.

    The first copy in the order of the sources is kept, independent of the order of hashing.
    documents: by unit, as from `Folder.hashed`. Needs 25 bytes of disk per document.
    Returns the start and end of each unit's flags. Raises OSError.
    """
    ends = list(itertools.accumulate((documents[unit] for unit in sorted(documents)), initial=0))
    spans = dict(zip(sorted(documents), itertools.pairwise(ends), strict=True))
    total = ends[-1]
    bits = max(0, (total // partition).bit_length())
    paths = [scratch / f"{number}.part" for number in range(1 << bits)]
    for path in paths:
        path.write_bytes(b"")
    for unit, (start, stop) in spans.items():
        _deal(folder.document_hashes(unit, stop - start), start, paths, bits)
    flags_file(scratch).write_bytes(b"\0")
    flags = np.memmap(flags_file(scratch), dtype=np.bool_, mode="w+", shape=(max(total, 1),))
    for path in paths:
        flags[_copies(np.fromfile(path, dtype=_ROW))] = True
        path.unlink()
    flags.flush()
    return spans


def flags_file(scratch: Path) -> Path:
    """Return the file of `find_duplicates`' flags: a byte per document."""
    return scratch / "duplicates"


def flags_of(path: str, start: int, stop: int) -> npt.NDArray[np.bool_]:
    """Read the flags start..stop-1 of such a file."""
    return np.fromfile(path, dtype=np.bool_, count=stop - start, offset=start)


def _deal(hashes: npt.NDArray[np.uint64], first: int, paths: list[Path], bits: int) -> None:
    """Append hashes to partitions by their first bits; empty documents, hash 0, are skipped."""
    rows = np.empty(len(hashes), dtype=_ROW)
    rows["high"], rows["low"] = hashes[:, 0], hashes[:, 1]
    rows["document"] = np.arange(first, first + len(hashes))
    rows = rows[(rows["high"] != 0) | (rows["low"] != 0)]
    parts = rows["high"] >> np.uint64(64 - bits) if bits else np.zeros(len(rows), dtype=np.uint64)
    for part in np.unique(parts).tolist():
        with paths[int(part)].open("ab") as out:
            out.write(rows[parts == part].tobytes())


def _copies(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """Return the documents with the hash of an earlier one."""
    rows = rows[np.lexsort((rows["document"], rows["low"], rows["high"]))]
    is_copy = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
    return rows["document"][1:][is_copy]
