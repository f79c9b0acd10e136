"""A joiner's side of live recovery: fetches a committed state, and the rounds committed meanwhile, from the members.

Several donors are asked what they hold, and what most of them claim is believed; chunks come from all of these at once
and are verified one by one. Raises RecoveryFailed when no donor is left. Local rank 0 only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.reach import lines_of
from zeroband.elastic.membership.records import FOUNDING_ROUND, Peer, RestartPoint
from zeroband.elastic.recovery.donors import Donor, DonorTimeouts, Inquiry
from zeroband.elastic.recovery.election import Believed, believe_newest, believe_round, no_donor_in
from zeroband.elastic.recovery.state_chunks import StateManifest, bytes_of
from zeroband.elastic.recovery.transfer import STRAGGLER_S, StateTransfer, Tally
from zeroband.elastic.store.interface import Store
from zeroband.elastic.transport.sealed import Dialler
from zeroband.errors import RecoveryFailed, RunOver
from zeroband.node.faults import FaultPoints
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.events import noop
from zeroband.observe.log import get_logger
from zeroband.state.flat import SharedBuffers

_SAY_S = 1.0
_UPDATE = "update"
_VALUE_BYTES = 4
_IN_VAIN = 3
"""A call ends when its donors went on so often in a row before they had sent anything whole."""

_log = get_logger(__name__)


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
    later: Sequence[tuple[int, int, int]] = ()
    """Values [start, stop) of all sections that are of a later round than `round`, and that round; ascending."""


@dataclass(frozen=True)
class FetchedEntry:
    """One round of the journal."""

    round: int
    update: Tensor
    """(nbytes,) uint8, as the donors packed it."""
    record: Mapping[str, Any]
    state_digest: str


class _Download:
    """What a manifest is of, on its way into `targets`; what was verified is not fetched again."""

    def __init__(
        self,
        manifest: StateManifest,
        inquiry: Inquiry,
        targets: Mapping[str, memoryview],
        limits: FetchLimits,
        before: _Download | None = None,
    ) -> None:
        """`before`: what came of earlier rounds stays where all sections have it."""
        self.manifest = manifest.whole
        self.complete: dict[int, StateManifest] = {} if before is None else before.came()
        """By number of a chunk, of which earlier manifest it is."""
        chunks = (chunk for chunk in manifest.chunks() if chunk.index not in self.complete)
        self.missing = tuple(sorted(chunks, key=lambda chunk: chunk.index))
        self.tally = Tally() if before is None else before.tally
        self._inquiry = inquiry
        self._targets = targets
        self._limits = limits

    @property
    def first(self) -> int:
        """Number of the first chunk that is missing."""
        return self.missing[0].index if self.missing else 0

    def run(self, believed: Believed, donors: Sequence[Donor], on_chunk: Callable[[int, int], None]) -> None:
        """Fetch what is missing. Raises RecoveryFailed when no donor is left, or none has the hashes of the rest.

        `believed`: of the first that is missing.
        """
        self.tally.dropped |= believed.dropped
        transfer = StateTransfer(
            believed.manifest,
            self._inquiry,
            self._targets,
            self.missing,
            self.tally,
            lambda first: self._believed_from(first, donors).manifest,
            straggler_s=self._limits.straggler_s,
        )
        try:
            transfer.run(
                believed.supporters, believed.spare(donors), on_chunk, donors_at_once=self._limits.donors_at_once
            )
        finally:
            self.missing = transfer.missing
        if self.missing:
            raise RecoveryFailed(f"no member has the hashes of round {self.manifest.round} from {self.missing[0]} on")

    def go_on(self, donors: Sequence[Donor], on_chunk: Callable[[int, int], None]) -> None:
        """Fetch what is missing still. Raises as `run` does."""
        self.run(self._believed_from(self.first, donors), donors, on_chunk)

    def _believed_from(self, first: int, donors: Sequence[Donor]) -> Believed:
        """What most donors say of the chunks from this one on. Raises RecoveryFailed, too where it is another state."""
        round, limits = self.manifest.round, self._limits
        believed = believe_round(donors, limits.donors_at_once, self._inquiry, round, first)
        if believed.manifest.whole.claim != self.manifest.claim:
            raise RecoveryFailed(
                f"round {round} is another one now: {self.manifest.difference(believed.manifest.whole)}"
            )
        return believed

    def came(self) -> dict[int, StateManifest]:
        """Numbers of the chunks that are there of all sections, and of which manifest they are."""
        missing = {chunk.index for chunk in self.missing}
        new = {chunk.index for chunk in self.manifest.chunks()} - missing
        return self.complete | dict.fromkeys(new - self.complete.keys(), self.manifest)


class StateFetch:
    """A joiner's fetch of the outer state, kept over failures.

    `sections`: (n,) float32 on CPU each, written chunk by chunk. `mixes`: where the donors go on to another round, so
    does the fetch, and what it has got before is replayed up to that later. `expects`: digest of the only state that
    will do; None: the newest.
    """

    def __init__(
        self,
        dialler: Dialler,
        sections: Mapping[str, Tensor],
        *,
        mixes: bool = False,
        expects: str | None = None,
        limits: FetchLimits = _LIMITS,
    ) -> None:
        self._mixes = mixes
        self._expects = expects
        self._targets = {name: bytes_of(tensor) for name, tensor in sections.items()}
        self._limits = limits
        lengths = {name: len(target) for name, target in self._targets.items()}
        self._inquiry = Inquiry("state", dialler, lengths, limits.patience, limits.connections)
        self._distrusted: set[str] = set()
        self._begun: _Download | None = None
        self._goes_on = False
        """With what was begun, rather than ask for the newest state."""
        self._took_s = 0.0

    def fetch(self, donors: Sequence[Donor], on_chunk: Callable[[int, int], None] = noop) -> FetchedState:
        """Fetch the newest committed state into the sections, or go on with the one that was begun.

        Donors are used in their order, a few at a time. `on_chunk` gets (bytes of a verified chunk, bytes that this
        call has to fetch) in this thread. Raises RecoveryFailed when no donor is left; another call then goes on where
        this one ended. After one that got nothing, the donors are asked anew for their newest state.
        """
        started_at_s = time.monotonic()
        try:
            download = self._fetch(self._trusted(donors), on_chunk)
        finally:
            self._took_s += time.monotonic() - started_at_s
        came = download.came()
        oldest = min(came.values(), key=lambda manifest: manifest.round, default=download.manifest)
        return FetchedState(
            round=oldest.round,
            record=oldest.record,
            state_digest=oldest.state_digest,
            later=tuple(_later(came, oldest)),
            received_bytes={member: sent for member, sent in download.tally.received_bytes.items() if sent},
            dropped=dict(download.tally.dropped),
            took_s=self._took_s,
        )

    def distrust(self) -> None:
        """The state that came has not the digest that its donors claim: forget it, and ask others from now on."""
        if self._begun is not None:
            self._distrusted |= set(self._begun.tally.received_bytes)
        self._begun, self._goes_on, self._took_s = None, False, 0.0

    def _trusted(self, donors: Sequence[Donor]) -> Sequence[Donor]:
        """All but the distrusted; all where nobody else is left."""
        return [donor for donor in donors if donor.member_id not in self._distrusted] or donors

    def _fetch(self, donors: Sequence[Donor], on_chunk: Callable[[int, int], None]) -> _Download:
        if not self._mixes:
            return self._fetch_round(donors, on_chunk)
        had, in_vain, total_bytes = 0, 0, 0

        def count(chunk_bytes: int, round_bytes: int) -> None:
            nonlocal total_bytes
            total_bytes = total_bytes or round_bytes  # of the first round, which all of this call is
            on_chunk(chunk_bytes, total_bytes)

        while True:
            self._goes_on = False
            try:
                return self._fetch_round(donors, count)
            except RecoveryFailed:
                came = 0 if self._begun is None else len(self._begun.came())
                in_vain = 0 if came > had else in_vain + 1
                had = came
                if in_vain == _IN_VAIN:
                    raise

    def _fetch_round(self, donors: Sequence[Donor], on_chunk: Callable[[int, int], None]) -> _Download:
        """Fetch what one round's donors have of what is missing."""
        if self._begun is not None and self._goes_on:
            download, run = self._begun, self._begun.go_on
        else:
            believed = believe_newest(donors, self._limits.donors_at_once, self._inquiry, self._first_of)
            if self._expects not in (None, believed.manifest.state_digest):
                held = believed.manifest.state_digest or "the initial one"
                raise RecoveryFailed(f"{believed.supporters[0]} has not taken over the state {self._expects}: {held}")
            download = self._begun
            if download is None or not download.missing or download.manifest.claim != believed.manifest.whole.claim:
                before = download if self._can_mix(download, believed.manifest) else None
                self._took_s = 0.0 if before is None else self._took_s
                download = self._begun = _Download(
                    believed.manifest, self._inquiry, self._targets, self._limits, before
                )
            run = partial(download.run, believed)
        missing = len(download.missing)
        try:
            run(donors, on_chunk)
        finally:
            self._goes_on = 0 < len(download.missing) < missing
        return download

    def _first_of(self, round: int) -> int:
        """Number of the first chunk that is missing, if a round is fetched next."""
        begun = self._begun
        return begun.first if begun is not None and (self._mixes or begun.manifest.round == round) else 0

    def _can_mix(self, before: _Download | None, manifest: StateManifest) -> bool:
        """Whether what came before is of use beside a newer round's."""
        if before is None or not before.missing or not self._mixes:
            return False
        is_alike = before.manifest.chunk_bytes == manifest.chunk_bytes and manifest.chunk_bytes % _VALUE_BYTES == 0
        return is_alike and before.manifest.round < manifest.round


