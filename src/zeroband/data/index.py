"""The global sample index: which tokens the k-th sample of the run holds. Pure; reads no file and knows no node.

Its shuffle is integer arithmetic, so it is the same on every machine and with every version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from zeroband.config.data import DataConfig
from zeroband.data.token_store import TokenStore
from zeroband.errors import ConfigError

_ROUNDS = 6
_EVALUATED_GROUPS = 64
"""Groups that the first samples of an evaluation come from: few to fetch, and from as many places."""

T = TypeVar("T")

Span = tuple[int, int]
"""Tokens of a corpus, half open."""


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


class FlatPlaces:
    """The samples of one array of tokens on a disk of this machine.

    The sample at position p predicts the tokens p*T+1 .. (p+1)*T, so each token but the first is a target of exactly
    one position and packing drops none; the last position may be short.
    Raises: ConfigError when the corpus is shorter than one sample.
    """

    per_group = None
    """It costs the same to read any sample."""

    def __init__(self, n_tokens: int, seq_length: int) -> None:
        if n_tokens < seq_length + 1:
            raise ConfigError(
                f"the corpus has {n_tokens} tokens and data.seq_length={seq_length} needs at least {seq_length + 1}; "
                "add text to data.source, or lower data.seq_length"
            )
        self.seq_length = seq_length
        self.n_samples = -(-(n_tokens - 1) // seq_length)
        self._n_tokens = n_tokens

    def spans(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens to read for samples: their inputs and, one further, their last target. Shapes: (n,) in, (n, 2) out."""
        starts = positions * self.seq_length
        return np.stack([starts, np.minimum(starts + self.seq_length + 1, self._n_tokens)], axis=1)


