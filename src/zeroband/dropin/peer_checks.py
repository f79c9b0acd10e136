"""Warnings about peers: none has joined, or one trains on the same batches. Local rank 0.

The batches are never seen here. But all members begin a round with equal parameters, so equal batches give equal bits
in the gradients of its first inner step. Each node publishes a digest of them once, in its first round with a new peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import Leaving, StoreLost
from zeroband.node.sharding import local_part
from zeroband.observe.log import get_logger
from zeroband.observe.view import node_id_of_member
from zeroband.state.digest import digest_of

_ALONE_ROUNDS = 2
_PREFIX = 4096
"""Values of each parameter that are compared: a different batch changes all of them."""
_LEAST_VALUES = 8
"""Least number of different values: nearly empty gradients do not tell batches apart."""

_log = get_logger(__name__)


def first_gradients(parameters: Iterable[nn.Parameter]) -> str | None:
    """Return a digest of this rank's gradients; None if they would not tell one batch from another."""
    gradients = [p.grad.detach() for p in parameters if p.grad is not None and not p.grad.is_sparse]
    parts = [local_part(gradient).reshape(-1)[:_PREFIX].float() for gradient in gradients]
    sample = torch.cat(parts).cpu() if parts else torch.empty(0)
    if not bool(sample.isfinite().all()) or len(sample.unique()) < _LEAST_VALUES:
        return None
    return digest_of(sample)


class PeerChecks:
    """Checks the peers of one node. `on_event`: called for a peer with the same batches, with event and fields.

    `address`: of the store, without its password; None: do not warn about missing peers.
    """

    def __init__(self, store: RedisStore, run_id: str, address: str | None, on_event: Callable[..., object]) -> None:
        self._store = store
        self._run_id = run_id
        self._address = address
        self._on_event = on_event
        self._rounds_alone = 0
        self._known: set[str] = set()
        self._compares = False
        self._digest: str | None = None

    # -- a round ------------------------------------------------------------------------------------------------

    def begin_round(self, before: RoundReport) -> None:
        """Begin the round after `before`: compare batches if it may have new peers."""
        peers = {member for member in before.members if member != before.member_id}
        self._compares, self._digest = bool(peers - self._known), None

    def first_step_done(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the gradients of the round's first inner step."""
        if self._compares:
            self._digest = first_gradients(parameters)

    def publish(self, round: int, member_id: str) -> None:
        """Publish this node's digest for the others."""
        if (digest := self._digest) is not None:
            key = self._store.keys.gradients(round, member_id)
            self._ignore_outage(lambda: self._store.group_set(key, digest.encode()))

    def round_done(self, rounds: Iterable[RoundReport]) -> None:
        """Check committed rounds in which this node took part."""
        for report in rounds:
            self._count_alone(report)
            if (digest := self._digest) is not None:
                self._ignore_outage(partial(self._compare, report, digest))
                self._digest = None

    def _ignore_outage(self, work: Callable[[], None]) -> None:
        """Skip the comparison during an outage of the store: the round itself raises on all ranks if it lasts."""
        try:
            work()
        except (StoreLost, Leaving) as error:
            self._digest = None
            _log.debug("cannot compare batches", extra={"fields": {"why": str(error)}})

    # -- warnings -----------------------------------------------------------------------------------------------

    def _count_alone(self, report: RoundReport) -> None:
        """Warn once if a node that was given a store trains alone."""
        if len(report.members) > 1:
            self._address = None  # a peer has joined: never warn
        self._rounds_alone += 1
        if self._address is not None and self._rounds_alone == _ALONE_ROUNDS:
            _log.warning(
                f"alone in run {self._run_id!r} after {_ALONE_ROUNDS} rounds: no peer came to {self._address}. "
                f"Peers need this store and run.id={self._run_id!r}; they may still join"
            )

    def _compare(self, report: RoundReport, digest: str) -> None:
        peers = [
            member
            for member, weight in zip(report.members, report.weights, strict=True)
            if weight and member != report.member_id and member not in self._known
        ]
        digests = self._store.group_get([self._store.keys.gradients(report.round, m) for m in peers]) if peers else []
        self._known.update(peers)
        for peer in (peer for peer, theirs in zip(peers, digests, strict=True) if theirs == digest.encode()):
            _log.warning(
                f"peer {node_id_of_member(peer)} trains on the same batches as this node: in round {report.round} the "
                "gradients of the first step are bit-identical. Give each peer its own part of the data, or another "
                "seed for its order"
            )
            self._on_event("same_batches", round=report.round, member_id=peer)
