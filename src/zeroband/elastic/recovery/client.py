"""The joiner's side of live recovery: fetches a committed state, and the rounds committed meanwhile, from members.

One donor, the lead, is trusted for the manifest, and chunks from all donors are checked against it. The next verdict,
which records the state that the members built on, shows whether the lead lied. Raises RecoveryFailed when no donor is
left. Local rank 0 only.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.reach import relay_routes
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, Peer, RestartPoint, Verdict, View
from zeroband.elastic.membership.resume_rules import pending_restart
from zeroband.elastic.recovery.donors import LIMITS, Donor, FetchLimits, Inquiry, no_donor
from zeroband.elastic.recovery.state_chunks import Chunk, StateManifest
from zeroband.elastic.recovery.transfer import StateTransfer, Tally
from zeroband.elastic.store.interface import Store
from zeroband.elastic.transport.dial import Dialler
from zeroband.errors import RecoveryFailed, RunOver
from zeroband.node.faults import FaultPoints
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.events import noop
from zeroband.observe.log import get_logger
from zeroband.observe.view import node_id_of_member
from zeroband.state.flat import SharedBuffers
from zeroband.state.round_state import RoundState, RoundUpdate
from zeroband.state.slot import bytes_of

_SAY_S = 1.0
_UPDATE = "update"
_VALUE_BYTES = 4
_IN_VAIN = 3
"""Rounds without a complete chunk, in a row, after which a call fails."""

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class FetchedState(RoundState):
    """Result of a fetch. The digest is the donors' claim; the caller compares it with a computed one."""

    received_bytes: Mapping[str, int]
    """Verified bytes by member, including earlier failed calls. The sum exceeds the state if two donors sent one
    chunk."""
    dropped: Mapping[str, str]
    """Dropped members, with the reason."""
    took_s: float
    """Seconds in all calls for this state."""
    later: Sequence[tuple[int, int, int]] = ()
    """Ranges [start, stop) of all sections that are of a later round than `round`, with that round; ascending."""


