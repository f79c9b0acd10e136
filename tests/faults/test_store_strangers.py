"""Strangers at the stores that nodes hold: no socket of a node serves them, and a member has the run's keys alone."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest
import redis
from tests.faults.arena import TINY
from tests.faults.test_edges import listeners_of
from tests.faults.test_own_stores import holder, store_pid
from tests.faults.test_several_stores import newest, reach_round
from tests.tiny_runs import ForkedCluster

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.connection import StoreClient, connect
from zeroband.tools.cluster import LocalCluster

pytestmark = [pytest.mark.faults, pytest.mark.slow]

TOKEN = "a token that nobody guesses"
NODES = 2
ANSWER_S = 1.0
"""In which a server that answers strangers does."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two nodes that train, each with a store."""
    folder = tmp_path_factory.mktemp("strangers")
    arguments = (*TINY, "--data.cache-dir", str(folder / "cache"), "--run.token", TOKEN)
    with ForkedCluster(folder / "runs", arguments, nodes=NODES, store_url="nodes") as cluster:
        for _ in range(NODES):
            cluster.start()
        reach_round(cluster, "node0", 1, members=NODES)
        yield cluster


def test_no_socket_of_a_node_serves_a_stranger_as_a_store(cluster: LocalCluster) -> None:
    guessed = RunKey.of(None, cluster.run_id).store_password
    with ExitStack() as stack:
        asked = dict[socket.socket, tuple[str, int, bytes]]()
        for node_id, node in cluster.nodes.items():
            server = store_pid(cluster, node_id)
            listeners = listeners_of({*node.pids, server})
            assert listeners[server] == [], "the server is reached through the node's port alone"
            of_node = [s.port for pid, sockets in listeners.items() if pid not in node.rank_pids for s in sockets]
            assert of_node == [int(cluster.store_place(node_id).rpartition(":")[2])]
            ports = {listener.port for sockets in listeners.values() for listener in sockets}
            for port in ports:
                for words in (b"PING\r\n", b"*1\r\n$4\r\nPING\r\n", f"AUTH {guessed}\r\nPING\r\n".encode()):
                    stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5.0))
                    stranger.sendall(words)
                    asked[stranger] = node_id, port, words
        time.sleep(ANSWER_S)
        assert {asked[stranger]: said for stranger in asked if (said := heard(stranger))} == {}


def heard(stranger: socket.socket) -> bytes:
    """What has come by now."""
    stranger.setblocking(False)
    with suppress(OSError):
        return stranger.recv(64)
    return b""


def open_store(cluster: LocalCluster, node_id: str) -> StoreClient:
    """Log in as a member of the run."""
    key = RunKey.of(TOKEN, cluster.run_id)
    return connect(f"node://{cluster.store_place(node_id)}", timeout_s=20.0, key=key)


@pytest.mark.parametrize(
    "command",
    [
        *("CONFIG SET maxmemory 1", "CONFIG GET *", "MODULE LOAD /tmp/a.so", "SHUTDOWN NOSAVE", "FLUSHALL", "KEYS *"),
        *("SAVE", "REPLICAOF 127.0.0.1 1", "ACL LIST", "CLIENT KILL TYPE normal", "GET zeroband:{another}:run"),
    ],
)
def test_member_administers_no_store_and_reads_no_other_run(cluster: LocalCluster, command: str) -> None:
    with closing(open_store(cluster, "node0")) as member:
        assert member.exists(f"zeroband:{{{cluster.run_id}}}:store_id")
        with pytest.raises(redis.ResponseError, match=r"(?i)no permissions|not allowed"):
            member.execute_command(*command.split())


def test_node_with_another_token_is_told_so(cluster: LocalCluster) -> None:
    url, key = f"node://{cluster.store_place('node0')}", RunKey.of("another", cluster.run_id)
    with (
        closing(connect(url, timeout_s=20.0, key=key)) as stranger,
        pytest.raises(redis.ConnectionError, match=r"hung up on the handshake: are run.id and run.token the same"),
    ):
        stranger.get("zeroband:{another}:run")


@pytest.mark.parametrize("idle", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_idle_strangers_keep_no_node_out(cluster: LocalCluster, idle: int) -> None:
    """At the node whose store the run uses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        port = int(cluster.store_place(holder(cluster, "node0")).rpartition(":")[2])
        for _ in range(idle):
            with suppress(OSError):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5.0))
        late = f"late{idle}"
        cluster.start(late, env={"ZERO_BAND_ELASTIC__START_NODES": "1"})
        reach_round(cluster, late, newest(cluster, "node0") + 1, members=len(cluster.running))
