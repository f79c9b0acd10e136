"""The worker processes of a preparation, which end with the command in any case.

Each is connected by a pipe of pickled values. To a worker: (plan, OUT, retry_s) once, then tasks. From it:
("progress", (bytes, tokens)), ("warning", text), ("done", record or None) for each task, and ("error", text) if it
cannot continue.
"""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, TypeAlias

from zeroband.errors import ConfigError, StorageLost
from zeroband.node.processes import start_child
from zeroband.observe.log import ROOT, format_fields
from zeroband.tools.data.folder import Folder, UnitRecord, open_out, writing_to
from zeroband.tools.data.plan import Plan
from zeroband.tools.data.units import OnProgress, Task, Units

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}

Pipe: TypeAlias = "Connection[Any, Any]"  # generic only for type checkers

OnDone = Callable[[Task, UnitRecord | None], None]
"""Receives each finished task and its record, if any."""


class Pool:
    """A pool of single-threaded worker processes.

    workers: their maximum number. retry_s: time for which failing sources are retried.
    """

    def __init__(self, plan: Plan, out: str, workers: int, retry_s: float) -> None:
        self._begin = (plan, out, retry_s)
        self._workers = workers
        self._processes: dict[Pipe, subprocess.Popen[bytes]] = {}

    def run(self, tasks: Iterable[Task], on_progress: OnProgress, on_done: OnDone) -> None:
        """Run all tasks, in no particular order. Raises ConfigError, StorageLost."""
        waiting, idle = iter(tasks), list(self._processes)
        busy = dict[Pipe, Task]()
        for task in itertools.islice(waiting, self._workers):
            self._give(idle.pop() if idle else self._start(task), task, busy)
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                kind, value = self._received(pipe, busy[pipe])
                match kind:
                    case "progress":
                        on_progress(*value)
                    case "warning":
                        say_warning(value)
                    case "error":
                        raise ConfigError(value)
                    case _:
                        on_done(busy.pop(pipe), value)
                        if (task := next(waiting, None)) is not None:
                            self._give(pipe, task, busy)

    def _start(self, first: Task) -> Pipe:
        ours, theirs = multiprocessing.Pipe()
        process = start_child(
            [sys.executable, "-m", "zeroband.tools.data.workers", str(theirs.fileno())],
            env=os.environ | _ONE_THREAD,
            output=None,
            death_signal=signal.SIGKILL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._processes[ours] = process
        self._send(ours, self._begin, first)
        return ours

    def _give(self, pipe: Pipe, task: Task, busy: dict[Pipe, Task]) -> None:
        busy[pipe] = task
        self._send(pipe, task, task)

    def _send(self, pipe: Pipe, value: Any, task: Task) -> None:
        try:
            pipe.send(value)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._lost(pipe, task) from error

    def _received(self, pipe: Pipe, task: Task) -> tuple[str, Any]:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._lost(pipe, task) from error

    def _lost(self, pipe: Pipe, task: Task) -> ConfigError:
        code = self._processes[pipe].wait()
        return ConfigError(
            f"a worker exited with {code} at unit {task.unit}; -9 usually means out of memory: give fewer --workers; "
            "finished units are kept, and the same command resumes"
        )

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe, process in self._processes.items():
            process.kill()
            process.wait()
            pipe.close()


def say_warning(text: str) -> None:
    """Print a warning, above the progress bar if there is one."""
    print(f"zeroband data prepare: {text}", file=sys.stderr, flush=True)


@contextmanager
def warnings_to(say: Callable[[str], None]) -> Generator[None]:
    """Pass this package's log lines of level INFO and above to `say` inside the block."""
    logger, handler = logging.getLogger(ROOT), _Told(say)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Told(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{record.getMessage()} {format_fields(getattr(record, 'fields', {}))}".rstrip())


def main(argv: Sequence[str]) -> int:
    """Work until the pipe is closed. `argv`: the pipe's descriptor. Returns the exit code."""
    pipe: Pipe = Connection(int(argv[0]))

    def tell(kind: str, value: Any) -> None:
        pipe.send((kind, value))

    with warnings_to(functools.partial(tell, "warning")):
        try:
            _work(pipe, tell)
        except (ConfigError, StorageLost) as error:
            tell("error", str(error))
        except Exception as error:  # noqa: BLE001 - report the cause instead of only exiting
            traceback.print_exc()
            tell("error", f"{type(error).__name__}: {error}; this is a bug; see the traceback above")
    return 0


def _work(pipe: Pipe, tell: Callable[[str, Any], None]) -> None:
    plan, out, retry_s = pipe.recv()
    units = Units(plan, Folder(open_out(out)), retry_s)
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        with writing_to(out):
            record = units.make(task, lambda size, tokens: tell("progress", (size, tokens)))
        tell("done", record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
