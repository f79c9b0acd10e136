"""A `torch.distributed.Store` over the run's store, so that no node hosts what the others need to find each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from zeroband.elastic.membership.records import Opening
from zeroband.errors import PeerLost

_POLL_MIN_S, _POLL_MAX_S = 0.002, 0.05


class GroupStore(Protocol):
    """The keys through which the processes of a group find each other. Raises StoreLost, ConfigError."""

    def group_prefix(self, opening: Opening, lane: int) -> str:
        """Return what the keys of a lane's group begin with."""
        ...

    def group_set(self, key: str, value: bytes) -> None: ...

    def group_get(self, keys: list[str]) -> list[bytes | None]: ...

    def group_add(self, key: str, amount: int) -> int: ...

    def group_delete(self, key: str) -> bool: ...


class GroupRendezvous(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """Keys of one process group; they expire by themselves.

    `is_abandoned` is asked while a key is awaited: True ends the wait with PeerLost, so that building a group
    with a node that died does not last until the time-out.
    """

    def __init__(self, store: GroupStore, prefix: str, *, timeout_s: float, is_abandoned: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._wait_timeout = timedelta(seconds=timeout_s)
        self._is_abandoned = is_abandoned

    def _key(self, key: str) -> str:
        return f"{self._prefix}:{key}"

    def set(self, key: str, value: str | bytes) -> None:
        self._store.group_set(self._key(key), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._await([key], self._wait_timeout)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._await(keys, self._wait_timeout)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._store.group_add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        return None not in self._store.group_get([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await(keys, timeout or self._wait_timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.group_delete(self._key(key))

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._wait_timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._wait_timeout

    def _await(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        deadline = time.monotonic() + timeout.total_seconds()
        pause_s = _POLL_MIN_S
        while True:
            values = self._store.group_get([self._key(key) for key in keys])
            found = [value for value in values if value is not None]
            if len(found) == len(keys):
                return found
            if self._is_abandoned() or time.monotonic() > deadline:
                missing = [key for key, value in zip(keys, values, strict=True) if value is None]
                raise PeerLost(f"no process wrote {missing[0]} for the group {self._prefix}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)
