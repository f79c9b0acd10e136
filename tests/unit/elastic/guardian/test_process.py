"""The guardian's rules on a fake clock, and a guardian in a thread; real processes are in tests/faults."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.unit.elastic.conftest import until
from tests.unit.elastic.guardian.guarded import MEMBER, Guarded, an_order

from zeroband.elastic.guardian import process
from zeroband.elastic.guardian.link_report import PARTNERS_FILE, LinkReader, NamesFile
from zeroband.elastic.guardian.probes import Identity, LinkMonitor
from zeroband.elastic.guardian.process import (
    Guardian,
    GuardianOrder,
    ListenAddress,
    LivenessRule,
    await_lease,
    process_state,
    remove_when_abandoned,
)
from zeroband.elastic.guardian.rate import answer_rate
from zeroband.elastic.membership.reach import neighbours
from zeroband.elastic.membership.records import Peer, RoundPlan
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.handover import HandedOver
from zeroband.elastic.transport.handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    Callee,
    Caller,
    Introduction,
    Purpose,
    RunKey,
    StreamKeys,
)
from zeroband.errors import StoreLost
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.events import noop

OTHER = "b#1"
WITHOUT_US = RoundPlan(1, 1, 0, (OTHER,), (0,))


# -- what deserves a lease --------------------------------------------------------------------------------------------


def test_lease_is_renewed_until_the_trainer_hangs() -> None:
    rule = LivenessRule(hung_s=10.0, started_at_s=100.0)
    verdicts = [rule.may_renew(now_s, progress=0, states="SS") for now_s in (100.0, 110.0, 110.1)]
    assert verdicts == [True, True, False]


def test_progress_restarts_the_time_limit() -> None:
    rule = LivenessRule(hung_s=10.0, started_at_s=0.0)
    assert rule.may_renew(9.0, progress=1, states="R")
    assert rule.may_renew(19.0, progress=1, states="R")
    assert not rule.may_renew(19.1, progress=1, states="R")
    assert rule.may_renew(19.2, progress=2, states="R"), "it moves again"


@pytest.mark.parametrize("state", ["R", "S", "D", "I"])
def test_lease_is_renewed_for_running_and_waiting_ranks(state: str) -> None:
    assert LivenessRule(hung_s=10.0, started_at_s=0.0).may_renew(1.0, progress=1, states=["S", state])


@pytest.mark.parametrize("state", ["T", "t", "Z", "X"])
def test_one_stopped_or_dead_rank_costs_the_lease(state: str) -> None:
    rule = LivenessRule(hung_s=10.0, started_at_s=0.0)
    assert not rule.may_renew(1.0, progress=1, states=["S", state])
    assert rule.may_renew(2.0, progress=1, states=["S", "S"]), "it was continued"


# -- states of processes ----------------------------------------------------------------------------------------------


def test_state_of_a_living_process() -> None:
    assert process_state(os.getpid()) in "RS"


@pytest.fixture
def ended() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended and was not waited for yet."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process
    process.communicate()


def test_state_of_an_ended_process_is_z_until_it_is_waited_for(ended: subprocess.Popen[bytes]) -> None:
    assert process_state(ended.pid) == "Z"
    ended.wait()
    assert process_state(ended.pid) == "X"


def test_state_survives_a_name_with_parentheses_and_spaces(tmp_path: Path) -> None:
    program = tmp_path / "odd ) R name"
    program.symlink_to(sys.executable)
    process = subprocess.Popen([program, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process_state(process.pid) in "RSD"
    finally:
        process.communicate(b"\n")


# -- the guardian's life ----------------------------------------------------------------------------------------------


StartGuard = Callable[..., Guarded]


@pytest.fixture
def order(tmp_path: Path, redis_url: str, ended: subprocess.Popen[bytes]) -> GuardianOrder:
    """The order of a trainer that is this process, with a dead launcher."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "lock").touch()  # the dead trainer held it
    return an_order(tmp_path, redis_url, launcher_pid=ended.pid, renew_s=0.005)


