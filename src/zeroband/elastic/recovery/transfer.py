"""Fetches the chunks of one state or update from several donors at once. Owns the threads.

One donor leads: its manifest defines what is fetched, and every chunk is verified against its hashes before it is
written. Other donors send chunks if they make the same claim, and replace the lead if it fails. A donor that sends a
wrong chunk is dropped; one that disconnects is retried for a while. The target is not written to after
`StateTransfer.run` returns.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from statistics import median

from zeroband.elastic.recovery.donors import DONOR_ERRORS, Donor, DonorConnection, Inquiry, no_donor, reason_of
from zeroband.elastic.recovery.state_chunks import Chunk, StateManifest, chunk_hash
from zeroband.errors import RecoveryFailed
from zeroband.observe.log import get_logger

_STRAGGLER_FACTOR = 2.0
_MEASURED_CHUNKS = 64
_IDLE_POLL_S = 0.1
_STOP_S = 2.0

_log = get_logger(__name__)


class ChunkQueue:
    """Queue of missing chunks and chunks in flight. Not thread-safe.

    Hands out each chunk once; at the end, slow chunks are requested again from another donor.
    """

    def __init__(self, chunks: Iterable[Chunk], *, straggler_s: float) -> None:
        self._waiting = deque(chunks)
        self._flights: dict[Chunk, dict[str, float]] = {}
        """Chunks in flight: start time by donor."""
        self._took_s: deque[float] = deque(maxlen=_MEASURED_CHUNKS)
        self._straggler_s = straggler_s

    @property
    def missing(self) -> tuple[Chunk, ...]:
        """Unfinished chunks."""
        return (*self._flights, *self._waiting)

    @property
    def waiting(self) -> int:
        """Number of chunks not in flight."""
        return len(self._waiting)

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._flights

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Add missing chunks."""
        self._waiting.extend(chunks)

    def take(self, donor: str, now_s: float) -> Chunk | None:
        """Return the next chunk for a donor; None: nothing for it now."""
        chunk = self._waiting.popleft() if self._waiting else self._straggler(donor, now_s)
        if chunk is not None:
            self._flights.setdefault(chunk, {})[donor] = now_s
        return chunk

    def _straggler(self, donor: str, now_s: float) -> Chunk | None:
        """Return the chunk that has been in flight longest, at other donors only, if that is too long."""
        others = [(max(flights.values()), chunk) for chunk, flights in self._flights.items() if donor not in flights]
        if not others:
            return None
        started_at_s, chunk = min(others)
        usual_s = median(self._took_s) if self._took_s else 0.0
        return chunk if now_s - started_at_s > max(self._straggler_s, _STRAGGLER_FACTOR * usual_s) else None

    def finish(self, donor: str, chunk: Chunk, now_s: float) -> bool:
        """Record a verified chunk; False: another donor's copy arrived before."""
        flights = self._flights.pop(chunk, None)
        if flights is None:
            return False
        self._took_s.append(now_s - flights[donor])
        return True

    def give_back(self, donor: str, chunk: Chunk) -> None:
        """Requeue a chunk that a donor failed to send, unless another donor did or is sending it."""
        flights = self._flights.get(chunk, {})
        flights.pop(donor, None)
        if chunk in self._flights and not flights:
            del self._flights[chunk]
            self._waiting.appendleft(chunk)


@dataclass
class Tally:
    """Statistics of a fetch."""

    received_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Verified bytes from each member, including duplicate chunks."""
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    """Dropped members, with the reason."""
    leads: set[str] = field(default_factory=set[str])
    """Members whose hashes were used."""

    def count(self, donor: Donor, sent_bytes: int) -> None:
        self.received_bytes[donor.member_id] = self.received_bytes.get(donor.member_id, 0) + sent_bytes


@dataclass(eq=False)
class _Source:
    """A donor in use."""

    donor: Donor
    connections: list[DonorConnection]
    living: int
    is_asked: bool = False
    is_known: bool = False
    """Whether it confirmed the lead's claim."""
    is_elsewhere: bool = False
    """It no longer holds this round, which is no fault."""
    why: str = ""
    """Reason to stop using it; empty: in use."""

    def drop(self, why: str) -> None:
        self.why = self.why or why
        for connection in self.connections:
            connection.abort()


