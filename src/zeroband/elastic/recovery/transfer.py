"""Fetching the chunks of one state or entry from several donors at once. Owns the threads that do it.

Every chunk is held against its hash before it is written; the hashes of the next chunks are asked for meanwhile. A
donor that sends a wrong one is dropped; one that breaks off is tried again for a while. The target is not written to
once `StateTransfer.run` returned.
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

from zeroband.elastic.recovery.donors import DONOR_ERRORS, Donor, DonorConnection, Inquiry, Refusal, reason_of
from zeroband.elastic.recovery.election import no_donor
from zeroband.elastic.recovery.state_chunks import Chunk, StateManifest, chunk_hash
from zeroband.errors import RecoveryFailed
from zeroband.observe.log import get_logger

STRAGGLER_S = 1.0
"""No chunk is given to a second donor before it is so long on its way."""

_STRAGGLER_FACTOR = 2.0
_MEASURED_CHUNKS = 64
_IDLE_POLL_S = 0.1
_STOP_S = 2.0

_log = get_logger(__name__)


class ChunkQueue:
    """Which chunks are still missing, and which donor is at which of them. Not locked.

    Hands out each chunk once, and those that take long at the end a second time to another donor.
    """

    def __init__(self, chunks: Iterable[Chunk], *, straggler_s: float = STRAGGLER_S) -> None:
        self._waiting = deque(chunks)
        self._flights: dict[Chunk, dict[str, float]] = {}
        """Chunks on their way: since when, from which donor."""
        self._took_s: deque[float] = deque(maxlen=_MEASURED_CHUNKS)
        self._straggler_s = straggler_s

    @property
    def missing(self) -> tuple[Chunk, ...]:
        """Chunks that are not finished."""
        return (*self._flights, *self._waiting)

    @property
    def waiting(self) -> int:
        """How many chunks are at no donor."""
        return len(self._waiting)

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._flights

    def add(self, chunks: Iterable[Chunk]) -> None:
        """More are missing."""
        self._waiting.extend(chunks)

    def take(self, donor: str, now_s: float) -> Chunk | None:
        """The next chunk for a donor to send; None if there is nothing for it at present."""
        chunk = self._waiting.popleft() if self._waiting else self._straggler(donor, now_s)
        if chunk is not None:
            self._flights.setdefault(chunk, {})[donor] = now_s
        return chunk

    def _straggler(self, donor: str, now_s: float) -> Chunk | None:
        """The chunk that is longest on its way, from other donors only, if that is too long."""
        others = [(max(flights.values()), chunk) for chunk, flights in self._flights.items() if donor not in flights]
        if not others:
            return None
        started_at_s, chunk = min(others)
        usual_s = median(self._took_s) if self._took_s else 0.0
        return chunk if now_s - started_at_s > max(self._straggler_s, _STRAGGLER_FACTOR * usual_s) else None

    def finish(self, donor: str, chunk: Chunk, now_s: float) -> bool:
        """A verified copy arrived; False if another donor's was here before."""
        flights = self._flights.pop(chunk, None)
        if flights is None:
            return False
        self._took_s.append(now_s - flights[donor])
        return True

    def give_back(self, donor: str, chunk: Chunk) -> None:
        """A donor did not send the chunk; nothing happens if another one did."""
        flights = self._flights.get(chunk, {})
        flights.pop(donor, None)
        if chunk in self._flights and not flights:
            del self._flights[chunk]
            self._waiting.appendleft(chunk)


