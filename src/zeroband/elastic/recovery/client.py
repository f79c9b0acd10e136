"""A joiner's side of live recovery: fetches a committed state, and the rounds committed meanwhile, from the members.

One donor's manifest is believed, and every chunk held against it, whichever donor sends it. Whether that donor told the
truth shows at the boundary: the sealed record of a verdict says on which state the members built. Raises RecoveryFailed
when no donor is left. Local rank 0 only.
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
from zeroband.elastic.transport.sealed import Dialler
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
"""A call ends when its donors went on so often in a row before they had sent anything whole."""

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class FetchedState(RoundState):
    """What a fetch brought into the sections. Its digest is what the donors claim; the caller compares its own."""

    received_bytes: Mapping[str, int]
    """Verified bytes by member, also of calls that failed before. More in sum than the state only where two donors
    sent a late chunk."""
    dropped: Mapping[str, str]
    """Members that were dropped, and why."""
    took_s: float
    """In all calls that this state needed."""
    later: Sequence[tuple[int, int, int]] = ()
    """Values [start, stop) of all sections that are of a later round than `round`, and that round; ascending."""


class StateFetch:
    """A joiner's fetch of the outer state, kept over failures.

    `sections`: (n,) float32 on CPU each, written chunk by chunk. `mixes`: where the donors go on to another round, so
    does the fetch, and what it has got before is replayed up to that later. `objection`: why a round and its digest are
    not to be believed of a donor; empty where they are.
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
        """Chunks of what was begun, in the order in which they are fetched."""
        self._came: dict[int, StateManifest] = {}
        """Numbers of the chunks that are there of all sections, and of which round's manifest they are."""
        self._goes_on = False
        """With what was begun, rather than ask for the newest state."""
        self._total_bytes = 0
        """What this call has to fetch."""
        self.tally = Tally()
        self._took_s = 0.0

    def fetch(self, donors: Sequence[Donor], on_chunk: Callable[[int, int], None] = noop) -> FetchedState:
        """Fetch the newest committed state into the sections, or go on with the one that was begun.

        Donors are used in their order, a few at a time; the first that serves leads. `on_chunk` gets (bytes of a
        verified chunk, bytes that this call has to fetch) in this thread. Raises RecoveryFailed when no donor is left;
        another call then goes on where this one ended. After one that got nothing, the donors are asked anew for their
        newest state.
        """
        started_at_s = time.monotonic()
        try:
            self._fetch(donors, on_chunk)
        finally:
            self._took_s += time.monotonic() - started_at_s
        assert self._begun is not None, "a fetch that ends well has begun"
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
        """Fetch what one round's donors have of what is missing."""
        begun, self._goes_on = self._begun if self._goes_on else None, False

        def objection(manifest: StateManifest) -> str:
            if begun is not None and manifest.whole.claim != begun.claim:
                return f"round {manifest.round} is another one now: {begun.difference(manifest.whole)}"
            return self._objection(manifest.round, manifest.state_digest)

        round = None if begun is None else begun.round
        lead, manifest = self._inquiry.lead_of(donors, round, self._first_of, objection)
        self._begin(manifest.whole)
        had = len(self._missing)
        transfer = StateTransfer(lead, manifest, self._inquiry, self._targets, self._missing, self.tally)
        self._total_bytes = self._total_bytes or transfer.total_bytes  # of the first round, which all of this call is
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
        """Number of the first chunk that is missing, if a round is fetched next."""
        is_useful = self._begun is not None and (self._mixes or self._begun.round == round)
        return self._missing[0].index if is_useful and self._missing else 0

    def _begin(self, manifest: StateManifest) -> None:
        """Go on with this round: with the rest of it, or with what earlier ones lack where rounds are mixed."""
        before, self._begun = self._begun, manifest
        if before is not None and self._missing and before.claim == manifest.claim:
            return
        if before is None or not self._can_mix(before, manifest):
            self._came, self.tally, self._took_s = {}, Tally(), 0.0
        chunks = (chunk for chunk in manifest.chunks() if chunk.index not in self._came)
        self._missing = tuple(sorted(chunks, key=lambda chunk: chunk.index))

    def _can_mix(self, before: StateManifest, manifest: StateManifest) -> bool:
        """Whether what came before is of use with a newer round's."""
        is_alike = before.chunk_bytes == manifest.chunk_bytes and manifest.chunk_bytes % _VALUE_BYTES == 0
        return self._mixes and bool(self._missing) and is_alike and before.round < manifest.round


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
    limits: FetchLimits = LIMITS,
    tally: Tally | None = None,
) -> RoundUpdate:
    """Fetch what a committed round did, as the first donor claims that serves it.

    `room`: gives (nbytes,) uint8 on CPU for an update of this size, half written where this fails, or raises
    RecoveryFailed where no update has this size. Raises RecoveryFailed when no donor is left.
    """
    inquiry = Inquiry("journal", dialler, None, limits)
    lead, manifest = inquiry.lead_of(donors, round, objection=_objection_to_update)
    others = [donor for donor in donors if donor != lead]
    return _fetch_update(inquiry, lead, others, manifest, room, on_chunk, Tally() if tally is None else tally)


