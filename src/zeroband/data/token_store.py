"""The interface of a tokenised corpus: token ids, document starts, and which tokens are targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenStore(Protocol):
    """The documents of a corpus end to end, each followed by an end-of-document id.

    By default every token is a target; stores of conversations and packed stores mark the exceptions. Positions are
    numbered through all shards.
    """

    end_of_document: int
    fingerprint: str
    """Content hash; the nodes of a run compare it when they join."""
    dtype: np.dtype[np.unsignedinteger]
    """Type of the ids that `read` returns: uint16 or uint32."""
    shards: Sequence[int] = ()
    """Number of tokens in each shard; empty without shards."""
    block_tokens: int | None = None
    """Tokens that are fetched together; None if random access is cheap."""
    documents: int | None = None
    """Number of documents, if known."""
    is_remote: bool = False
    """Whether tokens are fetched over a network, so that `prefetch` helps."""
    is_plain: bool = True
    """Whether every token is a target and every document starts after an end-of-document id."""
    fetched_bytes: int = 0
    """Total bytes that this process has fetched."""
    packed_length: int | None = None
    """data.seq_length used for best-fit packing; repeated end-of-document ids are then padding."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """Return tokens start..stop-1. Shapes: (stop - start,) of `dtype`; may be read-only."""
        ...

    def document_starts(self, start: int, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Mask the tokens that start a document; in text that is the end-of-document id of the previous one.

        `ids`: the tokens from position `start` on.
        """
        return ids == self.end_of_document

    def is_target(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Mask the tokens start..stop-1 that are targets: all except padding of packed samples.

        Padding is an end-of-document id that follows another one in the same shard.
        """
        if self.packed_length is None or start == stop:
            return np.ones(stop - start, dtype=np.bool_)
        has_predecessor = start > self.shard_start(start)
        ends = self.read(start - has_predecessor, stop) == self.end_of_document
        padding = ends[1:] & ends[:-1]
        return ~(padding if has_predecessor else np.concatenate([[False], padding]))

    def count_targets(self, start: int, stop: int) -> int:
        return stop - start if self.is_plain else int(np.count_nonzero(self.is_target(start, stop)))

    def shard_start(self, position: int) -> int:
        """Return the first position of the shard that holds `position`."""
        return 0

    def prefetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Announce the spans (start, stop) that the node reads next, in order; replaces the previous announcement.

        Every local rank calls it with the same spans.
        """

    def close(self) -> None:
        """Stop background threads."""
