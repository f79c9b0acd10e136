"""`observe.board`: a page beside a real run, one for those who share a folder, which shows the nodes of all machines.

One run serves all tests: two nodes share a run directory, as on one machine, and a third has another one, as elsewhere.
One page is stopped, another killed, as is a node that serves one; training goes on.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.faults.test_watched_run import CALM

from zeroband.tools.cluster import NodeProcess

pytestmark = [pytest.mark.soak, pytest.mark.faults, pytest.mark.timeout(600)]

Story = Any
RecordRun = Callable[..., Any]

NODES = ("node0", "node1", "far")
TOKEN = "sesame"
ADDRESS = re.compile(r"the page of this run is at (http://localhost:\d+)")


@dataclass
class Found:
    """What the story found, and how its nodes ended."""

    port: int
    addresses: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """What each node announced before anything happened."""
    states: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the page of each node that has one."""
    heir: Sequence[str] = ()
    """What the other node of the folder announced when the one with the page was killed."""
    heirs_state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    commands: Sequence[bytes] = ()
    """Command lines of all processes of all nodes."""
    codes: Mapping[str, int | None] = field(default_factory=dict[str, int | None])


def announced(node: NodeProcess) -> list[str]:
    """The pages that a node says it has, in its latest life."""
    return ADDRESS.findall(node.console.read_bytes()[node.console_start :].decode())


def page_of(node: NodeProcess) -> int:
    """Process id of a node's page."""
    (pid,) = (pid for pid in node.pids if b"zeroband.cli\0board" in command_of(pid))
    return pid


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def state_of(address: str) -> dict[str, Any]:
    return httpx.get(f"{address}/api/state", timeout=60.0, trust_env=False).json()


def training(state: Mapping[str, Any]) -> set[str]:
    return {node["id"] for node in state["nodes"] if node["state"] == "training"}


@pytest.fixture(scope="module")
def found(record_run: RecordRun, tmp_path_factory: pytest.TempPathFactory) -> Found:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Found(listener.getsockname()[1])

    def shown(story: Story, address: str, *node_ids: str) -> dict[str, Any]:
        """The state of a page, as soon as it shows that these nodes train."""
        story.until(lambda: training(state_of(address)) >= {*node_ids}, f"{address} shows {', '.join(node_ids)}")
        return state_of(address)

    def goes_on(story: Story) -> None:
        newest = max(story.history)
        story.until(lambda: max(story.history) >= newest + 3, "training goes on")

    def tell(story: Story) -> None:
        story.until_contributing("node0", "node1")
        far = story.cluster.start("far", env={"ZERO_BAND_RUN__DIR": str(tmp_path_factory.mktemp("elsewhere"))})
        story.until_contributing(*NODES)
        story.until(lambda: announced(far), "the page of the far node")
        found.addresses = {node_id: announced(story.node(node_id)) for node_id in NODES}
        owners = [story.node(node_id) for node_id in NODES if announced(story.node(node_id))]
        found.states = {node.node_id: shown(story, announced(node)[0], *NODES) for node in owners}
        found.commands = [command_of(pid) for node in story.cluster.nodes.values() for pid in node.pids]
        os.kill(page_of(far), signal.SIGSTOP)
        goes_on(story)
        owners[0].kill()
        heir = story.node("node1" if owners[0].node_id == "node0" else "node0")
        story.until(lambda: announced(heir), "the page of the heir")
        found.heir = announced(heir)
        found.heirs_state = shown(story, found.heir[0], heir.node_id, "far")
        os.kill(page_of(heir), signal.SIGKILL)
        goes_on(story)
        story.end()
        found.codes = {node.node_id: node.exit_code for node in (heir, far)}

    board = ("--observe.board", "true", "--observe.board-port", str(found.port))
    record_run(tell, outer=("diloco", "--outer.inner-steps", "10", *CALM, *board), ranks=(1, 1), faults={}, token=TOKEN)
    return found


def test_those_who_share_a_folder_have_one_page_and_others_their_own_at_the_address_that_is_said(found: Found) -> None:
    assert sorted(map(len, (found.addresses["node0"], found.addresses["node1"]))) == [0, 1]
    (shared,), (far,) = (found.addresses["node0"] or found.addresses["node1"], found.addresses["far"])
    assert shared == f"http://localhost:{found.port}" != far
    assert {state["run_id"] for state in found.states.values()} == {found.heirs_state["run_id"]}
    assert len(found.states) == 2


def test_page_beside_a_run_shows_the_nodes_of_all_machines_and_takes_orders(found: Found) -> None:
    for state in found.states.values():
        assert training(state) == {*NODES}
        assert (state["problem"], state["orders"]["allowed"]) == (None, True)
    assert not any(TOKEN.encode() in command for command in found.commands)


def test_page_is_taken_over_at_its_address_when_its_node_is_killed(found: Found) -> None:
    assert [*found.heir] == [f"http://localhost:{found.port}"]
    assert training(found.heirs_state) >= {"far"}


def test_nodes_whose_page_was_stopped_or_killed_train_on_and_end_well(found: Found) -> None:
    assert set(found.codes.values()) == {0}
