"""File descriptors: raises the process's limit, checks it against the number of peers, and logs shortages."""

from __future__ import annotations

import errno
import resource
import time
from collections.abc import Callable
from typing import TypeVar

from zeroband.elastic.transport.tuning import MAX_STREAMS
from zeroband.observe.log import get_logger

_BASE = 256
"""Descriptors for files, shared memory, the store, local processes, and unauthenticated connections."""
_PER_PEER = 4
"""Descriptors per peer in addition to its streams: a probe each way, state requests, a rate measurement."""
_REPEAT_S = 30.0

TIMEOUT_S = 30.0
"""How long a process waits for its other threads to free descriptors."""
_AGAIN_S = 0.1

_T = TypeVar("_T")

_log = get_logger(__name__)


def raise_limit() -> int:
    """Raise the limit of this process and its children to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


def descriptors_needed(nodes: int, streams: int | None) -> int:
    """Return the descriptors that a node may need. `streams`: per peer; None: tuned automatically."""
    return _BASE + (nodes - 1) * ((streams or MAX_STREAMS) + _PER_PEER)


def shortage(nodes: int, streams: int | None) -> str | None:
    """Explain that this process's limit is too low for `nodes` nodes, and what to do; None: it is high enough."""
    limit, wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[0], descriptors_needed(nodes, streams)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return None
    return (
        f"{nodes} nodes may need {wanted} descriptors on each, and this process may have {limit}: raise the hard limit "
        f"with `ulimit -Hn {wanted}` (LimitNOFILE= of systemd, --ulimit nofile={wanted} of docker), or choose fewer "
        "comm.streams"
    )


class ShortageLog:
    """Warns that a connection failed for lack of descriptors, at most twice a minute."""

    def __init__(self) -> None:
        self._said_at_s = -_REPEAT_S

    def warn(self, what: str, error: OSError | None = None) -> None:
        """Log a warning. `error`: other errors are ignored; None: the kernel dropped a received descriptor."""
        if error is not None and not is_short(error):
            return
        if time.monotonic() - self._said_at_s < _REPEAT_S:
            return
        self._said_at_s = time.monotonic()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reason = "too many open files" if error is None else error.strerror
        _log.warning(f"{what}: {reason} (the limit is {limit}); raise it with `ulimit -n`, it is tried again")


def is_short(error: BaseException) -> bool:
    """Whether an error means that the process or system has no descriptor left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


_shortage_log = ShortageLog()


def with_descriptors(
    what: str,
    make: Callable[[], _T],
    *,
    is_aborted: Callable[[], bool] = lambda: False,
    timeout_s: float = TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> _T:
    """Call `make`, which opens descriptors, and retry while none are free.

    `what`: what fails meanwhile, for the log. Raises errors of `make`; a shortage once `timeout_s` is over or
    `is_aborted`.
    """
    until_s = clock() + timeout_s
    while True:
        try:
            return make()
        except OSError as error:
            if not is_short(error) or is_aborted() or clock() >= until_s:
                raise
            _shortage_log.warn(what, error)
        sleep(_AGAIN_S)