class StateFetch:
    """A joiner's resumable fetch of the outer state.

    `sections`: (n,) float32 on CPU each, written chunk by chunk. `mixes`: if the donors advance to another round, fetch
    the remaining chunks of that round; the earlier ones are replayed later. `objection`: returns why a round and digest
    claimed by a donor are not credible; empty: they are.
    """

    def __init__(
        self,
        dialler: Dialler,
        sections: Mapping[str, Tensor],
        *,
        mixes: bool = False,
        objection: Callable[[int, str], str] = lambda round, state_digest: "",
        limits: FetchLimits = LIMITS,
    ) -> None:
        self._mixes = mixes
        self._objection = objection
        self._targets = {name: bytes_of(tensor) for name, tensor in sections.items()}
        lengths = {name: len(target) for name, target in self._targets.items()}
        self._inquiry = Inquiry("state", dialler, lengths, limits)
        self._begun: StateManifest | None = None
        self._missing: tuple[Chunk, ...] = ()
        """Missing chunks, in fetch order."""
        self._came: dict[int, StateManifest] = {}
        """Fetched chunk numbers, over all sections, with the manifest of their round."""
        self._goes_on = False
        """Whether to continue the begun round rather than ask for the newest state."""
        self._total_bytes = 0
        """Bytes that this call must fetch."""
        self.tally = Tally()
        self._took_s = 0.0

    def fetch(self, donors: Sequence[Donor], on_chunk: Callable[[int, int], None] = noop) -> FetchedState:
        """Fetch the newest committed state into the sections, or continue the one already begun.

        Donors are used in order, a few at a time; the first that serves leads. `on_chunk` gets (bytes of a verified
        chunk, bytes that this call must fetch) in this thread. Raises RecoveryFailed when no donor is left; the next
        call then resumes. After a call without progress, donors are asked again for their newest state.
        """
        started_at_s = time.monotonic()
        try:
            self._fetch(donors, on_chunk)
        finally:
            self._took_s += time.monotonic() - started_at_s
        assert self._begun is not None
        oldest = min(self._came.values(), key=lambda manifest: manifest.round, default=self._begun)
        return FetchedState(
            round=oldest.round,
            record=oldest.record,
            state_digest=oldest.state_digest,
            later=tuple(_later(self._came, oldest)),
            received_bytes=dict(self.tally.received_bytes),
            dropped=dict(self.tally.dropped),
            took_s=self._took_s,
        )

    def _fetch(self, donors: Sequence[Donor], on_chunk: Callable[[int, int], None]) -> None:
        in_vain, self._total_bytes = 0, 0
        while True:
            had, self._goes_on = len(self._came), self._goes_on and not self._mixes
            try:
                return self._fetch_round(donors, on_chunk)
            except RecoveryFailed:
                in_vain = 0 if len(self._came) > had else in_vain + 1
                if not self._mixes or in_vain == _IN_VAIN:
                    raise

    def _fetch_round(self, donors: Sequence[Donor], on_chunk: Callable[[int, int], None]) -> None:
        """Fetch missing chunks from the donors of one round."""
        begun, self._goes_on = self._begun if self._goes_on else None, False

        def objection(manifest: StateManifest) -> str:
            if begun is not None and manifest.whole.claim != begun.claim:
                return f"round {manifest.round} has changed: {begun.difference(manifest.whole)}"
            return self._objection(manifest.round, manifest.state_digest)

        round = None if begun is None else begun.round
        lead, manifest = self._inquiry.lead_of(donors, round, self._first_of, objection)
        self._begin(manifest.whole)
        had = len(self._missing)
        transfer = StateTransfer(lead, manifest, self._inquiry, self._targets, self._missing, self.tally)
        self._total_bytes = self._total_bytes or transfer.total_bytes  # counted once, for the call's first round
        try:
            others = [donor for donor in donors if donor != lead]
            transfer.run(others, lambda chunk_bytes: on_chunk(chunk_bytes, self._total_bytes))
        finally:
            self._missing = transfer.missing
            self._goes_on = 0 < len(self._missing) < had
            missing = {chunk.index for chunk in self._missing}
            new = {chunk.index for chunk in manifest.chunks()} - missing - self._came.keys()
            self._came |= dict.fromkeys(new, manifest.whole)

    def _first_of(self, round: int) -> int:
        """Return the number of the first missing chunk if this round is fetched next."""
        is_useful = self._begun is not None and (self._mixes or self._begun.round == round)
        return self._missing[0].index if is_useful and self._missing else 0

    def _begin(self, manifest: StateManifest) -> None:
        """Continue with this round: with its remaining chunks, or, if rounds are mixed, with those missing so far."""
        before, self._begun = self._begun, manifest
        if before is not None and self._missing and before.claim == manifest.claim:
            return
        if before is None or not self._can_mix(before, manifest):
            self._came, self.tally, self._took_s = {}, Tally(), 0.0
        chunks = (chunk for chunk in manifest.chunks() if chunk.index not in self._came)
        self._missing = tuple(sorted(chunks, key=lambda chunk: chunk.index))

    def _can_mix(self, before: StateManifest, manifest: StateManifest) -> bool:
        """Whether earlier chunks can be combined with this newer round's."""
        is_alike = before.chunk_bytes == manifest.chunk_bytes and manifest.chunk_bytes % _VALUE_BYTES == 0
        return self._mixes and bool(self._missing) and is_alike and before.round < manifest.round