@pytest.fixture
def start_guard(order: GuardianOrder) -> Iterator[StartGuard]:
    started: list[Guarded] = []

    def start(on_wait: Callable[[], object] = noop, **changes: Any) -> Guarded:
        started.append(Guarded(replace(order, **changes), on_wait))
        return started[-1]

    yield start
    for guarded in started:
        guarded.close()


def test_guardian_reports_only_a_lease_that_it_holds(start_guard: StartGuard) -> None:
    assert start_guard().is_alive()


def test_guardian_waits_for_a_store_that_refuses_everything_for_a_while(
    start_guard: StartGuard, redis_url: str, redis_client: redis.Redis
) -> None:
    """The trainer has used the store, so the refusal may be transient."""
    waited: list[str] = []

    def allow() -> None:
        waited.append("")
        admin.execute_command("ACL", "SETUSER", "default", "+@all")

    redis_client.execute_command("ACL", "SETUSER", "admin", "on", ">s3cret", "~*", "+@all")
    with redis.Redis.from_url(redis_url, username="admin", password="s3cret") as admin:
        admin.execute_command("ACL", "SETUSER", "default", "-@all")
        try:
            guarded = start_guard(allow, lease_s=2.0)
        finally:
            allow()
            redis_client.execute_command("ACL", "DELUSER", "admin")
        assert len(waited) > 1 and guarded.is_alive()


@pytest.mark.parametrize(
    ("said", "store_s", "holds"),
    [
        (b"holding\n", 0.0, True),
        (b"waiting\nwaiting\nholding\n", 1000.0, True),
        (b"waiting\nholding\n", -1.0, False),
        (b"waiting\n", 1000.0, False),
        (b"", 1000.0, False),
    ],
)
def test_trainer_waits_while_its_guardian_waits_for_the_store(said: bytes, store_s: float, holds: bool) -> None:
    reader, writer = os.pipe()
    os.write(writer, said)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as output:
        assert (await_lease(output, store_s=store_s) == b"holding\n") == holds


@pytest.mark.parametrize(
    ("said", "why"), [(b"waiting\n", "waited 1000 s; check store.url"), (b"", "ended, or said nothing for 60 s")]
)
def test_trainer_gets_the_guardians_error(
    order: GuardianOrder, monkeypatch: pytest.MonkeyPatch, said: bytes, why: str
) -> None:
    monkeypatch.setattr(process, "await_lease", lambda *_, **__: said)
    with closing(SharedFlags(Path(order.flags), create=True)), pytest.raises(StoreLost, match=why):
        Guardian(replace(order, store_s=1000.0))


def test_guardian_publishes_where_its_node_is_found(start_guard: StartGuard) -> None:
    guarded = start_guard()
    guarded.flags.set_serves_state(True)
    until(lambda: guarded.said().serves_state)
    said = guarded.said()
    assert (said.node_id, said.host, said.cut_off) == ("a", "127.0.0.1", ()) and said.port > 0


KEY = RunKey(b"k" * 32)
WITH_KEY = ListenAddress("127.0.0.1", run_key=KEY.secret.hex())


@pytest.fixture
def others(redis_url: str) -> Iterator[RedisStore]:
    """The store as other members use it; their leases are long."""
    with closing(RedisStore(redis_url, "run", key=KEY, lease_s=1000.0, retry_s=5.0)) as store:
        yield store


