"""Real nodes that are forked from a process which has loaded torch: a start costs the processor 0.5 s, not 2.1 s.

Launcher and ranks are processes of their own as ever: session, environment (in /proc, too), signals, output, parent and
exit are those of processes that were executed. Two things differ: the hashes of strings, which these nodes share, and
/proc/PID/cmdline. Tests whose nodes start from a command keep both.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from zeroband.node import launch, processes
from zeroband.node.process_start import ignore_closed_streams, load_uncollected, open_standard_streams
from zeroband.tools.cluster import NodeProcess

LAUNCHER = (sys.executable, "-m", "zeroband.node.launch")
RANK = (sys.executable, "-u")
ROOM = 100_000
"""Bytes for the environment of a node where /proc shows it."""
POLL_S = 0.02


class Process(Protocol):
    """What a node needs of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def send_signal(self, sig: int) -> None: ...


class Forked:
    """A forked process as its owner sees it. `ask`: gives its exit code, or None while it runs."""

    def __init__(self, pid: int, ask: Callable[[int], int | None]) -> None:
        self.pid, self.returncode, self._ask = pid, None, ask

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ask(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end_s is not None and time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Nursery:
    """The process from which nodes are forked, seen from the tests; it ends with them. Any thread may ask it."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-u", "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, env={**env, "ROOM": "-" * ROOM}, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._answers, self._lock = self._ours.makefile("r", encoding="utf-8"), threading.Lock()

    def _ask(self, **question: Any) -> Any:
        with self._lock:
            self._ours.sendall(json.dumps(question).encode() + b"\n")
            return json.loads(self._answers.readline())

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], output: Path, death_signal: signal.Signals
    ) -> Process:
        """Start a launcher; it gets the signal when the nursery ends."""
        output.touch()  # whoever looks finds it at once
        first = command.index(LAUNCHER[0])
        pid = self._ask(
            arguments=command[first + len(LAUNCHER) :],
            network=command[first - 1] if first else None,
            env=dict(env),
            output=str(output.absolute()),
            cwd=str(Path.cwd()),
            death_signal=int(death_signal),
        )
        return Forked(pid, lambda pid: self._ask(pid=pid))


@functools.cache
def nursery() -> Nursery:
    """The nursery of this process."""
    return Nursery()


def start_launcher(
    command: Sequence[str], *, env: Mapping[str, str], output: Path, death_signal: signal.Signals
) -> Process:
    """Start a node as `processes.start_child` does; forked, unless its process has to be executed."""
    is_in_network = list(command[1:3]) == ["netns", "exec"]
    is_launcher = tuple(command[4 if is_in_network else 0 :][: len(LAUNCHER)]) == LAUNCHER
    if not is_launcher or "LD_PRELOAD" in env or "COVERAGE_PROCESS_START" in env:
        return processes.start_child(command, env=env, output=output, death_signal=death_signal)
    return nursery().start(command, env=env, output=output, death_signal=death_signal)


PreloadedNode = functools.partial(NodeProcess, start=start_launcher)
"""For `LocalCluster(..., node=PreloadedNode)`."""


# -- in the nursery and what is forked from it ------------------------------------------------------------------------


class Born(BaseException):
    """Takes a forked process out of all that its parent was doing, to its beginning: it has an exit of its own."""

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__()
        self.run = run


def main(channel: socket.socket) -> None:
    for module in ("zeroband.runtime.loop", "zeroband.runtime.run_summary", "zeroband.train"):
        load_uncollected(module)
    with channel, channel.makefile("r", encoding="utf-8") as questions:
        while line := questions.readline():
            asked = json.loads(line)
            answer = exit_code_of(asked["pid"]) if "pid" in asked else fork(functools.partial(launch_node, asked))
            channel.sendall(json.dumps(answer).encode() + b"\n")


def exit_code_of(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def fork(run: Callable[[int], object]) -> int:
    """Fork a process that runs `run`, which gets the id of its parent."""
    owner = os.getpid()
    if (pid := os.fork()) == 0:
        raise Born(functools.partial(run, owner))
    return pid


def launch_node(asked: Mapping[str, Any], owner: int) -> None:
    output = os.open(asked["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(asked["cwd"])
    if asked["network"] is not None:
        enter_network(asked["network"])
    begin(asked["env"], asked["death_signal"], owner)
    launch.start_child = start_rank  # type: ignore[assignment]
    sys.argv = [str(launch.__file__), *asked["arguments"]]
    open_standard_streams()
    ignore_closed_streams(stdout=True)
    code = launch.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a launcher has not loaded torch, whose end takes longer than all that it does


def enter_network(name: str) -> None:
    """Do what `ip netns exec` does before it executes a command: its network, and the /sys that shows it."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_slave_rec, mnt_detach = 0x20000, 1 << 19 | 1 << 14, 2
    with Path("/run/netns", name).open("rb") as namespace:
        failed = libc.setns(namespace.fileno(), 0)
    failed = failed or libc.unshare(clone_newns) or libc.mount(b"", b"/", b"none", ms_slave_rec, None)
    libc.umount2(b"/sys", mnt_detach)
    if failed or libc.mount(name.encode(), b"/sys", b"sysfs", 0, None):
        raise OSError(ctypes.get_errno(), f"cannot enter the network {name}")


def start_rank(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    output: None,
    death_signal: signal.Signals,
    pass_fds: Sequence[int] = (),
) -> Process:
    """The launcher's `start_child`."""
    if tuple(command[: len(RANK)]) != RANK or command[len(RANK)].startswith("-"):
        return processes.start_child(command, env=env, output=output, death_signal=death_signal, pass_fds=pass_fds)
    kept = {fd: os.dup(fd) for fd in pass_fds}  # the launcher closes its own on the way out
    pid = fork(functools.partial(run_rank, command[len(RANK) :], env, death_signal, kept))
    for copy in kept.values():
        os.close(copy)
    return Forked(pid, exit_code_of)


def run_rank(
    command: Sequence[str], env: Mapping[str, str], death_signal: int, kept: Mapping[int, int], owner: int
) -> None:
    for fd, copy in kept.items():
        os.dup2(copy, fd)
        os.close(copy)
    begin(env, death_signal, owner)
    sys.argv = [*command]
    sys.path[0] = str(Path(command[0]).resolve().parent)  # as Python does; the trainer drops it
    runpy.run_path(command[0], run_name="__main__")


def begin(env: Mapping[str, str], death_signal: int, owner: int) -> None:
    """Be a process of its own, as one that was executed with this environment."""
    os.setsid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(death_signal), 0, 0, 0)
    if os.getppid() != owner:
        sys.exit("the owner was gone before its process began")
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    os.environ.clear()
    os.environ.update(env)
    show_environment(env)
    tempfile.tempdir = None
    if threads := env.get("OMP_NUM_THREADS"):  # OpenMP has read its variable in the parent
        sys.modules["torch"].set_num_threads(int(threads))


def show_environment(env: Mapping[str, str]) -> None:
    """Write it where /proc/PID/environ shows it: by that nodes and what is left of them are found."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, stop = int(fields[50 - 3]), int(fields[51 - 3])
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    assert len(shown) <= stop - start, "the environment of a node is larger than ROOM"
    ctypes.memmove(start, shown.ljust(stop - start, b"\0"), stop - start)


def be() -> None:
    """Serve; a forked process comes back here, as often as it is forked again, and ends as a script does."""
    run: Callable[[], object] = functools.partial(main, socket.socket(fileno=int(sys.argv[1])))
    while True:
        try:
            run()
            return
        except Born as born:
            run = born.run


if __name__ == "__main__":
    be()
