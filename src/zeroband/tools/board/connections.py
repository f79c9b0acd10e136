"""Limits on the page's connections: their number and idle time.

uvicorn by default waits forever for a connection's first request, and answers 503 to all beyond its limit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 256
"""Maximum number of connections; beyond it, another one is closed."""
SILENT_S = 20.0
"""Maximum time without a whole request; the page polls more often."""
ANSWER_S = 60.0
"""Maximum time for a client to read a response other than the stream."""
STREAM_PATH = "/api/stream"


class Connections(H11Protocol):
    """A connection; above the limit, one of the address with the most connections is closed."""

    silent_s = SILENT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._begun: object = None
        self._moved_at_s = time.monotonic()
        self._check()
        if len(self.connections) > MOST:
            others = [one for one in self.connections if isinstance(one, Connections) and one is not self]
            of_address = Counter(one.address for one in others)
            useless = [one for one in others if one.is_idle] or [one for one in others if not one.is_stream] or [self]
            min(useless, key=lambda one: (-of_address[one.address], one.moved_at_s)).transport.abort()

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def moved_at_s(self) -> float:
        """Monotonic time of the connection or its newest complete request or response."""
        return self._moved_at_s

    @property
    def is_idle(self) -> bool:
        """Whether there is no whole unanswered request."""
        cycle = self.cycle
        return cast(object, cycle) is None or cycle.response_complete or cycle.more_body

    @property
    def is_stream(self) -> bool:
        return not self.is_idle and self.scope["path"] == STREAM_PATH

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not self._begun and not self.is_idle:
            self._begun, self._moved_at_s = self.cycle, time.monotonic()
            self._check()

    def on_response_complete(self) -> None:
        self._moved_at_s = time.monotonic()
        super().on_response_complete()
        self._check()

    def _check(self) -> None:
        """Close the connection when its time is over, else check again then."""
        if self.transport.is_closing():
            return
        limit_s = self.silent_s if self.is_idle else math.inf if self.is_stream else ANSWER_S
        left_s = self._moved_at_s + limit_s - time.monotonic()
        if left_s <= 0:
            self.transport.abort()
        elif left_s < math.inf:
            self._look_again(left_s)

    def _look_again(self, after_s: float) -> None:
        timer = cast("asyncio.TimerHandle | None", getattr(self, "_timer", None))
        if timer is not None:
            timer.cancel()
        self._timer = self.loop.call_later(after_s, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
