"""A joiner's side of live recovery: fetches a committed state, and the rounds committed meanwhile, from the members.

Several donors are asked what they hold, and what most of them claim is believed; chunks come from all of these at once
and are verified one by one. Raises RecoveryFailed when no donor is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zeroband.elastic.recovery.chunk_queue import STRAGGLER_S, ChunkQueue
from zeroband.elastic.recovery.donors import Donor, DonorTimeouts, Inquiry
from zeroband.elastic.recovery.election import Believed, believe_newest, believe_round
from zeroband.elastic.recovery.state_chunks import Chunk, StateManifest, bytes_of
from zeroband.elastic.recovery.transfer import StateTransfer, Tally
from zeroband.elastic.transport.sealed import Dialler
from zeroband.errors import RecoveryFailed

__all__ = ["Donor", "FetchLimits", "FetchedEntry", "FetchedState", "StateFetch", "fetch_entry"]

_UPDATE = "update"


@dataclass(frozen=True)
class FetchLimits:
    """How wide and how patient a fetch is."""

    donors_at_once: int = 3
    connections: int = 3
    """To each donor."""
    patience: DonorTimeouts = field(default_factory=DonorTimeouts)
    straggler_s: float = STRAGGLER_S
    """A chunk that is longer on its way than this, and than two usual chunks, is fetched from another donor too."""


_LIMITS = FetchLimits()


@dataclass(frozen=True)
class FetchedState:
    """What a fetch brought, besides the sections."""

    round: int
    record: Mapping[str, Any]
    state_digest: str
    """The digest that the donors claim; the caller computes its own and compares."""
    received_bytes: Mapping[str, int]
    """Verified bytes by member, also of calls that failed before. More in sum than the state only where two donors
    sent a late chunk."""
    dropped: Mapping[str, str]
    """Members that were dropped, and why."""
    took_s: float
    """In all calls that this state needed."""


@dataclass(frozen=True)
class FetchedEntry:
    """One round of the journal."""

    round: int
    update: Tensor
    """(nbytes,) uint8, as the donors packed it."""
    record: Mapping[str, Any]
    state_digest: str


def _ignore(chunk_bytes: int, total_bytes: int) -> None:
    """Nobody wants to know."""


class StateFetch:
    """A joiner's fetch of the outer state, kept over failures: what was verified is not fetched again.

    `sections`: (n,) float32 on CPU each, written chunk by chunk.
    """

    def __init__(self, dialler: Dialler, sections: Mapping[str, Tensor], *, limits: FetchLimits = _LIMITS) -> None:
        self._targets = {name: bytes_of(tensor) for name, tensor in sections.items()}
        self._limits = limits
        lengths = {name: len(target) for name, target in self._targets.items()}
        self._inquiry = Inquiry("state", dialler, lengths, limits.patience, limits.connections)
        self._distrusted: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._manifest: StateManifest | None = None
        self._missing: tuple[Chunk, ...] = ()
        self._tally = Tally()
        self._took_s = 0.0

    def fetch(self, donors: Sequence[Donor], on_chunk: Callable[[int, int], None] = _ignore) -> FetchedState:
        """Fetch the newest committed state into the sections, or go on with the one that was begun.

        Donors are used in their order, a few at a time. `on_chunk` gets (bytes of a verified chunk, bytes that this
        call has to fetch) in this thread. Raises RecoveryFailed when no donor is left; another call then goes on where
        this one ended, if some donor still serves the same state.
        """
        started_at_s = time.monotonic()
        try:
            manifest = self._fetch(self._trusted(donors), on_chunk)
        finally:
            self._took_s += time.monotonic() - started_at_s
        return FetchedState(
            round=manifest.round,
            record=manifest.record,
            state_digest=manifest.state_digest,
            received_bytes={member: sent for member, sent in self._tally.received_bytes.items() if sent},
            dropped=dict(self._tally.dropped),
            took_s=self._took_s,
        )

    def distrust(self) -> None:
        """The state that came has not the digest that its donors claim: forget it, and ask others from now on."""
        self._distrusted |= set(self._tally.received_bytes)
        self._forget()

    def _trusted(self, donors: Sequence[Donor]) -> Sequence[Donor]:
        """All but the distrusted; all where nobody else is left."""
        return [donor for donor in donors if donor.member_id not in self._distrusted] or donors

    def _fetch(self, donors: Sequence[Donor], on_chunk: Callable[[int, int], None]) -> StateManifest:
        begun, missing = self._manifest, self._missing
        if begun is not None and missing:
            try:
                return self._pull(Believed(begun, (), {}), donors, on_chunk)
            except RecoveryFailed:
                if len(self._missing) < len(missing):
                    raise
        believed = believe_newest(donors, self._limits.donors_at_once, self._inquiry)
        if begun is None or not missing or begun.claim != believed.manifest.claim:
            self._forget()
            self._manifest, self._missing = believed.manifest, tuple(believed.manifest.chunks())
        self._tally.dropped |= believed.dropped
        return self._pull(believed, donors, on_chunk)

    def _pull(self, believed: Believed, donors: Sequence[Donor], on_chunk: Callable[[int, int], None]) -> StateManifest:
        """Fetch what is missing. Raises RecoveryFailed when no donor is left."""
        chunks = ChunkQueue(self._missing, straggler_s=self._limits.straggler_s)
        transfer = StateTransfer(believed.manifest, self._inquiry, self._targets, chunks, self._tally)
        try:
            transfer.run(
                believed.supporters, believed.spare(donors), on_chunk, donors_at_once=self._limits.donors_at_once
            )
        finally:
            self._missing = transfer.missing
        return believed.manifest


def fetch_entry(
    donors: Sequence[Donor],
    dialler: Dialler,
    round: int,
    room: Callable[[int], Tensor],
    *,
    on_chunk: Callable[[int, int], None] = _ignore,
    limits: FetchLimits = _LIMITS,
) -> FetchedEntry:
    """Fetch what a committed round did, as most of its donors claim.

    `room`: gives (nbytes,) uint8 on CPU for an update of so many bytes, half written where this fails, or raises
    RecoveryFailed where no update has so many. Raises RecoveryFailed when no donor is left.
    """
    inquiry = Inquiry("journal", dialler, None, limits.patience, limits.connections)
    believed = believe_round(donors, limits.donors_at_once, inquiry, round)
    manifest = believed.manifest
    if set(manifest.lengths) != {_UPDATE}:
        raise RecoveryFailed(f"the journal of round {round} has sections {dict(manifest.lengths)!r:.100}")
    update = room(manifest.lengths[_UPDATE])
    chunks = ChunkQueue(manifest.chunks(), straggler_s=limits.straggler_s)
    transfer = StateTransfer(manifest, inquiry, {_UPDATE: bytes_of(update)}, chunks, Tally())
    transfer.run(believed.supporters, believed.spare(donors), on_chunk, donors_at_once=limits.donors_at_once)
    return FetchedEntry(round, update, manifest.record, manifest.state_digest)
