"""DeMo / DisTrO: decoupled momentum, its largest frequencies as the payload of every step, the sign of their mean.

One step on node i, gradient g, momentum m, all flat float32 buffers (arXiv:2411.19870, algorithm 1, and its source):
    m_i <- beta m_i + lr g_i;  (places, values) = k largest of DCT(chunk(m_i));  m_i <- m_i - alpha IDCT(places, values)
    Q = IDCT(mean over the nodes that sent a coefficient);  theta <- theta (1 - lr wd) - lr sign(Q)
The inner optimizer takes the last step, with Q in place of the gradient. Momenta stay on their nodes and need not be
equal; the outer state is the parameters alone.

With an overlap of one step, a step's payload travels during the next step and is applied at its end: all nodes then
train from parameters that lack their newest gradient. These parameters are still the outer state, equal on all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeroband.config.outer import DemoConfig
from zeroband.elastic.membership.records import Verdict
from zeroband.elastic.rounds.exchange import Exchange
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.model.parallel import clip_grad_norm_
from zeroband.observe.log import get_logger
from zeroband.outer.aggregator import AggregatedExchange
from zeroband.outer.algorithm import PARAMS, StepAlgorithm
from zeroband.outer.local_memory import LocalMemory
from zeroband.outer.payloads import PayloadExchange
from zeroband.outer.scoring import PayloadScores
from zeroband.outer.sparse.residual import SparseResidual
from zeroband.outer.sparse.sparse_codec import SparseCodec, SparseRule
from zeroband.state.flat import FlatLayout, gradient_shards, parameter_shards

MOMENTUM = "momentum"

_log = get_logger(__name__)


def momentum_rule(config: DemoConfig, layout: FlatLayout, *, device: torch.device | None = None) -> SparseResidual:
    """The momentum's rule with its codec. `device`: as `SparseCodec` says."""
    rule = SparseRule(k=config.k, chunk=config.chunk, values=config.values, transform="dct", uneven=config.uneven)
    return SparseResidual(SparseCodec(layout, rule, device=device), decay=config.decay, share=config.share)


class Demo(StepAlgorithm):
    """`clip_norm`: of this node's gradient. The inner optimizer steps by signs (`optim.sign_step`)."""

    local_sections = (MOMENTUM,)

    def __init__(self, parts: OuterParts, config: DemoConfig, *, clip_norm: float | None) -> None:
        super().__init__(parts, config)
        self._clip_norm = clip_norm
        self._norm = 0.0
        """Norm of this node's newest gradient."""
        self.overlaps = config.overlap > 0
        rule = momentum_rule(config, FlatLayout.of(parts.model), device=parts.mesh.local.device)
        kind, clips = AggregatedExchange if config.aggregator else PayloadExchange, config.robust is not None
        memory = LocalMemory(parts, MOMENTUM, [rule])
        self._payloads = kind(parts, memory, [rule.codec], divisor="senders", clips=clips)
        stepper = parts.stepper
        self._scores = PayloadScores(
            parts, self._payloads, PARAMS, lambda outer, alone: outer - alone.sign().mul(stepper.lr)
        )

    def exchange(self) -> Exchange:
        return self._payloads

    def score(self, verdict: Verdict, fragment_index: int) -> tuple[float | None, ...]:
        return self._scores.measure(verdict, fragment_index)

    def contribute(self, exchange: Exchange, round: int) -> bool:
        """Add the gradient to the momentum and make the payload; False on all local ranks if it is not finite."""
        self._norm = clip_grad_norm_(self.parts.model, self._clip_norm).item()
        held, shards = gradient_shards(self.parts.model), self.parts.shards
        gradients = {name: shards.own(name, gradient) for name, gradient in held.items()}  # of copies, this rank's part
        if math.isfinite(self._norm) and self._payloads.take(0, gradients, scale=self.parts.stepper.lr):
            return True
        fields = {"round": round, "norm": self._norm}
        _log.warning("non-finite update: weight 0 this round", extra={"fields": fields})
        return False

    def norm(self, record: Mapping[str, Any] | None) -> float:
        return self._norm

    def set_gradients(self, result: Tensor, record: Mapping[str, Any], *, inner_step: int) -> None:
        """Put a result into the model, and set the optimizer's schedule to the round's own inner step."""
        self.parts.stepper.seek(inner_step)
        super().set_gradients(result, record, inner_step=inner_step)

    def held(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {PARAMS: parameter_shards(self.parts.model)}