def fetch_offer(
    donor: Donor, dialler: Dialler, known: str, room: Callable[[int], Tensor], *, limits: FetchLimits = LIMITS
) -> RoundUpdate | None:
    """Fetch what a member with a slow link contributes; None where that is still what is `known`.

    `room`: as for `fetch_entry`. Raises RecoveryFailed.
    """
    inquiry = Inquiry("offer", dialler, None, limits)
    _, manifest = inquiry.lead_of([donor], None, objection=_objection_to_update)
    if manifest.state_digest == known:
        return None
    return _fetch_update(inquiry, donor, [], manifest, room, noop, Tally())


def _fetch_update(
    inquiry: Inquiry,
    lead: Donor,
    others: Sequence[Donor],
    manifest: StateManifest,
    room: Callable[[int], Tensor],
    on_chunk: Callable[[int, int], None],
    tally: Tally,
) -> RoundUpdate:
    """Fetch what a manifest lists, from the donor that made it and from others that say the same."""
    update = room(manifest.lengths[_UPDATE])
    targets, chunks = {_UPDATE: bytes_of(update)}, tuple(manifest.chunks())
    transfer = StateTransfer(lead, manifest, inquiry, targets, chunks, tally)
    transfer.run(others, lambda chunk_bytes: on_chunk(chunk_bytes, transfer.total_bytes))
    return RoundUpdate(manifest.round, update, manifest.record, manifest.state_digest)


def _objection_to_update(manifest: StateManifest) -> str:
    if set(manifest.lengths) == {_UPDATE}:
        return ""
    return f"the journal of round {manifest.round} has sections {dict(manifest.lengths)!r:.100}"


