"""What a launcher tells its ranks in their environment, and the signals of a process before it trains.

Loads next to nothing: used by launchers and at the start of a rank.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any

from zeroband.errors import ConfigError
from zeroband.observe.process_stat import identity_of

Handler = Callable[[int, FrameType | None], Any] | int | None

RANKS_FILE = "ZEROBAND_RANKS_FILE"
"""Variable with the unnamed file in which the ranks of `zeroband launch` meet."""

MACHINES = "ZEROBAND_MACHINES"
"""Variable with the number of machines of this node, if `zeroband launch --nnodes` started it on several."""

LEAVING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a node to leave. A closing terminal sends SIGHUP, unless nohup ignores it."""

REQUEST_WINDOW_S = 2.0
"""Time in which signals are one request: Slurm and systemd signal all processes, and launchers forward theirs."""

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables with torch's allocator settings. Releases from 2.11 know the first, and some warn of the others."""

_OF_TORCH = ("TORCH", "PYTORCH", "TRITON", "AOT")
"""Prefixes of variables that torch reads when its parts are loaded, some at the first step."""


class LeaveRequests:
    """Counts requests to leave, each of which may arrive as several signals. One thread."""

    def __init__(self) -> None:
        self.count = 0
        self._over_at_s = -math.inf

    def add(self, now_s: float) -> bool:
        """Add a signal at `now_s` of a monotonic clock; returns False if it belongs to the previous request."""
        if now_s < self._over_at_s:
            return False
        self.count += 1
        self._over_at_s = now_s + REQUEST_WINDOW_S
        return True


_ALONE = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""A launcher's rank variables, and their values for a single rank."""

_COUNTERS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")

_SLURM_TASKS, _SLURM_NODES = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"


def rank_and_world_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's rank and the number of ranks of its node; 0 and 1 without a launcher.

    Raises ConfigError if the variables are inconsistent, such as leftovers of another launcher, or if another launcher
    than `zeroband launch` spans several machines.
    """
    for name in (*_ALONE, *_COUNTERS):
        _require_whole_number(name, environ)
    given = {name: int(environ[name]) for name in _ALONE if environ.get(name)}
    if given.items() <= _ALONE.items() and ("RANK" in given) == ("WORLD_SIZE" in given):
        return 0, 1
    if lacking := [name for name in _ALONE if name not in given]:
        raise _abandoned(given, f"lacks {', '.join(lacking)}")
    rank, world_size, local, local_world_size = given.values()
    if not (0 <= rank < world_size and 0 <= local < local_world_size <= world_size):
        raise _abandoned(given, "is no valid rank")
    if local_world_size * machines(environ) != world_size:
        raise several_machines(world_size, local_world_size)
    if local != rank % local_world_size:
        raise _abandoned(given, "gives one rank two numbers")
    if RANKS_FILE not in environ and not (environ.get("MASTER_ADDR") and is_count(environ.get("MASTER_PORT", ""))):
        raise _abandoned(given, "does not say where rank 0 is (MASTER_ADDR, MASTER_PORT)")
    return rank, world_size


def say(line: str) -> None:
    """Print a line of this process on standard error, outside of any log."""
    sys.stderr.write(f"zeroband: {line}\n")
    sys.stderr.flush()


def is_count(text: str) -> bool:
    """Whether a text is a whole number of less than ten digits."""
    return text.isdecimal() and len(text) < 10


def several_machines(world_size: int, local_world_size: int) -> ConfigError:
    """Return the error for a launcher that spans several machines: nodes are joined by [outer]."""
    return ConfigError(
        f"torchrun was started over several nodes (WORLD_SIZE={world_size}, LOCAL_WORLD_SIZE={local_world_size}); "
        "start one torchrun with --nnodes 1 on every machine and join them by [outer] and store.url, or make the "
        "machines one node by `zeroband launch --nnodes`"
    )


def machines(environ: Mapping[str, str]) -> int:
    """Return the number of machines of this node."""
    return int(environ.get(MACHINES) or 1)


def _abandoned(given: Mapping[str, int], fault: str) -> ConfigError:
    seen = " ".join(f"{name}={number}" for name, number in given.items())
    return ConfigError(
        f"the environment has {seen}, which {fault}: another launcher set or left it. Start the ranks with `zeroband "
        f"launch`, which sets these variables, or with torchrun; for a single process unset {' '.join(given)}"
    )


def _require_whole_number(name: str, environ: Mapping[str, str]) -> None:
    try:
        int(environ.get(name) or 0)
    except ValueError:
        raise ConfigError(
            f"the environment has {name}={environ[name]!r}, which is not a whole number; unset {name}"
        ) from None


def require_one_task(environ: Mapping[str, str], *, are_told_apart: bool) -> None:
    """Raise ConfigError if srun started several tasks on a machine, which would be nodes with equal names.

    `are_told_apart`: whether the configuration gives them different names.
    """
    tasks, nodes = (environ.get(name, "") for name in (_SLURM_TASKS, _SLURM_NODES))
    if "RANK" in environ or are_told_apart or not (is_count(tasks) and is_count(nodes)):
        return
    if int(tasks) > int(nodes):
        raise ConfigError(
            f"srun started {tasks} tasks on {nodes} machines ({_SLURM_TASKS}, {_SLURM_NODES}), and each would train as "
            "a separate node; start one on each (--ntasks-per-node=1), `zeroband launch --nproc-per-node N`, which "
            "starts the machine's ranks, or give each a node.id"
        )


def local_rank(environ: Mapping[str, str]) -> int:
    """Return this process's local rank; 0 without a launcher. See `rank_and_world_size`."""
    return int(environ.get("LOCAL_RANK") or 0)


