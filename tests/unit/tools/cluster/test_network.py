from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path

import pytest
import redis

from zeroband.elastic.store.local_server import RedisServer
from zeroband.errors import ConfigError
from zeroband.node.processes import start_child
from zeroband.observe.process_stat import started_at_ticks
from zeroband.tools.cluster.network import STORE, Network, sweep

NODES = ("node0", "node1", "node2", STORE)
EVERY_WAY = set(permutations(NODES, 2))
SILENCE_S = 0.03
"""So long nothing must come; what is not lost comes within a millisecond."""
DEADLINE_S = 5.0
PORT = 7000

CLONE_NEWNET = 0x40000000

Break = Callable[[Network], None]


def _namespaces(name_part: str) -> list[str]:
    return [path.name for path in Path("/var/run/netns").glob("*") if name_part in path.name]


def _socket_in(network: Network, node: str, kind: socket.SocketKind) -> socket.socket:
    """A socket of a node's namespace; it stays there, whoever uses it."""
    made: list[socket.socket] = []

    def make() -> None:  # a thread of its own, because it stays in the namespace for the rest of its life
        namespace = os.open(f"/var/run/netns/{network.prefix(node)[-1]}", os.O_RDONLY)
        failed = ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET)
        os.close(namespace)
        if not failed:
            made.append(socket.socket(socket.AF_INET, kind))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    made[0].settimeout(DEADLINE_S)
    return made[0]


@pytest.fixture
def connect(network: Network) -> Iterator[Callable[[str, str], tuple[socket.socket, socket.socket]]]:
    """connect(one, other): both ends of a TCP connection, the one's first."""
    with ExitStack() as stack:

        def connect_two(one: str, other: str) -> tuple[socket.socket, socket.socket]:
            listener = stack.enter_context(_socket_in(network, other, socket.SOCK_STREAM))
            listener.bind((network.address(other), 0))
            listener.listen()
            near = stack.enter_context(_socket_in(network, one, socket.SOCK_STREAM))
            near.connect(listener.getsockname())
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            far = stack.enter_context(listener.accept()[0])
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return near, far

        yield connect_two


def _is_silent(connection: socket.socket) -> bool:
    """Whether nothing comes, neither bytes nor an error."""
    connection.settimeout(SILENCE_S)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(DEADLINE_S)
    return False


