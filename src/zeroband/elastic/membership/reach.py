"""Reachability: which member dials which, over which relay, and which members probe each other. Pure.

An open connection serves both ends alike, so the end that can dial does. A member behind a NAT or firewall is
*dial-out-only*: others cannot dial it. It names a few dialable members as its relays. Answers to its probes of these
tell it about a caller; it then dials the relay, which copies bytes between the two.

Up to FULL_MESH_UP_TO members, each probes all others. Larger runs form RINGS rings, each in a different order derived
from the member ids, and a member probes its successor in each. Every ring crosses any partition at least twice; a join
or departure changes one neighbour per ring. A member that does not answer is soon suspected. All members then probe it
and its suspecting probers, so each one that cannot reach it has found out within `fault.detect_s`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from zeroband.elastic.membership.records import Peer

if TYPE_CHECKING:
    from zeroband.elastic.membership.records import Peer


MAX_RELAYS = 2
"""Relays of a dial-out-only member: more than one, so that losing one does not cut it off."""

_SLOW_RELAY = 2
"""A relay slower than the best one by this factor is replaced."""


@dataclass(frozen=True)
class DialRoute:
    """A route to a member: its own address, or that of a relay."""

    host: str
    port: int
    relay: str = ""
    """Relaying member that listens there; empty: the called member's own address."""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


DialRoutes = tuple[DialRoute, ...]
"""Routes to a member, in order of preference."""

INBOUND_ONLY: DialRoutes = ()
"""No route to a member: only it can dial."""


def is_dial_out_only(member: str, peers: Mapping[str, Peer]) -> bool:
    """Whether another member cannot dial this one."""
    return (member in peers and bool(peers[member].relays)) or any(member in peer.undialled for peer in peers.values())


def choose_relays(
    own: str, before: Iterable[str], reached: Mapping[str, int], peers: Mapping[str, Peer]
) -> tuple[str, ...]:
    """Choose relays for a dial-out-only member, in order of preference.

    Fast members come first, among them those from `before`. `reached`: members that answer its dials, with the rate to
    each in Mbit/s, 0 if unknown.
    """
    fit, earlier = {m: mbit for m, mbit in reached.items() if not is_dial_out_only(m, peers)}, (*before,)
    best = max(fit.values(), default=0)

    def order(member: str) -> tuple[bool, int, bytes]:
        is_slow = 0 < _SLOW_RELAY * fit[member] < best
        return is_slow, earlier.index(member) if member in earlier else len(earlier), _relay_rank(own, member)

    return tuple(sorted(fit, key=order)[:MAX_RELAYS])


def _relay_rank(own: str, member: str) -> bytes:
    """Pseudo-random sort key per member, which spreads relays over the dialable members."""
    return hashlib.blake2b(f"{own}/{member}".encode(), digest_size=8).digest()


def dials(own: str, member: str, dial_out_only: Collection[str]) -> bool:
    """Whether this member dials the other. If both or neither can be dialled, the lower id dials."""
    if (own in dial_out_only) != (member in dial_out_only):
        return own in dial_out_only
    return own < member


def routes_to(own: str, member: str, peers: Mapping[str, Peer]) -> DialRoutes:
    """Return a member's routes: its address, unless known not to answer, then its relays."""
    peer = peers[member]
    is_undialled = own in peers and member in peers[own].undialled and bool(peer.relays)
    direct = () if is_undialled else (DialRoute(peer.host, peer.port),)
    return *direct, *relay_routes(member, peers)


def relay_routes(member: str, peers: Mapping[str, Peer]) -> DialRoutes:
    """Return the routes to a member through its relays."""
    found = [relay for relay in peers[member].relays if relay in peers]
    return tuple(DialRoute(peers[relay].host, peers[relay].port, relay) for relay in found)


def probe_routes(own: str, member: str, peers: Mapping[str, Peer], *, is_own_dial_out_only: bool) -> DialRoutes:
    """Return the routes for probes; INBOUND_ONLY if only the other end can dial, whose probes show the same."""
    return INBOUND_ONLY if peers[member].relays and not is_own_dial_out_only else routes_to(own, member, peers)


FULL_MESH_UP_TO = 16
"""Up to this many members, each probes all others."""

RINGS = 6

_WHOLE_TURN = 1 << 64


def neighbours(own: str, members: Iterable[str]) -> frozenset[str]:
    """Members that `own` always probes; `members` may include `own`."""
    others = frozenset(members) - {own}
    if len(others) < FULL_MESH_UP_TO:
        return others
    return frozenset(min(others, key=lambda other: _distance(ring, own, other)) for ring in range(RINGS))


def probers(own: str, members: Iterable[str]) -> frozenset[str]:
    """Members that always probe `own`."""
    others = frozenset(members) - {own}
    if len(others) < FULL_MESH_UP_TO:
        return others
    return frozenset(min(others, key=lambda other: _distance(ring, other, own)) for ring in range(RINGS))


def suspects(peers: Mapping[str, Peer]) -> frozenset[str]:
    """Members that all others probe: both ends of each suspected or broken link."""
    found = {member: {*peer.doubted, *peer.cut_off} & peers.keys() for member, peer in peers.items()}
    return frozenset(end for member, others in found.items() if others for end in (member, *others))


def _distance(ring: int, start: str, end: str) -> int:
    """Distance along a ring from one member to another."""
    return (_ring_position(ring, end) - _ring_position(ring, start)) % _WHOLE_TURN


@lru_cache(maxsize=1 << 14)
def _ring_position(ring: int, member: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{ring}/{member}".encode(), digest_size=8).digest(), "big")
