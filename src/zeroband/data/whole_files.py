"""Files of which any part may be needed at any time: a set's hashes, the indices of Megatron. Any thread.

They may be gigabytes, so nobody reads them into memory; and they are read rather than mapped, so that a disk or a mount
that fails is an error and no signal that ends the process.
"""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np
import numpy.typing as npt

from zeroband.data.token_storage import TokenStorage

_PAGE = 1024
"""Numbers that are read at a time: 8 KiB, of which a search needs one for each of its last steps."""
_PAGES = 512


class WholeFile(Protocol):
    """A file on a disk of this machine, or on a mount."""

    size: int
    """In bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start..stop-1. Raises StorageLost."""
        ...

    def drop(self) -> None:
        """Forget what was fetched of it, as it is damaged."""


class FileInPlace(WholeFile):
    """A file where it lies. Raises: StorageLost where it is not there."""

    def __init__(self, storage: TokenStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self.size = storage.size(path)

    def read(self, start: int, stop: int) -> bytes:
        return self._storage.read(self._path, start, stop)


class StoredNumbers:
    """Integers of 8 bytes in a file, of which the pages that were needed last stay in memory."""

    def __init__(self, file: WholeFile, dtype: str, offset: int, count: int) -> None:
        self._count = count

        def read_page(number: int) -> npt.NDArray[np.integer]:
            first, behind = number * _PAGE, min((number + 1) * _PAGE, count)
            return np.frombuffer(file.read(offset + 8 * first, offset + 8 * behind), dtype)

        self._page = functools.lru_cache(_PAGES)(read_page)  # without a reference to this, which would outlive its use

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> int:
        number, within = divmod(place, _PAGE)
        return int(self._page(number)[within])
