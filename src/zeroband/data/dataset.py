"""The samples of a run, from one source or a mixture. Opens token stores; independent of ranks."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zeroband.config.data import DataConfig
from zeroband.data.index import SampleIndex, index_of
from zeroband.data.mixture import TURNS, Mixture, SampleOrigins, SourceShare
from zeroband.data.token_store import TokenStore
from zeroband.data.tokens import OnProgress, prepare
from zeroband.errors import ConfigError

_CHUNK = 1024
_CACHED_CHUNKS = 16


class Sample(NamedTuple):
    """Token range of a sample: its inputs plus the last target."""

    source: int
    """Index of the source."""
    start: int
    stop: int


@dataclass(frozen=True)
class SourceSamples:
    """A source and its sample index."""

    name: str
    """Name in data.sources; empty for a single source."""
    store: TokenStore
    index: SampleIndex


class Dataset:
    """The infinite sequence of samples of a run, and its held-out samples."""

    def __init__(self, sources: Sequence[SourceSamples], mixture: Mixture | None = None) -> None:
        self.sources = tuple(sources)
        self.seq_length = sources[0].index.seq_length
        self.end_of_document = sources[0].store.end_of_document
        self.dtype = np.result_type(*(source.store.dtype for source in sources))
        self._mixture = mixture
        self._cached_chunk = functools.lru_cache(_CACHED_CHUNKS)(self._chunk)

    @property
    def is_mixed(self) -> bool:
        return self._mixture is not None

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """What nodes sharing the data must agree on, by name in messages: tokens and interleaving rule."""
        tokens = {f"data{one.name and '.sources.'}{one.name} (tokens)": one.store.fingerprint for one in self.sources}
        return tokens | ({"data.sources (turns)": TURNS} if self.is_mixed else {})

    @property
    def fingerprint(self) -> str:
        """Hash of all that determines the samples: tokens and mixture."""
        if self._mixture is None:
            return self.sources[0].store.fingerprint
        content = [self.fingerprints, self._mixture.weights, [one.max_passes for one in self._mixture.sources]]
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def is_remote(self) -> bool:
        """Whether a source is fetched over a network."""
        return any(source.store.is_remote for source in self.sources)

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        """Return the training samples at global indices."""
        return [self._cached_chunk(index // _CHUNK)[index % _CHUNK] for index in indices]

    def spans(self, indices: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the source and token range of each training sample. Shapes: (n,) and (n, 2)."""
        sources, own = self._locate(indices)
        spans = np.empty((len(own), 2), dtype=np.int64)
        for number, source in enumerate(self.sources):
            chosen = sources == number
            spans[chosen] = source.index.spans(source.index.positions(own[chosen]))
        return sources, spans

    def held_out(self, n: int, source: int = 0, *, first: int = 0) -> list[Sample]:
        """Return n held-out samples of a source from the `first`-th on; fewer at the end."""
        index = self.sources[source].index
        positions = index.held_out_positions(first + n)[first:]
        return [Sample(source, *span) for span in index.spans(positions).tolist()]

    def passes(self, n: int) -> tuple[float, ...]:
        """Return how many passes over each source the first n samples make."""
        counts = (n,) if self._mixture is None else self._mixture.counts(n)
        return tuple(count / source.index.n_train for count, source in zip(counts, self.sources, strict=True))

    def close(self) -> None:
        for source in self.sources:
            source.store.close()

    def _locate(self, indices: Sequence[int]) -> SampleOrigins:
        own = np.asarray(indices, dtype=np.int64)
        return SampleOrigins(np.zeros_like(own), own) if self._mixture is None else self._mixture.locate(own)

    def _chunk(self, number: int) -> list[Sample]:
        """Compute a run of samples together, which is cheaper than one by one."""
        sources, spans = self.spans(range(number * _CHUNK, (number + 1) * _CHUNK))
        return list(map(Sample, sources.tolist(), *spans.T.tolist()))


def open_dataset(
    data: DataConfig,
    seed: int,
    on_progress: OnProgress | None = None,
    *,
    local_rank: int = 0,
    local_world_size: int = 1,
    evaluation_only: bool = False,
) -> Dataset:
    """Open the sources of a [data] section, tokenising text that is not cached. Called by all local ranks.

    `evaluation_only`: all samples are held out.
    Raises: ConfigError naming the source, as `prepare` does or if it is shorter than a sample.
    """
    opened: list[SourceSamples] = []
    for name, part in sorted(data.parts.items()):
        try:
            store = prepare(part, seed, on_progress, local_rank=local_rank, local_world_size=local_world_size)
            opened.append(SourceSamples(name, store, index_of(store, part, seed, evaluation_only=evaluation_only)))
        except ConfigError as error:
            if not name:
                raise
            raise ConfigError(f"data.sources, {name}: {error}") from error
    return Dataset(opened, _mixture_of(data, opened) if data.sources else None)


def _mixture_of(data: DataConfig, opened: Sequence[SourceSamples]) -> Mixture:
    settings = {one.name: one for one in data.sources}
    shares = [
        SourceShare(one.name, settings[one.name].weight, one.index.n_train, settings[one.name].max_passes)
        for one in opened
    ]
    for share in shares:
        if not share.limit:
            raise ConfigError(
                f"data.sources, {share.name}: max_passes={share.max_passes} of {share.n_train} samples is less than "
                "one sample; raise it, or drop the source"
            )
    return Mixture(shares, [(math.ceil(phase.from_tokens / data.seq_length), phase.weights) for phase in data.phases])
