"""A child process of the trainer, bound to it by a pipe: it ends when its standard input closes.

It gets its order as one line on its standard input, since a command line is visible to every user, and reports by lines
on its standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from zeroband.node.process_start import uncollected
from zeroband.observe.log import setup_logging

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

START_DEADLINE_S = 60.0
"""Longest silence of a starting process; on a busy machine it takes a while to load its modules."""

_END_S = 5.0


def is_readable(pipe: IO[bytes], within_s: float) -> bool:
    """Whether a pipe has data or ends within this time."""
    poll = select.poll()  # `select.select` is limited to descriptors below 1024
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


class Child:
    """The trainer's end: owns the process. `close()` ends it within a few seconds. Raises OSError."""

    def __init__(self, module: str, *arguments: str, pass_fds: Collection[int] = ()) -> None:
        self._process = subprocess.Popen(
            uncollected(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
            bufsize=0,  # `poll` does not see data that Python has buffered
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """Its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def is_running(self) -> bool:
        return self._process.poll() is None

    def send_order(self, order: DataclassInstance) -> None:
        self.send((json.dumps(asdict(order)) + "\n").encode())

    def send(self, line: bytes) -> None:
        """Write to its standard input, unless it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(line)

    def close(self, last_line: bytes = b"") -> None:
        """Send a last line and end it; idempotent."""
        if self._input.closed:
            return
        self.send(last_line)
        self._input.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.output.close()


def read_order() -> tuple[dict[str, Any], IO[bytes]]:
    """Called in the process: return its order, which has a `node_id` for its log, and the pipe from the trainer."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)  # it ends with the pipe, not by signals of the terminal or Slurm
    trainer = os.fdopen(sys.stdin.fileno(), "rb", buffering=0)
    order = json.loads(trainer.readline())
    setup_logging("WARNING", order["node_id"], 0)
    return order, trainer
