"""Calling the store of a node: through that node's one port, with a handshake, sealed from end to end. Any thread."""

from __future__ import annotations

import socket
from dataclasses import replace

from zeroband.elastic.membership.run_key import RunKey
from zeroband.elastic.transport.dial import Address, keep_alive
from zeroband.elastic.transport.handshake import ANSWER_BYTES, Caller, Introduction, Purpose
from zeroband.elastic.transport.sealed import Connection, sealed_by
from zeroband.errors import HandshakeFailed

STORE = "store"
"""What the store of a node is called in a handshake: it is there before the node has a name in its run."""


def call_store(key: RunKey, address: Address, *, within_s: float) -> Connection:
    """A connection to the store of the node at this address; always sealed. `within_s`: the longest of its waits.

    Raises OSError, TimeoutError, and HandshakeFailed where the other end hangs up or is not of this run.
    """
    connection = socket.create_connection(address, within_s)
    try:
        keep_alive(connection)
        # The token alone admits here: a store is called before its node has a name, and what lies in it is signed.
        caller = Caller(replace(key, node=None), Introduction("", STORE, "", is_sealed=True, purpose=Purpose.STORE))
        connection.sendall(caller.hello)
        proof, keys = caller.take(_read_answer(connection))
        connection.sendall(proof)
    except BaseException:
        connection.close()
        raise
    return sealed_by(connection, keys)


def _read_answer(connection: socket.socket) -> bytes:
    answer = b""
    while len(answer) < ANSWER_BYTES:
        try:
            part = connection.recv(ANSWER_BYTES - len(answer))
        except ConnectionResetError:
            part = b""
        if not part:
            raise HandshakeFailed("it hung up on the handshake: are run.id and run.token the same there?")
        answer += part
    return answer
