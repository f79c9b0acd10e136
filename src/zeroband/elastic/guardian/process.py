"""The guardian process: renews the node's lease while the trainer is alive and makes progress.

A separate process, so that a stall of the trainer's interpreter costs neither the lease nor a link; bound to the
trainer by a pipe, so that the lease ends as soon as the trainer is killed. It stops renewing when a local rank is
stopped (SIGSTOP, a debugger, a frozen container), ends the lease after `hung_s` without progress, publishes the members
that it cannot reach, and removes the node's shared memory once trainer and launcher are gone. Loads no torch.
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

from zeroband.elastic.guardian.child import START_DEADLINE_S, Child, is_readable, read_order
from zeroband.elastic.guardian.link_report import BANNED_FILE, PARTNERS_FILE, LinkWriter, NamesFile
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
from zeroband.observe.process_stat import fields_of

_LEAVE, _HOLDING, _WAITING = b"leave\n", b"holding\n", b"waiting\n"
_TICK_S = 0.1
_STAT_BYTES = 4096
_PREDECESSOR_S = 5.0
_MEASURING_PAUSE_S = 1.0
"""Pause before another attempt to acquire a slot for measuring."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class ListenAddress:
    """The node's port: where it listens, and the address that other nodes dial."""

    host: str
    """Address that other nodes dial."""
    port: int | None = None
    """Port that they dial; None: the one that it listens on."""
    bind_host: str | None = None
    """Address to listen on; None: `host`."""
    bind_port: int = 0
    """0: any free port."""
    run_key: str = ""
    """Key of the handshake in hexadecimal. Empty: other nodes may only probe."""
    node_key: str = field(default="", repr=False)
    """The node's private key in hexadecimal."""
    is_sealed: bool = True
    """Whether data between nodes is encrypted."""
    is_open: bool = True
    """Whether the node listens; False: it only dials out."""
    is_relayed: bool = False
    """Whether members may relay calls that cannot reach this node."""
    handover_socket: str = ""
    """Unix socket of the process that holds the port and the node's store; empty: the guardian listens."""

    @property
    def key(self) -> RunKey:
        return RunKey(bytes.fromhex(self.run_key), NodeKey(bytes.fromhex(self.node_key)) if self.node_key else None)


@dataclass(frozen=True)
class GuardianOrder:
    """The guardian's settings, sent on its standard input, since a command line is visible to every user."""

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
    """The member has no lease yet. A guardian that replaces another one may find its member fenced."""
    store_s: float = 0.0
    """Time within which the store must grant the lease; there is at least one attempt."""
    store_port: int = 0
    """Port of the node's store; 0: it has none."""


class Guardian(Child):
    """The trainer's end: owns the process. One per membership; `close()` releases the lease.

    `inbox`: gets other nodes' connections that the trainer answers; None: they are refused. Raises ConfigError,
    StoreLost, OSError.
    """

    def __init__(self, order: GuardianOrder, inbox: Inbox | None = None) -> None:
        ours = with_descriptors("no guardian can be started", self._start)
        if inbox is None:
            ours.close()
        else:
            inbox.attach(ours)
        self.send_order(order)
        outcome = await_lease(self.output, store_s=order.store_s)
        if outcome != _HOLDING:
            self.close()
            if outcome not in (b"", _WAITING):
                raise ConfigError(outcome.decode().strip())
            if outcome:
                raise StoreLost(f"the guardian of {order.member_id} waited {order.store_s:g} s; check store.url")
            raise StoreLost(
                f"the guardian of {order.member_id} ended, or said nothing for {START_DEADLINE_S:g} s; see its log"
            )

    def _start(self) -> socket.socket:
        """Start the process. Returns the trainer's end of the channel. Raises OSError; may then be called again."""
        theirs, ours = channel()
        with theirs, contextlib.ExitStack() as otherwise:
            otherwise.callback(ours.close)
            super().__init__(__name__, str(theirs.fileno()), pass_fds=[theirs.fileno()])
            otherwise.pop_all()
        return ours

    def close(self, last_line: bytes = _LEAVE) -> None:
        """Release the lease and end the process within a few seconds; idempotent."""
        super().close(last_line)


