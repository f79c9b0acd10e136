"""What a tokenised corpus is to whoever reads it: ids, where documents begin, and which ids are learned."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenStore(Protocol):
    """The documents of a corpus one after the other: an end-of-document id behind each, and every id is learned.

    A store of conversations says otherwise where they begin and what is learned of them.
    """

    end_of_document: int
    fingerprint: str
    """Hash of the content: nodes of one run compare it when they join."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens start..stop-1. Shapes: (stop - start,) uint16 or uint32; perhaps not writable."""
        ...

    def begins(self, start: int, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Whether each of these tokens, read from `start` on, begins a document: of text the end of the one before."""
        return ids == self.end_of_document

    def is_learned(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Whether each of the tokens start..stop-1 is a target."""
        return np.ones(stop - start, dtype=np.bool_)

    def count_learned(self, start: int, stop: int) -> int:
        """How many of the tokens start..stop-1 are targets."""
        return stop - start
