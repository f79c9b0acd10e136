"""Forked nodes are what executed ones are to all who look for them, signal them and wait for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.conftest import left_behind
from tests.preloaded_nodes import PreloadedNode
from tests.tiny_runs import until

from zeroband.node.processes import variable_of
from zeroband.tools.cluster import LocalCluster, NodeProcess

pytestmark = pytest.mark.faults

STARTS = [pytest.param(NodeProcess, id="executed"), pytest.param(PreloadedNode, id="forked")]
RANK = """
import atexit, os, signal, sys, time
atexit.register(lambda: print("its exit", os.environ["RANK"], os.environ["WORTH"], sys.argv[1:], __name__))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
print("begun", signal.getsignal(signal.SIGINT) is signal.default_int_handler, os.getsid(0) == os.getpid())
time.sleep(600)
"""


def start(cluster: LocalCluster, folder: Path) -> NodeProcess:
    node = cluster.start(ranks=2, arguments=["--first", "and second"], env={"WORTH": "é"})
    until(cluster, lambda: node.console_tail().count("begun True True") == 2, "both ranks run")
    return node


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


@pytest.mark.parametrize("kind", STARTS)
def test_node_is_found_by_its_environment_and_by_nothing_when_it_was_killed(
    kind: Callable[..., NodeProcess], script: Path, tmp_path: Path
) -> None:
    with LocalCluster(tmp_path / "runs", nodes=1, script=script, alone=True, node=kind) as cluster:
        node = start(cluster, tmp_path)
        assert len(node.rank_pids) == 2 and set(node.pids) == {node.pid, *node.rank_pids}
        assert set(left_behind(cluster.run_id)) >= set(node.pids)
        assert [variable_of(pid, "LOCAL_RANK") for pid in node.rank_pids] == ["0", "1"]
        assert node.is_running
        node.kill()
        assert (node.exit_code, node.pids, left_behind(cluster.run_id)) == (-signal.SIGKILL, (), [])


@pytest.mark.parametrize("kind", STARTS)
def test_rank_that_dies_ends_its_node_and_the_other_rank_has_its_own_exit(
    kind: Callable[..., NodeProcess], script: Path, tmp_path: Path
) -> None:
    with LocalCluster(tmp_path / "runs", nodes=1, script=script, alone=True, node=kind) as cluster:
        node = start(cluster, tmp_path)
        node.signal_rank(0, signal.SIGKILL)
        assert node.wait(60.0) == 1
        said = node.console_tail()
        assert "rank 0 was ended by SIGKILL" in said
        assert "its exit 1 é ['--first', 'and second'] __main__" in said and "its exit 0" not in said
        assert left_behind(cluster.run_id) == []


@pytest.mark.parametrize("kind", STARTS)
def test_ranks_do_not_outlive_their_launcher(kind: Callable[..., NodeProcess], script: Path, tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "runs", nodes=1, script=script, alone=True, node=kind) as cluster:
        node = start(cluster, tmp_path)
        os.kill(node.pid, signal.SIGKILL)
        assert node.wait(60.0) == -signal.SIGKILL
        until(cluster, lambda: not left_behind(cluster.run_id), "the kernel ends the ranks")
