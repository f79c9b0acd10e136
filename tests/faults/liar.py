"""A trainer whose node lies: what it sends is changed, or left out, on its way out of the process.

Run in place of zeroband/train.py by all nodes of a test. LIES: how this one lies; LIES_TO: to which nodes, with blanks
between them; LIES_FROM: from which round on. It needs `comm.encryption = false`: frames are changed as they are on the
wire, after the engine made them and before another node sees them.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from typing import Any

import numpy as np

from zeroband.elastic.rounds.member import Member
from zeroband.elastic.transport.base import MovedBytes, RoundRequest
from zeroband.elastic.transport.engine import Engine
from zeroband.elastic.transport.links import Links
from zeroband.elastic.transport.native_plane import NativePlane
from zeroband.train import main

HEADER = struct.Struct("<IBBHQQIIIII4x")
PART, MEAN, PAYLOAD = 1, 2, 3
NAN = struct.pack("<f", float("nan"))
MORE = np.float32(1.01)
HOW, TO, FROM = os.environ.get("LIES", ""), os.environ.get("LIES_TO", "").split(), int(os.environ.get("LIES_FROM", "3"))


def changed(kind: int, round: int, payload: bytes) -> bytes | None:
    """What another node gets in place of a payload; None: nothing."""
    if round < FROM:
        return payload
    if (HOW, kind) in (("bytes", MEAN), ("bytes", PAYLOAD)):
        return payload[:-1] + bytes([payload[-1] ^ 1])
    if (HOW, kind) == ("withhold", PART) or (HOW, kind) == ("withhold mean", MEAN):
        return None
    if (HOW, kind) == ("sum", MEAN):
        return (np.frombuffer(payload, np.float32) * MORE).tobytes()
    return NAN + payload[4:] if (HOW, kind) == ("nan", PART) else payload


def read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def pump(source: socket.socket, sink: socket.socket, link: int | None) -> None:
    """Pass bytes on. `link`: whose frames these are, which are changed on their way; None: that come from elsewhere."""
    try:
        while link is not None:
            header = read(source, HEADER.size)
            _, kind, *_, round, _shard, _chunk, length = HEADER.unpack(header)
            payload = read(source, length)
            said = changed(kind, round, payload) if node_of_link.get(link) in TO else payload
            if said is not None:
                sink.sendall(header + said)
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except (OSError, EOFError):
        pass
    for end in (source, sink):
        end.close()


add, number, vote, reduce_mean = Engine.add_stream, Links.number, Member.vote, NativePlane.reduce_mean
node_of_link: dict[int, str] = {}


def add_changed(self: Engine, link: int, connection: socket.socket, keys: Any) -> None:
    """Put this process between the engine and another node."""
    connection.setblocking(True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        inner = socket.create_connection(listener.getsockname())
        outer, _ = listener.accept()
    for source, sink, frames_of in ((outer, connection, link), (connection, outer, None)):
        threading.Thread(target=pump, args=(source, sink, frames_of), daemon=True).start()
    add(self, link, inner, keys)


def noted_number(self: Links, member: str) -> int:
    found = number(self, member)
    node_of_link[found] = member.partition("#")[0]
    return found


def vote_for_another(self: Member, plan: Any, digest: str, record: Any = None) -> None:
    vote(self, plan, digest[::-1] if plan.round >= FROM else digest, record)


def one_percent_more(self: NativePlane, request: RoundRequest) -> MovedBytes:
    """All get one mean of what this node owns, it too: 1 % more than the mean of what was sent. With float32."""
    moved = reduce_mean(self, request)
    if request.plan.round >= FROM and moved.borders:
        place = request.plan.members.index(request.member_id)
        request.result[slice(*moved.borders[place : place + 2])].mul_(MORE.item())
    return moved


if __name__ == "__main__":
    if TO:
        Engine.add_stream, Links.number = add_changed, noted_number  # type: ignore[method-assign]
    if HOW == "vote":
        Member.vote = vote_for_another  # type: ignore[method-assign]
    if HOW == "sum":
        NativePlane.reduce_mean = one_percent_more  # type: ignore[method-assign]
    sys.exit(main())
