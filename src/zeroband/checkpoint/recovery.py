"""A joiner's side of live recovery: fetches a committed state, and the rounds committed meanwhile, from the members.

What does not match its hash is fetched again from the next donor. Raises RecoveryFailed when no donor can serve.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from zeroband.checkpoint.serving import HASH_HEADER, bytes_of, chunk_hash
from zeroband.errors import RecoveryFailed

_CONNECTIONS = 4
"""Chunks on the way at once: one TCP stream does not fill a long link."""

_TIMEOUT_S = 30.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class Donor:
    """A member that serves its state."""

    member_id: str
    host: str
    port: int


@dataclass(frozen=True)
class FetchedState:
    """What a donor sent, besides the sections."""

    round: int
    payload: Mapping[str, Any]
    state: str
    donor: str
    received_bytes: int
    took_s: float


@dataclass(frozen=True)
class FetchedEntry:
    """One round of the journal."""

    round: int
    result: Tensor
    payload: Mapping[str, Any]
    state: str


def fetch_state(
    donors: Sequence[Donor], key: str, sections: Mapping[str, Tensor], on_chunk: Callable[[int, int], None]
) -> FetchedState:
    """Fetch the newest committed state into `sections`, (n,) float32 each. `on_chunk` gets (bytes arrived, in all)."""
    return _from_any(donors, lambda donor: _fetch_state_from(donor, key, sections, on_chunk))


def fetch_entry(donors: Sequence[Donor], key: str, round: int) -> FetchedEntry:
    """Fetch what a committed round did."""
    return _from_any(donors, lambda donor: _fetch_entry_from(donor, key, round))


def _from_any(donors: Sequence[Donor], fetch: Callable[[Donor], _T]) -> _T:
    problems: list[str] = []
    for donor in donors:
        try:
            return fetch(donor)
        except (OSError, http.client.HTTPException, RecoveryFailed) as error:
            problems.append(f"{donor.member_id} at {donor.host}:{donor.port}: {error}")
        except (ValueError, LookupError, TypeError) as error:  # it does not speak this protocol
            problems.append(f"{donor.member_id} at {donor.host}:{donor.port} answers nonsense: {error!r}")
    raise RecoveryFailed("no member could serve its state: " + ("; ".join(problems) or "no member is alive"))


def _get(connection: http.client.HTTPConnection, path: str, key: str) -> bytes:
    connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    data = response.read()
    if response.status != http.client.OK:
        raise RecoveryFailed(f"{path} answered {response.status} {response.reason}")
    if chunk_hash(data) != response.headers[HASH_HEADER]:
        raise RecoveryFailed(f"{path} does not match its hash")
    return data


def _fetch_state_from(
    donor: Donor, key: str, sections: Mapping[str, Tensor], on_chunk: Callable[[int, int], None]
) -> FetchedState:
    started_at_s = time.monotonic()
    connection = http.client.HTTPConnection(donor.host, donor.port, timeout=_TIMEOUT_S)
    try:
        manifest = json.loads(_get(connection, "/state", key))
    finally:
        connection.close()
    expected = {name: tensor.numel() for name, tensor in sections.items()}
    if manifest["sections"] != expected:
        raise RecoveryFailed(f"it serves sections {manifest['sections']}, this node needs {expected}")
    received_bytes = _fetch_chunks(donor, key, manifest, sections, on_chunk)
    took_s = time.monotonic() - started_at_s
    return FetchedState(
        manifest["round"], manifest["payload"], manifest["state"], donor.member_id, received_bytes, took_s
    )


def _fetch_chunks(
    donor: Donor,
    key: str,
    manifest: Mapping[str, Any],
    sections: Mapping[str, Tensor],
    on_chunk: Callable[[int, int], None],
) -> int:
    chunk_bytes = int(manifest["chunk_bytes"])
    targets = {name: bytes_of(tensor) for name, tensor in sections.items()}
    wanted = [(name, i) for name, data in targets.items() for i, _ in enumerate(range(0, len(data), chunk_bytes))]
    total = sum(len(data) for data in targets.values())

    def worker(mine: Sequence[tuple[str, int]]) -> int:
        connection = http.client.HTTPConnection(donor.host, donor.port, timeout=_TIMEOUT_S)
        done = 0
        try:
            for name, index in mine:
                data = _get(connection, f"/chunk/{manifest['round']}/{name}/{index}", key)
                part = targets[name][index * chunk_bytes : (index + 1) * chunk_bytes]
                if len(data) != len(part):
                    raise RecoveryFailed(f"chunk {index} of {name} has {len(data)} bytes, not {len(part)}")
                part[:] = data
                done += len(data)
                on_chunk(len(data), total)
        finally:
            connection.close()
        return done

    with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="recovery") as pool:
        done = sum(pool.map(worker, [wanted[i::_CONNECTIONS] for i in range(_CONNECTIONS)]))
    if done != total:
        raise RecoveryFailed(f"{done} of {total} bytes arrived")
    return done


def _fetch_entry_from(donor: Donor, key: str, round: int) -> FetchedEntry:
    connection = http.client.HTTPConnection(donor.host, donor.port, timeout=_TIMEOUT_S)
    try:
        data = _get(connection, f"/journal/{round}", key)
    finally:
        connection.close()
    head_bytes = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + head_bytes])
    if head["round"] != round:
        raise RecoveryFailed(f"it answers with round {head['round']} where round {round} was asked for")
    result = torch.from_numpy(np.frombuffer(data, dtype=np.float32, offset=8 + head_bytes).copy())  # pyright: ignore[reportUnknownMemberType]
    return FetchedEntry(head["round"], result, head["payload"], head["state"])