class BlockPlaces:
    """The samples of shards that are fetched block by block.

    A group is some whole blocks of a shard, or nearly so where T does not divide them: a multiple of T tokens, at least
    16 samples. No sample leaves its group, whose first token is therefore no target. What is left at the ends of the
    shards makes the last positions; a sample there may be short.
    Raises: ConfigError when no shard holds a sample.
    """

    def __init__(self, shards: Sequence[int], block_tokens: int, seq_length: int) -> None:
        self.seq_length = seq_length
        self._group_tokens = _group_tokens(block_tokens, seq_length)
        self.per_group = self._group_tokens // seq_length
        """Positions that are fetched as one, from each multiple of it on."""
        tokens = np.asarray(shards, dtype=np.int64)
        whole, rest = np.divmod(tokens, self._group_tokens)
        self._shard_ends = np.cumsum(tokens)
        self._group_ends = np.cumsum(whole)
        self._rest_ends = np.cumsum(-(-np.maximum(rest - 1, 0) // seq_length))
        self._n_grouped = int(whole.sum()) * self.per_group
        self.n_samples = self._n_grouped + int(self._rest_ends[-1])
        if self.n_samples < 1:
            raise ConfigError(
                f"the {len(shards)} shards have {tokens.sum()} tokens, and none of them the {seq_length + 1} that "
                f"data.seq_length={seq_length} needs; lower it, or prepare more text"
            )

    def spans(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens to read for samples, as of `FlatPlaces`, those of one sample all of one shard."""
        is_rest = positions >= self._n_grouped
        groups, samples = np.divmod(positions, self.per_group)
        rest = positions - self._n_grouped
        shards = np.where(is_rest, _part(self._rest_ends, rest), _part(self._group_ends, groups))
        samples = np.where(is_rest, rest - _begins(self._rest_ends)[shards], samples)
        first, last = _begins(self._group_ends)[shards], self._group_ends[shards]
        begins = _begins(self._shard_ends)[shards] + (np.where(is_rest, last, groups) - first) * self._group_tokens
        ends = np.where(is_rest, self._shard_ends[shards], begins + self._group_tokens)
        starts = begins + samples * self.seq_length
        return np.stack([starts, np.minimum(starts + self.seq_length + 1, ends)], axis=1)


def _group_tokens(block_tokens: int, seq_length: int) -> int:
    """Tokens of a group: whole blocks where they can be cut evenly, else enough that few are fetched twice."""
    blocks = -(-16 * seq_length // block_tokens)
    if blocks * block_tokens % seq_length == 0:
        return blocks * block_tokens
    return max(16, 8 * block_tokens // seq_length) * seq_length


def _part(ends: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """In which part each number lies, where parts end at `ends`; the last one for what lies behind them all."""
    return np.minimum(np.searchsorted(ends, numbers, side="right"), len(ends) - 1)


def _begins(ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], ends[:-1]])


Places = FlatPlaces | BlockPlaces
"""Cuts a corpus into samples, and numbers them by their place in it: their positions."""


class SampleIndex:
    """The endless list of training samples 0, 1, 2, ... of a corpus, and the samples held out of it.

    Each pass visits every training position once, in its own order. The held-out positions depend neither on the
    seed nor on the pass: runs with different seeds evaluate on the same samples.

    Where positions are fetched in groups, the order is a shuffle on two levels: `mixed` groups from anywhere in the
    corpus at a time, and all samples of these. So what follows in the list lies in few groups, and whole groups are
    held out. With no more groups than that, and with None, it is one shuffle of all samples.
    `hold_out`: share of the samples kept back from training; rounded up, but at least one sample, or group, is trained.
    `evaluates`: nothing is trained, and all samples are held out.
    """

    def __init__(
        self, places: Places, seed: int, hold_out: float, *, mixed: int | None = None, evaluates: bool = False
    ) -> None:
        self.seq_length, self.n_samples, self.spans = places.seq_length, places.n_samples, places.spans
        self._seed, self._evaluates = seed, evaluates
        is_grouped = places.per_group is not None and mixed is not None and self.n_samples > mixed * places.per_group
        self._mixed = mixed if is_grouped else None
        self._size = places.per_group if is_grouped and places.per_group is not None else 1
        self._groups, self._rest = divmod(self.n_samples, self._size)
        held_out = min(-(-math.ceil(self.n_samples * hold_out) // self._size), self._groups - 1)
        self._trained = 0 if evaluates else self._groups - held_out
        self.n_train = 0 if evaluates else self._trained * self._size + self._rest
        """Samples of one pass."""

    @property
    def n_held_out(self) -> int:
        return self.n_samples - self.n_train

    @cached_property
    def _split(self) -> Permutation:
        """Puts the groups that are trained first."""
        return Permutation(self._groups, "hold-out")

    def span(self, position: int) -> Span:
        """Tokens to read for one sample."""
        start, stop = self.spans(np.array([position]))[0].tolist()
        return start, stop

    def data_pass(self, index: int) -> int:
        """Number of complete passes over the training samples before this index."""
        return index // self.n_train

    def positions(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions of many indices at once. Shapes: (n,) in, (n,) int64 out."""
        passes, offsets = np.divmod(np.asarray(indices, dtype=np.int64), self.n_train)
        ordered = np.empty_like(offsets)
        for data_pass in np.unique(passes).tolist():
            chosen, key = passes == data_pass, f"order/{self._seed}/{data_pass}"
            if self._mixed is None:
                ordered[chosen] = self._split(Permutation(self.n_train, key)(offsets[chosen]))
            else:
                slots = shuffle_groups(offsets[chosen], self._trained, self._size, self._mixed, key, rest=self._rest)
                ordered[chosen] = self._placed(slots, 0, self._trained)
        return ordered

    def held_out_positions(self, n: int) -> npt.NDArray[np.int64]:
        """Positions of the first n held-out samples, or of all when there are fewer."""
        numbers = np.arange(min(n, self.n_held_out))
        if self._mixed is None:
            of_all = Permutation(self.n_samples, "evaluation")
            return of_all(numbers) if self._evaluates else self._split(numbers + self.n_train)
        groups, rest = self._groups - self._trained, self._rest if self._evaluates else 0
        if not len(numbers):
            return numbers
        slots = shuffle_groups(numbers, groups, self._size, _EVALUATED_GROUPS, "evaluation", rest=rest)
        return self._placed(slots, self._trained, groups)

    def _placed(self, slots: npt.NDArray[np.int64], first: int, groups: int) -> npt.NDArray[np.int64]:
        """Positions of slots in the groups from `first` on, as the split has them, and behind them in the rest."""
        group, sample = np.divmod(slots, self._size)
        is_rest = group == groups
        placed = self._split(np.where(is_rest, 0, first + group))
        return np.where(is_rest, self._groups, placed) * self._size + sample


def shuffle_groups(
    offsets: npt.NDArray[np.int64], groups: int, size: int, mixed: int, key: str, *, rest: int = 0
) -> npt.NDArray[np.int64]:
    """Shuffle slots 0 .. groups * size + rest on two levels: all groups, and the slots of `mixed` groups at a time.

    The rest belongs to the last of these, which takes up to twice as many groups. Shapes: (n,) in, (n,) out.
    """
    parts = max(1, groups // mixed)
    part_of = np.minimum(offsets // (mixed * size), parts - 1)
    slots = np.empty_like(offsets)
    for part in np.unique(part_of).tolist():
        chosen, begin = part_of == part, part * mixed * size
        end = groups * size + rest if part == parts - 1 else begin + mixed * size
        slots[chosen] = begin + Permutation(end - begin, f"{key}/{part}")(offsets[chosen] - begin)
    group, slot = np.divmod(slots, size)
    is_grouped = group < groups
    group[is_grouped] = Permutation(groups, key)(group[is_grouped])
    return group * size + slot


def index_of(store: TokenStore, data: DataConfig, seed: int, *, evaluates: bool = False) -> SampleIndex:
    """The samples of a corpus as a [data] section cuts and orders them. Raises: ConfigError as `FlatPlaces` does."""
    if store.block_tokens is None:
        return SampleIndex(FlatPlaces(len(store), data.seq_length), seed, data.hold_out, evaluates=evaluates)
    places = BlockPlaces(store.shards, store.block_tokens, data.seq_length)
    blocks = data.shuffle_blocks
    mixed = None if blocks is None else max(1, blocks * store.block_tokens // (places.per_group * data.seq_length))
    return SampleIndex(places, seed, data.hold_out, mixed=mixed, evaluates=evaluates)


def rank_share(batch: Sequence[T], local_rank: int, local_world_size: int) -> Sequence[T]:
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
