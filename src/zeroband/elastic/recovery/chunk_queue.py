"""Which chunks a joiner still needs, and which donor is at which of them. Not locked; time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from zeroband.elastic.recovery.state_chunks import Chunk

STRAGGLER_S = 1.0
"""No chunk is given to a second donor before it is so long on its way."""

_STRAGGLER_FACTOR = 2.0
_MEASURED_CHUNKS = 64


class ChunkQueue:
    """Hands out each chunk once, and those that take long at the end a second time to another donor."""

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
    def is_done(self) -> bool:
        return not self._waiting and not self._flights

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
