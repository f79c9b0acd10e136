"""SparseLoCo: many inner steps on each node, then the largest values of what they changed, and a step without momentum.

A round on node i, pseudo-gradient d_i = outer - inner parameters (arXiv:2508.15706):
    e_i <- beta e_i + d_i;  (places, values) = k largest of each chunk, two bits;  e_i <- e_i - decoded
    theta <- theta - lr sum_i w_i decoded_i,  w_i the share of node i in the round
Error buffers stay on their nodes; the outer state is the parameters alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from zeroband.config.outer import SparseLocoConfig
from zeroband.elastic.rounds.coordinator import Offer
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.rounds.transaction import Committed
from zeroband.errors import Fenced
from zeroband.outer.compression.norms import norm_of
from zeroband.outer.compression.residual import SparseResidual
from zeroband.outer.compression.sparse_codec import Payload, SparseCodec, SparseRule
from zeroband.outer.local_memory import LocalMemory
from zeroband.outer.many_steps import PARAMS, ManySteps
from zeroband.outer.payloads import PayloadExchange
from zeroband.state.flat import FlatLayout

ERRORS = "errors"


def error_rule(config: SparseLocoConfig, layout: FlatLayout) -> SparseResidual:
    """The error buffer's rule with its codec."""
    rule = SparseRule(
        k=config.k,
        chunk=config.chunk,
        flat_chunk=config.chunk**2,
        values=config.values,
        transform=None,
        keeps_density=True,
    )
    return SparseResidual(SparseCodec(layout, rule), decay=config.decay)


class SparseLoCo(ManySteps):
    """Outer state: the parameters alone. What a late node has not contributed yet lies in its payload."""

    local_sections = (ERRORS,)

    def __init__(self, parts: OuterParts, config: SparseLocoConfig) -> None:
        self._lr = config.lr
        rule = error_rule(config, FlatLayout.of(parts.model))
        self._codec = rule.codec
        self._memory = LocalMemory(parts, ERRORS, rule)
        self._exchange = PayloadExchange(parts.mesh, parts.buffers, rule.codec, counts_tokens=True)
        super().__init__(parts, config, exchange=self._exchange)

    def take_step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        outer[PARAMS].sub_(result.mul(self._lr))

    def _contribute(self) -> bool:
        """Take the pseudo-gradient into the errors and make the payload; False on all local ranks if not finite."""
        deltas = self._write_pseudo_gradient()
        if self._coordinator.is_contribution_finite(deltas) and self._memory.accumulate(deltas):
            self._memory.pack(self._exchange.payload)
            return True
        return False

    def _norm(self) -> float:
        """Of the payload; on local rank 0, where the run asks for it."""
        return norm_of(self._codec, Payload(self._exchange.payload)) if self._clips and self._local.rank == 0 else 0.0

    def _finish_round(self, offer: Offer) -> RoundReport:
        report = super()._finish_round(offer)
        refused = tuple(self._exchange.refused.items())
        return replace(report, refused=refused, payload_bytes=self._exchange.payload_bytes)

    def _commit(self, offer: Offer) -> Committed:
        try:
            committed = super()._commit(offer)
        except (Fenced, RolledBack):
            self._memory.restore()
            raise
        if offer.weight > 0:
            self._memory.settle()
        else:  # nobody asked for the payload
            self._memory.restore()
        return committed
