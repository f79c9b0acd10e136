"""Links: the streams between this node and each other member, dialled by one of the two and kept from round to round.

Which of two members dials is agreed on elsewhere (`membership/reach.py`). A link is lost as a whole when one of its
streams is; its next one is another session, so that what is left of the old one is never mistaken for it. Main thread,
but for `accept`.
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
from zeroband.elastic.transport.descriptors import Complaints, is_short
from zeroband.elastic.transport.dial import keep_alive, reach, run_here
from zeroband.elastic.transport.engine import Engine, LinkState
from zeroband.elastic.transport.handover import HandedOver
from zeroband.elastic.transport.handshake import Introduction, StreamKeys, new_session
from zeroband.errors import HandshakeFailed

_DIAL_AGAIN_S = 0.1
_ASK_AGAIN_S = 1.0
_POLL_S = 0.002
_UNSENT_BYTES = 512 << 10
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


@dataclass
class _Link:
    number: int
    """Number in the engine; never used again for another link."""
    session: str
    hosts: set[str] = field(default_factory=set[str])
    """At the other ends of its streams: the member's, or those of relays."""


@dataclass(frozen=True)
class Wanted:
    """A member to be linked with: the ways to it, and how many streams there should be."""

    ways: DialRoutes
    streams: int
    is_dialled: bool
    """Whether this end dials; else it waits for the other one."""


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
    _complaints: Complaints = field(default_factory=Complaints)

    def accept(self, connection: socket.socket, what: HandedOver) -> None:
        """Take a stream that another member dialled. Any thread."""
        self.prepare(connection)
        with self._lock:  # or a stream that comes while `close` runs would outlive it
            if self._is_closed:
                connection.close()
                return
            self._add(what.caller, what.session, connection, what.keys)

    def number(self, member: str) -> int:
        """The link's number in the engine; one that is always down where there is none."""
        with self._lock:
            link = self._links.get(member)
            return 0xFFFFFFFF if link is None else link.number

    def session(self, member: str) -> str:
        """What the streams of the link to a member have in common; empty where there is none."""
        with self._lock:
            link = self._links.get(member)
            return "" if link is None else link.session

    def hosts(self, member: str) -> frozenset[str]:
        """Addresses at the other ends of the streams to a member; none where there is no link."""
        with self._lock:
            link = self._links.get(member)
            return frozenset() if link is None else frozenset(link.hosts)

    def state(self, member: str) -> LinkState:
        return self.engine.state(self.number(member))

    def set_congestion(self, member: str, name: str) -> None:
        """How TCP finds the rate of the streams to a member that are there now."""
        self.engine.set_congestion(self.number(member), name)

    def set_pace(self, member: str, bytes_per_s: int) -> None:
        """The most that each stream to a member sends; 0: what TCP finds."""
        self.engine.set_pace(self.number(member), bytes_per_s)

    def set_senders(self, member: str, senders: int) -> None:
        """Set over how many of the streams to a member this node sends."""
        self.engine.set_senders(self.number(member), senders)

    def connect(
        self,
        own: str,
        others: Mapping[str, Wanted],
        is_aborted: Callable[[], bool],
        *,
        keep: Iterable[str] = (),
        ways_now: Callable[[], Mapping[str, DialRoutes]] = dict,
    ) -> tuple[str, ...]:
        """Have a link to each of these members and to no others; an existing one to a member of `keep` may stay.

        `ways_now`: asked, once a second at most, for the ways to members that were called in vain: a relay may be gone.

        Waits until all of them are up or `is_aborted`; returns the members that are not reached then.
        """
        self._forget_all_but({*others, *keep})
        try:
            return run_here(self._connect(own, others, is_aborted, ways_now), is_aborted=is_aborted)
        except OSError as error:
            if not is_short(error):
                raise
            return self._away(others)

    def drop(self, member: str) -> None:
        """Hang up on a member; the one of the two that dials begins anew when both want a link again."""
        with self._lock:
            link = self._links.pop(member, None)
        if link is not None:
            self.engine.drop(link.number)

    def close(self) -> None:
        """Drop all links; what is dialled from now on is hung up on."""
        with self._lock:
            self._is_closed = True
        self._forget_all_but(())

    # -- dialling -----------------------------------------------------------------------------------------------

    async def _connect(
        self,
        own: str,
        others: Mapping[str, Wanted],
        is_aborted: Callable[[], bool],
        ways_now: Callable[[], Mapping[str, DialRoutes]],
    ) -> tuple[str, ...]:
        dialled = {member for member in others if others[member].is_dialled}
        tried, wanted = set[str](), {member: others[member] for member in dialled}
        dialling = [asyncio.create_task(self._keep_dialling(own, member, wanted, tried)) for member in dialled]
        asked_at_s = time.monotonic()
        try:
            while (away := self._away(others)) or tried != dialled:
                if is_aborted():
                    return away
                if time.monotonic() - asked_at_s > _ASK_AGAIN_S:
                    ways, asked_at_s = ways_now(), time.monotonic()
                    wanted |= {m: replace(wanted[m], ways=ways[m]) for m in away if m in wanted and m in ways}
                await asyncio.sleep(_POLL_S)
            return ()
        finally:
            for task in dialling:
                task.cancel()
            await asyncio.gather(*dialling, return_exceptions=True)

    def _away(self, members: Iterable[str]) -> tuple[str, ...]:
        return tuple(member for member in members if not self.state(member).is_up)

    async def _keep_dialling(self, own: str, member: str, all_wanted: Mapping[str, Wanted], tried: set[str]) -> None:
        """Have as many streams as are wanted, as far as the other end takes them, and again when the link is lost.

        `tried`: gets the members whose link is up after a call for all that was missing.
        """
        while True:
            state, wanted = self.state(member), all_wanted[member]
            if not state.is_up:
                self._start_session(member)
            missing = wanted.streams - (state.streams if state.is_up else 0)
            if missing > 0 and not (state.is_up and member in tried):
                await self._dial(own, member, wanted.ways, missing)
            if self.state(member).is_up:
                tried.add(member)
            await asyncio.sleep(_POLL_S if member in tried else _DIAL_AGAIN_S)

    async def _dial(self, own: str, member: str, ways: DialRoutes, streams: int) -> None:
        """Place `streams` calls at once; each success is added to the link, also when this is cancelled."""
        session = self._links[member].session
        calls = [self._call(own, member, session, ways) for _ in range(streams)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if outcome is not None and not isinstance(outcome, OSError | HandshakeFailed | TimeoutError | EOFError):
                raise outcome

    async def _call(self, own: str, member: str, session: str, ways: DialRoutes) -> None:
        introduction = Introduction(own, member, session, self.is_sealed)
        try:
            called = await reach(self.key, introduction, ways, self.prepare)
        except OSError as error:
            self._complaints.say(f"{member} cannot be called", error)
            raise
        with self._lock:
            self._add(member, session, called.connection, called.keys)

    def prepare(self, connection: socket.socket) -> None:
        """Options that a machine may lack or refuse are left as they are."""
        keep_alive(connection)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    # -- sessions -----------------------------------------------------------------------------------------------

    def _start_session(self, member: str) -> None:
        with self._lock:
            self._replace(member, new_session())

    def _add(self, member: str, session: str, connection: socket.socket, keys: StreamKeys) -> None:
        """Add a stream to a member's link; another session replaces the link. Under the lock."""
        link = self._links.get(member)
        if link is None or link.session != session:
            link = self._replace(member, session)
        with contextlib.suppress(OSError):  # the other end is gone already
            link.hosts.add(str(connection.getpeername()[0]))
        self.engine.add_stream(link.number, connection, keys)

    def _replace(self, member: str, session: str) -> _Link:
        old = self._links.pop(member, None)
        if old is not None:
            self.engine.drop(old.number)
        self._next += 1  # a frame of the old link must find no new one under its number
        link = self._links[member] = _Link(self._next, session)
        return link

    def _forget_all_but(self, members: Iterable[str]) -> None:
        kept = set(members)
        with self._lock:
            for member in [m for m in self._links if m not in kept]:
                self.engine.drop(self._links.pop(member).number)