def local_world_size(environ: Mapping[str, str]) -> int:
    """Return the number of this node's ranks on this machine; 1 without a launcher. See `rank_and_world_size`."""
    return int(environ.get("LOCAL_WORLD_SIZE") or 1)


def is_last_start(environ: Mapping[str, str]) -> bool:
    """Whether the launcher will not restart the ranks after a failure."""
    done, most = (int(environ.get(name) or 0) for name in _COUNTERS)
    return done >= most


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether this process replaces one that crashed."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def restarting_launcher(environ: Mapping[str, str], *, left: bool = False) -> str:
    """Identify this process's launcher if it restarts trainers, else empty. `left`: if it has restarts left."""
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0 and not (left and is_last_start(environ))
    return identity_of(os.getppid()) if restarts else ""


def launch_of(environ: Mapping[str, str]) -> str:
    """Identify a launch over all machines and times, if its launcher restarts trainers; else empty."""
    launcher = restarting_launcher(environ)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() if launcher else ""
    return f"{boot}:{launcher}" if launcher else ""


def write_torchrun_error(message: str, environ: Mapping[str, str]) -> bool:
    """Have torchrun end its report of this rank's failure with a message; returns False if it makes no such report.

    It reports only after its last start, and always prints its own traceback first.
    """
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or "RANK" not in environ or not is_last_start(environ):
        return False
    record = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": record}), encoding="utf-8")
        return True
    return False


@contextlib.contextmanager
def torch_variable_errors() -> Generator[None]:
    """Raise ConfigError for an environment variable that torch rejects while its parts are loaded."""
    try:
        yield
    except (OSError, ValueError) as error:
        said = str(error).strip()
        ours = {name: value for name, value in os.environ.items() if name.startswith(_OF_TORCH)}
        named = [name for name in ours if name in said] or [name for name in ours if _is_word_of(said, ours[name])]
        if not named:
            raise
        raise ConfigError(
            f"torch refuses {named[0]}={ours[named[0]]!r} of the environment: {said.splitlines()[0]}; unset or correct "
            "it"
        ) from error


def _is_word_of(text: str, value: str) -> bool:
    return bool(value) and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def use_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Have CUDA's allocator grow its segments, so that freed memory of other sizes is not lost to fragmentation.

    Affects the torch that is loaded afterwards. Keeps the user's own settings.
    """
    if not any(name in environ for name in _ALLOCATOR_SETTINGS):
        environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def exit_on_signals() -> dict[signal.Signals, Handler]:
    """Exit with 130 on Ctrl-C, and with 0 on a request to leave: there is nothing to release yet.

    Exits in the handler, since an exception could be caught by a package that is being imported. Returns the former
    handlers. Main thread.
    """
    codes = {signal.SIGINT: 128 + signal.SIGINT, **dict.fromkeys(LEAVING_SIGNALS, 0)}

    def end(number: int, _frame: FrameType | None) -> None:
        os._exit(codes[signal.Signals(number)])

    return handle(dict.fromkeys(codes, end))


def handle(handlers: Mapping[signal.Signals, Handler]) -> dict[signal.Signals, Handler]:
    """Set signal handlers, except SIGHUP's under nohup; returns the former ones. Main thread."""
    before: dict[signal.Signals, Handler] = {}
    for number, handler in handlers.items():
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    return before
