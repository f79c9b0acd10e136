"""Synthetic token ids: a function of seed and position that is computed on read and never stored.

Uses integer arithmetic only, so every node reads the same ids.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from zeroband.config.data import SyntheticTokensSource
from zeroband.data.index import mix64
from zeroband.data.token_store import TokenStore

_FORMAT = 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Increment of SplitMix64, which turns a counter into random bits (doi:10.1145/2660193.2660195)."""
_LOW = np.uint64((1 << 32) - 1)
_32 = np.uint64(32)


class SyntheticTokens(TokenStore):
    """Token store of random ids with random document lengths.

    Ids follow Zipf's law roughly: for each k, the octave of ids 2^k - 1 .. 2^(k+1) - 2 is equally likely, and ids
    within an octave are uniform.
    """

    def __init__(self, source: SyntheticTokensSource, seed: int, vocab_size: int) -> None:
        assert vocab_size >= 2, vocab_size
        identity = f"synthetic-tokens/{_FORMAT}/{seed}/{vocab_size}/{source.mean_document_length}"
        self.dtype = np.dtype(np.uint32)
        self._n_tokens = source.tokens
        self.end_of_document = vocab_size - 1
        self.fingerprint = hashlib.blake2b(f"{identity}/{source.tokens}".encode(), digest_size=16).hexdigest()
        key = hashlib.blake2b(identity.encode(), digest_size=8).digest()
        self._key = np.uint64(int.from_bytes(key, "little"))
        self._ends_below = np.uint64((1 << 32) // source.mean_document_length)
        octaves = (vocab_size - 1).bit_length()
        self._octaves = np.uint64(octaves)
        self._sizes = np.array([1 << k for k in range(octaves)], dtype=np.uint64)
        self._sizes[-1] = vocab_size - (1 << (octaves - 1))  # the last octave is truncated at vocab_size

    def __len__(self) -> int:
        return self._n_tokens

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """Return tokens start..stop-1. Shapes: (stop - start,) uint32."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        bits = mix64(np.arange(start, stop, dtype=np.uint64) * _GOLDEN + self._key)  # wraps modulo 2^64
        scaled = (bits & _LOW) * self._octaves  # upper bits: octave; lower 32 bits: fraction within it
        octave = scaled >> _32
        ids = (np.uint64(1) << octave) - np.uint64(1) + ((scaled & _LOW) * self._sizes[octave] >> _32)
        ids[bits >> _32 < self._ends_below] = self.end_of_document
        return ids.astype(np.uint32)
