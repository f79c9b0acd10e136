"""Which documents of a preparation came before: exact copies, by 128-bit hashes in partitions that fit the memory.

The first one in the order of the sources is kept, whoever hashed it and when.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zeroband.tools.data.folder import Folder

_PARTITION_DOCUMENTS = 1 << 22
"""Documents whose hashes are sorted at once: about 300 MB."""

_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u8")])


def find_duplicates(
    folder: Folder, documents: Mapping[int, int], scratch: Path, *, partition: int = _PARTITION_DOCUMENTS
) -> dict[int, tuple[int, int]]:
    """Write a flag for each document of all units, 1 for a copy of an earlier one, to `flags_file(scratch)`.

    documents: how many each unit holds, as `Folder.hashed` says. Takes 25 bytes of disk a document.
    Returns where the flags of each unit begin and end. Raises OSError.
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
    """Where `find_duplicates` leaves the flags: a byte for each document."""
    return scratch / "duplicates"


def flags_of(path: str, start: int, stop: int) -> npt.NDArray[np.bool_]:
    """The flags start..stop-1 of such a file."""
    return np.fromfile(path, dtype=np.bool_, count=stop - start, offset=start)


def _deal(hashes: npt.NDArray[np.uint64], first: int, paths: list[Path], bits: int) -> None:
    """Append hashes to the partitions that their first bits say; documents without text, hash 0, to none."""
    rows = np.empty(len(hashes), dtype=_ROW)
    rows["high"], rows["low"] = hashes[:, 0], hashes[:, 1]
    rows["document"] = np.arange(first, first + len(hashes))
    rows = rows[(rows["high"] != 0) | (rows["low"] != 0)]
    parts = rows["high"] >> np.uint64(64 - bits) if bits else np.zeros(len(rows), dtype=np.uint64)
    for part in np.unique(parts).tolist():
        with paths[int(part)].open("ab") as out:
            out.write(rows[parts == part].tobytes())


def _copies(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """The documents whose hash an earlier one has."""
    rows = rows[np.lexsort((rows["document"], rows["low"], rows["high"]))]
    is_copy = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
    return rows["document"][1:][is_copy]
