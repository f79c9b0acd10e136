"""One round as a transaction: open, reduce into a staging buffer, vote for the digest, apply only what is committed.

A round that loses a member is opened again with the survivors; their contributions stay untouched until the verdict,
so no inner step is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroband.elastic.epoch import FOUNDING_ROUND, Opening, Verdict
from zeroband.elastic.mesh import ElasticDeviceMesh
from zeroband.errors import PeerLost
from zeroband.faults import FaultPoints
from zeroband.observe.log import get_logger
from zeroband.outer.flat import SharedBuffers, digest_of

CONTRIBUTION, RESULT = "contribution", "result"
"""Names of the shared buffers that a transaction reads and writes."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class Committed:
    """A round whose result all members hold, and what it cost this node."""

    opening: Opening
    verdict: Verdict
    result: Tensor
    """Mean of the contributions, valid until the next round; empty for the founding."""
    wait_s: float
    transfer_s: float
    sent_bytes: int
    received_bytes: int
    failures: tuple[str, ...]
    """Why the round was opened again, once for each time."""


def commit_round(
    mesh: ElasticDeviceMesh,
    buffers: SharedBuffers,
    await_opening: Callable[[], Opening],
    payload: Callable[[Opening, Tensor], Mapping[str, Any]],
    faults: FaultPoints,
) -> Committed:
    """Bring a round to its verdict with whoever is left; the contribution lies in its buffer.

    Called by all local ranks. `payload` runs on local rank 0. Raises Fenced when the run went on without this node.
    """
    wait_s = transfer_s = 0.0
    sent_bytes = received_bytes = 0
    failures: list[str] = []
    while True:
        waited_from_s = time.monotonic()
        opening = await_opening()
        wait_s += time.monotonic() - waited_from_s
        faults.at("opened", opening.round)
        try:
            transfer = mesh.reduce_mean(buffers[CONTRIBUTION], buffers[RESULT], opening)
            transfer_s += transfer.took_s
            sent_bytes += transfer.sent_bytes
            received_bytes += transfer.received_bytes
            faults.at("reduced", opening.round)
            waited_from_s = time.monotonic()
            digest = digest_of(buffers[RESULT]) if mesh.local.rank == 0 else ""
            verdict = mesh.commit(opening, digest, partial(payload, opening, buffers[RESULT]))
        except PeerLost as error:
            failures.append(str(error))
            _log.warning("round opened again", extra={"fields": {"round": opening.round, "why": str(error)}})
            buffers.renew(RESULT)
            continue
        wait_s += time.monotonic() - waited_from_s
        faults.at("committed", opening.round)
        return Committed(
            opening=opening,
            verdict=verdict,
            result=buffers[RESULT],
            wait_s=wait_s,
            transfer_s=transfer_s,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            failures=tuple(failures),
        )


def found_run(mesh: ElasticDeviceMesh, state: str, payload: Callable[[Opening], Mapping[str, Any]]) -> Committed:
    """Start the run: nothing is reduced, the founders vote for the state that all of them hold."""
    started_at_s = time.monotonic()
    failures: list[str] = []
    while True:
        opening = mesh.await_opening(FOUNDING_ROUND)
        try:
            verdict = mesh.commit(opening, state, partial(payload, opening))
        except PeerLost as error:
            failures.append(str(error))
            _log.warning("founding again", extra={"fields": {"why": str(error)}})
            continue
        wait_s = time.monotonic() - started_at_s
        return Committed(opening, verdict, torch.empty(0), wait_s, 0.0, 0, 0, tuple(failures))
