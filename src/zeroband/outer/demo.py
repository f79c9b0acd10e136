"""DeMo / DisTrO: decoupled momentum, its largest frequencies as the payload of every step, the sign of their mean.

One step on node i, gradient g, momentum m, all flat float32 buffers (arXiv:2411.19870, algorithm 1, and its source):
    m_i <- beta m_i + lr g_i;  (places, values) = k largest of DCT(chunk(m_i));  m_i <- m_i - alpha IDCT(places, values)
    Q = IDCT(mean over the nodes that sent a coefficient);  theta <- theta (1 - lr wd) - lr sign(Q)
The inner optimizer takes the last step, with Q in the place of the gradient. Momenta stay on their nodes and need not
be equal; the outer state is the parameters alone.

With an overlap of one step the payload of a step travels while the next one runs, at whose end it is applied: all nodes
then train from parameters that lack their newest gradient. Those parameters are still the outer state, the same on all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroband.config.outer import DemoConfig
from zeroband.elastic.membership.records import Verdict
from zeroband.elastic.rounds.coordinator import Committed
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.node.mesh import broadcast_json, clip_grad_norm_
from zeroband.observe.log import get_logger
from zeroband.outer.aggregator import AggregatedExchange
from zeroband.outer.compression.residual import SparseResidual
from zeroband.outer.compression.sparse_codec import SparseCodec, SparseRule
from zeroband.outer.every_step import PARAMS, EveryStep
from zeroband.outer.local_memory import LocalMemory
from zeroband.outer.payloads import PayloadExchange
from zeroband.outer.scoring import PayloadScores
from zeroband.state.flat import FlatLayout, gradient_shards, parameter_shards

MOMENTUM = "momentum"

_log = get_logger(__name__)


def momentum_rule(config: DemoConfig, layout: FlatLayout, *, device: torch.device | None = None) -> SparseResidual:
    """The momentum's rule with its codec. `device`: as `SparseCodec` says."""
    rule = SparseRule(k=config.k, chunk=config.chunk, values=config.values, transform="dct", uneven=config.uneven)
    return SparseResidual(SparseCodec(layout, rule, device=device), decay=config.decay, share=config.share)


class Demo(EveryStep):
    """`clip_norm`: of this node's gradient. The inner optimizer steps by signs (`optim.sign_step`)."""

    local_sections = (MOMENTUM,)

    def __init__(self, parts: OuterParts, config: DemoConfig, *, clip_norm: float | None) -> None:
        rule = momentum_rule(config, FlatLayout.of(parts.model), device=parts.mesh.local.device)
        self._clip_norm = clip_norm
        self._overlaps = config.overlap > 0
        self._is_finite = True
        self._memory = LocalMemory(parts, MOMENTUM, [rule])
        kind, clips = AggregatedExchange if config.aggregator else PayloadExchange, config.robust is not None
        self._payloads = kind(parts.mesh, parts.buffers, self._memory, [rule.codec], divisor="senders", clips=clips)
        stepper = parts.stepper
        self._scores = PayloadScores(
            parts, self._payloads, PARAMS, lambda outer, alone: outer - alone.sign().mul(stepper.lr)
        )
        super().__init__(parts, self._payloads)

    def _score(self, verdict: Verdict) -> tuple[float | None, ...]:
        return self._scores.measure(verdict, 0)

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        self._count_step()
        norm = clip_grad_norm_(self._parts.model, self._clip_norm).item()
        self._committed = self._arrived_before()
        self._is_finite = self._contribute(norm)
        if not self._overlaps:
            self._committed = self._commit(self._offer(weighted=self._is_finite))
        if self._committed is None:
            self._parts.stepper.zero_grad()  # the trainer's step moves nothing
        else:
            self._set_gradients(self._committed.result, self._committed.verdict.record)
        return norm

    def sync_parameters(self, step: int, *, ends_round: bool) -> Sequence[RoundReport]:
        reports = [] if self._committed is None else [self._apply_committed()]
        if self._overlaps:
            reports += self._send()
        self._begin_phase()
        return reports

    def flush(self) -> Sequence[RoundReport]:
        committed = self._arrived_before()
        return () if committed is None else (self._step_by(committed),)

    def _send(self) -> Sequence[RoundReport]:
        """Have the payload travel beside the next step; where the nodes wait for it instead, step by it at once."""
        waits = broadcast_json(self._is_end() or self._parts.departure.is_asked, self._local)
        if waits:
            return (self._step_by(self._commit(self._offer(weighted=self._is_finite))),)
        self._start(self._offer(weighted=self._is_finite))
        self._parts.inner.seek(self.inner_step)
        return ()

    def _contribute(self, norm: float) -> bool:
        """Take the gradient into the momentum and make the payload; False on all local ranks if it is not finite."""
        held, shards = gradient_shards(self._parts.model), self._parts.shards
        gradients = {name: shards.own(name, gradient) for name, gradient in held.items()}  # of copies, this rank's part
        if math.isfinite(norm) and self._memory.accumulate(gradients, scale=self._parts.stepper.lr):
            self._memory.pack(0, self._payloads.payload(0))
            return True
        fields = {"round": self.round + 1, "norm": norm}
        _log.warning("non-finite update: weight 0 this round", extra={"fields": fields})
        return False

    def _arrived_before(self) -> Committed | None:
        """The round that travels beside this step, if one does; from here on there may be a new payload."""
        return self._arrived() if self._is_under_way else None

    def _set_gradients(self, result: Tensor, record: Mapping[str, Any]) -> None:
        """Whenever a round arrives, the optimizer takes it at the place of the schedule that is the round's own."""
        self._parts.inner.seek(self.progress.inner_step)
        super()._set_gradients(result, record)

    def _held(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {PARAMS: parameter_shards(self._parts.model)}