class RecoveryClient:
    """Fetches from the members that the store shows at that moment: a state, and the rounds that came after it.

    Each attempt is led by other members than the one before, as long as there are others: one that lies cannot keep a
    joiner out. `on_event`: told of events, by kind and fields.
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
        """In how many attempts that came to nothing a member led."""
        self.verified_bytes = 0
        """Count of the states that were begun; 0 again after one that was not what its donors said."""

    def begin(self, sections: tuple[str, ...], *, mixes: bool = False) -> None:
        """A state is to be fetched into the section buffers: forget what an earlier fetch had got.

        `mixes`: as `StateFetch` says.
        """
        targets, objection = {name: self._buffers[name] for name in sections}, self._objection
        self._new_fetch = lambda: StateFetch(self._dialler, targets, mixes=mixes, objection=objection)
        self._state = self._new_fetch()

    def fetch_restart(self, sections: tuple[str, ...], agreed: RestartPoint) -> FetchedState:
        """Fetch the state that the run is about to begin again on, from the node that named it.

        Raises RecoveryFailed where that has not taken it over yet, or is gone.
        """

        def objection(round: int, state_digest: str) -> str:
            if state_digest == agreed.state_digest:
                return ""
            return f"it has not taken over the state {agreed.state_digest}: {state_digest or 'the initial one'}"

        targets, peers = {name: self._buffers[name] for name in sections}, self._store.view(BOOTSTRAP_ROUND).peers
        donors = [_donor(agreed.member, peers)] if agreed.member in peers else []
        return StateFetch(self._dialler, targets, objection=objection).fetch(donors, self._counting(0))

    def fetch_state(self) -> FetchedState:
        """Fetch a committed state, going on where the last call stopped. Raises RecoveryFailed, RunOver."""
        assert self._state is not None, "begin comes first"
        self._end_attempt()
        return self._state.fetch(self._donors(), self._counting(self.verified_bytes))

    @property
    def leads(self) -> set[str]:
        """Members that were believed in this attempt."""
        return self._updates.leads | (set[str]() if self._state is None else self._state.tally.leads)

    def _end_attempt(self) -> None:
        """Count who led it; the next one is led by others."""
        self._led.update(self.leads)
        self._updates = Tally()

    def _counting(self, had_bytes: int) -> Callable[[int, int], None]:
        """What takes note of every chunk of a state. `had_bytes`: those that were verified before."""
        progress = FetchProgress(self._flags, self._faults, self._on_event, had_bytes)

        def count(chunk_bytes: int, total_bytes: int) -> None:
            self.verified_bytes += chunk_bytes
            progress.count(chunk_bytes, total_bytes)

        return count

    def distrust_state(self) -> None:
        """The state that came is not what its donors said: forget it."""
        assert self._new_fetch is not None, "begin comes first"
        self._end_attempt()
        self._state = self._new_fetch()
        self.verified_bytes = 0

    def judge(self, round: int, state_digest: str) -> None:
        """Hold this node's state against the newest verdict, whose record says on which state its members built.

        Raises RecoveryFailed where that was another one: then the state is forgotten. Local rank 0.
        """
        committed = self._store.view(BOOTSTRAP_ROUND).committed
        if committed is not None and (why := _contradiction(committed, round, state_digest)):
            if self._new_fetch is not None:
                self.distrust_state()
            raise RecoveryFailed(f"the state of this node is not the run's: {why}")

    def _objection(self, round: int, state_digest: str) -> str:
        """Why this state is not to be believed of a donor."""
        committed = self._store.view(BOOTSTRAP_ROUND).committed
        if committed is not None and round > committed.round:
            return f"round {round} is not committed, the newest one is {committed.round}"
        return "" if committed is None else _contradiction(committed, round, state_digest)

    def entry_bytes(self, round: int) -> int:
        """Size of what a round did. Raises RecoveryFailed where no journal has it; RunOver."""
        return Inquiry("journal", self._dialler, None).lead_of(self._donors(), round)[1].total_bytes

    def fetch_entry(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        """Fetch what a round did. `room`: as the function of this name says. Raises RecoveryFailed, RunOver."""
        count = FetchProgress(self._flags, self._faults).count
        return fetch_entry(self._donors(self.leads), self._dialler, round, room, on_chunk=count, tally=self._updates)

    def fetch_offer(self, member: str, known: str, room: Callable[[int], Tensor]) -> RoundUpdate | None:
        """Fetch what a member contributes, as the function of this name does. Any thread. Raises RecoveryFailed."""
        peers = self._store.view(BOOTSTRAP_ROUND).peers
        if member not in peers:
            raise no_donor({})
        return fetch_offer(_donor(member, peers), self._dialler, known, room)

    def fetch_ahead(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        """As `fetch_entry`, in any thread, during training: its pace is not shown."""
        return fetch_entry(self._donors(), self._dialler, round, room)

    def _donors(self, leads: Collection[str] = ()) -> list[Donor]:
        """The members that serve their state, in random order, so that joiners spread over them.

        Those that led an attempt in vain come last; before them those that are called through others. `leads`: come
        first. Raises RecoveryFailed where there is none, RunOver.
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
    """How the newest verdict contradicts a state; empty where it does not, or knows nothing of it."""
    built_on = committed.record.get("state_before")
    if round + 1 != committed.round or not built_on or built_on == state_digest:
        return ""
    return f"round {round} has digest {state_digest}, and round {committed.round} was built on {built_on}"


def _donor(member: str, peers: Mapping[str, Peer]) -> Donor:
    return Donor(member, peers[member].host, peers[member].port, relay_routes(member, peers))


def no_donor_in(view: View) -> RecoveryFailed:
    """The error that says why no member serves its state: all are gone, or the living ones have none yet."""
    agreed, newest = pending_restart(view), view.committed or view.plan
    living = [m for m in (view.alive if newest is None else newest.members) if m in view.alive]
    names = ", ".join(sorted(map(node_id_of_member, living)))
    if agreed is not None and agreed.member in view.alive:
        why = f"{node_id_of_member(agreed.member)} still takes over the checkpoint of step {agreed.step}"
    elif not living:
        why = "no member is alive"
    elif view.committed is None:
        why = f"the first state is not committed yet; alive: {names}"
    else:
        why = f"these members serve none yet: {names}"
    return RecoveryFailed(f"no state to join with yet: {why}")


class FetchProgress:
    """Shows how far a fetch is: to the guardian with each chunk, in the log and the events each second.

    `on_event`: records the fetch of a state, from its beginning to its end; None: an update's is not recorded.
    `had_bytes`: those that earlier calls verified. `clock`: by which seconds are counted.
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
        """Take note of a verified chunk; `total_bytes`: what is to be fetched, without what was there before."""
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
