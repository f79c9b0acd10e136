"""What a reader sees of a tokenised corpus: ids, where documents begin, and which ids are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenStore(Protocol):
    """The documents of a corpus one after the other: an end-of-document id behind each, and every id is learned.

    A store of conversations says otherwise where they begin and what is learned of them. The ids of several shards have
    one numbering: those of the second follow the last one of the first.
    """

    end_of_document: int
    fingerprint: str
    """Hash of the content: nodes of one run compare it when they join."""
    dtype: np.dtype[np.unsignedinteger]
    """Type of the ids that are read: uint16 or uint32."""
    shards: Sequence[int] = ()
    """How many ids each shard holds; empty where there are none."""
    block_tokens: int | None = None
    """Ids of a shard that are fetched as one; None: it costs the same to read one id anywhere."""
    documents: int | None = None
    """How many there are, where it is known."""
    is_fetched: bool = False
    """Whether ids come from elsewhere, so that it helps to know before what is read."""
    is_plain: bool = True
    """All is learned, and documents begin where the one before ends: `begins` and `is_learned` need not be asked."""
    packed_length: int | None = None
    """seq_length that documents were packed for: an end-of-document id behind another is padding."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens start..stop-1. Shapes: (stop - start,) uint16 or uint32; perhaps not writable."""
        ...

    def read_into(self, start: int, stop: int, out: npt.NDArray[np.unsignedinteger]) -> None:
        """Write tokens start..stop-1 into `out`. Shapes: (stop - start,), contiguous, of a type that holds them."""
        out[:] = self.read(start, stop)

    def begins(self, start: int, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Whether each of these tokens, read from `start` on, begins a document: of text the end of the one before."""
        return ids == self.end_of_document

    def is_learned(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Whether each of the tokens start..stop-1 is a target: all but the padding of packed samples.

        Padding ends a document, as the id before it in its shard does.
        """
        if self.packed_length is None or start == stop:
            return np.ones(stop - start, dtype=np.bool_)
        has_one_before = start > self.shard_start(start)
        ends = self.read(start - has_one_before, stop) == self.end_of_document
        padding = ends[1:] & ends[:-1]
        return ~(padding if has_one_before else np.concatenate([[False], padding]))

    def count_learned(self, start: int, stop: int) -> int:
        """How many of the tokens start..stop-1 are targets."""
        return stop - start if self.is_plain else int(np.count_nonzero(self.is_learned(start, stop)))

    def shard_start(self, position: int) -> int:
        """First token of the shard that one lies in."""
        return 0

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        """Take note of what is read next, in this order, by all ranks of the node; replaces what was expected before.

        Called on every local rank with the same spans (start, stop) of ids. A store that fetches begins to.
        """

    @property
    def waited_s(self) -> float:
        """Seconds that `read` has waited for ids to come, in all."""
        return 0.0

    @property
    def fetched_bytes(self) -> int:
        """Bytes that this process has fetched from elsewhere, in all."""
        return 0

    def close(self) -> None:
        """End what runs in the background."""
