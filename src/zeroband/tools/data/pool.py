"""The worker processes of a preparation, and who is given what. One thread; they end with it, however it ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol

from zeroband.errors import ConfigError
from zeroband.node.processes import start_leashed
from zeroband.tools.data.folder import UnitRecord
from zeroband.tools.data.plan import Plan
from zeroband.tools.data.progress import say_warning
from zeroband.tools.data.units import OnProgress
from zeroband.tools.data.worker import Pipe

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}

OnDone = Callable[[int, UnitRecord | None], None]
"""Told each unit that is finished, and its record if it made one."""


class Workers(Protocol):
    """Who does the work of a preparation."""

    def run(self, tasks: Iterable[dict[str, Any]], on_progress: OnProgress, on_done: OnDone) -> None:
        """Have all tasks done, in no order that anybody may rely on. Raises: ConfigError, StorageLost."""
        ...


OpenWorkers = Callable[[Plan, str, int, float], AbstractContextManager[Workers]]
"""Opens workers for a plan: where OUT is, how many, and how long a storage of sources that fails is asked again."""


class Pool(Workers):
    """Processes of `worker`, each with a tokenizer of its own that runs on one thread."""

    def __init__(self, plan: Plan, out: str, workers: int, retry_s: float) -> None:
        self._begin = json.dumps({"plan": plan.to_json().decode(), "out": out, "retry_s": retry_s}).encode()
        self._workers = workers
        self._processes: dict[Pipe, subprocess.Popen[bytes]] = {}

    def run(self, tasks: Iterable[dict[str, Any]], on_progress: OnProgress, on_done: OnDone) -> None:
        waiting = iter(tasks)
        busy = dict[Pipe, dict[str, Any]]()
        for number in range(self._workers):
            if (task := next(waiting, None)) is None:
                break
            is_new = number >= len(self._processes)
            pipe = self._start() if is_new else list(self._processes)[number]
            self._give(pipe, task, begins=is_new)
            busy[pipe] = task
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                said = self._received(pipe, busy[pipe])
                if "progress" in said:
                    on_progress(*said["progress"])
                    continue
                if "warning" in said:
                    say_warning(said["warning"])
                    continue
                if "error" in said:
                    raise ConfigError(said["error"])
                on_done(said["done"], None if said["record"] is None else UnitRecord.of_json(said["record"].encode()))
                del busy[pipe]
                if (task := next(waiting, None)) is not None:
                    self._give(pipe, task)
                    busy[pipe] = task

    def _start(self) -> Pipe:
        ours, theirs = multiprocessing.Pipe()
        process = start_leashed(
            [sys.executable, "-m", "zeroband.tools.data.worker", str(theirs.fileno())],
            env=os.environ | _ONE_THREAD,
            output=None,
            death_signal=signal.SIGKILL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._processes[ours] = process
        return ours

    def _give(self, pipe: Pipe, task: dict[str, Any], *, begins: bool = False) -> None:
        try:
            if begins:
                pipe.send_bytes(self._begin)
            pipe.send_bytes(json.dumps(task).encode())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._lost(pipe, task) from error

    def _received(self, pipe: Pipe, task: dict[str, Any]) -> dict[str, Any]:
        try:
            return json.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            raise self._lost(pipe, task) from error

    def _lost(self, pipe: Pipe, task: dict[str, Any]) -> ConfigError:
        code = self._processes[pipe].wait()
        return ConfigError(
            f"a worker ended with {code} while it made unit {next(iter(task.values()))}; -9 is most often the "
            "memory: give fewer --workers; what is finished stays, and the same command goes on from there"
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
