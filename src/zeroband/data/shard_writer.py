"""The content of a shard and of the hashes, as it is written: a draft on this machine first, then bytes in pieces.

Knows the layout (`shard_set`); where the bytes go is decided by whoever writes them.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from zeroband.data.shard_set import NPY_HEADER_BYTES

_PIECE_IDS = 1 << 22

Ids = npt.NDArray[np.unsignedinteger]


def ids_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type that holds every id; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def npy_header(values: int, dtype: np.dtype[Any]) -> bytes:
    """What stands before the values of a `.npy` file of one dimension. Shapes: NPY_HEADER_BYTES bytes."""
    header = io.BytesIO()
    described = {"descr": dtype.str, "fortran_order": False, "shape": (values,)}
    np.lib.format.write_array_header_1_0(header, described)
    assert header.tell() == NPY_HEADER_BYTES, header.tell()
    return header.getvalue()


def npy_pieces(values: npt.NDArray[Any]) -> Iterator[bytes]:
    """The content of a `.npy` file that holds these values, a few megabytes at a time. Shapes: values (n,)."""
    yield npy_header(len(values), values.dtype)
    for start in range(0, len(values), _PIECE_IDS):
        yield values[start : start + _PIECE_IDS].tobytes()


class ShardDraft:
    """Ids in a file of the temporary folder, which has no name and so is gone with its process.

    Raises OSError where that folder is full.
    """

    def __init__(self, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._dtype = dtype
        self._file = cast(BinaryIO, tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  closed by __exit__
        self.tokens = 0

    def append(self, ids: Sequence[Ids]) -> None:
        """Write arrays of ids one behind the other."""
        if ids:
            values = np.concatenate(ids).astype(self._dtype, copy=False)
            content = memoryview(values.tobytes())
            while content:
                content = content[self._file.write(content) :]
            self.tokens += len(values)

    @property
    def ids(self) -> Ids:
        """All that was appended, mapped. Shapes: (tokens,) of the draft's dtype."""
        if not self.tokens:
            return np.empty(0, dtype=self._dtype)
        return np.memmap(self._file, dtype=self._dtype, mode="r", shape=(self.tokens,))

    def __enter__(self) -> ShardDraft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
