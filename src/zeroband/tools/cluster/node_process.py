"""One simulated node: a launcher, its ranks and their children. Any thread may read; one starts and kills."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroband.node.processes import MARK, Child, kill_marked, marked_pids, ranks_of, signal_all, start_child
from zeroband.node.shm import remove
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.jsonl import JsonlTail
from zeroband.observe.metrics import METRICS_FILE

CONSOLE_FILE = "console.log"
"""Output of the node's processes over all starts; in the node's folder of the run directory."""


@dataclass(frozen=True)
class NodeSpec:
    """How a node is started and restarted."""

    node_id: str
    ranks: int
    script: Path
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    """The node's whole environment."""
    node_dir: Path
    """`<run.dir>/<run.id>/<node id>`."""
    memory: Path
    """Folder in shared memory; removed by `kill`, as if the machine were lost."""
    prefix: tuple[str, ...] = ()
    """Command prefix that enters its network namespace."""
    launch: tuple[str, ...] = ()
    """Further options of its launcher."""


class NodeProcess:
    """One start of a node. Ends at the latest with the thread that created it."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self._mark = uuid.uuid4().hex
        spec.node_dir.mkdir(parents=True, exist_ok=True)
        self.console = spec.node_dir / CONSOLE_FILE
        self.console_start = self.console.stat().st_size if self.console.exists() else 0
        """Offset in the console file at which this start begins."""
        arguments = ("--nproc-per-node", str(spec.ranks), *spec.launch, str(spec.script), *spec.arguments)
        self._launcher = self._start(arguments, {**spec.env, MARK: self._mark})

    def _start(self, arguments: Sequence[str], env: Mapping[str, str]) -> Child:
        """Start the launcher."""
        command = (*self.spec.prefix, sys.executable, "-m", "zeroband.node.launch", *arguments)
        return start_child(command, env=env, output=self.console, death_signal=signal.SIGTERM)

    @property
    def node_id(self) -> str:
        return self.spec.node_id

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._launcher.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the launcher: None while it runs, negative if a signal ended it."""
        return self._launcher.poll()

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    @property
    def pids(self) -> tuple[int, ...]:
        """All processes of the node: launcher, ranks, guardian and their children."""
        return tuple(sorted(marked_pids(self._mark)))

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """The ranks' process ids by local rank; empty before they start."""
        return ranks_of(self.pid)

    def kill(self) -> None:
        """SIGKILL all processes of the node and remove its shared memory, as if the machine were lost."""
        kill_marked(self._mark)
        self._launcher.wait()
        remove(self.spec.memory)

    def terminate(self) -> None:
        """Ask the node to leave (SIGTERM)."""
        self._launcher.send_signal(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP all processes of the node, as if the machine froze: connections stay open."""
        signal_all(self.pids, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `pause`."""
        signal_all(self.pids, signal.SIGCONT)

    def signal_rank(self, local_rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        os.kill(self.rank_pids[local_rank], number)

    def wait(self, timeout_s: float) -> int:
        """Wait for the node's exit code. Raises subprocess.TimeoutExpired."""
        return self._launcher.wait(timeout_s)

    def metrics(self) -> list[dict[str, Any]]:
        """Read the node's metrics.jsonl, over all starts."""
        return JsonlTail(self.spec.node_dir / METRICS_FILE).read()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Read the node's events.jsonl, optionally one kind."""
        records = JsonlTail(self.spec.node_dir / EVENTS_FILE).read()
        return [record for record in records if kind in (None, record["kind"])]

    def console_tail(self, lines: int = 60) -> str:
        """Return the end of the node's output."""
        return "\n".join(self.console.read_text(errors="replace").splitlines()[-lines:])
