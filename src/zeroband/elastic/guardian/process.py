"""The guardian: a small process next to the trainer that keeps the node's lease while the trainer is worth it.

A separate process, so that a stall of the trainer's interpreter costs neither the lease nor a link; bound to the
trainer by a pipe, so that the lease ends the moment the trainer is killed. It stops renewing when a local rank is
stopped (SIGSTOP, a debugger, a frozen container), ends the lease when there is no progress for `hung_s`, says which
members it does not reach, and removes the node's shared memory once trainer and launcher are gone. Knows no tensors.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from zeroband.elastic.guardian.child import START_DEADLINE_S, Child, speaks, take_order
from zeroband.elastic.guardian.link_report import BANNED_FILE, PARTNERS_FILE, LinkWriter, NamesReader
from zeroband.elastic.guardian.probes import Identity, LinkMonitor
from zeroband.elastic.guardian.rate import answer_rate, measure_rate
from zeroband.elastic.membership.keys import NodeKey, RunKey
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.reach import (
    DialRoutes,
    choose_relays,
    is_dial_out_only,
    neighbours,
    probe_routes,
    probers,
    suspects,
)
from zeroband.elastic.membership.records import Peer
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.descriptors import with_descriptors
from zeroband.elastic.transport.handover import HandedOver, Inbox, channel, hand_over
from zeroband.elastic.transport.handshake import Purpose
from zeroband.errors import ConfigError, StoreLost, ZerobandError
from zeroband.node.shared_flags import SharedFlags
from zeroband.node.shm import remove_abandoned
from zeroband.observe.log import get_logger

_LEAVE, _HOLDING, _WAITING = b"leave\n", b"holding\n", b"waiting\n"
_TICK_S = 0.1
_STAT_BYTES = 4096
_PREDECESSOR_S = 5.0
_TURN_S = 1.0
"""Pause before a member asks again whether it may measure."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class ListenAddress:
    """The node's one port: where it listens, and as what the others know it."""

    host: str
    """Address under which the other nodes reach this one."""
    port: int | None = None
    """Port under which they reach it; None: the one that it listens on."""
    bind_host: str | None = None
    """Address to listen on; None: `host`."""
    bind_port: int = 0
    """0: any that is free."""
    run_key: str = ""
    """Hexadecimal; of the handshake with other nodes. Empty: they may probe, and nothing else."""
    node_key: str = field(default="", repr=False)
    """Hexadecimal; the secret half of the node's own key."""
    is_sealed: bool = True
    """Whether what other nodes send and fetch is."""
    is_open: bool = True
    """Whether it listens at all; else it takes part through connections that it dials."""
    is_relayed: bool = False
    """Whether calls may come through other members, where they cannot come here."""
    door: str = ""
    """Unix socket of the process that already holds the port and the node's store; empty: the guardian listens."""

    @property
    def key(self) -> RunKey:
        """The keys with which the node speaks to others."""
        return RunKey(bytes.fromhex(self.run_key), NodeKey(bytes.fromhex(self.node_key)) if self.node_key else None)


@dataclass(frozen=True)
class GuardianOrder:
    """Everything that the guardian needs, handed over on its standard input: no secret stands on a command line."""

    store_url: str
    run_id: str
    member_id: str
    node_id: str
    listen: ListenAddress
    flags: str
    shm_dir: str
    rank_pids: Sequence[int]
    launcher_pid: int
    lease_s: float
    renew_s: float
    hung_s: float
    is_first: bool
    """The member holds no lease yet; a guardian that replaces another may find its member fenced."""
    store_s: float = 0.0
    """How long it may take until the store gives the lease; a first answer is awaited in any case."""
    store_port: int = 0
    """Port under which others reach the store that the node holds; 0: it holds none."""


def _start() -> tuple[Child, socket.socket]:
    """Start a guardian's process; it, and the trainer's end of the channel to it. Raises OSError."""
    theirs, ours = channel()
    with theirs, contextlib.ExitStack() as otherwise:
        otherwise.callback(ours.close)
        process = Child(__name__, str(theirs.fileno()), pass_fds=[theirs.fileno()])
        otherwise.pop_all()
    return process, ours


