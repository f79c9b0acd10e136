"""The samples of a run: of one source, or of several that are mixed. Opens token stores; knows no rank's share."""

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
from zeroband.data.mixture import TURNS, Dealt, Mixture, SourceShare
from zeroband.data.token_store import TokenStore
from zeroband.data.tokens import OnProgress, prepare
from zeroband.errors import ConfigError

_AT_ONCE = 1024
_STRETCHES = 16
"""Stretches of _AT_ONCE samples whose places are kept."""


class Sample(NamedTuple):
    """The tokens of a sample: its inputs and, one further, its last target."""

    source: int
    """Number of the source."""
    start: int
    stop: int


@dataclass(frozen=True)
class SourceSamples:
    """One source, and its samples."""

    name: str
    """Its name in data.sources; empty where there is just one."""
    store: TokenStore
    index: SampleIndex


class Dataset:
    """The endless list of samples of a run, and the samples held out of it."""

    def __init__(self, sources: Sequence[SourceSamples], mixture: Mixture | None = None) -> None:
        self.sources = tuple(sources)
        self.seq_length = sources[0].index.seq_length
        self.end_of_document = sources[0].store.end_of_document
        self.dtype = np.result_type(*(source.store.dtype for source in sources))
        """Type that holds the ids of all sources."""
        self._mixture = mixture
        self._laid_out = functools.lru_cache(_STRETCHES)(self._lay_out)

    @property
    def is_mixed(self) -> bool:
        return self._mixture is not None

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """What nodes that share the data must agree on, by what messages call it: tokens, and who has which turn."""
        tokens = {f"data{one.name and '.sources.'}{one.name} (tokens)": one.store.fingerprint for one in self.sources}
        return tokens | ({"data.sources (turns)": TURNS} if self.is_mixed else {})

    @property
    def fingerprint(self) -> str:
        """What the list of samples follows from: all tokens, and how they are mixed."""
        if self._mixture is None:
            return self.sources[0].store.fingerprint
        content = [self.fingerprints, self._mixture.weights, [one.max_passes for one in self._mixture.sources]]
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def is_fetched(self) -> bool:
        """Whether tokens have to come from elsewhere before they are read."""
        return any(source.store.is_fetched for source in self.sources)

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        """The training samples at global indices."""
        return [self._laid_out(index // _AT_ONCE)[index % _AT_ONCE] for index in indices]

    def spans(self, indices: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The source of each training sample, and its tokens. Shapes: (n,) and (n, 2)."""
        sources, own = self._deal(indices)
        spans = np.empty((len(own), 2), dtype=np.int64)
        for number, source in enumerate(self.sources):
            chosen = sources == number
            spans[chosen] = source.index.spans(source.index.positions(own[chosen]))
        return sources, spans

    def held_out(self, n: int, source: int = 0, *, first: int = 0) -> list[Sample]:
        """N samples that are held out of a source, from the `first`-th on, or all of these when there are fewer."""
        index = self.sources[source].index
        positions = index.held_out_positions(first + n)[first:]
        return [Sample(source, *span) for span in index.spans(positions).tolist()]

    def passes(self, n: int) -> tuple[float, ...]:
        """Passes over each source that the first n samples of the run make."""
        counts = (n,) if self._mixture is None else self._mixture.counts(n)
        return tuple(count / source.index.n_train for count, source in zip(counts, self.sources, strict=True))

    def close(self) -> None:
        for source in self.sources:
            source.store.close()

    def _deal(self, indices: Sequence[int]) -> Dealt:
        own = np.asarray(indices, dtype=np.int64)
        return Dealt(np.zeros_like(own), own) if self._mixture is None else self._mixture.deal(own)

    def _lay_out(self, number: int) -> list[Sample]:
        """The samples of one stretch of the list, which cost less together than one by one."""
        sources, spans = self.spans(range(number * _AT_ONCE, (number + 1) * _AT_ONCE))
        return list(map(Sample, sources.tolist(), *spans.T.tolist()))


def open_dataset(
    data: DataConfig,
    seed: int,
    on_progress: OnProgress | None = None,
    *,
    local_rank: int = 0,
    local_world_size: int = 1,
    evaluates: bool = False,
) -> Dataset:
    """Open the sources of a [data] section, building tokens that come of text first where they are not there yet.

    Called by all local ranks. `evaluates`: nothing is trained, and all samples are held out.
    Raises: ConfigError as `prepare` does, and where a source is shorter than a sample; with the name of the source.
    """
    opened: list[SourceSamples] = []
    for name, part in sorted(data.parts.items()):
        try:
            store = prepare(part, seed, on_progress, local_rank=local_rank, local_world_size=local_world_size)
            opened.append(SourceSamples(name, store, index_of(store, part, seed, evaluates=evaluates)))
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
                "one; raise it, or leave the source out"
            )
    return Mixture(shares, [(math.ceil(phase.from_tokens / data.seq_length), phase.weights) for phase in data.phases])
