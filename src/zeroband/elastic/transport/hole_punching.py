"""TCP hole punching by simultaneous open, for two nodes that can only dial out.

A relay tells each end the public address at which it sees the other. Both then dial that address from the local port of
their relay connection. A NAT that reuses a port's mapping accepts packets from an address that the inside has just
dialled, and the two SYNs become one connection (RFC 9293, 3.5; RFC 5382 requires it of NATs). Behind a NAT with a new
mapping per destination it fails, and the ends keep the relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable
from typing import Any

OBSERVED_BYTES = 64
"""Size of a relay's first message: host and port at which it sees the other end, zero-padded."""

_PUNCH_S = 1.0
_RETRY_AFTER_S = 600.0
"""Time before a failed member is tried again, since each try delays the caller."""
_REDIAL_S = 0.05
_MAX_REFUSALS = 5
"""Refusals after which the other end is assumed not to be dialling."""


def observed_address(connection: socket.socket) -> bytes:
    """Encode the address at which this end sees the other one, for a third. Raises OSError."""
    host, port, *_ = connection.getpeername()
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return f"{mapped or address} {port}".encode().ljust(OBSERVED_BYTES, b"\0")


def _address_in(observed: bytes) -> tuple[str, int]:
    """Decode an observed address. Raises ValueError."""
    host, _, port = observed.rstrip(b"\0").decode("ascii").partition(" ")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"no port: {port}")
    return str(ipaddress.ip_address(host)), int(port)


_failed_until_s: dict[str, float] = {}
"""Members with a failed try, and when to try again. Per process; any thread."""


def may_punch(member: str) -> bool:
    """Whether to try hole punching with a member."""
    return time.monotonic() >= _failed_until_s.get(member, 0.0)


def note_outcome(member: str, *, is_punched: bool) -> None:
    """Record the outcome of a try."""
    now_s = time.monotonic()
    for other in [m for m, until_s in _failed_until_s.copy().items() if until_s < now_s]:
        _failed_until_s.pop(other, None)
    if is_punched:
        _failed_until_s.pop(member, None)
    else:
        _failed_until_s[member] = now_s + _RETRY_AFTER_S


async def punch(own: Any, observed: bytes, prepare: Callable[[socket.socket], None]) -> socket.socket | None:
    """Connect directly to the other end of a relayed connection, which does the same now; None: a NAT prevents it.

    `own`: local address of the relayed connection. `observed`: the other end's address as seen by the relay. `prepare`:
    sets socket options before connecting.
    """
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        other, refused = _address_in(observed), 0
        async with asyncio.timeout(_PUNCH_S):
            while refused < _MAX_REFUSALS:
                try:
                    return await _dial(own, other, prepare)
                except ConnectionRefusedError:
                    refused += 1
                    await asyncio.sleep(_REDIAL_S)
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
    """Allow further connections from the same local port; all must set this before they bind."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