@dataclass
class Tally:
    """What a fetch cost so far."""

    received_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Verified bytes that each member sent, those included that another one had sent before."""
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    """Why a member was dropped."""

    def count(self, donor: Donor, sent_bytes: int) -> None:
        self.received_bytes[donor.member_id] = self.received_bytes.get(donor.member_id, 0) + sent_bytes


@dataclass(frozen=True)
class _Arrived:
    donor: Donor
    sent_bytes: int
    is_new: bool


@dataclass(frozen=True)
class _Ended:
    """A connection ended; without a reason if there was nothing more to fetch."""

    donor: Donor
    why: str


@dataclass(frozen=True)
class _Enlisted:
    donor: Donor
    answer: StateManifest | Refusal


@dataclass(frozen=True)
class _Listed:
    """The hashes of the next chunks; none where nobody has them."""

    hashes: Mapping[Chunk, str]


@dataclass
class _Source:
    """A donor in use."""

    donor: Donor
    connections: list[DonorConnection]
    living: int
    why: str = ""
    """Why it is dropped, if it is."""

    def drop(self, why: str) -> None:
        self.why = self.why or why
        for connection in self.connections:
            connection.abort()


class StateTransfer:
    """One fetch of chunks. `run` is for one thread, which also gets the calls of `on_chunk`.

    `manifest`: lists the hashes of the first of `missing`, which are fetched in their order. `list_from`: what is
    believed of the hashes from a chunk's number on; called in a thread of its own, raises RecoveryFailed.
    """

    def __init__(
        self,
        manifest: StateManifest,
        inquiry: Inquiry,
        targets: Mapping[str, memoryview],
        missing: Sequence[Chunk],
        tally: Tally,
        list_from: Callable[[int], StateManifest],
        *,
        straggler_s: float = STRAGGLER_S,
    ) -> None:
        self._manifest = manifest
        self._inquiry = inquiry
        self._targets = targets
        self._tally = tally
        self._list_from = list_from
        self.missing = tuple(missing)
        """What is not there, when `run` has ended."""
        self._done: set[Chunk] = set()
        self._hashes: dict[Chunk, str] = {}
        self._unlisted: Sequence[Chunk] = self.missing
        """Chunks whose hashes are not known yet."""
        self._chunks = ChunkQueue((), straggler_s=straggler_s)
        self._take_hashes(manifest.listed())
        self._is_listing = False
        self._total_bytes = sum(len(manifest.part(chunk, targets[chunk.section])) for chunk in self.missing)
        self._changed = threading.Condition()
        """Guards the queue of chunks and the targets."""
        self._is_over = threading.Event()
        self._events: queue.SimpleQueue[_Arrived | _Ended | _Enlisted | _Listed] = queue.SimpleQueue()
        self._sources: dict[Donor, _Source] = {}
        self._at_other_round: set[Donor] = set()
        """Those who hold this round no longer, which is nothing to be dropped for."""
        self._asked = 0
        self._threads: list[threading.Thread] = []
        self._problems: dict[str, str] = {}

    def run(
        self,
        supporters: Sequence[Donor],
        spare: Sequence[Donor],
        on_chunk: Callable[[int, int], None],
        *,
        donors_at_once: int,
    ) -> None:
        """Fetch what is missing. Raises RecoveryFailed when no donor is left.

        `supporters` made the manifest's claim; `spare` donors are asked for it when these are too few. `on_chunk` gets
        (bytes of a verified chunk, bytes that were missing at the start).
        """
        waiting = list(spare)
        try:
            for donor in supporters:
                self._start(donor)
            while not self._is_complete():
                self._list_next()
                while waiting and len(self._sources) + self._asked < donors_at_once:
                    self._enlist(waiting.pop(0))
                if not self._sources and not self._asked:
                    raise no_donor(self._problems)
                self._note(self._events.get(), on_chunk)
            self._note_last_arrivals(on_chunk)
        finally:
            self._stop()

    def _is_complete(self) -> bool:
        with self._changed:
            return self._chunks.is_done and not self._unlisted

    def _take_hashes(self, listed: Mapping[Chunk, str]) -> None:
        new = {chunk: listed[chunk] for chunk in self._unlisted if chunk in listed}
        self._hashes |= new
        self._chunks.add(new)
        self._unlisted = tuple(chunk for chunk in self._unlisted if chunk not in new) if new else ()

    def _list_next(self) -> None:
        """Ask for the next hashes, before the fetch comes to the end of those that are known."""
        with self._changed:
            is_low = 2 * self._chunks.waiting <= len(self._manifest.listed())
            is_due = is_low and self._unlisted and not self._is_listing
        if is_due:
            self._is_listing = True
            first = self._unlisted[0].index
            self._spawn(lambda: self._put_hashes(first))

    def _put_hashes(self, first: int) -> None:
        hashes: Mapping[Chunk, str] = {}
        try:
            hashes = self._list_from(first).listed()
        except RecoveryFailed as error:
            fields = {"round": self._manifest.round, "why": str(error)}
            _log.debug("no more hashes of a round", extra={"fields": fields})
        finally:
            self._events.put(_Listed(hashes))

    def _note(self, event: _Arrived | _Ended | _Enlisted | _Listed, on_chunk: Callable[[int, int], None]) -> None:
        match event:
            case _Arrived():
                self._tally.count(event.donor, event.sent_bytes)
                if event.is_new:
                    on_chunk(event.sent_bytes, self._total_bytes)
            case _Ended():
                self._note_end(self._sources[event.donor], event.why)
            case _Enlisted():
                self._asked -= 1
                self._note_answer(event.donor, event.answer)
            case _Listed():
                self._is_listing = False
                with self._changed:
                    self._take_hashes(event.hashes)
                    self._changed.notify_all()

    def _note_answer(self, donor: Donor, answer: StateManifest | Refusal) -> None:
        if isinstance(answer, Refusal):
            self._problems[str(donor)] = answer.why
            if not answer.is_other_round:
                self._drop(donor, answer.why)
        elif answer.claim != self._manifest.claim:
            self._drop(donor, self._manifest.difference(answer))
        else:
            self._start(donor)

    def _note_end(self, source: _Source, why: str) -> None:
        """A donor is dropped with its last connection."""
        source.living -= 1
        if source.living > 0:
            return
        del self._sources[source.donor]
        if source.why or why:
            self._drop(source.donor, source.why or why)

    def _note_last_arrivals(self, on_chunk: Callable[[int, int], None]) -> None:
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, _Arrived):
                self._note(event, on_chunk)

    def _drop(self, donor: Donor, why: str) -> None:
        self._problems[str(donor)] = why
        if donor in self._at_other_round:
            return
        self._tally.dropped[donor.member_id] = why
        fields = {"donor": str(donor), "round": self._manifest.round, "why": why}
        _log.warning("donor dropped", extra={"fields": fields})

    def _enlist(self, donor: Donor) -> None:
        """Ask one more donor whether it makes the same claim."""
        self._asked += 1
        self._spawn(lambda: self._put_answer(donor))

    def _put_answer(self, donor: Donor) -> None:
        answer: StateManifest | Refusal = Refusal("this node failed to ask it")
        try:
            answer = self._inquiry.manifest_of(donor, self._manifest.round, self._manifest.first)
        finally:
            self._events.put(_Enlisted(donor, answer))

    def _start(self, donor: Donor) -> None:
        inquiry = self._inquiry
        connections = [DonorConnection(donor, inquiry.dialler, inquiry.patience) for _ in range(inquiry.connections)]
        source = self._sources[donor] = _Source(donor, connections, len(connections))
        self._tally.count(donor, 0)
        for connection in connections:
            self._threads.append(self._spawn(lambda connection=connection: self._serve(source, connection)))

    def _spawn(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name="recovery", daemon=True)
        thread.start()
        return thread

    def _stop(self) -> None:
        """No chunk is written after this; threads that still wait for a donor end by themselves."""
        with self._changed:
            self._is_over.set()
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
            why = self._fetch_chunks(source, connection)
        finally:
            connection.close()
            self._events.put(_Ended(source.donor, why))

    def _fetch_chunks(self, source: _Source, connection: DonorConnection) -> str:
        """Fetch until nothing is left; the reason to drop the connection, if there was one."""
        patience, failures = self._inquiry.patience, 0
        buffer = memoryview(bytearray(min(self._manifest.chunk_bytes, max(self._manifest.lengths.values(), default=0))))
        while (chunk := self._take(source)) is not None:
            why, is_final = self._fetch(source, connection, chunk, buffer)
            failures = failures + 1 if why else 0
            if is_final and source.donor in self._at_other_round:
                source.why = source.why or why  # what its other connections are at is of this round still
            elif is_final:
                source.drop(why)
            if is_final or failures > patience.retries:
                return why
            if why:
                self._is_over.wait(patience.backoff_s * 2 ** (failures - 1))
        return ""

    def _take(self, source: _Source) -> Chunk | None:
        """The next chunk, waited for while others are at the last ones; None when there is nothing to do any more."""
        with self._changed:
            while not (self._is_over.is_set() or source.why or (self._chunks.is_done and not self._unlisted)):
                chunk = self._chunks.take(source.donor.member_id, time.monotonic())
                if chunk is not None:
                    return chunk
                self._changed.wait(_IDLE_POLL_S)
        return None

    def _fetch(
        self, source: _Source, connection: DonorConnection, chunk: Chunk, buffer: memoryview
    ) -> tuple[str, bool]:
        """Fetch and verify one chunk; otherwise give it back, and say why and whether it is no use to go on."""
        member_id, target = source.donor.member_id, self._manifest.part(chunk, self._targets[chunk.section])
        path, data = f"{self._inquiry.path(self._manifest.round)}/{chunk.section}/{chunk.index}", buffer[: len(target)]
        why, is_final = "", False
        try:
            status = connection.read_into(path, data)
            if status != HTTPStatus.OK:
                why, is_final = f"{path} answered {status}", status == HTTPStatus.NOT_FOUND
                if is_final:
                    self._at_other_round.add(source.donor)
        except DONOR_ERRORS as error:
            why = f"{path}: {reason_of(error)}"
        except RecoveryFailed as error:
            why, is_final = str(error), True
        if not why and chunk_hash(data) != self._hashes[chunk]:
            why, is_final = f"{path} does not match its hash", True
        with self._changed:
            if why:
                self._chunks.give_back(member_id, chunk)
            elif not self._is_over.is_set():
                is_new = self._chunks.finish(member_id, chunk, time.monotonic())
                if is_new:
                    target[:] = data
                    self._done.add(chunk)
                self._events.put(_Arrived(source.donor, len(data), is_new))
            self._changed.notify_all()
        return why, is_final
