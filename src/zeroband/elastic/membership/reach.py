"""Who dials whom, and through whom, where some members can only dial out. Pure.

A connection is the same for both ends once it is there, so the end that can dial does. A member *behind* a NAT or a
firewall is one that others cannot dial. It keeps lines to a few members that they can: its probes of these, over which
it is told that somebody calls. It then dials the one that passes the call on, which copies bytes between the two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroband.elastic.membership.records import Peer

LINES = 2
"""Members through which one that is behind can be called, so that the loss of one of them cuts nobody off."""

_WORTH = 2
"""A line whose rate is that many times below the best one's gives way to others."""


@dataclass(frozen=True)
class Way:
    """A way to a member: its own address, or that of a member that passes the call on."""

    host: str
    port: int
    relay: str = ""
    """The member that listens there and passes the call on; empty: it is the called one's own address."""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


Ways = tuple[Way, ...]
"""Ways to a member, the one to try first at the beginning."""

HEARD: Ways = ()
"""No way to dial a member: it is the one that dials."""


def is_behind(member: str, peers: Mapping[str, Peer]) -> bool:
    """Whether some living member cannot dial this one."""
    return (member in peers and bool(peers[member].lines)) or any(member in peer.undialled for peer in peers.values())


def choose_lines(
    own: str, before: Iterable[str], reached: Mapping[str, int], peers: Mapping[str, Peer]
) -> tuple[str, ...]:
    """Choose whom calls for a member that is behind come through, the first one first.

    Fast ones come first; of these, the ones from `before`. `reached`: members that it has dialled and that answer, with
    the rate to each in Mbit/s, or 0 where that is not known.
    """
    fit, earlier = {m: mbit for m, mbit in reached.items() if not is_behind(m, peers)}, (*before,)
    best = max(fit.values(), default=0)

    def order(member: str) -> tuple[bool, int, bytes]:
        is_slow = 0 < _WORTH * fit[member] < best
        return is_slow, earlier.index(member) if member in earlier else len(earlier), _rank(own, member)

    return tuple(sorted(fit, key=order)[:LINES])


def _rank(own: str, member: str) -> bytes:
    """An order of its own for each member, so that lines are spread over those that can be dialled."""
    return hashlib.blake2b(f"{own}/{member}".encode(), digest_size=8).digest()


def dials(own: str, member: str, behind: Collection[str]) -> bool:
    """Whether this member dials the other: of two that both can be dialled, or neither, the one whose id is first."""
    if (own in behind) != (member in behind):
        return own in behind
    return own < member


def ways_to(own: str, member: str, peers: Mapping[str, Peer]) -> Ways:
    """How one member dials another: at its address, and through its lines."""
    peer = peers[member]
    is_undialled = own in peers and member in peers[own].undialled and bool(peer.lines)
    direct = () if is_undialled else (Way(peer.host, peer.port),)
    return *direct, *lines_of(member, peers)


def lines_of(member: str, peers: Mapping[str, Peer]) -> Ways:
    """The ways to a member through those that pass calls on to it."""
    found = [relay for relay in peers[member].lines if relay in peers]
    return tuple(Way(peers[relay].host, peers[relay].port, relay) for relay in found)


def probe_ways(own: str, member: str, peers: Mapping[str, Peer], *, is_own_behind: bool) -> Ways:
    """How one member probes another; HEARD where that one's probes show the same, since only it can dial."""
    return HEARD if peers[member].lines and not is_own_behind else ways_to(own, member, peers)
