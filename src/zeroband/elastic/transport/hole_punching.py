"""TCP opened by both ends at once, for two nodes that can only dial out.

A relay that joins two ends tells each where it sees the other one. Both then dial there from the port that they came
from: a NAT that keeps a port's mapping takes what comes from where somebody inside has just dialled, and the two dials
become one connection (RFC 9293, 3.5; RFC 5382 asks it of NATs). Where a NAT maps each connection anew nothing comes of
it, and the ends stay with the relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable
from typing import Any

SIGHT_BYTES = 64
"""A relay's first words: host and port at which it sees the other end, padded with zeros."""

_MEET_S = 1.0
_IN_VAIN_S = 600.0
"""After a try in vain the same member is not tried again for this long: the caller waits for it."""
_AGAIN_S = 0.05
_REFUSED = 5
"""After this many refusals the member counts as up but not dialling."""


def sight_of(connection: socket.socket) -> bytes:
    """Where this end sees the other one, as it is told to a third. Raises OSError."""
    host, port, *_ = connection.getpeername()
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return f"{mapped or address} {port}".encode().ljust(SIGHT_BYTES, b"\0")


def _address_in(sight: bytes) -> tuple[str, int]:
    """Raises ValueError."""
    host, _, port = sight.rstrip(b"\0").decode("ascii").partition(" ")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"no port: {port}")
    return str(ipaddress.ip_address(host)), int(port)


_in_vain: dict[str, float] = {}
"""Members that were not met, and until when that counts. Of this process; any thread."""


def may_meet(member: str) -> bool:
    """Whether it is worth a try to meet a member."""
    return time.monotonic() >= _in_vain.get(member, 0.0)


def note_met(member: str, *, is_met: bool) -> None:
    """Remember what came of a try."""
    now_s = time.monotonic()
    for other in [m for m, until_s in _in_vain.copy().items() if until_s < now_s]:
        _in_vain.pop(other, None)
    if is_met:
        _in_vain.pop(member, None)
    else:
        _in_vain[member] = now_s + _IN_VAIN_S


async def meet(own: Any, sight: bytes, prepare: Callable[[socket.socket], None]) -> socket.socket | None:
    """Open a connection to the other end of a relayed one, which does the same now; None where NATs do not let that be.

    `own`: this end's own address of the relayed one. `sight`: where the relay sees the other end. `prepare`: sets
    options before it connects.
    """
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        other, refused = _address_in(sight), 0
        async with asyncio.timeout(_MEET_S):
            while refused < _REFUSED:
                try:
                    return await _dial(own, other, prepare)
                except ConnectionRefusedError:
                    refused += 1
                    await asyncio.sleep(_AGAIN_S)
    return None


async def _dial(own: Any, other: tuple[str, int], prepare: Callable[[socket.socket], None]) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in own[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        share_port(connection)
        prepare(connection)
        connection.bind(own)
        await asyncio.get_running_loop().sock_connect(connection, other)
    except BaseException:
        connection.close()
        raise
    return connection


def share_port(connection: socket.socket) -> None:
    """Let connections to others leave from this one's port; both have to ask for it before they have one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
