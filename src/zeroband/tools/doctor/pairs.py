"""Measures the links between all pairs of nodes, each node with one partner at a time.

The nodes meet in the store under a separate run id, and use the port, handshake and data path of a run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from zeroband.elastic.guardian.probes import Identity, LinkMonitor
from zeroband.elastic.guardian.process import ListenAddress
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import choose_relays, dials, is_dial_out_only, probe_routes, routes_to
from zeroband.elastic.membership.records import Peer
from zeroband.elastic.rounds.member import new_member_id
from zeroband.elastic.store.interface import Store
from zeroband.elastic.transport.engine import Engine, Operation, State
from zeroband.elastic.transport.handover import HandedOver, Inbox, channel, hand_over
from zeroband.elastic.transport.handshake import Purpose
from zeroband.elastic.transport.links import Links, LinkTarget
from zeroband.elastic.transport.shape import shape_of
from zeroband.kernels.codec import CODECS

LEASE_S = 3.0
_RENEW_S = 0.5
_LONG_ENOUGH_S = 1.0
_SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 26)
"""Numbers of exchanged values, increasing until a transfer takes long enough."""

_STEPS = 2 * len(_SIZES) + 1
"""Reductions per turn: one to synchronise, then for each size a timed one and one of the times."""
_STREAMS = 8
_CONNECT_S, _PAIR_S, _ANSWER_S = 10.0, 60.0, 2.0
_RUN = 1

MET = "met"
"""Hole punching: both ends dial at the same time, and no data passes the relay."""


@dataclass(frozen=True)
class PairFinding:
    """The link between this node and another one. Rates are None without a transfer."""

    other: str
    address: str
    we_reach_it: bool
    it_reaches_us: bool
    rtt_ms: float | None = None
    mbit: float | None = None
    """Mbit/s of payload, in each direction at the same time."""
    way: str = "direct"
    """How the two are connected: as in `LinkSeen`, or MET."""

    @property
    def way_taken(self) -> str:
        """Description of the connection."""
        if not (self.we_reach_it and self.it_reaches_us):
            return "cut off"
        said = {"direct": "direct", "reversed": "reversed: it dials this node", MET: "direct: both dial at once"}
        return said.get(self.way, f"through {self.way}")

    @property
    def advice(self) -> str:
        if not self.we_reach_it:
            return (
                f"{self.address} does not answer: open its port, or set node.advertise_host and node.port there, or "
                "add a node that both can dial"
            )
        if not self.it_reaches_us:
            return "it cannot reach this node: open node.port here, or set node.advertise_host and advertise_port"
        if self.mbit is None:
            return "it answers, but the transfer failed: are run.token and comm.encryption the same?"
        return ""


class PairExamination:
    """Measures the nodes that run `doctor` together. Use as a context; raises StoreLost, ConfigError."""

    def __init__(self, store: Store, node_id: str, listen: ListenAddress, key: RunKey, *, is_sealed: bool) -> None:
        self.member_id = new_member_id(node_id)  # unique, so that machines with the same name see each other
        self._node_id = node_id
        self._store = store
        self._listen = listen
        guardian, trainer = channel()
        self._calls = guardian
        self._links = Links(Engine(threads=1), key, is_sealed)
        self._inbox = Inbox({Purpose.DATA: self._links.accept})
        self._inbox.attach(trainer)

        async def pass_on(connection: socket.socket, what: HandedOver) -> None:
            hand_over(guardian, connection, what)

        self._monitor = LinkMonitor(
            listen.bind_host or listen.host,
            port=listen.bind_port,
            identity=Identity(self.member_id, key, is_sealed),
            take=pass_on,
            detect_s=LEASE_S,
            on_gone=lambda member: None,
            listens=listen.is_open,
            handover_socket=Path(listen.handover_socket) if listen.handover_socket else None,
        )
        self._is_first = True
        self._is_dial_out_only, self._relays = not listen.is_open, ()
        self._peers: dict[str, Peer] = {}

    def __enter__(self) -> PairExamination:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.release_lease(self.member_id)
        self._monitor.close()
        self._inbox.close()
        self._links.close()
        self._links.engine.close()
        self._calls.close()

    @property
    def port(self) -> int:
        return self._listen.port or self._monitor.port

    def look(self) -> dict[str, Peer]:
        """Renew this node's lease. Returns all nodes."""
        own, monitor = self.member_id, self._monitor
        self._is_dial_out_only = self._is_dial_out_only or is_dial_out_only(own, self._peers)
        if self._is_dial_out_only and self._listen.is_relayed:
            self._relays = choose_relays(own, self._relays, monitor.dialled(), self._peers)
        seen = monitor.cut_off(), (), monitor.undialled(), self._relays
        peer = Peer(self._node_id, self._listen.host, self.port, False, *seen)
        peers = self._peers = self._store.renew_lease(own, peer, first=self._is_first) or {}
        self._is_first = False
        others = [m for m in peers if m != own]
        monitor.watch({m: probe_routes(own, m, peers, is_own_dial_out_only=bool(self._relays)) for m in others})
        return peers

    def gather(self, nodes: int, wait_s: float) -> dict[str, Peer]:
        """Wait for this number of nodes, at most `wait_s`."""
        end_s = time.monotonic() + wait_s
        while len(peers := self.look()) < nodes and time.monotonic() < end_s:
            time.sleep(_RENEW_S)
        return peers

    def probe(self) -> dict[str, Peer]:
        """Give the probes time to find unreachable nodes."""
        end_s = time.monotonic() + 3 * LEASE_S
        while time.monotonic() < end_s:
            self.look()
            time.sleep(_RENEW_S)
        return self.look()

    def namesakes(self, peers: Mapping[str, Peer]) -> list[str]:
        """Return the members with this node's name, including itself, in the same order on each of them."""
        return sorted(member for member, peer in peers.items() if peer.node_id == self._node_id)

    def measure(self, peers: Mapping[str, Peer]) -> list[PairFinding]:
        """Exchange data with every other node in turn, all in the same order."""
        own, dial_out_only = self.member_id, {m for m, peer in peers.items() if peer.relays}
        ways = {m: routes_to(own, m, peers) for m in peers if m != own}
        cut_off, seen = peers[own].cut_off, self._monitor.seen()
        at = {m: (peer.host, peer.port) for m, peer in peers.items()}
        refused = {m for m in cut_off if m in ways and _takes_connections(at[m])}  # reachable, for example wrong token
        wanted = {m: LinkTarget(ways[m], _STREAMS, dials(own, m, dial_out_only)) for m in ways}
        self._links.connect(own, wanted, _after(_CONNECT_S))
        findings: list[PairFinding] = []
        for turn, other in partners(sorted(peers), self.member_id):
            peer = peers[other]
            is_cut, is_refused = other in cut_off, other in refused
            reached = is_refused or not is_cut, is_refused or self.member_id not in peer.cut_off
            mbit = self._exchange(turn, other) if self._links.state(other).is_up else None
            rtt_ms = None if mbit is None else 1e3 * self._links.state(other).rtt_s
            way = seen[other].way if other in seen else "direct"
            if way in peers and mbit is not None and not self._links.hosts(other) & _addresses_of(peers[way].host):
                way = MET
            elif way in peers:
                way = peers[way].node_id
            findings.append(PairFinding(peer.node_id, f"{peer.host}:{peer.port}", *reached, rtt_ms, mbit, way))
            self.look()
        return findings

    def _exchange(self, turn: int, other: str) -> float | None:
        """Return Mbit/s in each direction; None if the transfer failed."""
        mbit: float | None = None
        first = _STEPS * turn
        if self._average(first, other, torch.zeros(1)) is None:  # synchronise: the partner's last turn may take longer
            return None
        for number, numel in zip(range(first + 1, first + _STEPS, 2), _SIZES, strict=True):
            exchanged = self._average(number, other, torch.zeros(numel))
            if exchanged is None:
                break
            agreed = self._average(number + 1, other, torch.tensor([exchanged[1]]))
            if agreed is None:
                break
            mean_s = float(agreed[0][0])
            mbit = CODECS["fp32"].encoded_size(numel) * 8 / mean_s / 1e6
            if mean_s > _LONG_ENOUGH_S:
                break
        return mbit

    def _average(self, number: int, other: str, values: Tensor) -> tuple[Tensor, float] | None:
        """Return the mean of both nodes' values and its duration; both count `number` alike."""
        pair, result, is_over = sorted((self.member_id, other)), torch.zeros_like(values), _after(_PAIR_S)
        shape = shape_of(values.numel(), CODECS["fp32"], [0.5, 0.5])
        numbers = [self._links.number(member) for member in pair]
        operation = Operation(_RUN, number + 1 << 16, 1, number)
        began_at_s = time.monotonic()
        reduction = self._links.engine.start(operation, shape, pair.index(self.member_id), numbers, values, result)
        try:
            while reduction.wait(0.1) == State.RUNNING and not is_over():
                pass
            if reduction.wait(0) != State.DONE:
                return None
            return result, time.monotonic() - began_at_s
        finally:
            reduction.close()


def partners(members: Sequence[str], own: str) -> list[tuple[int, str]]:
    """Return this node's turns and partners in a round-robin schedule."""
    seats: list[str | None] = [*members, *([None] if len(members) % 2 else [])]
    order: list[tuple[int, str]] = []
    for turn in range(len(seats) - 1):
        circle = [seats[0], *seats[1 + turn :], *seats[1 : 1 + turn]]
        for a, b in zip(circle, reversed(circle), strict=True):
            if a == own and b is not None:
                order.append((turn, b))
    return order


def _addresses_of(host: str) -> set[str]:
    try:
        return {str(at[0]) for *_, at in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _takes_connections(address: tuple[str, int]) -> bool:
    """Return whether anything listens there."""
    try:
        socket.create_connection(address, timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


def _after(seconds: float) -> Callable[[], bool]:
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() > end_s
