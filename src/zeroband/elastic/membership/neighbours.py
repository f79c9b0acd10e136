"""Whom a guardian probes, so that a few probes of each find every cut: the rest of the pairs only on suspicion. Pure.

Up to ALL_UP_TO members everybody probes everybody. More of them stand in RINGS rings, in each in an order that follows
from their ids, and everybody probes the next one in each ring. However the members fall apart, each ring crosses the
cut at least twice; who comes or goes changes one neighbour a ring. A member that does not answer is doubted soon, and
then everybody probes it and who doubts it: within `fault.detect_s` all whom it does not reach know it by themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

from zeroband.elastic.membership.records import Peer

ALL_UP_TO = 16
"""So many members probe one another all the time."""

RINGS = 6

_WHOLE_TURN = 1 << 64


def neighbours(own: str, members: Iterable[str]) -> frozenset[str]:
    """Members that this one probes all the time; `members` may hold it, too."""
    others = frozenset(members) - {own}
    if len(others) < ALL_UP_TO:
        return others
    return frozenset(min(others, key=lambda other: _way(ring, own, other)) for ring in range(RINGS))


def askers(own: str, members: Iterable[str]) -> frozenset[str]:
    """Members of which this one is a neighbour."""
    others = frozenset(members) - {own}
    if len(others) < ALL_UP_TO:
        return others
    return frozenset(min(others, key=lambda other: _way(ring, other, own)) for ring in range(RINGS))


def suspects(peers: Mapping[str, Peer]) -> frozenset[str]:
    """Members that everybody probes: both ends of each link that somebody doubts or found cut."""
    found = {member: {*peer.doubted, *peer.cut_off} & peers.keys() for member, peer in peers.items()}
    return frozenset(end for member, others in found.items() if others for end in (member, *others))


def _way(ring: int, start: str, end: str) -> int:
    """How far it is around a ring from one member to another."""
    return (_place(ring, end) - _place(ring, start)) % _WHOLE_TURN


@lru_cache(maxsize=1 << 14)
def _place(ring: int, member: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{ring}/{member}".encode(), digest_size=8).digest(), "big")