def _later(came: Mapping[int, StateManifest], oldest: StateManifest) -> Iterator[tuple[int, int, int]]:
    """Runs of values that are of later rounds than the oldest."""
    for manifest, run in groupby(sorted(came), key=lambda index: came[index]):
        indices, length = list(run), max(manifest.lengths.values()) // _VALUE_BYTES
        if manifest is not oldest:
            values = manifest.chunk_bytes // _VALUE_BYTES
            yield indices[0] * values, min((indices[-1] + 1) * values, length), manifest.round


def fetch_entry(
    donors: Sequence[Donor],
    dialler: Dialler,
    round: int,
    room: Callable[[int], Tensor],
    *,
    on_chunk: Callable[[int, int], None] = noop,
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
    download = _Download(manifest, inquiry, {_UPDATE: bytes_of(update)}, limits)
    download.run(believed, donors, on_chunk)
    return FetchedEntry(round, update, manifest.record, manifest.state_digest)


class RecoveryClient:
    """Fetches from the members that the store shows at that moment: a state, and the rounds that came after it.

    `on_event`: told of events, by kind and fields.
    """

    def __init__(
        self,
        store: Store,
        dialler: Dialler,
        buffers: SharedBuffers,
        flags: SharedFlags,
        faults: FaultPoints,
        on_event: Callable[..., object],
    ) -> None:
        self._on_event = on_event
        self._store = store
        self._dialler = dialler
        self._buffers = buffers
        self._flags = flags
        self._faults = faults
        self._state: StateFetch | None = None
        self.verified_bytes = 0
        """Count of the states that were begun; 0 again after one that was not what its donors said."""

    def begin(self, sections: tuple[str, ...], *, mixes: bool = False) -> None:
        """A state is to be fetched into the section buffers: forget what an earlier fetch had got.

        `mixes`: as `StateFetch` says.
        """
        self._state = StateFetch(self._dialler, {name: self._buffers[name] for name in sections}, mixes=mixes)

    def fetch_restart(self, sections: tuple[str, ...], agreed: RestartPoint) -> FetchedState:
        """Fetch the state that the run is about to begin again on, from the node that named it.

        Raises RecoveryFailed where that has not taken it over yet, or is gone.
        """
        targets = {name: self._buffers[name] for name in sections}
        fetch, peers = (
            StateFetch(self._dialler, targets, expects=agreed.state_digest),
            self._store.view(FOUNDING_ROUND).peers,
        )
        donors = [_donor(agreed.member, peers)] if agreed.member in peers else []
        return fetch.fetch(donors, self._counting(0))

    def fetch_state(self) -> FetchedState:
        """Fetch a committed state, going on where the last call stopped. Raises RecoveryFailed, RunOver."""
        return self._begun.fetch(self._donors(), self._counting(self.verified_bytes))

    def _counting(self, had_bytes: int) -> Callable[[int, int], None]:
        """What takes note of every chunk of a state. `had_bytes`: those that were verified before."""
        meter = _Meter(self._flags, self._faults)
        progress = FetchProgress(self._on_event, had_bytes)

        def count(chunk_bytes: int, total_bytes: int) -> None:
            self.verified_bytes += chunk_bytes
            progress.count(chunk_bytes, total_bytes)
            meter.count(chunk_bytes, total_bytes)

        return count

    def distrust_state(self) -> None:
        """The state that came is not what its donors said: ask others first."""
        self._begun.distrust()
        self.verified_bytes = 0

    @property
    def _begun(self) -> StateFetch:
        assert self._state is not None, "begin comes first"
        return self._state

    def entry_bytes(self, round: int) -> int:
        """Size of what a round did. Raises RecoveryFailed where no journal has it; RunOver."""
        limits = _LIMITS
        inquiry = Inquiry("journal", self._dialler, None, limits.patience, limits.connections)
        return believe_round(self._donors(), limits.donors_at_once, inquiry, round).manifest.total_bytes

    def fetch_entry(self, round: int, room: Callable[[int], Tensor]) -> FetchedEntry:
        """Fetch what a round did. `room`: as the function of this name says. Raises RecoveryFailed, RunOver."""
        meter = _Meter(self._flags, self._faults)
        return fetch_entry(self._donors(), self._dialler, round, room, on_chunk=meter.count)

    def _donors(self) -> list[Donor]:
        """The members that serve their state, in random order, so that joiners spread over them.

        Those that are called through others come last. Raises RecoveryFailed where there is none, RunOver.
        """
        view = self._store.view(FOUNDING_ROUND)
        if view.committed is None:
            raise no_donor_in(view)
        alive = [m for m in view.committed.members if m in view.alive and m in view.peers]
        if not alive and Progress.from_record(view.committed.record["progress"]).is_complete:
            raise RunOver(f"the run is complete since round {view.committed.round}; start another with a new run.id")
        donors = [_donor(member, view.peers) for member in alive if view.peers[member].serves_state]
        if not donors:
            raise no_donor_in(view)
        random.shuffle(donors)
        return sorted(donors, key=lambda donor: bool(donor.relays))


def _donor(member: str, peers: Mapping[str, Peer]) -> Donor:
    return Donor(member, peers[member].host, peers[member].port, lines_of(member, peers))


class FetchProgress:
    """Records how far a fetch is: at its beginning, each second, and at its end.

    `had_bytes`: those that earlier calls verified. `clock`: by which seconds are counted.
    """

    def __init__(
        self, on_event: Callable[..., object], had_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_event = on_event
        self._had_bytes, self._done_bytes = had_bytes, 0
        self._clock = clock
        self._began_at_s = self._said_at_s = clock()

    def count(self, chunk_bytes: int, total_bytes: int) -> None:
        """Take note of a verified chunk; `total_bytes`: what is to be fetched, without what was there before."""
        if self._done_bytes == 0:
            self._say(total_bytes, None)
        self._done_bytes += chunk_bytes
        now_s = self._clock()
        if self._done_bytes >= total_bytes or now_s - self._said_at_s >= _SAY_S:
            self._said_at_s = now_s
            self._say(total_bytes, self._done_bytes / max(now_s - self._began_at_s, 1e-6))

    def _say(self, total_bytes: int, bytes_per_s: float | None) -> None:
        had, rate = self._had_bytes, None if bytes_per_s is None else round(bytes_per_s)
        self._on_event("join_progress", bytes=had + self._done_bytes, of_bytes=had + total_bytes, bytes_per_s=rate)


class _Meter:
    """Logs how far a fetch is, and shows the guardian that the trainer moves."""

    def __init__(self, flags: SharedFlags, faults: FaultPoints) -> None:
        self._flags = flags
        self._faults = faults
        self._started_at_s = self._said_at_s = time.monotonic()
        self._done_bytes = 0

    def count(self, chunk_bytes: int, total_bytes: int) -> None:
        self._done_bytes += chunk_bytes
        self._flags.advance()
        if 2 * self._done_bytes >= total_bytes:
            self._faults.at("joining", 0)
        now_s = time.monotonic()
        if now_s - self._said_at_s > _SAY_S:
            self._said_at_s = now_s
            rate = self._done_bytes / (now_s - self._started_at_s)
            eta_s = (total_bytes - self._done_bytes) / rate
            fields = {"done": self._done_bytes / total_bytes, "bytes_per_s": rate, "eta_s": eta_s}
            _log.info("fetching from the others", extra={"fields": fields})