def _lost(network: Network, expected: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Sender and receiver of the datagrams that do not arrive when every node sends one to every other.

    Waits for those that are not expected to be lost, then a moment for the others.
    """
    missing, end_s = set(EVERY_WAY), time.monotonic() + DEADLINE_S
    with ExitStack() as stack:
        sockets = {n: stack.enter_context(_socket_in(network, n, socket.SOCK_DGRAM)) for n in NODES}
        for node, receiver in sockets.items():
            receiver.bind((network.address(node), PORT))
            receiver.setblocking(False)
        for sender, receiver in EVERY_WAY:
            sockets[sender].sendto(sender.encode(), (network.address(receiver), PORT))
        while time.monotonic() < end_s:
            for node, receiver in sockets.items():
                while data := _next_of(receiver):
                    missing.discard((data.decode(), node))
            if missing <= expected:
                end_s = min(end_s, time.monotonic() + SILENCE_S)
            time.sleep(0.001)
    return missing


def _next_of(receiver: socket.socket) -> bytes:
    try:
        return receiver.recv(100)
    except BlockingIOError:
        return b""


def _from(node: str) -> set[tuple[str, str]]:
    return {way for way in EVERY_WAY if way[0] == node}


def _to(node: str) -> set[tuple[str, str]]:
    return {way for way in EVERY_WAY if way[1] == node}


FAULTS: dict[str, tuple[Break, set[tuple[str, str]]]] = {
    "cut_off": (lambda n: n.cut_off("node1"), _from("node1") | _to("node1")),
    "drop_outgoing": (lambda n: n.drop_outgoing("node1"), _from("node1")),
    "drop_incoming": (lambda n: n.drop_incoming("node1"), _to("node1")),
    "cut_between": (lambda n: n.cut_between("node0", "node1"), {("node0", "node1"), ("node1", "node0")}),
    "store": (lambda n: n.cut_between("node1", STORE), {("node1", STORE), (STORE, "node1")}),
}


# -- what is lost ---------------------------------------------------------------------------------------------------


def test_network_lets_every_node_reach_every_other_and_the_store(network: Network) -> None:
    assert len({network.address(node) for node in NODES}) == 4
    assert _lost(network, set()) == set()


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_loses_packets_of_its_ways_and_of_no_other_until_it_is_healed(network: Network, fault: str) -> None:
    break_it, lost = FAULTS[fault]
    for _ in range(2):  # the second time changes nothing
        break_it(network)
        assert _lost(network, lost) == lost
    for _ in range(2):
        network.heal("node1")
        assert _lost(network, set()) == set()


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_stops_bytes_of_a_connection_without_an_error_until_it_is_healed(
    network: Network, connect: Callable[[str, str], tuple[socket.socket, socket.socket]], fault: str
) -> None:
    break_it, lost = FAULTS[fault]
    sender, receiver = sorted(lost)[0]
    near, far = connect(sender, receiver)
    near.sendall(b"1")
    assert far.recv(9) == b"1"
    break_it(network)
    near.sendall(b"2")
    assert _is_silent(far) and _is_silent(near)
    network.heal_all()
    near.sendall(b"3")  # the gap before it makes the kernel send what was lost at once
    with far.makefile("rb") as file:  # a socket with a time-out gives what has come, whatever MSG_WAITALL says
        assert file.read(2) == b"23"


def test_drop_outgoing_lets_a_connection_go_on_in_the_other_direction(
    network: Network, connect: Callable[[str, str], tuple[socket.socket, socket.socket]]
) -> None:
    near, far = connect("node0", "node1")
    network.drop_outgoing("node0")
    far.sendall(b"back")
    assert near.recv(9) == b"back"


def test_faults_of_two_nodes_are_healed_apart(network: Network) -> None:
    network.cut_off("node0")
    network.cut_off("node1")
    network.cut_between("node2", "node0")
    network.heal("node0")
    assert _lost(network, expected := _from("node1") | _to("node1")) == expected
    network.drop_outgoing("node2")
    network.heal_all()
    assert _lost(network, set()) == set()


def test_link_down_shows_as_an_error_and_link_up_keeps_other_faults(network: Network) -> None:
    network.drop_incoming("node2")
    for _ in range(2):
        network.link_down("node1")
    with _socket_in(network, "node1", socket.SOCK_DGRAM) as lonely, pytest.raises(OSError, match="unreachable"):
        lonely.sendto(b"", (network.address("node0"), PORT))
    network.cut_between("node0", "node1")
    for _ in range(2):
        network.link_up("node1")
    assert _lost(network, expected := _to("node2") | {("node0", "node1"), ("node1", "node0")}) == expected


@pytest.mark.parametrize("heal", [lambda n: n.heal("node1"), lambda n: n.heal_all()])
def test_heal_takes_a_link_up(network: Network, heal: Break) -> None:
    network.link_down("node1")
    heal(network)
    assert _lost(network, set()) == set()


def test_fault_of_a_node_that_is_not_there_is_refused(network: Network) -> None:
    with pytest.raises(AssertionError, match="node9 is not in this network"):
        network.cut_between("node0", "node9")
    assert _lost(network, set()) == set()


# -- namespaces -----------------------------------------------------------------------------------------------------


def test_prefix_runs_a_command_with_loopback_and_the_address_of_its_node(network: Network) -> None:
    shown = subprocess.run(
        [*network.prefix("node1"), "ip", "-o", "-4", "addr", "show", "up"], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[3] for line in shown.splitlines()] == ["127.0.0.1/8", f"{network.address('node1')}/24"]


def test_prefix_keeps_process_id_and_death_signal_of_a_leashed_command(network: Network, tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []
    is_running, go_on = threading.Event(), threading.Event()

    def own() -> None:
        command = [*network.prefix("node0"), "/bin/sh", "-c", "echo $$; exec sleep 60"]
        started.append(start_child(command, env=os.environ, output=tmp_path / "out", death_signal=signal.SIGKILL))
        is_running.set()
        go_on.wait(DEADLINE_S)

    owner = threading.Thread(target=own)
    owner.start()
    assert is_running.wait(DEADLINE_S)
    end_s = time.monotonic() + DEADLINE_S
    while not (said := (tmp_path / "out").read_text()):
        assert time.monotonic() < end_s, "the command does not begin"
        time.sleep(0.002)
    (process,) = started
    assert said == f"{process.pid}\n" and process.poll() is None
    go_on.set()
    owner.join()
    assert process.wait(DEADLINE_S) == -signal.SIGKILL


def test_node_that_comes_later_is_lost_to_one_that_is_cut_off(network: Network) -> None:
    with Network() as other:
        other.add("early")
        other.cut_off("early")
        other.add("late")
        with (
            _socket_in(other, "late", socket.SOCK_DGRAM) as late,
            _socket_in(other, "early", socket.SOCK_DGRAM) as early,
            _socket_in(other, STORE, socket.SOCK_DGRAM) as store,
        ):
            early.bind((other.address("early"), PORT))
            store.bind((other.address(STORE), PORT))
            for receiver in ("early", STORE):
                late.sendto(b"x", (other.address(receiver), PORT))
            assert store.recv(9) == b"x"
            assert _is_silent(early)


def test_networks_beside_each_other_leave_nothing_when_they_end(network: Network) -> None:
    with Network() as first, Network() as second:
        names = [first.prefix("node0")[-1], second.prefix("node0")[-1]]
        assert len(set(names)) == 2
        assert all(_namespaces(name) for name in names)
    assert not any(_namespaces(name.removesuffix("node0")) for name in names)
    assert _lost(network, set()) == set()


def test_network_leaves_nothing_when_it_cannot_be_made(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _namespaces("")
    monkeypatch.setattr(Network, "add", lambda self, node: 1 / 0)
    with pytest.raises(ZeroDivisionError), Network():
        pass
    assert _namespaces("") == before


@pytest.mark.slow
def test_network_sweeps_those_of_killed_processes_and_no_other(network: Network) -> None:
    script = (
        "from zeroband.tools.cluster.network import Network\n"
        "with Network() as network:\n"
        "    print(network.prefix('a')[-1], flush=True)\n"
        "    input()"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        sweep()
        assert _namespaces(name) == [name]
        owner.kill()
    with Network():
        pass
    assert _namespaces(name.removesuffix("a")) == []
    assert _lost(network, set()) == set()


def test_sweep_knows_an_owner_from_a_later_process_with_its_number(network: Network) -> None:
    namespace = f"zeroband-{os.getpid()}-{(started_at_ticks(os.getpid()) or 0) - 1}-abcdef-node0"
    stranger = f"zeroband-test{os.getpid()}"
    for name in (namespace, stranger):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        sweep()
        assert (_namespaces(namespace), _namespaces(stranger)) == ([], [stranger])
    finally:
        subprocess.run(["ip", "netns", "delete", stranger], check=True)


# -- where it is not possible ---------------------------------------------------------------------------------------


def test_obstacle_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    fake = tmp_path / "ip"
    fake.write_text("#!/bin/sh\necho 'not in this container' >&2; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "not in this container" in Network.obstacle()
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    assert "iproute2" in Network.obstacle()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in Network.obstacle()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in Network.obstacle()


def test_network_refuses_more_nodes_than_it_has_addresses_for(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroband.tools.cluster.network._MAX_NODES", len(NODES))
    with pytest.raises(ConfigError, match="no room for node9"):
        network.add("node9")
    assert _namespaces(network.prefix("node0")[-1].replace("node0", "node9")) == []


def value_of(server: RedisServer) -> object:
    with redis.Redis.from_url(server.local_url) as client:
        return client.get("key")


def test_redis_server_within_a_network_is_reached_by_nodes_and_by_its_owner(network: Network) -> None:
    ping = "exec 3<>/dev/tcp/$0/6379; echo PING >&3; read -t 0.1 answer <&3; echo $answer"
    ask = [*network.prefix("node0"), "bash", "-c", ping, network.address(STORE)]
    with network.redis_server() as server:
        assert server.url == f"redis://{network.address(STORE)}:6379"
        assert subprocess.run(ask, capture_output=True, timeout=10).stdout.strip() == b"+PONG"
        assert value_of(server) is None
        network.drop_outgoing(STORE)
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(ask, capture_output=True, timeout=0.1)
        server.stop()
        assert value_of(server.start()) is None


def test_limited_link_has_its_rate_in_both_directions(network: Network) -> None:
    network.limit("limited", 5)
    namespace = network.prefix("limited")[-1]
    hub, port = namespace.removesuffix("limited") + "hub", f"port{network.address('limited').rpartition('.')[2]}"
    for place, device in ((namespace, "e0"), (hub, port)):
        command = [*network.prefix("limited")[:-1], place, "tc", "qdisc", "show", "dev", device]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "tbf" in shown and "rate 5Mbit" in shown