class StateTransfer:
    """One fetch of chunks. Call `run` from one thread, in which it also calls `on_chunk`.

    `lead`: donor of `manifest`, which lists the hashes of the first `missing` chunks. Chunks are fetched in order, and
    further hashes meanwhile, one stretch at a time.
    """

    def __init__(
        self,
        lead: Donor,
        manifest: StateManifest,
        inquiry: Inquiry,
        targets: Mapping[str, memoryview],
        missing: Sequence[Chunk],
        tally: Tally,
    ) -> None:
        self._manifest = manifest
        self._inquiry = inquiry
        self._targets = targets
        self._tally = tally
        self.missing = tuple(missing)
        """Chunks still missing after `run`."""
        self._done: set[Chunk] = set()
        self._hashes: dict[Chunk, str] = {}
        self._unlisted: Sequence[Chunk] = self.missing
        """Chunks whose hashes are not yet known."""
        self._chunks = ChunkQueue((), straggler_s=inquiry.limits.straggler_s)
        self._lister: DonorConnection | None = None
        """Connection that is requesting the next hashes."""
        self.total_bytes = sum(len(manifest.part(chunk, targets[chunk.section])) for chunk in self.missing)
        self._changed = threading.Condition()
        """Guards the chunk queue, the sources and the targets."""
        self._is_over = False
        self._events: queue.SimpleQueue[int | tuple[_Source, str]] = queue.SimpleQueue()
        """Bytes of each new chunk; or a source whose connection ended, with the reason."""
        self._sources: dict[Donor, _Source] = {}
        self._threads: list[threading.Thread] = []
        self._problems: dict[str, str] = {}
        self._lead = self._source_of(lead)
        self._lead.is_asked = self._lead.is_known = True
        self._take_hashes(self._lead, manifest)

    def run(self, others: Sequence[Donor], on_chunk: Callable[[int], None]) -> None:
        """Fetch the missing chunks. Raises RecoveryFailed when no donor is left.

        `others`: used, a few at a time, if they make the lead's claim. `on_chunk` gets the bytes of each verified
        chunk.
        """
        waiting = list(others)
        try:
            self._start(self._lead)
            while not self._is_complete():
                while waiting and len(self._sources) < self._inquiry.limits.donors_at_once:
                    self._start(self._source_of(waiting.pop(0)))
                if not self._sources:
                    raise no_donor(self._problems)
                self._note(self._events.get(), on_chunk)
            while not self._events.empty():
                self._note(self._events.get(), on_chunk)
        finally:
            self._stop()

    def _is_complete(self) -> bool:
        with self._changed:
            return self._is_fetched

    @property
    def _is_fetched(self) -> bool:
        return self._chunks.is_done and not self._unlisted

    def _note(self, event: int | tuple[_Source, str], on_chunk: Callable[[int], None]) -> None:
        if isinstance(event, int):
            on_chunk(event)
            return
        source, why = event
        source.living -= 1
        if source.living > 0:
            return
        with self._changed:
            del self._sources[source.donor]
            self._changed.notify_all()  # another donor may become the lead
        self._problems[str(source.donor)] = why = source.why or why
        if why and not source.is_elsewhere:
            self._tally.dropped[source.donor.member_id] = why
            fields = {"donor": str(source.donor), "round": self._manifest.round, "why": why}
            _log.warning("donor dropped", extra={"fields": fields})

    def _source_of(self, donor: Donor) -> _Source:
        connections = [self._inquiry.connect(donor) for _ in range(self._inquiry.limits.connections)]
        return _Source(donor, connections, len(connections))

    def _start(self, source: _Source) -> None:
        with self._changed:
            self._sources[source.donor] = source
        for connection in source.connections:
            target: Callable[[], None] = lambda connection=connection: self._serve(source, connection)  # noqa: E731
            thread = threading.Thread(target=target, name="recovery", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _stop(self) -> None:
        """Stop writing chunks, and abort connections; threads that miss the deadline exit later without effect."""
        with self._changed:
            self._is_over = True
            self.missing = tuple(chunk for chunk in self.missing if chunk not in self._done)
            self._changed.notify_all()
        for source in self._sources.values():
            source.drop("the fetch is over")
        deadline_s = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # -- in the threads, one for each connection --

    def _serve(self, source: _Source, connection: DonorConnection) -> None:
        why = "its connection ended"
        try:
            why = self._work(source, connection)
        finally:
            connection.close()
            self._end_list(connection)
            self._events.put((source, why))

    def _work(self, source: _Source, connection: DonorConnection) -> str:
        """Fetch until nothing is left, or until the returned reason to drop the connection."""
        limits, failures = self._inquiry.limits, 0
        buffer = memoryview(bytearray(min(self._manifest.chunk_bytes, max(self._manifest.lengths.values(), default=0))))
        while (task := self._take(source, connection)) is not None:
            if isinstance(task, int):
                why, is_final = self._list(source, connection, task)
            else:
                why, is_final = self._fetch(source, connection, task, buffer)
            failures = failures + 1 if why else 0
            if is_final and source.is_elsewhere:
                source.why = source.why or why  # its other connections may still complete chunks of this round
            elif is_final:
                source.drop(why)
            if is_final or failures > limits.retries:
                return why
            if why:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over, limits.backoff_s * 2 ** (failures - 1))
        return ""

    def _take(self, source: _Source, connection: DonorConnection) -> Chunk | int | None:
        """Return the next chunk, or the number of the first chunk to request hashes for; None: done.

        Waits while other connections fetch the last chunks, since one of them may fail.
        """
        with self._changed:
            while not (self._is_over or source.why or self._is_fetched):
                if not source.is_asked:
                    source.is_asked = True
                    return self._manifest.first
                if source.is_known and self._leads(source) and self._is_list_due():
                    self._lister = connection
                    return self._unlisted[0].index
                chunk = self._chunks.take(source.donor.member_id, time.monotonic()) if source.is_known else None
                if chunk is not None:
                    return chunk
                self._changed.wait(_IDLE_POLL_S)
        return None

    def _leads(self, source: _Source) -> bool:
        """Whether this source is the lead: the first usable one with the claim."""
        return source is next((one for one in self._sources.values() if one.is_known and not one.why), None)

    def _is_list_due(self) -> bool:
        """Whether to request further hashes, before the known ones run out."""
        is_low = 2 * self._chunks.waiting <= len(self._manifest.listed())
        return is_low and bool(self._unlisted) and self._lister is None

    def _take_hashes(self, source: _Source, manifest: StateManifest) -> None:
        listed = manifest.listed()
        new = {chunk: listed[chunk] for chunk in self._unlisted if chunk in listed}
        self._hashes |= new
        self._chunks.add(new)
        if new:
            self._unlisted = tuple(chunk for chunk in self._unlisted if chunk not in new)
            self._tally.leads.add(source.donor.member_id)

    def _list(self, source: _Source, connection: DonorConnection, first: int) -> tuple[str, bool]:
        """Request a manifest: to check a new donor's claim, or further hashes from the lead. Returns like `_fetch`."""
        why, is_final = "", True
        try:
            manifest = self._inquiry.manifest_of(connection, self._manifest.round, first)
            if manifest is None:
                source.is_elsewhere = True
                why = self._inquiry.none_at(self._manifest.round, first)
            elif source.is_known:
                why = self._manifest.whole.difference(manifest.whole)
            else:
                why = self._manifest.difference(manifest)
        except DONOR_ERRORS as error:
            manifest, why, is_final = None, reason_of(error), False
        except RecoveryFailed as error:
            manifest, why = None, str(error)
        with self._changed:
            if manifest is not None and not why and source.is_known:
                self._take_hashes(source, manifest)
            source.is_known = source.is_asked = source.is_known or not why
            self._end_list(connection)
        return why, is_final and bool(why)

    def _end_list(self, connection: DonorConnection) -> None:
        with self._changed:
            self._lister = None if self._lister is connection else self._lister
            self._changed.notify_all()

    def _fetch(
        self, source: _Source, connection: DonorConnection, chunk: Chunk, buffer: memoryview
    ) -> tuple[str, bool]:
        """Fetch and verify one chunk. On failure requeue it, and return the reason and whether to give up the donor."""
        donor, target = source.donor, self._manifest.part(chunk, self._targets[chunk.section])
        path, data = f"{self._inquiry.path(self._manifest.round)}/{chunk.section}/{chunk.index}", buffer[: len(target)]
        why, is_final = "", False
        try:
            status = connection.read_into(path, data)
            if status != HTTPStatus.OK:
                why, is_final = f"{path} answered {status}", status == HTTPStatus.NOT_FOUND
                source.is_elsewhere = source.is_elsewhere or is_final
        except DONOR_ERRORS as error:
            why = f"{path}: {reason_of(error)}"
        except RecoveryFailed as error:
            why, is_final = str(error), True
        if not why and chunk_hash(data) != self._hashes[chunk]:
            why, is_final = f"{path} does not match its hash", True
        with self._changed:
            if why:
                self._chunks.give_back(donor.member_id, chunk)
            elif not self._is_over:
                is_new = self._chunks.finish(donor.member_id, chunk, time.monotonic())
                self._tally.count(donor, len(data))
                if is_new:
                    target[:] = data
                    self._done.add(chunk)
                    self._events.put(len(data))
            self._changed.notify_all()
        return why, is_final
