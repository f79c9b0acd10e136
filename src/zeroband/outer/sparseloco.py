"""SparseLoCo: many inner steps on each node, then the largest values of what they changed, and a step without momentum.

A round on node i, pseudo-gradient d_i = outer - inner parameters (arXiv:2508.15706):
    e_i <- beta e_i + d_i;  (places, values) = k largest of each chunk, two bits;  e_i <- e_i - decoded
    theta <- theta - lr sum_i w_i decoded_i,  w_i the share of node i in the round
Error buffers stay on their nodes; the outer state is the parameters alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zeroband.config.outer import SparseLocoConfig
from zeroband.elastic.groups import lane_bounds
from zeroband.errors import Fenced
from zeroband.outer.base import OuterParts, RoundReport, open_buffers
from zeroband.outer.flat import FlatLayout, digest_of, parameter_shards
from zeroband.outer.journal import JournalEntry
from zeroband.outer.kept import KeptRounds
from zeroband.outer.local_memory import LocalMemory
from zeroband.outer.payloads import PayloadExchange
from zeroband.outer.rollback import RolledBack
from zeroband.outer.rounds import Offer, RoundKeeper
from zeroband.outer.sparse.codec import Payload, SparseCodec, SparseRule
from zeroband.outer.sparse.feedback import ErrorFeedback
from zeroband.outer.sparse.norms import norm_of
from zeroband.outer.transaction import CONTRIBUTION, Committed
from zeroband.parallel import barrier

PARAMS, ERRORS = "params", "errors"


def error_rule(config: SparseLocoConfig, layout: FlatLayout) -> ErrorFeedback:
    """The error buffer's rule with its codec."""
    rule = SparseRule(
        k=config.k,
        chunk=config.chunk,
        flat_chunk=config.chunk**2,
        values=config.values,
        transform=None,
        keeps_density=True,
    )
    return ErrorFeedback(SparseCodec(layout, rule), decay=config.decay)


class SparseLoCo(KeptRounds):
    """Outer state: the parameters, in shared memory. The model holds the inner parameters."""

    sections = (PARAMS,)
    local_sections = (ERRORS,)

    def __init__(self, parts: OuterParts, config: SparseLocoConfig) -> None:
        self._parts = parts
        self._buffers = parts.buffers
        self._local = parts.mesh.local
        self._lr = config.lr
        rule = error_rule(config, FlatLayout.of(parts.model))
        self._codec = rule.codec
        self._memory = LocalMemory(parts, ERRORS, rule)
        self._clips = config.clip_to_median
        self._exchange = PayloadExchange(parts.mesh, parts.buffers, rule.codec, counts_tokens=True)
        self._keeper = RoundKeeper(parts, self.sections, self.replay, self._exchange)
        open_buffers(parts.buffers, self.sections)
        parts.shards.store(parameter_shards(parts.model), self._buffers[PARAMS])
        self._keeper.state = self._digest()

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Nothing: gradients stay inside the node."""
        return None

    def sync_parameters(self, step: int, tokens: int, *, ends_round: bool) -> Sequence[RoundReport]:
        self._keeper.count(tokens)
        if not ends_round:
            return ()
        is_finite = self._contribute()
        if not is_finite:
            self._parts.inner.forget_moments()
        return (self._finish_round(self._keeper.offer(weighted=is_finite, norm=self._norm())),)

    def join(self) -> RoundReport:
        return self._finish_round(self._keeper.offer(is_joining=True))

    def _contribute(self) -> bool:
        """Take the pseudo-gradient into the errors and make the payload; False on all local ranks if not finite."""
        shards = parameter_shards(self._parts.model)
        outer = dict(self._parts.shards.parts(self._buffers[PARAMS], shards))
        deltas = dict(self._parts.shards.parts(self._buffers[CONTRIBUTION], shards))
        for name, out in deltas.items():
            torch.sub(outer[name], self._parts.shards.own(name, shards[name]).to("cpu"), out=out)
        is_finite = self._keeper.is_contribution_finite(shards)
        if is_finite and self._memory.accumulate(deltas):
            self._memory.pack(self._exchange.payload)
            return True
        return False

    def _norm(self) -> float:
        """Of the payload; on local rank 0, where the run asks for it."""
        return norm_of(self._codec, Payload(self._exchange.payload)) if self._clips and self._local.rank == 0 else 0.0

    def _finish_round(self, offer: Offer) -> RoundReport:
        barrier(self._local)
        committed = self._commit(offer)
        started_at_s = time.monotonic()
        with self._keeper.changing_state():
            self._apply(committed.result, committed.verdict.payload)
            self._keeper.advance(committed.verdict, self._digest())
        self._keeper.begin_phase()
        self._parts.inner.seek(self.progress.inner_step)  # nodes that made fewer steps follow the run's schedule
        self._keeper.record(committed)
        self._parts.faults.at("applied", self.round)
        report = self._keeper.report(committed, time.monotonic() - started_at_s)
        refused = tuple(self._exchange.refused.items())
        return replace(report, refused=refused, payload_bytes=self._exchange.payload_bytes)

    def _commit(self, offer: Offer) -> Committed:
        try:
            committed = self._keeper.commit(offer)
        except (Fenced, RolledBack):
            self._memory.restore()
            raise
        self._memory.settle()
        return committed

    def _apply(self, update: Tensor, payload: Mapping[str, Any]) -> None:
        """Take the outer step, each local rank on its part, and restart the inner parameters from it.

        What a late node has not contributed yet lies in its payload, and does not depend on the outer parameters.
        """
        params = self._buffers[PARAMS]
        start, stop = lane_bounds(params.numel(), self._local.world_size)[self._local.rank]
        if payload["weight"] > 0:
            params[start:stop].sub_(update[start:stop].mul(self._lr))
        barrier(self._local)
        self._parts.shards.load(parameter_shards(self._parts.model), params)

    def _digest(self) -> str:
        barrier(self._local)
        return digest_of(self._buffers[PARAMS]) if self._local.rank == 0 else ""

    def adopt(self, round: int, payload: Mapping[str, Any], sections: Mapping[str, Tensor] | None = None) -> str:
        with self._keeper.changing_state(sections):
            self._keeper.settle(round, payload, self._digest())
        self._parts.shards.load(parameter_shards(self._parts.model), self._buffers[PARAMS])
        self._parts.inner.seek(self.progress.inner_step)
        return self._keeper.state

    def replay(self, entry: JournalEntry) -> str:
        with self._keeper.changing_state():
            self._apply(entry.result, entry.payload)
            self._keeper.settle(entry.round, entry.payload, self._digest())
        self._parts.inner.seek(self.progress.inner_step)
        return self._keeper.state
