"""The global sample index: maps the k-th sample of a run to token positions. Pure functions.

The shuffle uses integer arithmetic only, so it is the same on every machine and in every version.
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
"""Groups that provide the first samples of an evaluation: few enough to fetch, enough to be representative."""

T = TypeVar("T")


class Permutation:
    """A pseudo-random permutation of 0..size-1, computed per value instead of stored.

    A balanced Feistel network over two digits of base ceil(sqrt(size)), with addition modulo the base. Its domain has
    at most 2 sqrt(size) extra values; results outside 0..size-1 are encrypted again (cycle walking).
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), section 5.
    """

    def __init__(self, size: int, key: str) -> None:
        assert 0 < size < 1 << 62, size
        self._size = size
        self._base = np.uint64(math.isqrt(size - 1) + 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Permute values. Shapes: (n,) integers in 0..size-1; returns (n,) int64."""
        images = self._encrypt(np.atleast_1d(np.asarray(values, dtype=np.uint64)))
        while (outside := images >= self._size).any():
            images[outside] = self._encrypt(images[outside])
        return images.astype(np.int64)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values // self._base, values % self._base
        for round_key in self._round_keys:
            left, right = right, (left + mix64(right ^ round_key) % self._base) % self._base
        return left * self._base + right


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finaliser: every input bit affects every output bit (modulo 2^64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class BlockLayout:
    """Cuts sharded tokens that are fetched by block into samples.

    A group is a run of T * `group_samples` tokens of a shard, at least 16 samples, of whole blocks if T permits.
    No sample crosses its group, so the group's first token is never a target. The rests at the ends of the shards
    provide the last samples, which may be short.
    Raises: ConfigError if no shard holds a sample.
    """

    def __init__(self, shards: Sequence[int], block_tokens: int, seq_length: int) -> None:
        self.seq_length = seq_length
        self._group_tokens = _group_tokens(block_tokens, seq_length)
        self.group_samples = self._group_tokens // seq_length
        tokens = np.asarray(shards, dtype=np.int64)
        whole, rest = np.divmod(tokens, self._group_tokens)
        self._shard_ends = np.cumsum(tokens)
        self._group_ends = np.cumsum(whole)
        self._rest_ends = np.cumsum(-(-np.maximum(rest - 1, 0) // seq_length))
        self._n_grouped = int(whole.sum()) * self.group_samples
        self.n_samples = self._n_grouped + int(self._rest_ends[-1])
        if self.n_samples < 1:
            raise ConfigError(
                f"the {len(shards)} shards have {tokens.sum()} tokens, but none has the {seq_length + 1} that "
                f"data.seq_length={seq_length} needs; lower it, or prepare more text"
            )

    def spans(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the token range of samples: their inputs plus the last target. Shapes: (n,) in, (n, 2) out.

        Each lies in one shard.
        """
        is_rest = positions >= self._n_grouped
        groups, samples = np.divmod(positions, self.group_samples)
        rest = positions - self._n_grouped
        shards = np.where(is_rest, _part(self._rest_ends, rest), _part(self._group_ends, groups))
        samples = np.where(is_rest, rest - _begins(self._rest_ends)[shards], samples)
        first, last = _begins(self._group_ends)[shards], self._group_ends[shards]
        begins = _begins(self._shard_ends)[shards] + (np.where(is_rest, last, groups) - first) * self._group_tokens
        ends = np.where(is_rest, self._shard_ends[shards], begins + self._group_tokens)
        starts = begins + samples * self.seq_length
        return np.stack([starts, np.minimum(starts + self.seq_length + 1, ends)], axis=1)


def flat_layout(n_tokens: int, seq_length: int) -> BlockLayout:
    """Cut one local array of tokens into samples, all of which are shuffled at once: it is less than a block.

    Sample p has the targets p*T+1 .. (p+1)*T, so each token except the first is a target exactly once.
    Raises: ConfigError if the corpus is shorter than one sample.
    """
    if n_tokens < seq_length + 1:
        raise ConfigError(
            f"the corpus has {n_tokens} tokens and data.seq_length={seq_length} needs at least {seq_length + 1}; "
            "add text to data.source, or lower data.seq_length"
        )
    return BlockLayout([n_tokens], 2 * n_tokens, seq_length)


def _group_tokens(block_tokens: int, seq_length: int) -> int:
    """Return the tokens of a group: whole blocks if they divide evenly, else enough that few blocks are split."""
    blocks = -(-16 * seq_length // block_tokens)
    if blocks * block_tokens % seq_length == 0:
        return blocks * block_tokens
    return max(16, 8 * block_tokens // seq_length) * seq_length


def _part(ends: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the part that each number falls into, given the parts' ends; the last part beyond them."""
    return np.minimum(np.searchsorted(ends, numbers, side="right"), len(ends) - 1)


def _begins(ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], ends[:-1]])


class SampleIndex:
    """The infinite sequence of training samples 0, 1, 2, ... of a corpus, and its held-out samples.

    Each pass visits every training position once, in a different order. Held-out positions depend neither on the seed
    nor on the pass, so runs with different seeds evaluate on the same samples.

    A corpus is shuffled on two levels: groups over the whole corpus, then the samples of `window` groups at a
    time. Consecutive samples thus come from few groups; whole groups are held out. With `window` None, or at least the
    number of groups, all samples are shuffled at once.
    `hold_out`: fraction of samples kept from training, rounded up; at least one sample or group is trained.
    `evaluation_only`: all samples are held out.
    """

    def __init__(
        self,
        layout: BlockLayout,
        seed: int,
        hold_out: float,
        *,
        window: int | None = None,
        evaluation_only: bool = False,
    ) -> None:
        self.seq_length, self.n_samples, self.spans = layout.seq_length, layout.n_samples, layout.spans
        self._seed, self._evaluation_only = seed, evaluation_only
        is_grouped = window is not None and self.n_samples > window * layout.group_samples
        self._window = window if is_grouped else None
        self._size = layout.group_samples if is_grouped else 1
        self._groups, self._rest = divmod(self.n_samples, self._size)
        held_out = min(-(-math.ceil(self.n_samples * hold_out) // self._size), self._groups - 1)
        self._trained = 0 if evaluation_only else self._groups - held_out
        self.n_train = 0 if evaluation_only else self._trained * self._size + self._rest
        """Samples of one pass."""

    @property
    def n_held_out(self) -> int:
        return self.n_samples - self.n_train

    @cached_property
    def _split(self) -> Permutation:
        """Orders the groups: training groups first, then held-out ones."""
        return Permutation(self._groups, "hold-out")

    def positions(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of sample indices. Shapes: (n,) in, (n,) int64 out."""
        passes, offsets = np.divmod(np.asarray(indices, dtype=np.int64), self.n_train)
        ordered = np.empty_like(offsets)
        for data_pass in np.unique(passes).tolist():
            chosen, key = passes == data_pass, f"order/{self._seed}/{data_pass}"
            if self._window is None:
                ordered[chosen] = self._split(Permutation(self.n_train, key)(offsets[chosen]))
            else:
                slots = shuffle_groups(offsets[chosen], self._trained, self._size, self._window, key, rest=self._rest)
                ordered[chosen] = self._placed(slots, 0, self._trained)
        return ordered

    def held_out_positions(self, n: int) -> npt.NDArray[np.int64]:
        """Return the positions of the first n held-out samples, or of all if there are fewer."""
        numbers = np.arange(min(n, self.n_held_out))
        if self._window is None:
            if self._evaluation_only:
                return Permutation(self.n_samples, "evaluation")(numbers)
            return self._split(numbers + self.n_train)
        groups, rest = self._groups - self._trained, self._rest if self._evaluation_only else 0
        if not len(numbers):
            return numbers
        slots = shuffle_groups(numbers, groups, self._size, _EVALUATED_GROUPS, "evaluation", rest=rest)
        return self._placed(slots, self._trained, groups)

    def _placed(self, slots: npt.NDArray[np.int64], first: int, groups: int) -> npt.NDArray[np.int64]:
        """Map slots, numbered through `groups` groups of the split from `first` on and then the rest, to positions."""
        group, sample = np.divmod(slots, self._size)
        is_rest = group == groups
        placed = self._split(np.where(is_rest, 0, first + group))
        return np.where(is_rest, self._groups, placed) * self._size + sample


def shuffle_groups(
    offsets: npt.NDArray[np.int64], groups: int, size: int, window: int, key: str, *, rest: int = 0
) -> npt.NDArray[np.int64]:
    """Shuffle slots 0 .. groups * size + rest on two levels: all groups, then the slots of `window` groups at a time.

    The last window has up to twice as many groups, and the rest. Shapes: (n,) in, (n,) out.
    """
    parts = max(1, groups // window)
    part_of = np.minimum(offsets // (window * size), parts - 1)
    slots = np.empty_like(offsets)
    for part in np.unique(part_of).tolist():
        chosen, begin = part_of == part, part * window * size
        end = groups * size + rest if part == parts - 1 else begin + window * size
        slots[chosen] = begin + Permutation(end - begin, f"{key}/{part}")(offsets[chosen] - begin)
    group, slot = np.divmod(slots, size)
    is_grouped = group < groups
    group[is_grouped] = Permutation(groups, key)(group[is_grouped])
    return group * size + slot


def index_of(store: TokenStore, data: DataConfig, seed: int, *, evaluation_only: bool = False) -> SampleIndex:
    """Build the sample index of a corpus for a [data] section. Raises: ConfigError if the corpus is too short."""
    if store.block_tokens is None:
        layout = flat_layout(len(store), data.seq_length)
        return SampleIndex(layout, seed, data.hold_out, evaluation_only=evaluation_only)
    layout = BlockLayout(store.shards, store.block_tokens, data.seq_length)
    blocks = data.shuffle_blocks
    window = None if blocks is None else max(1, blocks * store.block_tokens // (layout.group_samples * data.seq_length))
    return SampleIndex(layout, seed, data.hold_out, window=window, evaluation_only=evaluation_only)


def rank_share(batch: Sequence[T], local_rank: int, local_world_size: int) -> Sequence[T]:
    """Return a rank's contiguous share of its node's batch, which must divide evenly."""
    assert len(batch) % local_world_size == 0, (len(batch), local_world_size)
    each = len(batch) // local_world_size
    return batch[local_rank * each : (local_rank + 1) * each]


def require_even_shares(batch_size: int, local_world_size: int) -> None:
    """Raise ConfigError unless the batch divides evenly among the node's ranks."""
    if batch_size % local_world_size:
        below = batch_size // local_world_size * local_world_size
        nearest = f"{below} or {below + local_world_size}" if below else str(local_world_size)
        raise ConfigError(
            f"train.batch_size={batch_size} is not a multiple of the {local_world_size} ranks of this node; "
            f"nearest: {nearest}"
        )
