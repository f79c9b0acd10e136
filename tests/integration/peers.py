"""Peers of one run whose loops are their own, as processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zeroband
from zeroband.node.processes import ranks_of
from zeroband.observe.view import node_id_of_member

DEADLINE_S = 120.0


@dataclass
class Peers:
    """Peers of one run on this machine; what they have written."""

    folder: Path
    store_url: str
    script: Path
    arguments: tuple[str, ...]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])

    @property
    def run_id(self) -> str:
        """Of these peers alone: pytest's workers have folders of equal names, and one shared memory."""
        return f"{self.folder.name}-{os.getpid()}"

    def start(
        self, name: str, *arguments: str, launcher: tuple[str, ...] = (), settings: Mapping[str, str] | None = None
    ) -> None:
        """Start a peer. `launcher`: arguments of Python before the script's. `settings`: environment variables."""
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(zeroband.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "ZERO_BAND_NODE__ID": name,
            "ZERO_BAND_RUN__ID": self.run_id,
            "ZERO_BAND_RUN__DIR": str(self.folder),
            "ZERO_BAND_FAULT__DETECT_S": "2",
            **(settings or {}),
        }
        arguments = ("--store", self.store_url, *self.arguments, *arguments)
        command = [sys.executable, *launcher, str(self.script), *arguments]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def log(self, name: str) -> str:
        """What a peer has printed."""
        return (self.folder / f"{name}.log").read_text()

    def read(self, name: str, file: str) -> list[dict[str, Any]]:
        path = self.folder / self.run_id / name / file
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rounds(self, name: str) -> list[dict[str, Any]]:
        """Rounds that a peer has recorded."""
        return [event for event in self.read(name, "events.jsonl") if event["kind"] == "round_committed"]

    def memory(self, name: str) -> list[Path]:
        """What a peer has in shared memory."""
        return list(Path("/dev/shm").glob(f"zeroband-{self.run_id}@{name}"))

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_so():
            ended = [name for name, peer in self.running.items() if peer.poll() is not None]
            if ended or time.monotonic() > end_s:
                said = "\n".join((self.folder / f"{name}.log").read_text()[-3000:] for name in self.running)
                raise AssertionError(f"not within {DEADLINE_S:g} s, or {ended} ended: {what}\n{said}")
            time.sleep(0.1)

    def until_contributing(self, watched: str, *names: str) -> None:
        """Wait until a peer records a round to which exactly these contributed."""

        def contribute() -> bool:
            newest = self.rounds(watched)[-1:]
            return any(set(self.weights(event)) == set(names) for event in newest)

        self.until(contribute, f"{', '.join(names)} contribute, and nobody else")

    @staticmethod
    def weights(event: Mapping[str, Any]) -> dict[str, int]:
        """Of the contributions to a round, by name."""
        pairs = zip(event["members"], event["weights"], strict=True)
        return {node_id_of_member(member): weight for member, weight in pairs if weight}

    def leave(self, name: str) -> int:
        """Ask a peer to leave, the last of its ranks if it has several; its exit code."""
        peer = self.running.pop(name)
        os.kill((peer.pid, *ranks_of(peer.pid))[-1], signal.SIGTERM)
        return peer.wait(DEADLINE_S)

    def end(self, name: str) -> int:
        """Wait until a peer has ended by itself; its exit code."""
        return self.running.pop(name).wait(DEADLINE_S)

    def kill(self) -> None:
        """End all that still runs."""
        for peer in self.running.values():
            for pid in (*ranks_of(peer.pid), peer.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            peer.wait()
