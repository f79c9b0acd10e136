"""The store that a node holds: who is let in, and how long it stays."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.servers import until
from tests.stores import RUN_ID, SHARED, a_plan, a_verdict, free_port

from zeroband.config import RunConfig, load_config
from zeroband.elastic.guardian.probes import Identity, LinkMonitor
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.reach import DialRoute
from zeroband.elastic.membership.records import Peer, StoreTerm, Verdict
from zeroband.elastic.membership.succession import ForwardPointer
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, Leaving, StoreLost
from zeroband.runtime.own_store import OwnStore

TOKEN, HOST = "a token of the run", "127.0.0.1"
PLAN = a_plan("a#1", "b#1")


def config_of(port: int, **environ: str) -> RunConfig:
    argv = ["--outer.type=ddp", "--run.id", RUN_ID, "--store.url=nodes", f"--store.peers={HOST}:{port}"]
    argv += [f"--node.port={port}", "--fault.detect-s=2"]
    return load_config(argv, {"ZERO_BAND_RUN__TOKEN": TOKEN, **environ})


def start(stack: ExitStack, port: int) -> Callable[[type[BaseException] | None], None]:
    """Start one; returns what ends it."""
    store = OwnStore(config_of(port), HOST, Departure(5.0))
    stack.callback(store.close, RuntimeError, None, None)
    return lambda kind: store.close(kind, None, None)


def run_in(stack: ExitStack, port: int, *, is_complete: bool) -> RedisStore:
    """A run in this store, in which another node holds a lease."""
    store = RedisStore(f"nodes://{HOST}:{port}", RUN_ID, key=RunKey.of(TOKEN, RUN_ID), lease_s=2.0, retry_s=2.0)
    stack.callback(store.close)
    store.reach(retry_s=2.0)
    store.found_or_match(SHARED)
    store.renew_lease("b#1", Peer("b", HOST, 4000, True), first=True)
    progress = Progress(inner_step=10, tokens=10, ledgers={}, is_complete=is_complete).to_record()
    assert store.propose_plan(PLAN, current=None, generation=store.generation)
    verdict = Verdict(PLAN, "d", {**a_verdict(PLAN).record, "progress": progress})
    assert store.propose_verdict(verdict, generation=store.generation)
    return store


def test_store_that_others_reach_needs_the_token_of_the_run() -> None:
    config = config_of(free_port(), ZERO_BAND_NODE__BIND_HOST="0.0.0.0")
    config = config.model_copy(update={"run": config.run.model_copy(update={"token": None})})
    with pytest.raises(ConfigError, match="admits anyone"):
        OwnStore(config, HOST, Departure(5.0))


def test_port_that_is_taken_is_named(stack: ExitStack) -> None:
    port = free_port()
    start(stack, port)
    with pytest.raises(ConfigError, match=f"node.port={port} is taken"):
        OwnStore(config_of(port), HOST, Departure(5.0))


def server_of(own: OwnStore) -> int:
    """The process of the server."""
    (server,) = Path(f"/proc/{own.pid}/task/{own.pid}/children").read_text().split()
    return int(server)


@pytest.mark.parametrize("is_whole", [False, True], ids=["server", "port and server"])
def test_store_that_ends_by_itself_comes_back_empty_at_its_address(stack: ExitStack, is_whole: bool) -> None:
    port = free_port()
    own = OwnStore(config_of(port), HOST, Departure(5.0))
    stack.callback(own.close, RuntimeError, None, None)
    (candidate,) = run_in(stack, port, is_complete=False).candidates
    before = candidate.probe("", None)
    os.kill(own.pid if is_whole else server_of(own), signal.SIGKILL)

    def is_back() -> bool:
        with suppress(StoreLost):
            return candidate.probe("", None).store != before.store
        return False

    until(is_back, "the store is back")
    after = candidate.probe("", None)
    assert (before.generation, after.generation) == (StoreTerm(1, before.store), None)


def test_it_stays_until_the_others_have_ended_with_the_run(stack: ExitStack) -> None:
    port = free_port()
    close = start(stack, port)
    store = run_in(stack, port, is_complete=True)
    threading.Timer(0.5, store.release_lease, ["b#1"]).start()
    began_at_s = time.monotonic()
    close(None)
    assert time.monotonic() - began_at_s >= 0.5


def test_it_keeps_nobody_who_leaves_a_run_that_goes_on(stack: ExitStack) -> None:
    port = free_port()
    close = start(stack, port)
    store, has_ended = run_in(stack, port, is_complete=False), threading.Event()

    def stay() -> None:
        while not has_ended.wait(0.1):
            with suppress(StoreLost):
                store.renew_lease("b#1", Peer("b", HOST, 4000, True))

    thread = threading.Thread(target=stay)
    thread.start()
    close(Leaving)
    has_ended.set()
    thread.join()
    with pytest.raises(StoreLost):
        store.candidates[0].view(0)


def test_it_keeps_nobody_when_the_run_uses_another_store(stack: ExitStack) -> None:
    port = free_port()
    close = start(stack, port)
    run_in(stack, port, is_complete=True).set_forward_pointer(
        ForwardPointer(StoreTerm(2, "another"), f"node://{HOST}:1")
    )
    close(None)


def test_calls_for_the_guardian_come_to_it_through_the_port_that_is_open_before_it(stack: ExitStack) -> None:
    """One after the other, as a node has them that comes back to its run."""
    own, key = OwnStore(config_of(port := free_port()), HOST, Departure(5.0)), RunKey.of(TOKEN, RUN_ID)
    stack.callback(own.close, RuntimeError, None, None)
    other = LinkMonitor(HOST, identity=Identity("b#1", key), detect_s=20.0, on_gone=lambda member: None)
    stack.callback(other.close)
    for member in ("a#1", "a#2"):
        identity, handover_socket = Identity(member, key), Path(own.port.handover_socket)
        guardian = LinkMonitor(
            HOST, identity=identity, detect_s=20.0, on_gone=lambda member: None, handover_socket=handover_socket
        )
        other.watch({member: (DialRoute(HOST, port),)})
        until(lambda member=member: member in other.seen(), f"{member} answers")
        guardian.close()
    assert guardian.port == 0
