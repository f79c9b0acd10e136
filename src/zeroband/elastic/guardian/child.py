"""A process next to the trainer, bound to it by a pipe: it ends when the trainer's end of its standard input closes.

Its order is one line on its standard input, since no secret belongs on a command line; what it says are lines on its
standard output. The trainer's end, and what such a process does first.
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
"""Longest silence of a process that starts; a busy machine loads its modules for a while."""

_END_S = 5.0


def speaks(pipe: IO[bytes], within_s: float) -> bool:
    """Whether a pipe has something to read, or ends, within this time."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


class Child:
    """The trainer's end: owns the process. `close()` ends it, in a few seconds at most. Raises OSError."""

    def __init__(self, module: str, *arguments: str, pass_fds: Collection[int] = ()) -> None:
        self._process = subprocess.Popen(
            uncollected(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
            bufsize=0,  # what has been read ahead would not be seen by a poll
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """What it says."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def is_running(self) -> bool:
        return self._process.poll() is None

    def give(self, order: DataclassInstance) -> None:
        """Hand over its order."""
        self.tell((json.dumps(asdict(order)) + "\n").encode())

    def tell(self, line: bytes) -> None:
        """Write to it; one that has ended is told nothing."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(line)

    def close(self, last_word: bytes = b"") -> None:
        """End it, after this word. Once is enough."""
        if self._input.closed:
            return
        self.tell(last_word)
        self._input.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.output.close()


def take_order() -> tuple[dict[str, Any], IO[bytes]]:
    """In the process: what it is to do, with a `node_id` for its log, and its end of the pipe to the trainer."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)  # the trainer's end of the pipe decides, not the terminal, nor Slurm
    trainer = os.fdopen(sys.stdin.fileno(), "rb", buffering=0)
    order = json.loads(trainer.readline())
    setup_logging("WARNING", order["node_id"], 0)
    return order, trainer
