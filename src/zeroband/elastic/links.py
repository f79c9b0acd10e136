"""Links: whether this node and each other member reach one another, apart from whether both reach the store.

Every guardian answers probes and sends them, a few bytes at a time over one TCP connection to each member, and holds
the node's one port, on which all other connections come in too. Runs an event loop in one thread of the guardian, so
that a stall of the trainer's interpreter cuts no link. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping

from zeroband.errors import HandshakeFailed
from zeroband.plane.calling import Address
from zeroband.plane.port import PROBE_CALL, Answer, Port

_PROBE_BYTES = 8
_MAX_ASKERS = 256
_START_DEADLINE_S = 10.0


class LinkMonitor:
    """Answers the other guardians' probes and sends its own. `close()` ends its thread.

    `host` and `port`: where to listen; port 0 takes a free one. `answers`: to calls that are no probes. `detect_s`: a
    member that answers nothing for so long is cut off. `on_gone`: called in the monitor's thread with a member whose
    connection was closed by its own machine and that refuses another one: its guardian has ended. `measure`: finds out
    what the link to a member carries, in Mbit/s; asked once for each member that answers, one after the other.
    Raises OSError when it cannot listen.
    """

    def __init__(
        self,
        host: str,
        *,
        detect_s: float,
        on_gone: Callable[[str], None],
        port: int = 0,
        answers: Mapping[bytes, Answer] | None = None,
        measure: Callable[[str, Address], Awaitable[int]] | None = None,
    ) -> None:
        self._detect_s = detect_s
        self._probe_s = min(0.5, detect_s / 5)
        self._on_gone = on_gone
        self._links: dict[str, _Link] = {}
        self._measure = measure
        self._askers: set[asyncio.StreamWriter] = set()
        self._door = Port({PROBE_CALL: self._answer, **(answers or {})})
        self._beat_at_s = time.monotonic()
        self._bursts = asyncio.Lock()
        """One at a time, so that they do not slow one another."""
        self._loop = asyncio.new_event_loop()
        self._is_listening = threading.Event()
        self.port = 0
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._run, args=(host, port), name="links", daemon=True)
        self._thread.start()
        self._is_listening.wait(_START_DEADLINE_S)
        if self._problem is not None:
            raise self._problem

    def watch(self, members: Mapping[str, Address]) -> None:
        """Probe exactly these members from now on."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._set_members, dict(members))

    def cut_off(self) -> tuple[str, ...]:
        """Members that did not answer for `detect_s`, in the order of their ids."""
        now_s, links = time.monotonic(), dict(self._links)
        if now_s - self._beat_at_s > self._detect_s / 2:  # this process was stopped, not all the others
            return ()
        return tuple(sorted(m for m, link in links.items() if now_s - link.answered_at_s > self._detect_s))

    def rates(self) -> dict[str, int]:
        """Mbit/s to the members whose link was measured."""
        return {member: link.mbit for member, link in dict(self._links).items() if link.mbit}

    def longest_rtt_ms(self) -> int:
        """To the farthest member that answered, at least 1; 0: nobody did."""
        known = [link.rtt_s for link in dict(self._links).values() if link.rtt_s is not None]
        return max(1, round(max(known) * 1e3)) if known else 0

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
        self.port = self._door.open(host, port)

    async def _hang_up(self) -> None:
        """Close all connections, so that those who ask learn at once that nobody answers any more."""
        self._door.close()
        for writer in list(self._askers):
            writer.transport.abort()
        for link in self._links.values():
            link.task.cancel()
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
            await asyncio.sleep(self._probe_s / 2)

    async def _answer(self, connection: socket.socket) -> None:
        if len(self._askers) >= _MAX_ASKERS:
            return
        reader, writer = await asyncio.open_connection(sock=connection.dup())
        self._askers.add(writer)
        try:
            await reader.readexactly(len(PROBE_CALL))
            while True:
                writer.write(await reader.readexactly(_PROBE_BYTES))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._askers.discard(writer)
            writer.close()

    def _set_members(self, members: Mapping[str, Address]) -> None:
        for member in [m for m, link in self._links.items() if members.get(m) != link.address]:
            self._links.pop(member).task.cancel()
        for member, address in members.items():
            if member not in self._links:
                self._links[member] = _Link(address, self._loop.create_task(self._probe(member, address)))

    async def _probe(self, member: str, address: Address) -> None:
        has_ended = False
        while True:
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(*address), self._detect_s)
            except ConnectionRefusedError:
                if has_ended:
                    self._on_gone(member)
                    has_ended = False
            except (OSError, TimeoutError):
                pass
            else:
                has_ended = await self._ask(member, reader, writer)
                writer.close()
                if has_ended:
                    continue  # dial again at once: a machine that is only cut off does not refuse
            await asyncio.sleep(self._probe_s)

    async def _ask(self, member: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Probe until the connection breaks. True: its other end closed it."""
        writer.write(PROBE_CALL)
        try:
            while True:
                probe, asked_at_s = os.urandom(_PROBE_BYTES), time.monotonic()
                writer.write(probe)
                if await asyncio.wait_for(reader.readexactly(_PROBE_BYTES), self._detect_s) != probe:
                    return False
                link = self._links[member]
                link.answered(asked_at_s)
                if self._measure is not None and link.measuring is None:
                    link.measuring = asyncio.create_task(self._learn_rate(member, link, self._measure))
                await asyncio.sleep(self._probe_s)
        except (ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError):
            return True
        except (OSError, TimeoutError):
            return False

    async def _learn_rate(self, member: str, link: _Link, measure: Callable[[str, Address], Awaitable[int]]) -> None:
        async with self._bursts:
            with contextlib.suppress(OSError, EOFError, TimeoutError, HandshakeFailed):  # transfers will show it
                link.mbit = await measure(member, link.address)


class _Link:
    """One member as seen from here."""

    def __init__(self, address: Address, task: asyncio.Task[None]) -> None:
        self.address = address
        self.task = task
        self.answered_at_s = time.monotonic()
        self.rtt_s: float | None = None
        """The shortest round trip so far."""
        self.mbit = 0
        """0: not measured."""
        self.measuring: asyncio.Task[None] | None = None

    def answered(self, asked_at_s: float) -> None:
        self.answered_at_s = time.monotonic()
        took_s = self.answered_at_s - asked_at_s
        self.rtt_s = took_s if self.rtt_s is None else min(self.rtt_s, took_s)
