"""What a run shows to strangers of its machine: the sockets on which it listens, the command lines of its processes."""

from __future__ import annotations

import ipaddress
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.faults.arena import DEADLINE_S, TINY
from tests.stores import free_port
from tests.tiny_runs import ForkedCluster

from zeroband.tools.cluster import LocalCluster, Network, RedisServer

pytestmark = [pytest.mark.faults, pytest.mark.slow]

TOKEN, PASSWORD = "an-open-secret-of-the-run", "an-open-secret-of-the-store"
RANKS = {"node0": 2, "node1": 1}
LOOPBACK_LISTENERS_OF_A_RANK = {2: 3, 1: 1}
"""By the ranks of a node. gloo listens once for each process group, and knows no other sockets: the default group
(FSDP2), that of the trainer's decisions, and that of the thread that transfers. A rank without others has only the
default group."""

_LISTENING = "0A"


@dataclass(frozen=True)
class Listener:
    """A socket of TCP on which a process waits for connections."""

    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listeners_of(pids: Iterable[int]) -> dict[int, list[Listener]]:
    """All listening sockets of each process, by process id; what several share counts for each."""
    found: dict[int, list[Listener]] = {}
    for pid in pids:
        known = {**_listening(f"/proc/{pid}/net/tcp"), **_listening(f"/proc/{pid}/net/tcp6")}
        links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
        inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
        found[pid] = [known[inode] for inode in sorted(inodes & known.keys())]
    return found


def _listening(table: str) -> dict[str, Listener]:
    """By the number of their inodes."""
    rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
    return {row[9]: _listener(row[1]) for row in rows if row[3] == _LISTENING}


def datagram_sockets_of(pids: Iterable[int]) -> list[int]:
    """Processes that have a socket of UDP to which anybody may send."""
    found = list[int]()
    for pid in pids:
        tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("udp", "udp6")]
        inodes = {line.split()[9] for table in tables for line in table if line.split()[2].endswith(":0000")}
        links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
        found += [pid for link in links if link.removeprefix("socket:[").rstrip("]") in inodes]
    return found