def await_lease(output: IO[bytes], *, store_s: float) -> bytes:
    """Wait until a new guardian reports that it holds the lease, an error, or after `store_s` that it still waits.

    Empty: it is silent.
    """
    end_s = time.monotonic() + store_s
    while is_readable(output, START_DEADLINE_S):
        line = output.readline()
        if line != _WAITING or time.monotonic() > end_s:
            return line
    return b""


class LivenessRule:
    """Decides at each tick whether the lease may be renewed. Time is an argument."""

    def __init__(self, *, hung_s: float, started_at_s: float) -> None:
        self._hung_s = hung_s
        self._progress = -1
        self._moved_at_s = started_at_s
        self.is_hung = False
        """Whether there was no progress for `hung_s` at the last tick."""

    def may_renew(self, now_s: float, *, progress: int, states: Iterable[str]) -> bool:
        """`states`: of each rank as in /proc/PID/stat; T and t are stopped, Z and X are dead."""
        if progress != self._progress:
            self._progress, self._moved_at_s = progress, now_s
        self.is_hung = now_s - self._moved_at_s > self._hung_s
        return not self.is_hung and not any(state in "TtZX" for state in states)


class ProcessStates:
    """State letters of processes as in /proc/PID/stat; X if one is gone.

    Keeps the files open, so that a guardian without free descriptors does not take its trainer for dead.
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
            return fields_of(os.pread(file, _STAT_BYTES, 0).decode(errors="replace"))[0]
        except ProcessLookupError:
            return "X"

    def close(self) -> None:
        for file in self._files:
            if file is not None:
                os.close(file)
        self._files.clear()


def process_state(pid: int) -> str:
    """Return the state letter of a process; X if it is gone. Raises OSError if it cannot be read."""
    with contextlib.closing(ProcessStates([pid])) as states:
        return states.read()[0]


def _open_keeper(order: GuardianOrder, store: RedisStore, flags: SharedFlags, calls: socket.socket) -> _LeaseKeeper:
    """Retry while the previous guardian still holds the node's port. Raises ConfigError."""
    end_s = time.monotonic() + _PREDECESSOR_S
    while True:
        try:
            return _LeaseKeeper(order, store, flags, calls)
        except ConfigError:
            if time.monotonic() > end_s:
                raise
        time.sleep(_TICK_S)


def run_guardian(order: GuardianOrder, trainer: IO[bytes], output: IO[bytes], calls: socket.socket) -> None:
    """Run until the pipe from the trainer closes. `calls`: channel for the connections that the trainer answers."""
    retry_s = max(1.0, order.lease_s / 2)
    key = order.listen.key if order.listen.run_key else None
    store = RedisStore(order.store_url, order.run_id, key=key, lease_s=order.lease_s, retry_s=retry_s)
    store.trust_address()  # the trainer has used it
    flags = SharedFlags(Path(order.flags), create=False)

    def report(line: bytes) -> None:
        output.write(line)
        output.flush()

    try:
        keeper = _open_keeper(order, store, flags, calls)
    except ConfigError as error:
        report(f"{error}\n".encode())
        return
    try:
        while not keeper.acquire_lease():
            if is_readable(trainer, 0):
                return
            report(_WAITING)
        report(_HOLDING)
        while not is_readable(trainer, _TICK_S):
            with contextlib.suppress(ZerobandError):  # the lease expires; the trainer notices at its boundary
                keeper.tick(time.monotonic())
        with contextlib.suppress(StoreLost):
            store.release_lease(order.member_id)
    finally:
        keeper.close()
    is_clean_leave = trainer.readline() == _LEAVE
    if not is_clean_leave:
        remove_when_abandoned(order)