def _later(came: Mapping[int, StateManifest], oldest: StateManifest) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of values that are of later rounds than the oldest."""
    for manifest, run in groupby(sorted(came), key=lambda index: came[index]):
        indices, length = list(run), max(manifest.lengths.values()) // _VALUE_BYTES
        if manifest is not oldest:
            values = manifest.chunk_bytes // _VALUE_BYTES
            yield indices[0] * values, min((indices[-1] + 1) * values, length), manifest.round


def fetch_entry(
    donors: Sequence[Donor],
    dialler: Dialler,
    round: int,
    allocate: Callable[[int], Tensor],
    *,
    on_chunk: Callable[[int, int], None] = noop,
    limits: FetchLimits = LIMITS,
    tally: Tally | None = None,
) -> RoundUpdate:
    """Fetch a committed round's journal entry, as claimed by the first donor that serves it.

    `allocate`: allocates (nbytes,) uint8 on CPU, partially written on failure, or raises RecoveryFailed for an
    impossible size. Raises RecoveryFailed when no donor is left.
    """
    inquiry = Inquiry("journal", dialler, None, limits)
    lead, manifest = inquiry.lead_of(donors, round, objection=_objection_to_update)
    others = [donor for donor in donors if donor != lead]
    return _fetch_update(inquiry, lead, others, manifest, allocate, on_chunk, Tally() if tally is None else tally)


def fetch_offer(
    donor: Donor, dialler: Dialler, known: str, allocate: Callable[[int], Tensor], *, limits: FetchLimits = LIMITS
) -> RoundUpdate | None:
    """Fetch the contribution of a member with a slow link; None if it is still the `known` one.

    `allocate`: as for `fetch_entry`. Raises RecoveryFailed.
    """
    inquiry = Inquiry("offer", dialler, None, limits)
    _, manifest = inquiry.lead_of([donor], None, objection=_objection_to_update)
    if manifest.state_digest == known:
        return None
    return _fetch_update(inquiry, donor, [], manifest, allocate, noop, Tally())


def _fetch_update(
    inquiry: Inquiry,
    lead: Donor,
    others: Sequence[Donor],
    manifest: StateManifest,
    allocate: Callable[[int], Tensor],
    on_chunk: Callable[[int, int], None],
    tally: Tally,
) -> RoundUpdate:
    """Fetch a manifest's chunks from the donor that made it, and from others with the same claim."""
    update = allocate(manifest.lengths[_UPDATE])
    targets, chunks = {_UPDATE: bytes_of(update)}, tuple(manifest.chunks())
    transfer = StateTransfer(lead, manifest, inquiry, targets, chunks, tally)
    transfer.run(others, lambda chunk_bytes: on_chunk(chunk_bytes, transfer.total_bytes))
    return RoundUpdate(manifest.round, update, manifest.record, manifest.state_digest)


def _objection_to_update(manifest: StateManifest) -> str:
    if set(manifest.lengths) == {_UPDATE}:
        return ""
    return f"the journal of round {manifest.round} has sections {dict(manifest.lengths)!r:.100}"


