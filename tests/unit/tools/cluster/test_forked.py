"""A forked node: what its rank finds, how it ends, and that it ends with the process that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from zeroband.node.processes import pids_with
from zeroband.tools.cluster.forked import ForkedNode, forked_if_possible, load_server
from zeroband.tools.cluster.network import Network
from zeroband.tools.cluster.node_process import NodeProcess, NodeSpec

DEADLINE_S = 60.0


def spec_of(folder: Path, script: str, *arguments: str) -> NodeSpec:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    env = {"PATH": os.environ["PATH"], "ONLY": "this", "OMP_NUM_THREADS": "3"}
    return NodeSpec("node0", 1, path, arguments, env, folder / "node0", folder / "memory")


def test_script_finds_its_arguments_environment_and_threads_and_its_output_is_kept(tmp_path: Path) -> None:
    script = """
        import json, os, sys, torch
        print(json.dumps([sys.argv[1:], os.environ["ONLY"], "HOME" in os.environ, torch.get_num_threads()]))
        sys.exit(2)
    """
    node = ForkedNode(spec_of(tmp_path, script, "a", "--b"))
    assert node.wait(DEADLINE_S) == 2
    assert json.loads(node.console_tail()) == [["a", "--b"], "this", False, 3]
    assert not node.rank_pids and not node.is_running


def test_server_that_is_loaded_ahead_says_when_it_can_fork(tmp_path: Path) -> None:
    assert load_server().wait(DEADLINE_S)
    assert ForkedNode(spec_of(tmp_path, "")).wait(DEADLINE_S) == 0


def test_error_of_the_script_is_printed_and_its_exit_code_is_1(tmp_path: Path) -> None:
    node = ForkedNode(spec_of(tmp_path, "raise ValueError('no such key')"))
    assert node.wait(DEADLINE_S) == 1
    assert "ValueError: no such key" in node.console_tail()


SLEEPS = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("sleeps", flush=True)
    import time; time.sleep(600)
"""


def wait_for(node: NodeProcess, text: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while text not in node.console_tail():
        assert node.is_running and time.monotonic() < end_s, node.console_tail()
        time.sleep(0.02)


def test_kill_ends_the_rank_and_its_children_and_removes_its_memory(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SLEEPS)
    spec.memory.mkdir()
    node = ForkedNode(spec)
    wait_for(node, "sleeps")
    assert len(node.pids) == 3 and len(node.rank_pids) == 1  # the launcher and the rank's child, too
    with pytest.raises(subprocess.TimeoutExpired):
        node.wait(0.0)
    node.kill()
    assert node.exit_code == -signal.SIGKILL and not node.pids and not spec.memory.exists()


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03])
def test_node_that_has_just_been_started_is_killed_whole(tmp_path: Path, after_s: float) -> None:
    node = ForkedNode(spec_of(tmp_path, SLEEPS))
    time.sleep(after_s)
    node.kill()
    assert node.exit_code == -signal.SIGKILL and not node.pids


def test_terminate_asks_the_rank(tmp_path: Path) -> None:
    node = ForkedNode(spec_of(tmp_path, SLEEPS))
    wait_for(node, "sleeps")
    node.terminate()
    assert node.wait(DEADLINE_S) == 128 + signal.SIGTERM, node.console_tail()
    node.kill()


def test_nodes_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    spec_of(tmp_path, SLEEPS)
    owner = f"""
        from pathlib import Path
        from zeroband.tools.cluster.forked import ForkedNode
        from zeroband.tools.cluster.node_process import NodeSpec
        import os, time
        folder = Path({str(tmp_path)!r})
        spec = NodeSpec("node0", 1, folder / "script.py", (), dict(os.environ), folder / "node0", folder / "memory")
        node = ForkedNode(spec)
        while "sleeps" not in node.console_tail():
            time.sleep(0.02)
        print(node.pid, flush=True)
        time.sleep(600)
    """
    mark = f"{os.getpid()}-{tmp_path.name}"
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(owner)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ZB_TEST_OWNER": mark},
    )
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    child.kill()
    child.wait()
    child.stdout.close()
    end_s = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end_s, "the rank is still there"
        time.sleep(0.02)
    for left in pids_with("ZB_TEST_OWNER", mark):  # what the rank itself had started
        os.kill(left, signal.SIGKILL)


def test_each_rank_is_a_process_of_its_own_and_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        rank = int(os.environ["RANK"])
        print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
        while rank or not os.path.exists(sys.argv[1]):
            time.sleep(0.02)
        sys.exit(2)
    """
    fails = tmp_path / "fails"
    node = ForkedNode(replace(spec_of(tmp_path, script, str(fails)), ranks=2))
    for rank in range(2):
        wait_for(node, f"rank {rank} of 2")
    assert len(node.rank_pids) == 2 and set(node.rank_pids) < set(node.pids)
    fails.touch()
    assert node.wait(DEADLINE_S) == 2 and not node.pids


def test_node_that_a_fork_cannot_be_is_executed(tmp_path: Path) -> None:
    plain = spec_of(tmp_path, "import os; print('here', os.environ.get('LD_PRELOAD'))")
    by_prefix = replace(plain, prefix=("/usr/bin/env", "A=1"))
    by_variable = replace(plain, env={**plain.env, "LD_PRELOAD": "libm.so.6"})
    nodes = [forked_if_possible(spec) for spec in (by_prefix, by_variable, plain)]
    assert [type(node) for node in nodes] == [NodeProcess, NodeProcess, ForkedNode]
    assert [node.wait(DEADLINE_S) for node in nodes] == [0, 0, 0], nodes[0].console_tail()
    said = nodes[0].console_tail()
    assert said.count("here None") == 2 and said.count("here libm.so.6") == 1


def test_node_with_a_network_of_its_own_is_forked_into_it(tmp_path: Path) -> None:
    if why := Network.obstacle():
        pytest.skip(why)
    with Network() as network:
        with network.joined("node0"):
            there = Path("/proc/thread-self/ns/net").readlink()
        spec = spec_of(tmp_path, "import os; print(os.readlink('/proc/self/ns/net'))")
        node = forked_if_possible(replace(spec, prefix=tuple(network.prefix("node0"))))
        assert type(node) is ForkedNode and node.wait(DEADLINE_S) == 0, node.console_tail()
    assert node.console_tail() == str(there) != str(Path("/proc/self/ns/net").readlink())
