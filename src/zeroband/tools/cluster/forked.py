"""Real nodes that are forked from a process which has loaded torch: each costs the processor 0.3 s to start, not 2.4 s.

For many tiny runs one after another. A node is its rank without a launcher, with a guardian, ports and files as ever.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from zeroband.node.process_start import load_uncollected
from zeroband.node.processes import MARK, kill_marked, marked_pids
from zeroband.node.shm import remove
from zeroband.tools.cluster.node_process import CONSOLE_FILE, NodeProcess, NodeSpec

Result = TypeVar("Result")

_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


def load() -> None:
    """Load what a trainer loads, before the first node is forked. No thread of torch may start in this process."""
    if "zeroband.runtime.loop" not in sys.modules:
        sys.path.insert(0, "")  # what stands there is dropped by the script of a node
        load_uncollected("zeroband.runtime.loop")
        gc.freeze()


def in_child(work: Callable[[], Result]) -> Result:
    """Return what a function returns in a forked child: it may start threads of torch, which this process must not.

    Raises what the function raises.
    """
    forks = get_context("fork")
    receiver, sender = forks.Pipe(duplex=False)
    child = forks.Process(target=_answer, args=(work, sender))
    child.start()
    sender.close()
    try:
        value, error = receiver.recv()
    except EOFError:
        raise ChildProcessError("a child process ended before it answered") from None
    finally:
        child.join()
    if error is not None:
        raise error
    return value


def _answer(work: Callable[[], Any], sender: Connection) -> None:
    try:
        sender.send((work(), None))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        sender.send((None, error))


class ForkedNode(NodeProcess):
    """A node whose one rank is a child of this process: `LocalCluster(..., node=ForkedNode)`, after `load`."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec, self._mark, self._status = spec, uuid.uuid4().hex, None
        spec.node_dir.mkdir(parents=True, exist_ok=True)
        self.console = spec.node_dir / CONSOLE_FILE
        self.console_start = self.console.stat().st_size if self.console.exists() else 0
        owner = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _become(replace(spec, env={**spec.env, MARK: self._mark}), self.console, owner)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def exit_code(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    @property
    def pids(self) -> tuple[int, ...]:
        own = () if self.exit_code is not None else (self._pid,)
        return tuple(sorted({*own, *marked_pids(self._mark)}))

    @property
    def rank_pids(self) -> tuple[int, ...]:
        return () if self.exit_code is not None else (self._pid,)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        kill_marked(self._mark)
        self.wait(60.0)
        remove(self.spec.memory)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def wait(self, timeout_s: float) -> int:
        end_s = time.monotonic() + timeout_s
        while (code := self.exit_code) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(self.node_id, timeout_s)
            time.sleep(_POLL_S)
        return code


def _become(spec: NodeSpec, console: Path, owner: int) -> None:
    """Be this node until its script ends, or the process that owns it. Never returns."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != owner:
            sys.exit("the owner was gone before its process began")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the owner may have handlers for them
            signal.signal(number, signal.SIG_DFL)
        output = os.open(console, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # the parent's streams may hold the lock of a thread that is not in this process
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        os.environ.clear()
        os.environ.update(spec.env)
        if threads := spec.env.get("OMP_NUM_THREADS"):  # OpenMP has read its variable in the parent
            sys.modules["torch"].set_num_threads(int(threads))
        sys.argv = [str(spec.script), *spec.arguments]
        runpy.run_path(str(spec.script), run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - nothing of the parent may run here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
