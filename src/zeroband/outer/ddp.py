"""DDP: the nodes' gradients are averaged before every inner optimizer step, so all nodes hold one model at every step.

The outer state is the whole training state: parameters and two moments, 12 bytes of each parameter; where
Muon steps a matrix, which has one moment, zeros stand for the second. The baseline that others are measured against;
for links that carry 8 bytes of each parameter at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.rounds.exchange import CONTRIBUTION
from zeroband.elastic.rounds.interfaces import OuterParts, open_buffers
from zeroband.kernels.scan import norm
from zeroband.outer.every_step import PARAMS, EveryStep
from zeroband.state.flat import gradient_shards, parameter_shards

_ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")


class Ddp(EveryStep):
    """The mean of the gradients is the gradient of all nodes."""

    sections = (PARAMS, *_ADAMW_MOMENTS)

    def __init__(self, parts: OuterParts, *, clip_norm: float | None) -> None:
        self._clip_norm = clip_norm
        named: dict[str, str] = dict(zip(_ADAMW_MOMENTS, parts.stepper.moment_names, strict=True))
        self.sections = tuple(named.get(section, section) for section in self.sections)
        open_buffers(parts.buffers, self.sections)
        super().__init__(parts)

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        self._count_step()
        contribution, gradients = self._buffers[CONTRIBUTION], gradient_shards(self._parts.model)
        self._parts.shards.store(gradients, contribution)
        self._parts.feedback.add_to(contribution, gradients)
        is_finite = self._is_contribution_finite(gradients)
        self._committed = self._commit(self._offer(weighted=is_finite))
        record = self._committed.verdict.record
        self._set_gradients(self._committed.result, record)
        return float(record["grad_norm"])

    def _set_gradients(self, result: Tensor, record: Mapping[str, Any]) -> None:
        """Clipped by the norm that the verdict fixed for all nodes."""
        super()._set_gradients(result, record)
        norm = float(record["grad_norm"])
        if record["weight"] > 0 and self._clip_norm is not None and norm > self._clip_norm:
            for shard in gradient_shards(self._parts.model).values():
                shard.mul_(self._clip_norm / norm)

    def _describe(self, result: Tensor) -> Mapping[str, Any]:
        """For the verdict: one node computes the norm and all clip by the same bits; a joiner learns Adam's age."""
        return {"grad_norm": norm(result), "updates_before": self._parts.stepper.update_count}

    def _describe_founding(self) -> Mapping[str, Any]:
        return {"grad_norm": 0.0, "updates_before": self._parts.stepper.update_count}

    def _held(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {PARAMS: parameter_shards(self._parts.model), **self._parts.stepper.moments()}

    def _seek(self, record: Mapping[str, Any]) -> None:
        updates = record.get("updates_before", 0) + (record["weight"] > 0)
        self._parts.stepper.seek(Progress.from_record(record["progress"]).inner_step, update_count=updates)
