"""Links: the TCP streams between this node and each other member, kept from round to round.

`membership/reach.py` decides which of two members dials. A link fails as a whole when one of its streams does; the new
link is a new session, so leftovers of the old one are never mistaken for it. Main thread, except for `accept`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import DialRoutes
from zeroband.elastic.transport.descriptors import ShortageLog, is_short
from zeroband.elastic.transport.dial import dial_member, keep_alive, run_blocking
from zeroband.elastic.transport.engine import Engine, LinkState
from zeroband.elastic.transport.handover import HandedOver
from zeroband.elastic.transport.handshake import Introduction, StreamKeys, new_session
from zeroband.errors import HandshakeFailed

_REDIAL_S = 0.1
_REFRESH_S = 1.0
_POLL_S = 0.002
_UNSENT_BYTES = 512 << 10
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


@dataclass
class _Link:
    number: int
    """Number in the engine, never reused."""
    session: str
    hosts: set[str] = field(default_factory=set[str])
    """Remote addresses of its streams: the member's or relays'."""


@dataclass(frozen=True)
class LinkTarget:
    """A member to connect to: its routes, and the number of streams."""

    routes: DialRoutes
    streams: int
    is_dialled: bool
    """Whether this end dials; otherwise it waits for the other end."""


@dataclass
class Links:
    """The links of this node. `close()` drops them."""

    engine: Engine
    key: RunKey
    is_sealed: bool
    _links: dict[str, _Link] = field(default_factory=dict[str, _Link])
    _next: int = 0
    _is_closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _shortage_log: ShortageLog = field(default_factory=ShortageLog)

    def accept(self, connection: socket.socket, what: HandedOver) -> None:
        """Add a stream that another member dialled. Any thread."""
        self.prepare(connection)
        with self._lock:  # a stream that arrives during `close` must not outlive it
            if self._is_closed:
                connection.close()
                return
            self._add(what.caller, what.session, connection, what.keys)

    def number(self, member: str) -> int:
        """Return the link's number in the engine; without a link, one that is always down."""
        with self._lock:
            link = self._links.get(member)
            return 0xFFFFFFFF if link is None else link.number

    def session(self, member: str) -> str:
        """Return the session of the link to a member; empty without a link."""
        with self._lock:
            link = self._links.get(member)
            return "" if link is None else link.session

    def hosts(self, member: str) -> frozenset[str]:
        """Return the remote addresses of the streams to a member."""
        with self._lock:
            link = self._links.get(member)
            return frozenset() if link is None else frozenset(link.hosts)

    def state(self, member: str) -> LinkState:
        return self.engine.state(self.number(member))

    def set_congestion(self, member: str, name: str) -> None:
        """Set the congestion control of the current streams to a member."""
        self.engine.set_congestion(self.number(member), name)

    def set_pace(self, member: str, bytes_per_s: int) -> None:
        """Set the pacing rate of each stream to a member; 0: unlimited."""
        self.engine.set_pace(self.number(member), bytes_per_s)

    def set_senders(self, member: str, senders: int) -> None:
        """Set the number of streams to a member that send."""
        self.engine.set_senders(self.number(member), senders)

    def connect(
        self,
        own: str,
        others: Mapping[str, LinkTarget],
        is_aborted: Callable[[], bool],
        *,
        keep: Iterable[str] = (),
        current_routes: Callable[[], Mapping[str, DialRoutes]] = dict,
    ) -> tuple[str, ...]:
        """Connect to these members and drop other links, except to members in `keep`.

        `current_routes`: polled at most once a second for new routes to unreached members, since a relay may be gone.
        Waits until all links are up or `is_aborted`; returns the unreached members.
        """
        self._forget_all_but({*others, *keep})
        try:
            return run_blocking(self._connect(own, others, is_aborted, current_routes), is_aborted=is_aborted)
        except OSError as error:
            if not is_short(error):
                raise
            return self._away(others)

    def drop(self, member: str) -> None:
        """Close the link to a member; the dialling end starts a new one when both connect again."""
        with self._lock:
            link = self._links.pop(member, None)
        if link is not None:
            self.engine.drop(link.number)

    def close(self) -> None:
        """Close all links; later streams are closed on arrival."""
        with self._lock:
            self._is_closed = True
        self._forget_all_but(())

    # -- dialling -----------------------------------------------------------------------------------------------

    async def _connect(
        self,
        own: str,
        others: Mapping[str, LinkTarget],
        is_aborted: Callable[[], bool],
        current_routes: Callable[[], Mapping[str, DialRoutes]],
    ) -> tuple[str, ...]:
        dialled = {member for member in others if others[member].is_dialled}
        tried, wanted = set[str](), {member: others[member] for member in dialled}
        dialling = [asyncio.create_task(self._maintain(own, member, wanted, tried)) for member in dialled]
        asked_at_s = time.monotonic()
        try:
            while (away := self._away(others)) or tried != dialled:
                if is_aborted():
                    return away
                if time.monotonic() - asked_at_s > _REFRESH_S:
                    routes, asked_at_s = current_routes(), time.monotonic()
                    wanted |= {m: replace(wanted[m], routes=routes[m]) for m in away if m in wanted and m in routes}
                await asyncio.sleep(_POLL_S)
            return ()
        finally:
            for task in dialling:
                task.cancel()
            await asyncio.gather(*dialling, return_exceptions=True)

    def _away(self, members: Iterable[str]) -> tuple[str, ...]:
        return tuple(member for member in members if not self.state(member).is_up)

    async def _maintain(self, own: str, member: str, all_wanted: Mapping[str, LinkTarget], tried: set[str]) -> None:
        """Keep the wanted number of streams, as far as the other end accepts them, and redial when the link is lost.

        `tried`: receives members whose link is up after all missing streams were dialled once.
        """
        while True:
            state, wanted = self.state(member), all_wanted[member]
            if not state.is_up:
                self._start_session(member)
            missing = wanted.streams - (state.streams if state.is_up else 0)
            if missing > 0 and not (state.is_up and member in tried):
                await self._dial(own, member, wanted.routes, missing)
            if self.state(member).is_up:
                tried.add(member)
            await asyncio.sleep(_POLL_S if member in tried else _REDIAL_S)

    async def _dial(self, own: str, member: str, routes: DialRoutes, streams: int) -> None:
        """Dial `streams` streams at once; each success is added to the link, even if this is cancelled."""
        session = self._links[member].session
        calls = [self._call(own, member, session, routes) for _ in range(streams)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if outcome is not None and not isinstance(outcome, OSError | HandshakeFailed | TimeoutError | EOFError):
                raise outcome

    async def _call(self, own: str, member: str, session: str, routes: DialRoutes) -> None:
        introduction = Introduction(own, member, session, self.is_sealed)
        try:
            called = await dial_member(self.key, introduction, routes, self.prepare)
        except OSError as error:
            self._shortage_log.warn(f"{member} cannot be called", error)
            raise
        with self._lock:
            self._add(member, session, called.connection, called.keys)

    def prepare(self, connection: socket.socket) -> None:
        """Set a connection's socket options, as far as supported."""
        keep_alive(connection)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    # -- sessions -----------------------------------------------------------------------------------------------

    def _start_session(self, member: str) -> None:
        with self._lock:
            self._replace(member, new_session())

    def _add(self, member: str, session: str, connection: socket.socket, keys: StreamKeys) -> None:
        """Add a stream to a member's link; a new session replaces the link. Under the lock."""
        link = self._links.get(member)
        if link is None or link.session != session:
            link = self._replace(member, session)
        with contextlib.suppress(OSError):  # already disconnected
            link.hosts.add(str(connection.getpeername()[0]))
        self.engine.add_stream(link.number, connection, keys)

    def _replace(self, member: str, session: str) -> _Link:
        old = self._links.pop(member, None)
        if old is not None:
            self.engine.drop(old.number)
        self._next += 1  # numbers are never reused, so late frames of the old link match nothing
        link = self._links[member] = _Link(self._next, session)
        return link

    def _forget_all_but(self, members: Iterable[str]) -> None:
        kept = set(members)
        with self._lock:
            for member in [m for m in self._links if m not in kept]:
                self.engine.drop(self._links.pop(member).number)
