"""DDP: the nodes' gradients are averaged before every inner optimizer step, so all nodes hold one model at every step.

The outer state is the whole training state: parameters and two moments, 12 bytes per parameter. Matrices that Muon
steps have one moment; the second is zeros. This is the baseline for the other algorithms; it suits links that carry
8 bytes per parameter at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.rounds.exchange import Exchange
from zeroband.elastic.rounds.interfaces import CONTRIBUTION, OuterParts, open_buffers
from zeroband.kernels.scan import norm
from zeroband.outer.algorithm import PARAMS, StepAlgorithm
from zeroband.state.flat import gradient_shards, parameter_shards


class Ddp(StepAlgorithm):
    """The mean of the gradients is the gradient of all nodes."""

    sections = (PARAMS, "exp_avg", "exp_avg_sq")
    """The moments are AdamW's; with another inner optimizer they are its own."""
    has_moments = True

    def __init__(self, parts: OuterParts, *, clip_norm: float | None) -> None:
        super().__init__(parts)
        self._clip_norm = clip_norm
        self.sections = (PARAMS, *self._moments())
        open_buffers(parts.buffers, self.sections)

    def _moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        """This rank's shards of the inner optimizer's moments, by section."""
        return self.parts.stepper.moments()

    def contribute(self, exchange: Exchange, round: int) -> bool:
        gradients = gradient_shards(self.parts.model)
        self.parts.shards.store(gradients, self.parts.buffers[CONTRIBUTION])
        return exchange.load(round, 0, gradients)

    def norm(self, record: Mapping[str, Any] | None) -> float:
        assert record is not None, "a round is waited for"
        return float(record["grad_norm"])

    def set_gradients(self, result: Tensor, record: Mapping[str, Any], *, inner_step: int) -> None:
        """Put a result into the model, clipped by the norm that the verdict fixed for all nodes."""
        super().set_gradients(result, record, inner_step=inner_step)
        norm = self.norm(record)
        if record["weight"] > 0 and self._clip_norm is not None and norm > self._clip_norm:
            for shard in gradient_shards(self.parts.model).values():
                shard.mul_(self._clip_norm / norm)

    def describe(self, plan: RoundPlan, result: Tensor, before: Mapping[str, Any]) -> Mapping[str, Any]:
        """Record the norm, so that all nodes clip by the same bits, and Adam's update count for joiners."""
        return {"grad_norm": norm(result), "updates_before": self.parts.stepper.update_count}

    def describe_founding(self, before: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"grad_norm": 0.0, "updates_before": self.parts.stepper.update_count}

    def held(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {PARAMS: parameter_shards(self.parts.model), **self._moments()}

    def seek(self, record: Mapping[str, Any]) -> None:
        updates = record.get("updates_before", 0) + (record["weight"] > 0)
        self.parts.stepper.seek(Progress.from_record(record["progress"]).inner_step, update_count=updates)