@pytest.fixture
def other(others: RedisStore) -> Iterator[socket.socket]:
    """Address of another member's guardian, which answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        others.renew_lease(OTHER, Peer("b", "127.0.0.1", listener.getsockname()[1], False), first=True)
        yield listener


def test_guardian_reports_round_trips_and_rates(start_guard: StartGuard, others: RedisStore) -> None:
    """Each of two members measures the link to the other."""
    guarded = start_guard(renew_s=0.02, listen=WITH_KEY)

    async def take(connection: socket.socket, what: HandedOver) -> None:
        await answer_rate(connection)

    with closing(
        LinkMonitor("127.0.0.1", identity=Identity(OTHER, KEY), detect_s=5.0, on_gone=print, take=take)
    ) as met:
        others.renew_lease(OTHER, Peer("b", "127.0.0.1", met.port, False), first=True)
        reader = LinkReader(Path(guarded.order.shm_dir), guarded.order.member_id)
        until(lambda: reader.read_changes() is not None and bool(reader.rates.mbit))
        assert reader.rates.mbit[OTHER] > 0 and reader.rates.rtt_ms > 0


@pytest.mark.slow
def test_guardian_publishes_an_unreachable_member_before_its_next_renewal(
    start_guard: StartGuard, other: socket.socket
) -> None:
    guarded = start_guard(lease_s=0.5, renew_s=1000.0, listen=WITH_KEY)
    assert guarded.said().cut_off == ()
    until(lambda: guarded.said().cut_off == (OTHER,))


def test_guardian_of_many_members_probes_its_neighbours_partners_and_suspects(
    start_guard: StartGuard, others: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, watched = [f"m{number}#1" for number in range(20)], list[set[str]]()
    monkeypatch.setattr(
        LinkMonitor,
        "watch",
        lambda self, members, *, silent_s: watched.append({*members, *(f"?{m}" for m in silent_s)}),
    )
    guarded = start_guard(renew_s=0.02, listen=WITH_KEY)
    writer = NamesFile(Path(guarded.order.shm_dir), PARTNERS_FILE)
    near = neighbours(MEMBER, many)
    far = sorted(set(many) - near)
    for member in many:
        others.renew_lease(member, Peer(member, "127.0.0.1", 9, False), first=True)
    until(lambda: watched[-1] == set(many))  # the trainer says nothing yet
    writer.write(())
    until(lambda: watched[-1] == near)
    writer.write([far[0], "gone#1"])
    until(lambda: watched[-1] == {*near, far[0]})
    others.renew_lease(far[1], Peer(far[1], "127.0.0.1", 9, False, (), (far[2],)))
    until(lambda: watched[-1] == {*near, far[0], far[1], far[2], f"?{far[1]}", f"?{far[2]}"})


@pytest.mark.parametrize(("members", "doubted"), [(4, ()), (20, ("m1#1",))])
def test_guardian_publishes_doubts_if_only_it_probes_a_member(
    start_guard: StartGuard,
    others: RedisStore,
    monkeypatch: pytest.MonkeyPatch,
    members: int,
    doubted: tuple[str, ...],
) -> None:
    monkeypatch.setattr(LinkMonitor, "doubted", lambda self: ("m1#1",))
    guarded = start_guard(listen=WITH_KEY)
    for number in range(members):
        others.renew_lease(f"m{number}#1", Peer("m", "127.0.0.1", 9, False), first=True)
    NamesFile(Path(guarded.order.shm_dir), PARTNERS_FILE).write(())
    until(lambda: guarded.said().doubted == doubted)


def test_guardian_ends_the_lease_of_a_member_whose_guardian_ended(
    start_guard: StartGuard, other: socket.socket
) -> None:
    """Long before it would expire."""
    guarded = start_guard(listen=WITH_KEY)
    connection, _ = other.accept()
    callee = Callee(KEY, connection.recv(HELLO_BYTES, socket.MSG_WAITALL))
    connection.sendall(callee.answer)
    assert len(connection.recv(PROOF_BYTES + 8, socket.MSG_WAITALL)) == PROOF_BYTES + 8  # and the first probe
    other.close()
    connection.close()
    until(lambda: OTHER not in guarded.store.view(0).alive)
    assert OTHER in guarded.store.view(0).peers, "it may take its lease again if it is alive after all"


@pytest.mark.parametrize("purpose", [Purpose.DATA, Purpose.STATE])
def test_guardian_hands_over_callers_with_the_token(start_guard: StartGuard, purpose: Purpose) -> None:
    """Not a call to another member, and none without a handshake."""
    guarded = start_guard(listen=WITH_KEY)
    address = ("127.0.0.1", guarded.said().port)
    for said in (b"GET /state HTTP/1.1\r\n\r\n", Caller(KEY, Introduction(OTHER, "a#0", "", True, purpose)).hello):
        with socket.create_connection(address, timeout=10) as stranger:
            stranger.sendall(said)
            with suppress(ConnectionResetError):  # what was sent had not been read
                assert stranger.recv(1) == b""
    caller = Caller(KEY, Introduction(OTHER, MEMBER, "", True, purpose))
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(caller.hello)
        proof, keys = caller.take(connection.recv(ANSWER_BYTES, socket.MSG_WAITALL))
        connection.sendall(proof)
        guarded.inbox.settimeout(10)
        message, descriptors, _, _ = socket.recv_fds(guarded.inbox, 4096, 1)
        os.close(descriptors[0])
        what = HandedOver.of(message)
        assert (what.kind, what.caller, what.keys) == (purpose, OTHER, StreamKeys(keys.open, keys.seal))


def test_guardian_ends_the_lease_of_a_hung_trainer(start_guard: StartGuard) -> None:
    guarded = start_guard(lease_s=0.05, hung_s=0.02)
    until(lambda: not guarded.is_alive())

    def trains() -> bool:
        guarded.flags.advance()
        return guarded.is_alive()

    until(trains)


def test_guardian_lets_the_lease_expire_when_a_rank_is_dead(
    start_guard: StartGuard, ended: subprocess.Popen[bytes]
) -> None:
    guarded = start_guard(lease_s=0.05, rank_pids=(os.getpid(), ended.pid))
    until(lambda: not guarded.is_alive())


def test_guardian_flags_a_refused_lease(start_guard: StartGuard) -> None:
    guarded = start_guard(renew_s=0.02)
    guarded.store.propose_plan(WITHOUT_US, current=None)
    guarded.store.expire_lease(MEMBER)
    until(lambda: guarded.flags.is_fenced)
    assert not guarded.is_alive()


def test_guardian_that_replaces_another_finds_its_member_fenced(start_guard: StartGuard, store: RedisStore) -> None:
    store.propose_plan(WITHOUT_US, current=None)
    guarded = start_guard(is_first=False)
    assert guarded.flags.is_fenced and not guarded.is_alive()


@pytest.mark.parametrize("cleanly", [True, False])
@pytest.mark.defect(2)
def test_lease_ends_with_the_pipe_to_the_trainer(start_guard: StartGuard, cleanly: bool) -> None:
    guarded = start_guard(rank_pids=())
    guarded.leave(cleanly=cleanly)
    assert not guarded.is_alive()


@pytest.mark.parametrize(("cleanly", "is_removed"), [(True, False), (False, True)])
def test_shared_memory_of_a_killed_trainer_is_removed(start_guard: StartGuard, cleanly: bool, is_removed: bool) -> None:
    """A trainer that leaves cleanly removes it."""
    guarded = start_guard(rank_pids=())
    guarded.leave(cleanly=cleanly)
    assert Path(guarded.order.shm_dir).exists() != is_removed


@pytest.mark.parametrize("living", ["rank", "launcher"])
def test_shared_memory_stays_while_a_rank_or_the_launcher_lives(order: GuardianOrder, living: str) -> None:
    pids = {"rank_pids": (os.getpid(),)} if living == "rank" else {"rank_pids": (), "launcher_pid": os.getpid()}
    remove_when_abandoned(replace(order, **pids), deadline_s=0.01)  # type: ignore[arg-type]
    assert Path(order.shm_dir).exists()


def test_guardian_acquires_its_lease_again_from_an_emptied_store(
    start_guard: StartGuard, redis_client: redis.Redis
) -> None:
    guarded = start_guard()
    redis_client.flushall()
    until(guarded.is_alive)
