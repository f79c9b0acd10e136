"""Checkpoints of real nodes whose storage really fails: files that may not grow, and a file system that is full."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_runs import ENDLESS, TINY_RUN, ForkedCluster, until

from zeroband.checkpoint.loading import open_checkpoint
from zeroband.checkpoint.storage import open_storage
from zeroband.tools.cluster import LocalCluster, NodeProcess
from zeroband.tools.data.audit import audit, read_rounds

pytestmark = [pytest.mark.faults, pytest.mark.slow]

TINY = (
    *TINY_RUN,
    *ENDLESS,
    *("--outer.type", "diloco", "--outer.inner-steps", "5", "--fault.inject", "inner@+0=TAKES0.05"),
    *("--ckpt.every-rounds", "2", "--ckpt.keep-last", "1000"),
)
"""Rounds of a quarter of a second, most of it sleep. Waits between members are as long as they are by default."""


class Disk:
    """Where checkpoints go: a small file system of its own where this user may mount one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"
        path.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)]
        self.is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

    def free(self) -> None:
        self._filler.unlink()

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "ckpt")
    yield disk
    disk.close()


@contextlib.contextmanager
def two_nodes(folder: Path, disk: Disk) -> Iterator[LocalCluster]:
    arguments = (*TINY, "--ckpt.path", str(disk.path), "--data.cache-dir", str(folder / "cache"))
    (shm := folder / "shm").mkdir()
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "ZERO_BAND_NODE__SHM_DIR": str(shm)}
    with ForkedCluster(folder / "runs", arguments, nodes=2, env=env) as cluster:
        for _ in range(2):
            cluster.start()
        yield cluster


def writer_of(node: NodeProcess) -> int:
    """Process id of a node's writer."""
    (pid,) = [pid for pid in node.pids if b"zeroband.checkpoint.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def forbid_writing(node: NodeProcess, *, is_forbidden: bool) -> None:
    """From now on no file takes a byte of this node's writer, not even the record of its share; or all do again."""
    largest = 0 if is_forbidden else resource.RLIM_INFINITY
    resource.prlimit(writer_of(node), resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))


def count(node: NodeProcess, kind: str) -> int:
    return len(node.events(kind))


def whole_commits(cluster: LocalCluster) -> list[int]:
    """Inner steps of the checkpoints that all members committed together."""
    nodes = cluster.nodes.values()
    partial = {event["step"] for node in nodes for event in node.events("checkpoint_incomplete")}
    return sorted({event["step"] for node in nodes for event in node.events("checkpoint_committed")} - partial)


def fail_once(cluster: LocalCluster, by: NodeProcess, failing: NodeProcess) -> dict[str, Any]:
    """Let one node's storage fail until the other goes on without it; what that one says then."""
    whole = len(whole_commits(cluster))
    until(cluster, lambda: len(whole_commits(cluster)) > whole, "a checkpoint of both")
    said, told = count(by, "checkpoint_incomplete"), count(failing, "checkpoint_retrying")
    forbid_writing(failing, is_forbidden=True)
    until(cluster, lambda: count(failing, "checkpoint_retrying") > told, f"{failing.node_id} says that it cannot write")
    until(cluster, lambda: count(by, "checkpoint_incomplete") > said, f"{by.node_id} goes on without {failing.node_id}")
    forbid_writing(failing, is_forbidden=False)
    return by.events("checkpoint_incomplete")[said]


def committed_without(cluster: LocalCluster, by: NodeProcess, failing: NodeProcess) -> int:
    """Wait for a checkpoint that one node commits without the other, which is told on both; its inner step."""
    without = fail_once(cluster, by, failing)
    while "still being written" in without["why"].get(failing.node_id, ""):  # it failed in one that the other skipped
        without = fail_once(cluster, by, failing)
    assert without["nodes"] == [failing.node_id] and "no file may grow" in without["why"][failing.node_id]
    step = without["step"]
    until(cluster, lambda: any(e["step"] == step for e in failing.events("checkpoint_left_out")), "it is told so")
    until(cluster, lambda: any(e["step"] == step for e in by.events("checkpoint_committed")), "the commit")
    return step


@pytest.mark.soak
def test_node_that_cannot_write_is_missing_in_the_checkpoint_and_nobody_waits_for_it(
    tmp_path: Path, disk: Disk
) -> None:
    with two_nodes(tmp_path, disk) as cluster:
        first, second = cluster.nodes.values()
        steps = {second.node_id: committed_without(cluster, first, second)}
        steps[first.node_id] = committed_without(cluster, second, first)  # the one that commits before the other
        storage = open_storage(str(disk.path), cluster.run_id)
        for missing, step in steps.items():
            checkpoint = open_checkpoint(storage, step)
            checkpoint.verify()
            assert set(checkpoint.manifest.missing) == {missing}
            assert set(checkpoint.manifest.nodes) == set(cluster.nodes) - {missing}
        whole = open_checkpoint(storage, whole_commits(cluster)[0]).manifest
        assert not whole.missing and set(whole.nodes) == set(cluster.nodes)
        for node in (first, second):
            node.kill()
        for node_id in list(cluster.nodes):
            cluster.restart(node_id, arguments=["--resume.step", str(steps[second.node_id])])
        nodes = cluster.nodes
        until(cluster, lambda: all(count(node, "resumed_from") for node in nodes.values()), "they go on from it")
        assert {n: nodes[n].events("resumed_from")[0]["has_inner"] for n in nodes} == {
            first.node_id: True,
            second.node_id: False,
        }
        assert audit(read_rounds(cluster.run_dir)).is_exact


@pytest.mark.soak
def test_disk_that_is_full_for_all_is_told_and_training_goes_on(tmp_path: Path, disk: Disk) -> None:
    if not disk.is_mounted:
        pytest.skip("this user may not mount file systems")
    with two_nodes(tmp_path, disk) as cluster:
        nodes = cluster.nodes.values()
        until(cluster, lambda: any(count(node, "checkpoint_committed") for node in nodes), "a checkpoint of both")
        disk.fill()
        until(cluster, lambda: all(count(node, "checkpoint_retrying") for node in nodes), "both say so")
        for node in nodes:
            assert any("the disk is full" in event["reason"] for event in node.events("checkpoint_retrying"))
        rounds = {node.node_id: count(node, "round_committed") for node in nodes}
        until(cluster, lambda: all(count(n, "round_committed") > rounds[n.node_id] + 4 for n in nodes), "rounds go on")
        for node in nodes:  # whatever falls due meanwhile is told as well
            assert count(node, "checkpoint_skipped") or count(node, "checkpoint_failed")
        disk.free()
        before = [event["step"] for node in nodes for event in node.events("checkpoint_committed")]
        until(
            cluster,
            lambda: any(e["step"] > max(before) for n in nodes for e in n.events("checkpoint_committed")),
            "the next checkpoint",
        )
        assert audit(read_rounds(cluster.run_dir)).is_exact
