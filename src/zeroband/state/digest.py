"""Digest of an outer state or a round's result: equal digests stand for equal bits. Without torch, for the tools.

A digest is the hash of the hashes of 16 MiB pieces, so that several threads compute it: one thread hashes 8 GB/s, of
8 bytes per parameter. It has 34 hexadecimal digits, of which the first two name this form. Digests of 32 digits are of
one pass over all bytes; earlier versions wrote them into checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from zeroband.node.processors import usable_processors
from zeroband.state.slot import bytes_of

if TYPE_CHECKING:
    from torch import Tensor

_IN_PIECES, _DIGITS = "01", 32
PIECE_BYTES = 1 << 24
"""Part of the form: other pieces give other digests."""
_MAX_THREADS = 16
"""More add no memory bandwidth."""


def digest_of(*buffers: Tensor) -> str:
    """Hash the bytes of contiguous CPU buffers, in order."""
    pieces = list(_pieces(*buffers))
    if sum(map(len, pieces)) <= PIECE_BYTES:  # 2 ms: threads would gain nothing
        hashes = list(map(_hash, pieces))
    else:
        with ThreadPoolExecutor(min(usable_processors(), _MAX_THREADS), thread_name_prefix="digest") as pool:
            hashes = list(pool.map(_hash, pieces))
    return _IN_PIECES + xxhash.xxh3_128_hexdigest(b"".join(hashes))


def has_digest(digest: str, *buffers: Tensor) -> bool:
    """Whether this is the digest of these buffers, in whichever form it is."""
    if len(digest) != _DIGITS:
        return digest_of(*buffers) == digest
    seen = xxhash.xxh3_128()
    for buffer in buffers:
        seen.update(bytes_of(buffer))
    return seen.hexdigest() == digest


def _pieces(*buffers: Tensor) -> Iterator[memoryview]:
    for held in map(bytes_of, buffers):
        for start in range(0, len(held), PIECE_BYTES):
            yield held[start : start + PIECE_BYTES]


def _hash(piece: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(piece)
