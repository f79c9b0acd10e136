"""A node of two machines: the bits of one machine with all ranks; it ends with either, and comes back whole."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.tiny_runs import ENDLESS, TINY_RUN, ForkedCluster, until

from zeroband.node.launch import free_port
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.cluster.network import Network
from zeroband.tools.cluster.node_process import NodeProcess

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = 2
"""Of each machine."""
LIMIT_S = 120.0
RUN = f"machines-{os.getpid()}"
"""Its folder in shared memory is the machine's, where other checkouts may run these tests, too."""
DILOCO = ("--outer.type=diloco", "--outer.inner-steps=4", "--fault.detect-s=2", *TINY_RUN)
PACED = ("--fault.inject", "inner@+0=TAKES0.1")
"""A node that joins does not catch up with rounds of milliseconds."""
WAYS = {
    "diloco": ("--train.total-steps=16",),
    "eager": ("--outer.overlap=full", "--outer.merge=eager", "--train.total-steps=16"),
    "streaming": ("--model.n-layers=2", "--outer.fragments=2", "--outer.overlap=2", "--train.total-steps=16"),
    "mean of parameters": (
        *("--outer.optimizer.lr=1", "--outer.optimizer.momentum=0", "--outer.optimizer.nesterov=false"),
        "--train.total-steps=16",
    ),
}


MACHINES = ("node0", "node0-1")
"""Both start the node `node0`, which the first one names."""


def machines_of(cluster: LocalCluster, *, host: str = "127.0.0.1") -> list[NodeProcess]:
    """Start a node of two machines. Here they are one, so each has its own folder for shared memory."""
    port, started = free_port(), list[NodeProcess]()
    for number, name in enumerate(MACHINES):
        memory = cluster.run_dir.parent / f"memory-of-{number}"
        memory.mkdir(parents=True, exist_ok=True)
        launch = ("--nnodes=2", f"--node-rank={number}", f"--master-addr={host}", f"--master-port={port}")
        started.append(cluster.start(name, ranks=RANKS, env={"ZERO_BAND_NODE__SHM_DIR": str(memory)}, launch=launch))
    return started


def files_of(folder: Path) -> dict[str, bytes]:
    """The tensors of the newest checkpoint, by file."""
    newest = max(folder.glob(f"{RUN}/step_*"))
    return {str(file.relative_to(newest)): file.read_bytes() for file in newest.rglob("*.safetensors")}


def trained(folder: Path, arguments: Sequence[str], *, machines: int) -> tuple[dict[int, set[str]], dict[str, bytes]]:
    """Digests of each round over both nodes, and the checkpoint's tensors."""
    saves = (f"--ckpt.path={folder / 'ck'}", "--ckpt.every-rounds=2")
    with ForkedCluster(folder / "runs", (*DILOCO, *arguments, *saves), nodes=2, run_id=RUN) as cluster:
        if machines == 1:
            cluster.start(ranks=2 * RANKS)
        else:
            machines_of(cluster)
        cluster.start("other")
        codes = cluster.wait(timeout_s=LIMIT_S)
        assert set(codes.values()) == {0}, cluster.describe()
        rounds = [event for node in ("node0", "other") for event in cluster.nodes[node].events("round_committed")]
    digests = dict[int, set[str]]()
    for event in rounds:
        digests.setdefault(event["round"], set()).add(event["digest"])
    return digests, files_of(folder / "ck")


@pytest.mark.parametrize("way", WAYS)
def test_two_machines_make_the_bits_of_one_with_all_ranks(tmp_path: Path, way: str) -> None:
    """Also in the checkpoint, which has the moments of the ranks on both machines."""
    (one, saved), (two, saved_by_two) = (
        trained(tmp_path / str(machines), WAYS[way], machines=machines) for machines in (1, 2)
    )
    assert len(one) >= 4 and all(len(digests) == 1 for digests in one.values())
    assert two == one
    assert saved and any("inner" in name for name in saved)
    assert saved_by_two == saved


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[LocalCluster]:
    with ForkedCluster(tmp_path / "runs", (*DILOCO, *ENDLESS, *PACED), nodes=2, run_id=RUN) as cluster:
        yield cluster


def rounds_of(cluster: LocalCluster, node: str) -> list[int]:
    return [event["round"] for event in cluster.nodes[node].events("round_committed")]


def go_on(cluster: LocalCluster, node: str, *, rounds: int = 2) -> None:
    before = len(rounds_of(cluster, node))
    until(cluster, lambda: len(rounds_of(cluster, node)) >= before + rounds, f"{node} goes on")


def comes_back(cluster: LocalCluster) -> None:
    """Start the node's machines again: it joins and contributes."""
    for name in MACHINES:
        cluster.restart(name)
    until(cluster, lambda: len(cluster.nodes["node0"].events("joined")) == 2, "the node is back")
    go_on(cluster, "node0")
    assert not cluster.view().disagreements


