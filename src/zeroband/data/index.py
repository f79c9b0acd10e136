"""The global sample index: which tokens the k-th sample of the run holds. Pure; reads no file and knows no node.

Its shuffle is integer arithmetic, so it is the same on every machine and with every version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from zeroband.errors import ConfigError

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
            left, right = right, (left + mix64(right ^ round_key) % self._base) % self._base
        return left * self._base + right


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the input reaches every bit of the output (wraps modulo 2^64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class SampleIndex:
    """The endless list of training samples 0, 1, 2, ... of a run, and the samples held out of it.

    The sample at position p predicts the tokens p*T+1 .. (p+1)*T, so each token but the first is a target of exactly
    one position and packing drops none; the last position may be short. Each pass visits every training position once,
    in an order of its own. The held-out positions depend neither on the seed nor on the pass: runs with different seeds
    evaluate on the same samples.
    Raises: ConfigError when the corpus is shorter than one sample.
    """

    n_tokens: int
    seq_length: int
    """T, tokens in one sample."""
    seed: int
    hold_out: float
    """Share of the samples kept back from training, in 0..0.5; rounded up, but at least one sample is trained."""

    def __post_init__(self) -> None:
        if self.n_tokens < self.seq_length + 1:
            raise ConfigError(
                f"the corpus has {self.n_tokens} tokens and data.seq_length={self.seq_length} needs at least "
                f"{self.seq_length + 1}; add text to data.source, or lower data.seq_length"
            )

    @property
    def n_samples(self) -> int:
        """Positions of the corpus, training and held out together."""
        return -(-(self.n_tokens - 1) // self.seq_length)

    @property
    def n_held_out(self) -> int:
        return min(math.ceil(self.n_samples * self.hold_out), self.n_samples - 1)

    @property
    def n_train(self) -> int:
        """Samples of one pass."""
        return self.n_samples - self.n_held_out

    @cached_property
    def _split(self) -> Permutation:
        return Permutation(self.n_samples, "hold-out")

    def data_pass(self, index: int) -> int:
        """Number of complete passes over the training samples before this index."""
        return index // self.n_train

    def positions(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Positions of many global indices at once. Shapes: (n,) in, (n,) int64 out."""
        passes, offsets = np.divmod(np.asarray(indices, dtype=np.int64), self.n_train)
        ordered = np.empty_like(offsets)
        for data_pass in np.unique(passes).tolist():
            chosen = passes == data_pass
            ordered[chosen] = Permutation(self.n_train, f"order/{self.seed}/{data_pass}")(offsets[chosen])
        return self._split(ordered)

    def held_out_positions(self, n: int) -> npt.NDArray[np.int64]:
        """Positions of the first n held-out samples, or of all when there are fewer."""
        return self._split(np.arange(self.n_train, self.n_train + min(n, self.n_held_out)))

    def span(self, position: int) -> tuple[int, int]:
        """Tokens to read for the sample at a position: its inputs and, one further, its last target; half open."""
        start = position * self.seq_length
        return start, min(start + self.seq_length + 1, self.n_tokens)


@dataclass(frozen=True)
class EvaluationIndex(SampleIndex):
    """The samples of a corpus of which nothing is trained: all count as held out, in one order for good."""

    @property
    def n_held_out(self) -> int:
        return self.n_samples

    def held_out_positions(self, n: int) -> npt.NDArray[np.int64]:
        return Permutation(self.n_samples, "evaluation")(np.arange(min(n, self.n_samples)))


def rank_share(batch: Sequence[int], local_rank: int, local_world_size: int) -> Sequence[int]:
    """The contiguous part of a node's batch that one of its ranks reads; its length must divide evenly."""
    assert len(batch) % local_world_size == 0, (len(batch), local_world_size)
    each = len(batch) // local_world_size
    return batch[local_rank * each : (local_rank + 1) * each]


def require_even_shares(batch_size: int, local_world_size: int) -> None:
    """Raise ConfigError where the ranks of a node cannot share its batch evenly."""
    if batch_size % local_world_size:
        below = batch_size // local_world_size * local_world_size
        nearest = f"{below} or {below + local_world_size}" if below else str(local_world_size)
        raise ConfigError(
            f"train.batch_size={batch_size} is not a multiple of the {local_world_size} ranks of this node; "
            f"nearest: {nearest}"
        )