class RecoveryClient:
    """Fetches a state, and the rounds after it, from the members currently in the store.

    Each attempt is led by a different member while there are others, so a liar cannot keep a joiner out. `on_event`:
    receives events, by kind and fields.
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
        self._new_fetch: Callable[[], StateFetch] | None = None
        self._state: StateFetch | None = None
        self._updates = Tally()
        self._led = Counter[str]()
        """Failed attempts led by each member."""
        self.verified_bytes = 0
        """Verified bytes of the state; reset if it turns out not to match the donors' claim."""

    def begin(self, sections: tuple[str, ...], *, mixes: bool = False) -> None:
        """Start a new fetch into the section buffers, forgetting any earlier one. `mixes`: as in `StateFetch`."""
        targets, objection = {name: self._buffers[name] for name in sections}, self._objection
        self._new_fetch = lambda: StateFetch(self._dialler, targets, mixes=mixes, objection=objection)
        self._state = self._new_fetch()

    def fetch_restart(self, sections: tuple[str, ...], agreed: RestartPoint) -> FetchedState:
        """Fetch the state that the run is about to restart from, from the node that proposed it.

        Raises RecoveryFailed if that node has not loaded it yet, or is gone.
        """

        def objection(round: int, state_digest: str) -> str:
            if state_digest == agreed.state_digest:
                return ""
            return f"it has not loaded the state {agreed.state_digest} yet: {state_digest or 'the initial one'}"

        targets, peers = {name: self._buffers[name] for name in sections}, self._store.view(BOOTSTRAP_ROUND).peers
        donors = [_donor(agreed.member, peers)] if agreed.member in peers else []
        return StateFetch(self._dialler, targets, objection=objection).fetch(donors, self._counting(0))

    def fetch_state(self) -> FetchedState:
        """Fetch a committed state, resuming where the last call stopped. Raises RecoveryFailed, RunOver."""
        assert self._state is not None, "begin comes first"
        self._end_attempt()
        return self._state.fetch(self._donors(), self._counting(self.verified_bytes))

    @property
    def leads(self) -> set[str]:
        """Members that led this attempt."""
        return self._updates.leads | (set[str]() if self._state is None else self._state.tally.leads)

    def _end_attempt(self) -> None:
        """Count this attempt's leads, so that others lead the next one."""
        self._led.update(self.leads)
        self._updates = Tally()

    def _counting(self, had_bytes: int) -> Callable[[int, int], None]:
        """Return a callback that counts chunks of a state. `had_bytes`: verified by earlier calls."""
        progress = FetchProgress(self._flags, self._faults, self._on_event, had_bytes)

        def count(chunk_bytes: int, total_bytes: int) -> None:
            self.verified_bytes += chunk_bytes
            progress.count(chunk_bytes, total_bytes)

        return count

    def distrust_state(self) -> None:
        """Discard a state that does not match its donors' claim."""
        assert self._new_fetch is not None, "begin comes first"
        self._end_attempt()
        self._state = self._new_fetch()
        self.verified_bytes = 0

    def judge(self, round: int, state_digest: str) -> None:
        """Compare this node's state with the one that the newest verdict was built on.

        Raises RecoveryFailed on a mismatch, and discards the state. Local rank 0.
        """
        committed = self._store.view(BOOTSTRAP_ROUND).committed
        if committed is not None and (why := _contradiction(committed, round, state_digest)):
            if self._new_fetch is not None:
                self.distrust_state()
            raise RecoveryFailed(f"the state of this node is not the run's: {why}")

    def _objection(self, round: int, state_digest: str) -> str:
        """Return why a donor's claim is not credible; empty: it is."""
        committed = self._store.view(BOOTSTRAP_ROUND).committed
        if committed is not None and round > committed.round:
            return f"round {round} is not committed, the newest one is {committed.round}"
        return "" if committed is None else _contradiction(committed, round, state_digest)

    def entry_bytes(self, round: int) -> int:
        """Return the size of a round's journal entry. Raises RecoveryFailed if no journal has it; RunOver."""
        return Inquiry("journal", self._dialler, None).lead_of(self._donors(), round)[1].total_bytes

    def fetch_entry(self, round: int, allocate: Callable[[int], Tensor]) -> RoundUpdate:
        """Fetch a round's journal entry, like the function of this name. Raises RecoveryFailed, RunOver."""
        count = FetchProgress(self._flags, self._faults).count
        return fetch_entry(
            self._donors(self.leads), self._dialler, round, allocate, on_chunk=count, tally=self._updates
        )

    def fetch_offer(self, member: str, known: str, allocate: Callable[[int], Tensor]) -> RoundUpdate | None:
        """Fetch a member's contribution, like the function of this name. Any thread. Raises RecoveryFailed."""
        peers = self._store.view(BOOTSTRAP_ROUND).peers
        if member not in peers:
            raise no_donor({})
        return fetch_offer(_donor(member, peers), self._dialler, known, allocate)

    def fetch_ahead(self, round: int, allocate: Callable[[int], Tensor]) -> RoundUpdate:
        """Fetch like `fetch_entry`, in any thread during training, without progress reports."""
        return fetch_entry(self._donors(), self._dialler, round, allocate)

    def _donors(self, leads: Collection[str] = ()) -> list[Donor]:
        """Return the members that serve their state, in random order, to spread joiners over them.

        `leads` come first, relayed ones late, and those that led failed attempts last. Raises RecoveryFailed if there
        are none, RunOver.
        """
        view = self._store.view(BOOTSTRAP_ROUND)
        if view.committed is None:
            raise no_donor_in(view)
        alive = [m for m in view.committed.members if m in view.alive and m in view.peers]
        if not alive and Progress.from_record(view.committed.record["progress"]).is_complete:
            raise RunOver(f"the run is complete since round {view.committed.round}; start another with a new run.id")
        donors = [_donor(member, view.peers) for member in alive if view.peers[member].serves_state]
        if not donors:
            raise no_donor_in(view)
        random.shuffle(donors)
        return sorted(donors, key=lambda d: (self._led[d.member_id], d.member_id not in leads, bool(d.relays)))