class Guardian:
    """The trainer's end: owns the process. One for each membership of a node; `close()` gives the lease back.

    `inbox`: gets the connections of other nodes that are the trainer's to answer; None: they are refused.
    """

    def __init__(self, order: GuardianOrder, inbox: Inbox | None = None) -> None:
        self._child, ours = with_descriptors("no guardian can be started", _start)
        if inbox is None:
            ours.close()
        else:
            inbox.attach(ours)
        self._child.give(order)
        said = last_word(self._child.output, store_s=order.store_s)
        if said != _HOLDING:
            self.close()
            if said not in (b"", _WAITING):
                raise ConfigError(said.decode().strip())
            if said:
                raise StoreLost(f"the guardian of {order.member_id} waited {order.store_s:g} s; check store.url")
            raise StoreLost(
                f"the guardian of {order.member_id} ended, or said nothing for {START_DEADLINE_S:g} s; see its log"
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def is_running(self) -> bool:
        return self._child.is_running()

    def close(self) -> None:
        """Give the lease back and end the process; at most a few seconds. Once is enough."""
        self._child.close(_LEAVE)


def last_word(output: IO[bytes], *, store_s: float) -> bytes:
    """Wait for what a new guardian says: that it holds the lease, or why it cannot. Empty: it is silent.

    Or that it waits for the store, when it has said so for this time.
    """
    end_s = time.monotonic() + store_s
    while speaks(output, START_DEADLINE_S):
        said = output.readline()
        if said != _WAITING or time.monotonic() > end_s:
            return said
    return b""


class LivenessRule:
    """Decides at each tick whether the trainer still deserves its lease. Time is an argument."""

    def __init__(self, *, hung_s: float, started_at_s: float) -> None:
        self._hung_s = hung_s
        self._progress = -1
        self._moved_at_s = started_at_s
        self.is_hung = False
        """Whether the trainer hung at the last tick."""

    def deserves_lease(self, now_s: float, *, progress: int, states: Iterable[str]) -> bool:
        """`states`: one letter for each rank as in /proc/PID/stat; T and t are stopped, Z and X are dead."""
        if progress != self._progress:
            self._progress, self._moved_at_s = progress, now_s
        self.is_hung = now_s - self._moved_at_s > self._hung_s
        return not self.is_hung and not any(state in "TtZX" for state in states)


class ProcessStates:
    """The state letters of processes as in /proc/PID/stat; X where one is gone.

    Their files stay open: a guardian that is short of descriptors must not take its trainer for dead.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._files: list[int | None] = []
        for pid in pids:
            try:
                self._files.append(os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC))
            except FileNotFoundError:
                self._files.append(None)

    def read(self) -> list[str]:
        return ["X" if file is None else self._state(file) for file in self._files]

    @staticmethod
    def _state(file: int) -> str:
        try:
            return os.pread(file, _STAT_BYTES, 0).decode(errors="replace").rpartition(")")[2].split()[0]
        except ProcessLookupError:
            return "X"

    def close(self) -> None:
        for file in self._files:
            if file is not None:
                os.close(file)
        self._files.clear()


def process_state(pid: int) -> str:
    """The state letter of a process; X where it is gone. Raises OSError where that cannot be seen."""
    with contextlib.closing(ProcessStates([pid])) as states:
        return states.read()[0]


def _take_post(order: GuardianOrder, store: RedisStore, flags: SharedFlags, calls: socket.socket) -> _Watch:
    """Raises ConfigError where the node's port stays taken: the guardian before this one may hold it for a moment."""
    end_s = time.monotonic() + _PREDECESSOR_S
    while True:
        try:
            return _Watch(order, store, flags, calls)
        except ConfigError:
            if time.monotonic() > end_s:
                raise
        time.sleep(_TICK_S)


def run_guardian(order: GuardianOrder, trainer: IO[bytes], say: IO[bytes], calls: socket.socket) -> None:
    """The guardian's whole life. Ends when the pipe to the trainer does. `calls`: takes what the trainer answers."""
    retry_s = max(1.0, order.lease_s / 2)
    key = order.listen.key if order.listen.run_key else None
    store = RedisStore(order.store_url, order.run_id, key=key, lease_s=order.lease_s, retry_s=retry_s)
    store.trust_address()  # the trainer was answered there
    flags = SharedFlags(Path(order.flags), create=False)
    try:
        watch = _take_post(order, store, flags, calls)
    except ConfigError as error:  # the trainer says it
        say.write(f"{error}\n".encode())
        say.flush()
        return
    try:
        while not watch.takes_lease():
            if speaks(trainer, 0):
                return
            say.write(_WAITING)
            say.flush()
        say.write(_HOLDING)
        say.flush()
        while not speaks(trainer, _TICK_S):
            with contextlib.suppress(ZerobandError):  # the lease runs out; the trainer finds out at its boundary
                watch.tick(time.monotonic())
        with contextlib.suppress(StoreLost):
            store.release_lease(order.member_id)
    finally:
        watch.close()
    is_clean_leave = trainer.readline() == _LEAVE
    if not is_clean_leave:
        remove_when_abandoned(order)


class _Watch:
    """Renews the lease while the trainer deserves it, and tells the store whom this node does not reach."""

    def __init__(self, order: GuardianOrder, store: RedisStore, flags: SharedFlags, calls: socket.socket) -> None:
        self._order = order
        self._store = store
        self._flags = flags
        self._ranks = ProcessStates(order.rank_pids)
        self._liveness = LivenessRule(hung_s=order.hung_s, started_at_s=time.monotonic())
        self._gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._to_expire: list[str] = []
        """Members that are gone, and of which no store was told yet."""
        self._calls = calls
        listen = order.listen
        self._identity = Identity(order.member_id, listen.key, listen.is_sealed)
        self._links = LinkMonitor(
            listen.bind_host or listen.host,
            port=listen.bind_port,
            identity=self._identity,
            take=self._pass_on,
            detect_s=order.lease_s,
            on_gone=self._gone.put,
            measure=self._measure_rate if listen.run_key else None,
            listens=listen.is_open,
            door=Path(listen.door) if listen.door else None,
        )
        self._is_dial_out_only = not listen.is_open
        self._relays: tuple[str, ...] = ()
        self._link_writer = LinkWriter(Path(order.shm_dir), order.member_id)
        self._partners = NamesReader(Path(order.shm_dir), PARTNERS_FILE)
        self._banned = NamesReader(Path(order.shm_dir), BANNED_FILE)
        self._orders = Orders()
        """What this knows of the operators' orders: which keys are banned."""
        self._members: dict[str, Peer] = {}
        self._renewed_at_s = 0.0
        self._has_ended_lease = False
        self._told: tuple[tuple[str, ...], ...] = ()
        """What was last told of the links: members that are cut off, doubted, not dialled, and the own lines."""
        self._known_partners: frozenset[str] | None = None
        self._has_neighbours = False
        """Whether it probes some of the members only."""
        self._is_measuring = False
        self._asks_again_s = 0.0

    def takes_lease(self) -> bool:
        """Try to take the lease for the first time; False while the store is out of reach."""
        try:
            self.renew(is_first=self._order.is_first)
        except StoreLost:
            return False
        return True

    def tick(self, now_s: float) -> None:
        """Look at everything once. Raises StoreLost."""
        self._link_writer.tell(self._links.seen(), now_s)
        self._obey_bans()
        states = self._ranks.read()
        deserves_lease = self._liveness.deserves_lease(now_s, progress=self._flags.progress, states=states)
        is_due = now_s - self._renewed_at_s >= self._order.renew_s
        if deserves_lease and (is_due or self._reached() != self._told):
            self.renew()
        elif self._liveness.is_hung and not self._has_ended_lease:  # if all hang at once, no lease would run out
            self._store.expire_lease(self._order.member_id)
            self._has_ended_lease = True
            _log.warning(f"the trainer made no progress for {self._order.hung_s:g} s (fault.hung_s); lease ended")
        while not self._gone.empty():
            self._to_expire.append(self._gone.get())
        while self._to_expire:  # where the store went with that member, the next store is told
            self._store.expire_lease(self._to_expire[0])
            del self._to_expire[0]
        if self._partners.names() != self._known_partners:
            self._probe()
        self._take_turns_at_measuring(now_s)

    def renew(self, *, is_first: bool = False) -> None:
        """Keep the lease; a refusal goes to the node's flags. Raises StoreLost."""
        self._told = self._reached()
        order = self._order
        port = order.listen.port or self._links.port
        peer = Peer(
            order.node_id, order.listen.host, port, self._flags.serves_state, *self._told, store_port=order.store_port
        )
        if self._store.session != self._flags.session:
            self._store.session = self._flags.session
        if not self._is_at_store():
            raise StoreLost("the trainer is on its way to another store")
        listed_version = self._flags.listed_version
        members = self._store.renew_lease(order.member_id, peer, first=is_first, listed_version=listed_version)
        self._renewed_at_s, self._has_ended_lease = time.monotonic(), False
        if members is None:
            self._flags.set_fenced(True)
            return
        self._members = {member: peer for member, peer in members.items() if not self._orders.bans(member)}
        self._probe()

    def _obey_bans(self) -> None:
        """Shut out the keys that are banned by now."""
        banned = tuple(sorted(self._banned.names() or ()))
        if banned != self._orders.banned:
            self._orders = Orders(banned=banned)
            self._links.ban(self._orders.bans)
            self._members = {member: peer for member, peer in self._members.items() if not self._orders.bans(member)}
            self._probe()

    def _reached(self) -> tuple[tuple[str, ...], ...]:
        """What is to be told of the links, in the order of `Peer`.

        Members that are cut off; those that others are to ask too, where not everybody asks everybody anyhow; those
        that can only dial out; and, if this is such a one, through whom it is called.
        """
        links = self._links
        self._is_dial_out_only = self._is_dial_out_only or is_dial_out_only(self._order.member_id, self._members)
        if self._is_dial_out_only and self._order.listen.is_relayed:
            self._relays = choose_relays(self._order.member_id, self._relays, links.dialled(), self._members)
        doubted = links.doubted() if self._has_neighbours else ()
        return links.cut_off(), doubted, links.undialled(), self._relays

    def _is_at_store(self) -> bool:
        """Whether this is at the store of the trainer, of several, or has gone there now."""
        store, number = self._store, self._flags.generation
        if store.has_several and (store.generation is None or store.generation.number < number):
            store.follow()
        return not store.has_several or (store.generation is not None and store.generation.number >= number)

    def _probe(self) -> None:
        """Have the neighbours probed, those with whom the trainer exchanges bytes, and whom somebody doubts."""
        own, members, partners = self._order.member_id, self._members, self._partners.names()
        near, doubted = neighbours(own, members), suspects(members)
        if self._is_dial_out_only:  # they cannot dial: they hear
            near |= probers(own, members)
        self._known_partners, self._has_neighbours = partners, len(near) < len(members.keys() - {own})
        wanted = members.keys() if partners is None else {*near, *partners, *doubted, *self._relays}
        routes = {
            m: probe_routes(own, m, members, is_own_dial_out_only=bool(self._relays)) for m in wanted if m in members
        }
        routes.pop(own, None)
        self._links.watch(routes, silent_s=dict.fromkeys(doubted, self._links.doubt_s + self._order.renew_s))

    def _take_turns_at_measuring(self, now_s: float) -> None:
        """Measure a link if it is this member's turn. Raises StoreLost."""
        if self._is_measuring and not self._links.is_measuring:
            self._store.has_measured(self._order.member_id)
            self._is_measuring = False
        if self._links.wants_to_measure and now_s >= self._asks_again_s:
            self._asks_again_s = now_s + random.uniform(0.5, 1.5) * _TURN_S
            if self._store.may_measure(self._order.member_id):
                self._is_measuring, self._asks_again_s = True, now_s
                self._links.let_measure()

    async def _pass_on(self, connection: socket.socket, what: HandedOver) -> None:
        """Give the trainer a connection of which the other end is a node of this run."""
        if not self._order.listen.run_key:
            return
        if what.kind == Purpose.RATE:
            await answer_rate(connection)
        elif not hand_over(self._calls, connection, what):
            _log.warning(f"a connection of {what.caller} ({what.kind}) is hung up on: the trainer takes none now")

    async def _measure_rate(self, member: str, routes: DialRoutes) -> int:
        return await measure_rate(self._identity.key, self._identity.introduction(member, Purpose.RATE), routes)

    def close(self) -> None:
        self._links.close()
        self._ranks.close()


def remove_when_abandoned(order: GuardianOrder, *, deadline_s: float = 10.0) -> None:
    """Remove the node's shared memory if its launcher is gone too; a living launcher restarts the trainer on it."""
    folder, end = Path(order.shm_dir), time.monotonic() + deadline_s
    while time.monotonic() < end and folder.exists():
        pids = (*order.rank_pids, order.launcher_pid)
        is_gone = all(process_state(pid) in "ZX" for pid in pids)
        if is_gone and remove_abandoned(folder):  # its threads may hold the lock for a moment more
            return
        time.sleep(0.1)


def main() -> None:
    """The guardian process: takes its order from standard input and stands guard."""
    record, trainer = take_order()
    order = GuardianOrder(listen=ListenAddress(**record.pop("listen")), **record)
    calls = socket.socket(fileno=int(sys.argv[1]))
    calls.setblocking(False)
    run_guardian(order, trainer, sys.stdout.buffer, calls)


if __name__ == "__main__":
    main()
