"""Between a launcher and its ranks: what it tells them in their environment, and how they end before they trained.

Loads nothing but the standard library: launchers and the first moments of a rank use it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None

RANKS_FILE = "ZEROBAND_RANKS_FILE"
"""Where the ranks of a node find one another: a file without a name that `zeroband launch` gives them."""

TOGETHER_S = 2.0
"""Signals so close are one request: Slurm and systemd signal every process, and the launcher passes its own on."""

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where torch reads its allocator's settings; all releases from 2.11 know the first, and some warn of the others."""


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


def local_rank(environ: Mapping[str, str]) -> int:
    """This process's number among the ranks of its node; 0 without a launcher."""
    return int(environ.get("LOCAL_RANK", "0"))


def is_last_start(environ: Mapping[str, str]) -> bool:
    """Whether the launcher does not start the ranks again when one fails."""
    done, most = (int(environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done >= most


def tell_torchrun(message: str, environ: Mapping[str, str]) -> bool:
    """Have torchrun end its report of this rank's failure with a message; False where it makes no such report.

    It does so after its last start only. Its own traceback, which it writes before, cannot be prevented from here.
    """
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or not is_last_start(environ):
        return False
    record = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": record}), encoding="utf-8")
        return True
    return False


def let_segments_grow(environ: MutableMapping[str, str]) -> None:
    """Have CUDA's allocator enlarge its segments, so that freed memory of other sizes is not lost to fragments.

    Acts on the torch that is loaded afterwards. Settings of the user's own stay as they are.
    """
    if not any(name in environ for name in _ALLOCATOR_SETTINGS):
        environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def end_without_a_word() -> dict[signal.Signals, Handler]:
    """Have Ctrl-C end this process with 130, SIGTERM and SIGUSR1 with 0: there is nothing yet to give back.

    A handler that raises would do so in the middle of an import, where packages catch it or end in a traceback. Returns
    the handlers before. Main thread.
    """
    codes = {signal.SIGINT: 128 + signal.SIGINT, signal.SIGTERM: 0, signal.SIGUSR1: 0}

    def end(number: int, _frame: FrameType | None) -> None:
        os._exit(codes[signal.Signals(number)])

    return {number: signal.signal(number, end) for number in codes}