def _listener(local: str) -> Listener:
    """The kernel writes an address as 32-bit words of this machine's byte order."""
    address, _, port = local.partition(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return Listener(str(ipaddress.ip_address(packed)), int(port, 16))


@dataclass(frozen=True)
class Seen:
    """A run of two nodes, one of them of two ranks, looked at while it trains."""

    listeners: Mapping[str, Mapping[int, list[Listener]]]
    """By node, then by process."""
    ranks: Mapping[str, tuple[int, ...]]
    command_lines: Mapping[int, str]
    """Of every process of the run, its store's too."""
    environments: Mapping[int, str]
    written: Mapping[str, str]
    """The text of each file in the run directory."""


class NamedMachines(Network):
    """Nodes that are called as their address is: a program that listens where its host's name says is heard by all."""

    def prefix(self, node: str) -> list[str]:
        renamed = [shutil.which("unshare") or "", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.address(node)]
        return [*renamed, *super().prefix(node)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    if why := Network.obstacle():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("edges")
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    arguments = (*TINY, "--run.token", TOKEN, "--data.cache-dir", str(folder / "cache"))
    with NamedMachines() as network:
        redis = network.redis_server(password=PASSWORD)
        cluster = ForkedCluster(folder / "runs", arguments, nodes=2, env=env, network=network, redis=redis)
        with cluster:
            yield look(cluster, redis)


def look(cluster: LocalCluster, redis: RedisServer) -> Seen:
    """Have two nodes train, and look at them."""
    nodes = [cluster.start(node_id, ranks=ranks) for node_id, ranks in RANKS.items()]
    cluster.wait_until(lambda run: (run.round or 0) >= 2, timeout_s=DEADLINE_S)
    pids = [*(pid for node in nodes for pid in node.pids), redis.pid]
    return Seen(
        listeners={node.node_id: listeners_of(node.pids) for node in nodes},
        ranks={node.node_id: node.rank_pids for node in nodes},
        command_lines={pid: _of_process(pid, "cmdline") for pid in pids},
        environments={pid: _of_process(pid, "environ") for pid in pids},
        written={
            path.relative_to(cluster.run_dir).as_posix(): path.read_text(errors="replace")
            for path in cluster.run_dir.rglob("*")
            if path.is_file()
        },
    )


def _of_process(pid: int, file: str) -> str:
    return Path(f"/proc/{pid}/{file}").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def test_a_node_listens_on_its_one_port_and_on_nothing_else_that_another_machine_reaches(seen: Seen) -> None:
    assert len(seen.listeners) == 2
    for node_id, processes in seen.listeners.items():
        assert len(processes) >= 1 + RANKS[node_id] + 1, "launcher, ranks and guardian"
        open_to_others = {pid: [s for s in sockets if not s.is_loopback] for pid, sockets in processes.items()}
        assert sum(map(len, open_to_others.values())) == 1, open_to_others
        (guardian,) = [pid for pid, sockets in open_to_others.items() if sockets]
        assert guardian not in seen.ranks[node_id]


def test_ranks_listen_on_loopback_for_gloo_only(seen: Seen) -> None:
    assert {node_id: len(ranks) for node_id, ranks in seen.ranks.items()} == RANKS
    for node_id, ranks in seen.ranks.items():
        counts = {pid: len(seen.listeners[node_id][pid]) for pid in ranks}
        assert set(counts.values()) == {LOOPBACK_LISTENERS_OF_A_RANK[len(ranks)]}, counts
        assert all(listener.is_loopback for pid in ranks for listener in seen.listeners[node_id][pid])


@pytest.mark.parametrize("secret", [TOKEN, PASSWORD])
def test_no_command_line_shows_a_secret(seen: Seen, secret: str) -> None:
    assert len(seen.command_lines) >= 8
    assert any(secret in environment for environment in seen.environments.values()), "the run has it"
    assert [line for line in seen.command_lines.values() if secret in line] == []


@pytest.mark.parametrize("secret", [TOKEN, PASSWORD])
def test_no_file_of_the_run_directory_holds_a_secret(seen: Seen, secret: str) -> None:
    assert sum(name.endswith("config.toml") for name in seen.written) == 2
    assert [name for name, text in seen.written.items() if secret in text] == []


def with_children(pids: Iterable[int]) -> list[int]:
    """These processes and those that they started, such as a store, whose environment is its own."""
    found = list(pids)
    for pid in found:
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in listed.read_text().split() if int(child) not in found]
    return found


KEYS = ("node.port", "observe.board_port", "observe.prometheus.port")


@pytest.mark.soak
def test_a_node_with_all_that_listens_listens_where_the_table_says(tmp_path: Path) -> None:
    """A store, the page and the figures beside the node's port; each of their keys has a row."""
    ports = {key: free_port() for key in KEYS}
    own = [f"--{key}={port}" for key, port in ports.items()]
    arguments = (*TINY, "--data.cache-dir", str(tmp_path / "cache"), "--observe.board", *own)
    env = {"ZERO_BAND_STORE__PEERS": f'["127.0.0.1:{ports["node.port"]}"]'}
    with ForkedCluster(tmp_path / "runs", arguments, nodes=1, store_url="nodes") as cluster:
        node = cluster.start(env=env)
        cluster.wait_until(lambda run: (run.round or 0) >= 2, timeout_s=DEADLINE_S)
        pids = with_children(node.pids)
        listeners = {listener for sockets in listeners_of(pids).values() for listener in sockets}
        assert datagram_sockets_of(pids) == []
    assert {listener.port for listener in listeners} >= set(ports.values())
    others = [listener for listener in listeners if listener.port not in ports.values()]
    assert len(others) == 1, "gloo's, of a rank without others"
    assert all(listener.is_loopback for listener in listeners), "its address is loopback"
    table = Path(__file__).parents[2].joinpath("SECURITY.md").read_text().partition("## What listens")[2]
    rows = [line for line in table.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    for key in KEYS:
        assert sum(bool(re.search(rf"`{re.escape(key)}`", row.split("|")[2])) for row in rows) >= 1, key
