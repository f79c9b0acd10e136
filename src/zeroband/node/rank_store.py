"""The rendezvous of a node's ranks: their common store, and the wait for missing ranks."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from zeroband.errors import ConfigError
from zeroband.node.launched import RANKS_FILE

_TIMEOUT_S = 600.0
"""Ranks start together, but loading torch from a slow disk may take one minutes longer."""
_SAID_FIRST_S = 10.0
_SAID_AGAIN_S = 60.0
_LOOK_S = 0.05
_CONNECT_S = 5.0
_FIRST = (0,)


def say(line: str) -> None:
    """Print a line from any rank: rank 0, which usually logs, may be the missing one."""
    sys.stderr.write(f"zeroband: {line}\n")
    sys.stderr.flush()


class RankWait:
    """One rank's wait for the others, in steps that signals can interrupt."""

    def __init__(self, rank: int, place: str, say: Callable[[str], object] = say, timeout_s: float = _TIMEOUT_S):
        self._rank = rank
        self._place = place
        self._say = say
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._say_at_s = self._began_s + min(_SAID_FIRST_S, timeout_s)

    def wait(self, missing: Sequence[int], *, speaks: bool) -> None:
        """Sleep a moment, and print the missing ranks now and then. Raises ConfigError after the timeout."""
        now_s = time.monotonic()
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        if now_s - self._began_s >= self._timeout_s:
            raise ConfigError(
                f"rank {self._rank} waited {self._timeout_s:.0f} s for {names} of this node {self._place}; start all "
                "ranks together, by `zeroband launch` or torchrun, or unset RANK and WORLD_SIZE to train with one"
            )
        if now_s >= self._say_at_s and speaks:
            self._say(f"rank {self._rank} waits for {names} of this node {self._place}")
            self._say_at_s = now_s + _SAID_AGAIN_S
        time.sleep(_LOOK_S)


def rendezvous(environ: Mapping[str, str], rank: int, world_size: int, timeout_s: float) -> Store:
    """Return the ranks' common store once all ranks have come.

    `zeroband launch` passes a new file at each start. torchrun's store outlives a restart of its ranks, so a prefix
    hides the addresses of the dead ones. `timeout_s`: of later requests. Raises ConfigError if ranks are missing or
    rank 0 cannot listen.
    """
    if world_size == 1:
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    if file := environ.get(RANKS_FILE):
        store, call = dist.FileStore(file, world_size), RankWait(rank, "at its launcher")  # pyright: ignore[reportPrivateImportUsage]
    else:
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        call = RankWait(rank, f"at {host}:{port} (MASTER_ADDR, MASTER_PORT)")
        is_server = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        store = _tcp_store(host, port, is_server=is_server, call=call)
        store = PrefixStore(f"start{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set_timeout(timedelta(seconds=timeout_s))
    store.set(f"here{rank}", "")
    while missing := [other for other in range(world_size) if not store.check([f"here{other}"])]:
        call.wait(missing, speaks=rank == min(set(range(world_size)).difference(missing)))
    return store


def _tcp_store(host: str, port: int, *, is_server: bool, call: RankWait) -> Store:
    """Open rank 0's store, or that of torchrun's agent, once it listens: torch's own wait ignores signals."""
    while not (is_server or _listens(host, port)):
        call.wait(_FIRST, speaks=True)
    try:
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host,
            port,
            is_master=is_server,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        does = "listen on" if is_server else "reach"
        raise ConfigError(
            f"rank 0 of this node: cannot {does} {host}:{port} (MASTER_ADDR, MASTER_PORT): {error}; name another port, "
            "or start the ranks with `zeroband launch`, which needs none"
        ) from error


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
