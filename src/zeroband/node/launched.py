"""Between a launcher and its ranks: what it tells them in their environment, and how they end before they trained.

Loads no other package: launchers and the first moments of a rank use it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Generator, Mapping, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any

from zeroband.errors import ConfigError

Handler = Callable[[int, FrameType | None], Any] | int | None

RANKS_FILE = "ZEROBAND_RANKS_FILE"
"""Where the ranks of a node find one another: a file without a name that `zeroband launch` gives them."""

LEAVING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What asks a node to leave; SIGHUP is sent by a terminal that goes away, unless nohup has it ignored."""

TOGETHER_S = 2.0
"""Signals so close are one request: Slurm and systemd signal every process, and the launcher passes its own on."""

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where torch reads its allocator's settings; all releases from 2.11 know the first, and some warn of the others."""

_OF_TORCH = ("TORCH", "PYTORCH", "TRITON", "AOT")
"""How the variables begin that torch reads while its parts are loaded, some of them at the first step."""


class LeaveRequests:
    """Requests to leave that a process got, each of which may have come as several signals. One thread."""

    def __init__(self) -> None:
        self.count = 0
        self._over_at_s = -math.inf

    def add(self, now_s: float) -> bool:
        """Take a signal at `now_s` of a steady clock; False where it belongs to the request before it."""
        if now_s < self._over_at_s:
            return False
        self.count += 1
        self._over_at_s = now_s + TOGETHER_S
        return True


_ALONE = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""What a launcher numbers its ranks with, and the numbers of a rank without others."""

_COUNTERS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")

_SLURM_TASKS, _SLURM_NODES = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"


def rank_and_world_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """This process's number among the ranks of its node, and how many there are; 0 and 1 without a launcher.

    Raises: ConfigError where the variables do not fit together, such as those that another launcher left behind, or
    span several machines.
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
        raise _abandoned(given, "is the place of no rank")
    if local_world_size != world_size:
        raise several_machines(world_size, local_world_size)
    if local != rank:
        raise _abandoned(given, "gives one rank two numbers")
    if RANKS_FILE not in environ and not (environ.get("MASTER_ADDR") and is_count(environ.get("MASTER_PORT", ""))):
        raise _abandoned(given, "does not say where rank 0 is (MASTER_ADDR, MASTER_PORT)")
    return rank, world_size


def is_count(text: str) -> bool:
    """Whether a text is a whole number of things, which has fewer digits than Python refuses to read."""
    return text.isdecimal() and len(text) < 10


def several_machines(world_size: int, local_world_size: int) -> ConfigError:
    """What to say of a launcher that spans several machines: nodes are joined by [outer], not by their launchers."""
    return ConfigError(
        f"torchrun was started over several nodes (WORLD_SIZE={world_size}, LOCAL_WORLD_SIZE={local_world_size}); "
        "start one torchrun with --nnodes 1 on every machine and join them by [outer] and store.url"
    )


def _abandoned(given: Mapping[str, int], fault: str) -> ConfigError:
    seen = " ".join(f"{name}={number}" for name, number in given.items())
    return ConfigError(
        f"the environment has {seen}, which {fault}: another launcher set or left it. Start the ranks with `zeroband "
        f"launch`, which sets these variables itself, or with torchrun; for one process alone unset {' '.join(given)}"
    )


def _require_whole_number(name: str, environ: Mapping[str, str]) -> None:
    try:
        int(environ.get(name) or 0)
    except ValueError:
        raise ConfigError(
            f"the environment has {name}={environ[name]!r}, which is no whole number; unset {name}"
        ) from None


def require_one_task(environ: Mapping[str, str], *, are_told_apart: bool) -> None:
    """Raise ConfigError where srun started several tasks on a machine, each of which would be a node like the others.

    `are_told_apart`: whether the configuration gives them names of their own.
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
    """This process's number among the ranks of its node; 0 without a launcher. See `rank_and_world_size`."""
    return int(environ.get("LOCAL_RANK") or 0)


def local_world_size(environ: Mapping[str, str]) -> int:
    """Ranks of this node; 1 without a launcher. See `rank_and_world_size`."""
    return int(environ.get("LOCAL_WORLD_SIZE") or 1)


def is_last_start(environ: Mapping[str, str]) -> bool:
    """Whether the launcher does not start the ranks again when one fails."""
    done, most = (int(environ.get(name) or 0) for name in _COUNTERS)
    return done >= most


def tell_torchrun(message: str, environ: Mapping[str, str]) -> bool:
    """Have torchrun end its report of this rank's failure with a message; False where it makes no such report.

    It does so after its last start only. Its own traceback, which it writes before, cannot be prevented from here.
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
def naming_variables_of_torch() -> Generator[None]:
    """Raise ConfigError for a variable of the environment that torch cannot make sense of, as its parts are loaded."""
    try:
        yield
    except (OSError, ValueError) as error:
        said = str(error).strip()
        ours = {name: value for name, value in os.environ.items() if name.startswith(_OF_TORCH)}
        named = [name for name in ours if name in said] or [name for name in ours if _is_word_of(said, ours[name])]
        if not named:
            raise
        raise ConfigError(
            f"torch refuses {named[0]}={ours[named[0]]!r} of the environment: {said.splitlines()[0]}; unset it, or "
            "correct it"
        ) from error


def _is_word_of(text: str, value: str) -> bool:
    return bool(value) and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def let_segments_grow(environ: MutableMapping[str, str]) -> None:
    """Have CUDA's allocator enlarge its segments, so that freed memory of other sizes is not lost to fragments.

    Acts on the torch that is loaded afterwards. Settings of the user's own stay as they are.
    """
    if not any(name in environ for name in _ALLOCATOR_SETTINGS):
        environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def end_without_a_word() -> dict[signal.Signals, Handler]:
    """Have Ctrl-C end this process with 130, and what asks a node to leave with 0: there is nothing yet to give back.

    A handler that raises would do so in the middle of an import, where packages catch it or end in a traceback. Returns
    the handlers before. Main thread.
    """
    codes = {signal.SIGINT: 128 + signal.SIGINT, **dict.fromkeys(LEAVING_SIGNALS, 0)}

    def end(number: int, _frame: FrameType | None) -> None:
        os._exit(codes[signal.Signals(number)])

    return handle(dict.fromkeys(codes, end))


def handle(handlers: Mapping[signal.Signals, Handler]) -> dict[signal.Signals, Handler]:
    """Set handlers of signals, but of SIGHUP where it is ignored, as under nohup. Returns those before. Main thread."""
    before: dict[signal.Signals, Handler] = {}
    for number, handler in handlers.items():
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    return before
