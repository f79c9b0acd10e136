"""SparseLoCo: many inner steps on each node, then the largest values of their change, and a step without momentum.

A round on node i, pseudo-gradient d_i = outer - inner parameters (arXiv:2508.15706):
    e_i <- beta e_i + d_i;  (places, values) = k largest of each chunk, two bits;  e_i <- e_i - decoded
    theta <- theta - lr sum_i w_i decoded_i / W,  w_i the share of node i in the round
W is, of each value, the sum of w_i over the nodes that sent it (divisor = "senders", as in the code behind the
published runs), or 1 (divisor = "members", as in the paper). Error buffers stay on their nodes; the outer state is the
parameters alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from zeroband.config.outer import OuterSGDConfig, SparseLocoConfig
from zeroband.elastic.membership.records import Verdict
from zeroband.elastic.rounds.exchange import Exchange
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.outer.algorithm import PARAMS, Algorithm
from zeroband.outer.local_memory import LocalMemory
from zeroband.outer.payloads import PayloadExchange
from zeroband.outer.scoring import PayloadScores
from zeroband.outer.sparse.residual import SparseResidual
from zeroband.outer.sparse.sparse_codec import Divisor, SparseCodec, SparseRule
from zeroband.state.flat import FlatLayout
from zeroband.state.fragments import arranged

ERRORS = "errors"

_DIVISORS: Mapping[str, Divisor] = {"senders": "senders", "members": "none"}
"""Shares of all members add up to 1."""


def error_rule(config: SparseLocoConfig, layout: FlatLayout, *, device: torch.device | None = None) -> SparseResidual:
    """The error buffer's rule with its codec. `device`: as `SparseCodec` says."""
    rule = SparseRule(
        k=config.k,
        chunk=config.chunk,
        flat_chunk=config.chunk**2,
        values=config.values,
        transform=None,
        keeps_density=True,
    )
    return SparseResidual(SparseCodec(layout, rule, device=device), decay=config.decay)


class SparseLoCo(Algorithm):
    """Outer state: the parameters alone. A late node's pending contribution is in its payload."""

    local_sections = (ERRORS,)

    def __init__(self, parts: OuterParts, config: SparseLocoConfig) -> None:
        super().__init__(parts, config)
        self.outer_sgd = OuterSGDConfig(lr=config.lr, momentum=0.0, nesterov=False)
        layout, fragments = FlatLayout.of(parts.model), parts.fragments
        rule = partial(error_rule, config, device=parts.mesh.local.device)
        rules = [rule(layout.only(fragment.names)) for fragment in fragments]
        self._payloads = PayloadExchange(
            parts,
            LocalMemory(parts, ERRORS, rules),
            [rule(arranged(layout, [fragment])).codec for fragment in fragments],
            divisor=_DIVISORS[config.divisor],
            counts_tokens=True,
            clips=config.robust is not None,
            shows_own=config.merge == "eager",
        )
        self._scores = PayloadScores(parts, self._payloads, PARAMS, lambda outer, alone: outer - alone.mul(config.lr))

    def exchange(self) -> Exchange:
        return self._payloads

    def step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        outer[PARAMS].sub_(result.mul(self.config.lr))

    def score(self, verdict: Verdict, fragment_index: int) -> tuple[float | None, ...]:
        return self._scores.measure(verdict, fragment_index)