class _LeaseKeeper:
    """Renews the lease while the trainer makes progress, and publishes the members that this node cannot reach."""

    def __init__(self, order: GuardianOrder, store: RedisStore, flags: SharedFlags, calls: socket.socket) -> None:
        self._order = order
        self._store = store
        self._flags = flags
        self._ranks = ProcessStates(order.rank_pids)
        self._liveness = LivenessRule(hung_s=order.hung_s, started_at_s=time.monotonic())
        self._gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._to_expire: list[str] = []
        """Members that are gone and whose leases are not ended yet."""
        self._calls = calls
        listen = order.listen
        self._identity = Identity(order.member_id, listen.key, listen.is_sealed)
        self._links = LinkMonitor(
            listen.bind_host or listen.host,
            port=listen.bind_port,
            identity=self._identity,
            take=self._take,
            detect_s=order.lease_s,
            on_gone=self._gone.put,
            measure=self._measure_rate if listen.run_key else None,
            listens=listen.is_open,
            handover_socket=Path(listen.handover_socket) if listen.handover_socket else None,
        )
        self._is_dial_out_only = not listen.is_open
        self._relays: tuple[str, ...] = ()
        self._link_writer = LinkWriter(Path(order.shm_dir), order.member_id)
        self._partners = NamesFile(Path(order.shm_dir), PARTNERS_FILE)
        self._banned = NamesFile(Path(order.shm_dir), BANNED_FILE)
        self._orders = Orders()
        """Only the banned keys."""
        self._members: dict[str, Peer] = {}
        self._renewed_at_s = 0.0
        self._has_ended_lease = False
        self._published: tuple[tuple[str, ...], ...] = ()
        """The reachability published last, as `_reachability` returns it."""
        self._known_partners: frozenset[str] | None = None
        self._probes_some = False
        """Whether it probes only some of the members."""
        self._is_measuring = False
        self._acquire_at_s = 0.0

    def acquire_lease(self) -> bool:
        """Try to acquire the lease; False while the store is unreachable."""
        try:
            self.renew(is_first=self._order.is_first)
        except StoreLost:
            return False
        return True

    def tick(self, now_s: float) -> None:
        """Check everything once. Raises StoreLost."""
        self._link_writer.write(self._links.seen(), now_s)
        self._apply_bans()
        states = self._ranks.read()
        may_renew = self._liveness.may_renew(now_s, progress=self._flags.progress, states=states)
        is_due = now_s - self._renewed_at_s >= self._order.renew_s
        if may_renew and (is_due or self._reachability() != self._published):
            self.renew()
        elif self._liveness.is_hung and not self._has_ended_lease:  # if all hang, none renews and no lease expires
            self._store.expire_lease(self._order.member_id)
            self._has_ended_lease = True
            _log.warning(f"the trainer made no progress for {self._order.hung_s:g} s (fault.hung_s); lease ended")
        while not self._gone.empty():
            self._to_expire.append(self._gone.get())
        while self._to_expire:  # kept until it succeeds: the member may have held the store
            self._store.expire_lease(self._to_expire[0])
            del self._to_expire[0]
        if self._partners.read() != self._known_partners:
            self._update_probes()
        self._measure_in_turn(now_s)

    def renew(self, *, is_first: bool = False) -> None:
        """Renew the lease; a refusal sets the node's `fenced` flag. Raises StoreLost."""
        self._published = self._reachability()
        order, serves_state = self._order, self._flags.serves_state
        port = order.listen.port or self._links.port
        peer = Peer(order.node_id, order.listen.host, port, serves_state, *self._published, store_port=order.store_port)
        if self._store.session != self._flags.session:
            self._store.session = self._flags.session
        if not self._follow_trainer():
            raise StoreLost("the trainer is switching to another store")
        listed_version = self._flags.listed_version
        members = self._store.renew_lease(order.member_id, peer, first=is_first, listed_version=listed_version)
        self._renewed_at_s, self._has_ended_lease = time.monotonic(), False
        if members is None:
            self._flags.set_fenced(True)
            return
        self._members = {member: peer for member, peer in members.items() if not self._orders.bans(member)}
        self._update_probes()

    def _apply_bans(self) -> None:
        """Shut out newly banned keys."""
        banned = tuple(sorted(self._banned.read() or ()))
        if banned != self._orders.banned:
            self._orders = Orders(banned=banned)
            self._links.ban(self._orders.bans)
            self._members = {member: peer for member, peer in self._members.items() if not self._orders.bans(member)}
            self._update_probes()

    def _reachability(self) -> tuple[tuple[str, ...], ...]:
        """What this node publishes of its links, in the order of `Peer`.

        Members that are cut off; those that others should probe too, unless all probe all; those that can only dial
        out; and the relays of this node, if it can only dial out.
        """
        links = self._links
        self._is_dial_out_only = self._is_dial_out_only or is_dial_out_only(self._order.member_id, self._members)
        if self._is_dial_out_only and self._order.listen.is_relayed:
            self._relays = choose_relays(self._order.member_id, self._relays, links.dialled(), self._members)
        doubted = links.doubted() if self._probes_some else ()
        return links.cut_off(), doubted, links.undialled(), self._relays

    def _follow_trainer(self) -> bool:
        """With several stores, switch to the trainer's. Returns whether this is at the trainer's store."""
        store, number = self._store, self._flags.generation
        if store.has_several and (store.generation is None or store.generation.number < number):
            store.follow()
        return not store.has_several or (store.generation is not None and store.generation.number >= number)

    def _update_probes(self) -> None:
        """Probe the neighbours, the trainer's partners of exchange, and members that others doubt."""
        own, members, partners = self._order.member_id, self._members, self._partners.read()
        near, doubted = neighbours(own, members), suspects(members)
        if self._is_dial_out_only:  # its probers cannot dial it, so they wait for its probes
            near |= probers(own, members)
        self._known_partners, self._probes_some = partners, len(near) < len(members.keys() - {own})
        wanted = members.keys() if partners is None else {*near, *partners, *doubted, *self._relays}
        routes = {
            m: probe_routes(own, m, members, is_own_dial_out_only=bool(self._relays)) for m in wanted if m in members
        }
        routes.pop(own, None)
        self._links.watch(routes, silent_s=dict.fromkeys(doubted, self._links.doubt_s + self._order.renew_s))

    def _measure_in_turn(self, now_s: float) -> None:
        """Measure a link if the run has a free slot. Raises StoreLost."""
        if self._is_measuring and not self._links.is_measuring:
            self._store.release_measuring(self._order.member_id)
            self._is_measuring = False
        if self._links.wants_to_measure and now_s >= self._acquire_at_s:
            self._acquire_at_s = now_s + random.uniform(0.5, 1.5) * _MEASURING_PAUSE_S
            if self._store.acquire_measuring(self._order.member_id):
                self._is_measuring, self._acquire_at_s = True, now_s
                self._links.start_measuring()

    async def _take(self, connection: socket.socket, what: HandedOver) -> None:
        """Answer a burst, or hand another node's connection to the trainer."""
        if not self._order.listen.run_key:
            return
        if what.kind == Purpose.RATE:
            await answer_rate(connection)
        elif not hand_over(self._calls, connection, what):
            _log.warning(f"a connection of {what.caller} ({what.kind}) is closed: the trainer accepts none now")

    async def _measure_rate(self, member: str, routes: DialRoutes) -> int:
        return await measure_rate(self._identity.key, self._identity.introduction(member, Purpose.RATE), routes)

    def close(self) -> None:
        self._links.close()
        self._ranks.close()


def remove_when_abandoned(order: GuardianOrder, *, deadline_s: float = 10.0) -> None:
    """Remove the node's shared memory if its launcher is gone too; a living one restarts the trainer with it."""
    folder, end = Path(order.shm_dir), time.monotonic() + deadline_s
    while time.monotonic() < end and folder.exists():
        pids = (*order.rank_pids, order.launcher_pid)
        is_gone = all(process_state(pid) in "ZX" for pid in pids)
        if is_gone and remove_abandoned(folder):  # threads may hold the lock for a moment longer
            return
        time.sleep(0.1)


def main() -> None:
    """Entry point of the guardian process."""
    record, trainer = read_order()
    order = GuardianOrder(listen=ListenAddress(**record.pop("listen")), **record)
    calls = socket.socket(fileno=int(sys.argv[1]))
    calls.setblocking(False)
    run_guardian(order, trainer, sys.stdout.buffer, calls)
