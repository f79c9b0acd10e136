"""The port over loopback: who is answered, and that others get nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.elastic.conftest import HOST

from zeroband.elastic.guardian import port as port_module
from zeroband.elastic.guardian.port import CALL_BYTES, Answer, Port, SeenCalls, read_exactly, shake_hands
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.transport.handover import HandedOver
from zeroband.elastic.transport.handshake import ANSWER_BYTES, DATA_CALL, HELLO_BYTES, NO_KEYS, Caller, Introduction
from zeroband.errors import HandshakeFailed

KEY = RunKey(b"k" * 32)
ME, CALLER = "me#1", "caller#1"
STRANGERS = 4
SOON_S = 0.05
SOME_CALL, OTHER_CALL = b"som1", b"oth1"
DEADLINE_S = 5.0


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_MOST_STRANGERS", STRANGERS)
    monkeypatch.setattr(port_module, "_PEEK_S", 0.002)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time for a caller to state its purpose."""
    monkeypatch.setattr(port_module, "_TIMEOUT_S", SOON_S)


@pytest.fixture(autouse=True)
def _silence(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Strangers cannot fill the log; asyncio logs a failed task when it is collected."""
    yield
    gc.collect(1)
    assert [*caplog.get_records("call"), *caplog.records] == []


async def greet(connection: socket.socket) -> None:
    """Echo the first eight bytes, which are all unread."""
    await asyncio.get_running_loop().sock_sendall(connection, await read_exactly(connection, 8))


@asynccontextmanager
async def opened(answers: Mapping[bytes, Answer] | None = None) -> AsyncIterator[tuple[Port, int]]:
    port = Port(answers or {SOME_CALL: greet, OTHER_CALL: greet})
    number = port.open(HOST, 0)
    try:
        yield port, number
    finally:
        port.close()
        await until(lambda: port.tasks == 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def call(number: int, data: bytes = b"", *, from_host: str = "") -> socket.socket:
    connection = socket.socket()
    if from_host:
        connection.bind((from_host, 0))
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (HOST, number))
    await loop.sock_sendall(connection, data)
    return connection


async def all_that_comes(connection: socket.socket) -> bytes:
    """Until the other end closes."""
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionResetError):  # what was sent had not been read
            while part := await loop.sock_recv(connection, 4096):
                data += part
    connection.close()
    return data


async def assert_answers(number: int) -> None:
    assert await all_that_comes(await call(number, OTHER_CALL + b"/abc")) == OTHER_CALL + b"/abc"


def test_connection_is_dispatched_by_its_first_four_bytes_which_stay_unread() -> None:
    seen: list[tuple[str, bytes]] = []

    def answer_as(name: str) -> Answer:
        async def answer(connection: socket.socket) -> None:
            seen.append((name, await read_exactly(connection, 8)))

        return answer

    async def scene() -> None:
        async with opened({b"aaaa": answer_as("a"), b"bbbb": answer_as("b")}) as (_, number):
            for data in (b"aaaa1234", b"bbbb5678"):
                assert await all_that_comes(await call(number, data)) == b""

    asyncio.run(scene())
    assert seen == [("a", b"aaaa1234"), ("b", b"bbbb5678")]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_port_on_all_addresses_takes_ipv4_too() -> None:
    async def scene() -> None:
        port = Port({})
        number = port.open("::", 0)
        (await call(number)).close()
        port.close()
        await until(lambda: port.tasks == 0)

    asyncio.run(scene())


def test_call_may_come_byte_by_byte() -> None:
    async def scene() -> None:
        async with opened() as (port, number):
            connection = await call(number)
            for byte in SOME_CALL:
                await asyncio.sleep(0.003)
                assert port.strangers == 1
                await asyncio.get_running_loop().sock_sendall(connection, bytes([byte]))
            await asyncio.get_running_loop().sock_sendall(connection, b"1234")
            assert await all_that_comes(connection) == SOME_CALL + b"1234"

    asyncio.run(scene())


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.binary(min_size=CALL_BYTES, max_size=600).filter(lambda b: not b.startswith((SOME_CALL, OTHER_CALL))),
        min_size=1,
        max_size=STRANGERS,
    )
)
def test_unknown_purpose_is_disconnected_without_an_answer(calls: list[bytes]) -> None:
    async def scene() -> None:
        async with opened() as (port, number):
            strangers = [await call(number, data) for data in calls]
            assert await asyncio.gather(*map(all_that_comes, strangers)) == [b""] * len(calls)
            assert port.strangers == 0
            await assert_answers(number)

    asyncio.run(scene())


@pytest.mark.parametrize("said", [b"", b"G", b"GET", b"som"])
def test_caller_that_states_no_purpose_is_disconnected(said: bytes, impatient: None) -> None:
    async def scene() -> None:
        async with opened() as (port, number):
            stranger = await call(number, said)
            await until(lambda: port.strangers == 1)
            assert await all_that_comes(stranger) == b""
            assert port.strangers == 0
            await assert_answers(number)

    asyncio.run(scene())


def test_caller_that_disconnects_early_is_forgotten_at_once() -> None:
    async def scene() -> None:
        async with opened() as (port, number):
            stranger = await call(number)
            await until(lambda: port.strangers == 1)
            stranger.shutdown(socket.SHUT_WR)
            await until(lambda: port.strangers == 0)
            assert await all_that_comes(stranger) == b""

    asyncio.run(scene())


def test_oldest_of_too_many_strangers_is_evicted() -> None:
    async def scene() -> None:
        async with opened() as (port, number):
            strangers = []
            for count in range(1, 2 * STRANGERS + 1):
                strangers.append(await call(number))
                await until(lambda count=count: port.tasks == 1 + min(count, STRANGERS))
                await until(lambda count=count: port.strangers == min(count, STRANGERS))
            assert await asyncio.gather(*map(all_that_comes, strangers[:STRANGERS])) == [b""] * STRANGERS
            for stranger in strangers[STRANGERS:]:
                await asyncio.get_running_loop().sock_sendall(stranger, SOME_CALL + b"1234")
                assert await all_that_comes(stranger) == SOME_CALL + b"1234"

    asyncio.run(scene())


def test_limit_of_strangers_holds_when_many_arrive_at_once() -> None:
    """All are in the backlog when the loop accepts. One may arrive while another goes."""

    async def scene() -> None:
        async with opened() as (port, number):
            crowd = [socket.create_connection((HOST, number)) for _ in range(5 * STRANGERS)]
            most = 0
            for _ in range(10 * len(crowd)):
                await asyncio.sleep(0)
                most = max(most, port.strangers)
            for stranger in crowd:
                stranger.close()
            assert STRANGERS <= most <= STRANGERS + 1
            await until(lambda: port.strangers == 0)
            await assert_answers(number)

    asyncio.run(scene())


def test_crowd_of_strangers_is_disconnected_and_forgotten(impatient: None) -> None:
    async def scene() -> None:
        async with opened() as (port, number):
            strangers = [socket.create_connection((HOST, number)) for _ in range(5 * STRANGERS)]
            for stranger in strangers:
                stranger.setblocking(False)
            assert await asyncio.gather(*map(all_that_comes, strangers)) == [b""] * len(strangers)
            assert port.strangers == 0
            await assert_answers(number)

    asyncio.run(scene())


def test_long_answered_caller_is_no_stranger_after_its_handshake() -> None:
    """Probes last as long as both nodes; neither strangers nor other callers may evict them."""
    silent = asyncio.Event()

    async def stay(connection: socket.socket) -> None:
        await shake_hands(connection, KEY, callee=ME, is_sealed=True)
        await asyncio.get_running_loop().sock_sendall(connection, b"in")
        await silent.wait()

    async def scene() -> None:
        async with opened({DATA_CALL: stay, OTHER_CALL: greet}) as (port, number):
            probes = [(caller := caller_of(), await call(number, caller.hello)) for _ in range(STRANGERS + 1)]
            for caller, probe in probes:
                proof, _ = caller.take(await read_exactly(probe, ANSWER_BYTES))
                await asyncio.get_running_loop().sock_sendall(probe, proof)
                assert await read_exactly(probe, 2) == b"in"
            assert port.strangers == 0 and port.callers == 0
            for _ in range(2 * STRANGERS):
                await assert_answers(number)
            silent.set()
            assert await asyncio.gather(*[all_that_comes(probe) for _, probe in probes]) == [b""] * len(probes)

    asyncio.run(scene())


def test_crowd_from_one_address_evicts_no_other_address() -> None:
    async def scene() -> None:
        async with opened() as (port, number):
            lonely = await call(number, from_host="127.0.0.2")
            await until(lambda: port.strangers == 1)
            crowd = [await call(number) for _ in range(3 * STRANGERS)]
            assert await asyncio.gather(*map(all_that_comes, crowd[: 2 * STRANGERS])) == [b""] * 2 * STRANGERS
            await asyncio.get_running_loop().sock_sendall(lonely, SOME_CALL + b"1234")
            assert await all_that_comes(lonely) == SOME_CALL + b"1234"
            for stranger in crowd:
                stranger.close()

    asyncio.run(scene())


def test_missing_descriptor_is_logged_once_and_the_connection_accepted_later(caplog: pytest.LogCaptureFixture) -> None:
    """The connection waits in the kernel, and the accept is retried after a pause."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare: list[int] = []

    async def scene() -> None:
        async with opened() as (_, number):
            late = await call(number, SOME_CALL + b"1234")
            assert await all_that_comes(late) == SOME_CALL + b"1234"
            late = socket.socket()
            late.setblocking(False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 8, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.open(os.devnull, os.O_RDONLY))
            await asyncio.get_running_loop().sock_connect(late, (HOST, number))
            await until(lambda: bool(caplog.records))
            await asyncio.sleep(3 * SOON_S)
            for descriptor in spare:
                os.close(descriptor)
            await asyncio.get_running_loop().sock_sendall(late, SOME_CALL + b"1234")
            assert await all_that_comes(late) == SOME_CALL + b"1234"

    try:
        asyncio.run(scene())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (said,) = caplog.messages
    assert "a connection of another node cannot be taken: Too many open files (the limit is" in said
    caplog.clear()


@pytest.mark.parametrize("error", [HandshakeFailed("no"), OSError("gone"), TimeoutError(), EOFError()], ids=repr)
def test_failed_call_is_closed_without_a_log_line(error: Exception) -> None:
    async def fail(connection: socket.socket) -> None:
        raise error

    async def scene() -> None:
        async with opened({DATA_CALL: fail, OTHER_CALL: greet}) as (port, number):
            assert await all_that_comes(await call(number, DATA_CALL)) == b""
            assert port.strangers == 0
            await assert_answers(number)

    asyncio.run(scene())


def test_closed_port_disconnects_callers_and_stops_listening() -> None:
    async def scene() -> None:
        async with opened() as (port, number):
            strangers = [await call(number, said) for said in (b"", b"GE", SOME_CALL + b"12")]
            await until(lambda: port.tasks == 4 and port.strangers == 3)
            port.close()
            assert await asyncio.gather(*map(all_that_comes, strangers)) == [b""] * 3
            assert port.strangers == 0
            with pytest.raises(ConnectionRefusedError):
                await call(number)

    asyncio.run(scene())


def test_closed_port_disconnects_a_caller_that_just_arrived() -> None:
    """It was accepted, and its task has not started."""

    async def scene() -> None:
        async with opened() as (port, number):
            stranger = socket.create_connection((HOST, number))
            stranger.setblocking(False)
            while port.strangers == 0:
                await asyncio.sleep(0)
            port.close()
            assert await all_that_comes(stranger) == b""
            assert port.strangers == 0

    asyncio.run(scene())


def test_closing_port_logs_nothing_about_a_simultaneous_call() -> None:
    async def end() -> None:
        async with opened() as (port, number):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(port.close)  # before the call, which the loop sees meanwhile
            socket.create_connection((HOST, number)).close()
            await asyncio.sleep(0.01)

    asyncio.run(end())


def test_port_in_use_is_an_error() -> None:
    async def scene() -> None:
        async with opened() as (_, number):
            with pytest.raises(OSError, match="in use"):
                Port({}).open(HOST, number)

    asyncio.run(scene())


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_port_listens_on_ipv6_addresses() -> None:
    async def scene() -> None:
        port = Port({SOME_CALL: greet})
        number = port.open("::1", 0)
        reader, writer = await asyncio.open_connection("::1", number)
        writer.write(SOME_CALL + b"1234")
        assert await reader.read(8) == SOME_CALL + b"1234"
        writer.close()
        port.close()

    asyncio.run(scene())


# -- calls to the data plane ----------------------------------------------------------------------------------------


def caller_of(key: RunKey = KEY, *, callee: str = ME, is_sealed: bool = True) -> Caller:
    return Caller(key, Introduction(CALLER, callee, "session", is_sealed))


@asynccontextmanager
async def opened_for_data(*, is_sealed: bool = True) -> AsyncIterator[tuple[Port, int, list[HandedOver]]]:
    taken, heard = list[HandedOver](), SeenCalls()

    async def answer(connection: socket.socket) -> None:
        taken.append(await shake_hands(connection, KEY, callee=ME, is_sealed=is_sealed, heard=heard))

    async with opened({DATA_CALL: answer, OTHER_CALL: greet}) as (port, number):
        yield port, number, taken


@pytest.mark.parametrize("is_sealed", [True, False])
def test_node_of_the_run_gets_in(is_sealed: bool) -> None:
    async def scene() -> None:
        async with opened_for_data(is_sealed=is_sealed) as (_, number, taken):
            caller = caller_of(is_sealed=is_sealed)
            connection = await call(number, caller.hello)
            proof, keys = caller.take(await read_exactly(connection, ANSWER_BYTES))
            await asyncio.get_running_loop().sock_sendall(connection, proof)
            assert await all_that_comes(connection) == b""
            (what,) = taken
            assert (what.kind, what.caller, what.session) == ("data", CALLER, "session")
            assert (what.keys.seal, what.keys.open) == (keys.open, keys.seal)
            assert (what.keys == NO_KEYS) == (not is_sealed)

    asyncio.run(scene())


async def finish(caller: Caller, connection: socket.socket) -> None:
    proof, _ = caller.take(await read_exactly(connection, ANSWER_BYTES))
    await asyncio.get_running_loop().sock_sendall(connection, proof)
    assert await all_that_comes(connection) == b""


@pytest.mark.parametrize("are_at_once", [True, False], ids=["at once", "one after the other"])
def test_callers_of_the_run_are_evicted_neither_by_each_other_nor_by_strangers(are_at_once: bool) -> None:
    """Many nodes dial many streams, with a long round trip before the end of each handshake."""

    async def scene() -> None:
        async with opened_for_data() as (port, number, taken):
            callers = [caller_of() for _ in range(3 * STRANGERS)]
            if are_at_once:
                connections = [socket.create_connection((HOST, number)) for _ in callers]
                for caller, connection in zip(callers, connections, strict=True):
                    connection.setblocking(False)
                    connection.send(caller.hello)
            else:
                connections = [await call(number, caller.hello) for caller in callers]
            await until(lambda: port.callers == len(callers))
            strangers = [await call(number) for _ in range(2 * STRANGERS)]
            await until(lambda: port.strangers == STRANGERS)
            for caller, connection in zip(callers, connections, strict=True):
                await finish(caller, connection)
            assert (len(taken), port.callers) == (len(callers), 0)
            for stranger in strangers:
                stranger.close()

    asyncio.run(scene())


def test_oldest_of_too_many_callers_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_MOST_CALLERS", 2)

    async def scene() -> None:
        async with opened_for_data() as (port, number, taken):
            _, *others = callers = [caller_of() for _ in range(3)]
            connections = [await call(number, caller.hello) for caller in callers]
            assert len(await all_that_comes(connections[0])) == ANSWER_BYTES
            for caller, connection in zip(others, connections[1:], strict=True):
                await finish(caller, connection)
            assert (len(taken), port.callers) == (2, 0)

    asyncio.run(scene())


@pytest.mark.parametrize(
    "hello",
    [
        caller_of(RunKey(b"o" * 32)).hello,
        caller_of(callee="me#0").hello,
        caller_of(is_sealed=False).hello,
        DATA_CALL + os.urandom(HELLO_BYTES - 4),
        DATA_CALL + os.urandom(100 * HELLO_BYTES),
    ],
    ids=["another token", "called by an old name", "not sealed", "garbage", "endless garbage"],
)
def test_call_to_another_member_gets_no_answer(hello: bytes) -> None:
    async def scene() -> None:
        async with opened_for_data() as (port, number, taken):
            assert await all_that_comes(await call(number, hello)) == b""
            assert (taken, port.strangers) == ([], 0)
            await assert_answers(number)

    asyncio.run(scene())


@pytest.mark.parametrize("size", [4, 100, HELLO_BYTES - 1])
def test_unfinished_handshake_times_out(size: int, impatient: None) -> None:
    async def scene() -> None:
        async with opened_for_data() as (_, number, taken):
            assert await all_that_comes(await call(number, caller_of().hello[:size])) == b""
            assert taken == []

    asyncio.run(scene())


def test_caller_without_proof_is_refused(impatient: None) -> None:
    async def scene() -> None:
        async with opened_for_data() as (_, number, taken):
            assert len(await all_that_comes(await call(number, caller_of().hello + b"\0" * 32))) == ANSWER_BYTES
            assert taken == []

    asyncio.run(scene())


def test_replayed_call_gets_no_answer() -> None:
    """Nor does it take a caller's place, from which replays would evict members of the run."""

    async def scene() -> None:
        async with opened_for_data() as (port, number, taken):
            caller = caller_of()
            await finish(caller, await call(number, caller.hello))
            assert len(taken) == 1
            assert await all_that_comes(await call(number, caller.hello)) == b""
            assert (len(taken), port.callers, port.strangers) == (1, 0, 0)

    asyncio.run(scene())


def test_oldest_of_too_many_calls_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_MOST_HEARD", 2)
    heard, hellos = SeenCalls(), [bytes([n]) * HELLO_BYTES for n in range(3)]
    assert [heard.is_new(hello) for hello in (*hellos, hellos[2], hellos[0])] == [True, True, True, False, True]
