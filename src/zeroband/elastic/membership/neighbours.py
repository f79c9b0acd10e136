"""Which members a guardian probes: a few each find every network partition; other pairs are probed on suspicion. Pure.

Up to ALL_UP_TO members, each probes all others. Larger runs form RINGS rings, each in another order derived from the
member ids, and a member probes its successor in each ring. Every ring crosses any partition at least twice; a join or
a departure changes one neighbour per ring. A member that does not answer is soon suspected. All members then probe it
and the members that suspect it, so within `fault.detect_s` each one that cannot reach it has seen so itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

from zeroband.elastic.membership.records import Peer

ALL_UP_TO = 16
"""Up to this many members, each probes all others all the time."""

RINGS = 6

_WHOLE_TURN = 1 << 64


def neighbours(own: str, members: Iterable[str]) -> frozenset[str]:
    """Members that `own` probes all the time; `members` may include `own`."""
    others = frozenset(members) - {own}
    if len(others) < ALL_UP_TO:
        return others
    return frozenset(min(others, key=lambda other: _way(ring, own, other)) for ring in range(RINGS))


def askers(own: str, members: Iterable[str]) -> frozenset[str]:
    """Members that probe `own` all the time."""
    others = frozenset(members) - {own}
    if len(others) < ALL_UP_TO:
        return others
    return frozenset(min(others, key=lambda other: _way(ring, other, own)) for ring in range(RINGS))


def suspects(peers: Mapping[str, Peer]) -> frozenset[str]:
    """Members that all others probe: both ends of each link that a member suspects or found cut."""
    found = {member: {*peer.doubted, *peer.cut_off} & peers.keys() for member, peer in peers.items()}
    return frozenset(end for member, others in found.items() if others for end in (member, *others))


def _way(ring: int, start: str, end: str) -> int:
    """Distance along a ring from one member to another."""
    return (_place(ring, end) - _place(ring, start)) % _WHOLE_TURN


@lru_cache(maxsize=1 << 14)
def _place(ring: int, member: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{ring}/{member}".encode(), digest_size=8).digest(), "big")
