"""Links: whether this node and each other member reach one another, apart from whether both reach the store.

Every guardian answers probes and sends them, a few bytes at a time over one TCP connection to each member, which begins
with a handshake. It holds the node's one port, on which all other connections come in too. A member that cannot be
dialled is not asked but heard, since its own probes show the same; they are also the line over which it is told that
somebody calls it. Runs an event loop in one thread of the guardian, so that a stall of the trainer's interpreter cuts
no link. Decides nothing.
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
from zeroband.elastic.transport.dial import call, dial_member, keep_alive, read_exactly, read_observed_address, readable
from zeroband.elastic.transport.handover import POSES, HandedOver
from zeroband.elastic.transport.handshake import DATA_CALL, Introduction, Purpose, new_session
from zeroband.elastic.transport.hole_punching import punch
from zeroband.errors import HandshakeFailed, PosesAsAnother

_PROBE_BYTES = 8
_IDLE = 4
"""Multiple of `detect_s` after which a connection without a probe is given up: an asker sends ten in one."""
_START_DEADLINE_S = 10.0
_DOUBTED = 1 / 3
"""Part of `detect_s` without an answer after which a member is doubted."""
_TELL_POSER_S, _MOST_POSERS = 60.0, 1000
_MOST_PICKED_UP = 256
"""Calls that are taken at one time."""
_LEAST_CALL_S = 1.0
"""Least time for the handshake of a probe; a busy machine takes longer for it than for an answer."""


@dataclass(frozen=True)
class Identity:
    """The names by which this node calls others, and they call it."""

    member_id: str
    key: RunKey
    is_sealed: bool = True

    def introduction(self, member: str, purpose: Purpose) -> Introduction:
        return Introduction(self.member_id, member, new_session(), self.is_sealed, purpose)


async def refuse(connection: socket.socket, what: HandedOver) -> None:
    """Refuse a caller that wants anything but a probe, where no taker is registered."""


class LinkMonitor:
    """Answers the other guardians' probes and sends its own. `close()` ends its thread.

    `host` and `port`: where to listen; port 0 takes a free one. `take`: for connections of nodes of the run that are no
    probes; it may hand them on, and they are hung up on when it returns. `detect_s`: a member that answers nothing for
    so long is cut off. `on_gone`: called in the monitor's thread with a member whose connection was closed by its own
    machine and that refuses another one: its guardian has ended. `measure`: finds out what the link to a member
    carries, in Mbit/s; asked once for each member that answers, each time after `let_measure`. `listens`: where not, no
    port is open, and calls come through other members only. `door`: Unix socket of the process that holds the port and
    hands its calls over; None: this one holds it.
    Raises ConfigError when it cannot listen.
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
        door: Path | None = None,
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
        self._posers: dict[str, float] = {}
        """When a call in the name of a member that did not make it was last told of, by the member."""
        self._askers: dict[str, asyncio.Task[None]] = {}
        """The task that answers the probes of each member."""
        self._listener = Port({DATA_CALL: self._answer})
        self._listens, self._door = listens, door
        self.relay = Relay()
        self._undialled: set[str] = set()
        self._picking_up: set[asyncio.Task[None]] = set()
        self._beat_at_s = time.monotonic()
        self._bursts = asyncio.Semaphore(0)
        """Those that may be made now."""
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
        """Probe exactly these members from now on, or hear those that are HEARD.

        `silent_s`: for how long others have asked some of them in vain.
        """
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._set_members, dict(members), dict(silent_s or {}))

    def ban(self, bans: Callable[[str], bool]) -> None:
        """Take no call of members whose key is banned from now on, and hang up on their probes.

        `bans`: whether the key that a name carries is.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_bans, bans)

    @property
    def doubt_s(self) -> float:
        """After so long without an answer a member is doubted."""
        return _DOUBTED * self._detect_s

    def cut_off(self) -> tuple[str, ...]:
        """Members that did not answer for `detect_s`, in the order of their ids."""
        return self._silent_for(self._detect_s)

    def doubted(self) -> tuple[str, ...]:
        """Members that did not answer for `doubt_s`, those that are cut off too, in the order of their ids.

        None where they are three quarters of those who are asked, or more: it is this node then that is cut off.
        """
        silent = self._silent_for(self.doubt_s)
        return silent if 4 * len(silent) < 3 * len(self._links) else ()

    def undialled(self) -> tuple[str, ...]:
        """Members whose probes come here, and whose address took no connection for `doubt_s`; in the order of ids."""
        return tuple(sorted(self._undialled))

    def dialled(self) -> dict[str, int]:
        """Members that this one has dialled and that answer; the rate to each in Mbit/s, or 0."""
        silent = self._silent_for(self.doubt_s)
        return {m: link.mbit for m, link in dict(self._links).items() if link.route == "direct" and m not in silent}

    def _silent_for(self, seconds: float) -> tuple[str, ...]:
        now_s, links = time.monotonic(), dict(self._links)
        if now_s - self._beat_at_s > self._detect_s / 2:  # this process was stopped, not all the others
            return ()
        return tuple(sorted(m for m, link in links.items() if now_s - link.answered_at_s > seconds))

    @property
    def is_measuring(self) -> bool:
        """Whether a measurement that was let is not over."""
        return self._is_measuring

    @property
    def wants_to_measure(self) -> bool:
        """Whether a link waits for its measurement, and none is let."""
        return self._unmeasured > 0 and not self._is_measuring

    def let_measure(self) -> None:
        """Have one link measured: the run's links are shared, and measurements at one time slow one another."""
        self._is_measuring = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._bursts.release)

    def answered_at_s(self, member: str) -> float | None:
        """When a member answered last, or was first watched, by this process's clock; None: it is not watched."""
        link = self._links.get(member)
        return None if link is None else link.answered_at_s

    def seen(self) -> dict[str, LinkSeen]:
        """The links to the members that are watched and have answered, or are cut off."""
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
            self._is_listening.set()  # not sooner: a stop before `run_forever` would be forgotten
            beat = self._loop.create_task(self._beat())
            self._loop.run_forever()
            beat.cancel()
        except OSError as error:
            self._problem = error
        finally:
            self._is_listening.set()
            self._loop.run_until_complete(self._hang_up())
            self._loop.close()

    async def _listen(self, host: str, port: int) -> None:
        if self._door is not None:
            self._listener.take_from(self._door)
        elif self._listens:
            self.port = self._listener.open(host, port)

    async def _hang_up(self) -> None:
        """Close all connections, so that callers learn at once that this node answers no more."""
        self._listener.close()
        for link in self._links.values():
            link.end()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self) -> None:
        """Notice that this thread stood still: then everybody gets the time to answer again."""
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
            await self._tell_poser(connection, error.member_id)
            raise
        match what.kind:
            case Purpose.PROBE:
                await self._answer_probes(connection, what.caller)
            case Purpose.RELAY:
                await self.relay.pass_on(connection, what.caller, what.session)
            case Purpose.ANSWER:
                await self.relay.take_answer(connection, what.caller, what.session)
            case _:
                await self._take(connection, what)

    async def _tell_poser(self, connection: socket.socket, member: str) -> None:
        """Have a call in the name of a member that did not make it recorded, once a minute."""
        now_s = time.monotonic()
        if now_s - self._posers.get(member, -_TELL_POSER_S) < _TELL_POSER_S:
            return
        if len(self._posers) >= _MOST_POSERS:
            self._posers.clear()
        self._posers[member] = now_s
        host, port, *_ = connection.getpeername()
        await self._take(connection, HandedOver(POSES, member, f"{host}:{port}"))

    def _set_bans(self, bans: Callable[[str], bool]) -> None:
        self._bans = bans
        for member in filter(bans, [*self._askers]):
            self._askers[member].cancel()

    async def _answer_probes(self, connection: socket.socket, caller: str) -> None:
        """Answer a member's probes until it hangs up, falls silent, or calls again."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        if (before := self._askers.get(caller)) is not None:
            before.cancel()
        self._askers[caller] = task
        speaking = asyncio.Lock()

        async def say(word: bytes) -> None:
            async with speaking:
                await loop.sock_sendall(connection, word)

        self.relay.open_line(caller, say)
        try:
            while True:
                async with asyncio.timeout(_IDLE * self._detect_s):
                    await say(await read_exactly(connection, _PROBE_BYTES))
                link = self._links.get(caller)
                if link is not None and link.routes == INBOUND_ONLY:
                    link.answered_at_s, link.route = time.monotonic(), "reversed"
        finally:
            self.relay.close_line(caller, say)
            if self._askers.get(caller) is task:
                del self._askers[caller]

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
        """Ask for as long as it is watched.

        A connection that its other end closed is made anew at once, since a machine that is only cut off does not
        refuse; if there was no answer on that one either, after a pause.
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
        """A member that asks here and is not reached at its own address can only dial out."""
        await asyncio.sleep(max(self.doubt_s, _LEAST_CALL_S))
        while member not in self._askers:
            await asyncio.sleep(self.probe_s)
        if not link.routes[0].relay:
            self._undialled.add(member)

    async def _ask(
        self, member: str, link: _ProbedMember, connection: socket.socket, route: DialRoute
    ) -> tuple[bool, bool]:
        """Probe until the connection breaks; whether its other end closed it, and whether there was an answer."""
        loop, was_answered, words = asyncio.get_running_loop(), False, _Words(connection)
        limit_s = self.doubt_s if route.relay else self._detect_s  # another relay may have the time to answer
        try:
            while True:
                probe, asked_at_s = os.urandom(_PROBE_BYTES), time.monotonic()
                async with asyncio.timeout(limit_s):
                    await loop.sock_sendall(connection, probe)
                    while (word := await words.next()) != probe:
                        self._pick_up(member, route, word)
                was_answered, link.route = True, route.relay or "direct"
                link.answered(asked_at_s)
                if self._measure is not None and link.measuring is None:
                    link.measuring = asyncio.create_task(self._learn_rate(member, link, self._measure))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.probe_s):
                        while True:
                            self._pick_up(member, route, await words.next())
        except (ConnectionResetError, BrokenPipeError, EOFError):
            return True, was_answered
        except (OSError, TimeoutError):
            return False, was_answered

    def _pick_up(self, relay: str, route: DialRoute, number: bytes) -> None:
        """Take a call that a member passes on: what it says over the line, apart from answers, is the call's number."""

        async def pick_up() -> None:
            own = self._identity
            answer = Introduction(own.member_id, relay, number.hex(), own.is_sealed, Purpose.ANSWER)
            with contextlib.suppress(OSError, EOFError, TimeoutError, HandshakeFailed):
                relayed, _ = await call(own.key, answer, route.address)
                with contextlib.ExitStack() as otherwise:
                    otherwise.callback(relayed.close)
                    sight, at = await read_observed_address(relayed), relayed.getsockname()
                    otherwise.pop_all()
                self._listener.take(relayed, relay)  # the caller may stay with it
                if (met := await punch(at, sight, keep_alive)) is not None:
                    self._listener.take(met, relay)

        if not route.relay and len(self._picking_up) < _MOST_PICKED_UP:
            task = self._loop.create_task(pick_up())
            self._picking_up.add(task)
            task.add_done_callback(self._picking_up.discard)

    async def _learn_rate(
        self, member: str, link: _ProbedMember, measure: Callable[[str, DialRoutes], Awaitable[int]]
    ) -> None:
        self._unmeasured += 1
        try:
            await self._bursts.acquire()
        finally:
            self._unmeasured -= 1
        try:
            with contextlib.suppress(OSError, EOFError, TimeoutError, HandshakeFailed):  # transfers will show it
                link.mbit = await measure(member, link.routes)
        finally:
            self._is_measuring = False


class _ProbedMember:
    """One member as seen from here."""

    def __init__(self, routes: DialRoutes, answered_at_s: float) -> None:
        self.routes = routes
        self.route = ""
        """As `LinkSeen` has it; empty: there was no sign of life."""
        self.task: asyncio.Task[None] | None = None
        self.answered_at_s = answered_at_s
        self.rtt_s: float | None = None
        """The shortest round trip so far."""
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


class _Words:
    """What a member says over a line, as much at a time as a probe is long."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._begun = b""

    async def next(self) -> bytes:
        """The next word; may be given up and asked again. Raises OSError, EOFError."""
        while len(self._begun) < _PROBE_BYTES:
            try:
                part = self._connection.recv(_PROBE_BYTES - len(self._begun))
            except BlockingIOError:
                await readable(self._connection)
                continue
            if not part:
                raise EOFError
            self._begun += part
        word, self._begun = self._begun, b""
        return word
