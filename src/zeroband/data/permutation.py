"""Seeded bijections of 0..size-1 in constant memory. Pure integer arithmetic: the same on every machine and version."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

_ROUNDS = 6


class Permutation:
    """A shuffle of 0..size-1 that is computed for each value instead of being stored.

    A balanced Feistel network over pairs of digits of base ceil(sqrt(size)), with addition modulo the base. Its domain
    exceeds size by less than 2 sqrt(size) values; results outside are enciphered again until they fall inside.
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), section 5.
    """

    def __init__(self, size: int, key: str) -> None:
        assert 0 < size < 1 << 62, size
        self._size = size
        self._base = np.uint64(math.isqrt(size - 1) + 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Images of the values. Shapes: any (n,) of integers in 0..size-1; gives (n,) int64."""
        images = self._encipher(np.atleast_1d(np.asarray(values, dtype=np.uint64)))
        while (outside := images >= self._size).any():
            images[outside] = self._encipher(images[outside])
        return images.astype(np.int64)

    def _encipher(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values // self._base, values % self._base
        for round_key in self._round_keys:
            left, right = right, (left + _mix(right ^ round_key) % self._base) % self._base
        return left * self._base + right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the input reaches every bit of the output (wraps modulo 2^64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
