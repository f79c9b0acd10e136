"""Probes: whether this node and each other member can reach one another, independently of the store.

Guardians probe each other with a few bytes over one TCP connection per member, after a handshake. The guardian also
holds the node's port, where all other connections arrive. A member that cannot be dialled is not probed; its own probes
show that it is alive, and calls are announced to it over their connection. Runs an event loop in one thread of the
guardian, so that a stall of the trainer's interpreter cuts no link. Makes no decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zeroband.elastic.guardian.link_report import LinkSeen
from zeroband.elastic.guardian.port import Port, SeenCalls, cannot_listen, shake_hands
from zeroband.elastic.guardian.relay import Relay
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import INBOUND_ONLY, DialRoute, DialRoutes
from zeroband.elastic.transport.dial import (
    call,
    dial_member,
    keep_alive,
    punch,
    read_exactly,
    read_observed_address,
    readable,
)
from zeroband.elastic.transport.handover import POSES, HandedOver
from zeroband.elastic.transport.handshake import DATA_CALL, Introduction, Purpose, new_session
from zeroband.errors import HandshakeFailed, PosesAsAnother

_PROBE_BYTES = 8
_IDLE = 4
"""Multiple of `detect_s` after which a connection without probes is closed; a prober sends ten in this time."""
_START_DEADLINE_S = 10.0
_DOUBT_FRACTION = 1 / 3
"""Fraction of `detect_s` without an answer after which a member is doubted."""
_IMPERSONATION_INTERVAL_S, _MAX_IMPERSONATIONS = 60.0, 1000
"""Shortest time between two reports of calls in one member's name, and the number of members remembered."""
_MAX_ANSWERING = 256
"""Limit of relayed calls that are answered at a time."""
_LEAST_CALL_S = 1.0
"""Minimum time for the handshake of a probe, which takes a busy machine longer than an answer."""


@dataclass(frozen=True)
class Identity:
    """This node's name and keys in handshakes."""

    member_id: str
    key: RunKey
    is_sealed: bool = True

    def introduction(self, member: str, purpose: Purpose) -> Introduction:
        return Introduction(self.member_id, member, new_session(), self.is_sealed, purpose)


async def refuse(connection: socket.socket, what: HandedOver) -> None:
    """Refuse a call that is no probe; the default taker."""