@pytest.mark.parametrize("lost", [0, 1])
def test_node_ends_with_either_machine_and_comes_back_whole(endless: LocalCluster, lost: int) -> None:
    machines = machines_of(endless)
    endless.start("other")
    go_on(endless, "other")
    machines[lost].kill()
    assert machines[1 - lost].wait(LIMIT_S) == 1, endless.describe()
    assert "of this node is lost" in machines[1 - lost].console_tail()
    go_on(endless, "other")
    comes_back(endless)
    assert len(endless.view().members) == 2


@pytest.mark.soak
@pytest.mark.skipif(bool(Network.obstacle()), reason=f"no networks: {Network.obstacle()}")
@pytest.mark.parametrize("lost", [0, 1])
def test_machine_that_loses_its_cable_ends_the_node_within_seconds(tmp_path: Path, lost: int) -> None:
    """No connection closes. Three networks: two machines of one node, and another node."""
    with (
        Network() as network,
        LocalCluster(tmp_path / "runs", (*DILOCO, *ENDLESS, *PACED), nodes=2, run_id=RUN, network=network) as cluster,
    ):
        machines = machines_of(cluster, host=network.address(MACHINES[0]))
        cluster.start("other")
        go_on(cluster, "other")
        network.cut_off(MACHINES[lost])
        cut_at_s = time.monotonic()
        assert [machine.wait(LIMIT_S) for machine in machines] == [1, 1], cluster.describe()
        print(f"both launchers ended {time.monotonic() - cut_at_s:.1f} s after the cut")
        go_on(cluster, "other")
        network.heal(MACHINES[lost])
        comes_back(cluster)


@pytest.mark.parametrize("asked", [0, 1])
def test_request_to_leave_at_either_machine_reaches_the_whole_node(endless: LocalCluster, asked: int) -> None:
    machines = machines_of(endless)
    endless.start("other")
    go_on(endless, "other")
    machines[asked].terminate()
    assert [node.wait(LIMIT_S) for node in machines] == [0, 0], endless.describe()
    assert "left as asked" in endless.nodes["node0"].events("left")[-1]["reason"]
    go_on(endless, "other")


def test_machines_with_different_settings_are_refused_by_name(tmp_path: Path) -> None:
    port, both = free_port(), list[NodeProcess]()
    with ForkedCluster(tmp_path / "runs", (*DILOCO, *ENDLESS), nodes=1, run_id=RUN) as cluster:
        for number, rate in enumerate(("1e-3", "2e-3")):
            launch = ("--nnodes=2", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}")
            both.append(cluster.start(f"m{number}", arguments=(f"--optim.adamw.lr={rate}",), launch=launch))
        assert [node.wait(LIMIT_S) for node in both] == [2, 2]
        assert all("different settings: optim.adamw.lr" in node.console_tail() for node in both)


def test_one_node_alone_trains_on_two_machines_and_resumes_on_one(tmp_path: Path) -> None:
    """Without [outer]; the checkpoint's folder is one that both machines see."""
    saves = (f"--ckpt.path={tmp_path / 'ck'}", "--ckpt.every-rounds=4", *TINY_RUN)
    losses = list[list[float]]()
    for machines, steps in ((1, 12), (2, 8)):
        folder = tmp_path / f"runs-{machines}"
        run = (*saves, f"--train.total-steps={steps}", f"--ckpt.path={tmp_path / f'ck-{machines}'}")
        with ForkedCluster(folder, run, nodes=1, run_id=RUN, alone=True) as cluster:
            if machines == 2:
                machines_of(cluster)
            else:
                cluster.start(ranks=2 * RANKS)
            assert set(cluster.wait(timeout_s=LIMIT_S).values()) == {0}, cluster.describe()
            losses.append(losses_of(cluster))
    run = (*saves, "--train.total-steps=12", f"--ckpt.path={tmp_path / 'ck-2'}", "--resume")
    with ForkedCluster(tmp_path / "resumed", run, nodes=1, run_id=RUN, alone=True) as cluster:
        cluster.start(ranks=2 * RANKS)
        assert set(cluster.wait(timeout_s=LIMIT_S).values()) == {0}, cluster.describe()
        (resumed,) = cluster.nodes["node0"].events("resumed_from")
        assert (resumed["step"], resumed["has_inner"]) == (8, True)
        assert losses[1] + losses_of(cluster) == losses[0]


def losses_of(cluster: LocalCluster) -> list[float]:
    records = cluster.nodes["node0"].metrics()
    return list(itertools.chain(record["train/loss"] for record in records if "train/loss" in record))
