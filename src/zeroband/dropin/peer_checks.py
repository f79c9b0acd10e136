"""What a node notices of its peers: that none came, or that one learns from the same batches. Local rank 0.

Batches are the user's business and never seen here. But all members begin a round with the same parameters, so the
gradients of its first inner step are equal bit for bit where the batches are. Each says a digest of them in the first
round that it shares with a peer that it does not know yet; after that nothing is computed, said or read.
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
from zeroband.state.flat import digest_of

_ALONE_ROUNDS = 2
_SHARE = 4096
"""Values of each parameter that are compared: other batches change all of them."""
_LEAST_VALUES = 8
"""Different ones that there must be: gradients of next to nothing say nothing about the batch."""

_log = get_logger(__name__)


def first_gradients(parameters: Iterable[nn.Parameter]) -> str | None:
    """A digest of what this rank has of the gradients; None where they would not tell one batch from another."""
    gradients = [p.grad.detach() for p in parameters if p.grad is not None and not p.grad.is_sparse]
    parts = [local_part(gradient).reshape(-1)[:_SHARE].float() for gradient in gradients]
    sample = torch.cat(parts).cpu() if parts else torch.empty(0)
    if not bool(sample.isfinite().all()) or len(sample.unique()) < _LEAST_VALUES:
        return None
    return digest_of(sample)


class PeerChecks:
    """The peers of one node. `say`: told of a peer with the same batches, by event and fields.

    `address`: of the store, without its password; None: none was given, so no peer is missed.
    """

    def __init__(self, store: RedisStore, run_id: str, address: str | None, say: Callable[..., object]) -> None:
        self._store = store
        self._run_id = run_id
        self._address = address
        self._say = say
        self._rounds_alone = 0
        self._known: set[str] = set()
        self._compares = False
        self._digest: str | None = None

    # -- a round ------------------------------------------------------------------------------------------------

    def begin_round(self, before: RoundReport) -> None:
        """A round begins after this one: whether there are peers in it that were not compared with yet."""
        peers = {member for member in before.members if member != before.member_id}
        self._compares, self._digest = bool(peers - self._known), None

    def learned(self, parameters: Iterable[nn.Parameter]) -> None:
        """The first inner step of the round was made, and its gradients are still there."""
        if self._compares:
            self._digest = first_gradients(parameters)

    def offer(self, round: int, member_id: str) -> None:
        """This node comes to the boundary of a round."""
        if (digest := self._digest) is not None:
            key = self._store.keys.gradients(round, member_id)
            self._attempt(lambda: self._store.group_set(key, digest.encode()))

    def ended(self, rounds: Iterable[RoundReport]) -> None:
        """Take note of committed rounds in which this node took part."""
        for report in rounds:
            self._count_alone(report)
            if (digest := self._digest) is not None:
                self._attempt(partial(self._compare, report, digest))
                self._digest = None

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do without what the store cannot give: the round itself needs it next, and raises on all ranks."""
        try:
            work()
        except (StoreLost, Leaving) as error:
            self._digest = None
            _log.debug("batches are not compared", extra={"fields": {"why": str(error)}})

    # -- what it says -------------------------------------------------------------------------------------------

    def _count_alone(self, report: RoundReport) -> None:
        """Warn once if a node that was given a store trains alone."""
        if len(report.members) > 1:
            self._address = None  # it was found
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
        said = self._store.group_get([self._store.keys.gradients(report.round, m) for m in peers]) if peers else []
        self._known.update(peers)
        for peer in (peer for peer, theirs in zip(peers, said, strict=True) if theirs == digest.encode()):
            _log.warning(
                f"peer {node_id_of_member(peer)} learns from the same batches as this node: in round {report.round} "
                "the gradients of the first step are equal bit for bit. Give each peer its own part of the data, or "
                "another seed of its order"
            )
            self._say("same_batches", round=report.round, member_id=peer)