class LinkMonitor:
    """Answers the other guardians' probes and sends its own. `close()` ends its thread.

    `host`, `port`: where to listen; port 0: any free one. `take`: called with other connections of the run's nodes,
    which are closed when it returns. `detect_s`: time without an answer after which a member is cut off. `on_gone`:
    called in the monitor's thread with a member that closed its connection and refuses another one, so its guardian has
    ended. `measure`: measures the rate to a member in Mbit/s; called once per member that answers, one for each
    `start_measuring`. `listens`: False: calls arrive only through relays. `handover_socket`: Unix socket of the process
    that holds the port and hands over its calls; None: this one listens.
    Raises ConfigError if it cannot listen.
    """

    def __init__(
        self,
        host: str,
        *,
        identity: Identity,
        detect_s: float,
        on_gone: Callable[[str], None],
        port: int = 0,
        take: Callable[[socket.socket, HandedOver], Awaitable[None]] = refuse,
        measure: Callable[[str, DialRoutes], Awaitable[int]] | None = None,
        listens: bool = True,
        handover_socket: Path | None = None,
    ) -> None:
        self._identity = identity
        self._detect_s = detect_s
        self.probe_s = min(0.5, detect_s / 5)
        """Pause between two probes of a member."""
        self._on_gone = on_gone
        self._links: dict[str, _ProbedMember] = {}
        self._measure = measure
        self._take = take
        self._heard = SeenCalls()
        self._bans: Callable[[str], bool] = lambda name: False
        self._impersonated_at_s: dict[str, float] = {}
        """Time of the last report of a forged call, by the member in whose name it was made."""
        self._probers: dict[str, asyncio.Task[None]] = {}
        """The task that answers each member's probes."""
        self._listener = Port({DATA_CALL: self._answer})
        self._listens, self._handover_socket = listens, handover_socket
        self.relay = Relay()
        self._undialled: set[str] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._beat_at_s = time.monotonic()
        self._bursts = asyncio.Semaphore(0)
        """Measurements that may start."""
        self._unmeasured = 0
        self._is_measuring = False
        self._loop = asyncio.new_event_loop()
        self._is_listening = threading.Event()
        self.port = 0
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._run, args=(host, port), name="links", daemon=True)
        self._thread.start()
        self._is_listening.wait(_START_DEADLINE_S)
        if self._problem is not None:
            raise cannot_listen(host, port, self._problem) from self._problem

    def watch(self, members: Mapping[str, DialRoutes], *, silent_s: Mapping[str, float] | None = None) -> None:
        """Probe exactly these members from now on, or wait for the probes of those that are INBOUND_ONLY.

        `silent_s`: how long others have probed some of them without an answer.
        """
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._set_members, dict(members), dict(silent_s or {}))

    def ban(self, bans: Callable[[str], bool]) -> None:
        """Refuse calls and probes of banned members. `bans`: whether the key in a name is banned."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_bans, bans)

    @property
    def doubt_s(self) -> float:
        """Time without an answer after which a member is doubted."""
        return _DOUBT_FRACTION * self._detect_s

    def cut_off(self) -> tuple[str, ...]:
        """Return the members without an answer for `detect_s`, sorted."""
        return self._silent_for(self._detect_s)

    def doubted(self) -> tuple[str, ...]:
        """Return the members without an answer for `doubt_s`, sorted.

        Empty if they are three quarters of those probed: then this node is the one that is cut off.
        """
        silent = self._silent_for(self.doubt_s)
        return silent if 4 * len(silent) < 3 * len(self._links) else ()

    def undialled(self) -> tuple[str, ...]:
        """Return the members that probe this node but could not be dialled for `doubt_s`, sorted."""
        return tuple(sorted(self._undialled))

    def dialled(self) -> dict[str, int]:
        """Return the members that this node dialled and that answer, with their rates in Mbit/s, or 0."""
        silent = self._silent_for(self.doubt_s)
        return {m: link.mbit for m, link in dict(self._links).items() if link.route == "direct" and m not in silent}

    def _silent_for(self, seconds: float) -> tuple[str, ...]:
        now_s, links = time.monotonic(), dict(self._links)
        if now_s - self._beat_at_s > self._detect_s / 2:  # this process was stopped, not all others
            return ()
        return tuple(sorted(m for m, link in links.items() if now_s - link.answered_at_s > seconds))

    @property
    def is_measuring(self) -> bool:
        """Whether a measurement is in progress."""
        return self._is_measuring

    @property
    def wants_to_measure(self) -> bool:
        """Whether a link waits to be measured and none is in progress."""
        return self._unmeasured > 0 and not self._is_measuring

    def start_measuring(self) -> None:
        """Measure one link; simultaneous measurements would slow each other."""
        self._is_measuring = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._bursts.release)

    def answered_at_s(self, member: str) -> float | None:
        """Time of a member's last answer, or of its first watch, by this process's clock; None: not watched."""
        link = self._links.get(member)
        return None if link is None else link.answered_at_s

    def seen(self) -> dict[str, LinkSeen]:
        """Return the links to watched members that have answered or are cut off."""
        cut_off, found = self.cut_off(), dict[str, LinkSeen]()
        for member, link in dict(self._links).items():
            rtt_ms = None if link.rtt_s is None else round(1e3 * link.rtt_s, 2)
            if link.route or member in cut_off:
                found[member] = LinkSeen(link.mbit or None, rtt_ms, member in cut_off, link.route or "direct")
        return found

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    # -- in the loop's thread -----------------------------------------------------------------------------------

    def _run(self, host: str, port: int) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._listen(host, port))
            self._is_listening.set()  # only now: `run_forever` forgets an earlier stop
            beat = self._loop.create_task(self._beat())
            self._loop.run_forever()
            beat.cancel()
        except OSError as error:
            self._problem = error
        finally:
            self._is_listening.set()
            self._loop.run_until_complete(self._close_all())
            self._loop.close()

    async def _listen(self, host: str, port: int) -> None:
        if self._handover_socket is not None:
            self._listener.take_from(self._handover_socket)
        elif self._listens:
            self.port = self._listener.open(host, port)

    async def _close_all(self) -> None:
        """Close all connections, so that callers notice at once."""
        self._listener.close()
        for link in self._links.values():
            link.end()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self) -> None:
        """If this thread was stopped, restart the time that members have to answer."""
        while True:
            now_s = time.monotonic()
            if now_s - self._beat_at_s > self._detect_s / 2:
                for link in self._links.values():
                    link.answered_at_s = now_s
            self._beat_at_s = now_s
            await asyncio.sleep(self.probe_s / 2)

    async def _answer(self, connection: socket.socket) -> None:
        own = self._identity
        try:
            what = await shake_hands(
                connection,
                own.key,
                callee=own.member_id,
                is_sealed=own.is_sealed,
                heard=self._heard,
                bans=lambda name: self._bans(name),
            )
        except PosesAsAnother as error:
            await self._report_impersonation(connection, error.member_id)
            raise
        match what.kind:
            case Purpose.PROBE:
                await self._answer_probes(connection, what.caller)
            case Purpose.RELAY:
                await self.relay.connect(connection, what.caller, what.session)
            case Purpose.ANSWER:
                await self.relay.take_answer(connection, what.caller, what.session)
            case _:
                await self._take(connection, what)

    async def _report_impersonation(self, connection: socket.socket, member: str) -> None:
        """Report a forged call in a member's name to the trainer, at most once a minute."""
        now_s = time.monotonic()
        if now_s - self._impersonated_at_s.get(member, -_IMPERSONATION_INTERVAL_S) < _IMPERSONATION_INTERVAL_S:
            return
        if len(self._impersonated_at_s) >= _MAX_IMPERSONATIONS:
            self._impersonated_at_s.clear()
        self._impersonated_at_s[member] = now_s
        host, port, *_ = connection.getpeername()
        await self._take(connection, HandedOver(POSES, member, f"{host}:{port}"))

    def _set_bans(self, bans: Callable[[str], bool]) -> None:
        self._bans = bans
        for member in filter(bans, [*self._probers]):
            self._probers[member].cancel()

    async def _answer_probes(self, connection: socket.socket, caller: str) -> None:
        """Answer a member's probes until it closes the connection, falls silent, or calls again."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        if (before := self._probers.get(caller)) is not None:
            before.cancel()
        self._probers[caller] = task
        sending = asyncio.Lock()

        async def send(frame: bytes) -> None:
            async with sending:
                await loop.sock_sendall(connection, frame)

        self.relay.open_line(caller, send)
        try:
            while True:
                async with asyncio.timeout(_IDLE * self._detect_s):
                    await send(await read_exactly(connection, _PROBE_BYTES))
                link = self._links.get(caller)
                if link is not None and link.routes == INBOUND_ONLY:
                    link.answered_at_s, link.route = time.monotonic(), "reversed"
        finally:
            self.relay.close_line(caller, send)
            if self._probers.get(caller) is task:
                del self._probers[caller]

    def _set_members(self, members: Mapping[str, DialRoutes], silent_s: Mapping[str, float]) -> None:
        self._undialled &= members.keys()
        for member in [m for m, link in self._links.items() if members.get(m) != link.routes]:
            self._links.pop(member).end()
        for member, routes in members.items():
            if member not in self._links:
                link = self._links[member] = _ProbedMember(routes, time.monotonic() - silent_s.get(member, 0.0))
                if routes != INBOUND_ONLY:
                    link.task = self._loop.create_task(self._probe(member, link))

    async def _probe(self, member: str, link: _ProbedMember) -> None:
        """Probe a member while it is watched.

        After the other end closed a connection that worked, dial again at once: if that is refused, its guardian has
        ended, since a machine that is cut off refuses nothing.
        """
        has_ended, introduction = False, partial(self._identity.introduction, member, Purpose.PROBE)
        noting = self._loop.create_task(self._note_undialled(member, link))
        try:
            while True:
                was_answered = False
                try:
                    async with asyncio.timeout(max(self._detect_s, _LEAST_CALL_S)):
                        called = await dial_member(self._identity.key, introduction(), link.routes)
                except ConnectionRefusedError:
                    if has_ended and len(link.routes) == 1:
                        self._on_gone(member)
                        has_ended = False
                except (OSError, EOFError, TimeoutError, HandshakeFailed):
                    pass
                else:
                    if not called.route.relay:
                        noting.cancel()
                        self._undialled.discard(member)
                    with called.connection:
                        has_ended, was_answered = await self._ask(member, link, called.connection, called.route)
                if not (has_ended and was_answered):
                    await asyncio.sleep(self.probe_s)
        finally:
            noting.cancel()

    async def _note_undialled(self, member: str, link: _ProbedMember) -> None:
        """Note that a member can only dial out: it probes this node but cannot be dialled."""
        await asyncio.sleep(max(self.doubt_s, _LEAST_CALL_S))
        while member not in self._probers:
            await asyncio.sleep(self.probe_s)
        if not link.routes[0].relay:
            self._undialled.add(member)

    async def _ask(
        self, member: str, link: _ProbedMember, connection: socket.socket, route: DialRoute
    ) -> tuple[bool, bool]:
        """Probe until the connection breaks. Returns whether the other end closed it, and whether it answered."""
        loop, was_answered, frames = asyncio.get_running_loop(), False, _FrameReader(connection)
        limit_s = self.doubt_s if route.relay else self._detect_s  # leaves time to try another relay
        try:
            while True:
                probe, asked_at_s = os.urandom(_PROBE_BYTES), time.monotonic()
                async with asyncio.timeout(limit_s):
                    await loop.sock_sendall(connection, probe)
                    while (frame := await frames.next()) != probe:
                        self._answer_call(member, route, frame)
                was_answered, link.route = True, route.relay or "direct"
                link.answered(asked_at_s)
                if self._measure is not None and link.measuring is None:
                    link.measuring = asyncio.create_task(self._learn_rate(member, link, self._measure))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.probe_s):
                        while True:
                            self._answer_call(member, route, await frames.next())
        except (ConnectionResetError, BrokenPipeError, EOFError):
            return True, was_answered
        except (OSError, TimeoutError):
            return False, was_answered

    def _answer_call(self, relay: str, route: DialRoute, number: bytes) -> None:
        """Answer a relayed call: a frame that is no answer to a probe is the number of a call."""

        async def answer_call() -> None:
            own = self._identity
            answer = Introduction(own.member_id, relay, number.hex(), own.is_sealed, Purpose.ANSWER)
            with contextlib.suppress(OSError, EOFError, TimeoutError, HandshakeFailed):
                relayed, _ = await call(own.key, answer, route.address)
                with contextlib.ExitStack() as otherwise:
                    otherwise.callback(relayed.close)
                    sight, at = await read_observed_address(relayed), relayed.getsockname()
                    otherwise.pop_all()
                self._listener.take(relayed, relay)  # in case hole punching fails
                if (met := await punch(at, sight, keep_alive)) is not None:
                    self._listener.take(met, relay)

        if not route.relay and len(self._answering) < _MAX_ANSWERING:
            task = self._loop.create_task(answer_call())
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _learn_rate(
        self, member: str, link: _ProbedMember, measure: Callable[[str, DialRoutes], Awaitable[int]]
    ) -> None:
        self._unmeasured += 1
        try:
            await self._bursts.acquire()
        finally:
            self._unmeasured -= 1
        try:
            with contextlib.suppress(OSError, EOFError, TimeoutError, HandshakeFailed):  # transfers will show the rate
                link.mbit = await measure(member, link.routes)
        finally:
            self._is_measuring = False


class _ProbedMember:
    """The link to one watched member."""

    def __init__(self, routes: DialRoutes, answered_at_s: float) -> None:
        self.routes = routes
        self.route = ""
        """As in `LinkSeen`; empty: no answer yet."""
        self.task: asyncio.Task[None] | None = None
        self.answered_at_s = answered_at_s
        self.rtt_s: float | None = None
        """Shortest round trip so far."""
        self.mbit = 0
        """0: not measured."""
        self.measuring: asyncio.Task[None] | None = None

    def end(self) -> None:
        for task in (self.task, self.measuring):
            if task is not None:
                task.cancel()

    def answered(self, asked_at_s: float) -> None:
        self.answered_at_s = time.monotonic()
        took_s = self.answered_at_s - asked_at_s
        self.rtt_s = took_s if self.rtt_s is None else min(self.rtt_s, took_s)


class _FrameReader:
    """Reads frames of the size of a probe from a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._partial = b""

    async def next(self) -> bytes:
        """Return the next frame; a cancelled call keeps what it has read. Raises OSError, EOFError."""
        while len(self._partial) < _PROBE_BYTES:
            try:
                part = self._connection.recv(_PROBE_BYTES - len(self._partial))
            except BlockingIOError:
                await readable(self._connection)
                continue
            if not part:
                raise EOFError
            self._partial += part
        frame, self._partial = self._partial, b""
        return frame
