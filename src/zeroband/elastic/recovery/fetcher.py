"""The fetcher: gets a committed state, or the rounds that this node missed, from the members. Local rank 0 only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from torch import Tensor

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import FOUNDING_ROUND
from zeroband.elastic.recovery.donors import Donor
from zeroband.elastic.recovery.recovery import FetchedEntry, FetchedState, StateFetch, fetch_entry
from zeroband.elastic.store.interface import Store
from zeroband.elastic.transport.sealed import Dialler
from zeroband.errors import RunOver
from zeroband.node.faults import FaultPoints
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.log import get_logger
from zeroband.state.flat import SharedBuffers

_SAY_S = 1.0

_log = get_logger(__name__)


class Fetcher:
    """Asks the members that the store shows at that moment."""

    def __init__(
        self, store: Store, dialler: Dialler, buffers: SharedBuffers, flags: SharedFlags, faults: FaultPoints
    ) -> None:
        self._store = store
        self._dialler = dialler
        self._buffers = buffers
        self._flags = flags
        self._faults = faults
        self._state: StateFetch | None = None
        self.verified_bytes = 0
        """Of the states that were begun, all in all; 0 again after one that was not what its donors said."""

    def begin(self, sections: tuple[str, ...]) -> None:
        """A state is to be fetched into the section buffers: forget what an earlier fetch had got."""
        self._state = StateFetch(self._dialler, {name: self._buffers[name] for name in sections})

    def fetch_state(self) -> FetchedState:
        """Fetch a committed state, going on where the last call stopped. Raises RecoveryFailed, RunOver."""
        meter = _Meter(self._flags, self._faults)

        def count(chunk_bytes: int, total_bytes: int) -> None:
            self.verified_bytes += chunk_bytes
            meter.count(chunk_bytes, total_bytes)

        return self._begun.fetch(self._donors(), count)

    def distrust_state(self) -> None:
        """The state that came is not what its donors said: ask others first."""
        self._begun.distrust()
        self.verified_bytes = 0

    @property
    def _begun(self) -> StateFetch:
        assert self._state is not None, "begin comes first"
        return self._state

    def fetch_entry(self, round: int, room: Callable[[int], Tensor]) -> FetchedEntry:
        """Fetch what a round did. `room`: as the function of this name says. Raises RecoveryFailed, RunOver."""
        meter = _Meter(self._flags, self._faults)
        return fetch_entry(self._donors(), self._dialler, round, room, on_chunk=meter.count)

    def _donors(self) -> list[Donor]:
        """The members that serve their state, in random order, so that joiners spread over them. Raises RunOver."""
        view = self._store.view(FOUNDING_ROUND)
        if view.committed is None:
            return []
        alive = [m for m in view.committed.members if m in view.alive and m in view.peers]
        if not alive and Progress.from_record(view.committed.record["progress"]).is_complete:
            raise RunOver(f"the run is complete since round {view.committed.round}; start another with a new run.id")
        donors = [Donor(m, view.peers[m].host, view.peers[m].port) for m in alive if view.peers[m].serves_state]
        random.shuffle(donors)
        return donors


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
