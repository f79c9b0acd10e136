"""Nodes whose processes are forked from a server that has loaded torch: each costs 0.3 s of a processor, not 2.4.

For many tiny runs. Launcher, ranks, guardian, ports and files are as ever; only `python SCRIPT` is a fork.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event, Thread
from typing import NoReturn

from zeroband.node.launch import Launcher, parse
from zeroband.node.process_start import load_uncollected
from zeroband.node.processes import Child, end_with_parent, show_environment
from zeroband.tools.cluster.network import enter_namespace, namespace_of
from zeroband.tools.cluster.node_process import NodeProcess, NodeSpec

_PRELOAD = "zeroband.tools.cluster.preload"
_SHARDING = ("torch.distributed.fsdp", "torch._dynamo")
"""What each of several ranks would load when it first shards, 1.7 s of a processor; their launcher does it for all."""
_BEFORE_SCRIPT = [sys.executable, "-u"]


def forked_if_possible(spec: NodeSpec) -> NodeProcess:
    """Return a forked node, or an executed one where a fork cannot do it.

    That is: where its prefix does more than enter a network namespace, or libraries are to be loaded before all others.
    """
    does_more = bool(spec.prefix) and namespace_of(spec.prefix) is None
    return NodeProcess(spec) if does_more or "LD_PRELOAD" in spec.env else ForkedNode(spec)


def load_server() -> Event:
    """Start the server that forks nodes, without waiting for it; the first node would wait until it has loaded torch.

    The server ends with the calling thread. Returns what is set as soon as a node can be forked, or none ever can.
    """
    server, loaded = _server(), Event()
    forkserver.ensure_running()

    def wait() -> None:
        try:
            server.Process(target=int).start()  # is forked by a server that has loaded everything
        finally:
            loaded.set()

    Thread(target=wait, daemon=True).start()
    return loaded


def _server() -> ForkServerContext:
    server = get_context("forkserver")
    server.set_forkserver_preload([_PRELOAD])
    return server


class ForkedNode(NodeProcess):
    """A node that is forked from a server: `LocalCluster(..., node=ForkedNode)`.

    The server starts with the first node and ends with the thread that started it, and its nodes with it. A variable of
    the environment that is read while modules load has no effect, and a script finds the trainer's modules loaded.
    """

    def _start(self, arguments: Sequence[str], env: Mapping[str, str]) -> Child:
        self.console.touch()
        namespace = namespace_of(self.spec.prefix)
        return ForkedProcess(_server().Process(target=_launch, args=(arguments, dict(env), self.console, namespace)))

    def kill(self) -> None:
        self._launcher.send_signal(signal.SIGKILL)  # one that was just forked does not show its mark yet
        super().kill()


class ForkedProcess:
    """A process of `multiprocessing` with the methods of `subprocess.Popen` that a node needs."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)


def _launch(arguments: Sequence[str], env: Mapping[str, str], console: Path, namespace: str | None) -> None:
    """Be the launcher of a node: runs in a fork of the server."""

    def work() -> int:
        if namespace is not None:
            enter_namespace(namespace)
        output = os.open(console, os.O_WRONLY | os.O_APPEND)
        for stream, number in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(stream, number)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        launch = parse(arguments)
        if launch.ranks > 1:
            for module in _SHARDING:
                load_uncollected(module)
        return Launcher(launch, start=_fork_rank).run()

    _become(work, env, signal.SIGTERM)


def _fork_rank(
    command: Sequence[str], *, env: Mapping[str, str], death_signal: signal.Signals, **_inherited: object
) -> Child:
    """Start a rank as `start_child` does; what the launcher has open is open in it."""
    assert list(command[:2]) == _BEFORE_SCRIPT, command
    return ForkedProcess(
        get_context("fork").Process(target=_be_rank, args=(command[2:], env, death_signal, os.getpid()))
    )


def _be_rank(command: Sequence[str], env: Mapping[str, str], death_signal: signal.Signals, launcher: int) -> None:
    def work() -> int:
        if os.getppid() != launcher:
            sys.exit("the launcher was gone before this rank began")
        if threads := env.get("OMP_NUM_THREADS"):  # OpenMP has read its variable in the server
            sys.modules["torch"].set_num_threads(int(threads))
        sys.argv = list(command)
        sys.path[:0] = [str(Path(command[0]).parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        runpy.run_path(command[0], run_name="__main__")
        return 0

    _become(work, env, death_signal)


def _become(work: Callable[[], int], env: Mapping[str, str], death_signal: signal.Signals) -> NoReturn:
    """Do the work of a new process, with its environment and the default handlers of signals; end with its code."""
    code = 1
    try:
        os.setsid()
        end_with_parent(death_signal)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        show_environment()
        code = work()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - nothing of the server may run here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
