"""Which member dials which, and over which relay, if some members can only dial out. Pure.

An open connection serves both ends alike, so the end that can dial does. A member behind a NAT or a firewall is
*dial-out-only*: others cannot dial it. It names as its relays a few members that they can dial. Its probes of these
tell it of a caller; it then dials the relay, which copies bytes between the two.
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
"""Members through which a dial-out-only one can be called, so that losing one of them cuts none off."""

_SLOW_RELAY = 2
"""A relay whose rate is that many times below the best one's gives way to others."""


@dataclass(frozen=True)
class DialRoute:
    """A way to a member: its own address, or that of a member that passes the call on."""

    host: str
    port: int
    relay: str = ""
    """The member that listens there and passes the call on; empty: it is the called one's own address."""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


DialRoutes = tuple[DialRoute, ...]
"""Ways to a member, the one to try first at the beginning."""

INBOUND_ONLY: DialRoutes = ()
"""No way to dial a member: it is the one that dials."""


def is_dial_out_only(member: str, peers: Mapping[str, Peer]) -> bool:
    """Whether some living member cannot dial this one."""
    return (member in peers and bool(peers[member].relays)) or any(member in peer.undialled for peer in peers.values())


def choose_relays(
    own: str, before: Iterable[str], reached: Mapping[str, int], peers: Mapping[str, Peer]
) -> tuple[str, ...]:
    """Choose whom calls for a dial-out-only member come through, the first one first.

    Fast ones come first; of these, the ones from `before`. `reached`: members that it has dialled and that answer, with
    the rate to each in Mbit/s, or 0 where that is not known.
    """
    fit, earlier = {m: mbit for m, mbit in reached.items() if not is_dial_out_only(m, peers)}, (*before,)
    best = max(fit.values(), default=0)

    def order(member: str) -> tuple[bool, int, bytes]:
        is_slow = 0 < _SLOW_RELAY * fit[member] < best
        return is_slow, earlier.index(member) if member in earlier else len(earlier), _relay_rank(own, member)

    return tuple(sorted(fit, key=order)[:MAX_RELAYS])


def _relay_rank(own: str, member: str) -> bytes:
    """Sort key that differs for each member, so that relays are spread over the members that can be dialled."""
    return hashlib.blake2b(f"{own}/{member}".encode(), digest_size=8).digest()


def dials(own: str, member: str, dial_out_only: Collection[str]) -> bool:
    """Whether this member dials the other: of two that both can be dialled, or neither, the one whose id is first."""
    if (own in dial_out_only) != (member in dial_out_only):
        return own in dial_out_only
    return own < member


def routes_to(own: str, member: str, peers: Mapping[str, Peer]) -> DialRoutes:
    """How one member dials another: at its address, and through its relays."""
    peer = peers[member]
    is_undialled = own in peers and member in peers[own].undialled and bool(peer.relays)
    direct = () if is_undialled else (DialRoute(peer.host, peer.port),)
    return *direct, *relay_routes(member, peers)


def relay_routes(member: str, peers: Mapping[str, Peer]) -> DialRoutes:
    """The ways to a member through those that pass calls on to it."""
    found = [relay for relay in peers[member].relays if relay in peers]
    return tuple(DialRoute(peers[relay].host, peers[relay].port, relay) for relay in found)


def probe_routes(own: str, member: str, peers: Mapping[str, Peer], *, is_own_dial_out_only: bool) -> DialRoutes:
    """How one member probes another; HEARD where that one's probes show the same, since only it can dial."""
    return INBOUND_ONLY if peers[member].relays and not is_own_dial_out_only else routes_to(own, member, peers)


FULL_MESH_UP_TO = 16
"""Up to this many members, each probes all others all the time."""

RINGS = 6

_WHOLE_TURN = 1 << 64


def neighbours(own: str, members: Iterable[str]) -> frozenset[str]:
    """Members that `own` probes all the time; `members` may include `own`."""
    others = frozenset(members) - {own}
    if len(others) < FULL_MESH_UP_TO:
        return others
    return frozenset(min(others, key=lambda other: _distance(ring, own, other)) for ring in range(RINGS))


def probers(own: str, members: Iterable[str]) -> frozenset[str]:
    """Members that probe `own` all the time."""
    others = frozenset(members) - {own}
    if len(others) < FULL_MESH_UP_TO:
        return others
    return frozenset(min(others, key=lambda other: _distance(ring, other, own)) for ring in range(RINGS))


def suspects(peers: Mapping[str, Peer]) -> frozenset[str]:
    """Members that all others probe: both ends of each link that a member suspects or found cut."""
    found = {member: {*peer.doubted, *peer.cut_off} & peers.keys() for member, peer in peers.items()}
    return frozenset(end for member, others in found.items() if others for end in (member, *others))


def _distance(ring: int, start: str, end: str) -> int:
    """Distance along a ring from one member to another."""
    return (_ring_position(ring, end) - _ring_position(ring, start)) % _WHOLE_TURN


@lru_cache(maxsize=1 << 14)
def _ring_position(ring: int, member: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{ring}/{member}".encode(), digest_size=8).digest(), "big")
