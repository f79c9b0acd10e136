"""The threads in which a node's rounds go on during training."""

from __future__ import annotations

import threading
import time

ROUND, WATCH = "outer-step", "boundary-watch"
DEADLINE_S = 20.0


def await_end(name: str) -> None:
    """Wait until no thread of this name is left."""
    end_s = time.monotonic() + DEADLINE_S
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(end_s - time.monotonic())
            assert not thread.is_alive(), name
