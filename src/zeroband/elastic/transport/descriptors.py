"""Descriptors: how many connections this process may hold.

The limit is raised at start and compared with what the peers need; that they run out is said.
"""

from __future__ import annotations

import errno
import resource
import time
from collections.abc import Callable
from typing import TypeVar

from zeroband.elastic.transport.tuning import MAX_STREAMS
from zeroband.observe.log import get_logger

_OWN = 256
"""Files, shared memory, the store, ranks and launchers of this node; strangers and callers at its port."""
_PER_PEER = 4
"""Descriptors for each peer in addition to its streams: a probe each way, requests for state, a burst."""
_REMIND_S = 30.0

TIMEOUT_S = 30.0
"""So long a process waits for descriptors that its other threads give back, before it gives up."""
_AGAIN_S = 0.1

_T = TypeVar("_T")

_log = get_logger(__name__)


def raise_limit() -> int:
    """Raise this process's limit, and that of those that it starts, as far as it may; the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


def needed(nodes: int, streams: int | None) -> int:
    """Descriptors that a node of `nodes` may need. `streams`: to each other one; None: as many as prove best."""
    return _OWN + (nodes - 1) * ((streams or MAX_STREAMS) + _PER_PEER)


def shortage(nodes: int, streams: int | None) -> str | None:
    """Why this process's limit is too low for `nodes` nodes, and what to do; None where it does."""
    limit, wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[0], needed(nodes, streams)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return None
    return (
        f"{nodes} nodes may need {wanted} descriptors on each, and this process may have {limit}: raise the hard limit "
        f"with `ulimit -Hn {wanted}` (LimitNOFILE= of systemd, --ulimit nofile={wanted} of docker), or choose fewer "
        "comm.streams"
    )


class Complaints:
    """Says that a connection could not be taken or made for want of descriptors, at most twice a minute."""

    def __init__(self) -> None:
        self._said_at_s = -_REMIND_S

    def say(self, what: str, error: OSError | None = None) -> None:
        """`error`: what the system answered; of another kind, it is left alone. None: the descriptor just vanished."""
        if error is not None and not is_short(error):
            return
        if time.monotonic() - self._said_at_s < _REMIND_S:
            return
        self._said_at_s = time.monotonic()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reason = "too many open files" if error is None else error.strerror
        _log.warning(f"{what}: {reason} (the limit is {limit}); raise it with `ulimit -n`, it is tried again")


def is_short(error: BaseException) -> bool:
    """Whether this process, or this machine, has no descriptor left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


_complaints = Complaints()


def with_descriptors(
    what: str,
    make: Callable[[], _T],
    *,
    is_aborted: Callable[[], bool] = lambda: False,
    timeout_s: float = TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> _T:
    """Return what `make` makes, which opens descriptors; where there are none, say so and try again for a while.

    `what`: fails meanwhile, for the log. `is_aborted`: it is no longer wanted. Raises what `make` raises, the want of
    descriptors when `timeout_s` are over or it is aborted.
    """
    until_s = clock() + timeout_s
    while True:
        try:
            return make()
        except OSError as error:
            if not is_short(error) or is_aborted() or clock() >= until_s:
                raise
            _complaints.say(what, error)
        sleep(_AGAIN_S)