def _contradiction(committed: Verdict, round: int, state_digest: str) -> str:
    """Describe how the newest verdict contradicts a state; empty: it does not, or is of another round."""
    built_on = committed.record.get("state_before")
    if round + 1 != committed.round or not built_on or built_on == state_digest:
        return ""
    return f"round {round} has digest {state_digest}, and round {committed.round} was built on {built_on}"


def _donor(member: str, peers: Mapping[str, Peer]) -> Donor:
    return Donor(member, peers[member].host, peers[member].port, relay_routes(member, peers))


def no_donor_in(view: View) -> RecoveryFailed:
    """Return the error that explains why no member serves its state."""
    agreed, newest = pending_restart(view), view.committed or view.plan
    living = [m for m in (view.alive if newest is None else newest.members) if m in view.alive]
    names = ", ".join(sorted(map(node_id_of_member, living)))
    if agreed is not None and agreed.member in view.alive:
        why = f"{node_id_of_member(agreed.member)} is still loading the checkpoint of step {agreed.step}"
    elif not living:
        why = "no member is alive"
    elif view.committed is None:
        why = f"the first state is not committed yet; alive: {names}"
    else:
        why = f"these members serve none yet: {names}"
    return RecoveryFailed(f"no state to join with yet: {why}")


class FetchProgress:
    """Reports a fetch's progress: to the guardian with each chunk, to log and events each second.

    `on_event`: records the fetch of a state; None: an update's is not recorded. `had_bytes`: verified by earlier calls.
    """

    def __init__(
        self,
        flags: SharedFlags,
        faults: FaultPoints,
        on_event: Callable[..., object] | None = None,
        had_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flags = flags
        self._faults = faults
        self._on_event = on_event
        self._had_bytes, self._done_bytes = had_bytes, 0
        self._clock = clock
        self._began_at_s = self._said_at_s = clock()

    def count(self, chunk_bytes: int, total_bytes: int) -> None:
        """Count a verified chunk; `total_bytes`: to be fetched by this call."""
        self._flags.advance()
        if self._done_bytes == 0:
            self._record(total_bytes, None)
        self._done_bytes += chunk_bytes
        if 2 * self._done_bytes >= total_bytes:
            self._faults.at("joining", 0)
        now_s = self._clock()
        is_due, rate = now_s - self._said_at_s >= _SAY_S, self._done_bytes / max(now_s - self._began_at_s, 1e-6)
        if is_due or self._done_bytes >= total_bytes:
            self._record(total_bytes, rate)
        if is_due:
            self._said_at_s = now_s
            eta_s = (total_bytes - self._done_bytes) / rate
            fields = {"done": self._done_bytes / total_bytes, "bytes_per_s": rate, "eta_s": eta_s}
            _log.info("fetching from the others", extra={"fields": fields})

    def _record(self, total_bytes: int, rate: float | None) -> None:
        if self._on_event is not None:
            done, of_bytes = self._had_bytes + self._done_bytes, self._had_bytes + total_bytes
            bytes_per_s = None if rate is None else round(rate)
            self._on_event("join_progress", bytes=done, of_bytes=of_bytes, bytes_per_s=bytes_per_s)
