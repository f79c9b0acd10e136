"""Child processes that never outlive their owner, and the search for processes by a mark. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from zeroband.errors import ConfigError
from zeroband.observe.process_stat import number_of, parent_of

MARK = "ZEROBAND_OWNER"
"""Environment variable that all descendants of a node inherit, whatever their session and parent."""

_OURS = ("ZERO", "LOCAL_RANK")
"""Beginnings of variables by which processes are found."""
_KILL_S = 10.0
_EMPTY_LOOKS = 3
"""Scans that must find nothing: during exec() a process has no environment for a moment."""

_PR_SET_PDEATHSIG = 1
_LEASH = """
import ctypes, os, sys
pr_set_pdeathsig = 1
ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(sys.argv[1]), 0, 0, 0)
if os.getppid() != int(sys.argv[2]):
    sys.exit("the owner was gone before its process began")
os.execv(sys.argv[3], sys.argv[3:])
"""


class Child(Protocol):
    """A child process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...


def start_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    output: Path | None,
    death_signal: signal.Signals,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command in a new session; the kernel sends it `death_signal` when the calling thread ends.

    So call it from a thread that lives as long as the process shall. Output is appended to a file, which needs no
    reader; None inherits this process's. `pass_fds`: descriptors to inherit under the same numbers. Raises ConfigError
    on systems other than Linux.
    """
    if sys.platform != "linux":
        raise ConfigError(f"this needs Linux, not {sys.platform}; start one node with torchrun instead")
    leash = [sys.executable, "-I", "-S", "-c", _LEASH, str(int(death_signal)), str(os.getpid())]
    with contextlib.ExitStack() as stack:
        file = None if output is None else stack.enter_context(output.open("ab"))
        return subprocess.Popen(
            [*leash, *command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=None if file is None else subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def ranks_of(launcher_pid: int) -> tuple[int, ...]:
    """Return the ranks that a launcher has started, in the order of their local ranks."""
    children = [
        int(d.name) for d in Path("/proc").iterdir() if d.name.isdigit() and parent_of(int(d.name)) == launcher_pid
    ]
    numbered = {int(number): pid for pid in children if (number := variable_of(pid, "LOCAL_RANK"))}
    return tuple(numbered[number] for number in sorted(numbered))


def variable_of(pid: int, name: str) -> str | None:
    """Return a variable of a process's initial environment; None if it is not set."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    entries = (entry.partition(b"=") for entry in environment.split(b"\0"))
    return next((value.decode() for key, _, value in entries if key == name.encode()), None)


def marked_pids(mark: str) -> list[int]:
    """Return the living processes that inherited a mark, in any order."""
    return pids_with(MARK, mark)


def pids_with(name: str, value: str) -> list[int]:
    """Return the living processes that were started with this value of a variable, in any order."""
    entry = f"{name}={value}".encode()
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:  # ended, or another user's
                continue
            if entry in environment.split(b"\0"):
                found.append(int(folder.name))
    return found


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def show_environment() -> None:
    """Have /proc/PID/environ of this process show `os.environ`, as far as there is space: a fork has its parent's.

    Any code that has kept a pointer into the old variables reads the new ones.
    """
    start, end = number_of(os.getpid(), 50), number_of(os.getpid(), 51)
    assert start is not None and end is not None, "this process runs"
    ours_first = sorted(os.environ.items(), key=lambda variable: not variable[0].startswith(_OURS))
    block = b"".join(f"{name}={value}\0".encode(errors="surrogateescape") for name, value in ours_first)
    ctypes.memmove(start, block[: end - start - 1].ljust(end - start, b"\0"), end - start)


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to processes; skip those that have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def kill_marked(mark: str) -> None:
    """SIGKILL every process with a mark, and those that they start meanwhile. Raises TimeoutError if one survives."""
    end_s = time.monotonic() + _KILL_S
    empty_looks = 0
    while empty_looks < _EMPTY_LOOKS:
        pids = marked_pids(mark)
        if pids and time.monotonic() > end_s:
            raise TimeoutError(f"processes {pids} are still there {_KILL_S:g} s after SIGKILL")
        signal_all(pids, signal.SIGKILL)
        empty_looks = 0 if pids else empty_looks + 1
        time.sleep(0.005)
