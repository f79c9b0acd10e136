"""Commands through a node's port: complete both ways, closed with the server, and encrypted."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
import redis
from tests.held_stores import HeldStore

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.connection import StoreClient, connect, is_refusal
from zeroband.elastic.transport.handshake import ANSWER_BYTES, STORE, Caller, Introduction, Purpose
from zeroband.elastic.transport.sealed import RecordCipher

KEY, RUN = RunKey(b"k" * 32), "run"
NAME = f"zeroband:{{{RUN}}}:run"


@pytest.fixture
def held() -> Iterator[HeldStore]:
    with HeldStore(KEY, RUN) as held:
        yield held


@pytest.fixture
def member(held: HeldStore) -> Iterator[StoreClient]:
    with closing(connect(f"node://{held.place}", timeout_s=20.0, key=KEY)) as member:
        yield member


def test_long_commands_and_answers_arrive_complete(member: StoreClient) -> None:
    said = bytes(range(256)) * (3 << 12)
    assert member.set(NAME, said) and member.get(NAME) == said
    assert [member.getrange(NAME, 0, n - 1) for n in (1, 70_000)] == [said[:n] for n in (1, 70_000)]


def test_member_is_served_again_after_the_server_restarts(held: HeldStore, member: StoreClient) -> None:
    assert member.set(NAME, "1")
    held.stop()
    with pytest.raises(redis.ConnectionError):
        member.get(NAME)
    held.start()
    assert member.get(NAME) is None


def test_caller_with_another_key_gets_an_error_that_names_the_settings(held: HeldStore) -> None:
    with (
        closing(connect(f"node://{held.place}", timeout_s=20.0, key=RunKey(b"x" * 32))) as other,
        pytest.raises(redis.ConnectionError) as caught,
    ):
        other.get(NAME)
    assert "are run.id and run.token the same there?" in (is_refusal(caught.value) or "")


def test_command_sealed_with_another_key_closes_the_connection_unexecuted(held: HeldStore, member: StoreClient) -> None:
    caller = Caller(KEY, Introduction("", STORE, "", is_sealed=True, purpose=Purpose.STORE))
    with socket.create_connection(("127.0.0.1", held.port), timeout=20.0) as connection:
        connection.sendall(caller.hello)
        proof, _ = caller.take(connection.recv(ANSWER_BYTES, socket.MSG_WAITALL))
        connection.sendall(proof)
        connection.sendall(RecordCipher(b"x" * 32).record(f"SET {NAME} forged\r\n".encode()))
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert member.get(NAME) is None
